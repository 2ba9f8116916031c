"""`lay_out`: intermediate tensors of GPU plans with channels last, and heads beside each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.parser import parse
from tapestry.lift import lift, read_weight
from tapestry.plan.fusion import Machine, fused
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import Move
from tapestry.verify import interp
from tapestry.verify.rewriting.proofs import UNPROVED, prove_step
from tests.support.halo_nets import GPU, HALF, network, projections


def lifted(made: onnx.ModelProto, path: Path) -> tuple[Graph, dict[str, np.ndarray]]:
    """The simplified graph, and data for its inputs and weights."""
    onnx.save(made, path)
    found = lift(path, {})
    graph = found.graph
    data = {t: read_weight(path, w, graph.tensors[t], constants=found.constants) for t, w in graph.weights.items()}
    rng = np.random.default_rng(1)
    data |= {t: rng.standard_normal(graph.tensors[t].shape).astype(HALF) for t in graph.inputs if t not in data}
    return simplify(graph), data


@pytest.mark.parametrize("make", [network, projections])
def test_a_plan_for_a_gpu_computes_the_same(make, tmp_path: Path) -> None:
    graph, data = lifted(make(), tmp_path / "m.onnx")
    after, moves = fused(graph, GPU)
    assert any(m.rule == "lay_out" for m in moves)
    plain, _ = fused(graph, Machine(device=GPU.device, eager=True))
    assert not any(t.endswith(".laid") for t in plain.tensors), "a CPU has its own order of buffers"
    wanted, found = interp.run(graph, data)["y"], interp.run(after, data)["y"]
    assert np.abs(wanted.astype(float) - found.astype(float)).max() <= 4e-3 * np.abs(wanted.astype(float)).max()


def test_convolutions_read_and_write_channels_last(tmp_path: Path) -> None:
    graph, _ = lifted(network(), tmp_path / "m.onnx")
    after, _ = fused(graph, GPU)
    assert {after.tensors[t].shape for t in after.tensors if t.endswith(".laid")} == {(2, 5, 4, 6)}


def test_scaled_projections_are_put_beside_the_others(tmp_path: Path) -> None:
    graph, _ = lifted(projections(), tmp_path / "m.onnx")
    after, _ = fused(graph, GPU)
    (first,) = [op for op in after.ops if isinstance(op, Block) and "x" in op.inputs]
    assert first.monoid == "sums3" and {after.tensors[t].shape for t in first.outs} == {(2, 7, 12)}


def test_every_order_is_proved(tmp_path: Path) -> None:
    """Of a tensor with three axes: all permutations, and each pair joined; the first readers look at it through windows."""
    graph = parse("""
        graph g
        input x: f16[4, 6, 5]
        t: f16[4, 6, 5] = op [a: 4, b: 6, c: 5]
          reads x[a, b, c]
          body x * f16(2.0)
        y: f16[4, 4] = op [i: 4, j: 4 | k: 5 sum, l: 3 sum]
          reads t[i, j + l, k]
          body t
        z: f16[5, 4] = op [c: 5, i: 4]
          reads t[i, c + 2, c] else 1.0
          body t
        output y, z
    """)
    orders = ["0.2.1", "1.0.2", "1.2.0", "2.0.1", "2.1.0"]
    for order in orders:
        after = apply_moves(graph, [Move("lay_out", "t", (("axes", order),))])
        assert after.log is not None and not prove_step(after.log)[UNPROVED], order
        x = np.random.default_rng(2).standard_normal((4, 6, 5)).astype(HALF)
        wanted, found = interp.run(graph, {"x": x}), interp.run(after, {"x": x})
        assert all(np.array_equal(wanted[n], found[n]) for n in "yz"), order


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        ("0.1.2", "no other order"),
        ("0.1", "no other order"),
        ("0.1+2", "beyond the end of an axis"),
        ("2+1.0", "used together alone"),
    ],
)
def test_what_would_be_wrong_is_refused(axes: str, why: str) -> None:
    """Columns beyond the end of a joined axis would be the next row's."""
    graph = parse("""
        graph g
        input x: f16[4, 30]
        t: f16[4, 6, 5] = op [a: 4, b: 6, c: 5]
          reads x[a, 5*b + c]
          body x * f16(2.0)
        y: f16[4, 6, 5] = op [a: 4, b: 6, c: 5]
          reads t[a, b, c + 1] else 0.0
          body t
        output y
    """)
    with pytest.raises(TapestryError, match=why):
        RULES["lay_out"].apply(graph, Move("lay_out", "t", (("axes", axes),)))
