"""Resize, exactly: the place that an output cell samples is a rational function of its index, so floor and mod express it.

``x(o) = (a*o + b) / c`` for integers a, b, c (ONNX Resize-19, coordinate_transformation_mode). The nearest cell is a floor of
that; linear interpolation reads ``floor(x)`` and the next one, weighted by ``mod(a*o + b, c) / c``, axis by axis. Splitting a
spatial axis then needs a halo of a row or two, like a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np
from onnx import helper

from tapestry.ir.expr import Expr, Index, call, cast, literal
from tapestry.ir.graph import Dim, ranges_of
from tapestry.ir.index import Aff, const, dim, floordiv, modulo, span
from tapestry.ir.types import FLOATS
from tapestry.lift.builder import Node, Operand, accumulator, axes, here
from tapestry.lift.opaque import emit_opaque
from tapestry.lift.registry import Declined, lifts

Place = tuple[Aff, int]  # numerator and denominator of the coordinate sampled
Along = Callable[[Node, str, str, tuple[Dim, ...], int, int, Place], str]  # interpolation along one axis


@lifts("Resize", "Upsample")
def lift_resize(n: Node) -> None:
    """Nearest, linear and cubic interpolation; what is left (antialiasing, crops) commutes with batch and channels."""
    places = None if n.out().size == 0 or n.tensor(0).size == 0 else _sample_places(n)
    mode = n.attr("mode", "nearest")
    done = False
    if places is not None and mode == "nearest":
        done = _nearest(n, places)
    elif places is not None and mode in ("linear", "cubic") and n.dtype(0) in FLOATS:
        done = _between(n, places, _linear_axis if mode == "linear" else _cubic_axis)
    if not done:
        _sampled(n)


def _sample_places(n: Node) -> dict[int, Place] | None:
    """For every axis that changes, where an output cell samples; None where no rational says it."""
    x, y = n.shape(0), n.out().shape
    modern = n.kind == "Resize" and n.version >= 11
    if n.attr("antialias", 0) or n.attr("exclude_outside", 0) or n.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    which = [int(a) % len(x) for a in n.attr("axes", range(len(x)))]
    given = n.const(2 if modern else 1) if n.version >= 9 or modern else np.array(n.attr("scales", []), np.float32)
    if modern and n.has(3):
        given = None if n.const(3) is None else np.array([])
    if given is None:
        return None
    scales = dict(zip(which, given.reshape(-1), strict=False))
    how = str(n.attr("coordinate_transformation_mode", "half_pixel")) if modern else "asymmetric"
    out: dict[int, Place] = {}
    for a, (size, wanted) in enumerate(zip(x, y, strict=True)):
        scale = _rational(scales.get(a), size, wanted)
        if size == wanted and scale == 1:
            continue
        place = None if scale is None else _pixel_place(how, dim(f"x{a}"), scale, size, wanted)
        if place is None:
            return None
        out[a] = place
    return out


def _rational(scale: np.float32 | None, size: int, wanted: int) -> Fraction | None:
    """The scale as it was meant: wanted/size where that is the number given or next to it (`inference_fixes` may have taken
    the next one), else the simplest fraction that rounds to it.
    """
    whole = Fraction(wanted, size)
    if scale is None or abs(np.float32(float(whole)) - scale) <= np.spacing(scale):
        return whole
    found = Fraction(float(scale)).limit_denominator(1 << 10)
    return found if found > 0 and np.float32(float(found)) == scale else None


def _pixel_place(how: str, o: Aff, scale: Fraction, size: int, wanted: int) -> Place | None:
    p, q = scale.numerator, scale.denominator
    if how == "half_pixel" or (how == "pytorch_half_pixel" and wanted > 1):
        return o * (2 * q) + (q - p), 2 * p
    if how == "asymmetric":
        return o * q, p
    if how == "align_corners":
        ends = p * size - q  # (scale * size - 1) * q: the length before it is rounded down
        return (o * ((size - 1) * q), ends) if ends > 0 else (const(0), 1)
    if how == "tf_half_pixel_for_nn":  # of opset 11; tf2onnx writes it at any
        return o * (2 * q) + q, 2 * p
    return (const(0), 1) if how == "pytorch_half_pixel" else None


def _nearest(n: Node, places: dict[int, Place]) -> bool:
    """A view, where rounding never leaves the tensor."""
    dims = n.out_dims()
    ranges = ranges_of(dims)
    old = n.kind == "Upsample" or n.version < 11
    given = str(n.attr("nearest_mode", "round_prefer_floor"))
    index = here(dims)
    for a, (top, c) in places.items():
        grows = n.kind == "Upsample" or n.out().shape[a] >= n.shape(0)[a]
        rounding = given if not old else "floor" if grows else "ceil"  # Resize-10 does not say: as onnxruntime
        if rounding == "floor":
            index[a] = floordiv(top, c, ranges)
        elif rounding == "ceil":
            index[a] = floordiv(top + (c - 1), c, ranges)
        elif rounding == "round_prefer_ceil":
            index[a] = floordiv(top * 2 + c, 2 * c, ranges)
        else:
            index[a] = floordiv(top * 2 + (c - 1), 2 * c, ranges)
        lo, hi = span(index[a], ranges)
        if lo < 0 or hi >= n.shape(0)[a]:
            return False
    n.view(n.out(), n.ins[0], dims, index)
    return True


def _between(n: Node, places: dict[int, Place], along: Along) -> bool:
    """One axis after another: some reads, weighted; beyond the border the last cell counts."""
    src, shape = n.ins[0], list(n.shape(0))
    for k, (a, place) in enumerate(places.items()):
        size, shape[a] = shape[a], n.out().shape[a]
        last = k == len(places) - 1
        src = along(n, n.outs[0] if last else n.temp(f"axis{a}"), src, axes(shape), a, size, place)
    if not places:
        n.view(n.out(), src, n.out_dims(), n.out_dims())
    return True


def _linear_axis(n: Node, out: str, src: str, dims: tuple[Dim, ...], axis: int, size: int, place: Place) -> str:
    top, c = place
    ranges = ranges_of(dims)
    first = floordiv(top, c, ranges)
    wide = accumulator(n.dtype(0))
    reads = [n.read(src, [first + k if a == axis else dim(d.name) for a, d in enumerate(dims)], 0.0) for k in (0, 1)]
    weight = cast(Index(modulo(top, c, ranges)), wide) / float(c)

    def body(left: Expr, right: Expr) -> Expr:
        low = call("where", call("lt", Index(first), 0), right, left)
        high = call("where", call("ge", Index(first), size - 1), left, right)
        low, high = cast(low, wide), cast(high, wide)
        mixed = low * (1 - weight) + high * weight
        # a cell that is hit, and one between equal cells, is that cell: 0 * inf is none, and 1/3 + 2/3 need not be 1
        alone = call("eq", low, high) | call("eq", weight, 0)
        return cast(call("where", alone, low, mixed), n.dtype(0))

    return n.block(out, dims, reads, body)


def _cubic_axis(n: Node, out: str, src: str, dims: tuple[Dim, ...], axis: int, size: int, place: Place) -> str:
    """Four reads, weighted by Keys' kernel with parameter ``cubic_coeff_a`` (-0.75 by default)."""
    top, c = place
    ranges = ranges_of(dims)
    first, wide = floordiv(top, c, ranges), accumulator(n.dtype(0))

    def cell(e: Aff, fill: float | None = None) -> Operand:
        return n.read(src, [e if a == axis else dim(d.name) for a, d in enumerate(dims)], fill)

    reads = [*(cell(first + k, 0.0) for k in (-1, 0, 1, 2)), cell(const(0)), cell(const(size - 1))]
    t = cast(Index(modulo(top, c, ranges)), wide) / float(c)

    def body(*cells: Expr) -> Expr:
        parts: list[Expr] = []
        for k, weight in zip((-1, 0, 1, 2), _keys(t, float(n.attr("cubic_coeff_a", -0.75)), wide), strict=True):
            low = call("where", call("lt", Index(first + k), 0), cells[4], cells[k + 1])
            whole = call("where", call("ge", Index(first + k), size), cells[5], low)
            parts.append(cast(whole, wide) * weight)
        return cast(reduce(add, parts), n.dtype(0))

    return n.block(out, dims, reads, body)


def _keys(t: Expr, a: float, dtype: str) -> list[Expr]:
    """Weights of the cells at -1, 0, 1 and 2 around a place t beyond cell 0 (R. Keys, 1981)."""

    def poly(x: Expr, *coefficients: float) -> Expr:
        out: Expr = literal(coefficients[0], dtype)
        for c in coefficients[1:]:
            out = out * x + c
        return out

    back, near, far = 1 - t, t + 1, 2 - t
    outer, inner = (a, -5 * a, 8 * a, -4 * a), (a + 2, -(a + 3), 0.0, 1.0)
    return [poly(near, *outer), poly(t, *inner), poly(back, *inner), poly(far, *outer)]


def _sampled(n: Node) -> None:
    """Opaque; axes that the node does not name commute, or else batch and channels where it leaves them alone."""
    x, y = n.shape(0), n.out().shape
    named = n.attr("axes")
    if named is not None:
        free = [a for a in range(len(x)) if a not in {int(k) % len(x) for k in named}]
    else:
        crop = n.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
        free = [] if len(x) < 3 or x[:2] != y[:2] or crop else [0, 1]
        if free and n.has(3) and not _name_space_alone(n):
            free = []  # `sizes` names the whole batch: it would be wrong for a block of it, where scales stay right
    if not free:
        raise Declined
    dims = [Dim("bc"[a] if a < 2 else f"x{a}", x[a]) for a in free]
    emit_opaque(n, "interpolates", dims, {0: free}, {0: free})


def _name_space_alone(n: Node) -> bool:
    """Write the sizes of the spatial axes alone, which opset 18 allows; whether that could be done."""
    if n.version < 18:
        return False
    rank = len(n.shape(0))
    n.ins[3] = n.proto.input[3] = n.constant("sizes", np.array(n.out().shape[2:], np.int64), "i64")
    n.proto.attribute.append(helper.make_attribute("axes", list(range(2, rank))))
    return True
