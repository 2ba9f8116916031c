"""From a kernel of the Program to a Triton source file."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from tapestry.codegen.triton.axes import identifier
from tapestry.codegen.triton.emit_dot import emit_dot
from tapestry.codegen.triton.emit_map import emit_map
from tapestry.codegen.triton.emit_reduce import emit_reduce
from tapestry.codegen.triton.emit_rows import emit_rows, row_dims, row_knobs, without_columns
from tapestry.codegen.triton.emit_scan import emit_scan, scan_knobs, scan_of, scan_task
from tapestry.codegen.triton.emit_stream import emit_stream
from tapestry.codegen.triton.helpers import sources
from tapestry.codegen.triton.lowered import Task, lower, points, task_text
from tapestry.codegen.triton.primitives import POINTERS
from tapestry.codegen.triton.regroup import split_groups
from tapestry.codegen.triton.scope import Frame, Written, frame
from tapestry.codegen.triton.tiles import (
    Contraction,
    Knobs,
    contraction,
    dot_knobs,
    map_knobs,
    reduce_knobs,
    stream,
    stream_knobs,
)
from tapestry.ir.expr import count_calls
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.text import op_text
from tapestry.ir.types import itemsize

_WIDTH = 112


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonKernel:
    """A generated kernel.

    Attributes:
        name: of the function in ``source``.
        source: a whole Python file that imports only ``triton`` and ``triton.language``.
        grid: number of programs.
        args: pointer arguments in order: the reads (one for each position in ``reads``), states, then outputs.
        signature: argument to Triton type, for ahead-of-time compilation.
        reads: positions, in the operation, of the reads that are arguments.
    """

    name: str
    source: str
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    args: tuple[str, ...]
    signature: dict[str, str]
    reads: tuple[int, ...]


def generate(graph: Graph, kernel: Kernel, knobs: Knobs | None = None) -> TritonKernel:
    """Triton source for one kernel; ``knobs`` replace the tile sizes chosen from the extents.

    Raises:
        TapestryError: the operation is opaque.
    """
    scan = scan_of(graph, kernel)
    task = scan_task(graph, kernel, scan) if scan else lower(graph, kernel)
    product, streamed = None if scan else _product(task), None if scan else stream(task)
    if not scan and product is None and _product(cut := split_groups(task)) is not None:
        task, product = cut, _product(cut)
    if task.mode == "partial" and not streamed and not scan:
        task = without_columns(task)
    op = graph.ops[kernel.op]
    suffix = "" if task.mode == "full" else f"_{task.mode}"
    held, name = frame(task, identifier(op.source[-1] if op.source else op.outs[0]) + suffix)
    chosen = knobs or (stream_knobs(streamed) if streamed else scan_knobs(task) if scan else _default(task, product))
    if scan:
        written = emit_scan(held, chosen, reverse=scan.sign < 0)
    else:
        written = emit_stream(held, streamed, chosen) if streamed else _emit(held, product, chosen)
    accesses = (*task.reads.values(), *task.states, *task.outs)
    return TritonKernel(
        name=name,
        source="\n".join([*_header(graph, kernel, task, name, product), *_module(held, name, written)]) + "\n",
        grid=(written.programs,),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        args=held.args,
        signature={arg: POINTERS[a.dtype] for arg, a in zip(held.args, accesses, strict=True)},
        reads=tuple(task.reads),
    )


def kernel_key(graph: Graph, kernel: Kernel) -> str:
    """Equal for kernels whose sources are the same up to names: wherever they stand in the model or in a tensor."""
    return hashlib.sha256(task_text(lower(graph, kernel)).encode()).hexdigest()


def _product(task: Task) -> Contraction | None:
    return contraction(task) if _reduces(task) else None


def _default(task: Task, product: Contraction | None) -> Knobs:
    if product is not None:
        return dot_knobs(product)
    if task.mode == "full" and row_dims(task):
        return row_knobs(task)
    return reduce_knobs(task) if _reduces(task) else map_knobs(task)


def _reduces(task: Task) -> bool:
    return task.monoid is not None and task.mode != "finish"


def _emit(held: Frame, product: Contraction | None, knobs: Knobs) -> Written:
    if product is not None:
        return emit_dot(held, product, knobs)
    if held.task.mode == "full" and row_dims(held.task):
        return emit_rows(held, knobs)
    return emit_reduce(held, knobs) if _reduces(held.task) else emit_map(held, knobs)


def _module(held: Frame, name: str, written: Written) -> list[str]:
    lines = ["", "import triton", "import triton.language as tl", ""]
    for function in (*sources(held.helpers), *held.functions):
        lines += ["", function, ""]
    lines += ["", "@triton.jit", f"def {name}({', '.join(held.args)}):"]
    lines += [f"    {c}: tl.constexpr = {v}" for c, v in written.constants]
    return lines + [w for line in written.lines for w in _wrapped(f"    {line}")]


def _wrapped(line: str) -> list[str]:
    """A long load or store with each argument in a line of its own."""
    found = re.match(r"( *)((?:\w+ = )?tl\.(?:load|store)\()(.*)\)(\.to\(\S+\))?$", line)
    if len(line) <= _WIDTH or not found:
        return [line]
    indent, head, inner, cast = found.groups()
    parts, depth = [""], 0
    for c in inner:
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [indent + head, *(f"{indent}    {p.strip()}," for p in parts), f"{indent}){cast or ''}"]


def _header(graph: Graph, kernel: Kernel, task: Task, name: str, product: Contraction | None) -> list[str]:
    """Comments that say what the kernel is: nodes, operation, block, and each buffer with its bytes."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    space = op.dims if task.mode == "finish" else op.space
    block = ", ".join(f"{d.name} {lo}:{hi}" for d, (lo, hi) in zip(space, kernel.block, strict=True))
    lines = [f"{name}: {task.mode}" + (f" of {', '.join(op.source)}" if op.source else ""), ""]
    lines += [*op_text(op, graph).splitlines(), "", f"block  [{block}] of {points(task.dims + task.reduce):,} points"]
    for p in task.reads:
        read, box = op.reads[p], kernel.ins[p]
        assert box is not None
        index = ", ".join(map(str, read.index))
        lines.append(f"reads  {read.tensor}[{index}] from {_buffer(box, task.reads[p].dtype)}")
    for a in task.states:
        lines.append(f"reads  {a.tensor} from {_buffer(kernel.outs[0], a.dtype)}")
    for a, box in zip(task.outs, kernel.outs, strict=True):
        lines.append(f"writes {a.tensor} to {_buffer(box, a.dtype)}")
    unit = ", on matrix units" if product is not None and product.operand != "f32" else ""
    lines.append(f"about {_flops(task, product):,} FLOPs{unit}")
    return [f"# {line}".rstrip() for line in lines]


def _buffer(box: Box, dtype: str) -> str:
    inside = ", ".join(f"{lo}:{hi}" for lo, hi in box)
    return f"[{inside}], {size(box) * itemsize(dtype):,} bytes of {dtype}"


def _flops(task: Task, product: Contraction | None) -> int:
    """Primitive applications over the block; a contraction's count two for each point."""
    after = points(task.dims) * count_calls(task.then)
    inner = points(task.dims + task.reduce)
    if (s := stream(task)) is not None:
        scores = points(s.batch) * points(s.rows) * s.key.size
        return after + scores * (2 * points(s.depth) + 2 * points(s.columns) + count_calls(task.body[:1]) + 4)
    if product is not None or not _reduces(task):
        return after + inner * (count_calls(task.body) + (len(task.body) if product is not None else 0))
    assert task.monoid is not None
    merge = MONOIDS[task.monoid].combiner(tuple(e.dtype for e in task.body))
    return after + inner * (count_calls(task.body) + count_calls(merge))
