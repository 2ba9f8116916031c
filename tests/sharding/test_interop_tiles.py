"""Tile patterns, tensor dictionaries and instance maps: every example of the slides, their slips, and properties."""

import json
import math

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto as T

import tapestry
from tapestry import TensorDictionary, cli
from tapestry.errors import PlanError, TapestryError
from tapestry.interop import instance_map, tile_metadata
from tapestry.interop.tile_changes import exact, naive
from tapestry.interop.tile_patterns import Tiling, parse, slide_slips, slide_tile
from tapestry.sharding.check_sharding import check_file
from tapestry.sharding.tiled_evaluation import evaluated
from tapestry.tools.exports import formats
from tests.support.faults.sharding_faults import N
from tests.support.instance_maps import MAPS
from tests.support.small_models import f32, net

# the slides' table: tensor, pattern and assignment, then per instance start, stop, size
TABLE = [
    (
        (1, 4),
        "{1,4: 0,1,2,3}",
        {0: ((0, 0), (1, 1), (1, 1)), 1: ((0, 1), (1, 2), (1, 1)), 2: ((0, 2), (1, 3), (1, 1)), 3: ((0, 3), (1, 4), (1, 1))},
    ),
    (
        (1, 4),
        "{1,4}",
        {0: ((0, 0), (1, 1), (1, 1)), 1: ((0, 1), (1, 2), (1, 1)), 2: ((0, 2), (1, 3), (1, 1)), 3: ((0, 3), (1, 4), (1, 1))},
    ),
    (
        (7, 4),
        "{5,1: 3,2,4,1,0}",
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
        "{1,3,1,1: 2,0,3}",
        {
            0: ((0, 1, 0, 0), (4, 2, 2, 2), (4, 1, 2, 2)),
            2: ((0, 0, 0, 0), (4, 1, 2, 2), (4, 1, 2, 2)),
            3: ((0, 2, 0, 0), (4, 4, 2, 2), (4, 2, 2, 2)),
        },
    ),
    ((2, 4, 8), "{1: 3,2}", {2: ((0, 0, 0), (2, 4, 8), (2, 4, 8)), 3: ((0, 0, 0), (2, 4, 8), (2, 4, 8))}),
]


@pytest.mark.parametrize(("shape", "text", "expected"), TABLE, ids=[t for _, t, _ in TABLE])
def test_the_slides_table(shape, text, expected, capsys):
    pattern, _, assignment = text.strip("{}").partition(": ")
    given = ["--assign", assignment] if assignment else []
    assert cli.main(["tiles", "--shape", "x".join(map(str, shape)), "--pattern", pattern, *given, "--json"]) == 0
    rows = {
        r["instance"]: tuple(tuple(r[k]) for k in ("start", "stop", "size"))
        for r in json.loads(capsys.readouterr().out)["tiles"]
    }
    assert rows == expected


@pytest.mark.parametrize(("shape", "text", "expected"), TABLE, ids=[t for _, t, _ in TABLE])
def test_the_slides_formulas_give_their_table_only_when_rounded_after_the_division(shape, text, expected):
    """Written as they are they end tile 0 of the third example at row 1.4; each floor taken last gives the table."""
    t = parse(text)
    found = {i: slide_tile(t, j, shape) for j, i in t.entries}
    rounded = {i: tuple(zip(*(map(math.floor, e) for e in ends), strict=True)) for i, ends in found.items()}
    assert rounded == {i: (start, stop) for i, (start, stop, _) in expected.items()}
    whole = all(x.denominator == 1 for ends in found.values() for e in ends for x in e)
    assert whole == (shape not in ((7, 4), (4, 4, 2, 2)))
    assert bool(slide_slips(t, shape)) == (not whole)


def test_the_slides_formula_names_a_tile_twice():
    """{2,2} on 4 instances: j mod 2 on both axes gives two of the four tiles; row-major counting gives all."""
    t = Tiling((2, 2))
    assert len({slide_tile(t, j, (4, 4)) for j in range(4)}) == 2
    assert len({t.tile(j, (4, 4)) for j in range(4)}) == 4
    assert any("same cells" in s for s in slide_slips(t, (4, 4)))


def test_omitted_leading_ones_are_repeated_by_the_slides_formula():
    """{2} of a matrix cuts its columns, as their text says; ``pattern[i % rank(pattern)]`` would cut the rows as well."""
    t = Tiling((2,))
    assert t.tiles((4, 6)) == parse("{1,2}").tiles((4, 6)) == {0: ((0, 4), (0, 3)), 1: ((0, 4), (3, 6))}
    assert slide_tile(t, 1, (4, 6)) == ((2, 4), (3, 6))
    assert any("leading ones" in s for s in slide_slips(t, (4, 6)))
    with pytest.raises(TapestryError, match="rank"):
        parse("{2,1,1}").tiles((3, 4))


@pytest.mark.parametrize("text", ["{1: 0}", "{1: 0,1}", "{2,1: 0,1}", "{3,2,1: 5,4,3,2,1,0}", "{2: 0,-1}", "{1,4}"])
def test_text_survives(text):
    assert str(parse(text)) == text
    assert (
        parse(text.replace(": ", ":"))
        == parse(text.replace(",", " , ").replace("{", " { "))
        == parse(text.strip("{}"))
        == parse(text)
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "{2:0}",
        "{2:0,1,2}",
        "{0:0}",
        "{2:0,0}",
        "{2:0,-2}",
        "{a:1}",
        "{2,1:0,1",
        "2:0,1}",
        "{--1}",
        "{2:-1,-1}",
        "{99999999}",
        "{2: 0,99999999999999}",
    ],
)
def test_wrong_texts_are_refused(text):
    with pytest.raises(TapestryError):
        parse(text)


def test_the_command_draws_and_counts(tmp_path, capsys):
    given = [
        "tiles",
        "--shape",
        "7x4",
        "--pattern",
        "5,1",
        "--assign",
        "3,2,4,1,0",
        "--to",
        "{1: 0,1}",
        "--svg",
        str(tmp_path / "t.svg"),
    ]
    assert cli.main(given) == 0
    said = capsys.readouterr().out
    assert "{5,1: 3,2,4,1,0} of 7×4: 5 tiles on 5 instances" in said and "\n  4 4 4 4\n" in said and "176 B" in said
    assert (tmp_path / "t.svg").read_text().count("<rect") == 5
    assert cli.main(["tiles", "--shape", "4x4x4", "--pattern", "2,2,2", "--assign=-1,1,2,3,4,5,6,7"]) == 0
    said = capsys.readouterr().out
    assert "none" in said and "axis 0 = 0:2" in said and "axis 0 = 2:4" in said
    for wrong in (["--shape", "7"], ["--shape", "7x", "--pattern", "1"], ["--shape", "7", "--pattern", "5,1"], []):
        assert cli.main(["tiles", *wrong]) == 2


# tensor dictionaries


def test_a_dictionary_as_the_slides_have_it():
    a = np.arange(24.0).reshape(4, 3, 2)
    assert str(TensorDictionary(a)) == "{1: 0}"
    assert str(TensorDictionary(a, (1,), (0, 1))) == "{1: 0,1}"
    assert str(TensorDictionary(a[0], "{2,1: 0,1}")) == "{2,1: 0,1}"
    assert str(TensorDictionary(a, (2, 3, 1))) == "{2,3,1: 0,1,2,3,4,5}"
    d = TensorDictionary(a, (3, 2, 1), (5, 4, 3, 2, 1, 0))
    assert str(d) == "{3,2,1: 5,4,3,2,1,0}" and repr(d) == "TensorDictionary({3,2,1: 5,4,3,2,1,0} of [4, 3, 2] float64)"
    assert np.array_equal(d[5], a[:1, :1]) and np.array_equal(d[0], a[2:, 1:])
    assert d[3, 2, 1] == a[3, 2, 1] and d.locate((3, 2, 1)) == {0: (1, 1, 1)}
    assert d.instances == (5, 4, 3, 2, 1, 0) and sum(x.size for x in d.extract().values()) == a.size
    held = TensorDictionary.of_tiles({7: a[0, :1], 2: a[0, 1:]}, (3, 2), "{2,1: 7,2}")
    assert np.array_equal(held.whole(), a[0])
    for wrong in ((9, 0, 0), (0, 0)):
        with pytest.raises(TapestryError, match="no cell"):
            d[wrong]
    with pytest.raises(TapestryError, match="not the tiles"):
        TensorDictionary.of_tiles({0: a[0], 1: a[1]}, (3, 2), (2, 1))
    with pytest.raises(TapestryError, match="two assignments"):
        TensorDictionary(a, "{1: 0}", (1,))


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
    d = TensorDictionary(a, t)
    assert np.array_equal(d.whole(), a)
    if t.count > 1:
        assert sum(x.size for x in d.extract().values()) == a.size
    cell = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    found = d.locate(cell)
    assert found and all(d[i][inner] == a[cell] == d[cell] for i, inner in found.items())


@given(st.data())
def test_both_evaluations_give_the_same_and_ours_moves_no_more(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3)))
    a = np.arange(np.prod(shape)).reshape(shape)
    before, after = data.draw(tilings(len(shape))), data.draw(tilings(len(shape)))
    d, wanted = TensorDictionary(a, before), TensorDictionary(a, after)
    for slides in (True, False):
        found = d.retile(after, slides=slides)
        assert str(found) == str(wanted) and all(np.array_equal(found[i], wanted[i]) for i in wanted.instances)
    assert exact(before, after, shape).cells() <= naive(before, after, shape).cells()


@pytest.mark.parametrize(
    ("before", "after", "kind", "naive_cells", "exact_cells"),
    [
        ("{1:0}", "{2,1:0,1}", "broadcast + tile", 64, 32),
        ("{1:0}", "{1:0,1}", "broadcast", 64, 64),
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
    top, bottom = TensorDictionary(a, "{2,1: 0,-1}"), TensorDictionary(a, "{2,1: -1,1}")
    with pytest.raises(TapestryError, match="suppressed"):
        top.whole()
    with pytest.raises(TapestryError, match="no instance holds"):
        top.retile("{1: 5}")
    with pytest.raises(TapestryError, match="no instance holds"):
        top[3, 0]
    both = TensorDictionary.combine(top, bottom)
    assert str(both) == "{2,1: 0,1}" and np.array_equal(both.whole(), a)
    with pytest.raises(TapestryError, match="two of the dictionaries"):
        TensorDictionary.combine(top, top)
    copies = TensorDictionary.combine(TensorDictionary(a), TensorDictionary(a, "{1: 3}"))
    assert str(copies) == "{1: 0,3}"
    with pytest.raises(TapestryError, match="holds no tile"):
        both[7]


# in a model


def tiled_model(tilings, topology=("4", None), nodes=None):
    m = net(
        nodes or [N("MatMul", ["x", "w"], ["h"], "mm"), N("Relu", ["h"], ["r"], "act"), N("MatMul", ["r", "v"], ["y"], "down")],
        {"x": (T.FLOAT, [8, 12])},
        {"y": T.FLOAT},
        {"w": f32(12, 16), "v": f32(16, 8)},
    )
    m.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", T.FLOAT, [8, 8]))
    for name, text in tilings.items():
        shape = {"h": [8, 16], "r": [8, 16]}.get(name)
        value = onnx.helper.make_tensor_value_info(name, T.FLOAT, shape) if shape else None
        tile_metadata.attach(m, name, parse(text), value)
    for key, text in zip(("instance_count", "instance_map"), topology, strict=True):
        if text is not None:
            m.metadata_props.add(key=key, value=text)
    return m


def saved(m, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(m, path)
    return path


def test_tilings_are_read_back_and_removed(tmp_path):
    wanted = {"x": parse("{2,1: 0,1}"), "w": parse("{1: 0,1}"), "h": parse("{2: 1,0}")}
    again = onnx.load(saved(tiled_model({t: str(g) for t, g in wanted.items()}), tmp_path))
    onnx.checker.check_model(again)
    assert tile_metadata.read(again) == wanted
    tile_metadata.attach(again, "h", None)
    tile_metadata.attach(again, "w", None)
    assert tile_metadata.read(again) == {"x": wanted["x"]}
    with pytest.raises(TapestryError, match="declares no"):
        tile_metadata.attach(again, "r", wanted["x"])


MEGATRON = {"x": "{1: 0,1,2,3}", "w": "{1,4}", "r": "{1,4}", "v": "{4,1}", "y": "{4,1}"}


def test_compile_keeps_the_tilings_of_a_model(tmp_path):
    path = saved(tiled_model(MEGATRON), tmp_path)
    build = tapestry.compile(path)
    plan = build.build.plan
    assert plan.devices == 4
    at = {op.outs[0]: s for op, s in zip(plan.graph.ops, plan.strategies, strict=True)}
    assert at["r"].out == (1,) and at["y"].dims == ("m",) and at["y"].out == (0,)
    assert plan.inputs == {"x": (None,), "w": (1,), "v": (0,)} and plan.outputs == {"y": (0,)}
    feeds = build.random_feeds(1)
    slides = evaluated(path, feeds)
    assert np.allclose(build.run(feeds)["y"], slides.outputs["y"], rtol=1e-4, atol=1e-5)
    moved = sum(t["bytes"] for t in build.report["transfers"])
    assert moved == 3 * 8 * 8 * 4 and sum(s.nbytes for s in slides.steps) > moved


def test_equal_patterns_do_not_make_an_operation_local(tmp_path):
    """The slides send nothing where patterns are equal; a MatMul of columns by columns is then wrong, which is said."""
    path = saved(tiled_model({"x": "{4}", "w": "{4}", "h": "{4}"}), tmp_path)
    build = tapestry.compile(path)
    slides = evaluated(path, build.random_feeds(0))
    assert (slides.steps[0].node, slides.steps[0].wrong) == ("mm", True)
    assert np.allclose(build.run(build.random_feeds(0))["y"], slides.outputs["y"], rtol=1e-4, atol=1e-5)


def test_the_command_shows_both_evaluations(tmp_path, capsys):
    path = saved(tiled_model(MEGATRON), tmp_path)
    assert cli.main(["tiles", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outputs_agree"] and found["exact"]["bytes"] < found["slides"]["bytes"]
    assert cli.main(["tiles", str(path)]) == 0
    assert "as the slides say" in capsys.readouterr().out


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tilings", "topology", "code", "words"),
    [
        ({"r": "{1,4: 0,1,2,4}"}, ("4", None), "instance-range", "instance 4 of tiling .* instance_count is 4"),
        ({"r": "{1,4}"}, ("3", None), "instance-range", "instance_count is 3"),
        ({"r": "{1,4}"}, ("4", "[[1],[2],[3],[7]]"), "topology", "instance '7' does not exist"),
        ({"r": "{1,4}"}, ("0", None), "topology", "'0' instances"),
        ({"r": "{1,4}"}, ("4", "[[1],[2]]"), "topology", "2 rows"),
    ],
)
def test_instances_that_there_are_not_are_refused(tilings, topology, code, words, tmp_path):
    path = saved(tiled_model(tilings, topology), tmp_path)
    with pytest.raises(PlanError, match=words):
        tapestry.compile(path)
    assert code in [f.code for f in check_file(path) if f.level == "error"]
    assert tapestry.compile(path, devices=2, sharding=False).build.plan.devices == 2


@pytest.mark.parametrize(
    ("tilings", "devices", "words"),
    [
        ({"r": "{4: 0,1,2,-1}"}, None, "suppressed"),
        (
            {"r": "{1,4: 3,2,1,0}", "y": "{4,1}"},
            None,
            "no layout over the axes of mesh 4, in one order of devices for all tensors",
        ),
        ({"r": "{2,2: 3,0,1,2}", "y": "{1,4}"}, None, "no layout over the axes"),
        ({"r": "{2,1,1}"}, None, "rank 2"),
        ({"r": "{1,4}"}, 2, "tilings are for 4 instances, not 2"),
        ({"r": "{1,4}"}, 8, "topology has 4 instances, not 8"),
    ],
)
def test_tilings_that_no_plan_can_keep_are_refused(tilings, devices, words, tmp_path):
    path = saved(tiled_model(tilings), tmp_path)
    with pytest.raises(PlanError, match=words):
        tapestry.compile(path, devices=devices)
    assert devices or {"not-kept", "tile-pattern"} & {f.code for f in check_file(path)}  # and the checker says so


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tilings", "mesh"),
    [
        ({"r": "{4: 3,2,1,0}"}, [(3, 2, 1, 0)]),
        ({"r": "{4,1: 0,2,1,3}", "y": "{4,1: 0,2,1,3}"}, [(0, 2, 1, 3)]),
        ({"r": "{2,2: 2,3,0,1}"}, [(1, 0), ()]),
        ({"r": "{2,2: 3,2,1,0}", "y": "{4,1: 3,2,1,0}"}, [(1, 0), (1, 0)]),
        ({"r": "{2,2: 3,0,1,2}"}, None),
    ],
)
def test_any_order_of_the_devices_of_a_mesh_axis(tilings, mesh, tmp_path):
    """Kept, run, verified, written and read again; an order that no axes give is refused."""
    path = saved(tiled_model(tilings), tmp_path)
    if mesh is None:
        with pytest.raises(PlanError, match="puts its parts on these devices"):
            tapestry.compile(path)
        return
    build = tapestry.compile(path)
    assert [a.order for a in build.build.plan.mesh] == mesh and check_file(path) == []
    assert build.check(build.random_feeds(0))["passed"]
    build.save(tmp_path / "p")
    assert tapestry.load(tmp_path / "p").build.plan == build.build.plan
    assert build.verify()
    build.export(tmp_path / "again.onnx")
    text = {h.name: p.value for h in onnx.load(tmp_path / "again.onnx").graph.value_info for p in h.metadata_props
            if p.key == "tile_assignment"}  # fmt: skip
    assert text["r"] == tilings["r"].partition(": ")[2].rstrip("}")
    again = tapestry.compile(tmp_path / "again.onnx")
    assert again.build.plan.mesh == build.build.plan.mesh and again.build.program == build.build.program
    for form in ("jax", "dtensor", "tp-plan"):
        with pytest.raises(TapestryError):
            formats.export(tmp_path / "p", form, tmp_path / "out")


@pytest.mark.parametrize(
    ("tilings", "topology", "words"),
    [
        ({}, ("65536", None), "65,536 instances"),
        ({"y": "{2,1: 0,60000}"}, (None, None), "60,001 instances"),
        ({}, ("2", "[[],[]]"), "device 1 cannot reach device 0"),
    ],
)
def test_instances_that_no_machine_has_are_refused(tilings, topology, words, tmp_path):
    with pytest.raises(TapestryError, match=words):
        tapestry.compile(saved(tiled_model(tilings, topology), tmp_path))


def test_a_mesh_is_found_for_tilings_of_inputs_alone(tmp_path):
    build = tapestry.compile(saved(tiled_model({"x": "{2,2}"}, (None, None)), tmp_path)).build
    assert [a.size for a in build.plan.mesh] == [2, 2] and build.plan.inputs == {"x": (0, 1)}


RING = "[[1],[2],[3],[0]]"


def test_the_model_carries_its_topology(tmp_path):
    path = saved(tiled_model({}, ("4", RING)), tmp_path)
    build = tapestry.compile(path)
    assert build.build.plan.devices == 4 and build.build.topology["joined"][0]["kind"] == "one-way ring"
    assert build.build.topology["name"].endswith("links of the model")
    build.export(tmp_path / "again.onnx")
    m = onnx.load(tmp_path / "again.onnx")
    carried = tile_metadata.read_topology(m)
    assert carried is not None and carried.count == 4 and str(carried.links) == "{4, [[1],[2],[3],[0]]}"
    again = tapestry.compile(tmp_path / "again.onnx")
    assert again.build.topology == build.build.topology and again.build.program == build.build.program
    assert "joined" not in tapestry.compile(path, topology="cpu").build.topology
    assert "joined" not in tapestry.compile(path, devices=2).build.topology  # the links are of four


def test_tilings_of_a_plan_alone_give_its_tilings_again(tmp_path):
    """And a plan that takes as long, but for half a percent: of those the one that sends least is taken."""
    source = saved(tiled_model({}, (None, None)), tmp_path)
    before = tapestry.compile(source, devices=4, topology="cpu", pins=["mm:n=4@d0", "down:m=4@d0"], layouts=["y:0=4@d0"])
    before.export(tmp_path / "both.onnx")
    m = onnx.load(tmp_path / "both.onnx")
    tiles = {t: str(g) for t, g in tile_metadata.read(m).items()}
    assert tiles == {"r": "{1,4: 0,1,2,3}", "y": "{4,1: 0,1,2,3}"}
    del m.configuration[:]
    for n in m.graph.node:
        del n.device_configurations[:]
    onnx.save(m, tmp_path / "tiles.onnx")
    after = tapestry.compile(tmp_path / "tiles.onnx", topology="cpu")
    after.export(tmp_path / "again.onnx")
    assert {t: str(g) for t, g in tile_metadata.read(onnx.load(tmp_path / "again.onnx")).items()} == tiles
    assert after.report["objective_s"] <= before.report["objective_s"] * 1.006


# instance maps


@pytest.mark.parametrize(("text", "kind", "detail"), MAPS)
def test_topologies_of_the_slides(text, kind, detail):
    m = instance_map.parse_instances(text)
    assert instance_map.parse_instances(str(m)) == m
    assert (kind, detail) in [(s.kind, s.detail) for s in instance_map.recognise(m)]


def test_one_way_and_two_way_rings():
    one, two = (instance_map.recognise(instance_map.parse_instances(t))[0] for t in (MAPS[1][0], MAPS[9][0]))
    assert (one.two_way, two.two_way) == (False, True)


def test_slips_of_the_slides_are_noted():
    (found,) = instance_map.recognise(instance_map.parse_instances(MAPS[7][0]))
    assert found.notes == ("0 sends to 2 and not the other way round; taken as two-way",)
    (found,) = instance_map.recognise(instance_map.parse_instances(MAPS[8][0]))
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
        instance_map.parse_instances(text)
