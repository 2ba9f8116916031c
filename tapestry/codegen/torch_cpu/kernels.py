"""Kernels of the ``torch-cpu`` target: closures over torch operators, one per distinct block of one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from tapestry.codegen.torch_cpu import native, sibling_sums
from tapestry.codegen.torch_cpu.attention_c import attention_kernel
from tapestry.codegen.torch_cpu.attention_scores import scored
from tapestry.codegen.torch_cpu.base import contract, state_merges, tiled_sums
from tapestry.codegen.torch_cpu.base.local_view import localise
from tapestry.codegen.torch_cpu.base.point_values import Expressions, Run, held
from tapestry.codegen.torch_cpu.base.selection import gather, product_by_groups
from tapestry.codegen.torch_cpu.base.strided_reads import Frame
from tapestry.codegen.torch_cpu.base.tiled_sums import tiled_product
from tapestry.codegen.torch_cpu.base.torch_api import tensor_of
from tapestry.codegen.torch_cpu.base.ways import Chosen, Refusal, Way, first
from tapestry.codegen.torch_cpu.c.blocks_c import LEAST, PLAIN, How, as_loops, by_rows, loops_of
from tapestry.codegen.torch_cpu.c.c_calls import CpuKernel
from tapestry.codegen.torch_cpu.c.nest_c import of_rows
from tapestry.codegen.torch_cpu.c.recurrent_c import recurrent
from tapestry.codegen.torch_cpu.pixel_view import pixels
from tapestry.codegen.torch_cpu.torch_ops import dense, integers, layers, norms
from tapestry.codegen.torch_cpu.torch_ops.viewed import viewed
from tapestry.codegen.torch_cpu.views import seen
from tapestry.ir.expr import Expr, arg_positions
from tapestry.ir.graph import Block, Graph, Opaque
from tapestry.ir.kernel import Kernel, shape, size
from tapestry.ir.monoid import parts_of
from tapestry.ir.recognition.contraction import only_sums, part, sides
from tapestry.ir.recognition.running_state import as_scan
from tapestry.ir.recognition.state import layered
from tapestry.ir.types import HOST, STORED, numpy_dtype
from tapestry.ir.types import Tensor as TensorType
from tapestry.onnx_eval import opaque_node

Tensor = torch.Tensor


WRITING = 4  # points of a reduction that loops take as long for as torch for a cell that it writes out
States = Callable[[Sequence[Tensor | None]], list[Tensor]]


@dataclass(frozen=True)
class Asked:
    """A block that is to be computed: of an operation, or of a view of it, whose graph and operation are then ``of``."""

    op: Block
    graph: Graph
    kernel: Kernel
    how: How
    of: tuple[Block, Graph]

    @cached_property
    def frame(self) -> Frame:
        """The block's index space."""
        return Frame(self.op.space, self.kernel.block)

    @cached_property
    def operators(self) -> CpuKernel:
        """The kernel of torch's operators alone."""
        if self.op.monoid is None:
            return CpuKernel(plain=_map(self))
        found = _states(self.op, self.graph, self.kernel)
        run = _whole(self.op, self.graph, self.kernel, found.made)
        return CpuKernel(plain=run, way=f"torch's operators: {found.name}", tried=found.tried)

    @cached_property
    def plain(self) -> CpuKernel:
        """The kernel on buffers as they are, for weights that there is no room to pack."""
        return _part(self) if self.kernel.mode == "partial" else _first(ON_BUFFERS, self)


def build(graph: Graph, kernel: Kernel, how: How = PLAIN) -> CpuKernel:
    """What computes a block, by the tables below; nothing of its shape is worked out again when it runs."""
    op = graph.ops[kernel.op]
    if isinstance(op, Opaque):
        plain = CpuKernel(plain=_opaque(op, graph, kernel), way=f"{node_library(op, graph)}, the node as the model has it")
        ours = recurrent(op, graph, kernel, plain)
        return replace(ours or plain, way="recurrence, in C" if ours else plain.way)
    return _first(AS_A_WHOLE, Asked(op, graph, kernel, how, (op, graph)))


def _first(table: Sequence[Way[Asked, CpuKernel]], asked: Asked) -> CpuKernel:
    """The first kernel of a table, with what was tried before it."""
    found = first(table, asked)
    assert isinstance(found, Chosen), "the last row of a table takes everything"
    return replace(found.made, way=found.made.way or found.name, tried=(*found.tried, *found.made.tried))


def _by_rows(a: Asked) -> CpuKernel | Refusal:
    """The function in C of a norm of rows, one for any sizes."""
    if seen(a.op, a.graph, a.kernel) or not norms.by_rows(a.op):
        return Refusal("no row is reduced and then read again")
    found = loops_of(a.op, a.graph, a.kernel)
    if not found or not of_rows(*found.tasks):
        return Refusal("no function in C, or rows do not lie one after another")
    plain = _first(TABLES[a.kernel.mode], a)
    made = found.made(plain, replace(a.how, any_size=True), few=False)  # the bits of a build are those at any of its sizes
    return replace(made, compiles=a.how.compiles)


def _by_pixels(a: Asked) -> CpuKernel | Refusal:
    """The function in C of an operation on images, pixel by pixel."""
    if native.library() is None or a.how.any_size or seen(a.op, a.graph, a.kernel):
        return Refusal("C is not built here, or it is a function for any size, or of a view")
    view = pixels(a.op, a.graph, a.kernel)
    if view is None:
        return Refusal("it reads no image that lies pixel by pixel")
    of = Asked(view.op, view.graph, view.kernel, a.how, a.of)
    run = _first(TABLES[a.kernel.mode], of)
    run = run if run.functions and not run.packs else as_loops(of.op, of.graph, of.kernel, run, lambda: True, a.how)
    return viewed(run, view) if run else Refusal(f"no function in C: {run.why}")


def _by_structure(a: Asked) -> CpuKernel:
    """The kernel for what the operation is, on views of its buffers where it has one; or loops over its space."""
    view = seen(a.op, a.graph, a.kernel)
    own = Asked(view.op, view.graph, view.kernel, a.how, a.of) if view else a
    run = _first(TABLES[a.kernel.mode], own)
    run = viewed(run, view) if view else run
    if run.ours:
        return run
    loops = as_loops(a.op, a.graph, a.kernel, run, lambda: _is_dear(a), a.how)
    if loops:
        return replace(loops, way="loops in C", tried=run.tried)
    return replace(run, tried=(*run.tried, ("loops in C", loops.why)))


def _is_dear(a: Asked) -> bool:
    """Whether torch has no operator for an operation: it would write out the points of a reduction, or gather cell by cell."""
    op, graph, kernel = a.op, a.graph, a.kernel
    if op.monoid is None:
        return _gathers(op, op.body)
    if norms.by_rows(op):
        return True
    plain = len(op.body) == 1 and not op.inner and not layered(op) and len(parts_of(op.monoid)) == 1
    if not plain or kernel.mode != "full" or first(OPERATORS, a):
        return False
    found = sides(op)
    if found is None:
        return not gather(op, graph, kernel, a.frame)
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


def _on_weights(a: Asked, made: CpuKernel | Refusal) -> CpuKernel | Refusal:
    """A kernel on packed weights; a refusal where what would be packed is worked out at every run."""
    op, graph = a.of
    if not made or not made.packs or any(_of_weights(graph, op.reads[k].tensor) for k in made.packs):
        return made
    return Refusal("what would be packed is worked out at every run")


def _attention(a: Asked) -> CpuKernel | Refusal:
    return _with_plain(a, attention_kernel(a.op, a.graph, a.kernel, a.how))


def _scored(a: Asked) -> CpuKernel | Refusal:
    if a.how.any_size:
        return Refusal("a function for any size has sizes for arguments, which scores do not")
    return _with_plain(a, scored(a.op, a.graph, a.kernel))


def _with_plain(a: Asked, made: CpuKernel | Refusal) -> CpuKernel | Refusal:
    """A kernel that calls generated functions with torch's operators behind it, where there is no compiler."""
    few = size(a.kernel.block) < LEAST
    return replace(made, plain=a.operators, few=few) if made and made.functions else made


def _map(a: Asked) -> Run:
    """An operation without a reduction, on torch's operators."""
    results = Expressions(a.op, a.graph, a.kernel, a.op.body, Frame(a.op.dims, a.kernel.block))
    return lambda ins, _: results(ins, [])


def _eights(a: Asked) -> CpuKernel | Refusal:
    made = integers.packed_convolution(a.op, a.graph, a.kernel, a.plain)
    return _on_weights(a, made or integers.packed_product(a.op, a.graph, a.kernel, a.plain))


def _sums(a: Asked) -> CpuKernel | Refusal:
    return _on_weights(a, sibling_sums.packable(a.op, a.graph, a.kernel, a.plain, _whole, a.how))


def _dense_convolution(a: Asked) -> CpuKernel | Refusal:
    return _on_weights(a, dense.convolution_on_packed(a.op, a.graph, a.kernel, a.plain, a.how))


def _linear_layer(a: Asked) -> CpuKernel | Refusal:
    return _on_weights(a, dense.linear_on_packed(a.op, a.graph, a.kernel, a.plain, a.how))


def _part_on_packed(a: Asked) -> CpuKernel | Refusal:
    return _on_weights(a, dense.partial(a.op, a.graph, a.kernel, a.plain))


def _part(a: Asked) -> CpuKernel:
    """States of a part of the reduction, merged after those that are given, if any are."""
    op, shapes, dtypes = a.op, [shape(b) for b in a.kernel.outs], tuple(e.dtype for e in a.op.body)
    found = _states(op, a.graph, a.kernel)

    def run(ins: Sequence[Tensor | None], before: Sequence[Tensor]) -> list[Tensor]:
        assert op.monoid
        part = [_once(s, wanted, ins) for s, wanted in zip(found.made(ins), shapes, strict=True)]
        return state_merges.combine(op.monoid, list(before), part, dtypes) if before else part

    return CpuKernel(plain=run, way=f"torch's operators: {found.name}", tried=found.tried)


def _finish(a: Asked) -> CpuKernel:
    tail = Expressions(a.op, a.graph, a.kernel, a.op.then, Frame(a.op.dims, a.kernel.block))
    return CpuKernel(plain=lambda ins, states: tail(ins, list(states), kept=states))


Kernels = Sequence[Way[Asked, CpuKernel]]
AS_A_WHOLE: Kernels = (
    Way("rows of a norm, in C", _by_rows, "torch reads the rows several times, and one function serves every size"),
    Way("pixel by pixel, in C", _by_pixels, "images lie so; row by row they would be moved before and after"),
    Way("", _by_structure, "everything else: the kernel for what the operation is"),
)
"""What is asked first: whether the operation is better seen as rows or as pixels."""

ON_BUFFERS: Kernels = (
    Way(
        "row by row, in C",
        lambda a: by_rows(a.op, a.graph, a.kernel, a.operators, a.how),
        "one pass, where torch makes one for each operator",
    ),
    Way("torch's operators", lambda a: a.operators, "takes everything, so it comes last"),
)
"""Kernels that read buffers as they are."""

KERNELS: Kernels = (
    Way("attention", _attention, "torch would write all scores out; asked before what would take the scores for less"),
    Way("attention, scores in generated C", _scored, "takes any score, and is slower than the one above"),
    Way("convolution or product of 8 bits on a packed weight", _eights, "sums in i32; the rows below know floats alone"),
    Way("several sums on packed weights", _sums, "reads once what they share; each by itself would read it again"),
    Way("convolution on a packed weight", _dense_convolution, "asked before the linear layer, which would write windows out"),
    Way("linear layer on a packed weight", _linear_layer, "the products that cost most, so before what takes them as they are"),
    Way("on buffers as they are", lambda a: a.plain, "takes everything, so it comes last"),
)
"""Kernels of a whole block, most special first."""

PARTS: Kernels = (
    Way("part of a sum on a packed weight", _part_on_packed, "as for a whole sum"),
    Way("part of a reduction", lambda a: a.plain, "takes everything, so it comes last"),
)
TABLES: dict[str, Kernels] = {
    "full": KERNELS,
    "partial": PARTS,
    "finish": (Way("what follows the reduction", _finish, "its states are given: there is no other way"),),
}
"""By what a block has of a reduction: all of it, a part of it, or its states."""


def _whole(op: Block, graph: Graph, kernel: Kernel, found: States | None = None) -> Run:
    """A reduction from buffers as they are to its results."""
    states = found or _states(op, graph, kernel).made
    tail = Expressions(op, graph, kernel, op.then, Frame(op.dims, kernel.block[: len(op.dims)]))
    return lambda ins, _: tail(ins, states(ins))


def _once(state: Tensor, wanted: tuple[int, ...], ins: Sequence[Tensor | None]) -> Tensor:
    """A state's first cell along the dimensions that it does not vary along, all others as they are, in memory of its own."""
    cut = tuple(slice(0, n) for n in wanted)
    out = state[cut].expand(wanted).contiguous()
    given = any(x is not None and x.data_ptr() == out.data_ptr() for x in ins)
    return out.clone() if given or out.untyped_storage().nbytes() != out.nbytes else out


def _states(op: Block, graph: Graph, kernel: Kernel) -> Chosen[States]:
    """Monoid states of each output point over the block, once along the dimensions that a field does not vary along."""
    found = first(STATES, Asked(op, graph, kernel, PLAIN, (op, graph)))
    assert isinstance(found, Chosen)
    return found


def _each_sum(a: Asked) -> States | Refusal:
    if len(a.op.body) == 1 or not only_sums(a.op.monoid) or a.op.inner:
        return Refusal("there is one sum, or none")
    alone = [_states(part(a.op, k), a.graph, a.kernel).made for k in range(len(a.op.body))]
    return lambda ins: [states(ins)[0] for states in alone]


def _by_layers(a: Asked) -> States | Refusal:
    if not layered(a.op):
        return Refusal("no field is reduced within another one's reduction")
    if not a.op.inner and (whole := _scan(a) or gather(a.op, a.graph, a.kernel, a.frame)):
        return whole
    return layers.states(a.op, a.graph, a.kernel)


def _each_part(a: Asked) -> States | Refusal:
    op, parts = a.op, parts_of(a.op.monoid or "")
    if len(parts) == 1:
        return Refusal("its monoid is no product of others")
    runs = [_states(replace(op, monoid=m, body=op.body[i:j], then=()), a.graph, a.kernel).made for m, i, j in parts]
    return lambda ins: [x for run in runs for x in run(ins)]


def _scan(a: Asked) -> States | Refusal:
    op, found = a.op, as_scan(a.op)
    if found is None or any(d.size == 0 for d in op.space):
        return Refusal("no running state")
    runs = norms.runs(op, found, a.kernel.block)
    body = Expressions(runs.op, a.graph, a.kernel, runs.op.body, runs.frame)
    shape = runs.frame.extents
    return lambda ins: norms.scan_states(op, found, runs, [v.expand(shape) for v in body.values(ins, [])])


def _convolution(a: Asked) -> States | Refusal:
    if len(a.op.body) != 1 or a.op.body[0].dtype not in ("f32", "f64"):
        return Refusal("no sum of f32 or f64")
    here = localise(a.op, a.graph, a.kernel)
    found = contract.conv_of(here)
    if found is None:
        return Refusal("no factor is read at windows of an image")
    x, w = here.held[found.x], here.held[found.w]
    run = contract.conv(here.op, found, here.frame, x.box, w.box, x.shape)
    shape = a.frame.extents[: len(a.op.dims)]
    return lambda ins: [run(held(ins[found.x])[x.take], held(ins[found.w])[w.take]).reshape(shape)]


OPERATORS: Sequence[Way[Asked, States]] = (
    Way("prefix of a running state", _scan, "linear work, where every other row would do all prefixes anew"),
    Way("convolution", _convolution, "asked before the product, which would write windows out"),
    Way(
        "convolution of 8 bits",
        lambda a: integers.convolution(a.op, a.graph, a.kernel, a.frame),
        "before the product, as above",
    ),
    Way(
        "product of 8 bits",
        lambda a: integers.product(a.op, a.graph, a.kernel, a.frame),
        "sums in i32, which floats would not hold",
    ),
)
"""States that torch has an operator for, on tensors as they are."""

STATES: Sequence[Way[Asked, States]] = (
    Way("each sum by itself", _each_sum, "every row below has one sum"),
    Way(
        "group by group", lambda a: product_by_groups(a.op, a.graph, a.kernel, a.frame),
        "the sum over groups says that one is picked: one product for each, not all of them",
    ),
    Way("layer by layer", _by_layers, "statistics that others rest on come first; rows below have one layer"),
    Way("each part of the monoid", _each_part, "rows below have one monoid"),
    *OPERATORS,
    Way(
        "product of matrices, in tiles", lambda a: tiled_product(a.op, a.graph, a.kernel, a.frame),
        "any sum of two factors; behind the operators that know more of them",
    ),
    Way("rows of a table", lambda a: gather(a.op, a.graph, a.kernel, a.frame), "a sum that picks one of its points"),
    Way("point by point", lambda a: tiled_sums.states(a.op, a.graph, a.kernel), "takes everything, so it comes last"),
)  # fmt: skip
"""How states of a reduction are worked out on torch's operators, most special first."""


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


def node_library(op: Opaque, graph: Graph) -> str:
    """The library that a run asks first for a node; both where that is known by its host values alone."""
    expected = [(graph.tensors[t].dtype, graph.tensors[t].shape) for t in op.outs]

    def asked(host: Any) -> str:
        arrays = [None if not t else host if (of := graph.tensors[t]).on_host else _no_cells(of) for t in op.ins]
        return opaque_node.engine(op, arrays, expected)

    either = opaque_node.HostValue(np.empty(0)), opaque_node.HostValue([])
    return " or ".join(dict.fromkeys(map(asked, either)))


def _no_cells(t: TensorType) -> Any:
    """An array of a tensor's type and shape that takes no memory."""
    return np.broadcast_to(np.empty((), numpy_dtype(t.dtype)), t.shape)


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
    if a.dtype.isbuiltin == 1 and (flags := a.flags).c_contiguous and flags.writeable:
        return tensor_of(a)  # as torch has it
    a = np.ascontiguousarray(a).reshape(a.shape)  # numpy would make a scalar a vector
    if a.dtype.name == "bfloat16":
        return tensor_of(a.view(np.int16)).view(torch.bfloat16)
    if a.dtype.itemsize == 1 and a.dtype.name in _BITS:  # a type that torch does not have, or has otherwise: its bits
        a = a.view(np.uint8)
    return tensor_of(a if a.flags.writeable else a.copy())
