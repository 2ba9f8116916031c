"""Costs of transfers against a walk over all pairs of devices."""

from __future__ import annotations

import json
import tracemalloc
from itertools import product
from math import ceil, log2, prod

import numpy as np
import pytest

from tapestry.plan.cost import transfer
from tapestry.plan.strategy import tensor_boxes
from tapestry.plan.topology import PRESETS, parse_mesh, topology

LEVELS = {
    "device": {"memory": "16GiB", "bandwidth": 1e10, "flops": {"f32": 1e11}},
    "levels": [
        {"devices": 2, "alpha": 3e-6, "beta": 1e-10}, {"devices": 6, "alpha": 1e-6, "beta": 3e-10}, {"alpha": 8e-6, "beta": 1e-9},
    ],
}  # fmt: skip
CASES = [
    ((7,), "4"), ((12, 9), "2x3"), ((6, 8, 4), "2x2x2"), ((8, 6), "2x4"), ((), "4"), ((16,), "2x2x2"), ((8, 3, 5), "3x1x2"),
    ((33, 40), "2x3x2"), ((5, 5), "4x2"),
]  # fmt: skip


def layouts(shape, mesh):
    """All layouts without an empty part, and one with empty parts where the shape allows it."""
    found = list(product([None, *range(len(shape))], repeat=len(mesh)))
    full = [
        c for c in found if all(prod(m.size for m, t in zip(mesh, c, strict=True) if t == i) <= n for i, n in enumerate(shape))
    ]
    return full + [c for c in found if c not in full][:1]


def footprints(shape, held, rng):
    """The layouts' own boxes, some with a halo, some with rows missing."""
    out = [b for _, b in held]
    for _ in range(5):
        b = out[rng.integers(len(held))].copy()
        b[..., 0] = np.maximum(b[..., 0] - rng.integers(0, 3, b.shape[:2]), 0)
        b[..., 1] = np.clip(b[..., 1] + rng.integers(-1, 3, b.shape[:2]), b[..., 0], np.array(shape))
        out.append(b)
    return out


def slowest_receiver(layout, boxes, wanted, width, topo):
    """(seconds, bytes) by the model's definition: every receiver, every sender, one cell count each."""
    coords = list(product(*(range(a.size) for a in topo.mesh)))
    worst, total = 0.0, 0
    for r, at in enumerate(coords):
        took, peers, alpha = 0.0, 0, 0.0
        for s, other in enumerate(coords):
            differ = [k for k, (a, b) in enumerate(zip(at, other, strict=True)) if a != b]
            if not differ or any(layout[k] is None for k in differ):
                continue
            common = np.minimum(wanted[r, :, 1], boxes[s, :, 1]) - np.maximum(wanted[r, :, 0], boxes[s, :, 0])
            cells = int(np.prod(np.maximum(common, 0)))
            total += cells * width
            took += cells * width * max(topo.links[k].beta for k in differ)
            peers += cells > 0
            alpha = max([alpha, *(topo.links[k].alpha for k in differ if cells)])
        filled = int(np.prod(wanted[r, :, 1] - wanted[r, :, 0])) * width / topo.device.bandwidth
        worst = max(worst, took + alpha * ceil(log2(peers + 1)) + filled)
    return (worst + topo.device.launch if total else 0.0), total


@pytest.mark.parametrize(("shape", "mesh"), CASES, ids=str)
def test_costs_are_those_of_the_slowest_receiver(shape, mesh, tmp_path):
    path = tmp_path / "levels.json"
    path.write_text(json.dumps(LEVELS))
    rng = np.random.default_rng(len(shape) + prod(shape))
    for source in (*PRESETS[:2], str(path)):
        topo = topology(parse_mesh(mesh), source)
        held = [(c, tensor_boxes(shape, c, topo.mesh)) for c in layouts(shape, topo.mesh)]
        held = [held[k] for k in sorted(rng.choice(len(held), min(7, len(held)), replace=False))]
        wanted = footprints(shape, held, rng)
        found = transfer.costs(held, wanted, 4, topo)
        expected = [[slowest_receiver(c, b, w, 4, topo) for w in wanted] for c, b in held]
        assert np.array_equal(found.bytes, np.array(expected)[..., 1])
        np.testing.assert_allclose(found.seconds, np.array(expected)[..., 0], rtol=1e-12, atol=0)


def test_costs_in_pieces_are_the_costs(monkeypatch):
    topo = topology(parse_mesh("2x4"), "h100")
    held = [(c, tensor_boxes((16, 8), c, topo.mesh)) for c in layouts((16, 8), topo.mesh)]
    whole = transfer.costs(held, [b for _, b in held], 2, topo)
    monkeypatch.setattr(transfer, "CHUNK", 1)
    pieces = transfer.costs(held, [b for _, b in held], 2, topo)
    assert np.array_equal(whole.bytes, pieces.bytes)
    assert np.array_equal(whole.seconds, pieces.seconds)


def test_a_thousand_devices_need_no_table_of_pairs():
    """An n×n table for these 57 x 57 costs would hold 3.5 billion numbers."""
    topo = topology(parse_mesh("8x16x8"), "h100")
    shape = (2048, 4096, 64)
    held = [(c, tensor_boxes(shape, c, topo.mesh)) for c in layouts(shape, topo.mesh)]
    wanted = [b for _, b in held]
    tracemalloc.start()
    found = transfer.costs(held, wanted, 2, topo)
    assert tracemalloc.get_traced_memory()[1] < 1 << 28
    tracemalloc.stop()
    whole = next(k for k, (c, _) in enumerate(held) if all(t is None for t in c))
    assert not found.bytes[whole].any()
    assert np.diag(found.bytes).tolist() == [0] * len(held)
    missing = [int((prod(shape) - np.prod(b[..., 1] - b[..., 0], axis=-1)).sum()) * 2 for b in wanted]
    assert found.bytes[:, whole].tolist() == missing
