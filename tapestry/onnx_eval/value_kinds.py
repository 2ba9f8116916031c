"""Of what kind an ONNX value of unknown type is: a tensor, a sequence, or a map."""
# pyright: basic

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """A tensor."""
    return isinstance(value, np.ndarray)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """A sequence: a list or a tuple."""
    return isinstance(value, list | tuple)


def is_map(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """A map, or values by name."""
    return isinstance(value, Mapping)
