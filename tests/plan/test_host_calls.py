"""Calls inside a host: the figures that presets have of them, where they hold, and measured times where those are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tapestry.cli import entry
from tapestry.plan.cost import collective, transfer
from tapestry.plan.strategy import tensor_boxes
from tapestry.plan.topology import parse_mesh, topology
from tapestry.plan.topology.presets import HOSTS, SOURCES

MEASURED = Path(__file__).resolve().parents[3] / "shared" / "silicon"
CALLS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


@pytest.mark.parametrize("card", HOSTS)
@pytest.mark.parametrize("call", CALLS)
def test_more_bytes_and_slower_links_take_longer(card: str, call: str) -> None:
    topo = topology(parse_mesh("8"), card)
    for n in (2, 4, 8):
        found = [topo.call_seconds(call, n, 1 << k, 1, n) or 0.0 for k in range(10, 30)]
        assert found == sorted(found) and found[0] > 0
        large = topo.call_seconds(call, n, 1 << 34, 1, n)
        moved = (1 << 34) * (n - 1) / n * (2 if call == "all_reduce" else 1)
        assert large is not None
        assert moved / large == pytest.approx(1e9 * HOSTS[card].rate[CALLS.index(call)][(2, 4, 8).index(n)], rel=0.02)


def test_tables_hold_within_a_host_and_not_across() -> None:
    inside, across = topology(parse_mesh("8"), "h100"), topology(parse_mesh("8x8"), "h100")
    assert across.call_seconds("all_reduce", 8, 1 << 26, 1, 8) == inside.call_seconds("all_reduce", 8, 1 << 26, 1, 8)
    assert across.call_seconds("all_reduce", 8, 1 << 26, 8, 64) is None
    by = ("sum", "sum")
    near, far = (sum(w.seconds for w in collective.merge(1 << 26, [(a, False)], across, by)) for a in (1, 0))
    assert far > 5 * near
    shape = (64, 1 << 16)
    held = {a: [(k, tensor_boxes(shape, k, across.mesh))] for a, k in ((1, (None, 0)), (0, (0, None)))}
    whole = [tensor_boxes(shape, (None, None), across.mesh)]
    near, far = (float(transfer.costs(held[a], whole, 2, across).seconds[0, 0]) for a in (1, 0))
    assert near == across.call_seconds("all_gather_into_tensor", 8, 2 * 64 << 16, 1, 8)
    assert far > 3 * near


def test_cards_on_one_root_share_it() -> None:
    topo = topology(parse_mesh("8"), "l40s")
    assert topo.call_seconds("all_reduce", 2, 1 << 26, 4, 8) is None  # two cards of different roots
    times = [topo.call_seconds("all_gather_into_tensor", n, 1 << 26, 1, n) or 0.0 for n in (2, 4, 8)]
    assert times[0] * 4 < times[1] * 1.5 < times[2]


@pytest.mark.skipif(not MEASURED.is_dir(), reason="measured times are not beside this checkout")
def test_times_are_those_of_real_hosts() -> None:
    from bench.planning import silicon

    found: dict[tuple[str, str], list[float]] = {}
    for table in ("collectives", "products", "attention_prefill"):
        for card, kind, ratio in silicon.ratios(MEASURED, table):
            found.setdefault((card, kind), []).append(ratio)
    for of, values in found.items():
        assert 1 / 1.15 < np.median(values) < 1.15, of


@pytest.mark.parametrize("name", SOURCES)
def test_each_figure_says_where_it_comes_from(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["topology", "show", name]) == 0
    out = capsys.readouterr().out
    assert "where they come from" in out
    assert ("fitted to NCCL's times" in out) == (name in HOSTS)
    assert entry.main(["topology", "show", "nothing"]) == 2
