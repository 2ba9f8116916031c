"""Families of windows and of places: pools, transposed convolutions, sampling where data say, scatters with a reduction."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.fuzz.generate.draw import Draw, Value
from tests.fuzz.generate.evaluate import Unfit, need

POOLS = ("MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
SAME = ("SAME_UPPER", "SAME_LOWER", "VALID")
DILATED = {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}  # the opset of which dilations are


def window(d: Draw, extents: tuple[int, ...], *, dilate: bool = True) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, strides, dilations, pads: each output has at least one row."""
    rows: list[tuple[int, int, int, int, int]] = []
    for n in extents:
        k = d.rng.choice([1, 2, 3, 3, 5])
        s = d.rng.choice([1, 1, 2, 3])
        r = d.rng.choice([1, 1, 2]) if dilate else 1
        lo, hi = (d.rng.randrange(k) if d.chance(0.7) else 0 for _ in range(2))
        if n + lo + hi < (k - 1) * r + 1:
            k, r, lo, hi = 1, 1, 0, 0
        rows.append((k, s, r, lo, hi))
    kernel, strides, dilations, begin, end = (list(column) for column in zip(*rows, strict=True))
    return kernel, strides, dilations, begin + end


def image(d: Draw, ranks: range, *, exact: bool = False, dtypes: tuple[str, ...] = ("float32",)) -> Value:
    """A value of batch, channels and at least one spatial axis.

    Raises:
        Unfit: one of them is empty.
    """
    x = d.pick(rank=ranks, exact=exact, dtypes=dtypes)
    need(0 not in x.shape, "an empty image")
    return x


def pool(d: Draw) -> None:
    """Max (with positions), average and Lp pools: padding, auto_pad, ceil mode, dilation; global ones; MaxUnpool."""
    op = d.rng.choice(POOLS)
    if op.startswith("Global"):
        x = image(d, range(3, 6))
        d.add(op, [x], exact=op == "GlobalMaxPool")
        return
    places = op == "MaxPool" and d.opset >= 8 and d.chance(0.4)
    few = ("int8", "uint8") if op == "MaxPool" and not places and d.opset >= 12 and d.chance(0.2) else ()
    x = image(d, range(3, 6), exact=places, dtypes=few or ("float32", "float32", "float64", "float16"))
    kernel, strides, dilations, pads = window(d, x.shape[2:], dilate=d.opset >= DILATED[op])
    pads = [min(p, k - 1) for p, k in zip(pads, kernel * 2, strict=True)]
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": strides}
    plain = set(dilations) == {1}
    if not plain:
        attrs["dilations"] = dilations
    if d.chance(0.25):  # (both evaluators pad as if there were no dilation)
        attrs["auto_pad"] = d.rng.choice(SAME if plain else SAME[2:])
        if any(r * (k - 1) >= n for n, k, r in zip(x.shape[2:], kernel, dilations, strict=True)):
            raise Unfit("a window larger than the image")
    else:
        attrs |= {"pads": pads, "ceil_mode": int(d.chance(0.25))}
    if op == "AveragePool":
        attrs["count_include_pad"] = d.rng.randrange(2)
    if op == "LpPool":
        attrs["p"] = d.rng.choice([1, 2, 3])
    if places:
        attrs["storage_order"] = d.rng.choice([0, 0, 1])
    y, *at = d.add(op, [x], 1 + places, exact=op == "MaxPool", **attrs)
    if at and not attrs["storage_order"] and d.chance(0.5):
        size = [d.ints(*x.shape)] if d.chance(0.5) else []
        d.add("MaxUnpool", [y, at[0], *size], exact=True, kernel_shape=kernel, strides=strides, pads=attrs.get("pads"))


def conv_transpose(d: Draw) -> None:
    """Transposed convolutions of one to three dimensions: bias, groups, strides, dilations, output_padding, uneven pads,
    auto_pad, output_shape."""
    x = image(d, range(3, 6))
    c, rank = x.shape[1], x.rank - 2
    groups = d.rng.choice([g for g in range(1, c + 1) if c % g == 0])
    kernel, strides, dilations = ([d.rng.choice(s) for _ in range(rank)] for s in ([1, 2, 3, 4], [1, 2, 3], [1, 1, 2]))
    w = d.fresh((c, d.rng.choice([1, 2, 3]), *kernel))
    bias = [d.fresh((groups * w.shape[1],))] if d.chance(0.5) else []
    extra = [d.rng.randrange(s) for s in strides] if d.chance(0.6) else None
    attrs: dict[str, Any] = {"strides": strides, "group": groups, "dilations": dilations, "output_padding": extra}
    kind, sides = d.rng.randrange(4), list(zip(x.shape[2:], strides, kernel, dilations, strict=True))
    if kind == 0:
        attrs["auto_pad"] = d.rng.choice(SAME)
    elif kind == 1:
        full = [s * (n - 1) + r * (k - 1) + 1 for n, s, k, r in sides]
        attrs["output_shape"] = [max(1, n - d.rng.randrange(4)) for n in full]
        attrs["auto_pad"] = d.rng.choice([None, "SAME_UPPER", "SAME_LOWER"])
    else:
        attrs["pads"] = [d.rng.randrange(k) for k in kernel * 2]
    d.add("ConvTranspose", [x, w, *bias], **attrs)


def col2im(d: Draw) -> None:
    """Blocks of one to three dimensions added up where they overlap."""
    rank = d.rng.choice([1, 2, 2, 3])
    size = tuple(d.rng.randint(2, 6 if rank < 3 else 3) for _ in range(rank))
    block, strides, dilations, pads = window(d, size)
    block = [min(k, 2) for k in block] if rank > 1 else block
    pads = [min(p, k - 1) for p, k in zip(pads, block * 2, strict=True)]
    sides = zip(size, block, strides, dilations, pads[:rank], pads[rank:], strict=True)
    counts = [(n + lo + hi - r * (k - 1) - 1) // s + 1 for n, k, s, r, lo, hi in sides]
    need(min(counts) >= 1, "no block fits")
    shape = (d.rng.choice([1, 2, 3]), d.rng.choice([1, 2, 3]) * math.prod(block), math.prod(counts))
    x = d.mate(d.fresh((1,)), shape)
    d.add("Col2Im", [x, d.ints(*size), d.ints(*block)], strides=strides, dilations=dilations, pads=pads)


def crop(d: Draw) -> None:
    """CenterCropPad, of some axes or all: smaller, larger, by odd amounts."""
    x = d.pick(rank=range(1, 5), floating=d.chance(0.8))
    axes = d.rng.sample(range(x.rank), d.rng.randint(1, x.rank))
    named = d.chance(0.7)
    size = [max(1, n + d.rng.randint(-3, 3)) for n in ((x.shape[a] for a in axes) if named else x.shape)]
    given = [a - x.rank if d.chance(0.3) else a for a in axes] if named else None
    d.add("CenterCropPad", [x, d.ints(*size)], exact=True, axes=given)


def grid_sample(d: Draw) -> None:
    """Samples of images and volumes in every mode; AffineGrid, alone or to sample by."""
    x = image(d, range(4, 6))
    spatial, cubic = x.rank - 2, x.rank == 4
    if d.opset >= 20 and d.chance(0.5):
        theta = d.fresh((x.shape[0], spatial, spatial + 1))
        corners = d.rng.randrange(2)  # where the only cell of an axis then lies: torch says 0, onnxruntime 1, the reference -1
        size = d.ints(x.shape[0], x.shape[1], *(d.rng.randint(1 + corners, 4) for _ in range(spatial)))
        (grid,) = d.add("AffineGrid", [theta, size], align_corners=corners)
    else:
        grid = d.fresh((x.shape[0], *(d.rng.randint(1, 4) for _ in range(spatial)), spatial))
    modes = ["linear", "linear"] if d.opset >= 20 else ["bilinear", "bilinear"]
    modes += ["cubic" if d.opset >= 20 else "bicubic"] if cubic else []
    modes += ["nearest"] if grid.exact else []  # (else a place may round to another cell)
    d.add(
        "GridSample", [x, grid], mode=d.rng.choice(modes), align_corners=d.rng.randrange(2),
        padding_mode=d.rng.choice([None, "zeros", "border", "reflection"]),
    )  # fmt: skip


def roi_align(d: Draw) -> None:
    """Regions of any of the images, some beyond the border; average and maximum."""
    x = image(d, range(4, 5))
    count, (h, w) = d.rng.randint(1, 4), x.shape[2:]
    corners = np.abs(d.data((count, 2, 2)))  # the left upper one, and from there the other
    regions = np.cumsum(corners, axis=1).reshape(count, 4) * np.float32(max(h, w) / 3)
    images = d.data((count,), "int64", lo=0, hi=x.shape[0] - 1)
    ins = [x, *(d.weight(a) if d.chance(0.5) else d.input(a) for a in (regions.astype(np.float32), images))]
    mode = d.rng.choice([None, "half_pixel", "output_half_pixel"]) if d.opset >= 16 else None
    d.add(
        "RoiAlign", ins, mode=d.rng.choice([None, "avg", "max"]), coordinate_transformation_mode=mode,
        output_height=d.rng.randint(1, 3), output_width=d.rng.randint(1, 3), sampling_ratio=d.rng.choice([0, 1, 2]),
        spatial_scale=d.rng.choice([0.5, 1.0]),
    )  # fmt: skip


def deform_conv(d: Draw) -> None:
    """Convolutions at offsets that data say: groups, groups of offsets, bias, mask."""
    x = image(d, range(4, 5))
    (b, c), size = x.shape[:2], x.shape[2:]
    groups, own = (d.rng.choice([g for g in range(1, c + 1) if c % g == 0]) for _ in range(2))
    kernel, strides, dilations, pads = window(d, size)
    sides = zip(size, kernel, strides, dilations, pads[:2], pads[2:], strict=True)
    places = [(n + lo + hi - r * (k - 1) - 1) // s + 1 for n, k, s, r, lo, hi in sides]
    out, taps = groups * d.rng.choice([1, 2]), kernel[0] * kernel[1]
    ins: list[Value | None] = [x, d.fresh((out, c // groups, *kernel)), d.fresh((b, own * taps * 2, *places))]
    ins += [d.fresh((out,)) if d.chance(0.5) else None]
    ins += [d.fresh((b, own * taps, *places))] if d.chance(0.5) else []
    attrs: dict[str, Any] = {
        "strides": strides,
        "pads": pads,
        "dilations": dilations,
        "kernel_shape": d.rng.choice([None, kernel]),
    }
    d.add("DeformConv", ins if ins[-1] else ins[:-1], group=groups, offset_group=own, **attrs)


def scatter_reduced(d: Draw) -> None:
    """ScatterElements and ScatterND to places that repeat, or to some only: add, mul, max, min."""
    x = d.pick(rank=range(1, 4), dtypes=("float32", "float32", "int64", "int32", "float64"))
    need(x.array.size, "nothing to scatter into")
    how = d.rng.choice(["add", "mul", *(["max", "min"] if d.opset >= 18 else [])])
    exact = how in ("max", "min") or not x.floating
    if d.chance(0.5):
        at = d.axis(x)
        shape = [d.rng.randint(1, n) if d.chance(0.4) else n for n in x.shape]
        shape[at] = d.rng.randint(1, x.shape[at] + 2)
        index = d.fresh(shape, d.rng.choice(["int64", "int32"]), lo=-x.shape[at], hi=x.shape[at] - 1)
        d.add("ScatterElements", [x, index, d.mate(x, shape)], exact=exact, axis=at, reduction=how)
        return
    last = d.rng.randint(1, x.rank)
    rows = d.shape(d.rng.randint(0, 2))
    index = np.stack([d.data(rows, "int64", lo=-s, hi=s - 1) for s in x.shape[:last]], -1)
    update = d.mate(x, (*rows, *x.shape[last:]))
    d.add("ScatterND", [x, d.weight(index) if d.chance(0.5) else d.input(index), update], exact=exact, reduction=how)


FAMILIES = {f.__name__: f for f in (pool, conv_transpose, col2im, crop, grid_sample, roi_align, deform_conv, scatter_reduced)}
