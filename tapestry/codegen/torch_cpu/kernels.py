"""Kernels of the ``torch-cpu`` target: closures over torch operators, one per distinct block of one operation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from tapestry.codegen.torch_cpu import conv_int8, sibling_sums
from tapestry.codegen.torch_cpu.attention_c import attention_kernel, scored
from tapestry.codegen.torch_cpu.base import closures, contract, point_values, scalars
from tapestry.codegen.torch_cpu.base.point_values import Expressions, Run, gather, held, pieces, product_by_groups
from tapestry.codegen.torch_cpu.base.scalars import tensor_of
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, localise
from tapestry.codegen.torch_cpu.c import blocks_c, conv_c
from tapestry.codegen.torch_cpu.c.blocks_c import PLAIN, How, Mapped, as_loops, mapped
from tapestry.codegen.torch_cpu.c.c_calls import Recorded, Together
from tapestry.codegen.torch_cpu.torch_ops import dense, layers
from tapestry.codegen.torch_cpu.torch_ops.layers import viewed
from tapestry.codegen.torch_cpu.views import pixels, rows, seen
from tapestry.ir import plan
from tapestry.ir.expr import Expr, arg_positions
from tapestry.ir.graph import Block, Graph, Op, Opaque
from tapestry.ir.kernel import Box, Kernel, shape, size
from tapestry.ir.monoid import parts_of
from tapestry.ir.recognise import only_sums, part, sides
from tapestry.ir.states import as_scan, layered
from tapestry.ir.types import HOST, STORED, numpy_dtype
from tapestry.onnx_eval import opaque_node
from tapestry.plan.strategy import read_box

Tensor = torch.Tensor


WRITING = 4  # points of a reduction that loops take as long for as torch for a cell that it writes out


def build(graph: Graph, kernel: Kernel, how: How = PLAIN) -> Run:
    """The function that computes a block; nothing of its shape is worked out again when it runs."""
    op = graph.ops[kernel.op]
    if isinstance(op, Opaque):
        return _opaque(op, graph, kernel)
    view = seen(op, graph, kernel)
    if not view and (found := _by_rows(op, graph, kernel, how) or _by_pixels(op, graph, kernel, how)):
        return found
    run = viewed(_built(view.op, view.graph, view.kernel, how), view) if view else _built(op, graph, kernel, how)
    if isinstance(run, dense.Packable) and not any(_of_weights(graph, op.reads[k].tensor) for k in run.packs):
        run = run.plain  # what might be packed is worked out at every run
    made = isinstance(run, Recorded | Together | Mapped | dense.Packable)
    return run if made else as_loops(op, graph, kernel, run, partial(_is_dear, op, graph, kernel), how)


def _of_weights(graph: Graph, tensor: str) -> bool:
    """Whether a tensor is given, or follows from weights alone."""
    at, seen, todo = graph.producers(), set[str](), [tensor]
    while todo and tensor in at:
        t = todo.pop()
        if t in seen or t in graph.weights:
            continue
        if t not in at:
            return False
        seen.add(t)
        todo += graph.ops[at[t]].inputs
    return True


def _by_rows(op: Block, graph: Graph, kernel: Kernel, how: How) -> Run | None:
    """The function in C of a norm of rows, one for any sizes; ``None`` where there is none."""
    view = rows(op, graph, kernel) if layers.by_rows(op) and not blocks_c.rms_norm(op, kernel) else None
    if view is None:
        return None
    plain = _built(op, graph, kernel, how)
    one = replace(how, any_size=True)  # the bits of a build are those at any of its sizes
    run = as_loops(view.op, view.graph, view.kernel, plain, lambda: True, one)
    found = viewed(run, view)
    if not isinstance(run, Mapped) or not isinstance(found, Mapped):
        return None
    return replace(found, plain=plain, compiles=how.compiles, reads=run.reads)  # a matrix of rows is the same cells in order


def _by_pixels(op: Block, graph: Graph, kernel: Kernel, how: How) -> Run | None:
    """The function in C of an operation on images, pixel by pixel; ``None`` where there is none."""
    view = pixels(op, graph, kernel) if conv_c.available() and not how.any_size else None
    if view is None or blocks_c.mean(op, kernel) or conv_c.pooled(op, kernel):
        return None
    run = _built(view.op, view.graph, view.kernel, how)
    run = run if isinstance(run, Mapped) else as_loops(view.op, view.graph, view.kernel, run, lambda: True, how)
    return viewed(run, view) if isinstance(run, Mapped) else None


def _is_dear(op: Block, graph: Graph, kernel: Kernel) -> bool:
    """Whether torch has no operator for an operation: it would write out the points of a reduction, or gather cell by cell."""
    if op.monoid is None:
        return _gathers(op, op.body)
    if layers.by_rows(op):
        return True
    plain = len(op.body) == 1 and not op.inner and not layered(op) and len(parts_of(op.monoid)) == 1
    frame = Frame(op.space, kernel.block)
    if not plain or kernel.mode != "full" or _read_off(op, graph, kernel, frame):
        return False
    found = sides(op)
    if found is None:
        return gather(op, graph, kernel, frame) is None
    extents = {d.name: hi - lo for d, (lo, hi) in zip(op.space, kernel.block, strict=True)}
    written_out = sum(
        prod(extents[d] for d in dims) for f, dims in zip(found[:2], found[2:], strict=True) if _gathers(op, (f,))
    )
    return WRITING * written_out > size(kernel.block)


def _gathers(op: Block, exprs: Sequence[Expr]) -> bool:
    """Whether places are read, or left out, that are no affine function of the point: torch would pick cells one by one."""
    reads = [op.reads[k] for k in arg_positions(tuple(exprs))]
    terms = (a for r in reads for e in (*r.index, *(g.aff for g in r.when)) for a, _ in e.terms)
    return any(not isinstance(a, str) for a in terms)


def _built(op: Block, graph: Graph, kernel: Kernel, how: How) -> Run:
    """The function that is fastest where there are many points."""
    if kernel.mode == "finish":
        return _finish(op, graph, kernel)
    if op.monoid is None:
        results = Expressions(op, graph, kernel, op.body, Frame(op.dims, kernel.block))
        return mapped(op, graph, kernel, pieces(op, graph, kernel) or (lambda ins, _: results(ins, [])), how)
    if kernel.mode == "full":
        ours = attention_kernel(op, graph, kernel, how) or (None if how.any_size else scored(op, graph, kernel))
        if ours and not ours.names:
            return ours.run
        if ours:
            return Mapped(_whole(op, graph, kernel), ours.names, ours.run, few=True, compiles=how.compiles)
        found = (
            layers.layer_norm(op, kernel)
            or blocks_c.rms_norm(op, kernel)
            or blocks_c.mean(op, kernel)
            or conv_c.pooled(op, kernel)
        )
        if found:
            return found
        if cut := contract.regrouped(op, graph, kernel):
            run, wanted = build(*cut, how), [shape(b) for b in kernel.outs]
            return lambda ins, given: [x.contiguous().view(w) for x, w in zip(run(ins, given), wanted, strict=True)]
    if kernel.mode == "partial":
        states = _states(op, graph, kernel)
        shapes = [shape(b) for b in kernel.outs]
        plain = _partial(op, lambda ins: [_once(s, wanted, ins) for s, wanted in zip(states(ins), shapes, strict=True)])
        return dense.partial(op, graph, kernel, plain)
    plain = mapped(op, graph, kernel, _whole(op, graph, kernel), how)
    return conv_int8.packable(op, graph, kernel, plain) or sibling_sums.packable(op, graph, kernel, plain, _whole, how)


def _whole(op: Block, graph: Graph, kernel: Kernel) -> Run:
    """A reduction from buffers as they are to its results."""
    states = _states(op, graph, kernel)
    tail = Expressions(op, graph, kernel, op.then, Frame(op.dims, kernel.block[: len(op.dims)]))
    return lambda ins, _: tail(ins, states(ins))


def _once(state: Tensor, wanted: tuple[int, ...], ins: Sequence[Tensor | None]) -> Tensor:
    """A state's first cell along the dimensions that it does not vary along, all others as they are, in memory of its own."""
    cut = tuple(slice(0, n) for n in wanted)
    out = state[cut].expand(wanted).contiguous()
    given = any(x is not None and x.data_ptr() == out.data_ptr() for x in ins)
    return out.clone() if given or out.untyped_storage().nbytes() != out.nbytes else out


def _partial(op: Block, part: Callable[[Sequence[Tensor | None]], list[Tensor]]) -> Run:
    """States of a part of the reduction, merged after those that are given, if any are."""
    dtypes = tuple(e.dtype for e in op.body)

    def run(ins: Sequence[Tensor | None], before: Sequence[Tensor]) -> list[Tensor]:
        assert op.monoid
        found = part(ins)
        return closures.combine(op.monoid, list(before), found, dtypes) if before else found

    return run


def _finish(op: Block, graph: Graph, kernel: Kernel) -> Run:
    tail = Expressions(op, graph, kernel, op.then, Frame(op.dims, kernel.block))
    return lambda ins, states: tail(ins, list(states), kept=states)


def _states(op: Block, graph: Graph, kernel: Kernel) -> Callable[[Sequence[Tensor | None]], list[Tensor]]:
    """Monoid states of each output point over the block, once along the dimensions that a field does not vary along."""
    if len(op.body) > 1 and only_sums(op.monoid) and not op.inner:  # each sum by itself
        alone = [_states(part(op, k), graph, kernel) for k in range(len(op.body))]
        return lambda ins: [states(ins)[0] for states in alone]
    frame = Frame(op.space, kernel.block)
    if found := product_by_groups(op, graph, kernel, frame):
        return found
    if layered(op):
        if not op.inner and (whole := _scan(op, graph, kernel)):
            return whole
        return (None if op.inner else gather(op, graph, kernel, frame)) or layers.states(op, graph, kernel)
    if len(parts := parts_of(op.monoid or "")) > 1:  # each in its own way
        runs = [_states(replace(op, monoid=name, body=op.body[a:b], then=()), graph, kernel) for name, a, b in parts]
        return lambda ins: [x for run in runs for x in run(ins)]
    return (
        _read_off(op, graph, kernel, frame)
        or point_values.tiled_product(op, graph, kernel, frame)
        or gather(op, graph, kernel, frame)
        or point_values.states(op, graph, kernel)
    )


def _read_off(
    op: Block, graph: Graph, kernel: Kernel, frame: Frame
) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    """The states of a reduction that torch has an operator for, on tensors as they are."""
    return (
        _scan(op, graph, kernel)
        or _convolution(op, graph, kernel, frame)
        or conv_c.transposed(op, graph, kernel)
        or conv_c.max_pool(op, kernel)
        or conv_int8.convolution(op, graph, kernel, frame)
        or dense.product(op, graph, kernel, frame)
    )


def _scan(op: Block, graph: Graph, kernel: Kernel) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    found = as_scan(op)
    if found is None or any(d.size == 0 for d in op.space):
        return None
    runs = layers.runs(op, found, kernel.block)
    body = Expressions(runs.op, graph, kernel, runs.op.body, runs.frame)
    shape = runs.frame.extents
    return lambda ins: layers.scan_states(op, found, runs, [v.expand(shape) for v in body.values(ins, [])])


def _convolution(
    op: Block, graph: Graph, kernel: Kernel, frame: Frame
) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    if len(op.body) != 1 or op.body[0].dtype not in ("f32", "f64"):
        return None
    here = localise(op, graph, kernel)
    found = contract.conv_of(here)
    if found is None:
        return None
    x, w = here.held[found.x], here.held[found.w]
    run = contract.conv(here.op, found, here.frame, x.box, w.box, x.shape)
    shape = frame.extents[: len(op.dims)]
    return lambda ins: [run(held(ins[found.x])[x.take], held(ins[found.w])[w.take]).reshape(shape)]


def _opaque(op: Opaque, graph: Graph, kernel: Kernel) -> Run:
    """Slices along the dimensions that the node commutes with, then the node itself."""
    takes: list[tuple[tuple[slice, ...], tuple[int, ...]] | None] = []
    expected = [(graph.tensors[t].dtype, shape(box)) for t, box in zip(op.outs, kernel.outs, strict=True)]
    dtypes = [graph.tensors[t].dtype if t else "" for t in op.ins]
    for t, axes, box in zip(op.ins, op.in_axes, kernel.ins, strict=True):
        if not t or box is None:
            takes.append(None)
            continue
        cut = [slice(-lo, n - lo) for (lo, _), n in zip(box, graph.tensors[t].shape, strict=True)]
        for (lo, hi), axis in zip(kernel.block, axes, strict=True):
            if axis is not None:
                cut[axis] = slice(lo - box[axis][0], hi - box[axis][0])
        takes.append((tuple(cut), tuple(s.stop - s.start for s in cut)))

    def run(ins: Sequence[Tensor | None], _: Sequence[Tensor]) -> list[Any]:
        arrays = [None if c is None else _argument(held(x), c, d) for x, c, d in zip(ins, takes, dtypes, strict=True)]
        found = opaque_node.run(op, arrays, expected)
        kept = [opaque_node.HostValue(a) if d == HOST else np.array(a) for a, (d, _) in zip(found, expected, strict=True)]
        return [from_numpy(a) for a in kept]

    return run


_BITS = frozenset(numpy_dtype(d).name for d in STORED)


def _argument(x: Any, part: tuple[tuple[slice, ...], tuple[int, ...]], dtype: str) -> Any:
    """A block of a buffer; of no cells, any buffer holds it, whatever its own sizes are."""
    if dtype == HOST:
        return x
    return np.empty(part[1], numpy_dtype(dtype)) if 0 in part[1] else to_numpy(x[part[0]], dtype)


def to_numpy(x: Any, dtype: str = "") -> Any:
    """A numpy array with the tensor's bits, as an element type of ours (ml_dtypes' where numpy has none)."""
    if dtype == HOST:
        return x.value
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(numpy_dtype("bf16"))
    if x.dtype == torch.uint8 and dtype in STORED:
        return x.contiguous().numpy().view(numpy_dtype(dtype))
    return x.numpy()


def from_numpy(a: Any) -> Any:
    """A tensor with the array's bits (it may share them); values of the host stay as they are."""
    if isinstance(a, opaque_node.HostValue):
        return a
    a = np.ascontiguousarray(a).reshape(a.shape)  # numpy would make a scalar a vector
    if a.dtype.name == "bfloat16":
        return tensor_of(a.view(np.int16)).view(torch.bfloat16)
    if a.dtype.itemsize == 1 and a.dtype.name in _BITS:  # a type that torch does not have, or has otherwise: its bits
        a = a.view(np.uint8)
    return tensor_of(a if a.flags.writeable else a.copy())


# Kernels in canonical blocks (`ir.plan`): the same calls on the same bytes, however many devices share them.
#
# Each call has one thread, whatever torch is set to: which kernel is taken, and in how many pieces it sums, may depend on that.


ALIGNMENT = 64  # bytes, of whatever torch allocates


def build_exact(graph: Graph, kernel: Kernel) -> Run:
    """The function that computes a block, canonical block by canonical block."""
    op = graph.ops[kernel.op]
    along = None if plan.free(op) else plan.canonical(op)
    if plan.free(op) or any(graph.tensors[t].dtype == HOST for t in (*op.inputs, *op.outs)):
        return build(graph, kernel)
    assert kernel.mode == "full", "a reduction that rounds is not cut"
    at = -1 if along is None else [d.name for d in op.dims].index(along.name)
    spans = [(0, 0)] if along is None else plan.blocks(along.size, *kernel.block[at])
    with _one_thread():
        parts = [_Part(graph, kernel, op, at, span) for span in spans]
    dtypes = [scalars.TORCH_DTYPES[graph.tensors[t].dtype] for t in op.outs]

    def run(ins: Sequence[Tensor | None], states: Sequence[Tensor]) -> list[Tensor]:
        outs = [torch.empty(shape(box), dtype=d) for box, d in zip(kernel.outs, dtypes, strict=True)]
        copies: dict[tuple[int, Box], Tensor] = {}  # a weight that every block reads whole is copied once
        with _one_thread():
            for part in parts:
                part(ins, outs, copies)
        return outs

    return run


@contextmanager
def _one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Part:
    """One canonical block: slices of the inputs, a kernel of its own, and where its results go."""

    def __init__(self, graph: Graph, kernel: Kernel, op: Op, at: int, span: tuple[int, int]) -> None:
        block = tuple(span if i == at else box for i, box in enumerate(kernel.block))
        self.takes: list[tuple[tuple[slice, ...], Box] | None] = []
        boxes: list[Box | None] = []
        for k, own in enumerate(kernel.ins):
            want = None if own is None else read_box(op, graph, k, block)
            boxes.append(want)
            self.takes.append(None if want is None or own is None else (_within(want, own), want))
        self.outs = [_out_box(op, n, block, box) for n, box in enumerate(kernel.outs)]
        self.places = [_within(box, whole) for box, whole in zip(self.outs, kernel.outs, strict=True)]
        inner = Kernel(op=kernel.op, mode="full", block=block, ins=tuple(boxes), outs=tuple(self.outs))
        self.kernel = build(graph, inner)

    def __call__(self, ins: Sequence[Tensor | None], outs: Sequence[Tensor], copies: dict[tuple[int, Box], Tensor]) -> None:
        """Compute the block; inputs are contiguous and aligned alike, copied where they are not: kernels may tell otherwise."""
        given: list[Tensor | None] = []
        for k, (x, take) in enumerate(zip(ins, self.takes, strict=True)):
            if x is None or take is None:
                given.append(None)
                continue
            place, box = take
            if (k, box) not in copies:
                part = x[place]
                same = part.is_contiguous() and part.data_ptr() % ALIGNMENT == 0
                copies[k, box] = part if same else part.clone(memory_format=torch.contiguous_format)
            given.append(copies[k, box])
        for out, place, value in zip(outs, self.places, self.kernel(given, []), strict=True):
            out[place] = value


def _out_box(op: Op, n: int, block: Box, whole: Box) -> Box:
    if isinstance(op, Block):
        return block[: len(whole)]
    box = list(whole)
    for i, axis in enumerate(op.out_axes[n]):
        if axis is not None:
            box[axis] = block[i]
    return tuple(box)


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, outer, strict=True))
