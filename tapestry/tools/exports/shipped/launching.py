# pyright: basic
# triton comes without types
"""Generated kernels as operators of torch: their buffers and launches, and what runs them.

Part of a package that ``tapestry export --format kernels`` wrote; it needs torch and triton alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Buffer:
    """A contiguous tensor of one shape; ``dtype`` is torch's name of its type."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def like(self, device: torch.device) -> torch.Tensor:
        """A new one, of undefined content."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True)
class Pass:
    """One launch of a jitted function.

    Attributes:
        takes: for each parameter the buffer it is about: inputs, then outputs, then scratch.
        views: by parameter, the type that its buffer is looked at as.
        descriptors: by parameter, shape, strides and block of a tensor descriptor.
    """

    function: Any
    grid: tuple[int, ...]
    takes: tuple[int, ...]
    num_warps: int
    num_stages: int
    views: Mapping[int, str] = field(default_factory=dict)
    descriptors: Mapping[int, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def run(self, buffers: Sequence[torch.Tensor], options: Mapping[str, Any]) -> None:
        """Launch it on the current stream."""
        arguments: list[Any] = []
        for k, at in enumerate(self.takes):
            buffer = buffers[at].view(getattr(torch, self.views[k])) if k in self.views else buffers[at]
            box = self.descriptors.get(k)
            arguments.append(buffer if box is None else TensorDescriptor(buffer, list(box[0]), list(box[1]), list(box[2])))
        self.function[self.grid](*arguments, **options)


@dataclass(frozen=True)
class Kernel:
    """What one operator takes, gives and launches; ``scratch`` lives between its launches."""

    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    passes: tuple[Pass, ...]

    def schema(self) -> str:
        """As `torch.library` writes it."""
        takes = ", ".join(f"Tensor {b.name}" for b in self.inputs)
        gives = ", ".join("Tensor" for _ in self.outputs)
        return f"({takes}) -> {gives if len(self.outputs) == 1 else f'({gives})'}"

    def launch(self, around: Callable[[], AbstractContextManager[None]], *tensors: torch.Tensor) -> Any:
        """The outputs for some inputs, which are copied where they are not contiguous or not aligned.

        Raises:
            ValueError: one has another shape, dtype or device; RuntimeError: tensors of the CPU, without Triton's interpreter.
        """
        for b, t in zip(self.inputs, tensors, strict=True):
            if tuple(t.shape) != b.shape or t.dtype != getattr(torch, b.dtype) or t.device != tensors[0].device:
                found = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"
                raise ValueError(f"{self.name}: {b.name} is {found}, the kernel is for {b.dtype}{list(b.shape)} on one device")
        interpreted = bool(knobs.runtime.interpret)
        device = tensors[0].device if tensors else torch.device("cpu" if interpreted else "cuda")
        if device.type == "cpu" and not interpreted:
            raise RuntimeError(f"{self.name}: on the CPU set TRITON_INTERPRET=1 before triton is imported")
        given = [t.contiguous() for t in tensors]
        given = [t if t.data_ptr() % ALIGNMENT == 0 else t.clone() for t in given]
        outs = [b.like(device) for b in self.outputs]
        buffers = [*given, *outs, *(b.like(device) for b in self.scratch)]
        for one in self.passes:
            if interpreted:
                with around():
                    one.run(buffers, {})
            else:  # no contraction into fused multiply-adds, so that every device gives the same bits
                one.run(buffers, {"num_warps": one.num_warps, "num_stages": one.num_stages, "enable_fp_fusion": False})
        return outs[0] if len(outs) == 1 else tuple(outs)


def operator(namespace: str, kernel: Kernel, around: Callable[[], AbstractContextManager[None]]) -> Any:
    """A kernel as a custom operator of torch, with its shapes for tracing; ``around`` is where the interpreter runs it."""

    def run(*tensors: torch.Tensor) -> Any:
        return kernel.launch(around, *tensors)

    def shapes(*tensors: torch.Tensor) -> Any:
        outs = [b.like(tensors[0].device if tensors else torch.device("cuda")) for b in kernel.outputs]
        return outs[0] if len(outs) == 1 else tuple(outs)

    name = f"{namespace}::{kernel.name}"
    made = torch.library.custom_op(name, run, mutates_args=(), schema=kernel.schema())
    made.register_fake(shapes)
    return made
