"""ai.onnx.ml: what is arithmetic becomes block operations; trees, vectors and tables work row by row or cell by cell."""

from __future__ import annotations

import numpy as np

from tapestry.ir.expr import Arg, call, cast
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.types import FLOATS
from tapestry.lift.building.builder import Node, axes, here, literal
from tapestry.lift.building.registry import Declined, lifts
from tapestry.lift.movement.gather import select
from tapestry.lift.operators.linear import contract
from tapestry.lift.operators.opaque_operators import along

ML = "ai.onnx.ml"


def _floats(n: Node, name: str) -> np.ndarray:
    return np.array(n.attr(name, []), np.float32)


@lifts("Scaler", domain=ML)
def lift_scaler(n: Node) -> None:
    """(x - offset) * scale, one of each or one per feature (the last axis)."""
    x, offset, scale = n.tensor(0), _floats(n, "offset"), _floats(n, "scale")
    if (
        not x.shape
        or (n.out().dtype, n.out().shape) != ("f32", x.shape)
        or any(v.size not in (1, x.shape[-1]) for v in (offset, scale))
    ):
        raise Declined
    dims = n.out_dims()

    def per_feature(v: np.ndarray) -> list[Aff]:
        return [const(0) if v.size == 1 else dim(dims[-1].name)]

    reads = [n.read(n.constant(k, v, "f32"), per_feature(v)) for k, v in (("offset", offset), ("scale", scale))]
    reads.insert(0, n.read(x.name, here(dims)))
    n.block(n.out(), dims, reads, lambda v, a, b: call("mul", call("sub", cast(v, "f32"), a), b))


@lifts("Binarizer", domain=ML)
def lift_binarizer(n: Node) -> None:
    """1 above the threshold, else 0."""
    if (n.out().dtype, n.out().shape) != (n.dtype(0), n.shape(0)):
        raise Declined
    dims, dtype = n.out_dims(), n.dtype(0)
    edge = float(n.attr("threshold", 0.0))
    limit = literal(edge if dtype in FLOATS else int(np.floor(edge)), dtype)
    above = call("gt", Arg(0, dtype), limit)
    n.block(n.out(), dims, [n.read(n.ins[0], here(dims))], call("where", above, literal(1, dtype), literal(0, dtype)))


@lifts("LinearRegressor", domain=ML)
def lift_linear_regressor(n: Node) -> None:
    """x times the coefficients of every target, and an intercept."""
    x, targets, weights = n.tensor(0), int(n.attr("targets", 1)), _floats(n, "coefficients")
    shift = _floats(n, "intercepts")
    plain = n.attr("post_transform", "NONE") == "NONE" and x.dtype == "f32" and len(x.shape) == 2
    if (
        not plain
        or weights.size != targets * x.shape[1]
        or shift.size not in (0, targets)
        or n.out().shape != (x.shape[0], targets)
    ):
        raise Declined
    w = n.constant("coefficients", weights.reshape(targets, -1), "f32")
    bias = n.read(n.constant("intercepts", shift, "f32"), [dim("n")]) if shift.size else None
    dims = (Dim("i", x.shape[0]), Dim("n", targets))
    a, b = n.read(x.name, [dim("i"), dim("m")]), n.read(w, [dim("n"), dim("m")])
    contract(n, n.out(), dims, [Dim("m", x.shape[1])], a, b, bias=bias)


@lifts("ArrayFeatureExtractor", domain=ML)
def lift_array_feature_extractor(n: Node) -> None:
    """Features (of the last axis) by their numbers."""
    x, index = n.tensor(0), n.tensor(1)
    if len(x.shape) < 2 or n.out().shape != (*x.shape[:-1], index.size):
        raise Declined
    dims = n.out_dims()
    flat = n.temp("index")
    one = axes((index.size,), "k")
    n.view(flat, index.name, one, [*[const(0)] * (len(index.shape) - 1), dim("k0")][: len(index.shape)])
    select(n, n.outs[0], x.name, flat, dims, len(x.shape) - 1, 1)


SAMPLES = dict.fromkeys(
    (
        "TreeEnsemble", "TreeEnsembleRegressor", "TreeEnsembleClassifier", "SVMRegressor", "SVMClassifier", "LinearClassifier",
        "Normalizer", "FeatureVectorizer",
    ),
    "takes all features of a sample together",
)  # fmt: skip
CELLS = {"LabelEncoder": "looks values up in a table", "OneHotEncoder": "compares with a list of categories"}
FEATURES = {"Imputer": "replaces what is missing"}


@lifts(*SAMPLES, *CELLS, *FEATURES, domain=ML)
def lift_rows(n: Node) -> None:
    """Opaque, splittable along the first axes if all inputs and outputs share them.

    These are all axes where cells know nothing of each other, all but the last where its features do, and the first of two
    where a sample is looked at as a whole.
    """
    rank = len(n.shape(0))
    count = rank if n.kind in CELLS else rank - 1 if n.kind in FEATURES else int(rank == 2)
    ins, outs = range(len(n.ins)), range(len(n.outs))
    shapes = {t.shape[:count] for t in (*map(n.tensor, ins), *map(n.out, outs))}
    along(n, {**SAMPLES, **CELLS, **FEATURES}[n.kind], range(count) if len(shapes) == 1 else (), ins, outs)
