"""Tile patterns, tensor dictionaries and instance maps: every example of the slides, and properties."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto as T

from tapestry.errors import TapestryError
from tapestry.interop import instance_map, tile_patterns
from tapestry.interop.tile_patterns import Tiling, combine, create, evaluate, exact, naive, parse
from tests.support.faults.sharding_faults import N
from tests.support.instance_maps import MAPS
from tests.support.small_models import f32, net

# the slides' table: tensor, pattern and assignment, then per instance start, stop, size
TABLE = [
    (
        (1, 4),
        "{1,4:0,1,2,3}",
        {0: ((0, 0), (1, 1), (1, 1)), 1: ((0, 1), (1, 2), (1, 1)), 2: ((0, 2), (1, 3), (1, 1)), 3: ((0, 3), (1, 4), (1, 1))},
    ),
    (
        (1, 4),
        "{1,4}",
        {0: ((0, 0), (1, 1), (1, 1)), 1: ((0, 1), (1, 2), (1, 1)), 2: ((0, 2), (1, 3), (1, 1)), 3: ((0, 3), (1, 4), (1, 1))},
    ),
    (
        (7, 4),
        "{5,1:3,2,4,1,0}",
        {
            0: ((5, 0), (7, 4), (2, 4)),
            1: ((4, 0), (5, 4), (1, 4)),
            2: ((1, 0), (2, 4), (1, 4)),
            3: ((0, 0), (1, 4), (1, 4)),
            4: ((2, 0), (4, 4), (2, 4)),
        },
    ),
    (
        (4, 4, 2, 2),
        "{1,3,1,1:2,0,3}",
        {
            0: ((0, 1, 0, 0), (4, 2, 2, 2), (4, 1, 2, 2)),
            2: ((0, 0, 0, 0), (4, 1, 2, 2), (4, 1, 2, 2)),
            3: ((0, 2, 0, 0), (4, 4, 2, 2), (4, 2, 2, 2)),
        },
    ),
    ((2, 4, 8), "{1:3,2}", {2: ((0, 0, 0), (2, 4, 8), (2, 4, 8)), 3: ((0, 0, 0), (2, 4, 8), (2, 4, 8))}),
]


@pytest.mark.parametrize("slides", [False, True])
@pytest.mark.parametrize(("shape", "text", "expected"), TABLE, ids=[t for _, t, _ in TABLE])
def test_the_slides_table(shape, text, expected, slides):
    found = parse(text).tiles(shape, slides=slides)
    rows = {i: (tuple(lo for lo, _ in b), tuple(hi for _, hi in b), tuple(hi - lo for lo, hi in b)) for i, b in found.items()}
    assert rows == expected


@pytest.mark.parametrize("text", ["{1:0}", "{1:0,1}", "{2,1:0,1}", "{3,2,1:5,4,3,2,1,0}", "{2:0,-1}", "{1,4}"])
def test_text_survives(text):
    assert str(parse(text)) == text
    assert parse(text.replace(",", " , ").replace("{", " { ")) == parse(text)


@pytest.mark.parametrize(
    "text", ["", "{}", "{2:0}", "{2:0,1,2}", "{0:0}", "{2:0,0}", "{2:0,-2}", "{a:1}", "{2,1:0,1", "2:0,1", "{--1}"]
)
def test_wrong_texts_are_refused(text):
    with pytest.raises(TapestryError):
        parse(text)


def test_the_slides_formula_names_a_tile_twice():
    """{2,2} on 4 instances: j mod 2 on both axes gives two of the four tiles; row-major counting gives all."""
    t = Tiling((2, 2))
    assert len({t.slide_tile(j, (4, 4)) for j in range(4)}) == 2
    assert len({t.tile(j, (4, 4)) for j in range(4)}) == 4


@st.composite
def tilings(draw, rank: int, instances: int = 12):
    if draw(st.booleans()):
        return Tiling((1,), tuple(draw(st.permutations(range(instances)))[: draw(st.integers(1, 4))]))
    pattern = tuple(draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, rank))))
    n = int(np.prod(pattern))
    return Tiling(pattern, tuple(draw(st.permutations(range(max(n, instances))))[:n]))


@given(st.data())
def test_tiles_partition_and_dictionaries_keep_every_value(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=3)))
    a = np.arange(np.prod(shape)).reshape(shape)
    t = data.draw(tilings(len(shape)))
    d = create(a, t)
    assert np.array_equal(d.whole(), a)
    if t.count > 1:
        assert sum(x.size for x in d.extract().values()) == a.size
    cell = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    found = d.locate(cell)
    assert found and all(d[i][inner] == a[cell] for i, inner in found)


@given(st.data())
def test_both_evaluations_give_the_same_and_ours_moves_no_more(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3)))
    a = np.arange(np.prod(shape)).reshape(shape)
    before, after = data.draw(tilings(len(shape))), data.draw(tilings(len(shape)))
    d, wanted = create(a, before), create(a, after)
    slow, fast = naive(before, after, shape), exact(before, after, shape)
    for change in (slow, fast):
        found = evaluate(d, after, change)
        assert found.data.keys() == wanted.data.keys()
        assert all(np.array_equal(found[i], wanted[i]) for i in wanted.data)
    assert fast.cells() <= slow.cells()


@pytest.mark.parametrize(
    ("before", "after", "kind", "naive_cells", "exact_cells"),
    [
        ("{1:0}", "{2,1:0,1}", "broadcast + tile", 64, 32),
        ("{4,1}", "{1:0,1,2,3}", "all-gather", 4 * 48, 4 * 48),
        ("{4,1}", "{1,4}", "all-gather + tile", 4 * 48, 4 * 12),
        ("{4,1}", "{4,1}", "none", 0, 0),
        ("{2,1:0,1}", "{4,1:0,1,2,3}", "all-gather + tile", 2 * 32 + 2 * 64, 16 + 16 + 16),
    ],
)
def test_what_each_evaluation_moves(before, after, kind, naive_cells, exact_cells):
    slow, fast = naive(parse(before), parse(after), (8, 8)), exact(parse(before), parse(after), (8, 8))
    assert (slow.kind, slow.cells(), fast.cells()) == (kind, naive_cells, exact_cells)


def test_suppressed_tiles_and_combination():
    a = np.arange(12.0).reshape(4, 3)
    top, bottom = create(a, parse("{2,1:0,-1}")), create(a, parse("{2,1:-1,1}"))
    with pytest.raises(TapestryError, match="suppressed"):
        top.whole()
    with pytest.raises(TapestryError, match="no instance holds"):
        exact(top.tiling, parse("{1:5}"), a.shape)
    both = combine(top, bottom)
    assert str(both.tiling) == "{2,1:0,1}" and np.array_equal(both.whole(), a)
    with pytest.raises(TapestryError, match="two of the dictionaries"):
        combine(top, top)
    copies = combine(create(a), create(a, parse("{1:3}")))
    assert str(copies.tiling) == "{1:0,3}"
    with pytest.raises(TapestryError, match="holds no tile"):
        both[7]


def test_leading_ones_may_be_left_out():
    assert parse("{2}").tiles((3, 4)) == parse("{1,2}").tiles((3, 4))
    with pytest.raises(TapestryError, match="rank"):
        parse("{2,1,1}").tiles((3, 4))


def test_carried_in_a_file(tmp_path):
    m = net(
        [N("MatMul", ["x", "w"], ["h"], "mm"), N("Relu", ["h"], ["y"], "act")],
        {"x": (T.FLOAT, [4, 6])},
        {"y": T.FLOAT},
        {"w": f32(6, 8)},
    )
    wanted = {"x": parse("{2,1:0,1}"), "w": parse("{1:0,1}"), "h": parse("{2:1,0}")}
    for name, t in wanted.items():
        tile_patterns.attach(m, name, t)
    onnx.save(m, tmp_path / "m.onnx")
    again = onnx.load(tmp_path / "m.onnx")
    assert tile_patterns.read(again) == wanted
    tile_patterns.attach(again, "h", None)
    tile_patterns.attach(again, "w", None)
    assert tile_patterns.read(again) == {"x": wanted["x"]}


# instance maps


@pytest.mark.parametrize(("text", "kind", "detail"), MAPS)
def test_topologies_of_the_slides(text, kind, detail):
    m = instance_map.parse(text)
    assert instance_map.parse(str(m)) == m
    assert (kind, detail) in [(s.kind, s.detail) for s in instance_map.recognise(m)]


def test_one_way_and_two_way_rings():
    one, two = (instance_map.recognise(instance_map.parse(t))[0] for t in (MAPS[1][0], MAPS[9][0]))
    assert (one.two_way, two.two_way) == (False, True)


def test_slips_of_the_slides_are_noted():
    (found,) = instance_map.recognise(instance_map.parse(MAPS[7][0]))
    assert found.notes == ("0 sends to 2 and not the other way round; taken as two-way",)
    (found,) = instance_map.recognise(instance_map.parse(MAPS[8][0]))
    assert found.notes[0] == "18 rows are left out" and "row 0 should be [1, 2, 3, 6, 9, 18]" in found.notes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{2}",
        "{2, [[1]]}",
        "{2, [[1],[2]]}",
        "{0, []}",
        "{2, [[1],[0],[1]]}",
        "{2, [[1],[x]]}",
        "{2, [[1],[0]] 7}",
        "{2, [[1],[??]]}",
    ],
)
def test_wrong_maps_are_refused(text):
    with pytest.raises(TapestryError):
        instance_map.parse(text)
