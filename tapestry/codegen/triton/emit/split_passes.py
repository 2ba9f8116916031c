"""A reduced dimension in parts over the grid: partial states of each part, merged by a second pass, in a fixed order.

One law for every monoid: of a sum it is split-K, of a softmax-weighted sum flash-decoding, of moments or an argmax a
reduction in two steps. No atomics, so that the result is the same at every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry.codegen.blocks.forms import KernelForm, classified
from tapestry.codegen.blocks.lowered import Access, Check, Task, points, substitute_task
from tapestry.codegen.blocks.operands import compute
from tapestry.codegen.blocks.ragged_parts import part_size
from tapestry.ir.expr import Arg, Call, Expr, Index, arg_positions, call, number
from tapestry.ir.graph import Dim
from tapestry.ir.index import const, dim, dims_of
from tapestry.ir.monoid import MONOIDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The two passes, and the buffers between them: (dtype, elements) for each field of the state.

    ``first`` writes the fields as its outputs. ``second`` reads field f as its read number ``base + f``.
    """

    first: KernelForm
    second: KernelForm
    scratch: tuple[tuple[str, int], ...]
    base: int


def in_parts(form: KernelForm, name: str, parts: int) -> Parts:
    """The operation with the reduced dimension ``name`` in ``parts`` blocks, the last of which may have fewer points."""
    task = form.task
    part = next(n for n in (f"{name}_part", f"{name}_part_") if n not in task.ranges)
    size = part_size(task.ranges[name], parts)
    ranges = {**task.ranges, name: size, part: parts}
    env = {name: dim(part) * size + dim(name)}
    fields = _fields(form)
    scratch = tuple((compute(e.dtype), parts * points(f)) for e, f in zip(task.body, fields, strict=True))
    states = [
        _row_major_buffer(f"partial{k}", d, (Dim(part, parts), *f))
        for k, ((d, _), f) in enumerate(zip(scratch, fields, strict=True))
    ]

    moved = replace(substitute_task(task, env, ranges), then=())
    if size * parts > task.ranges[name]:
        moved = _whole_parts_pass(form, moved, Check(env[name], "<", task.ranges[name]), name)
    used = arg_positions(moved.exprs)
    first = replace(
        moved,
        mode="partial",
        dims=(Dim(part, parts), *task.dims),
        outs=tuple(states),
        reduce=tuple(Dim(name, size) if d.name == name else d for d in task.reduce),
        reads={p: a for p, a in moved.reads.items() if p in used},
    )
    base = max(task.reads, default=-1) + 1
    after = {p: a for p, a in task.reads.items() if p in arg_positions(task.then)}
    second = replace(
        task,
        reduce=(Dim(part, parts),),
        inner=(),
        body=tuple(Arg(base + k, e.dtype) for k, e in enumerate(task.body)),
        reads={**after, **{base + k: a for k, a in enumerate(states)}},
    )
    return Parts(
        first=_alike(classified(first, form.precision), form),
        second=classified(second, form.precision),
        scratch=scratch,
        base=base,
    )


def _whole_parts_pass(form: KernelForm, moved: Task, inside: Check, name: str) -> Task:
    """The first pass with nothing past the end of the last part: reads give zeros there, states the monoid's identity."""
    reads = {
        p: replace(a, checks=(*a.checks, inside), other=a.other or 0) if name in dims_of(a.offset) else a
        for p, a in moved.reads.items()
    }
    if form.product is not None:
        return replace(moved, reads=reads)  # factors that are zero
    assert moved.monoid is not None
    lies = call("ge", Index(const(inside.bound - 1) - inside.aff), number(0, "i64"))
    zero = MONOIDS[moved.monoid].zero(tuple(e.dtype for e in moved.body))
    if form.streamed is None:
        return replace(moved, reads=reads, body=tuple(call("where", lies, e, z) for e, z in zip(moved.body, zero, strict=True)))
    score, one, value = moved.body  # what is hidden weighs nothing
    hidden = zero[0]
    if isinstance(score, Call) and isinstance(one, Call) and score.fn == one.fn == "where" and score.args[0] == one.args[0]:
        both: Expr = call("and", lies, score.args[0])
        one, score, lies = call("where", both, *one.args[1:]), score.args[1], both
    return replace(moved, reads=reads, body=(call("where", lies, score, hidden), one, value))


def _alike(part: KernelForm, whole: KernelForm) -> KernelForm:
    """A part with the operands that were chosen for the whole."""
    if part.product is not None and whole.product is not None:
        return replace(part, product=replace(part.product, operand=whole.product.operand))
    if part.streamed is not None and whole.streamed is not None:
        return replace(part, streamed=replace(part.streamed, operand=whole.streamed.operand))
    return part


def _fields(form: KernelForm) -> list[tuple[Dim, ...]]:
    """The map dimensions that each field of the state varies along."""
    dims = form.task.dims
    if form.streamed is None:
        return [dims] * len(form.task.body)
    rows = tuple(d for d in dims if d not in form.streamed.columns)
    return [rows, rows, dims]


def _row_major_buffer(name: str, dtype: str, dims: tuple[Dim, ...]) -> Access:
    """A row-major buffer over some dimensions."""
    offset, step = const(0), 1
    for d in reversed(dims):
        offset = offset + dim(d.name) * step
        step *= d.size
    return Access(tensor=name, dtype=dtype, offset=offset)
