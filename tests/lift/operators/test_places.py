"""Where a Resize samples, against fractions; what it makes of infinities; statistics that a normalisation gives as well."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from onnx import helper

from tapestry.ir.graph import Block
from tests.support.lifting import build, evaluate, lift_model

SIZES = [(4, 2), (2, 4), (3, 5), (5, 3), (4, 6), (6, 4), (4, 3), (1, 3), (5, 1), (8, 2), (3, 3), (6, 9)]
WHERE = {
    "half_pixel": lambda o, size, wanted: (o + Fraction(1, 2)) * Fraction(size, wanted) - Fraction(1, 2),
    "asymmetric": lambda o, size, wanted: o * Fraction(size, wanted),
    "align_corners": lambda o, size, wanted: o * Fraction(size - 1, wanted - 1) if wanted > 1 else Fraction(0),
    "pytorch_half_pixel": lambda o, size, wanted: WHERE["half_pixel"](o, size, wanted) if wanted > 1 else Fraction(0),
}
ROUND = {
    "round_prefer_floor": lambda x: math.ceil(x - Fraction(1, 2)),
    "round_prefer_ceil": lambda x: math.floor(x + Fraction(1, 2)),
    "floor": math.floor,
    "ceil": math.ceil,
}


def resized(tmp_path, rows: dict[int, np.ndarray], sizes, ways, **attributes) -> dict[tuple, np.ndarray]:
    """Every (size, wanted) under every way, by one model of many nodes."""
    nodes, consts, names = [], {}, {}
    for k, ((size, wanted), way) in enumerate(itertools.product(sizes, ways)):
        consts[f"s{k}"] = np.array([rows[size].size // size, 1, wanted])
        given = {"coordinate_transformation_mode": way[0], **({"nearest_mode": way[1]} if len(way) > 1 else {}), **attributes}
        nodes.append(helper.make_node("Resize", [f"x{size}", "", "", f"s{k}"], [f"y{k}"], **given))
        names[size, wanted, *way] = f"y{k}"
    feeds = {f"x{n}": a.reshape(-1, 1, n) for n, a in rows.items()}
    lifted = lift_model(build(nodes, feeds, list(names.values()), consts, opset=19), tmp_path)
    assert sum(isinstance(op, Block) for op in lifted.graph.ops) >= len(nodes) // 2
    with np.errstate(all="ignore"):
        found = evaluate(lifted, feeds)
    return {key: found[name][:, 0] for key, name in names.items()}


def test_the_nearest_cell_is_the_one_that_fractions_say(tmp_path):
    rows = {n: np.arange(n, dtype=np.float32) + 1 for n in {s for s, _ in SIZES}}
    found = resized(tmp_path, rows, SIZES, list(itertools.product(WHERE, ROUND)), mode="nearest")
    for (size, wanted, how, rounding), y in found.items():
        places = [ROUND[rounding](WHERE[how](o, size, wanted)) for o in range(wanted)]
        assert y[0].tolist() == [min(max(p, 0), size - 1) + 1 for p in places], (size, wanted, how, rounding)


CELLS = [(math.inf,) * 2, (1.0,) * 2, (0.1,) * 2, (-math.inf, 2.0), (3.0, math.nan), (math.inf, -math.inf)]


def test_between_equal_cells_linear_is_that_cell_and_a_cell_that_is_hit_is_itself(tmp_path):
    sizes = SIZES[:8]
    rows = {n: np.stack([np.resize(np.array(c, np.float32), n) for c in CELLS]) for n in {s for s, _ in sizes}}
    for (size, wanted, how), y in resized(tmp_path, rows, sizes, [(h,) for h in WHERE], mode="linear").items():
        for (r, o), got in np.ndenumerate(y):
            x = WHERE[how](o, size, wanted)
            low, high = (float(rows[size][r, min(max(math.floor(x) + k, 0), size - 1)]) for k in (0, 1))
            part = float(x - math.floor(x))
            want = low if low == high or part == 0 else low * (1 - part) + high * part
            assert (np.isnan(got) and np.isnan(want)) or got == pytest.approx(want, rel=1e-6), (size, wanted, how, r, o)
            assert low != high or got == np.float32(low)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("axis", "wants"), [(0, ("m", "r")), (1, ("", "r")), (-1, ("m", ""))])
def test_mean_and_deviation_of_a_layer_norm_are_outputs_of_their_own(dtype, axis, wants, tmp_path):
    rng = np.random.default_rng(3)
    x, w, b = (rng.standard_normal(s).astype(dtype) for s in ((3, 4, 5), (3, 4, 5)[axis % 3 :], (3, 4, 5)[axis % 3 :]))
    node = helper.make_node("LayerNormalization", ["x", "w", "b"], ["y", *wants], axis=axis, epsilon=0.1)
    outs = ["y", *filter(None, wants)]
    lifted = lift_model(build([node], {"x": x}, outs, {"w": w, "b": b}), tmp_path)
    found = evaluate(lifted, {"x": x})
    wide, axes = x.astype(np.float64), tuple(range(axis % 3, 3))
    mean, rstd = wide.mean(axes, keepdims=True), 1 / np.sqrt(wide.var(axes, keepdims=True) + 0.1)
    loose = 2e-2 if dtype == np.float16 else 1e-5
    assert np.allclose(found["y"], (wide - mean) * rstd * w + b, atol=loose) and found["y"].dtype == dtype
    for name, want in (("m", mean), ("r", rstd)):
        if name in wants:
            assert found[name].shape == want.shape and np.allclose(found[name], want, atol=loose)
