"""The device that generated kernels run on here, and the target whose limits it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tapestry.codegen.triton.run.triton_api import interpreted
from tapestry.codegen.triton.task.chips import CHIPS, DEFAULT, plain
from tapestry.errors import TapestryError

if TYPE_CHECKING:
    import torch


def find_device() -> torch.device:
    """Where generated kernels can run: the current GPU, or the CPU where Triton's interpreter is asked for.

    Raises:
        TapestryError: there is neither.
    """
    import torch

    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TapestryError(
            "this build is for a GPU, and there is none that torch can use",
            why=f"torch {torch.__version__} sees no CUDA or HIP device",
            hint="TRITON_INTERPRET=1 runs the kernels on the CPU (slowly); or compile with --target torch-cpu",
        )
    return torch.device("cuda", torch.cuda.current_device())


def chip_name(device: torch.device, interpreted_as: str = DEFAULT) -> str:
    """The target whose limits and instructions a GPU has: the latest one that is not newer than it."""
    if device.type == "cpu":
        return plain(interpreted_as)
    import torch

    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    older = [n for n, c in CHIPS.items() if isinstance(c.arch, int) and c.arch <= 10 * major + minor]
    if major == 12:  # neither wgmma nor tensor memory, and the shared memory of sm89
        return "sm89"
    return older[-1] if older else "sm80"
