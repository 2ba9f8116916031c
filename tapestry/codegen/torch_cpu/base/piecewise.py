"""Operations that are another expression on each side of a place (concatenation, rotary halves): a piece for each side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tapestry.codegen.torch_cpu.base import scalars
from tapestry.codegen.torch_cpu.base.point_values import Expressions, Run
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Tensor
from tapestry.ir.expr import Call, Const, Expr, Index, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, shape, slices_within


def pieces(op: Block, graph: Graph, kernel: Kernel) -> Run | None:
    """The operation piece by piece; ``None`` where it is one piece."""
    found = cut_pieces(op.body, op, kernel.block)
    if len(found) == 1 or any(hi <= lo for lo, hi in kernel.block):
        return None
    runs: list[tuple[tuple[slice, ...], Expressions]] = []
    for box, body in found:
        place = slices_within(box, kernel.block)
        part = replace(kernel, block=box)
        runs.append((place, Expressions(op, graph, part, body, Frame(op.dims, box))))
    extents = shape(kernel.block)
    dtypes = [scalars.TORCH_DTYPES[e.dtype] for e in op.body]

    def run(ins: Sequence[Tensor | None], _: Sequence[Tensor]) -> list[Tensor]:
        outs = [torch.empty(extents, dtype=d, memory_format=_layout(ins, len(extents))) for d in dtypes]
        for place, values in runs:
            for out, v in zip(outs, values.values(ins, []), strict=True):
                out[place] = v
        return outs

    return run


def _layout(ins: Sequence[Tensor | None], rank: int) -> torch.memory_format:
    """Channels last, if an image is read that is so."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(rank)
    images = [x for x in ins if x is not None and x.dim() == rank and not x.is_contiguous()]
    return last if last and any(x.is_contiguous(memory_format=last) for x in images) else torch.contiguous_format


def cut_pieces(body: tuple[Expr, ...], op: Block, block: Box) -> list[tuple[Box, tuple[Expr, ...]]]:
    """Boxes that cover the block, and the expressions on each."""
    names = [d.name for d in op.dims]
    for x in (x for e in body for x in walk(e)):
        place = _place(x)
        if place is None or place[0] not in names:
            continue
        at, c = names.index(place[0]), place[1]
        lo, hi = block[at]
        assert isinstance(x, Call)
        sides = [((lo, min(c, hi)), x.args[1]), ((max(c, lo), hi), x.args[2])]
        out: list[tuple[Box, tuple[Expr, ...]]] = []
        for (a, b), branch in sides:
            if a < b:
                same = _where_test_is(body, x.args[0], branch is x.args[1])
                out += cut_pieces(same, op, (*block[:at], (a, b), *block[at + 1 :]))
        return out
    return [(block, body)]


def _place(e: Expr) -> tuple[str, int] | None:
    """(dimension, c) of a choice by ``index(dimension) < c``."""
    if not isinstance(e, Call) or e.fn != "where" or not isinstance(e.args[0], Call) or e.args[0].fn != "lt":
        return None
    i, c = e.args[0].args
    if not isinstance(i, Index) or not i.aff.is_dim or not isinstance(c, Const):
        return None
    return str(i.aff), int(c.value)


def _where_test_is(body: tuple[Expr, ...], test: Expr, holds: bool) -> tuple[Expr, ...]:
    """The expressions where a test is known."""

    def known(e: Expr) -> Expr:
        if not isinstance(e, Call):
            return e
        if e.fn == "where" and e.args[0] == test:
            return known(e.args[1 if holds else 2])
        return Call(e.fn, tuple(known(a) for a in e.args), e.dtype)

    return tuple(known(e) for e in body)
