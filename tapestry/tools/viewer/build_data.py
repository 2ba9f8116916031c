"""Everything that the page shows of one build, as data."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from tapestry.build.packed_program import PackedLaunch, PackedReduce, PackedTransfer, pack
from tapestry.build.store import Build
from tapestry.codegen.kernel_sources import kernels_of_steps, named_kernels
from tapestry.errors import LawError
from tapestry.ir.expr import Call, Const, Expr, Index
from tapestry.ir.graph import Block, Graph, Guard, Op, Read
from tapestry.ir.index import Aff, Floor
from tapestry.ir.kernel import size
from tapestry.ir.plan import Mesh, Strategy
from tapestry.ir.program import Free, Launch, Program, Reduce, Step, Transfer, allocated, device_bytes, transfer_bytes
from tapestry.ir.provenance import operation_names
from tapestry.ir.syntax.printer import aliases, op_text, signature
from tapestry.ir.types import itemsize
from tapestry.plan.alternatives import priced_strategies
from tapestry.plan.requests import parse_pins
from tapestry.plan.simulate import Schedule
from tapestry.plan.topology import from_data
from tapestry.verify import certificate
from tapestry.verify.rewriting.proofs import prove_change
from tapestry.verify.rewriting.regions import Change
from tapestry.verify.rewriting.rewrite_log import Log, read
from tapestry.viz import explain, format
from tapestry.viz.format import split_text

Row = dict[str, Any]


# Distinct operations as data: index spaces, reads as index expressions that the page can evaluate, and what is skipped.


_SIDES = {"le": (-1, 0), "lt": (-1, -1), "ge": (1, 0), "gt": (1, -1), "eq": (1, 0)}
"""An order of a and b as ``sign * (a - b) + constant >= 0``, for integers; equality as ``== 0``."""


def shape_of(op: Op, graph: Graph) -> Row:
    """An operation without the names of its tensors."""
    outs = [_typed(graph, t) for t in op.outs]
    if not isinstance(op, Block):
        dims = [[d.name, d.size, "map"] for d in op.dims]
        reads = [_opaque_read(graph, t, axes) for t, axes in zip(op.ins, op.in_axes, strict=True) if t]
        return {"kind": f"opaque {op.kind}", "dims": dims, "reads": reads, "outs": outs, "skips": [], "opaque": True}
    place = {d.name: k for k, d in enumerate(op.space)}
    roles = ["map"] * len(op.dims) + ["reduce"] * len(op.reduce) + ["inner"] * len(op.inner_dims)
    return {
        "kind": op.monoid or "map",
        "dims": [[d.name, d.size, r] for d, r in zip(op.space, roles, strict=True)],
        "reads": [_read(r, alias, graph, place) for r, alias in zip(op.reads, aliases(op), strict=True)],
        "outs": outs,
        "then": sorted(op.then_reads() - op.body_reads()),
        "skips": [_guard(g, place) for e in op.point for g in _conditions(e)],
    }


def text_of(op: Op, graph: Graph) -> str:
    """The IR text, without the node of an opaque one."""
    lines = op_text(op, graph).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("node ", "opsets ", "from ")))


def _typed(graph: Graph, tensor: str) -> list[Any]:
    t = graph.tensors[tensor]
    return [t.dtype, list(t.shape), 0 if t.on_host else itemsize(t.dtype)]


def _read(r: Read, alias: str, graph: Graph, place: dict[str, int]) -> Row:
    index, text = [_aff(e, place) for e in r.index], list(map(str, r.index))
    row: Row = {"index": index, "text": text, "alias": alias, "type": _typed(graph, r.tensor)}
    if r.other is not None:
        row["other"] = repr(r.other)
    if r.when:
        row["when"] = [_guard(g, place) for g in r.when]
    return row


def _opaque_read(graph: Graph, tensor: str, axes: tuple[int | None, ...]) -> Row:
    """A read of an opaque node: along its dimensions cell by cell, along every other axis whole (null)."""
    index = [None if a is None else [0, [[1, a]]] for a in axes]
    text = ["_" if a is None else str(a) for a in axes]
    return {"index": index, "text": text, "type": _typed(graph, tensor), "alias": tensor}


def _aff(e: Aff, place: dict[str, int]) -> list[Any]:
    """``[constant, [[coefficient, atom], …]]``; an atom is a dimension's number, or ``["floor" | "mod", expression, by]``."""
    terms: list[Any] = []
    for atom, coef in e.terms:
        if isinstance(atom, str):
            terms.append([coef, place[atom]])
        else:
            terms.append([coef, ["floor" if isinstance(atom, Floor) else "mod", _aff(atom.arg, place), atom.div]])
    return [e.const, terms]


def _guard(g: Guard, place: dict[str, int]) -> list[Any]:
    return [_aff(g.aff, place), g.op]


def _conditions(e: Expr) -> Iterator[Guard]:
    """Orders of index expressions that a ``where`` of the body asks for, with a constant where they fail (causal masks)."""
    if not isinstance(e, Call):
        return
    if e.fn == "where" and isinstance(e.args[2], Const):
        yield from _holds(e.args[0])
    for a in e.args:
        yield from _conditions(a)


def _holds(e: Expr) -> Iterator[Guard]:
    """The parts of a conjunction that are orders of index expressions."""
    if not isinstance(e, Call):
        return
    if e.fn == "and":
        for a in e.args:
            yield from _holds(a)
    elif e.fn in _SIDES:
        (sign, constant), (a, b) = _SIDES[e.fn], map(_affine, e.args)
        if a is not None and b is not None:
            yield Guard((a - b) * sign + constant, "eq" if e.fn == "eq" else "ge")


def _affine(e: Expr) -> Aff | None:
    """An expression of indices alone, as an index expression."""
    if isinstance(e, Index):
        return e.aff
    if isinstance(e, Const):
        return Aff((), int(e.value)) if isinstance(e.value, int) else None
    if not isinstance(e, Call):
        return None
    if e.fn == "cast":
        return _affine(e.args[0])
    if e.fn not in ("add", "sub"):
        return None
    a, b = map(_affine, e.args)
    return None if a is None or b is None else a + b if e.fn == "add" else a - b


# A program as tables for the page: lists of boxes once each, steps, who sends how much to whom, times and memory by device.
#
# Devices that do the same at the same time share a row: a plan for 64 equal devices has one class of them.


Links = dict[tuple[int, int], float]
MOST_TIMES = 400_000  # numbers of a schedule: of more classes of devices only the first are written


def links(step: Transfer | Reduce, program: Program) -> Links:
    """Bytes from device to device, which add up to `transfer_bytes`.

    Messages count as they are. What a reduction sends goes round the ring of its group, as `transfer_bytes` counts it; a field
    that goes whole from each to each is shared among all pairs.
    """
    out: Links = {}
    if isinstance(step, Transfer):
        width = itemsize(program.buffers[step.dst].dtype)
        for m in step.messages:
            out[m.src, m.dst] = out.get((m.src, m.dst), 0) + size(m.box) * width
        return out
    for s, d in zip(step.srcs, step.dsts, strict=True):
        if s not in step.sent:
            continue
        src, dst = program.buffers[s], program.buffers[d]
        held = device_bytes(src)
        for g in (g for g in step.groups if len(g) > 1):
            same, n = src.boxes[g[0]] == dst.boxes[g[0]], len(g)
            if same and step.kind != "all_reduce":
                pairs, each = list(permutations(g, 2)), float(held[g[0]])
            else:
                pairs, each = list(zip(g, (*g[1:], g[0]), strict=True)), (2 if same else 1) * (n - 1) * int(held[g[0]]) / n
            for pair in pairs:
                out[pair] = out.get(pair, 0) + each
    return out


def tables(program: Program) -> Row:
    """Boxes, lists of a box per device, buffers by name, steps; ``links`` are written once for equal exchanges."""
    packed = pack(program)
    numbers: dict[tuple[tuple[int, int, float], ...], int] = {}
    known: dict[object, int] = {}
    steps: list[list[Any]] = []
    for s, p in zip(program.steps, packed.steps, strict=True):
        key = _exchange(s, p, program)
        if key is not None and key not in known:
            assert isinstance(s, Transfer | Reduce)
            sent = tuple((a, b, n) for (a, b), n in sorted(links(s, program).items()))
            known[key] = numbers.setdefault(sent, len(numbers))
        steps.append(_step(s, p, program, -1 if key is None else known[key]))
    return {
        "boxes": packed.boxes,
        "lists": packed.lists,
        "groups": packed.groups,
        "links": list(numbers),
        "steps": steps,
        "buffers": {b.name: [b.tensor, b.boxes, b.dtype, b.field, itemsize(b.dtype)] for b in packed.buffers},
        "outputs": packed.outputs,
    }


def _exchange(s: Step, p: object, program: Program) -> object:
    """What the links of a step depend on; nothing for a step without any."""
    if isinstance(s, Transfer) and isinstance(p, PackedTransfer):
        return "messages", p.messages, program.buffers[s.dst].dtype
    if isinstance(s, Reduce) and isinstance(p, PackedReduce):
        ends = tuple((id(program.buffers[a].boxes), id(program.buffers[b].boxes)) for a, b in zip(s.srcs, s.dsts, strict=True))
        return s.kind, p.groups, ends, tuple(program.buffers[b].dtype for b in s.srcs), s.known
    return None


def _step(s: Step, p: object, program: Program, link: int) -> list[Any]:
    """A step as a row; its first entry says what it is."""
    match s:
        case Launch():
            assert isinstance(p, PackedLaunch)
            return ["launch", s.op, s.mode, p.blocks, s.ins, s.outs]
        case Transfer():
            return ["transfer", s.kind, s.src, s.dst, transfer_bytes(s, program), link]
        case Reduce():
            assert isinstance(p, PackedReduce)
            return ["reduce", s.kind, s.srcs, s.dsts, transfer_bytes(s, program), link, p.groups, s.op]
        case Free():
            return ["free", s.buffers]
        case _:
            return ["load", s.buffer]


def edges(program: Program) -> list[list[list[Any]]]:
    """For each operation what it reads: (tensor, bytes on the wire, kind, the step that brings it or -1, whether again).

    A buffer that an earlier operation had brought is counted there, and read again here.
    """
    made = {b: k for k, s in enumerate(program.steps) for b in allocated(s)}
    counts = 1 + max((s.op for s in program.steps if isinstance(s, Launch)), default=-1)
    out: list[dict[str, list[Any]]] = [{} for _ in range(counts)]
    seen = set[int]()
    for s in program.steps:
        if not isinstance(s, Launch):
            continue
        for b in (b for b in s.ins if b):
            at, total, kinds, again = made.get(b, -1), 0, list[str](), False
            first = at
            while at >= 0 and isinstance(step := program.steps[at], Transfer):  # what was brought may have been brought there
                again = again or at in seen
                total += 0 if at in seen else transfer_bytes(step, program)
                kinds.append(step.kind)
                seen.add(at)
                at = made.get(step.src, -1)
            tensor, brought = program.buffers[b].tensor, first if kinds else -1
            old = out[s.op].get(tensor)
            if old is None or (brought >= 0 and old[3] < 0):
                out[s.op][tensor] = [tensor, total, kinds[0] if kinds else "", brought, again]
            elif brought != old[3]:
                old[1] += total
    return [list(rows.values()) for rows in out]


def alike(columns: np.ndarray) -> tuple[list[list[int]], list[int]]:
    """(devices that share a column, in order of their first; that first device of each class)."""
    classes: dict[bytes, list[int]] = {}
    for d in range(columns.shape[1]):
        classes.setdefault(np.ascontiguousarray(columns[:, d]).tobytes(), []).append(d)
    return list(classes.values()), [c[0] for c in classes.values()]


def lanes(timed: Schedule) -> Row:
    """When each step begins and ends, for every class of devices with equal times; null where it takes no part."""
    if not timed.timed:
        return {"classes": [], "steps": [], "left_out": 0}
    begin, end = (np.array([getattr(t, k) for t in timed.timed]) for k in ("start", "end"))
    classes, first = alike(np.concatenate([begin, end]))
    most = max(1, MOST_TIMES // (2 * len(timed.timed)))
    shown = first[:most]
    steps: list[Row] = []
    for k, t in enumerate(timed.timed):
        times = {n: [None if x != x else x for x in a[k, shown].tolist()] for n, a in (("begin", begin), ("end", end))}
        row: Row = {"step": t.step, "op": t.op, "stream": t.stream, **times}
        steps.append(row | ({"by": t.by} if t.by else {}))
    return {"classes": classes[:most], "steps": steps, "left_out": sum(map(len, classes[most:]))}


def memory(program: Program, peak: Mapping[int, int]) -> Row:
    """Bytes alive after every step, for every class of devices that hold equally much.

    Args:
        peak: bytes that each device holds at most, which the curves must reach.
    """
    change = np.zeros((len(program.steps), program.devices), np.int64)
    for k, s in enumerate(program.steps):
        for b in allocated(s):
            change[k] += device_bytes(program.buffers[b])
        for b in s.buffers if isinstance(s, Free) else ():
            change[k] -= device_bytes(program.buffers[b])
    classes, first = alike(change)
    alive = np.cumsum(change[:, first], axis=0)
    assert all(int(alive[:, k].max(initial=0)) == peak[d] for k, d in enumerate(first))
    return {"classes": classes, "alive": alive.T.tolist()}


# The rewrites behind a plan, step by step: what went and what came in each, the gain in memory traffic, and by what it was
# shown that results are the same. Equal changes are shown once, with how often they happened.


MOST = 12  # distinct changes of a step that are shown; the counts are of all
LARGEST = 60  # operations of a change that are drawn


def steps(log: Log) -> list[Row]:
    """Every step of a log, proved once more.

    Raises:
        LawError: a step changes what is computed.
    """
    return [_step_of_rewrite_steps(Change.of(s)) for s in log.steps]


def _step_of_rewrite_steps(change: Change) -> Row:
    before, after = change.step.before, change.step.after
    kinds: dict[tuple[object, ...], Row] = {}
    counts, bytes_each = Counter[tuple[object, ...]](), Counter[str]()
    for gone, come in _apart(change):
        key = (tuple(signature(op, before) for op in gone), tuple(signature(op, after) for op in come), len(gone), len(come))
        counts[key] += 1
        if key not in kinds:
            kinds[key] = _sides(gone, before, come, after)
        for side in ("before", "after"):
            bytes_each[side] += kinds[key][f"bytes_{side}"]
    shown = sorted(kinds, key=lambda k: -counts[k])[:MOST]
    return {
        "by": change.step.by,
        "exact": change.step.exact,
        "evidence": dict(prove_change(change)),
        "ops": [len({id(op) for op in ops.values()}) for ops in (change.gone, change.come)],
        "bytes": [bytes_each["before"], bytes_each["after"]],
        "distinct": len(kinds),
        "places": counts.total(),
        "changes": [{"times": counts[k], **kinds[k]} for k in shown],
    }


def _apart(change: Change) -> Iterator[tuple[list[Op], list[Op]]]:
    """The change as pairs of operations that went and came, apart where no tensor that either wrote joins them."""
    sides = [list({id(op): op for op in ops.values()}.values()) for ops in (change.gone, change.come)]
    own = {t for ops in sides for op in ops for t in op.outs}
    parent: dict[str, str] = {}

    def root(t: str) -> str:
        while parent.setdefault(t, t) != t:
            parent[t] = t = parent[parent[t]]
        return t

    kept = change.needed & {t for op in sides[1] for t in op.outs}  # made before and after: what reads them stands apart
    for ops in sides:
        for op in ops:
            for t in (*op.outs, *(x for x in op.inputs if x in own and x not in kept)):
                parent[root(t)] = root(op.outs[0])
    groups: dict[str, tuple[list[Op], list[Op]]] = {}
    for k, ops in enumerate(sides):
        for op in ops:
            groups.setdefault(root(op.outs[0]), ([], []))[k].append(op)
    yield from groups.values()


def _sides(gone: list[Op], before: Graph, come: list[Op], after: Graph) -> Row:
    out: Row = {}
    for name, ops, graph in (("before", gone, before), ("after", come, after)):
        out[name] = [{"outs": op.outs, "ins": op.inputs, "text": text_of(op, graph)} for op in ops[:LARGEST]]
        out[f"bytes_{name}"] = traffic(ops, graph)
    return out


def traffic(ops: list[Op], graph: Graph) -> int:
    """Bytes that operations read and write, each tensor once per operation; values of a size unknown count as none."""
    tensors: Mapping[str, Any] = graph.tensors
    return sum(tensors[t].nbytes for op in ops for t in (*op.inputs, *op.outs) if t in tensors and not tensors[t].on_host)


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
        "name": source.name, "model": build.model, "target": build.target, "report": dict(build.report), "explain": facts,
        "mesh": [[a.name, a.size, list(a.weights), list(a.order)] for a in plan.mesh],
        "devices": program.devices, "shapes": shapes,
        "stages": [[s.first, [[a.name, a.size] for a in s.mesh]] for s in plan.stages],
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
    topology, pins = from_data(build.topology), build.report.get("requests", {}).get("pins", [])
    others = priced_strategies(plan, topology, parse_pins(pins, plan.graph, plan.mesh))
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
                "ends": list(s.out),
                "ring": list(s.ring),
                "pins": _pins(name, s, mesh),
                "stage": plan.stage_of[i] if plan.stages else 0,
                "kernels": launched.get(i, ()),
            }
        )
    return out


def _pins(name: str, s: Strategy, mesh: Mesh) -> list[str]:
    """The pins that insist on a strategy's cuts."""
    return [f"{name}:{d}={a.size}@{a.name}" for d, a in zip(s.dims, mesh, strict=True) if d is not None]


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
    sources = {n: {"source": t.source, "op": k.op, "mode": k.mode, "block": k.block} for n, (k, t) in made.items()}
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
            exact=build.exact,
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
