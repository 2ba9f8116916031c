"""Functions of torch whose own annotations say nothing, or that have none because they are private, with types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_TORCH: Any = torch


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """A tensor on the memory of an array."""
    return _TORCH.from_numpy(array)
