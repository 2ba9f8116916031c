"""The command that shows tile patterns, tensor dictionaries and topologies."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapestry.arguments import shapes
from tapestry.cli.outcome import Outcome
from tapestry.errors import TapestryError
from tapestry.interop.tile_changes import Change, exact, naive
from tapestry.interop.tile_patterns import SUPPRESSED, Tiling, slide_slips
from tapestry.ir.kernel import shape
from tapestry.ir.types import itemsize
from tapestry.plugins import tool
from tapestry.viz.format import human, shape_text, wrapped
from tapestry.viz.tables import Sheet, sheets
from tapestry.viz.tool_kinds import Pictures

ROWS, COLUMNS = 12, 60  # characters of a sheet


def tiles(args: argparse.Namespace) -> Outcome:
    """``tapestry tiles``: a tiling of a shape, the tilings of a model, or what a topology is called."""
    asked = [args.model is not None, args.pattern is not None, args.topology is not None]
    if sum(asked) != 1:
        raise TapestryError("nothing to show, or too much", hint="--shape 7x4 --pattern 5,1; or a model; or --topology MAP")
    if args.topology is not None:
        return _topology(args.topology)
    return _model(args) if args.model is not None else _pattern(args)


def _pattern(args: argparse.Namespace) -> Outcome:
    from tapestry.interop.tensor_dictionary import tiling_of
    from tapestry.interop.tile_patterns import parse

    extents = _extents(args.shape)
    tiling = tiling_of(args.pattern, None if args.assign is None else _assignment(args.assign))
    after = None if args.to is None else parse(args.to)
    tiling.over(len(extents))
    shown = tiling_document(extents, tiling, after, args.dtype)
    if args.svg:
        tool(Pictures).tiles(extents, tiling).save(args.svg)
        shown["svg"] = str(args.svg)
    return Outcome(shown, lambda: print(tiling_text(shown, extents, tiling), end=""), insist=True)


def _extents(items: list[str]) -> tuple[int, ...]:
    if len(items) != 1 or not re.fullmatch(r"\d{1,12}([x,]\d{1,12})*|\(\)", items[0]):
        raise TapestryError(f"'{' '.join(items)}' is no shape", where="--shape", hint="7x4; () for a scalar")
    return tuple(int(n) for n in re.findall(r"\d+", items[0]))


def _assignment(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"-?\d{1,9}(,-?\d{1,9})*", text):
        raise TapestryError(f"'{text}' is no assignment", where="--assign", hint="3,2,4,1,0; -1 for a tile that nobody has")
    return tuple(map(int, text.split(",")))


def _topology(text: str) -> Outcome:
    from tapestry.interop import instance_map

    found = instance_map.parse_instances(text)
    names = instance_map.recognise(found)
    one_way = sorted((i, j) for i, j in found.links if (j, i) not in found.links)
    rows = [{"kind": s.kind, "detail": list(s.detail), "two_way": s.two_way, "notes": list(s.notes)} for s in names]
    document: dict[str, Any] = {
        "map": str(found),
        "instance_count": found.count,
        "links": len(found.links),
        "one_way": one_way,
        "names": rows,
    }

    def text_of() -> None:
        print(f"{found.count} instances, {len(found.links)} links, {len(one_way)} of them one way")
        for s in names:
            sizes = f" {'×'.join(map(str, s.detail))}" if s.kind == "torus" else f" {list(s.detail)}" if s.detail else ""
            print(f"  {s.kind}{sizes}{'' if s.two_way else ', one way'}")
            for note in s.notes:
                print(f"    {note}")

    return Outcome(document, text_of, insist=True)


def _model(args: argparse.Namespace) -> Outcome:
    """The slides' evaluation of a model beside a plan that keeps to the same tilings."""
    import numpy as np

    from tapestry import api
    from tapestry.sharding import tiled_evaluation

    path = Path(args.model)
    build = api.compile(path, shapes=shapes(args.shape), topology="cpu")
    feeds = build.random_feeds(0)
    done = tiled_evaluation.evaluated(path, feeds)
    ours = build.run(feeds)
    wrong = [s.node for s in done.steps if s.wrong]
    agree = all(np.allclose(ours[n], a, rtol=1e-3, atol=1e-4, equal_nan=True) for n, a in done.outputs.items())
    transfers = build.report["transfers"]
    document: dict[str, Any] = {
        "model": str(path), "devices": build.build.plan.devices, "tilings": {t: str(g) for t, g in done.tilings.items()},
        "slides": {
            "bytes": sum(s.nbytes for s in done.steps), "wrong": wrong,
            "nodes": [{"node": s.node, "op_type": s.op_type, "wrong": s.wrong, "bytes": s.nbytes,
                       "moves": [{"tensor": t, "kind": k, "bytes": n} for t, k, n in s.moves]} for s in done.steps],
        },
        "exact": {"bytes": sum(t["bytes"] for t in transfers), "transfers": transfers},
        "notes": build.report["requests"].get("sharding", {}).get("notes", []), "outputs_agree": agree,
    }  # fmt: skip
    return Outcome(document, lambda: _print_model(document), status=0 if agree else 1, insist=True)


def _print_model(d: dict[str, Any]) -> None:
    from tapestry.viz.format import human

    print(f"{d['model']}: {len(d['tilings'])} tilings over {d['devices']} instances")
    for t, text in d["tilings"].items():
        print(f"  {t} {text}")
    print(f"as the slides say: {human(d['slides']['bytes'])}")
    for n in d["slides"]["nodes"]:
        for m in n["moves"]:
            print(f"  {n['node']}: {m['kind']} of {m['tensor']}, {human(m['bytes'])}")
        if n["wrong"]:
            print(f"  {n['node']}: equal patterns, so nothing is sent; wrong, a {n['op_type']} on own tiles has other values")
    print(f"as planned: {human(d['exact']['bytes'])}")
    for t in d["exact"]["transfers"]:
        print(f"  {t['count']} {t['kind']}, {human(t['bytes'])}")
    for note in d["notes"]:
        print(f"  not kept: {note}")
    print(f"outputs of the plan {'agree with' if d['outputs_agree'] else 'are not'} the ONNX reference's")


# What is printed: a table of tiles, a drawing, and what a change of tiling moves.


def tiling_document(extents: tuple[int, ...], tiling: Tiling, after: Tiling | None, dtype: str) -> dict[str, Any]:
    """Everything that is said of a tiling, as data; of a change to ``after`` the bytes of both evaluations."""
    rows: list[dict[str, Any]] = []
    for tile, instance in tiling.entries:
        box = tiling.tile(tile, extents)
        ends = {"start": [lo for lo, _ in box], "stop": [hi for _, hi in box], "size": list(shape(box))}
        rows.append({"tile": tile, "instance": None if instance == SUPPRESSED else instance, **ends})
    out: dict[str, Any] = {
        "shape": list(extents), "pattern": list(tiling.pattern), "assignment": list(tiling.instances),
        "text": str(Tiling(tiling.pattern, tiling.instances)), "count": tiling.count, "tiles": rows,
        "slides": slide_slips(tiling, extents),
    }  # fmt: skip
    if after is not None:
        ways = {"slides": naive(tiling, after, extents), "exact": exact(tiling, after, extents)}
        out["change"] = {"to": str(after), "dtype": dtype, **{k: _change(c, dtype) for k, c in ways.items()}}
    return out


def _change(c: Change, dtype: str) -> dict[str, Any]:
    sends = [{"from": s.src, "to": s.dst, "box": [list(p) for p in s.box]} for s in c.sends]
    return {"kind": c.kind, "bytes": c.cells() * itemsize(dtype), "sends": sends}


def tiling_text(d: Mapping[str, Any], extents: tuple[int, ...], tiling: Tiling) -> str:
    """The same for a person."""
    held = [r for r in d["tiles"] if r["instance"] is not None]
    what = f"{d['count']} tile{'s' * (d['count'] > 1)} on {len(held)} instance{'s' * (len(held) > 1)}"
    lines = [f"{d['text']} of {shape_text(extents)}: {what}", ""]
    table: list[tuple[str, ...]] = [("tile", "instance", "start", "stop", "size")]
    for r in d["tiles"]:
        ends = ("{" + ", ".join(map(str, r[k])) + "}" for k in ("start", "stop", "size"))
        table.append((str(r["tile"]), "none" if r["instance"] is None else str(r["instance"]), *ends))
    wide = [max(len(row[k]) for row in table) for k in range(5)]
    lines += [
        "  ".join(c.rjust(w) if k < 2 else c.ljust(w) for k, (c, w) in enumerate(zip(row, wide, strict=True))).rstrip()
        for row in table
    ]
    for sheet in sheets(tiling, extents):
        lines += ["", *drawn(sheet)]
    for note in d["slides"]:
        lines += wrapped(f"the slides' formulas differ: {note}")
    if "change" in d:
        lines += ["", f"to {d['change']['to']}, {d['change']['dtype']}:"]
        for k, name in (("slides", "as the slides say"), ("exact", "what is lacking")):
            c = d["change"][k]
            sends = f"{len(c['sends'])} message{'s' * (len(c['sends']) != 1)}"
            lines.append(f"  {name}: {human(c['bytes']):>10} in {sends} ({c['kind']})")
    return "\n".join(lines) + "\n"


def drawn(sheet: Sheet) -> list[str]:
    """A sheet in characters: each cell (or, of large axes, each sampled one) shows the instances that hold it."""
    wide = max((len(t[2]) for t in sheet.tiles), default=1)
    n, m = min(sheet.rows, ROWS), min(sheet.columns, max(1, COLUMNS // (wide + 1)))
    lines = [f"{sheet.title}{'' if (n, m) == (sheet.rows, sheet.columns) else ' (not every cell is shown)'}"]
    for i in range(n):
        r = i * sheet.rows // n
        row = [_label(sheet, r, j * sheet.columns // m) for j in range(m)]
        lines.append("  " + " ".join(x.rjust(wide) for x in row))
    return lines


def _label(sheet: Sheet, r: int, c: int) -> str:
    return next((x for (a, b), (p, q), x in sheet.tiles if a <= r < b and p <= c < q), "")
