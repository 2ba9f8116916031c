"""What a kernel runs on: limits that a compiled kernel must keep, and rates for the models that choose tiles.

Limits are those of the vendors' programming guides (CUDA C Programming Guide, compute capabilities; AMD CDNA3 ISA). Rates are
dense peaks of one representative part: A100 SXM, A40, L40S, H100/H200 SXM, B200, MI300X.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tapestry.errors import TapestryError
from tapestry.plugins import entry_points as plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of GPU.

    Attributes:
        backend, arch, warp: what Triton calls it, and threads per warp.
        units: multiprocessors.
        shared: bytes of shared memory that one program may use; ``shared_unit`` bytes for all programs on a multiprocessor.
        registers: 32-bit registers per multiprocessor, in allocations of ``grain`` per warp.
        warps, programs: that may be resident on a multiprocessor.
        bandwidth: of memory, in B/s.
        flops: of contractions, in FLOP/s by operand (`primitives.common_operand`; ``tf32`` for f32 rounded to it), ``vector``
            for the rest.
        float8: floats of 8 bits that its matrix units multiply and its converters widen; other kinds are widened to f16 by
            their bits.
        descriptors: whether tiles can be copied by tensor descriptors (TMA).
    """

    backend: str
    arch: int | str
    warp: int
    units: int
    shared: int
    shared_unit: int
    registers: int
    grain: int
    warps: int
    programs: int
    bandwidth: float
    flops: Mapping[str, float]
    float8: frozenset[str]
    descriptors: bool

    @property
    def of_warps(self) -> bool:
        """Whether a warp's matrix instructions take their operands from its registers."""
        return self.arch in (80, 86, 89)


_OPEN = frozenset({"f8e4m3fn", "f8e5m2"})  # of the Open Compute Project
CHIPS: dict[str, Chip] = {
    "sm80": Chip(
        backend="cuda", arch=80, warp=32, units=108, shared=166912, shared_unit=167936, registers=65536, grain=256, warps=64,
        programs=32, bandwidth=2.0e12, float8=frozenset(),
        flops={"i8": 6.24e14, "f16": 3.12e14, "bf16": 3.12e14, "tf32": 1.56e14, "vector": 1.95e13},
        descriptors=False,
    ),
    "sm86": Chip(
        backend="cuda", arch=86, warp=32, units=84, shared=101376, shared_unit=102400, registers=65536, grain=256, warps=48,
        programs=16, bandwidth=6.96e11, float8=frozenset(),
        flops={"i8": 2.99e14, "f16": 1.5e14, "bf16": 1.5e14, "tf32": 7.48e13, "vector": 3.74e13},
        descriptors=False,
    ),
    "sm89": Chip(
        backend="cuda", arch=89, warp=32, units=142, shared=101376, shared_unit=102400, registers=65536, grain=256, warps=48,
        programs=24, bandwidth=8.64e11, float8=_OPEN,
        flops={"f8": 7.33e14, "i8": 7.33e14, "f16": 3.62e14, "bf16": 3.62e14, "tf32": 1.83e14, "vector": 9.16e13},
        descriptors=False,
    ),
    "sm90": Chip(
        backend="cuda", arch=90, warp=32, units=132, shared=232448, shared_unit=233472, registers=65536, grain=256, warps=64,
        programs=32, bandwidth=4.3e12, float8=_OPEN,
        flops={"f8": 1.979e15, "i8": 1.979e15, "f16": 9.89e14, "bf16": 9.89e14, "tf32": 4.95e14, "vector": 6.7e13},
        descriptors=True,
    ),
    "sm100": Chip(
        backend="cuda", arch=100, warp=32, units=148, shared=232448, shared_unit=233472, registers=65536, grain=256, warps=64,
        programs=32, bandwidth=8.0e12, float8=_OPEN,
        flops={"f8": 4.5e15, "i8": 4.5e15, "f16": 2.25e15, "bf16": 2.25e15, "tf32": 1.1e15, "vector": 7.5e13},
        descriptors=True,
    ),
    "gfx942": Chip(
        backend="hip", arch="gfx942", warp=64, units=304, shared=65536, shared_unit=65536, registers=131072, grain=512,
        warps=32, programs=32, bandwidth=5.3e12, float8=frozenset({"f8e4m3fnuz", "f8e5m2fnuz"}),
        flops={"f8": 2.6e15, "i8": 2.6e15, "f16": 1.3e15, "bf16": 1.3e15, "tf32": 1.63e14, "vector": 1.63e14},
        descriptors=False,
    ),
}  # fmt: skip
DEFAULT = "sm90"
PRECISIONS = ("ieee", "tf32x3", "tf32")  # of products of f32


def chip_of(target: str) -> Chip:
    """The chip of a target such as ``sm90`` or ``triton:sm90``; plain ``triton`` is the default one.

    Raises:
        TapestryError: unknown target.
    """
    return CHIPS[plain(target)]


def plain(target: str) -> str:
    """``sm90`` for ``triton:sm90``; ``triton`` alone, and targets of other kinds, are the default chip's.

    Raises:
        TapestryError: unknown target.
    """
    name = target.removeprefix("triton:")
    if name in ("triton", "torch-cpu") or plugins.has("targets", target):
        return DEFAULT
    if name not in CHIPS:
        raise TapestryError(f"unknown Triton target '{target}'", hint=f"one of {', '.join(CHIPS)}")
    return name
