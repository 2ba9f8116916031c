"""The device that generated kernels run on here, and the target whose limits it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tapestry.errors import TapestryError

if TYPE_CHECKING:
    import torch


def find_device() -> torch.device:
    """Where generated kernels can run: the current GPU, or the CPU where Triton's interpreter is asked for.

    Raises:
        TapestryError: there is neither.
    """
    import torch

    from tapestry.codegen.triton.run.launcher import interpreted

    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TapestryError(
            "this build is for a GPU, and there is none that torch can use",
            why=f"torch {torch.__version__} sees no CUDA or HIP device",
            hint="TRITON_INTERPRET=1 runs the kernels on the CPU (slowly); or compile with --target torch-cpu",
        )
    return torch.device("cuda", torch.cuda.current_device())
