"""What kind of parallelism a plan is said to be: by what its axes are, whatever the file calls them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto

from tapestry.ir.graph import Block, Graph
from tapestry.ir.plan import MeshAxis, Plan, Strategy
from tapestry.rewrites.core.driver import simplify
from tapestry.viz.summary import likeness
from tests.support.lifting import build, data, lift_model, node


def layer(folder: Path, *rows: int, flat: bool = False) -> Graph:
    """Attention and an MLP on (rows,) tokens of 8 features, with its products on one matrix of rows and tokens if ``flat``."""
    weights = {n: data(8, 8) for n in "qkvo"} | {"u": data(8, 16), "d": data(16, 8)}
    weights |= {"flat": np.array([-1, 8]), "back": np.array([*rows, 8])} if flat else {}

    def reshape(x: str, to: str) -> list[NodeProto]:
        return [node("Reshape", f"{x} {to}", f"{x}_{to}") if flat else node("Identity", x, f"{x}_{to}")]

    perm = [*range(len(rows) - 1), len(rows), len(rows) - 1]
    nodes = [*reshape("x", "flat")]
    for n in "qkv":
        nodes += [node("MatMul", f"x_flat {n}", f"{n}1", name=n), *reshape(f"{n}1", "back")]
    nodes += [
        node("Transpose", "k1_back", "kt", perm=perm), node("MatMul", "q1_back kt", "s"), node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p v1_back", "a"), *reshape("a", "flat"), node("MatMul", "a_flat o", "h", name="o"),
        node("MatMul", "h u", "g", name="u"), node("Relu", "g", "r"), node("MatMul", "r d", "y", name="d"),
    ]  # fmt: skip
    return simplify(lift_model(build(nodes, {"x": data(*rows, 8)}, ["y"], weights), folder).graph)


def said(graph: Graph, cut: Mapping[str, int | str], size: int = 2) -> list[str]:
    """Of a plan that cuts the products of some weights: an axis of the result, or what is summed ("in")."""
    strategies: list[Strategy] = []
    for op in graph.ops:
        weight = next((t for t in op.inputs if t in cut and t in graph.weights), "")
        at = cut.get(weight)
        dims = op.reduce if isinstance(op, Block) else ()
        strategies.append(Strategy((None if at is None else dims[0].name if at == "in" else op.dims[int(at)].name,), (None,)))
    return likeness(Plan(graph=graph, mesh=(MeshAxis("z", size),), strategies=tuple(strategies)))


@pytest.mark.parametrize(
    ("rows", "flat", "axis", "size", "kind"),
    [
        ((4, 6), False, 0, 2, "data parallel"),
        ((4, 6), False, 1, 2, "sequence parallel"),
        ((1, 6), False, 1, 2, "sequence parallel"),
        ((6,), False, 0, 2, "sequence parallel"),  # attention sums over the first axis of the input: tokens, no batch
        ((4, 6), True, 0, 2, "data parallel"),
        ((2, 6), True, 0, 4, "sequence parallel"),  # two rows give no four parts: the tokens are cut
        ((1, 6), True, 0, 2, "sequence parallel"),
    ],
)
def test_axes_that_a_product_only_carries(rows: tuple[int, ...], flat: bool, axis: int, size: int, kind: str, tmp_path) -> None:
    graph = layer(tmp_path, *rows, flat=flat)
    assert said(graph, dict.fromkeys("qkvoud", axis), size) == [f"{kind} over z"]


def test_rows_of_an_image_are_space(tmp_path) -> None:
    nodes = [node("Conv", "x w", "c", pads=[1, 1, 1, 1]), node("Conv", "c v", "y")]
    weights = {"w": data(4, 3, 3, 3), "v": data(4, 4, 1, 1)}
    graph = simplify(lift_model(build(nodes, {"x": data(2, 3, 8, 8)}, ["y"], weights), tmp_path).graph)
    assert said(graph, {"w": 2, "v": 2}) == ["spatial parallel over z"]
    assert said(graph, {"w": 0, "v": 0}) == ["data parallel over z"]


COLUMNS, ROWS = dict.fromkeys("qkv", 2) | {"u": 2}, {"o": "in", "d": "in"}


@pytest.mark.parametrize(
    ("cut", "kind"),
    [
        (COLUMNS | ROWS, "Megatron tensor parallel"),
        (COLUMNS | ROWS | {"q": "in"}, "mixed (columns, rows)"),  # a query summed by parts meets no columns before it
        (COLUMNS | {"o": 2, "d": "in"}, "mixed (columns, rows)"),  # columns of columns: gathered in between
        (COLUMNS | {"o": "in", "d": 2}, "mixed (columns, rows)"),
        (dict.fromkeys("qkvoud", 2), "column parallel"),
    ],
)
def test_megatron_is_pairs_of_columns_and_rows(cut: dict[str, int | str], kind: str, tmp_path) -> None:
    assert said(layer(tmp_path, 4, 6), cut) == [f"{kind} over z"]
