"""Einsum lifts to contractions, whatever its letters; and is then split like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Opaque
from tapestry.ir.recognition.contraction import factors
from tapestry.rewrites.splitting.split import splittable
from tests.support.lifting import agree, build, data, evaluate, lift_model, node

EQUATIONS = [
    ("ij,jk->ik", [(2, 3), (3, 4)]), ("td,edf->etf", [(5, 3), (2, 3, 4)]), ("bhqd,bhkd->bhqk", [(2, 2, 3, 4), (2, 2, 5, 4)]),
    ("ij,jk", [(2, 3), (3, 4)]), ("ij->ji", [(2, 3)]), ("ij->", [(2, 3)]), ("ij->j", [(2, 3)]), ("i,j->ij", [(2,), (3,)]), ("ii->i", [(3, 3)]), ("ii", [(3, 3)]),
    ("...ij,...jk->...ik", [(4, 2, 3), (4, 3, 5)]), ("...i,i->...", [(2, 3, 4), (4,)]), ("b...->...", [(2, 3, 4)]), ("...ij,...jk", [(1, 2, 3), (4, 3, 5)]),
    ("ab,bc,cd->ad", [(2, 3), (3, 4), (4, 5)]), ("ab,ac,ad->abcd", [(2, 3), (2, 4), (2, 5)]), ("ij,ij->ij", [(2, 3), (2, 3)]), (" i j , j -> i ", [(2, 3), (3,)]),
]  # fmt: skip


@pytest.mark.parametrize("equation,shapes", EQUATIONS, ids=[e for e, _ in EQUATIONS])
def test_equations_are_onnxruntimes(equation: str, shapes: list[tuple[int, ...]], tmp_path: Path) -> None:
    feeds = {f"x{k}": data(*s, seed=k) for k, s in enumerate(shapes)}
    agree(node("Einsum", " ".join(feeds), equation=equation), feeds, ["y"], folder=tmp_path)


def test_experts_are_a_batched_matrix_product_that_every_dimension_cuts(tmp_path: Path) -> None:
    feeds = {"x": data(5, 3), "w": data(4, 3, 6)}
    graph = lift_model(build([node("Einsum", "x w", equation="td,edf->etf")], feeds, ["y"]), tmp_path).graph
    (op,) = graph.ops
    assert isinstance(op, Block) and factors(op) and {d.name for d in splittable(op)} == {"e", "t", "f", "d"}


@pytest.mark.parametrize("equation", ["ij,kl->ik,", "ij,jk->iz", "ijk,jk->ik", "ij,jk->ii"])
def test_what_does_not_fit_stays_opaque_or_is_refused(equation: str, tmp_path: Path) -> None:
    """Such a node is the runtime's to refuse, not ours to misread."""
    feeds = {"x": data(2, 3), "w": data(3, 4)}
    model = build([node("Relu", "x", "r")], feeds, ["r"])
    model.graph.node.append(node("Einsum", "r w", "y", equation=equation))
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4]))
    try:
        graph = lift_model(model, tmp_path).graph
    except TapestryError:
        return
    assert any(isinstance(op, Opaque) for op in graph.ops)


def test_half_precision_accumulates_in_f32(tmp_path: Path) -> None:
    x = np.full((1, 4096), 1.0, np.float16)
    lifted = lift_model(build([node("Einsum", "x w", equation="ij,jk->ik")], {"x": x, "w": x.T.copy()}, ["y"]), tmp_path)
    assert evaluate(lifted, {"x": x, "w": x.T.copy()})["y"] == 4096
