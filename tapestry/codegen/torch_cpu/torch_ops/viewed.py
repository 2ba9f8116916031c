"""Kernels on views of the buffers that an operation has (`image_view`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from tapestry.codegen.torch_cpu.base.point_values import Run
from tapestry.codegen.torch_cpu.base.strided_reads import Tensor
from tapestry.codegen.torch_cpu.c.c_calls import Call, Calls, Ins, Recorded, Written, hold, moved
from tapestry.codegen.torch_cpu.c.maps_c import Mapped
from tapestry.codegen.torch_cpu.torch_ops.dense import Pack, Packable
from tapestry.codegen.torch_cpu.views.image_view import Seen, View


def viewed(run: Run, of: Seen, packed: Collection[int] = ()) -> Run:
    """The kernel of an operation from that of its view; weights that are ``packed`` are read as they are."""
    if isinstance(run, Packable):
        packs = {k: _pack(p, of.views[k]) for k, p in run.packs.items()}
        return Packable(viewed(run.plain, of), packs, viewed(run.packed, of, packs.keys()))
    if isinstance(run, Mapped) and _lies(run.recorded, of):
        bound = _recorded(run.recorded, of, packed) if isinstance(run.recorded, Recorded) else _written(run.recorded, of)
        return replace(run, plain=viewed(run.plain, of, packed), recorded=bound, reads=())
    if isinstance(run, Recorded) and _lies(run, of):
        return _recorded(run, of, packed)
    return lambda ins, states: [of.back(x) for x in run(of.of(ins, packed), states)]


def _lies(run: Recorded | Written, of: Seen) -> bool:
    """Whether what the kernel writes is the operation's result as it lies, and is not copied into its order."""
    memory = run.memory if isinstance(run, Written) else ((run.size, torch.float32),)
    try:
        for array, (size, dtype) in zip(run.arrays, memory, strict=True):
            array(torch.empty(size, dtype=dtype, device="meta")).permute(of.order).view(of.shape)
    except RuntimeError:  # torch has no view of it
        return False
    return True


def _pack(p: Pack, view: View | None) -> Pack:
    if view is None:
        return p
    make: Callable[[Tensor], Tensor] = lambda buffer: p.run(view(buffer))  # noqa: E731
    return Pack((*p.key, view), make, p.finite)


def _recorded(run: Recorded, of: Seen, packed: Collection[int]) -> Recorded:
    def record(ins: Ins, memory: Tensor) -> Call | Calls:
        seen = of.of(ins, packed)
        return hold(run.record(seen, memory), not moved(ins, seen))

    return replace(run, array=functools.partial(_back, of, run.array), record=record)


def _written(run: Written, of: Seen) -> Written:
    def bind(ins: Ins, memory: Sequence[Tensor]) -> Call:
        seen = of.of(ins)
        call = run.bind(seen, memory)
        call.fixed &= not moved(ins, seen)
        return call

    return replace(run, arrays=tuple(functools.partial(_back, of, array) for array in run.arrays), bind=bind)


def _back(of: Seen, array: Callable[[Tensor], Tensor], memory: Tensor) -> Tensor:
    return of.back(array(memory))
