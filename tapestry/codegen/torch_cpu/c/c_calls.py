"""Calls of kernels in C: all that one takes is worked out once where nothing that it points to ever moves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base.contract import is_finite
from tapestry.codegen.torch_cpu.base.ways import Tried
from tapestry.codegen.torch_cpu.c import generated_c
from tapestry.codegen.torch_cpu.c.thread_parts import Work, quiet_torch, threads, work_of

Tensor = torch.Tensor
Ins = Sequence[Tensor | None]
Run = Callable[[Ins, Sequence[Tensor]], list[Tensor]]


@dataclass(slots=True)
class CCall:
    """A kernel with sizes and addresses, and what has to stay for as long as it may be called.

    Attributes:
        work: what it does; by default what one of the library's kernels does with these sizes.
    """

    function: Any
    sizes: Any
    buffers: Any
    kept: tuple[Any, ...]
    work: Work | None = None

    def run(self) -> None:
        """Compute."""
        Calls((self,)).run()

    @property
    def in_all(self) -> Work:
        """What it does."""
        return self.work or work_of(self.function.__name__, self.sizes)


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls one after another; the last one writes the result, unless there are several."""

    parts: tuple[CCall, ...]

    @classmethod
    def of(cls, *calls: CCall | Calls) -> Calls:
        """All of them."""
        return cls(tuple(c for call in calls for c in (call.parts if isinstance(call, Calls) else (call,))))

    def run(self) -> None:
        """Compute."""
        lib: Any = native.library()
        many = threads()
        lib.tapestry_run(_native_steps(self.parts, many), len(self.parts), many)


@dataclass(frozen=True, slots=True)
class Pack:
    """How one weight is packed; equal keys make equal copies.

    Attributes:
        finite: only where it is finite: the kernels leave padding out, where 0 times infinity or NaN would be NaN.
    """

    key: tuple[object, ...]
    run: Callable[[Tensor], Tensor]
    finite: bool = False

    def suits(self, weight: Tensor) -> bool:
        """Whether a weight, as it lies in its buffer, may be packed."""
        return not self.finite or is_finite(weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernel:
    """A block as something to call, whatever computes it: ``kernel(ins, states)`` gives the results in new memory.

    A machine that keeps memory takes `recorder` instead, and one that keeps packed weights takes ``packed``.

    Attributes:
        plain: torch's operators on buffers as they are; ``None`` where a kernel of ours does all there is.
        bind: the call of ours for some inputs and flat memory for each output; ``None`` where there is only ``plain``.
        arrays: each output over flat memory of as many elements.
        memory: of each output, how many elements and their dtype.
        functions: those in C that were generated for it; they are compiled when the call is first asked for.
        few: whether torch's operators take no longer but for their calls.
        compiles: whether functions are compiled where they are not there yet.
        packs: how weights are packed that it may read packed, by position of the read; without room, they are not.
        on_packed: the kernel that reads all of ``packs`` packed.
        parts: the kernels of ours side by side that it is, one for each output, or the one whose sums it adds to what is given.
        way: the row of the table that made it; ``tried``: the rows before, and why they refused.
    """

    plain: Run | None = None
    bind: Callable[[Ins, Sequence[Tensor]], CCall | Calls] | None = None
    arrays: tuple[Callable[[Tensor], Tensor], ...] = ()
    memory: tuple[tuple[int, torch.dtype], ...] = ()
    functions: tuple[str, ...] = ()
    few: bool = False
    compiles: bool = True
    packs: Mapping[int, Pack] = field(default_factory=dict[int, Pack])
    on_packed: CpuKernel | None = None
    parts: tuple[CpuKernel, ...] = ()
    way: str = ""
    tried: Tried = ()

    def __call__(self, ins: Ins, states: Sequence[Tensor]) -> list[Tensor]:
        """Compute into new memory: by torch, where there are few points or no compiler."""
        if self.plain and (self.few or not self.bind or not self.recorder()):
            return self.plain(ins, states)
        assert self.bind
        memory = [torch.empty(size, dtype=dtype) for size, dtype in self.memory]
        self.bind(ins, memory).run()
        return [array(m) for array, m in zip(self.arrays, memory, strict=True)]

    def recorder(self) -> CpuKernel | None:
        """The kernel as one that writes where it is told; ``None`` where it does not, or without a working compiler."""
        return self if self.bind and all(generated_c.function(n, self.compiles) for n in self.functions) else None

    @property
    def packed(self) -> CpuKernel:
        """The kernel that reads its weights packed."""
        return self.on_packed or self

    @property
    def ours(self) -> bool:
        """Whether there is more than torch's operators on buffers as they are."""
        return self.bind is not None or bool(self.packs)


def recorded(
    array: Callable[[Tensor], Tensor], record: Callable[[Ins, Tensor], CCall | Calls], size: int, **more: Any
) -> CpuKernel:
    """A kernel of ours with one output of floats: its view of flat memory of so many elements, and the call for it."""
    memory = ((size, torch.float32),)
    return CpuKernel(bind=lambda ins, memory: record(ins, memory[0]), arrays=(array,), memory=memory, **more)


def together(parts: Sequence[CpuKernel]) -> CpuKernel:
    """Kernels of ours with one output each, as one with all of them."""

    def bind(ins: Ins, memory: Sequence[Tensor]) -> Calls:
        return Calls.of(*(p.bind(ins, [m]) for p, m in zip(parts, memory, strict=True) if p.bind))

    arrays, memory = (tuple(x for p in parts for x in getattr(p, a)) for a in ("arrays", "memory"))
    return CpuKernel(bind=bind, arrays=arrays, memory=memory, parts=tuple(parts))


def batch(given: Sequence[CCall | Calls]) -> Callable[[], None]:
    """All calls, one after another, as one."""
    calls = Calls.of(*given).parts
    lib: Any = native.library()
    many, n = threads(), len(calls)
    table, run = _native_steps(calls, many), lib.tapestry_run

    def together(_: Any = calls) -> None:  # the default keeps what the table points to
        run(table, n, many)

    return together


def _native_steps(calls: Sequence[CCall], many: int) -> ctypes.Array[native.Step]:
    """Calls as `tapestry_run` takes them."""
    if many > 1:
        quiet_torch()

    def step(c: CCall) -> native.Step:
        function, work = ctypes.cast(c.function, ctypes.c_void_p).value, c.in_all
        return native.Step(function, ctypes.addressof(c.sizes), ctypes.addressof(c.buffers), work.units, int(work.nanoseconds))

    return (native.Step * len(calls))(*map(step, calls))
