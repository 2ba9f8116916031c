"""What an operation is, said of its text and its projections: each answer is held to what it promises."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tapestry.ir.expr import Arg, Const, Expr, call, cast
from tapestry.ir.graph import Block, Graph
from tapestry.ir.recognition.attention_roles import attention, weighed
from tapestry.ir.recognition.contraction import folded_roles, kept, narrow
from tapestry.ir.recognition.convolution import convolution
from tapestry.ir.recognition.input_axes import input_axes
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import numpy_dtype
from tapestry.verify.interp import value

SHIFTS = (None, -129, -128, -1, 0, 127, 128, 255, 256)


def only(text: str) -> Block:
    """The one operation of a graph."""
    (op,) = parse(f"graph g {text}").ops
    assert isinstance(op, Block)
    return op


def less(dtype: str, shift: int | None) -> Expr:
    """An integer of 8 bits, less a zero point, as a float."""
    wide = cast(Arg(0, dtype), "i32")
    return cast(wide if shift is None else call("sub", wide, Const(shift, "i32")), "f32")


@pytest.mark.parametrize(("dtype", "shift"), [*product(("i8", "u8"), SHIFTS)])
def test_a_narrow_factor_is_an_integer_less_a_zero_point_of_its_type(dtype, shift):
    """The parts are the whole again, the bound holds for every integer, and without a zero point one reaches it."""
    every = np.arange(np.iinfo(numpy_dtype(dtype)).min, np.iinfo(numpy_dtype(dtype)).max + 1)
    found = narrow(less(dtype, shift))
    assert (found is None) == (shift is not None and shift not in every)
    if found is not None:
        values = value(less(dtype, shift), [every.astype(numpy_dtype(dtype))], [], {}, False)
        zero = 0 if found.shift is None else int(value(found.shift, [], [], {}, False))
        np.testing.assert_array_equal(values, every - zero)
        assert found.value == Arg(0, dtype) and abs(values).max() <= found.largest
        assert shift is not None or abs(values).max() == found.largest


def test_a_zero_point_that_is_read_is_one_of_8_bits_without_its_own():
    zero = cast(Arg(1, "u8"), "i32")
    plain, twice = (call("sub", cast(Arg(0, "u8"), "i32"), z) for z in (zero, call("sub", zero, Const(3, "i32"))))
    found = narrow(plain)
    assert found is not None and (found.value, found.shift) == (Arg(0, "u8"), zero)
    assert narrow(twice) is None and narrow(call("sub", plain, zero)) is None
    assert narrow(call("add", cast(Arg(0, "u8"), "i32"), zero)) is None
    assert narrow(Arg(0, "f32")) is None and narrow(cast(Arg(0, "u8"), "f16")) is None


ROWS = """input x: f32[6, 8] input w: f32[8, {n}] y: f32[6, {m}] = op [i: 6, j: {m} | n: {n} sums2.sum]
  reads x[i, k], w[k, n]
  let [k: 8 sum] x * w
  body let0, let0 * let0, where(eq(index({left}), index({right})), let0, {zero}) then acc2 / acc1
output y"""


@pytest.mark.parametrize(
    ("kinds", "first"),
    [
        ({}, 0),
        ({"m": 4, "right": "j + 3"}, 3),  # columns 3 to 6 of 7
        ({"m": 4, "right": "j + 4"}, None),  # one too many
        ({"right": "2*j"}, None),
        ({"left": "n + 1"}, None),
        ({"zero": "1.0"}, None),
    ],
)
def test_a_row_keeps_the_element_of_its_own_column(kinds, first):
    op = only(ROWS.format(**{"n": 7, "m": 7, "left": "n", "right": "j", "zero": "0.0"} | kinds))
    found = kept(op.monoid, op.dims, op.reduce, op.body)
    assert (found and found.first) == first
    if found is not None:
        assert (found.over.name, found.column.name, found.value) == ("n", "j", op.body[0])
        for j in range(found.column.size):
            assert 0 <= found.first + j < found.over.size


def test_a_tile_has_whole_rows_only_where_they_are_short():
    for n, short in ((100, True), (256, True), (257, False)):
        op = only(ROWS.format(n=n, m=n, left="n", right="j", zero="0.0"))
        roles = folded_roles(op)
        assert (roles is not None) == short
        if roles is not None:
            assert [d.name for d in roles.rows] == ["i"] and [d.name for d in roles.columns] == ["n"] and roles.folds


PLAIN = """input x: f32[2, 3, 8] input w: f32[4, 3, 3] y: f32[2, 4, {size}] = op [b: 2, f: 4, o: {size} | c: 3 sum, r: 3 sum]
  reads x[b, c, {index}], w[{weight}] body x * w output y"""


def test_a_convolution_has_a_weight_of_plain_axes():
    """A weight read backwards or at one place is none: kernels of convolutions read it whole and forwards."""
    for stride, size in ((1, 6), (2, 3)):
        found = convolution(only(PLAIN.format(size=size, index=f"{stride}*o + r", weight="f, c, r")))
        assert found is not None and (found.batch, found.feature, found.channel) == ("b", "f", "c")
        ((window),) = found.windows
        assert (window.out, window.window, window.stride, window.dilation, window.offset) == ("o", "r", stride, 1, 0)
    for weight in ("f, c, -r + 2", "f, c, 2", "-f + 3, c, r"):
        assert convolution(only(PLAIN.format(size=6, index="o + r", weight=weight))) is None


def test_an_axis_of_one_cell_that_is_read_at_its_beginning_is_no_window():
    text = """input x: f32[2, 3, 8] input w: f32[4, 3, 2] y: f32[2, 4, 8] = op [b: 2, f: 4, o: 8 | c: 3 sum]
      reads x[b, c, o], w[f, c, {at}] body x * w output y"""
    found = convolution(only(text.format(at="0")))
    assert found is not None and [(w.out, w.window, w.offset) for w in found.windows] == [("o", "", 0)]
    assert convolution(only(text.format(at="1"))) is None


ATTENTION = """input q: f32[2, 5, 8] input k: f32[2, 7, 8] input v: f32[2, 7, 4] y: f32[2, 5, 4] = op [h: 2, i: 5, e: 4 | n: 7 softsum]
  reads q[h, i, m], k[h, n, m], v[h, n, e] let [m: 8 sum] q * k body let0, 1.0, v then acc2 / acc1 output y"""
WEIGHED = """input s: f32[2, 5, 7] input v: f32[2, 7, 4] y: f32[2, 5, 4] = op [h: 2, i: 5, e: 4 | n: 7 softsum]
  reads s[h, i, n], v[h, n, e] body s, 1.0, v then acc2 / acc1 output y"""


def test_dimensions_of_weighed_values_are_told_by_who_varies_along_them():
    """Rows are of the scores alone, columns of the values alone, and everything else is a batch."""
    for found in (attention(only(ATTENTION)), weighed(only(WEIGHED))):
        assert found is not None and found.key.name == "n"
        assert [[d.name for d in x] for x in (found.batch, found.rows, found.columns)] == [["h"], ["i"], ["e"]]
    assert weighed(only(ATTENTION)) is None and attention(only(WEIGHED)) is None
    assert weighed(only(WEIGHED.replace("s, 1.0, v", "s, 2.0, v"))) is None  # its weights do not count


def along(graph: Graph) -> list[dict[str, list[tuple[str, int]]]]:
    return [{d: sorted(axes) for d, axes in of.items()} for of in input_axes(graph)]


def test_dimensions_run_along_the_inputs_axes_whatever_they_are_called():
    """A transposition, a flattening and a product with a weight: axes are followed, and a weight has none."""
    graph = parse("""graph g input x: f32[2, 3, 4] weight w: f32[4, 5] at "w.bin" 0 80 "w" ""
t: f32[3, 2, 4] = op [p: 3, q: 2, r: 4]
  reads x[q, p, r] body x
f: f32[6, 4] = op [p: 6, q: 4]
  reads t[floor((p)/2), ((p) mod 2), q] body t
y: f32[6, 5] = op [i: 6, j: 5 | k: 4 sum]
  reads f[i, k], w[k, j] body f * w
output y""")
    x = [("x", k) for k in range(3)]
    moved, flat, last = along(graph)
    assert moved == {"q": [x[0]], "p": [x[1]], "r": [x[2]]}
    assert flat == {"p": [x[0], x[1]], "q": [x[2]]}
    assert last["i"] == [x[0], x[1]] and last["k"] == [x[2]] and not last.get("j")
