"""Two builds side by side: what differs in cost, memory, transfers, and operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tapestry.build.store import Build
from tapestry.ir.graph import Op
from tapestry.viz.explain import Document, document
from tapestry.viz.format import duration, human, listed, moves_text, shape_text, signed, together, wrapped

SHOWN = 24  # kinds of operations in the text; JSON has all operations
KEYS: tuple[Callable[[Op], Sequence[object]], ...] = (
    lambda op: op.outs,
    lambda op: (op.source,) if op.source else (),
    lambda op: op.source,
)
"""What two operations have in common that are one and the same, the surest first."""
SAID: Mapping[str, Callable[[Any], str]] = {
    "mesh": str,
    "moves": lambda moves: "; ".join(moves_text(moves)),
    "requests": lambda asked: ", ".join(str(i) for v in asked.values() for i in v),
}
"""Facts in words, which are shown where they differ."""


def compare(a: Build, b: Build, found_a: Document | None = None, found_b: Document | None = None) -> Document:
    """What differs between two builds; every pair is [first, second]. ``same`` when nothing does.

    ``operations`` are those whose split, block or seconds differ, largest change of time first; ``only_in_first`` and
    ``only_in_second`` those without a counterpart.
    """
    found_a, found_b = found_a or document(a), found_b or document(b)
    pairs, only_a, only_b = match(a.plan.graph.ops, b.plan.graph.ops)
    rows = [_row(found_a["operations"][i], found_b["operations"][j]) for i, j in pairs]
    rows = [r for r in rows if r is not None]
    rows.sort(key=lambda r: -abs(_total(r, 1) - _total(r, 0)))
    facts = {
        "mesh": [_mesh(x) for x in (a, b)], "moves": [list(x.moves) for x in (a, b)],
        "requests": [x.report.get("requests", {}) for x in (a, b)],
        "objective_s": [x.report["objective_s"] for x in (a, b)],
        "simulated_s": [x["simulated"]["seconds"] for x in (found_a, found_b)],
        "peak_bytes": [max(x.peak_bytes) for x in (a, b)],
        "host_load_bytes": [x.report["host_load_bytes"] for x in (a, b)],
    }  # fmt: skip
    kinds = _kinds(a.report["transfers"], b.report["transfers"])
    alone = [[x["operations"][i]["outs"][0] for i in only] for x, only in ((found_a, only_a), (found_b, only_b))]
    same = all(x == y for x, y in facts.values()) and not (kinds or rows or alone[0] or alone[1])
    return {
        "same": same,
        "models": [a.model, b.model],
        **facts,
        "transfers": kinds,
        "operations": rows,
        "only_in_first": alone[0],
        "only_in_second": alone[1],
        "matched": len(pairs),
    }


def match(a: Sequence[Op], b: Sequence[Op]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """(pairs, left over in a, left over in b): operations that write a tensor of the same name, else that came from exactly
    the same ONNX nodes, else that share one."""
    pairs: list[tuple[int, int]] = []
    left = dict(enumerate(b))
    rest = dict(enumerate(a))
    for key in KEYS:
        by_key: dict[object, list[int]] = {}
        for j, op in left.items():
            for k in key(op):
                by_key.setdefault(k, []).append(j)
        for i, op in list(rest.items()):
            counterpart = next((j for k in key(op) for j in by_key.get(k, ()) if j in left), None)
            if counterpart is not None:
                pairs.append((i, counterpart))
                del left[counterpart], rest[i]
    return sorted(pairs), list(rest), list(left)


def _row(a: Document, b: Document) -> Document | None:
    keys = ("split", "block", "seconds", "transfer_seconds")
    if all(a[k] == b[k] for k in keys):
        return None
    nodes = list(dict.fromkeys((*a["nodes"], *b["nodes"])))
    return {"name": a["outs"][0], "alike": a["alike"], "part": a["part"], "nodes": nodes, **{k: [a[k], b[k]] for k in keys}}


def _total(row: Document, which: int) -> float:
    return row["seconds"][which] + row["transfer_seconds"][which]


def _mesh(build: Build) -> str:
    return ", ".join(f"{a.name}={a.size}" for a in build.plan.mesh) + f" ({build.topology['name']})"


def _kinds(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[Document]:
    first, second = ({r["kind"]: r for r in rows} for rows in (a, b))
    none = {"count": 0, "bytes": 0}
    out: list[Document] = []
    for kind in dict.fromkeys((*first, *second)):
        x, y = first.get(kind, none), second.get(kind, none)
        if (x["count"], x["bytes"]) != (y["count"], y["bytes"]):
            out.append({"kind": kind, "count": [x["count"], y["count"]], "bytes": [x["bytes"], y["bytes"]]})
    return out


def diff_text(comparison: Document) -> str:
    """A comparison as a person reads it."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(d: Document) -> Iterator[str]:
    if d["same"]:
        yield f"the same plan: {d['matched']} operations, none differs"
        return
    yield f"{'':<14} first → second"
    for key, name, unit in (
        ("objective_s", "objective", duration),
        ("simulated_s", "simulated", duration),
        ("peak_bytes", "peak memory", human),
        ("host_load_bytes", "host loads", human),
    ):
        x, y = d[key]
        yield f"{name:<14} {unit(x)} → {unit(y)}{f' ({y / x - 1:+.2%})' if x and x != y else ''}"
    for name, said in SAID.items():
        x, y = d[name]
        if x != y:
            yield from wrapped(f"{name:<14} {said(x) or 'none'} → {said(y) or 'none'}", " " * 15)
    for r in d["transfers"]:
        (m, n), (x, y) = r["count"], r["bytes"]
        yield f"{r['kind']:<14} {m} times, {human(x)} → {n} times, {human(y)}"
    groups = list(together(d["operations"], lambda r: (r["alike"], str(r["split"]), str(r["block"]))).values())
    groups.sort(key=lambda rows: -abs(sum(_total(r, 1) - _total(r, 0) for r in rows)))
    yield f"operations: {d['matched']} in both, {len(d['operations'])} of them differ"
    for rows in groups[:SHOWN]:
        yield from _counterparts_text(rows)
    if len(groups) > SHOWN:
        yield f"  … and {sum(map(len, groups[SHOWN:]))} more (--json has all)"
    for which in ("first", "second"):
        names = d[f"only_in_{which}"]
        if names:
            yield from wrapped(f"only in the {which}: {listed(names)}")


def _counterparts_text(rows: Sequence[Document]) -> Iterator[str]:
    """Counterparts that differ in the same way, once; seconds are of all of them."""
    one, times = rows[0], f" ×{len(rows)}" if len(rows) > 1 else ""
    (s, t), (b, c) = one["split"], one["block"]
    own, fetched = ([sum(r[k][n] for r in rows) for n in (0, 1)] for k in ("seconds", "transfer_seconds"))
    nodes = f" (from {', '.join(one['nodes'])})" if one["nodes"] and not times and not one["part"] else ""
    yield from wrapped(f"  {one['alike']}{times}{nodes}: {signed(own[1] + fetched[1] - own[0] - fetched[0])}")
    if s != t or b != c:
        yield from wrapped(f"    split {s} block {shape_text(tuple(b))} → {t} block {shape_text(tuple(c))}", " " * 6)
    kernels, fetching = (" → ".join(map(duration, x)) for x in (own, fetched))
    yield f"    kernels {kernels}, fetching and merging {fetching}"
