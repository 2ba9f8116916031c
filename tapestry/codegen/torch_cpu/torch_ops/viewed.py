"""Kernels on views of the buffers that an operation has (`image_view`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from tapestry.codegen.torch_cpu.base.point_values import Run
from tapestry.codegen.torch_cpu.base.strided_reads import Tensor
from tapestry.codegen.torch_cpu.c.c_calls import Call, Calls, Ins, Recorded, Written, hold, shares
from tapestry.codegen.torch_cpu.c.maps_c import Mapped
from tapestry.codegen.torch_cpu.torch_ops.dense import Pack, Packable
from tapestry.codegen.torch_cpu.views.image_view import Seen, View


def viewed(run: Run, of: Seen, packed: Collection[int] = ()) -> Run:
    """The kernel of an operation from that of its view; weights that are ``packed`` are read as they are."""
    if isinstance(run, Packable):
        packs = {k: _pack(p, of.views[k]) for k, p in run.packs.items()}
        return Packable(viewed(run.plain, of), packs, viewed(run.packed, of, packs.keys()))
    if isinstance(run, Mapped):
        bound = _recorded(run.recorded, of, packed) if isinstance(run.recorded, Recorded) else _written(run.recorded, of)
        return replace(run, plain=viewed(run.plain, of, packed), recorded=bound)
    if isinstance(run, Recorded):
        return _recorded(run, of, packed)
    return lambda ins, states: [of.back(x) for x in run(_views(ins, of, packed), states)]


def _pack(p: Pack, view: View | None) -> Pack:
    assert view is not None
    make: Callable[[Tensor], Tensor] = lambda buffer: p.run(view(buffer))  # noqa: E731
    return Pack((*p.key, view), make)


def _views(ins: Ins, of: Seen, packed: Collection[int]) -> list[Tensor | None]:
    both = zip(ins, of.views, strict=True)
    return [x if x is None or v is None or k in packed else v(x) for k, (x, v) in enumerate(both)]


def _recorded(run: Recorded, of: Seen, packed: Collection[int]) -> Recorded:
    def record(ins: Ins, memory: Tensor) -> Call | Calls:
        seen = _views(ins, of, packed)
        moved = any(a is not None and b is not None and not shares(a, b) for a, b in zip(ins, seen, strict=True))
        return hold(run.record(seen, memory), not moved)

    return replace(run, array=functools.partial(_back, of, run.array), record=record)


def _written(run: Written, of: Seen) -> Written:
    def bind(ins: Ins, memory: Sequence[Tensor]) -> Call:
        seen = _views(ins, of, ())
        moved = any(a is not None and b is not None and not shares(a, b) for a, b in zip(ins, seen, strict=True))
        call = run.bind(seen, memory)
        call.fixed &= not moved
        return call

    return replace(run, arrays=tuple(functools.partial(_back, of, array) for array in run.arrays), bind=bind)


def _back(of: Seen, array: Callable[[Tensor], Tensor], memory: Tensor) -> Tensor:
    return of.back(array(memory))
