"""Random numbers are the same bits however the model is cut, and rest on primitives that are exactly rounded."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tapestry.codegen.torch_cpu.base.scalars import root
from tapestry.plan.lower import lower
from tests.support.small_models import case, execute, mesh_of, random_plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 5, 24, 35, 1000])
def test_square_roots_are_exactly_rounded(dtype: torch.dtype, n: int) -> None:
    x = torch.rand(n, dtype=dtype, generator=torch.Generator().manual_seed(n)) * 9
    want = np.sqrt(x.numpy().astype(np.longdouble)).astype(x.numpy().dtype)
    assert np.array_equal(root(x).numpy(), want)
    place = x.clone()
    assert root(place, place) is place and np.array_equal(place.numpy(), want)


def test_square_roots_of_odd_values() -> None:
    x = torch.tensor([-1.0, -0.0, float("inf"), float("nan"), 4.0])
    found = root(x)
    assert bool(found[0].isnan() & found[3].isnan()) and found[2:].tolist()[0] == float("inf") and found[4] == 2
    assert found[1] == 0 and torch.signbit(found[1]) and root(torch.tensor(9.0)).shape == ()
    assert torch.equal(root(torch.tensor([2.0]).expand(3)), torch.full((3,), float(np.sqrt(np.float32(2)))))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_any_split_gives_the_same_bits(seed: int) -> None:
    c = case("noise")
    expected, _ = execute(c.graph, lower(random_plan(c.graph, mesh_of("1"), random.Random(0), layouts=0.0)), c)
    rng = random.Random(f"bits {seed}")
    plan = random_plan(c.graph, mesh_of(rng.choice(["2", "3", "5", "2x2"])), rng)
    found, _ = execute(c.graph, lower(plan), c)
    assert {t: a.tobytes() for t, a in found.items()} == {t: np.ascontiguousarray(a).tobytes() for t, a in expected.items()}
