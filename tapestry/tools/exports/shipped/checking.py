# pyright: basic
# torch.library comes without complete types
"""The test of a package of kernels: every operator on stored inputs, against what Tapestry's CPU target gave for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROUNDING = {"float64": 1e-12, "float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def check_operators(operators: Mapping[str, tuple[Any, Any]], cases: Path, rounding: Mapping[str, float] = ROUNDING) -> int:
    """Run every operator that has a case; how many there were.

    Args:
        operators: by name, the custom operator and its kernel.
        cases: the file with inputs and results, as bytes.

    Raises:
        AssertionError: a result differs by more than rounding explains, or the operator's schema or shapes are wrong.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    done = 0
    with np.load(cases, allow_pickle=False) as stored:
        for name, (run, kernel) in operators.items():
            if f"{name}.0" not in stored:
                continue
            buffers = [*kernel.inputs, *kernel.outputs]
            values = [_tensor(stored[f"{name}.{k}"], b) for k, b in enumerate(buffers)]
            inputs = [v.to(device) for v in values[: len(kernel.inputs)]]
            got = run(*inputs)
            for b, out, want in zip(
                kernel.outputs, got if isinstance(got, tuple) else [got], values[len(inputs) :], strict=True
            ):
                _assert_near(f"{name}, {b.name}", out.cpu(), want, rounding.get(b.dtype, 0.0))
            if inputs:
                torch.library.opcheck(run, tuple(inputs), test_utils=("test_schema", "test_faketensor"))
            done += 1
    return done


def _tensor(data: Any, b: Any) -> torch.Tensor:
    return torch.from_numpy(data.copy()).view(getattr(torch, b.dtype)).reshape(b.shape)


def _assert_near(where: str, got: torch.Tensor, want: torch.Tensor, rounding: float) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, where
    if not want.dtype.is_floating_point:
        assert torch.equal(got, want), where
        return
    a, b = got.double(), want.double()
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    assert torch.allclose(a, b, rtol=4 * rounding, atol=rounding * scale, equal_nan=True), where
