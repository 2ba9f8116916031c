"""The plan checker: replays a Program against its Graph and holds it to every law, from scratch.

It shares nothing with the planner and the lowering but `ir`. Footprints come from isl (the planner uses interval
arithmetic), covers from a coordinate sweep (the planner cuts by arithmetic). Each buffer is replayed with what it holds on
every device: the cells of a tensor, or the partial states of an operation over known parts of its reduced dimensions.

What a step does to names (which buffers are alive, what they hold) is checked at every step; what it does to boxes depends on
lists of boxes alone and is proved once for equal lists (`verify.exchange`), on all devices. Counts are of checks either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.errors import LawError, inside
from tapestry.ir import laws
from tapestry.ir.expr import Acc, Arg, Call, Const
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import size, whole
from tapestry.ir.laws import where
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.plan import Mesh, Plan, Stage
from tapestry.ir.program import Buffer, Free, Launch, Load, Program, Reduce, Transfer, allocated
from tapestry.ir.recognition.state import native
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import DTYPES, HOST, Array, itemsize
from tapestry.verify import block_laws, box_lists, deadlock, exchange, monoid_laws
from tapestry.verify.box_lists import Boxes, Breach, Hulls, Lists, Parts, Spans, first
from tapestry.verify.transfer_kinds import named


@dataclass(frozen=True, slots=True)
class Content:
    """What a live buffer holds where it has a box: a tensor's cells (``op`` < 0) or states of an operation."""

    op: int = -1
    parts: Parts = ()


@dataclass(slots=True)
class _Replay:
    graph: Graph
    program: Program
    lists: Lists
    streamed: frozenset[str]
    native_sums: bool
    alive: Array = field(init=False)
    peak: Array = field(init=False)
    holds: dict[str, Content] = field(default_factory=dict[str, Content])
    rings: bool = field(init=False)
    resident: set[str] = field(default_factory=set[str])
    signatures: list[str] = field(init=False)
    launched: dict[int, dict[str, list[Boxes]]] = field(default_factory=dict[int, dict[str, list[Boxes]]])

    def __post_init__(self) -> None:
        self.alive, self.peak = np.zeros((2, self.program.devices), np.int64)
        self.signatures = [str(k) if self.lists.sized else signature(op, self.graph) for k, op in enumerate(self.graph.ops)]
        self.rings = any(s.to.startswith("ring.") for op in self.graph.ops for s in op.splits)

    def law(self, name: str, holds: bool, what: str, step: str = "", why: object = "") -> None:
        """Count one check of a law; raise when it does not hold."""
        self.lists.laws[name] += 1
        if not holds:
            raise self.lists.broken(Breach(name, what, why), step)

    def buffer(self, name: str, step: str) -> Buffer:
        """A declared buffer."""
        buffer = self.program.buffers.get(name)
        if buffer is None:
            raise LawError("read_after_write", f"buffer '{name}' does not exist", where=step)
        return buffer

    def spans(self, b: Buffer) -> Spans:
        """The boxes of a buffer (`_declared` has seen that they are parts of its tensor)."""
        return self.lists.spans(b.boxes, len(self.graph.tensors[b.tensor].shape), "agreement", b.name)

    def value(self, name: str, tensor: str, step: str) -> Buffer:
        """A live buffer that holds a tensor's cells."""
        b, content = self.buffer(name, step), self.holds.get(name)
        self.law("read_after_write", content is not None, f"'{name}' is not alive", step)
        ok = content is not None and content.op < 0 and b.tensor == tensor
        self.law("read_after_write", ok, f"'{name}' does not hold '{tensor}'", step)
        return b

    def allocate(self, name: str, step: str, filled: Array, content: Content) -> None:
        """A new buffer, once, on the devices that have a box for it, all of which must be ``filled``."""
        b = self.buffer(name, step)
        there = self.spans(b).there
        bad = first(there == filled)
        self.law("written_once", bad < 0, f"'{name}' is not filled on a device, or is and has no box there", step, bad)
        self.law("written_once", name not in self.holds, f"'{name}' is written twice", step)
        typed = b.field is not None or b.dtype == self.graph.tensors[b.tensor].dtype
        self.law("agreement", typed, f"'{name}' is {b.dtype}, not {self.graph.tensors[b.tensor].dtype}", step)
        self.lists.laws["written_once"] += 2 * (self.program.devices - 1)
        self.holds[name] = content
        self.alive += self.nbytes(b)
        np.maximum(self.peak, self.alive, out=self.peak)

    def nbytes(self, b: Buffer) -> Array:
        """Bytes on every device."""
        s, width = self.spans(b), itemsize(b.dtype)
        key = ("bytes", self.lists.number(b.boxes), width)
        return self.lists.made(key, lambda: np.prod((s.hi - s.lo).astype(np.int64), axis=1) * s.there * width)


def check(
    graph: Graph,
    program: Program,
    *,
    limit: int | Sequence[int] | None = None,
    stated_peak: list[int] | None = None,
    mesh: Mesh | None = None,
    streamed: frozenset[str] = frozenset(),
    places: tuple[Stage, ...] | None = None,
    native_sums: bool = False,
) -> dict[str, int]:
    """Check a graph and its program; returns how many times each law was checked.

    Args:
        mesh: the mesh that the graph's splits are bound to; the program must cut every operation as they say.
        places: with pipeline stages, for each operation the devices and the mesh of its stage, instead of ``mesh``.
        limit: bytes that each device has, or a list of what every one has.
        stated_peak: peak bytes per device that the plan claims.
        streamed: weights that the plan loads for every use; all others stay loaded from their load to the end.
        native_sums: whether the plan rounds partial sums to the results' dtype before they travel.

    Raises:
        LawError: naming the law, the step, the device and a witness point.
    """
    r = _Replay(graph, program, Lists(), streamed, native_sums)
    r.lists.laws.update(laws.check(graph))
    loose = sorted(streamed - set(graph.weights))
    r.law("agreement", not loose, "what is streamed are no weights", "the plan", loose)
    if places is None and mesh is not None:
        places = (Stage(0, mesh),) * len(graph.ops)
    _walk(r, places)
    r.lists.laws[deadlock.LAW] += deadlock.check(program)
    if tried := monoid_laws.check_monoids(graph):
        r.lists.laws[monoid_laws.LAW] += tried
    for d, peak in enumerate(r.peak.tolist()):
        has = None if limit is None else limit if isinstance(limit, int) else limit[d]
        r.law("memory", has is None or peak <= has, f"device {d} needs {peak:,} bytes of {has}")
        r.law("memory", stated_peak is None or stated_peak[d] == peak, f"device {d} needs {peak:,} bytes, not what is stated")
    return dict(r.lists.laws)


def check_memory(plan: Plan, program: Program) -> None:
    """Check that a program of a build that somebody else may have written stays inside its buffers, and computes its graph.

    All laws of the graph and of the steps, with footprints by interval arithmetic; not its peak, its cuts or its claims.

    Raises:
        LawError: a law does not hold.
    """
    laws.check(plan.graph)
    replay = _Replay(plan.graph, program, Hulls(), frozenset(plan.graph.weights), plan.native_sums)
    replay.rings = any(any(s.ring) for s in plan.strategies)  # (the graph alone has no notes of cuts)
    _walk(replay, None)


def check_boxes(graph: Graph, program: Program, lists: Lists) -> None:
    """Walk a program once more for its boxes, with another back end for what holds of them.

    Raises:
        LawError: a law does not hold.
    """
    rounded = any(isinstance(s, Reduce) and s.sent_as for s in program.steps)
    _walk(_Replay(graph, program, lists, frozenset(graph.weights), rounded), None)


def _walk(r: _Replay, places: tuple[Stage, ...] | None) -> None:
    """Every buffer, every step, then what all the steps together have to be."""
    _declared(r)
    for i, step in enumerate(r.program.steps):
        with inside(f"/program/steps/{i}"):
            name = f"step {i} ({type(step).__name__.lower()})"
            match step:
                case Load():
                    _load(r, step, name)
                case Launch():
                    _launch(r, step, name)
                case Transfer():
                    _transfer(r, step, name)
                case Reduce():
                    _reduce(r, step, name)
                case Free():
                    _free(r, step, name)
        assert all(b in r.program.buffers for b in allocated(step))
    if places is not None:
        _stages(r, places)
    for i, op in enumerate(r.graph.ops):
        block_laws.cover(r.lists, op, r.launched.get(i, {}), None if places is None else places[i])
    _outputs(r)


def _stages(r: _Replay, places: tuple[Stage, ...]) -> None:
    """Law 4: every operation has a stage; stages are ranges of the program's devices, equal or disjoint."""
    r.law("split_partition", len(places) == len(r.graph.ops), f"{len(places)} stages for {len(r.graph.ops)} operations")
    taken: dict[int, Stage] = {}
    for stage in dict.fromkeys(places):
        there = stage.devices.start >= 0 and stage.devices.stop <= r.program.devices
        r.law("split_partition", there, f"a stage has devices beyond the {r.program.devices} of the program", why=stage)
        twice = next((d for d in stage.devices if d in taken), None)
        r.law("split_partition", twice is None, f"device {twice} is in two stages", why=stage)
        taken |= dict.fromkeys(stage.devices, stage)


def _declared(r: _Replay) -> None:
    """Every buffer is a part of some tensor on every device, before any step is looked at."""
    n = r.program.devices
    for name, b in r.program.buffers.items():
        t, step = r.graph.tensors.get(b.tensor), f"buffer '{name}'"
        r.law("agreement", t is not None and b.name == name and b.dtype in DTYPES, "not a buffer of a tensor", step, b.tensor)
        assert t is not None
        r.law("agreement", len(b.boxes) == n, f"{len(b.boxes)} boxes for {n} devices", step)
        fact = ("declared", r.lists.number(b.boxes), t.shape)
        r.lists.prove(fact, step, {"agreement": n}, lambda s=t.shape, b=b: _inside(r, s, b))


def _inside(r: _Replay, shape: tuple[int, ...], b: Buffer) -> Breach | None:
    boxes = r.spans(b)
    bad = r.lists.outside(boxes, box_lists.everywhere(shape, boxes))
    return None if bad < 0 else Breach("agreement", f"not inside '{b.tensor}' of shape {shape}", boxes.box(bad))


def _load(r: _Replay, step: Load, name: str) -> None:
    b = r.buffer(step.buffer, name)
    loadable = b.tensor in r.graph.weights or b.tensor in r.graph.inputs
    r.law("read_after_write", loadable and b.field is None, f"'{b.tensor}' is no input and no weight", name)
    if b.tensor in r.graph.weights and b.tensor not in r.streamed:
        r.resident.add(step.buffer)
    r.allocate(step.buffer, name, r.spans(b).there, Content())


def _launch(r: _Replay, step: Launch, name: str) -> None:
    r.law("agreement", 0 <= step.op < len(r.graph.ops), f"operation {step.op} does not exist", name)
    op = r.graph.ops[step.op]
    name = f"{name} of {where(op)}"
    right = step.mode in ("full", "partial", "finish") and len(step.blocks) == r.program.devices
    r.law("agreement", right, "bad launch", name)
    monoid = op.monoid if isinstance(op, Block) else None
    r.law("agreement", monoid is not None or step.mode == "full", "the operation has no states", name)
    count = len(op.reads) if isinstance(op, Block) else len(op.ins)
    r.law("agreement", len(step.ins) == count, f"{len(step.ins)} buffers for {count} reads", name)
    extents = tuple(d.size for d in (op.dims if step.mode == "finish" else op.space))
    points = r.lists.spans(step.blocks, len(extents), "split_partition", name)
    number, n = r.lists.number(step.blocks), len(op.dims)
    taking = int(points.there.sum())
    inner = tuple(d.size for d in op.inner_dims) if isinstance(op, Block) and step.mode == "partial" else ()
    outer = len(extents) - len(inner)
    uncut = extents[n:] if step.mode == "full" else inner
    fact = ("block", number, extents, uncut)
    r.lists.prove(fact, name, {"split_partition": 2 * taking}, lambda: block_laws.in_space(points, extents, uncut, r.lists))
    _reads(r, step, op, points, name)
    if step.mode == "finish":
        _merged_states(r, step, points, name)
    content = Content()
    if step.mode == "partial":
        key = ("parts", number, n, outer)
        parts = r.lists.made(key, lambda: tuple(None if b is None else (b[n:outer],) for b in step.blocks))
        content = Content(step.op, _with_others(r, step, points, parts, name) if step.states else parts)
    r.launched.setdefault(step.op, {}).setdefault(step.mode, []).append(step.blocks)
    _launch_outs(r, step, op, points, content, name)


def _states(r: _Replay, step: Launch, op: Block, points: Spans, name: str) -> list[Content]:
    """What the buffers of a launch's states hold, which must be the operation's fields over each device's block."""
    r.law("agreement", len(step.states) == len(op.body), "states and fields differ in number", name)
    rows, out = points.keep(slice(0, len(op.dims))), list[Content]()
    for k, s in enumerate(step.states):
        b, content = r.buffer(s, name), r.holds.get(s)
        ok = content is not None and content.op == step.op and b.field == k and b.tensor == op.outs[0]
        r.law("read_after_write", ok, f"'{s}' does not hold field {k} of the operation", name)
        assert content is not None
        same = r.lists.differ(block_laws.state(op, k, rows), r.spans(b))
        r.law("read_after_write", same < 0, f"'{s}' does not hold field {k} of the block on device {same}", name)
        out.append(content)
    return out


def _with_others(r: _Replay, step: Launch, points: Spans, parts: Parts, name: str) -> Parts:
    """What a block's states hold once they are merged with those of other parts of the reduction, which must be legal."""
    op = r.graph.ops[step.op]
    assert isinstance(op, Block) and op.monoid is not None
    r.law("written_once", MONOIDS[op.monoid].commutative, f"'{op.monoid}' merges in order, and blocks come in another", name)
    merged, extents = set[Parts](), tuple(d.size for d in op.reduce)
    for content in _states(r, step, op, points, name):
        merged.add(content.parts)
        fact = ("others", r.lists.number(content.parts), r.lists.number(step.blocks), len(op.dims), len(op.reduce))
        counts = {"written_once": int(points.there.sum())}
        r.lists.prove(fact, name, counts, lambda c=content: exchange.disjoint(c.parts, parts, extents, r.lists))
    r.law("agreement", len(merged) == 1, "fields of different parts are merged", name)
    return exchange.with_part(merged.pop(), parts)


def _reads(r: _Replay, step: Launch, op: Op, points: Spans, name: str) -> None:
    """Laws 5 and 6: every cell that the block's points read is in the buffer that the kernel is given."""
    taking = int(points.there.sum())
    for k, tensor in _used(op, step.mode):
        with inside(f"/ins/{k}"):
            r.law("read_after_write", bool(step.ins[k]), "a read has no buffer", name, tensor)
            b = r.value(step.ins[k], tensor, name)
            fact = ("reads", r.signatures[step.op], k, step.mode, r.lists.number(step.blocks), r.lists.number(b.boxes))
            counts = {"access_preserved": taking, "read_after_write": taking}
            r.lists.prove(fact, name, counts, lambda k=k, b=b: _reads_inside(r, step, op, k, points, b))


def _used(op: Op, mode: str) -> list[tuple[int, str]]:
    """(read, tensor) for the reads that the launch's mode uses."""
    if not isinstance(op, Block):
        return [(k, t) for k, t in enumerate(op.ins) if t]
    used = {"full": op.body_reads() | op.then_reads(), "partial": op.body_reads(), "finish": op.then_reads()}[mode]
    return [(k, op.reads[k].tensor) for k in sorted(used)]


def _reads_inside(r: _Replay, step: Launch, op: Op, k: int, points: Spans, b: Buffer) -> Breach | None:
    held = r.spans(b)
    bad = first(held.there | ~points.there)
    if bad >= 0:
        return Breach("read_after_write", f"'{b.name}' is not alive on device {bad}")
    if step.mode == "finish" and isinstance(op, Block):
        points = block_laws.with_whole(points, tuple(d.size for d in (*op.reduce, *op.inner_dims)))
    key = ("hull", r.signatures[step.op], k, r.lists.number(step.blocks), step.mode == "finish")
    bad, why = r.lists.reads_outside(op, r.graph, k, points, held, key)
    what = f"device {bad} reads '{b.tensor}' outside its buffer '{b.name}'"
    return None if bad < 0 else Breach("access_preserved", what, why)


def _merged_states(r: _Replay, step: Launch, points: Spans, name: str) -> None:
    op = r.graph.ops[step.op]
    assert isinstance(op, Block)
    extents, taking = tuple(d.size for d in op.reduce), int(points.there.sum())
    for content in _states(r, step, op, points, name):
        fact = ("complete", r.lists.number(step.blocks), r.lists.number(content.parts), extents)
        counts = {"written_once": 2 * taking, "read_after_write": taking - 1}
        r.lists.prove(fact, name, counts, lambda c=content: block_laws.complete(points.there, c.parts, extents, r.lists))


def _launch_outs(r: _Replay, step: Launch, op: Op, points: Spans, content: Content, name: str) -> None:
    fields = len(op.body) if isinstance(op, Block) and step.mode == "partial" else len(op.outs)
    r.law("agreement", len(step.outs) == fields, f"{len(step.outs)} buffers for {fields} results", name)
    for k, out in enumerate(step.outs):
        b = r.buffer(out, name)
        tensor = op.outs[0] if step.mode == "partial" else op.outs[k]
        right = b.tensor == tensor and (b.field == k) == (step.mode == "partial")
        r.law("agreement", right, f"'{out}' is not result {k}", name)
        if isinstance(op, Block) and step.mode == "partial":
            r.law("agreement", b.dtype == op.body[k].dtype, f"'{out}' has another dtype than the state", name)
        key = ("outs", step.mode, r.lists.number(step.blocks), r.signatures[step.op], k)
        wanted: Spans = r.lists.made(key, lambda k=k, t=tensor: _written(op, k, points, r.graph.tensors[t].shape, step.mode))
        bad = r.lists.differ(wanted, r.spans(b))
        r.law("written_once", bad < 0, "a buffer is not what a device computes", name, wanted.box(bad))
        r.lists.laws["written_once"] += int(points.there.sum()) - 1
        r.allocate(out, name, points.there, content)


def _written(op: Op, k: int, points: Spans, shape: tuple[int, ...], mode: str) -> Spans:
    """What each device writes of a result or, in ``partial`` mode, of a field."""
    if mode == "partial" and isinstance(op, Block):
        return block_laws.state(op, k, points.keep(slice(0, len(op.dims))))
    return block_laws.written(op, k, points, shape)


def _transfer(r: _Replay, step: Transfer, name: str) -> None:
    src, dst = r.buffer(step.src, name), r.buffer(step.dst, name)
    r.law("agreement", src.tensor == dst.tensor and src.dtype == dst.dtype and src.field == dst.field, "tensors differ", name)
    r.law("host_values", src.dtype != HOST, f"'{src.tensor}' stays on the host and is never sent", name)
    r.value(step.src, src.tensor, name)
    held, wanted = r.spans(src), r.spans(dst)
    fact = ("transfer", *(r.lists.number(x) for x in (src.boxes, dst.boxes, step.messages)))
    sent, taking = len(step.messages), int(wanted.there.sum())
    counts = {"agreement": sent, "read_after_write": 2 * sent + taking, "written_once": taking}
    r.lists.prove(fact, name, counts, lambda: exchange.messages(held, wanted, step.messages, name, r.lists))
    if not r.lists.sized:  # a name is one for all sizes
        fact, rings = ("kind", step.kind, *fact), r.rings
        r.lists.prove(fact, name, {"agreement": 1}, lambda: named(step.kind, held, wanted, step.messages, name, rings))
    r.allocate(step.dst, name, wanted.there, Content())


def _reduce(r: _Replay, step: Reduce, name: str) -> None:
    op = r.graph.ops[step.op] if 0 <= step.op < len(r.graph.ops) else None
    ok = isinstance(op, Block) and len(step.srcs) == len(step.dsts) == len(op.body)
    r.law("agreement", ok and step.kind in ("all_reduce", "reduce_scatter"), "not a reduction of states", name)
    assert isinstance(op, Block)
    sent_as = native(op) if r.native_sums else ""
    r.law("agreement", step.sent_as == sent_as, "partial sums travel in another dtype than the plan says", name, step.sent_as)
    r.law("agreement", len(step.known) in (0, len(op.body)), "known fields and fields differ in number", name)
    done: list[tuple[str, Array, Content]] = []
    for k, (s, t) in enumerate(zip(step.srcs, step.dsts, strict=True)):
        src, dst, content = r.buffer(s, name), r.buffer(t, name), r.holds.get(s)
        r.law("agreement", dst.dtype == op.body[k].dtype, f"'{t}' has another dtype than the state", name, dst.dtype)
        ours = dst.field is None or (dst.field == k and dst.tensor == op.outs[0])
        r.law("agreement", ours, f"'{t}' is not field {k} of the states", name)
        held = content is not None and content.op == step.op and src.field == k
        r.law("read_after_write", held, f"'{s}' holds no states of field {k}", name)
        assert content is not None
        if dst.field is None:
            plain = op.then[k : k + 1] == (Acc(k, op.body[k].dtype),) and dst.tensor == op.outs[k]
            r.law("agreement", plain, f"'{t}' is not the merged state", name)
        if step.known and step.known[k]:
            _known(r, op, k, step.known[k], content, name)
        merged = _merged(r, step, op, (src, dst), content, name)
        done.append((t, r.spans(src).there, Content() if dst.field is None else Content(step.op, merged)))
    for t, filled, content in done:
        r.allocate(t, name, filled, content)
    if all(r.buffer(t, name).field is None for t in step.dsts):
        r.launched.setdefault(step.op, {}).setdefault("merged", [])


def _known(r: _Replay, op: Block, k: int, values: tuple[float, ...], content: Content, name: str) -> None:
    """A field that is not sent is the same constant for every point, summed, and its value that of each device's part."""
    assert op.monoid is not None
    body, count = op.body[k], len(op.body)
    merge = MONOIDS[op.monoid].combiner(tuple(e.dtype for e in op.body))[k]
    adds = isinstance(merge, Call) and merge.fn == "add" and merge.args == (Arg(k, body.dtype), Arg(count + k, body.dtype))
    r.law("agreement", isinstance(body, Const) and adds, f"field {k} of the states is no count, and must be sent", name)
    assert isinstance(body, Const)
    r.law("agreement", len(values) == r.program.devices, f"field {k} is not known for every device", name)
    if not r.lists.fixed(content.parts):
        r.law("agreement", False, "a count that is known follows from a size", name)
    for d, (parts, value) in enumerate(zip(content.parts, values, strict=True)):
        true = float(body.value) * sum(size(p) for p in parts or ())
        r.law("read_after_write", value == true, f"field {k} is not what a device's part counts", name, f"device {d}: {true}")


def _merged(r: _Replay, step: Reduce, op: Block, ends: tuple[Buffer, Buffer], content: Content, name: str) -> Parts:
    """What the states hold after one field is merged, which must be legal."""
    src, dst = ends
    extents, groups = tuple(d.size for d in op.reduce), step.groups
    r.law("agreement", src.tensor == op.outs[0] and len(dst.boxes) == len(src.boxes), "states of another tensor", name)
    lists = tuple(r.lists.number(x) for x in (groups, src.boxes, dst.boxes, content.parts))
    fact = ("merge", step.kind, *lists, extents, dst.field is None, len(r.graph.tensors[dst.tensor].shape))
    pairs, members = sum(len(g) ** 2 for g in groups), sum(map(len, groups))
    counts = {"read_after_write": pairs, "written_once": 2 * len(groups), "agreement": members}
    held, wanted = r.spans(src), r.spans(dst)
    same = held.lo.shape == wanted.lo.shape
    r.law("agreement", same, "states and results differ in rank", name)
    r.lists.prove(
        fact,
        name,
        counts,
        lambda: exchange.check_merge(step.kind, groups, held, wanted, content.parts, extents, dst.field is None, r.lists),
    )
    assert op.monoid is not None
    if not (MONOIDS[op.monoid].commutative or r.lists.sized):
        ordered = ("in order", lists[0], lists[3])
        r.lists.prove(ordered, name, {"written_once": members}, lambda: exchange.in_order(groups, content.parts))
    return r.lists.made(("merged", *lists), lambda: exchange.after(groups, content.parts, r.program.devices))


def _free(r: _Replay, step: Free, name: str) -> None:
    for b in step.buffers:
        buffer = r.buffer(b, name)
        r.law("read_after_write", b not in r.resident, f"'{b}' holds a weight, which stays loaded", name)
        r.law("read_after_write", b in r.holds, f"'{b}' is freed but not alive", name)
        r.lists.laws["read_after_write"] += int(r.spans(buffer).there.sum()) - 1
        del r.holds[b]
        r.alive -= r.nbytes(buffer)


def _outputs(r: _Replay) -> None:
    for t in r.graph.outputs:
        step = f"output '{t}'"
        b = r.value(r.program.outputs.get(t, ""), t, step)
        gap, _ = r.lists.coverage(block_laws.distinct([b.boxes]), whole(r.graph.tensors[t].shape), twice=False)
        r.law("written_once", gap is None, f"output '{t}' misses a cell", step, gap)
