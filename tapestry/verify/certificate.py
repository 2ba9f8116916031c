"""The plan checker: replays a Program against its Graph and holds it to every law, from scratch.

It shares nothing with the planner and the lowering but `ir`. Footprints come from isl (the planner uses interval
arithmetic), covers from a coordinate sweep (the planner cuts by arithmetic). Each device's buffers are replayed with what
they hold: the cells of a tensor, or the partial states of an operation over known parts of its reduced dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tapestry.errors import LawError
from tapestry.ir import constraints, space
from tapestry.ir.constraints import where
from tapestry.ir.expr import Acc
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box, cut, inside, intersect, whole
from tapestry.ir.plan import Mesh, coordinates, part
from tapestry.ir.program import Buffer, Free, Launch, Load, Program, Reduce, Transfer, allocated
from tapestry.ir.text import signature
from tapestry.ir.types import DTYPES
from tapestry.verify.boxes import coverage


@dataclass(frozen=True, slots=True)
class Content:
    """What a buffer holds on one device: a tensor's cells (``op`` < 0) or states of an operation.

    ``parts`` are boxes of the reduced dimensions that the states have merged.
    """

    op: int = -1
    parts: tuple[Box, ...] = ()


@dataclass(slots=True)
class _Replay:
    graph: Graph
    program: Program
    laws: Counter[str] = field(default_factory=Counter[str])
    holds: list[dict[str, Content]] = field(default_factory=list[dict[str, Content]])
    alive: list[int] = field(default_factory=list[int])
    peak: list[int] = field(default_factory=list[int])
    resident: set[str] = field(default_factory=set[str])
    signatures: list[str] = field(default_factory=list[str])
    hulls: dict[tuple[str, int, Box], Box | None] = field(default_factory=dict[tuple[str, int, Box], Box | None])
    launched: dict[int, dict[str, list[tuple[int, Box]]]] = field(default_factory=dict[int, dict[str, list[tuple[int, Box]]]])

    def law(self, name: str, holds: bool, what: str | Callable[[], str], step: object = "", why: object = "") -> None:
        """Count one check of a law; raise when it does not hold. (Texts made on every device are functions: most pass.)"""
        self.laws[name] += 1
        if not holds:
            raise LawError(name, what if isinstance(what, str) else what(), where=str(step), why=str(why))

    def buffer(self, name: str, step: str) -> Buffer:
        """A declared buffer."""
        found = self.program.buffers.get(name)
        if found is None:
            raise LawError("read_after_write", f"buffer '{name}' does not exist", where=step)
        return found

    def value(self, name: str, device: int, tensor: str, step: str) -> Box:
        """The box of a live buffer that holds a tensor's cells on a device."""
        b = self.buffer(name, step)
        content = self.holds[device].get(name)
        self.law("read_after_write", content is not None, lambda: f"'{name}' is not alive on device {device}", step)
        ok = content is not None and content.op < 0 and b.tensor == tensor
        self.law("read_after_write", ok, lambda: f"'{name}' does not hold '{tensor}' on device {device}", step)
        box = b.boxes[device]
        assert box is not None
        return box

    def allocate(self, name: str, step: str, contents: dict[int, Content]) -> None:
        """A new buffer, once, on the devices that have a box for it and were given contents."""
        b = self.buffer(name, step)
        t = self.graph.tensors.get(b.tensor)
        self.law("agreement", t is not None and len(b.boxes) == self.program.devices, f"buffer '{name}' of nothing", step)
        assert t is not None
        for d, box in enumerate(b.boxes):
            filled = (box is not None) == (d in contents)
            self.law("written_once", filled, lambda: f"'{name}' is not filled on a device", step, d)
            if box is None:
                continue
            self.law("written_once", name not in self.holds[d], lambda: f"'{name}' is written twice on a device", step, d)
            fits = len(box) == len(t.shape) and inside(box, whole(t.shape)) and all(0 <= lo <= hi for lo, hi in box)
            self.law("agreement", fits, lambda: f"'{name}' is not inside '{b.tensor}' of shape {t.shape}", step, box)
            typed = b.field is not None or b.dtype == t.dtype
            self.law("agreement", typed, lambda: f"'{name}' is {b.dtype}, not {t.dtype}", step)
            self.holds[d][name] = contents[d]
            self.alive[d] += b.nbytes(d)
            self.peak[d] = max(self.peak[d], self.alive[d])


def check(
    graph: Graph, program: Program, *, limit: int | None = None, stated_peak: list[int] | None = None, mesh: Mesh | None = None
) -> dict[str, int]:
    """Check a graph and its program; returns how many times each law was checked.

    Args:
        mesh: the mesh that the graph's splits are bound to; the program must cut every operation as they say.
        limit: bytes that each device has.
        stated_peak: peak bytes per device that the plan claims.

    Raises:
        LawError: naming the law, the step, the device and a witness point.
    """
    r = _Replay(graph, program, holds=[{} for _ in range(program.devices)])
    r.laws.update(constraints.check(graph))
    r.alive, r.peak = [0] * program.devices, [0] * program.devices
    r.signatures = [signature(op, graph) for op in graph.ops]
    _declared(r)
    for i, step in enumerate(program.steps):
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
        assert all(b in program.buffers for b in allocated(step))
    for i, op in enumerate(graph.ops):
        _blocks(r, i, op)
        if mesh is not None:
            _as_planned(r, i, op, mesh)
    _outputs(r)
    for d, peak in enumerate(r.peak):
        r.law("memory", limit is None or peak <= limit, f"device {d} needs {peak:,} bytes of {limit}")
        r.law("memory", stated_peak is None or stated_peak[d] == peak, f"device {d} needs {peak:,} bytes, not what is stated")
    return dict(r.laws)


def _declared(r: _Replay) -> None:
    """Every buffer is a part of some tensor on every device, before any step is looked at."""
    for name, b in r.program.buffers.items():
        t, step = r.graph.tensors.get(b.tensor), f"buffer '{name}'"
        r.law("agreement", t is not None and b.name == name and b.dtype in DTYPES, "not a buffer of a tensor", step, b.tensor)
        assert t is not None
        r.law("agreement", len(b.boxes) == r.program.devices, f"{len(b.boxes)} boxes for {r.program.devices} devices", step)
        odd = next((box for box in b.boxes if box is not None and len(box) != len(t.shape)), None)
        r.law("agreement", odd is None, f"'{b.tensor}' has {len(t.shape)} axes", step, odd)


def _load(r: _Replay, step: Load, name: str) -> None:
    b = r.buffer(step.buffer, name)
    known = b.tensor in r.graph.weights or b.tensor in r.graph.inputs
    r.law("read_after_write", known and b.field is None, f"'{b.tensor}' is no input and no weight", name)
    if b.tensor in r.graph.weights:
        r.resident.add(step.buffer)
    r.allocate(step.buffer, name, {d: Content() for d, box in enumerate(b.boxes) if box is not None})


def _launch(r: _Replay, step: Launch, name: str) -> None:
    r.law("agreement", 0 <= step.op < len(r.graph.ops), f"operation {step.op} does not exist", name)
    op = r.graph.ops[step.op]
    name = f"{name} of {where(op)}"
    r.law("agreement", step.mode in ("full", "partial", "finish") and len(step.blocks) == r.program.devices, "bad launch", name)
    monoid = op.monoid if isinstance(op, Block) else None
    r.law("agreement", monoid is not None or step.mode == "full", "the operation has no states", name)
    count = len(op.reads) if isinstance(op, Block) else len(op.ins)
    r.law("agreement", len(step.ins) == count, f"{len(step.ins)} buffers for {count} reads", name)
    n = len(op.dims)
    extents = tuple(d.size for d in (op.dims if step.mode == "finish" else op.space))
    contents: dict[int, Content] = {}
    for d, block in enumerate(step.blocks):
        if block is None:
            continue
        fits = (
            len(block) == len(extents)
            and inside(block, whole(extents))
            and all(lo < hi or not e for (lo, hi), e in zip(block, extents, strict=True))
        )
        r.law("split_partition", fits, lambda: f"a device's block is not in the index space {extents}", name, block)
        if step.mode == "full":
            r.law("split_partition", block[n:] == whole(extents[n:]), "a reduction over a part is not merged", name, block)
        _reads(r, step, op, d, block, name)
        if step.mode == "finish":
            _merged_states(r, step, d, block, name)
        contents[d] = Content(step.op, (block[n:],)) if step.mode == "partial" else Content()
        r.launched.setdefault(step.op, {}).setdefault(step.mode, []).append((d, block))
    _launch_outs(r, step, op, contents, name)


def _reads(r: _Replay, step: Launch, op: Op, device: int, block: Box, name: str) -> None:
    """Laws 5 and 6: every cell that the block's points read is in the buffer that the kernel is given."""
    for k, tensor, hull in _footprints(r, step, op, block):
        r.law("read_after_write", bool(step.ins[k]), "a read has no buffer", name, tensor)
        held = r.value(step.ins[k], device, tensor, name)
        r.laws["access_preserved"] += 1
        if hull is not None and not inside(hull, held):
            outside = tuple(lo if lo < p else hi - 1 for (lo, hi), (p, q) in zip(hull, held, strict=True) if lo < p or hi > q)
            raise LawError(
                "access_preserved", f"device {device} reads '{tensor}' outside its buffer '{step.ins[k]}'",
                where=name, why=f"it needs {hull}, holds {held}; coordinate {outside}",
            )  # fmt: skip


def _footprints(r: _Replay, step: Launch, op: Op, block: Box) -> Iterator[tuple[int, str, Box | None]]:
    """(read, tensor, box hull of the cells that the block reads) for the reads that the launch's mode uses."""
    if not isinstance(op, Block):
        for k, t in enumerate(op.ins):
            if t:
                box = list(whole(r.graph.tensors[t].shape))
                for i, axis in enumerate(op.in_axes[k]):
                    if axis is not None:
                        box[axis] = block[i]
                yield k, t, tuple(box)
        return
    used = {"full": op.body_reads() | op.then_reads(), "partial": op.body_reads(), "finish": op.then_reads()}[step.mode]
    points = block + whole(tuple(d.size for d in op.reduce)) if step.mode == "finish" else block
    for k in sorted(used):
        key = (r.signatures[step.op], k, points)
        if key not in r.hulls:
            image = space.access(op, op.reads[k], r.graph.tensors[op.reads[k].tensor].shape).image(points)
            r.hulls[key] = None if image is None else image.hull()
        yield k, op.reads[k].tensor, r.hulls[key]


def _merged_states(r: _Replay, step: Launch, device: int, block: Box, name: str) -> None:
    op = r.graph.ops[step.op]
    assert isinstance(op, Block)
    r.law("agreement", len(step.states) == len(op.body), "states and fields differ in number", name)
    for k, s in enumerate(step.states):
        b, content = r.buffer(s, name), r.holds[device].get(s)
        ok = content is not None and content.op == step.op and b.field == k and b.boxes[device] == block
        r.law("read_after_write", ok, f"'{s}' does not hold field {k} of the block on device {device}", name)
        assert content is not None
        _complete(r, op, content.parts, name)


def _complete(r: _Replay, op: Block, parts: tuple[Box, ...], name: str) -> None:
    """Law 3 for monoids: every point of the reduced dimensions is merged exactly once."""
    gap, twice = coverage(parts, whole(tuple(d.size for d in op.reduce)))
    r.law("written_once", gap is None, "part of a reduction is missing", name, gap)
    r.law("written_once", twice is None, "part of a reduction is merged twice", name, twice)


def _launch_outs(r: _Replay, step: Launch, op: Op, contents: dict[int, Content], name: str) -> None:
    fields = len(op.body) if isinstance(op, Block) and step.mode == "partial" else len(op.outs)
    r.law("agreement", len(step.outs) == fields, f"{len(step.outs)} buffers for {fields} results", name)
    for k, out in enumerate(step.outs):
        b = r.buffer(out, name)
        tensor = op.outs[0] if step.mode == "partial" else op.outs[k]
        r.law(
            "agreement", b.tensor == tensor and (b.field == k) == (step.mode == "partial"), f"'{out}' is not result {k}", name
        )
        if isinstance(op, Block) and step.mode == "partial":
            r.law("agreement", b.dtype == op.body[k].dtype, f"'{out}' has another dtype than the state", name)
        for d, block in enumerate(step.blocks):
            if block is not None:
                want = _out_box(r, op, k, block)
                r.law("written_once", b.boxes[d] == want, "a buffer is not what a device computes", name, want)
        r.allocate(out, name, contents)


def _out_box(r: _Replay, op: Op, k: int, block: Box) -> Box:
    if isinstance(op, Block):
        return block[: len(op.dims)]
    box = list(whole(r.graph.tensors[op.outs[k]].shape))
    for i, axis in enumerate(op.out_axes[k]):
        assert axis is not None
        box[axis] = block[i]
    return tuple(box)


def _transfer(r: _Replay, step: Transfer, name: str) -> None:
    src, dst = r.buffer(step.src, name), r.buffer(step.dst, name)
    r.law("agreement", src.tensor == dst.tensor and src.dtype == dst.dtype and src.field == dst.field, "tensors differ", name)
    incoming: dict[int, list[Box]] = {d: [] for d in range(r.program.devices)}
    for m in step.messages:
        known = 0 <= m.src < r.program.devices and 0 <= m.dst < r.program.devices and m.src != m.dst
        r.law("agreement", known, f"message from {m.src} to {m.dst}", name)
        held = r.value(step.src, m.src, src.tensor, name)
        lies = len(m.box) == len(held) and inside(m.box, held)
        r.law("read_after_write", lies, lambda: "a device sends what it lacks", name, m)
        incoming[m.dst].append(m.box)
    contents: dict[int, Content] = {}
    for d, box in enumerate(dst.boxes):
        if box is None:
            continue
        local = None if src.boxes[d] is None else intersect(r.value(step.src, d, src.tensor, name), box)
        stray = next((b for b in incoming[d] if not inside(b, box)), None)
        r.law("read_after_write", stray is None, f"device {d} receives what it has no place for", name, stray)
        gap, twice = coverage([*incoming[d], *([local] if local else [])], box)
        r.law("read_after_write", gap is None, f"device {d} lacks cells of '{src.tensor}' after the transfer", name, gap)
        r.law("written_once", twice is None, f"device {d} receives a cell of '{src.tensor}' twice", name, twice)
        contents[d] = Content()
    r.allocate(step.dst, name, contents)


def _reduce(r: _Replay, step: Reduce, name: str) -> None:
    op = r.graph.ops[step.op] if 0 <= step.op < len(r.graph.ops) else None
    ok = isinstance(op, Block) and len(step.srcs) == len(step.dsts) == len(op.body)
    r.law("agreement", ok and step.kind in ("all_reduce", "reduce_scatter"), "not a reduction of states", name)
    assert isinstance(op, Block)
    members = Counter(d for g in step.groups for d in g)
    r.law("written_once", set(members) == set(range(r.program.devices)) and max(members.values()) == 1, "groups overlap", name)
    contents: list[dict[int, Content]] = [{} for _ in step.dsts]
    for group in step.groups:
        for k, (s, t) in enumerate(zip(step.srcs, step.dsts, strict=True)):
            src, dst = r.buffer(s, name), r.buffer(t, name)
            r.law("agreement", dst.dtype == op.body[k].dtype, f"'{t}' has another dtype than the state", name, dst.dtype)
            ours = dst.field is None or (dst.field == k and dst.tensor == op.outs[0])
            r.law("agreement", ours, f"'{t}' is not field {k} of the states", name)
            parts: list[Box] = []
            for d in group:
                content = r.holds[d].get(s)
                held = content is not None and content.op == step.op and src.field == k
                r.law("read_after_write", held, f"'{s}' holds no states of field {k} on device {d}", name)
                assert content is not None
                parts += content.parts
            gap, twice = coverage(parts, whole(tuple(d.size for d in op.reduce)))
            r.law("written_once", twice is None, "a state is merged twice", name, twice)
            for d in group:
                for e in group:
                    part, held_box = dst.boxes[d], src.boxes[e]
                    fits = part is not None and held_box is not None and inside(part, held_box)
                    r.law("read_after_write", fits, lambda: "a device has no states for another's part", name, dst.boxes[d])
                same = step.kind == "reduce_scatter" or dst.boxes[d] == src.boxes[d]
                r.law("agreement", same, "an all-reduce changes a box", name)
                if dst.field is None:
                    r.law("written_once", gap is None, "part of a reduction is missing", name, gap)
                    plain = op.then[k : k + 1] == (Acc(k, op.body[k].dtype),) and dst.tensor == op.outs[k]
                    r.law("agreement", plain, f"'{t}' is not the merged state", name)
                contents[k][d] = Content() if dst.field is None else Content(step.op, tuple(parts))
    for t, c in zip(step.dsts, contents, strict=True):
        r.allocate(t, name, c)
    if all(r.buffer(t, name).field is None for t in step.dsts):
        r.launched.setdefault(step.op, {}).setdefault("merged", [])


def _free(r: _Replay, step: Free, name: str) -> None:
    for b in step.buffers:
        buffer = r.buffer(b, name)
        r.law("read_after_write", b not in r.resident, f"'{b}' holds a weight, which stays loaded", name)
        for d, box in enumerate(buffer.boxes):
            if box is not None:
                r.law("read_after_write", b in r.holds[d], f"'{b}' is freed but not alive on device {d}", name)
                del r.holds[d][b]
                r.alive[d] -= buffer.nbytes(d)


def _blocks(r: _Replay, i: int, op: Op) -> None:
    """Law 4 over devices: blocks of one operation are equal (replicas) or disjoint, and cover its index space."""
    found = r.launched.get(i, {})
    modes = found.get("full") or found.get("partial") or []
    r.law("split_partition", bool(modes), "the operation is never run", where(op))
    distinct = list(dict.fromkeys(b for _, b in modes))
    gap, twice = coverage(distinct, whole(tuple(d.size for d in op.space)))
    r.law("split_partition", gap is None, "a point is computed by no device", where(op), gap)
    r.law("split_partition", twice is None, "a point is in two different blocks", where(op), twice)
    if "partial" in found:
        r.law("written_once", "finish" in found or "merged" in found, "partial states are never merged", where(op))
        ends = list(dict.fromkeys(b for _, b in found.get("finish", [])))
        if ends:
            gap, _ = coverage(ends, whole(tuple(d.size for d in op.dims)))
            r.law("written_once", gap is None, "an output cell is never finished", where(op), gap)


def _as_planned(r: _Replay, i: int, op: Op, mesh: Mesh) -> None:
    """Law 4: what each device computes of an operation is the block that the plan's splits give it."""
    names = [f"mesh.{a.name}" for a in mesh]
    cut_by = {d.name: tuple(names.index(s.to) for s in op.splits if s.dim == d.name and s.to in names) for d in op.space}
    found = r.launched.get(i, {})
    for d, coordinate in enumerate(coordinates(mesh)):
        planned = tuple(cut(e.size, *part(mesh, cut_by[e.name], coordinate)) for e in op.space)
        mine = [b for device, b in found.get("full") or found.get("partial") or [] if device == d]
        hull = tuple((min(lo for lo, _ in axis), max(hi for _, hi in axis)) for axis in zip(*mine, strict=True))
        same = bool(mine) and hull == planned
        r.law("split_partition", same, "a device does not compute what the plan gives it", where(op), (hull, planned))


def _outputs(r: _Replay) -> None:
    for t in r.graph.outputs:
        name = r.program.outputs.get(t, "")
        b = r.buffer(name, f"output '{t}'")
        boxes = [r.value(name, d, t, f"output '{t}'") for d, box in enumerate(b.boxes) if box is not None]
        gap, _ = coverage(boxes, whole(r.graph.tensors[t].shape))
        r.law("written_once", gap is None, f"output '{t}' misses a cell", why=gap)
