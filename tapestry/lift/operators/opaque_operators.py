"""Opaque operators that commute with splitting along some axes: batches, channels, rows that know nothing of each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry.ir.expr import Arg, Expr, Index, call, cast
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.types import FLOATS
from tapestry.lift.builder import Declined, Node, axes, emit_cells, emit_opaque, here, lifts, literal
from tapestry.lift.operators.gather import check_known, select
from tapestry.lift.operators.linear import contract

Axes = dict[int, list[int | None]]


def along(n: Node, why: str, axes: Sequence[int], ins: Sequence[int] = (0,), outs: Sequence[int] = (0,)) -> None:
    """Opaque, splittable along some axes of input 0, which inputs ``ins`` and the outputs share."""
    shared: Axes = {k: list(axes) for k in (*ins, *outs)}
    dims = [Dim(f"x{a}", n.shape(0)[a]) for a in axes]
    emit_opaque(n, why, dims, {k: shared[k] for k in ins if n.has(k)}, {k: shared[k] for k in outs})


ROWS: dict[
    str, tuple[str, int, tuple[int, ...]]
] = {  # why; how many of the first axes (or all but the last ones); inputs with them
    "Det": ("a determinant mixes a whole matrix", -2, (0,)),
    "Col2Im": ("adds overlapping blocks", 1, (0,)),  # channels are interleaved with the cells of a block
    "STFT": ("Fourier transforms of overlapping frames", 1, (0,)),
    "TensorScatter": ("positions depend on the data", 1, (0, 1, 2)),
    "TfIdfVectorizer": ("counts sequences of a row's values", -1, (0,)),
}
BATCHES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {  # why; inputs and outputs whose first axis is the batch
    "GridSample": ("samples where the grid says", (0, 1), (0,)),
    "DeformConv": ("samples at offsets that depend on the data", (0, 2, 4), (0,)),
    "LinearAttention": ("a state that runs over the positions", (0, 1, 2, 3, 4, 5), (0, 1)),
}


@lifts(*ROWS)
def lift_rows(n: Node) -> None:
    """Row by row, matrix by matrix or signal by signal: whatever the first axes count."""
    why, count, ins = ROWS[n.kind]
    if n.kind == "TensorScatter" and n.attr("mode", "linear") == "linear":
        axis = int(n.attr("axis", -2))
        check_known(n, n.shape(0)[axis] - n.shape(1)[axis] + 1, at=2, least=0)
    along(n, why, range(len(n.shape(0)))[:count], ins)


@lifts(*BATCHES)
def lift_batches(n: Node) -> None:
    """Entry by entry of a batch."""
    why, ins, outs = BATCHES[n.kind]
    emit_opaque(n, why, [Dim("b", n.shape(0)[0])], {k: [0] for k in ins if n.has(k)}, {k: [0] for k in outs})


@lifts("TopK")
def lift_top_k(n: Node) -> None:
    """Selection by value along one axis: independent along the others."""
    rank = len(n.shape(0))
    at = n.axis(-1, rank)
    along(n, f"selects by value along axis {at}", [a for a in range(rank) if a != at], outs=range(len(n.outs)))


@lifts("RoiAlign")
def lift_roi_align(n: Node) -> None:
    """Region by region, channel by channel; a region may lie in any image."""
    dims = [Dim("r", n.shape(1)[0]), Dim("c", n.shape(0)[1])]
    emit_opaque(
        n, "samples inside regions that depend on the data", dims, {0: [None, 1], 1: [0, None], 2: [0, None]}, {0: [0, 1]}
    )


@lifts("ReverseSequence")
def lift_reverse_sequence(n: Node) -> None:
    """Every batch entry has a length of its own; all axes but time commute."""
    batch, time = int(n.attr("batch_axis", 1)), int(n.attr("time_axis", 0))
    axes: list[int | None] = [a for a in range(len(n.shape(0))) if a != time]
    dims = [Dim(f"x{a}", n.shape(0)[a]) for a in axes if a is not None]
    emit_opaque(n, "lengths depend on the data", dims, {0: axes, 1: [0 if a == batch else None for a in axes]}, {0: axes})


@lifts("DFT")
def lift_dft(n: Node) -> None:
    """A Fourier transform along one axis: the others commute, but for the last one, which holds real and imaginary parts."""
    rank = len(n.shape(0))
    axis = n.const(2) if n.has(2) else None
    if n.has(2) and axis is None:
        raise Declined
    at = int(axis.reshape(-1)[0]) if axis is not None else int(n.attr("axis", 1 if n.version < 20 else -2))
    axes: list[int | None] = [a for a in range(rank - 1) if a != at % rank]
    emit_opaque(n, "a Fourier transform", [Dim(f"x{a}", n.shape(0)[a]) for a in axes if a is not None], {0: axes}, {0: axes})


@lifts("BitCast")
def lift_bit_cast(n: Node) -> None:
    """Cell by cell, where both types are equally wide."""
    if n.shape(0) != n.out().shape:
        raise Declined
    emit_cells(n, "reads bits as another type")


@lifts("AffineGrid")
def lift_affine_grid(n: Node) -> None:
    """theta applied to every place of an image or volume, whose coordinates run from -1 to 1, the innermost first."""
    theta, y = n.tensor(0), n.out()
    if n.const(1) is None or theta.dtype not in ("f32", "f64"):
        raise Declined
    dims = n.out_dims()
    rank, row = len(dims) - 2, dims[-1].name
    corners = bool(n.attr("align_corners", 0))

    def coordinate(a: int) -> Expr:
        size, place = dims[a].size, Index(dim(dims[a].name) * 2)
        step = place if corners else Index(dim(dims[a].name) * 2 + 1)
        cells = literal(max(size - 1, 1) if corners else size, theta.dtype)
        return call("sub", call("div", cast(step, theta.dtype), cells), literal(1, theta.dtype))

    reads = [n.read(theta.name, [dim("x0"), dim(row), const(k)]) for k in range(rank + 1)]

    def body(*t: Expr) -> Expr:
        total: Expr = t[rank]
        for k in range(rank):
            total = call("add", total, call("mul", t[k], coordinate(rank - k)))
        return total

    n.block(y, dims, reads, body)


@lifts("Adagrad", "Adam", "Momentum", domain="ai.onnx.preview.training")
def lift_optimizer(n: Node) -> None:
    """Cell by cell, where all tensors to be optimised are of one shape; the first two inputs are a rate and a count."""
    shape = n.shape(2)
    if any(n.shape(k) != shape for k in range(2, len(n.ins))):
        raise Declined
    every: list[int | None] = list(range(len(shape)))
    ins: Axes = dict.fromkeys(range(2, len(n.ins)), every)
    emit_opaque(n, "a step of an optimiser", axes(shape), ins, dict.fromkeys(range(len(n.outs)), every))


def opaque_integer_conv(n: Node) -> None:
    """Image by image, and by output channel where there is one group."""
    w = 1 if n.kind == "ConvInteger" else 3
    dims, ins = [Dim("b", n.shape(0)[0])], {0: [0], w: [None]}
    out: Axes = {0: [0]}
    filters = n.shape(w)[0]
    own = [w + 1, w + 2] if n.kind == "QLinearConv" else [w + 2]  # scales and zero points that each filter may have its own of
    shared = all(n.tensor(k).size == 1 for k in range(len(n.ins)) if k not in (0, w, 8, *own) and n.has(k))
    each = [k for k in own if n.has(k) and n.shape(k) == (filters,) and filters > 1]
    if int(n.attr("group", 1)) == 1 and shared and all(n.tensor(k).size == 1 for k in own if n.has(k) and k not in each):
        dims.append(Dim("o", filters))
        ins = {0: [0, None], w: [None, 0], **({8: [None, 0]} if n.has(8) else {}), **{k: [None, 0] for k in each}}
        out = {0: [0, 1]}
    emit_opaque(n, "products of shifted integers", dims, ins, out)


# ai.onnx.ml: what is arithmetic becomes block operations; trees, vectors and tables work row by row or cell by cell.


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
def lift_ml_rows(n: Node) -> None:
    """Opaque, splittable along the first axes if all inputs and outputs share them.

    These are all axes where cells know nothing of each other, all but the last where its features do, and the first of two
    where a sample is looked at as a whole.
    """
    rank = len(n.shape(0))
    count = rank if n.kind in CELLS else rank - 1 if n.kind in FEATURES else int(rank == 2)
    ins, outs = range(len(n.ins)), range(len(n.outs))
    shapes = {t.shape[:count] for t in (*map(n.tensor, ins), *map(n.out, outs))}
    along(n, {**SAMPLES, **CELLS, **FEATURES}[n.kind], range(count) if len(shapes) == 1 else (), ins, outs)
