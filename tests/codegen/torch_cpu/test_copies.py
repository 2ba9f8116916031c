"""Copies that torch makes while a call is bound, as calls in C: the same cells on other data, however they are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tapestry.codegen.torch_cpu.c.c_calls import CCall, CpuKernel
from tapestry.codegen.torch_cpu.c.copies import Given, Scratch, WholeRun, bind, copy

pytestmark = pytest.mark.usefixtures("c_compiler")
F, F32 = torch.nn.functional, np.dtype(np.float32)
PICKED, FAR = torch.tensor([4, 0, 0, 3, 2]), torch.randint(-210, 210, (3, 4), generator=torch.Generator().manual_seed(0))


def framed(x: Tensor) -> Tensor:
    out = torch.full((7, 9, 8), float("-inf") if x.is_floating_point() else 3, dtype=x.dtype)
    out[1:6, 2:8, :7] = x
    return out.as_strided((4, 3, 2), (72, 16, 3))


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "axes in another order": lambda x: x.permute(2, 0, 1).contiguous(),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "two axes as one": lambda x: x.transpose(0, 2).reshape(7, 30),
    "every other one": lambda x: x[:, ::2, 1:].contiguous(),
    "the same one again": lambda x: x[:, :1].expand(5, 4, 7).contiguous(),
    "picked": lambda x: x.index_select(0, PICKED).index_select(2, PICKED),
    "picked of columns": lambda x: x.transpose(0, 1).index_select(-1, PICKED[:2]),
    "from anywhere": lambda x: x.reshape(-1)[FAR],
    "padded": lambda x: F.pad(x, (2, 1, 0, 3), value=7),
    "padded with zeros": lambda x: F.pad(x.permute(1, 2, 0), (0, 0, 1, 1)),
    "in a frame": framed,
    "one cell": lambda x: x[2:3, 3:4, 4:5].clone(),
}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({torch.float32: torch.int32, torch.bfloat16: torch.int16}.get(x.dtype, x.dtype))


def bound(move: Callable[[Tensor], Tensor], x: Tensor, scratch: Scratch) -> tuple[list[CCall], Tensor] | None:
    """The calls before one that reads what a move gives, and where it reads it."""
    seen = list[Tensor]()

    def read(ins: Sequence[Tensor | None], memory: Sequence[Tensor]) -> CCall:
        assert ins[0] is not None
        seen.append(move(ins[0]))
        return CCall(None, None, None, ())

    calls = bind(CpuKernel(bind=read), [x], [], scratch)
    return calls and (list(calls.parts[:-1]), seen[0])


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 4])
def test_calls_give_what_torch_gives(name: str, dtype: torch.dtype, parts: int) -> None:
    x = torch.zeros(5, 6, 7, dtype=dtype)
    found = bound(MOVES[name], x, Scratch(1 << 20))
    assert found
    calls, there = found
    for seed in range(2):
        x.copy_(torch.randint(-9, 9, x.shape, generator=torch.Generator().manual_seed(seed)))
        if dtype.is_floating_point:
            x[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
        for c in calls:
            for part in range(parts):
                c.function(c.sizes, c.buffers, part, parts)
        assert there.dtype == dtype and torch.equal(bits(there), bits(MOVES[name](x)))


@pytest.mark.parametrize("shape", [(1, 19, 5, 13), (2, 16, 33, 1), (40, 24, 1, 1), (3, 9, 16, 17)])
def test_axes_in_another_order(shape: tuple[int, ...]) -> None:
    """By tiles of rows, whole ones and not."""
    x = torch.arange(0.0, torch.Size(shape).numel()).view(shape)
    for move in (lambda x: x.permute(0, 2, 3, 1).contiguous(), lambda x: x.permute(3, 2, 1, 0).contiguous()):
        calls, there = bound(move, x, Scratch(1 << 20)) or ([], x)
        for c in calls:
            for part in range(3):
                c.function(c.sizes, c.buffers, part, 3)
        assert torch.equal(there, move(x))


def test_what_is_computed_is_no_copy() -> None:
    """Then the call has to be made at every run; as where there is no room, or a dtype changes."""
    x = torch.ones(4, 5)
    for move in (
        lambda x: x + 1,
        lambda x: x.t().contiguous().mul_(2),
        lambda x: x.to(torch.float64),
        lambda x: x.sum(0),
        lambda x: torch.cat([x, x]),
    ):
        assert bound(move, x, Scratch(1 << 20)) is None
    turned: Callable[[Tensor], Tensor] = lambda x: x.t().contiguous()  # noqa: E731
    assert bound(turned, x, Scratch(79)) is None
    assert bound(turned, x, Scratch(80))


def test_calls_one_after_another_share_their_memory() -> None:
    scratch = Scratch(1000)
    small, large = torch.rand(3, 4), torch.rand(5, 6)
    (_, one), (_, two), (_, three) = (bound(lambda x: x.t().contiguous(), x, scratch) or ((), x) for x in (large, small, large))
    assert one.data_ptr() == two.data_ptr() == three.data_ptr() and scratch.nbytes == large.nbytes


def test_inputs_and_outputs() -> None:
    """Those whose memory calls work on where the caller has it; an output in another order, and an input of another, are copied."""
    place, there = torch.zeros(60), torch.zeros(3, 4, 5).permute(0, 2, 1)
    given = Given.to_place(place)
    assert given and Given.to_place(torch.zeros(0)) is None
    turn = copy(there, place.view(3, 5, 4))
    plain = torch.zeros(3, 5, 4)
    same = copy(plain, there)
    assert turn and same
    run = WholeRun([("x", given)], [given.call, turn, same], {"y": (there, F32), "z": (plain, F32)}, torch.from_numpy)
    assert run.whole and run.moved == {"x", "z"}
    for seed in range(2):
        x = np.random.default_rng(seed).random((3, 5, 4), np.float32)
        got = run({"x": x})
        assert all(np.array_equal(a, x) and a.flags.c_contiguous and not np.shares_memory(a, x) for a in got.values())
    assert not place.any() and not plain.any() and not np.shares_memory(got["y"], got["z"])
    many = torch.rand(2, 3, 2, 3, 2, 3, 2, 3).permute(7, 0, 6, 1, 5, 2, 4, 3)  # axes
    assert not WholeRun([], [], {"y": (many, F32)}, torch.from_numpy).whole
