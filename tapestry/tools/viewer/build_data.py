"""Everything that the page shows of one build, as data."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapestry.build.store import Build
from tapestry.codegen.kernel_sources import kernels_of_steps, named_kernels
from tapestry.errors import LawError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.plan import Mesh, Strategy
from tapestry.ir.program import Launch
from tapestry.ir.provenance import operation_names
from tapestry.plan.alternatives import priced_strategies
from tapestry.plan.topology import from_data
from tapestry.tools.viewer.op_shapes import Row, shape_of, text_of
from tapestry.tools.viewer.program_tables import edges, lanes, memory, tables
from tapestry.tools.viewer.rewrite_steps import steps
from tapestry.verify import certificate
from tapestry.verify.rewriting.rewrite_log import read
from tapestry.viz import explain, format
from tapestry.viz.format import split_text

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A build, and what lies beside its plan.

    Attributes:
        name: what the page calls it.
        laws, evidence: of its certificate.
        rewrites: its log, or nothing.
        measured: what a trace of a real run says by step: rows of ``run --trace``.
    """

    build: Build
    name: str
    laws: Mapping[str, int]
    evidence: Sequence[Mapping[str, Any]] = ()
    rewrites: bytes = b""
    measured: Row | None = None


def document(source: Source, say: Say = lambda what: None) -> Row:
    """The data of one build."""
    build = source.build
    plan, program = build.plan, build.program
    say("simulate")
    timed = explain.schedule(build)
    say("alternatives")
    facts = explain.document(build, why=True, timed=timed)
    alike = format.signatures(plan)
    shapes, of_op = _shapes(plan.graph, alike)
    say("kernels")
    kernels, launched = _kernels(build)
    say("check")
    out: Row = {
        "name": source.name, "model": build.model, "report": dict(build.report), "explain": facts,
        "mesh": [[a.name, a.size, list(a.weights), list(a.order)] for a in plan.mesh],
        "devices": program.devices, "shapes": shapes,
        "ops": _operations(build, of_op, launched), "tensors": _tensors(plan.graph),
        "program": tables(program), "edges": edges(program), "kernels": kernels,
        "lanes": lanes(timed), "memory": memory(program, dict(enumerate(build.peak_bytes))),
        "folds": [[f.first, f.length, f.times, f.label] for f in format.runs(plan, alike)],
        "certificate": {"laws": dict(source.laws), "evidence": list(source.evidence), "refused": refusal(build)},
    }  # fmt: skip
    say("rewrites")
    out["rewrites"] = steps(read(source.rewrites, source.name)) if source.rewrites else []
    return out | ({"measured": source.measured} if source.measured else {})


def _shapes(graph: Graph, alike: Sequence[str]) -> tuple[list[Row], list[int]]:
    """Distinct operations, and which of them each operation is."""
    numbers: dict[object, int] = {}
    shapes: list[Row] = []
    of_op: list[int] = []
    for op, kind in zip(graph.ops, alike, strict=True):
        key = (kind, None if isinstance(op, Block) else tuple(op.ins))
        if key not in numbers:
            numbers[key] = len(shapes)
            shapes.append(shape_of(op, graph))
        of_op.append(numbers[key])
    return shapes, of_op


def _operations(build: Build, of_op: Sequence[int], launched: Mapping[int, Sequence[str]]) -> list[Row]:
    plan = build.plan
    others = priced_strategies(plan, from_data(build.topology))
    names = operation_names(plan.graph)
    out: list[Row] = []
    for i, (op, s) in enumerate(zip(plan.graph.ops, plan.strategies, strict=True)):
        mesh, name = plan.stage(i).mesh, names[i]
        ins = [r.tensor for r in op.reads] if isinstance(op, Block) else [t for t in op.ins if t]
        rows = [{"split": split_text(op, a, mesh), "seconds_more": t, "pins": _pins(name, a, mesh)} for a, t in others[i]]
        out.append(
            {
                "name": name,
                "shape": of_op[i],
                "text": text_of(op, plan.graph),
                "ins": ins,
                "others": rows,
                "cut": list(s.dims),
                "pins": _pins(name, s, mesh),
                "kernels": launched.get(i, ()),
            }
        )
    return out


def _pins(name: str, s: Strategy, mesh: Mesh) -> list[str]:
    """The pins that insist on a strategy's cuts, or on none."""
    return [f"{name}:{d}={a.size}@{a.name}" if d else f"{name}:replicated@{a.name}" for d, a in zip(s.dims, mesh, strict=True)]


def _tensors(graph: Graph) -> dict[str, list[Any]]:
    """Type, shape and what each tensor is: an input, a weight, an output of the model, or made on the way."""
    out: dict[str, list[Any]] = {}
    for t in graph.tensors.values():
        what = "weight" if t.name in graph.weights else "input" if t.name in graph.inputs else ""
        out[t.name] = [t.dtype, list(t.shape), what or ("output" if t.name in graph.outputs else ""), t.about]
        out[t.name].append(0 if t.on_host else t.nbytes)
    return out


def _kernels(build: Build) -> tuple[Row, dict[int, list[str]]]:
    """Kernel sources by file name, and the files of each operation's launches."""
    graph, program = build.plan.graph, build.program
    found, of_step = kernels_of_steps(graph, program)
    made = named_kernels(graph, program, build.target, build.precision, build.knobs)
    files = dict(zip(found, made, strict=True))
    of_op: dict[int, list[str]] = {}
    for at, key in of_step.items():
        step = program.steps[at]
        assert isinstance(step, Launch)
        if key and files[key] not in of_op.setdefault(step.op, []):
            of_op[step.op].append(files[key])
    sources = {n: {"source": t.source, "mode": k.mode, "block": k.block} for n, (k, t) in made.items()}
    return sources, of_op


def refusal(build: Build) -> Row | None:
    """Why the checker refuses a build's program, and where; nothing where every law holds."""
    plan = build.plan
    try:
        certificate.check(
            plan.annotated(),
            build.program,
            places=plan.places,
            streamed=plan.streamed,
            stated_peak=list(build.peak_bytes),
        )
    except LawError as e:
        return {"law": e.law, "what": e.what, "where": e.where, "why": e.why, **_witness(build, e)}
    return None


def _witness(build: Build, e: LawError) -> Row:
    """The step, operation, device, tensor and cell that a refusal names, as far as it names them."""
    out: Row = {"step": None, "op": None, "device": None, "tensor": None, "cell": None}
    if m := re.search(r"\bstep (\d+)", e.where):
        out["step"] = int(m.group(1))
        out["op"] = getattr(build.program.steps[out["step"]], "op", None)
    if m := re.search(r"\bdevice (\d+)", f"{e.what} {e.where}"):
        out["device"] = int(m.group(1))
    if m := re.search(r"reads '([^']+)'", e.what):
        out["tensor"] = m.group(1)
    if m := re.search(r"it needs (\(.*\)), holds (\(.*\));", e.why):
        needs, holds = (ast.literal_eval(x) for x in m.groups())
        out["cell"] = [hi - 1 if hi > q and lo >= p else lo for (lo, hi), (p, q) in zip(needs, holds, strict=True)]
    return out
