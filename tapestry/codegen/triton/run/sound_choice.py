"""The first of a kernel's candidates with sound machine code: it fits the chip, spills nothing, and is not serialised.

The model that orders candidates knows no registers and no assembler. What it misses is seen by compiling, and then the next
candidate is taken; a kernel that runs slowly is better than none, so that of candidates with faults the least bad one stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import TritonKernel
from tapestry.codegen.triton.kernel_config import candidates
from tapestry.codegen.triton.run.compile_ahead import measured
from tapestry.codegen.triton.run.machine_code import Resources
from tapestry.codegen.triton.run.tune import generated_with, log
from tapestry.codegen.triton.task.chips import Chip, chip_of
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel

TRIES = 8  # candidates that are compiled: later ones are slow by the model, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a candidate is passed over; one that ``fails`` cannot run at all."""

    why: str
    fails: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """A kernel as it is to run.

    Attributes:
        made: what is generated for it.
        faults: its own, where no candidate is without.
        refused: (config, why) of the candidates before it.
    """

    made: TritonKernel
    faults: tuple[Fault, ...]
    refused: tuple[tuple[KernelConfig, str], ...]

    def rows(self) -> list[Mapping[str, Any]]:
        """What was refused, as data."""
        return [{"knobs": asdict(config), "why": why} for config, why in self.refused]


def faults(found: Resources, warps: int, chip: Chip) -> list[Fault]:
    """What is wrong with a compiled pass."""
    out: list[Fault] = []
    if found.shared > chip.shared:
        out.append(Fault(why=f"{found.shared:,} bytes of shared memory, of {chip.shared:,}", fails=True))
    if found.registers * warps * chip.warp > chip.registers:
        out.append(Fault(why=f"{found.registers} registers in {warps} warps, of {chip.registers:,}", fails=True))
    if found.spills:
        out.append(Fault(why=f"{found.spills:,} bytes of spills", fails=False))
    if found.serialized:
        out.append(Fault(why=next(m for m in found.messages if "serialized" in m), fails=False))
    return out


def sound(graph: Graph, kernel: Kernel, target: str, precision: str = "ieee", shared: int | None = None) -> Sound:
    """The first of `TRIES` candidates without a fault; else the one with the fewest of those that run, however far down.

    Args:
        shared: bytes of shared memory that a program may use; by default the target's.

    Raises:
        TapestryError: none of them compiles and fits, with what is wrong with the first.
    """
    chip = chip_of(target)
    chip = chip if shared is None else replace(chip, shared=shared)
    wanted = [k for k in candidates(kernel_form(graph, kernel, precision), target) if not k.warp_specialize]  # never measured
    refused, best = list[tuple[KernelConfig, str]](), None
    for some in (wanted[:1], wanted[1:TRIES], *([c] for c in wanted[TRIES:])):  # the first one is mostly sound
        made = generated_with(graph, kernel, some, target, precision)
        for tk, passes in zip(made, measured(made, target), strict=True):
            found = _faults_of(tk, passes, chip)
            here = Sound(made=tk, faults=tuple(found), refused=tuple(refused))
            if not found:
                return here
            refused.append((tk.config, "; ".join(f.why for f in found)))
            if not any(f.fails for f in found) and (best is None or len(found) < len(best.faults)):
                best = here
        if best is not None and len(refused) >= TRIES:
            break
    if best is None:
        where, why = graph.ops[kernel.op].outs[0], refused[0][1]
        raise TapestryError(f"none of {len(refused)} candidates for a kernel runs on {target}", where=where, why=why)
    return best


def _faults_of(made: TritonKernel, found: tuple[Resources, ...] | Exception, chip: Chip) -> list[Fault]:
    """The faults of all passes; none are known where there are no tools to look for them."""
    if isinstance(found, TapestryError):
        return [Fault(why=f"{found.what}: {found.why}" if found.why else found.what, fails=True)]
    if isinstance(found, Exception):
        log.warning("%s: its machine code cannot be looked at: %s", made.name, found)
        return []
    return [f for one, each in zip(made.passes, found, strict=True) for f in faults(each, one.num_warps, chip)]
