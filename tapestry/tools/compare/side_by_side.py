"""The command: our plan, theirs, and the changes of theirs that gain most, each planned for itself."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tapestry.arguments import shapes
from tapestry.build.store import Build
from tapestry.cli.outcome import Command, Outcome, bar
from tapestry.compiler import pipeline
from tapestry.compiler.pass_runner import Runner
from tapestry.errors import PlanError, TapestryError, refusing
from tapestry.frontends.choices import opened_source, options
from tapestry.ir.plan import Mesh
from tapestry.options import FLAGS, Options
from tapestry.plan.requests import parse_layouts, read_pins
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plugins import tool
from tapestry.tools.compare.ideas import IDEAS, cuts_of, pins_of
from tapestry.viz import build_diff
from tapestry.viz.format import duration, human, signed

MOST, WORTH = 3, 1 - 1e-3  # changes that are shown, and of the time, what one must leave at most
AXES = {"colwise": "out", "rowwise": "in", "embedding_rowwise": "vocab", "embedding_colwise": "out"}
Document = dict[str, Any]


def side_by_side(args: argparse.Namespace) -> Outcome:
    """``tapestry compare``: two plans of a model side by side, both verified."""
    given = {name: getattr(args, name) for name in FLAGS} | {"shapes": shapes(args.shapes)}
    asked = options(opened_source(args.model, None, None), cast("Any", given))
    annotated = args.beside.endswith(".onnx")
    with bar(args, "compare") as advance:

        def report(phase: str, name: str) -> None:
            advance(None, None, f"{phase}: {name}")

        begun = pipeline.begun(replace(asked, sharding=False) if annotated else asked, report)
        pins, layouts, notes = ([], [], []) if annotated else _asked(args, begun)
        ours = _searched(begun, asked.pins, asked.layouts)
        if annotated:
            theirs = pipeline.begun(replace(asked, model=Path(args.beside)), report)
            pipeline.searched(theirs)
        else:
            theirs = _searched(begun, [*asked.pins, *pins], [*asked.layouts, *layouts])
        changes, all_s = _changes(begun, asked, pins, layouts, theirs.at.plan)
        first, second = (pipeline.finished(r).build for r in (ours, theirs))
    document: Document = {
        "with": args.beside, "pins": pins, "layouts": layouts, "notes": notes, "changes": changes, "changed_s": all_s,
        "ours": _facts(first), "theirs": _facts(second), "diff": build_diff.compare(first, second),
    }  # fmt: skip
    return Outcome(document, lambda: print(*_lines(document), sep="\n"), insist=True)


def _asked(args: argparse.Namespace, begun: Runner) -> tuple[list[str], list[str], list[str]]:
    """Pins and layouts of what ours is held against, and what is said of them.

    Raises:
        TapestryError: it is no idea and no plan, or one that does not compute the model: with the cell.
    """
    graph, mesh = begun.at.graph, begun.at.topology.mesh
    if args.beside in IDEAS:
        pins, layouts = IDEAS[args.beside](graph, mesh)
        if not pins:
            raise PlanError("it says nothing of this model", where=f"--with {args.beside}", hint=f"one of {', '.join(IDEAS)}")
        return pins, layouts, []
    if not Path(args.beside).is_file():
        hint = f"one of {', '.join(IDEAS)}, or a file: a tp-plan, DTensor's placements, pins, an annotated model"
        raise TapestryError("there is no such idea or file", where=f"--with {args.beside}", hint=hint)
    with refusing(TapestryError, "it is no plan", args.beside, "a tp-plan, DTensor's placements, or pins, a line each"):
        return _pins_in(args, Path(args.beside).read_text(encoding="utf-8"), mesh)


def _pins_in(args: argparse.Namespace, text: str, mesh: Mesh) -> tuple[list[str], list[str], list[str]]:
    """Pins and layouts of a file, and what is said of them."""
    try:
        said: object = json.loads(text)
    except ValueError:
        said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if isinstance(said, list):
        return list(map(str, cast("list[object]", said))), [], []
    whole = cast("Mapping[str, Any]", said if isinstance(said, dict) else {})
    plan = cast("Mapping[str, Any]", whole.get("tp_plan", whole))
    if plan and all(isinstance(v, list) for v in plan.values()):
        return [], [text for name, places in plan.items() for text in _placed(name, places, mesh)], []
    styles = {
        k: str(v).removesuffix("_rep").removesuffix("_gather_output").removesuffix("_split_input") for k, v in plan.items()
    }
    pins = [f"{k}:{AXES[v]}={mesh[-1].name}" for k, v in styles.items() if v in AXES]
    if not pins:
        raise TapestryError(
            "nothing in it cuts anything", where=args.beside, hint='a tp-plan: {"layers.*.mlp.up_proj": "colwise"}'
        )
    return pins, [], _proved(args, dict(plan), mesh)


def _placed(name: str, places: Sequence[str], mesh: Mesh) -> Iterator[str]:
    """A layout from DTensor's placements: one for each mesh axis, as in ``["Replicate()", "Shard(0)"]``."""
    cut = {a.name: p[p.index("(") + 1 : -1] for p, a in zip(places, mesh, strict=True) if str(p).startswith("Shard")}
    yield f"{name}:" + (",".join(f"{k}={a}" for a, k in cut.items()) or "replicated")


def _proved(args: argparse.Namespace, plan: Document, mesh: Mesh) -> list[str]:
    """What the prover says of a tp-plan.

    Raises:
        PlanError: it computes something else, and in which cell.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps({"mesh": {mesh[-1].name: mesh[-1].size}, "tp_plan": plan}))
        try:
            found = tool(Command, "prove")(argparse.Namespace(model=args.model, program=[path], shapes=args.shapes)).document
        except PlanError:  # its parts do not even fit each other
            raise
        except TapestryError as e:
            return [f"whether it computes the model was not decided: {e.text()}"]
    said = cast("Document", found)
    if said["status"] == "refuted":
        raise PlanError("the plan does not compute the model", where=args.beside, why=said["witness"]["text"])
    return [f"{said['status']}: {said.get('reason') or 'it computes the model'}"]


def _searched(begun: Runner, pins: Sequence[str], layouts: Sequence[str]) -> Runner:
    """The plan with pins and layouts, from the lifted model."""
    at = begun.at
    inputs, outputs = parse_layouts(layouts, at.graph, at.topology.mesh)
    inputs, outputs = {**at.constraints.inputs, **inputs}, {**at.constraints.outputs, **outputs}  # (annotations say some)
    kept = replace(at.constraints, pins=pins, layouts=layouts, inputs=inputs, outputs=outputs)
    asked = replace(at.options, pins=pins, layouts=layouts)
    new = replace(begun, at=at.made(options=asked, constraints=kept), rows=[], seconds={}, printed={})
    pipeline.searched(new)
    return new


def _changes(
    begun: Runner, asked: Options, pins: list[str], layouts: list[str], theirs: PricedPlan
) -> tuple[list[Document], float]:
    """The changes that gain most: a pin less, and what is chosen in its place; and seconds with all of them."""

    def without(some: Sequence[str]) -> PricedPlan:
        left = [p for p in pins if p not in some]
        return _searched(begun, [*asked.pins, *left], [*asked.layouts, *layouts]).at.plan

    found = [(p, without([p])) for p in pins]
    found = sorted((f for f in found if f[1].objective < WORTH * theirs.objective), key=lambda f: f[1].objective)[:MOST]
    graph, mesh = begun.at.graph, begun.at.topology.mesh
    rows: list[Document] = []
    for pin, plan in found:
        made = {t: s.dims for op, s in zip(plan.plan.graph.ops, plan.plan.strategies, strict=True) for t in op.outs}
        ops = {i: made[t] for i, _ in read_pins([pin], graph, mesh) if (t := graph.ops[i].outs[0]) in made}
        gain = theirs.objective - plan.objective
        rows.append({"instead_of": pin, "pins": pins_of(graph, mesh, cuts_of(graph, mesh, ops)), "gain_s": gain})
    return rows, without([r["instead_of"] for r in rows]).objective if rows else theirs.objective


def _facts(build: Build) -> Document:
    kinds = build.report["transfers"]
    moved, transfers = (sum(t[key] for t in kinds) for key in ("bytes", "count"))
    seconds = build.report["objective_s"]
    return {"objective_s": seconds, "moved_bytes": moved, "transfers": transfers, "peak_bytes": max(build.peak_bytes)}


def _lines(d: Document) -> Iterator[str]:
    yield f"{'':12}{'ours':>14}  {Path(d['with']).name:>12}"
    for key, name, unit in (
        ("objective_s", "time", duration), ("moved_bytes", "moved", human), ("transfers", "transfers", str),
        ("peak_bytes", "peak memory", human),
    ):  # fmt: skip
        yield f"{name:12}{unit(d['ours'][key]):>14}{unit(d['theirs'][key]):>14}"
    yield from d["notes"]
    if d["changes"]:
        yield f"\nthe changes of it that gain most; all of them: {duration(d['changed_s'])}"
    for r in d["changes"]:
        yield f"  {signed(-r['gain_s'])}  {r['instead_of']} → {' '.join(r['pins']) or 'no pin'}"
    yield "\nstep by step, from ours to it"
    yield build_diff.diff_text(d["diff"]).rstrip()
