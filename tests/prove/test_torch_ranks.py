"""Programs of torch's functional collectives, traced rank by rank under the fake process group: proved, or refuted with a cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from tapestry.frontends import torch_export, torch_ranks
from tapestry.tools.prove.verdict import PROVED, REFUTED, Verdict, prove

RANKS, WIDTH, HEADS = 2, 8, 4
After = Callable[[Tensor], Tensor]


def summed(x: Tensor) -> Tensor:
    """All ranks' sum."""
    return collectives.all_reduce(x, "sum", dist.group.WORLD)


def scattered(x: Tensor) -> Tensor:
    """This rank's rows of all ranks' sum."""
    return collectives.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


class Block(nn.Module):
    """Attention and a feed-forward part of one rank; of all of it where there is one.

    Args:
        before, after: what is done to what every projection reads, and to what the last one of a part gives.
    """

    def __init__(self, rank: int, ranks: int, before: After, after: After) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.before, self.after = HEADS // ranks, before, after
        for name, rows, columns in (("qkv", 3 * WIDTH, WIDTH), ("up", 4 * WIDTH, WIDTH)):
            whole, sections = torch.rand(rows, columns) - 0.5, 3 if name == "qkv" else 1
            setattr(self, name, nn.Parameter(torch.cat([s.chunk(ranks)[rank] for s in whole.chunk(sections)])))
        for name, columns in (("out", WIDTH), ("down", 4 * WIDTH)):
            setattr(self, name, nn.Parameter((torch.rand(WIDTH, columns) - 0.5).chunk(ranks, 1)[rank].contiguous()))

    def forward(self, x: Tensor) -> Tensor:
        """Rows of tokens."""
        q, k, v = (self.before(x) @ self.qkv.T).chunk(3, -1)
        split = [t.reshape(-1, self.heads, WIDTH // HEADS).transpose(0, 1)[None] for t in (q, k, v)]
        mixed = scaled_dot_product_attention(*split)[0].transpose(0, 1).reshape(q.shape)
        x = x + self.after(mixed @ self.out.T)
        return x + self.after(gelu(self.before(x) @ self.up.T) @ self.down.T)


def same(x: Tensor) -> Tensor:
    """Nothing."""
    return x


def decided(folder: Path, before: After, after: After, rows: int = 6, columns: int = WIDTH) -> Verdict:
    whole = torch_export.exported(Block(0, 1, same, same), (torch.zeros(6, WIDTH),))
    (folder / "model").mkdir()
    torch_export.write_onnx(whole, folder / "model" / "model.onnx")
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            program = torch_export.exported(Block(rank, RANKS, before, after), (torch.zeros(rows, columns),))
            torch_ranks.write_rank(program, folder / "ranks" / f"rank{rank}.onnx")
        finally:
            dist.destroy_process_group()
    return prove(folder / "model" / "model.onnx", [folder / "ranks"])


@pytest.mark.slow
def test_tensor_and_sequence_parallel_blocks_are_proved(tmp_path: Path) -> None:
    for name in ("tensor", "sequence"):
        (tmp_path / name).mkdir()
    verdict = decided(tmp_path / "tensor", same, summed)
    assert verdict.status == PROVED, verdict.text()
    qkv = [p for p in verdict.document["placed"] if p["tensor"] == "qkv"]
    assert [p["runs"] for p in qkv] == [[[4 * k, 8 * k + 4 * r, 4] for k in range(3)] for r in range(RANKS)]

    def gathered(x: Tensor) -> Tensor:
        return collectives.all_gather_tensor(x, 0, dist.group.WORLD)

    verdict = decided(tmp_path / "sequence", gathered, scattered, 6 // RANKS)
    assert verdict.status == PROVED, verdict.text()
    assert verdict.document["collectives"] == 4 * RANKS


@pytest.mark.slow
def test_features_in_parts_are_proved(tmp_path: Path) -> None:
    """Gathered and reduce-scattered along the second axis: torch cuts and joins around collectives of the first."""

    def gathered(x: Tensor) -> Tensor:
        return collectives.all_gather_tensor(x, 1, dist.group.WORLD)

    def scattered(x: Tensor) -> Tensor:
        return collectives.reduce_scatter_tensor(x, "sum", 1, dist.group.WORLD)

    verdict = decided(tmp_path, gathered, scattered, columns=WIDTH // RANKS)
    assert verdict.status == PROVED, verdict.text()


@pytest.mark.slow
def test_a_collective_left_out_is_refuted_with_a_cell(tmp_path: Path) -> None:
    verdict = decided(tmp_path, same, same)
    assert verdict.status == REFUTED and verdict.witness is not None and verdict.witness["cell"], verdict.text()
