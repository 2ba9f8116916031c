"""Comments at the head of a kernel: nodes, operation, block, projections, bytes, FLOPs, precision and config."""

from __future__ import annotations

from dataclasses import asdict

from tapestry.codegen.triton.model.config_fields import KernelConfig
from tapestry.codegen.triton.model.kernel_work import work_of
from tapestry.codegen.triton.task.kernel_form import KernelForm
from tapestry.codegen.triton.task.lowered import points
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.syntax.printer import op_text
from tapestry.ir.types import itemsize

# the config that each kind of kernel has
_FIELDS = {
    "map": ("block", "rows", "cols"), "rows": ("rows", "cols"), "reduce": ("rows", "cols", "split_k"), "scan": ("rows", "cols"),
    "nest": ("rows", "cols"), "gather": ("rows", "cols"),
    "dot": ("bm", "bn", "bk", "group", "persistent", "packed", "split_k", "descriptors", "warp_specialize"),
    "folded": ("bm", "bn", "bk", "group", "packed", "split_k", "descriptors"),
    "stream": ("bm", "bn", "split_k", "descriptors", "warp_specialize", "one_loop"),
}  # fmt: skip


def header(graph: Graph, kernel: Kernel, found: KernelForm, name: str, config: KernelConfig, target: str) -> list[str]:
    """What the kernel is: nodes, operation, block, each buffer with its bytes, work, precision and config."""
    op, task = graph.ops[kernel.op], found.task
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
    work = work_of(graph, kernel, found)
    lines.append(f"work   {work.matrix_flops:,} FLOPs of products, {work.other_flops:,} others, {work.bytes:,} bytes at least")
    if (math := precision_text(found)) is not None:
        lines.append(f"math   {math}")
    shown = (*_FIELDS[found.kind], "num_warps", "num_stages")
    lines.append(f"knobs  {', '.join(f'{n} {v}' for n, v in asdict(config).items() if n in shown)} for {target}")
    return [f"# {line}".rstrip() for line in lines]


def precision_text(found: KernelForm) -> str | None:
    """How products are computed; ``None`` for a kernel without any."""
    operands: list[str] = []
    if found.product is not None:
        operands = [found.product.operand]
    elif found.streamed is not None:
        operands = [found.streamed.operand, found.streamed.weighted]
    if not operands:
        return None
    told = [f"f32 ({found.precision})" if d == "f32" else f"{d} on matrix units" for d in dict.fromkeys(operands)]
    return f"products of {' and '.join(told)}, summed in {'i32' if operands == ['i8'] else 'f32'}"


def _buffer(box: Box, dtype: str) -> str:
    inside = ", ".join(f"{lo}:{hi}" for lo, hi in box)
    return f"[{inside}], {size(box) * itemsize(dtype):,} bytes of {dtype}"
