"""Costs of transfers against a walk over all pairs of devices."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from itertools import product
from math import ceil, log2, prod

import numpy as np
import pytest

from tapestry.ir.collective_calls import transfer_call
from tapestry.ir.program import Buffer, Program, Transfer
from tapestry.plan.cost import transfer
from tapestry.plan.lower import exchange
from tapestry.plan.strategy import tensor_boxes
from tapestry.plan.topology import PRESETS, fabrics, parse_mesh, topology
from tapestry.plan.topology.measured_costs import CallTimes
from tapestry.plan.topology.routing import routes
from tapestry.runtime.messages.point_to_point import in_one_piece

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


def messages(layout, boxes, wanted, mesh):
    """(receiver, sender, cells) of every message that is not empty."""
    coords = list(product(*(range(a.size) for a in mesh)))
    for (r, at), (s, other) in product(enumerate(coords), repeat=2):
        if r != s and all(a == b or t is not None for a, b, t in zip(at, other, layout, strict=True)):
            common = np.minimum(wanted[r, :, 1], boxes[s, :, 1]) - np.maximum(wanted[r, :, 0], boxes[s, :, 0])
            cells = int(np.prod(np.maximum(common, 0)))
            if cells:
                yield r, s, cells


def slowest_receiver(layout, boxes, wanted, width, topo):
    """(seconds, bytes) by the model's definition: every receiver, every sender, every wire on the way."""
    sent = list(messages(layout, boxes, wanted, topo.mesh))
    load = {}
    for f in fabrics(topo):
        for r, s, cells in sent:
            line, here = r - (r // f.stride % f.size) * f.stride, r // f.stride % f.size
            at = s // f.stride % f.size
            while f.wires and at != here:
                found = routes(f.size, f.wires)
                wire, at = f.wires[found.wire[here, at]], int(found.next[here, at])
                load[f.stride, line, wire] = load.get((f.stride, line, wire), 0.0) + cells * width * wire.beta
    worst = 0.0
    for r in range(len(boxes)):
        taken, alpha, path = 0.0, 0.0, {}
        mine = [(s, cells) for to, s, cells in sent if to == r]
        for s, cells in mine:
            crossed = [f for f in fabrics(topo) if s // f.stride % f.size != r // f.stride % f.size]
            taken += cells * width * max((f.link.beta for f in crossed if not f.wires), default=0.0)
            alpha = max([alpha, *(f.link.alpha for f in crossed if not f.wires)])
            for f in crossed:
                if f.wires:
                    long = routes(f.size, f.wires).alpha[r // f.stride % f.size, s // f.stride % f.size]
                    path[f.stride] = max(path.get(f.stride, 0.0), long)
        lines = {f.stride: r - (r // f.stride % f.size) * f.stride for f in fabrics(topo)}
        busy = max((v for (stride, line, _), v in load.items() if lines[stride] == line), default=0.0)
        filled = int(np.prod(wanted[r, :, 1] - wanted[r, :, 0])) * width / topo.device.bandwidth
        worst = max(worst, max(taken, busy) + alpha * ceil(log2(len(mine) + 1)) + sum(path.values()) + filled)
    return (worst + topo.device.launch if sent else 0.0), sum(cells for _, _, cells in sent) * width


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "mesh"), CASES, ids=str)
def test_costs_are_those_of_the_slowest_receiver(shape, mesh, tmp_path):
    path = tmp_path / "levels.json"
    path.write_text(json.dumps(LEVELS))
    rng = np.random.default_rng(len(shape) + prod(shape))
    for source in (*PRESETS[:2], str(path)):
        topo = replace(topology(parse_mesh(mesh), source), calls=())
        held = [(c, tensor_boxes(shape, c, topo.mesh)) for c in layouts(shape, topo.mesh)]
        held = [held[k] for k in sorted(rng.choice(len(held), min(7, len(held)), replace=False))]
        wanted = footprints(shape, held, rng)
        found = transfer.costs(held, wanted, 4, topo)
        expected = [[slowest_receiver(c, b, w, 4, topo) for w in wanted] for c, b in held]
        assert np.array_equal(found.bytes, np.array(expected)[..., 1])
        np.testing.assert_allclose(found.seconds, np.array(expected)[..., 0], rtol=1e-12, atol=0)


WIRED = [
    {"instance_map": "{8, [[1,2],[0,3],[3,4],[2,5],[5],[6],[7],[0,4]]}", "link": {"alpha": 1e-6, "beta": 1e-9},
     "links": [{"from": 4, "to": 5, "beta": 7e-9}]},
    {"interconnect": {"shape": "torus", "alpha": 1e-6, "beta": 1e-9}},
    {"interconnect": {"shape": "full mesh", "alpha": 1e-6, "beta": 1e-9}},
    {"interconnect": {"shape": "star", "centre": 3, "alpha": 1e-6, "beta": 1e-9}},
    {"levels": [{"devices": 4, "shape": "one-way ring", "alpha": 1e-6, "beta": 1e-9}, {"alpha": 5e-6, "beta": 4e-9}]},
    {"interconnect": {"shape": "linked rings", "alpha": 1e-6, "beta": 1e-9}},
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("joined", WIRED, ids=lambda d: next(iter(d)))
@pytest.mark.parametrize("mesh", ["8", "2x4", "4x2", "2x2x2"])
def test_messages_over_wires_are_walked(mesh, joined, tmp_path):
    """Equal where the parts are, and never less where they are not."""
    path = tmp_path / "wires.json"
    path.write_text(json.dumps({"device": LEVELS["device"], **joined}))
    topo, rng = topology(parse_mesh(mesh), str(path)), np.random.default_rng(len(mesh))
    assert any(f.wires for f in topo.joined)
    for shape in ((8, 16), (16, 8, 8), (9, 11)):
        held = [(c, tensor_boxes(shape, c, topo.mesh)) for c in layouts(shape, topo.mesh)]
        held = [held[k] for k in sorted(rng.choice(len(held), min(5, len(held)), replace=False))]
        wanted = [b for _, b in held] if shape != (9, 11) else footprints(shape, held, rng)
        found = transfer.costs(held, wanted, 4, topo)
        expected = np.array([[slowest_receiver(c, b, w, 4, topo) for w in wanted] for c, b in held])
        assert np.array_equal(found.bytes, expected[..., 1])
        if shape == (9, 11):
            assert (found.seconds >= expected[..., 0] * (1 - 1e-12)).all()
        else:
            np.testing.assert_allclose(found.seconds, expected[..., 0], rtol=1e-12, atol=0)


def test_costs_in_pieces_are_the_costs(monkeypatch):
    topo = topology(parse_mesh("2x4"), "h100")
    held = [(c, tensor_boxes((16, 8), c, topo.mesh)) for c in layouts((16, 8), topo.mesh)]
    whole = transfer.costs(held, [b for _, b in held], 2, topo)
    monkeypatch.setattr(transfer, "CHUNK", 1)
    pieces = transfer.costs(held, [b for _, b in held], 2, topo)
    assert np.array_equal(whole.bytes, pieces.bytes)
    assert np.array_equal(whole.seconds, pieces.seconds)


@pytest.mark.slow
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("shape", "mesh"), [((8, 12), "4"), ((8, 12), "2x2"), ((7, 5), "2x2"), ((6, 9), "3x2"), ((16,), "2x2x2")]
)
def test_a_measured_call_is_the_one_that_the_engine_makes(shape, mesh):
    """Every change of layout takes the table's seconds of the call that `transfer_call` names, at its bytes and group."""
    mesh = parse_mesh(mesh)
    groups = range(2, prod(a.size for a in mesh) + 1)
    tables = tuple(
        CallTimes(call, n, ((0, 1000.0 * k + n), (1000, 1000.0 * k + n + 1e-3)))
        for k, call in enumerate(("all_gather_into_tensor", "all_to_all_single", "batch_isend_irecv"), 1) for n in groups
    )  # fmt: skip
    topo = replace(topology(mesh, "cpu"), calls=tables)
    full = [k for k in layouts(shape, mesh) if np.all(np.diff(tensor_boxes(shape, k, mesh)) > 0)]
    seen = set()
    for before, after in product(full, repeat=2):
        held, wanted = (tensor_boxes(shape, k, mesh) for k in (before, after))
        found = transfer.costs([(before, held)], [wanted], 4, topo)
        if not found.bytes.any():
            continue
        boxes = [tuple(tuple((int(p), int(q)) for p, q in b) for b in w) for w in (held, wanted)]
        buffers = {n: Buffer(name=n, tensor="t", dtype="f32", boxes=b) for n, b in zip("sd", boxes, strict=True)}
        step = Transfer(kind="", src="s", dst="d", messages=exchange(held, wanted, before, mesh))
        call = transfer_call(step, Program(devices=len(held), buffers=buffers, steps=(step,), outputs={}))
        seconds = topo.call_seconds(call.name, len(call.groups[0]), call.nbytes)
        if call.name == "batch_isend_irecv":  # groups that touch are one for the engine: the receiver's own peers are priced
            assert 3000 < found.seconds[0, 0] <= seconds + 1e-3
        else:
            filled = max(prod(q - p for p, q in b) for b in boxes[1]) * 4 / topo.device.bandwidth + topo.device.launch
            if call.name == "all_gather_into_tensor" and all(in_one_piece(m.box, boxes[1][m.dst]) for m in step.messages):
                filled = 0.0  # the backend writes where the result is
            assert found.seconds[0, 0] == pytest.approx(seconds + filled, abs=1e-9)
        seen.add(call.name)
    assert "batch_isend_irecv" in seen or "all_to_all_single" in seen
