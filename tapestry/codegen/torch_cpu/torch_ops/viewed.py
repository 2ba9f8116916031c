"""Kernels on views of the buffers that an operation has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tapestry.codegen.torch_cpu.base.point_values import Run
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, Ins, Pack
from tapestry.codegen.torch_cpu.views import Seen, View


def viewed(run: CpuKernel, of: Seen, packed: Collection[int] = ()) -> CpuKernel:
    """The kernel of an operation from that of its view; weights that are ``packed`` are read as they are."""
    if run.packs:
        packs = {k: _pack(p, of.views[k]) for k, p in run.packs.items()}
        return replace(run, plain=_plain_of(run.plain, of), packs=packs, on_packed=viewed(run.packed, of, packs.keys()))
    if run.bind is None or run.parts or not _lies(run, of):
        return CpuKernel(
            plain=lambda ins, states: [of.back(x) for x in run(of.of(ins, packed), states)], way=run.way, tried=run.tried
        )
    bind = run.bind

    def bound(ins: Ins, memory: Sequence[Tensor]) -> CCall | Calls:
        return bind(of.of(ins, packed), memory)

    arrays = tuple(functools.partial(_back, of, array) for array in run.arrays)
    plain = run.plain and _plain_of(run.plain, of, packed)
    return replace(run, plain=plain, bind=bound, arrays=arrays)


def _plain_of(run: Run | None, of: Seen, packed: Collection[int] = ()) -> Run:
    """What computes the operation by what computes its view."""
    assert run
    if isinstance(run, CpuKernel):
        return viewed(run, of, packed)
    return lambda ins, states: [of.back(x) for x in run(of.of(ins, packed), states)]


def _lies(run: CpuKernel, of: Seen) -> bool:
    """Whether what the kernel writes is the operation's result as it lies, and is not copied into its order."""
    try:
        for array, (size, dtype) in zip(run.arrays, run.memory, strict=True):
            array(torch.empty(size, dtype=dtype, device="meta")).permute(of.order).view(of.shape)
    except RuntimeError:  # torch has no view of it
        return False
    return True


def _pack(p: Pack, view: View | None) -> Pack:
    if view is None:
        return p
    make: Callable[[Tensor], Tensor] = lambda buffer: p.run(view(buffer))  # noqa: E731
    return Pack((*p.key, view), make, p.finite)


def _back(of: Seen, array: Callable[[Tensor], Tensor], memory: Tensor) -> Tensor:
    return of.back(array(memory))
