"""What a kernel runs on: limits that a compiled kernel must keep, and the GPU whose rates the models that choose tiles take.

Limits are those of the vendors' programming guides (CUDA C Programming Guide, compute capabilities; AMD CDNA3 ISA). Rates are
the planner's (`plan.topology.topology_files`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry.codegen.blocks.forms import KernelForm
from tapestry.errors import TapestryError
from tapestry.plan.topology import Device
from tapestry.plan.topology.presets import CHIP_OF, GPUS
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
        float8: floats of 8 bits that its matrix units multiply and its converters widen; other kinds are widened to f16 by
            their bits.
        descriptors: whether tiles can be copied by tensor descriptors (TMA).
        card: a GPU of the kind, with its rates.
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
    float8: frozenset[str]
    descriptors: bool
    card: Device

    def rate(self, operand: str, precision: str) -> float:
        """FLOP/s of products of an operand (`primitives.common_operand`); those of other types have no matrix units."""
        return self.card.rate({"f8": "f8e4m3fn"}.get(operand, operand), precision)

    @property
    def bandwidth(self) -> float:
        """Of its memory, in B/s."""
        return self.card.bandwidth

    @property
    def of_warps(self) -> bool:
        """Whether a warp's matrix instructions take their operands from its registers."""
        return self.arch in (80, 86, 89)


_OPEN = frozenset({"f8e4m3fn", "f8e5m2"})  # of the Open Compute Project
CHIPS: dict[str, Chip] = {
    "sm80": Chip(
        backend="cuda", arch=80, warp=32, units=108, shared=166912, shared_unit=167936, registers=65536, grain=256, warps=64,
        programs=32, float8=frozenset(),
        descriptors=False, card=GPUS["a100-pcie"],
    ),
    "sm86": Chip(
        backend="cuda", arch=86, warp=32, units=84, shared=101376, shared_unit=102400, registers=65536, grain=256, warps=48,
        programs=16, float8=frozenset(),
        descriptors=False, card=GPUS["a40"],
    ),
    "sm89": Chip(
        backend="cuda", arch=89, warp=32, units=142, shared=101376, shared_unit=102400, registers=65536, grain=256, warps=48,
        programs=24, float8=_OPEN,
        descriptors=False, card=GPUS["l40s"],
    ),
    "sm90": Chip(
        backend="cuda", arch=90, warp=32, units=132, shared=232448, shared_unit=233472, registers=65536, grain=256, warps=64,
        programs=32, float8=_OPEN,
        descriptors=True, card=GPUS["h200"],
    ),
    "sm100": Chip(
        backend="cuda", arch=100, warp=32, units=148, shared=232448, shared_unit=233472, registers=65536, grain=256, warps=64,
        programs=32, float8=_OPEN,
        descriptors=True, card=GPUS["b200"],
    ),
    "gfx942": Chip(
        backend="hip", arch="gfx942", warp=64, units=304, shared=65536, shared_unit=65536, registers=131072, grain=512,
        warps=32, programs=32, float8=frozenset({"f8e4m3fnuz", "f8e5m2fnuz"}),
        descriptors=False, card=GPUS["mi300x"],
    ),
}  # fmt: skip
DEFAULT = "sm90"
PRECISIONS = ("ieee", "tf32x3", "tf32")  # of products of f32


def chip_of(target: str, gpu: str = "") -> Chip:
    """The chip of a target such as ``sm90`` or ``triton:sm90``; plain ``triton`` is the default one. ``gpu``: the card that a
    plan is for, which has its own rates.

    Raises:
        TapestryError: unknown target.
    """
    name = plain(target)
    return replace(CHIPS[name], card=GPUS[gpu]) if CHIP_OF.get(gpu) == name else CHIPS[name]


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


def on_chip(found: KernelForm, chip: Chip) -> KernelForm:
    """The operation with operands that the chip's matrix units take: floats of 8 bits that they do not take become f16."""
    product, streamed = found.product, found.streamed
    if product is not None and product.operand == "f8" and not product.kinds <= chip.float8:
        product = replace(product, operand="f16")
    if streamed is not None and streamed.operand == "f8" and not streamed.kinds <= chip.float8:
        streamed = replace(streamed, operand="f16")
    copied = found.packed and replace(found.packed, product=on_chip(found.packed.product, chip))
    return replace(found, product=product, streamed=streamed, packed=copied)
