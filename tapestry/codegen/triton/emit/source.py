"""From a kernel of the Program to a Triton source file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod

from tapestry.codegen.blocks.forms import KernelForm
from tapestry.codegen.blocks.lowered import lower, points, task_text
from tapestry.codegen.blocks.ragged_parts import splits
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.emit_dot import emit_dot
from tapestry.codegen.triton.emit.emit_folded import emit_folded
from tapestry.codegen.triton.emit.emit_map import emit_gather, emit_map
from tapestry.codegen.triton.emit.emit_order import emit_order
from tapestry.codegen.triton.emit.emit_reduce import emit_reduce
from tapestry.codegen.triton.emit.emit_rows import emit_rows
from tapestry.codegen.triton.emit.emit_scan import emit_scan
from tapestry.codegen.triton.emit.emit_stream import emit_stream
from tapestry.codegen.triton.emit.split_passes import Parts, in_parts
from tapestry.codegen.triton.kernel_config import default_config
from tapestry.codegen.triton.kernel_work import work_of
from tapestry.codegen.triton.task.chips import CHIPS, DEFAULT, PRECISIONS, Chip, chip_of, on_chip, plain
from tapestry.codegen.triton.task.descriptors import Descriptor, descriptor_type
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.codegen.triton.task.primitives import NARROW_POINTERS, POINTERS
from tapestry.codegen.triton.task.row_order import elements, in_order
from tapestry.codegen.triton.text.axes import identifier
from tapestry.codegen.triton.text.device_functions import sources
from tapestry.codegen.triton.text.scope import Frame, Written, frame
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.recognition.route_groups import unread
from tapestry.ir.syntax.printer import op_text
from tapestry.ir.types import itemsize
from tapestry.system.quoting import printable

# Comments at the head of a kernel: nodes, operation, block, projections, bytes, FLOPs, precision and config.


# the config that each kind of kernel has
_FIELDS = {
    "map": ("block", "rows", "cols"), "rows": ("rows", "cols"), "reduce": ("rows", "cols", "split_k"), "scan": ("rows", "cols"),
    "nest": ("rows", "cols"), "gather": ("rows", "cols"),
    "dot": ("bm", "bn", "bk", "group", "persistent", "packed", "split_k", "descriptors", "warp_specialize", "apart"),
    "folded": ("bm", "bn", "bk", "group", "packed", "split_k", "descriptors"),
    "stream": ("bm", "bn", "split_k", "descriptors", "warp_specialize", "one_loop"),
}  # fmt: skip


def header(
    graph: Graph, kernel: Kernel, found: KernelForm, launches: Sequence[Pass], config: KernelConfig, target: str
) -> list[str]:
    """What the kernel is: nodes, operation, block, each buffer with its bytes, grid, work, precision and config."""
    op, task = graph.ops[kernel.op], found.task
    assert isinstance(op, Block)
    space = op.dims if task.mode == "finish" else op.space
    block = ", ".join(f"{d.name} {lo}:{hi}" for d, (lo, hi) in zip(space, kernel.block, strict=True))
    lines = [f"{launches[-1].function}: {task.mode}" + (f" of {', '.join(op.source)}" if op.source else ""), ""]
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
    lines += [f"grid   {prod(p.grid):,} programs of {p.num_warps} warps: {p.function}" for p in launches]
    work = work_of(graph, kernel, found)
    lines.append(f"work   {work.matrix_flops:,} FLOPs of products, {work.other_flops:,} others, {work.bytes:,} bytes at least")
    if (precise := precision_text(found)) is not None:
        lines.append(f"math   {precise}")
    shown = (*_FIELDS[found.kind], "num_warps", "num_stages")
    lines.append(f"knobs  {', '.join(f'{n} {v}' for n, v in asdict(config).items() if n in shown)} for {target}")
    return [f"# {printable(line)}".rstrip() for line in lines]


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


_WIDTH = 112


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One launch of a kernel.

    Attributes:
        function: its name in the source.
        grid: number of programs.
        params: parameters in order; ``signature`` has their Triton types.
        takes: for each parameter the buffer it is about: a number below ``len(args)`` is one of the caller's arrays, the
            others are scratch buffers in order.
        descriptors: parameters that are tensor descriptors of their buffer.
        registers: the most that a thread gets.
    """

    function: str
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    params: tuple[str, ...]
    takes: tuple[int, ...]
    signature: Mapping[str, str]
    descriptors: Mapping[str, Descriptor] = field(default_factory=dict[str, Descriptor])
    registers: int = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonKernel:
    """A generated kernel: one launch, or two where a reduced dimension is in parts over the grid.

    Attributes:
        name: of the kernel, and of the first function in ``source``.
        source: a whole Python file that imports only ``triton`` and ``triton.language``.
        args: the caller's arrays in order: the reads (one for each position in ``reads``), states, then outputs.
        reads: positions, in the operation, of the reads that are arguments.
        scratch: (dtype, elements) of buffers that live between the passes; 16-byte aligned, contents undefined.
        passes: the launches in order.
    """

    name: str
    source: str
    args: tuple[str, ...]
    reads: tuple[int, ...]
    passes: tuple[Pass, ...]
    scratch: tuple[tuple[str, int], ...] = ()
    kind: str = ""
    config: KernelConfig = KernelConfig()  # noqa: RUF009  (frozen)
    target: str = DEFAULT
    precision: str = "ieee"

    @property
    def grid(self) -> tuple[int, ...]:
        """Programs of the first pass."""
        return self.passes[0].grid

    @property
    def launches(self) -> tuple[Pass, ...]:
        """The passes that have something to write: a copy of rows that are all outside of their tensor has not."""
        return tuple(p for p in self.passes if 0 not in p.grid)

    @property
    def num_warps(self) -> int:
        """Warps per program of the first pass."""
        return self.passes[0].num_warps


def generate(
    graph: Graph, kernel: Kernel, config: KernelConfig | None = None, *, target: str = DEFAULT, precision: str = "ieee"
) -> TritonKernel:
    """Triton source for one kernel; ``config`` replace those that the model chooses for the target.

    Raises:
        TapestryError: the operation is opaque, or target or precision unknown.
    """
    if precision not in PRECISIONS:
        raise TapestryError(f"unknown precision '{precision}'", hint=f"one of {', '.join(PRECISIONS)}")
    target = plain(target)
    if CHIPS[target].backend == "hip" and precision == "tf32x3":
        precision = "ieee"  # AMD's matrix units multiply f32 as it is
    found = on_chip(kernel_form(graph, kernel, precision), CHIPS[target])
    chosen = config or default_config(found, target)
    op = graph.ops[kernel.op]
    name = identifier(op.source[-1] if op.source else op.outs[0]) + ("" if kernel.mode == "full" else f"_{kernel.mode}")
    stages, copied, parts, between = _passes_of_kernel(found, chosen, name, target)
    buffers = _Buffers(found, copied, parts)
    none = not any(map(size, kernel.outs))  # nothing to write: no program
    loose = _loose(graph, kernel)
    made: list[tuple[Frame, Written, Pass]] = []
    for k, (stage, stage_config, wish) in enumerate(stages):
        taken = {launch.function for _, _, launch in made}
        held, function = frame(stage.task, wish, CHIPS[target].float8)
        if function in taken:  # names are cut at the end
            held, function = frame(stage.task, f"pass{k}_{wish}", CHIPS[target].float8)
        held.loose = loose and k == len(stages) - 1
        written = _emit(held, stage, stage_config, chip_of(target))
        written = _on_device(held, written) if stage_config.warp_specialize else written
        launch = _pass(held, function, written, stage_config, buffers.of(held, k, len(stages)))
        made.append((held, written, replace(launch, grid=(0,)) if none else launch))
    names = {p: n for held, _, _ in made[len(copied) :] for p, n in held.reads.items()}
    last = made[-1][0]
    lines = [*header(graph, kernel, found, [launch for _, _, launch in made], chosen, target), *_module(made)]
    return TritonKernel(
        name=made[-1][2].function,
        source="\n".join(lines) + "\n",
        reads=buffers.positions,
        passes=tuple(p for _, _, p in made),
        args=tuple(f"{n}_ptr" for n in (*(names[p] for p in buffers.positions), *last.states, *last.outs)),
        scratch=between,
        kind=found.kind,
        config=chosen,
        target=target,
        precision=precision,
    )


def _passes_of_kernel(
    found: KernelForm, config: KernelConfig, name: str, target: str
) -> tuple[list[tuple[KernelForm, KernelConfig, str]], tuple[int, ...], Parts | None, tuple[tuple[str, int], ...]]:
    """The passes of a kernel as (operation, config, name), which reads are made first, the parts, if there are any, and
    (dtype, elements) of what lives between the passes."""
    stages: list[tuple[KernelForm, KernelConfig, str]] = []
    base, copied, between = found, tuple[int, ...](), tuple[tuple[str, int], ...]()
    if found.packed is not None and config.packed:
        base, copied, between = found.packed.product, tuple(p for p, _ in found.packed.copies), found.packed.scratch
        stages += [(copy, default_config(copy, target), f"{name}_rows") for _, copy in found.packed.copies]
    if config.split_k > 1 and (cut := splits(base, config.split_k)):
        parts = in_parts(base, cut, config.split_k)
        stages += [(parts.first, config, f"{name}_parts"), (parts.second, default_config(parts.second, target), name)]
        return stages, copied, parts, (*between, *parts.scratch)
    if ordered := in_order(base, config):
        first, tile, base, position = ordered
        stages.append((first, replace(default_config(first, target), rows=tile), f"{name}_order"))
        held = elements(points(first.task.dims), first.picked.over.size if first.picked else 0, tile)
        copied, between = (*copied, position), (*between, ("i32", held))
    return [*stages, (base, config, name)], copied, None, between


def kernel_key(graph: Graph, kernel: Kernel) -> str:
    """Equal for kernels whose sources are the same up to names: wherever they stand in the model or in a tensor."""
    loose = " loose" if _loose(graph, kernel) else ""
    return hashlib.sha256(f"{task_text(lower(graph, kernel))}{loose}".encode()).hexdigest()


def _loose(graph: Graph, kernel: Kernel) -> bool:
    """Whether a kernel need not write rows of other groups, which nobody reads."""
    op = graph.ops[kernel.op]
    return kernel.mode == "full" and isinstance(op, Block) and unread(graph, op) is not None


def _pass(held: Frame, function: str, written: Written, config: KernelConfig, buffers: Mapping[str, int]) -> Pass:
    """One launch; ``buffers`` gives the number of the buffer behind each variable name."""
    accesses = (*held.task.reads.values(), *held.task.states, *held.task.outs)
    names = (*held.reads.values(), *held.states, *held.outs)
    kinds = {n: (NARROW_POINTERS if n in held.operands else POINTERS)[a.dtype] for n, a in zip(names, accesses, strict=True)}
    params = [(f"{n}_ptr", kind, n) for n, kind in kinds.items() if n in held.pointers]
    params += [(p, descriptor_type(d), n) for p, (n, d) in held.descriptors.items()]
    return Pass(
        function=function,
        grid=(written.programs,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        params=tuple(p for p, _, _ in params),
        takes=tuple(buffers[n] for _, _, n in params),
        signature={p: t for p, t, _ in params},
        descriptors={p: d for p, (_, d) in held.descriptors.items()},
        registers=config.registers,
    )


class _Buffers:
    """Which buffer is behind each variable: reads, states and outputs of the caller, then copies, then the states of parts."""

    def __init__(self, found: KernelForm, copied: tuple[int, ...], parts: Parts | None) -> None:
        self.positions = tuple(found.task.reads)
        self.copied, self.parts = copied, parts
        self.total = len(self.positions) + len(found.task.states) + len(found.task.outs)

    def of(self, held: Frame, stage: int, stages: int) -> dict[str, int]:
        """For one pass, variable name to the number of its buffer."""
        task = held.task
        if stage < len(self.copied) and self.copied[stage] in self.positions:
            (name,) = held.reads.values()
            return {name: self.positions.index(self.copied[stage]), held.outs[0]: self.total + stage}
        found = {n: self._read(p) for p, n in held.reads.items()}
        found |= {n: len(self.positions) + k for k, n in enumerate(held.states)}
        outs = self.total - len(task.outs) if stage == stages - 1 else self.total + min(stage, len(self.copied))
        return found | {n: outs + k for k, n in enumerate(held.outs)}

    def _read(self, p: int) -> int:
        if self.parts is not None and p >= self.parts.base:
            return self.total + len(self.copied) + p - self.parts.base
        return self.total + self.copied.index(p) if p in self.copied else self.positions.index(p)


def _emit(held: Frame, op: KernelForm, config: KernelConfig, chip: Chip) -> Written:
    if op.kind == "dot" and op.product is not None:
        return emit_dot(held, op, config, chip)
    if op.kind == "folded" and op.folded is not None:
        return emit_folded(held, op, op.folded, config, chip)
    if op.kind == "stream" and op.streamed is not None:
        return emit_stream(held, op, config, chip)
    if op.kind == "gather" and op.picked is not None:
        return emit_gather(held, op.picked, config)
    if op.kind == "order" and op.picked is not None:
        return emit_order(held, op.picked, config)
    if op.kind == "scan":
        return emit_scan(held, config, reverse=op.reverse)
    plain_forms = {"map": emit_map, "rows": emit_rows, "reduce": emit_reduce, "nest": emit_reduce}
    return plain_forms[op.kind](held, config)


def _on_device(held: Frame, written: Written) -> Written:
    """A body that makes its descriptors itself: with those of the host, Triton gives loads no warps of their own."""
    made = [
        f"{param} = tl.make_tensor_descriptor({n}_ptr, {list(d.shape)}, {list(d.strides)}, {list(d.block)})"
        for param, (n, d) in held.descriptors.items()
    ]
    held.pointers |= {n for n, _ in held.descriptors.values()}
    held.descriptors.clear()
    return replace(written, lines=(*made, *written.lines))


def _module(made: list[tuple[Frame, Written, Pass]]) -> list[str]:
    lines = ["", "import triton", "import triton.language as tl", ""]
    helpers = {h for held, _, _ in made for h in held.helpers}
    for function in (*sources(helpers), *dict.fromkeys(f for held, _, _ in made for f in held.functions)):
        lines += ["", function, ""]
    for _, written, launch in made:
        lines += ["", "@triton.jit", *_wrapped(f"def {launch.function}({', '.join(launch.params)}):")]
        lines += [f"    {c}: tl.constexpr = {v}" for c, v in written.constants]
        lines += [w for line in written.lines for w in _wrapped(f"    {line}")]
        lines += [""]
    return lines[:-1]


def _wrapped(line: str) -> list[str]:
    """A long statement with each argument of its longest call in a line of its own."""
    calls = [(first, last) for first, last in _brackets(line) if line[first] == "("]
    first, last = max(calls, key=lambda c: c[1] - c[0], default=(0, 0))
    if len(line) <= _WIDTH or last - first < _WIDTH // 4:
        return [line]
    inner, inside, parts = line[first + 1 : last], _brackets(line[first + 1 : last]), [""]
    for at, c in enumerate(inner):
        if c == "," and not any(a < at < b for a, b in inside):
            parts.append("")
        else:
            parts[-1] += c
    indent, comma = len(line) - len(line.lstrip()) + 4, "," if len(parts) > 1 else ""
    broken = [w for p in parts if p.strip() for w in _wrapped(f"{' ' * indent}{p.strip()}{comma}")]
    return [line[: first + 1], *broken, f"{' ' * (indent - 4)}{line[last:]}"]


def _brackets(text: str) -> list[tuple[int, int]]:
    """Where the outermost brackets of a line of code open and close."""
    out, depth, first = list[tuple[int, int]](), 0, 0
    for at, c in enumerate(text):
        if c in "([":
            first = first if depth else at
            depth += 1
        elif c in ")]":
            depth -= 1
            if depth == 0:
                out.append((first, at))
    return out
