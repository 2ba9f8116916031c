"""Plan to Program: loads, launches, transfers and reductions for every device, and frees after the last use.

Weights that stay are loaded first; graph inputs, and weights that are streamed, just before an operation needs them.

The order is the graph's. A footprint that some device lacks is assembled in a buffer of its own by one transfer, which
every later reader of the same footprint shares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np

from tapestry.ir.footprint import Boxes
from tapestry.ir.graph import Block, Op
from tapestry.ir.kernel import Box
from tapestry.ir.plan import Layout, Mesh, Plan, Strategy, coordinates, device_count
from tapestry.ir.program import Buffer, Free, Launch, Load, Message, Program, Reduce, Shared, Step, Transfer, allocated, reads
from tapestry.ir.recognition.state import counted, native, varies
from tapestry.ir.syntax.printer import signature
from tapestry.plan import ring_attention
from tapestry.plan.cost.compute import sizes
from tapestry.plan.kinds import kind_of
from tapestry.plan.strategy import covers, footprints, merges, op_boxes, out_layout, result_boxes, tensor_boxes, which_cover

CHUNK = 1 << 16  # pairs of devices compared at once


@dataclass(slots=True)
class Shapes:
    """Boxes that were worked out for plans on one mesh, once for all operations that are alike.

    Attributes:
        needs: what an operation needs of each read; ``passing``: what it has of those that travel, by step.
        covered: which of some buffers covers a footprint best, -1 for none, all by identity, with what keeps that alive.
    """

    needs: dict[tuple[str, Strategy], list[tuple[int, Boxes]]] = field(
        default_factory=dict[tuple[str, Strategy], list[tuple[int, Boxes]]]
    )
    passing: dict[tuple[str, Strategy, int], dict[int, Boxes]] = field(
        default_factory=dict[tuple[str, Strategy, int], dict[int, Boxes]]
    )
    covered: dict[tuple[int, ...], tuple[int, list[Boxes]]] = field(
        default_factory=dict[tuple[int, ...], tuple[int, list[Boxes]]]
    )

    def tightest(self, held: list[Boxes], wanted: Boxes) -> int:
        """The number of the smallest of some buffers that hold every device's footprint; -1 where none does."""
        key = (id(wanted), *map(id, held))
        if key not in self.covered:
            stack = np.stack(held)
            at = np.flatnonzero(which_cover(stack, wanted))
            cells = sizes(stack[at]).sum(axis=-1)
            self.covered[key] = int(at[cells.argmin()]) if len(at) else -1, [wanted, *held]
        return self.covered[key][0]


def lower(plan: Plan, known: Shapes | None = None) -> Program:
    """The program of a plan; ``known``: of other plans on the same mesh."""
    state = _Lowering(plan, known or Shapes())
    state.sources()
    for i in range(len(plan.graph.ops)):
        state.op(i)
    outputs = {t: state.output(t) for t in plan.graph.outputs}
    steps = with_frees(state.steps, set(outputs.values()) | state.resident)
    return Program(devices=plan.devices, buffers=state.buffers, steps=tuple(steps), outputs=outputs)


@dataclass(slots=True)
class _Lowering:
    """Steps so far, and which buffers hold which tensor (the first one is where the tensor was produced)."""

    plan: Plan
    known: Shapes
    steps: list[Step] = field(default_factory=list[Step])
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    held: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    layouts: dict[str, Layout] = field(default_factory=dict[str, Layout])
    resident: set[str] = field(default_factory=set[str])
    waiting: set[str] = field(default_factory=set[str])
    used: dict[str, int] = field(default_factory=dict[str, int])
    boxes: dict[str, Boxes] = field(default_factory=dict[str, Boxes])
    needs: list[list[tuple[int, str, Boxes]]] = field(default_factory=list[list[tuple[int, str, Boxes]]])
    numbers: dict[str, int] = field(default_factory=dict[str, int])  # of the next buffer of a name
    exactly: dict[tuple[str, bytes], str] = field(default_factory=dict[tuple[str, bytes], str])  # buffers by what they hold

    def sources(self) -> None:
        """Load what no operation writes: in its fixed layout, or else each distinct footprint of its readers.

        Inputs without a fixed layout wait for their first reader; streamed weights are not loaded here at all.
        """
        graph, mesh = self.plan.graph, self.plan.mesh
        self.needs = self.footprints()
        wanted: dict[str, list[Boxes]] = {t: [] for t in (*graph.weights, *graph.inputs)}
        for needs in self.needs:
            for _, t, boxes in needs:
                if t in wanted:
                    wanted[t].append(boxes)
        for t, found in wanted.items():
            if t in self.plan.streamed:
                continue
            shape = graph.tensors[t].shape
            fixed = t in self.plan.inputs or t in graph.outputs
            if t in self.plan.inputs:
                self.layouts[t] = self.plan.inputs[t]
                found = [tensor_boxes(shape, self.plan.inputs[t], mesh)]
            elif t in graph.outputs:
                self.layouts[t] = (None,) * len(mesh)
                found = [tensor_boxes(shape, (None,) * len(mesh), mesh)]
            for boxes in distinct(found):
                name = self.buffer(t, boxes)
                if not fixed and t in graph.inputs:
                    self.waiting.add(name)
                    continue
                self.steps.append(Load(buffer=name))
                if t in graph.weights:
                    self.resident.add(name)

    def footprints(self) -> list[list[tuple[int, str, Boxes]]]:
        """What every operation needs: worked out once per kind of operation and strategy."""
        graph, known = self.plan.graph, self.known.needs
        out: list[list[tuple[int, str, Boxes]]] = []
        for op, s in zip(graph.ops, self.plan.strategies, strict=True):
            key = (signature(op, graph), s)
            if key not in known:
                mesh, turning = self.plan.mesh, ring_attention.travelling(op, s)
                known[key] = [
                    (k, self.passing(op, s, 0)[k] if k in turning else boxes) for k, _, boxes in footprints(op, graph, s, mesh)
                ]
            out.append([(k, op.operands[k], boxes) for k, boxes in known[key]])
        return out

    def buffer(self, tensor: str, boxes: Boxes, *, part: int | None = None, dtype: str = "", tag: str = "") -> str:
        """Declare a buffer; without ``part`` it holds the tensor itself."""
        base = tensor if part is None else f"{tensor}.state{part}{tag}"
        name, k = base, self.numbers.get(base, 1)  # of thousands of parts of one tensor none is tried again
        while name in self.buffers:
            name, k = f"{base}.{k}", k + 1
        self.numbers[base] = k
        kept = _tuples(boxes)
        dtype = dtype or self.plan.graph.tensors[tensor].dtype
        self.buffers[name] = Buffer(name=name, tensor=tensor, dtype=dtype, boxes=kept, field=part)
        self.boxes[name] = boxes
        if part is None:
            self.held.setdefault(tensor, []).append(name)
            self.exactly.setdefault((tensor, boxes.tobytes()), name)
        return name

    def covering(self, tensor: str, boxes: Boxes) -> str | None:
        """A buffer that holds every device's footprint; the tightest one."""
        same = self.exactly.get((tensor, boxes.tobytes()))
        if same is not None and tensor not in self.plan.streamed:  # no other is tighter, and none of these is let go
            return same
        names = self.held.get(tensor)
        at = self.known.tightest([self.boxes[b] for b in names], boxes) if names else -1
        return names[at] if names and at >= 0 else None

    def fetch(self, tensor: str, boxes: Boxes) -> str:
        """A buffer with the footprint, transferring what is missing."""
        found = self.covering(tensor, boxes)
        if found is None and tensor in self.plan.streamed:
            found = self.buffer(tensor, boxes)
            self.waiting.add(found)
        if found is not None:
            if found in self.waiting:
                self.waiting.remove(found)
                self.steps.append(Load(buffer=found))
            return found
        src = self.held[tensor][0]
        messages = exchange(self.boxes[src], boxes, self.layouts[tensor], self.plan.mesh)
        dst = self.buffer(tensor, boxes)
        kind = _kind(messages, self.buffers[src].boxes, self.buffers[dst].boxes)
        self.steps.append(Transfer(kind=kind, src=src, dst=dst, messages=messages))
        return dst

    def op(self, i: int) -> None:
        """One operation: fetch, launch, and merge where a reduced dimension is cut."""
        op, s = self.plan.graph.ops[i], self.plan.strategies[i]
        cut = merges(op, s)
        ins = [""] * len(op.operands)
        for t in self.plan.streamed.intersection(op.inputs):
            if self.used.get(t, i) < i - 1:  # gone since; only the operation right before leaves it loaded
                self.held[t] = []
            self.used[t] = i
        turning = ring_attention.travelling(op, s)
        for k, t, boxes in self.needs[i]:
            ins[k] = self.fetch(t, boxes)
        block = op_boxes(op, s.dims, self.plan.mesh)
        for n, t in enumerate(op.outs):
            self.layouts[t] = out_layout(op, s.out, n)
        if turning:
            self.round(i, op, ins)
            return
        if not cut:
            outs = self.outs(op)
            blocks = _tuples(block)
            self.steps.append(Launch(op=i, mode="full", blocks=blocks, ins=tuple(ins), outs=outs))
            return
        assert isinstance(op, Block)
        self.reduction(i, op, block, ins, cut)

    def outs(self, op: Op) -> tuple[str, ...]:
        """Declare the buffers of an operation's outputs."""
        shapes = [self.plan.graph.tensors[t].shape for t in op.outs]
        return tuple(
            self.buffer(t, tensor_boxes(shape, self.layouts[t], self.plan.mesh))
            for t, shape in zip(op.outs, shapes, strict=True)
        )

    def reduction(self, i: int, op: Block, block: Boxes, ins: list[str], cut: list[tuple[int, bool]]) -> None:
        """Partial states, then a reduce-scatter and an all-reduce along their mesh axes, then ``then``."""
        mesh, s = self.plan.mesh, self.plan.strategies[i]
        local, body, then = block[:, : len(op.dims)], op.body_reads(), op.then_reads()
        dtypes = [e.dtype for e in op.body]
        states = tuple(
            self.buffer(op.outs[0], _state_boxes(op, k, local), part=k, dtype=d, tag=".part") for k, d in enumerate(dtypes)
        )
        blocks = _tuples(block)
        used = tuple(b if k in body else "" for k, b in enumerate(ins))
        self.steps.append(Launch(op=i, mode="partial", blocks=blocks, ins=used, outs=states))
        final = result_boxes(op, s, mesh)
        known, sent_as = _counts(op, block), native(op) if self.plan.native_sums else ""
        scattered, gathered = [a for a, scatter in cut if scatter], [a for a, scatter in cut if not scatter]
        todo = [(kind, axes) for kind, axes in (("reduce_scatter", scattered), ("all_reduce", gathered)) if axes]
        for n, (kind, axes) in enumerate(todo):
            last = n == len(todo) - 1
            if last and not op.lowers:
                merged = self.outs(op)
            else:
                merged = tuple(
                    self.buffer(op.outs[0], _state_boxes(op, k, final), part=k, dtype=d) for k, d in enumerate(dtypes)
                )
            groups = _groups(mesh, tuple(axes))
            self.steps.append(Reduce(kind=kind, op=i, srcs=states, dsts=merged, groups=groups, known=known, sent_as=sent_as))
            states, known = merged, _merged_counts(known, groups)
        if op.lowers:
            used = tuple(b if k in then else "" for k, b in enumerate(ins))
            ends = _tuples(final)
            self.steps.append(Launch(op=i, mode="finish", blocks=ends, ins=used, outs=self.outs(op), states=states))

    def round(self, i: int, op: Op, ins: list[str]) -> None:
        """A partial state for each block that comes by, merged with those before; what travels moves on in between."""
        mesh, s = self.plan.mesh, self.plan.strategies[i]
        axis, turning, states = ring_attention.axis_of(s), ring_attention.travelling(op, s), tuple[str, ...]()
        assert isinstance(op, Block) and axis is not None
        body, then, dtypes = op.body_reads(), op.then_reads(), [e.dtype for e in op.body]
        for step in range(mesh[axis].size):
            moved: dict[tuple[str, bytes], str] = {}
            for k in sorted(turning) if step else ():
                boxes = self.passing(op, s, step)[k]
                key = ins[k], boxes.tobytes()
                if key not in moved:
                    moved[key] = self.passed_on(op.reads[k].tensor, ins[k], boxes, axis)
                ins[k] = moved[key]
            block = ring_attention.blocks(op, s, mesh, step)
            local = block[:, : len(op.dims)]
            new = tuple(
                self.buffer(op.outs[0], _state_boxes(op, k, local), part=k, dtype=d, tag=".part") for k, d in enumerate(dtypes)
            )
            used = tuple(b if k in body else "" for k, b in enumerate(ins))
            self.steps.append(Launch(op=i, mode="partial", blocks=_tuples(block), ins=used, outs=new, states=states))
            states = new
        used = tuple(b if k in then else "" for k, b in enumerate(ins))
        ends = _tuples(op_boxes(op, s.dims, mesh)[:, : len(op.dims)])
        self.steps.append(Launch(op=i, mode="finish", blocks=ends, ins=used, outs=self.outs(op), states=states))

    def passing(self, op: Op, s: Strategy, step: int) -> dict[int, Boxes]:
        """What every device has of each travelling read in a step."""
        graph, mesh = self.plan.graph, self.plan.mesh
        key = (signature(op, graph), s, step)
        if key not in self.known.passing:
            reads = ring_attention.travelling(op, s)
            self.known.passing[key] = {k: ring_attention.held(op, graph, s, mesh, k, step) for k in reads}
        return self.known.passing[key]

    def passed_on(self, tensor: str, src: str, boxes: Boxes, axis: int) -> str:
        """A buffer with the next block of what travels: one that is there, or the neighbour's."""
        found = self.covering(tensor, boxes)
        if found is not None and found not in self.waiting:
            return found
        dst = self.buffer(tensor, boxes)
        self.held[tensor].remove(dst)  # what comes by is for this operation alone
        if self.exactly[tensor, boxes.tobytes()] == dst:
            del self.exactly[tensor, boxes.tobytes()]
        messages = ring_attention.passed_on(boxes, self.plan.mesh, axis)
        self.steps.append(Transfer(kind="permute", src=src, dst=dst, messages=messages))
        return dst

    def output(self, tensor: str) -> str:
        """The buffer that holds a graph output where it must end."""
        if tensor in self.plan.outputs:
            shape = self.plan.graph.tensors[tensor].shape
            return self.fetch(tensor, tensor_boxes(shape, self.plan.outputs[tensor], self.plan.mesh))
        return self.held[tensor][0]


def _counts(op: Block, block: Boxes) -> tuple[tuple[float, ...], ...]:
    """Values of the fields that count, in every device's part; nothing where all fields must be sent."""
    fixed = counted(op)
    points: list[int] = sizes(block[:, len(op.dims) : len(op.dims) + len(op.reduce)]).tolist()
    each = (tuple(fixed[k] * n for n in points) if k in fixed else () for k in range(len(op.body)))
    return tuple(each) if fixed else ()


def _merged_counts(known: tuple[tuple[float, ...], ...], groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """What the counts are once groups of devices have merged."""
    group = {d: g for g in groups for d in g}
    return tuple(tuple(sum(field[e] for e in group[d]) for d in range(len(field))) for field in known)


def _state_boxes(op: Block, field: int, boxes: Boxes) -> Boxes:
    """Boxes of a state field: one cell along the map dimensions that it does not vary along."""
    once = [not v for v in varies(op)[field]]
    if not any(once):
        return boxes
    out = boxes.copy()
    out[:, once, 1] = np.minimum(out[:, once, 1] - out[:, once, 0], 1)  # none along a dimension without points
    out[:, once, 0] = 0
    return out


def exchange(held: Boxes, wanted: Boxes, layout: Layout, mesh: Mesh) -> tuple[Message, ...]:
    """Messages that bring to each device the part of its footprint that it lacks, from the nearest holder."""
    return _exchange(held.tobytes(), wanted.tobytes(), held.shape, layout, mesh)


@lru_cache(maxsize=1 << 12)
def _exchange(raw_held: bytes, raw_wanted: bytes, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[Message, ...]:
    held, wanted = (np.frombuffer(raw, np.int64).reshape(shape) for raw in (raw_held, raw_wanted))
    senders = _senders(layout, mesh)
    out: list[Message] = []
    for at in range(0, len(senders), max(1, CHUNK // senders.shape[1])):
        d = senders[at : at + max(1, CHUNK // senders.shape[1])]
        mine = wanted[at : at + len(d), None]
        lo, hi = np.maximum(mine[..., 0], held[d][..., 0]), np.minimum(mine[..., 1], held[d][..., 1])
        found: np.ndarray = np.all(hi > lo, axis=-1) & (d != np.arange(at, at + len(d))[:, None])
        boxes = np.stack([lo[found], hi[found]], -1).tolist()
        ends = zip(d[found].tolist(), (np.nonzero(found)[0] + at).tolist(), boxes, strict=True)
        out += [Message(src, dst, tuple((p, q) for p, q in box)) for src, dst, box in ends]
    return Shared(out)


_kind = lru_cache(maxsize=1 << 12)(kind_of)


def _senders(layout: Layout, mesh: Mesh) -> np.ndarray:
    """[receiver, sender]: the devices that differ from a receiver only along mesh axes that the layout cuts, itself among
    them, so that each block has one sender."""
    devices = np.arange(device_count(mesh)).reshape([a.size for a in mesh])
    cut = [a for a, t in enumerate(layout) if t is not None]
    n = prod(mesh[a].size for a in cut)
    groups = np.moveaxis(devices, cut, range(devices.ndim - len(cut), devices.ndim)).reshape(-1, n)
    out = np.empty((devices.size, n), np.int64)
    out[groups.ravel()] = np.repeat(groups, n, axis=0)
    return out


@lru_cache(maxsize=1 << 6)
def _groups(mesh: Mesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Devices that differ along some mesh axes only, in the order of their coordinates."""
    out: dict[tuple[int, ...], list[int]] = {}
    for c, d in sorted((c, d) for d, c in enumerate(coordinates(mesh))):
        out.setdefault(tuple(k for a, k in enumerate(c) if a not in axes), []).append(d)
    return Shared(tuple(g) for g in out.values())


def _tuples(boxes: Boxes) -> tuple[Box, ...]:
    return _tuples_of(boxes.tobytes(), boxes.shape)


@lru_cache(maxsize=1 << 14)
def _tuples_of(raw: bytes, shape: tuple[int, ...]) -> tuple[Box, ...]:
    return Shared(tuple((lo, hi) for lo, hi in box) for box in np.frombuffer(raw, np.int64).reshape(shape).tolist())


def distinct(found: list[Boxes]) -> list[Boxes]:
    """Footprints without those that another one covers on every device."""
    unique = list({b.tobytes(): b for b in found}.values())
    if len(unique) < 2:
        return unique
    stack = np.stack(unique)
    return [b for b in unique if all(covers(b, unique[k]) for k in np.flatnonzero(which_cover(stack, b)))]


def with_frees(steps: list[Step], kept: set[str]) -> list[Step]:
    """Free every buffer after the last step that touches it."""
    last: dict[str, int] = {}
    for i, s in enumerate(steps):
        for b in (*allocated(s), *filter(None, reads(s))):
            last[b] = i
    out: list[Step] = []
    for i, s in enumerate(steps):
        out.append(s)
        done = tuple(dict.fromkeys(b for b in (*filter(None, reads(s)), *allocated(s)) if last[b] == i and b not in kept))
        if done:
            out.append(Free(buffers=done))
    return out
