"""Interconnects: shapes and maps of links, routes, collectives by algorithm, presets of any size, and files that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log2

import numpy as np
import pytest

import tapestry
from tapestry.errors import TapestryError
from tapestry.ir.program import Reduce
from tapestry.plan.cost import transfer
from tapestry.plan.cost.collective import merge, reductions
from tapestry.plan.strategy import tensor_boxes
from tapestry.plan.topology import PRESETS, fabrics, from_data, parse_mesh, to_data, topology
from tapestry.plan.topology.routing import routes
from tapestry.viz import explain
from tests.support.instance_maps import MAPS
from tests.support.paths import ROOT
from tests.support.small_models import save

LINK = {"alpha": 1e-6, "beta": 1e-9}
DEVICE = {"memory": "16GiB", "bandwidth": 1e10, "launch": 1e-6, "flops": {"f32": 1e11}}
B = 1 << 20


def file(tmp_path, **what):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"device": DEVICE, **what}))
    return str(path)


def joined(tmp_path, mesh, **spec):
    return topology(parse_mesh(mesh), file(tmp_path, interconnect={**LINK, **spec}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", [m[0] for m in MAPS[:10]])
def test_maps_of_the_slides_compile(text, tmp_path):
    """The number of devices comes from the map; the plan runs, and its topology comes back from the build."""
    source = file(tmp_path, instance_map=text, link=LINK)
    build = tapestry.compile(save("mlp"), topology=source)
    assert build.build.program.devices == int(text[1:].split(",")[0])
    topo = from_data(build.build.topology)
    assert topo == topology(topo.mesh, source)
    assert all(f.wires for f in topo.joined)
    feeds = build.random_feeds()
    alone = tapestry.compile(save("mlp"), devices=1).run(feeds)
    for name, value in build.run(feeds).items():
        np.testing.assert_allclose(value, alone[name], rtol=1e-4, atol=1e-5)


def test_unreachable_devices_are_named(tmp_path):
    with pytest.raises(TapestryError, match=r"device [23] cannot reach device 0"):
        topology(parse_mesh("4"), file(tmp_path, instance_map=MAPS[11][0], link=LINK))
    with pytest.raises(TapestryError, match="device 1 cannot reach device 0"):
        topology(parse_mesh("3"), file(tmp_path, instance_map="{3, [[1],[2],[1]]}", link=LINK))


@pytest.mark.parametrize(
    ("shape", "n", "hops"),
    [("ring", 8, 4), ("one-way ring", 8, 7), ("line", 8, 7), ("full mesh", 8, 1), ("star", 8, 2), ("tree", 7, 4), ("linked rings", 8, 5), ("ring", 2, 1)],
)  # fmt: skip
def test_longest_paths_of_shapes(shape, n, hops, tmp_path):
    (f,) = joined(tmp_path, str(n), shape=shape).joined
    found = routes(f.size, f.wires)
    assert found.hops.max() == hops
    np.testing.assert_allclose(found.alpha, found.hops * LINK["alpha"])
    one = np.zeros((n, n))
    one[n - 1, 0] = 1.0
    assert found.busiest(one)[0] == LINK["beta"]  # a lone message does not meet itself


def test_a_torus_is_a_ring_per_side(tmp_path):
    sides = lambda mesh, **k: [f.size for f in joined(tmp_path, mesh, shape="torus", **k).joined]  # noqa: E731
    assert sides("8x16x8") == [8, 16, 8]
    assert sides("64") == [4, 4, 4]
    assert sides("4x16") == [4, 4, 4]
    assert sides("12", sizes=[3, 4]) == [3, 4]
    assert sides("7") == [7]
    with pytest.raises(TapestryError, match="torus of 3x5 for 12"):
        sides("12", sizes=[3, 5])


def seconds(topo, axes, nbytes=B, by="sum"):
    (way,) = merge(nbytes, axes, topo, (by, by))
    return way


def test_collectives_take_the_formulas_of_their_shape(tmp_path):
    a, b = LINK["alpha"], LINK["beta"]
    ring = seconds(joined(tmp_path, "7", shape="ring"), [(0, False)])
    assert ring.name == "ring both ways"
    assert ring.seconds == pytest.approx(2 * 6 * (a + b * B / 7 / 2))
    one_way = seconds(joined(tmp_path, "7", shape="one-way ring"), [(0, True)])
    assert one_way.name == "ring" and one_way.seconds == pytest.approx(6 * (a + b * B / 7))
    switch = seconds(joined(tmp_path, "8", shape="switch"), [(0, False)])
    assert switch.name == "two trees" and switch.seconds == pytest.approx(2 * (3 * a + 7 / 8 * b * B))
    small = seconds(joined(tmp_path, "8", shape="full mesh"), [(0, False)], 8)
    assert small.name == "tree" and small.seconds == pytest.approx(2 * (a + 8 * b))  # its root hears all at once
    star = seconds(joined(tmp_path, "9", shape="star"), [(0, False)], 4)
    assert star.name == "tree" and star.seconds == pytest.approx(2 * (a + 4 * b))


def test_a_slow_link_is_seen(tmp_path):
    fast, slow = (
        seconds(topology(parse_mesh("8"), file(tmp_path, interconnect={"shape": "ring", **LINK, "links": links})), [(0, False)])
        for links in ([], [{"from": 3, "to": 4, "beta": 1e-8}, {"from": 4, "to": 3, "beta": 1e-8}])
    )
    assert slow.name == "ring" and slow.seconds > 2 * fast.seconds  # one way, and around the slow link


def test_one_axis_over_nodes_is_reduced_hierarchically():
    """16 devices in 2 nodes of 8: inside at NVLink speed, and an eighth of the bytes across."""
    one, two = topology(parse_mesh("16"), "h100"), topology(parse_mesh("2x8"), "h100")
    inner, outer = two.links[1], two.links[0]
    way = seconds(one, [(0, False)], 64 * B)
    assert way.name == "hierarchical (aggregated trees inside, two trees across)"
    across = 2 * (outer.alpha + 4 * B * outer.beta)
    assert way.seconds == pytest.approx(2 * (3 * inner.alpha + 7 / 8 * 64 * B * inner.beta) + across)
    assert way == seconds(two, [(0, False), (1, False)], 64 * B)
    flat = 2 * (log2(16) * outer.alpha + 15 / 16 * 64 * B * outer.beta)
    assert way.seconds < flat / 4


@pytest.mark.parametrize(("preset", "mesh"), [("cpu", "8"), ("h100", "16"), ("h100", "2x8"), ("tpu", "16"), ("tpu", "4x3")])
def test_an_exchange_of_states_costs_what_the_same_transfer_does(preset, mesh):
    """Parts that a monoid of ours merges travel like the pieces of an all-to-all: the same seconds, but for the new buffer."""
    topo = topology(parse_mesh(mesh), preset)
    n, axes = int(np.prod([a.size for a in topo.mesh])), range(len(topo.mesh))
    shape, before, after = (n, n * 4096), (0,) * len(axes), (1,) * len(axes)
    found = transfer.costs([(before, tensor_boxes(shape, before, topo.mesh))], [tensor_boxes(shape, after, topo.mesh)], 4, topo)
    filled = n * 4096 * 4 / topo.device.bandwidth + topo.device.launch
    way = seconds(topo, [(k, True) for k in axes], n * 4096 * 4, by="")
    assert way.name == "direct exchange"
    assert way.seconds == pytest.approx(float(found.seconds[0, 0]) - filled)


def test_a_group_inside_a_map_is_not_the_whole_map(tmp_path):
    """In a ring of 4 as 2x2, pairs along d1 are neighbours, and pairs along d0 share the links of both hops."""
    topo = joined(tmp_path, "2x2", shape="ring")
    near, far = (seconds(topo, [(k, False)], B).seconds for k in (1, 0))
    assert near < far
    assert seconds(topo, [(0, False), (1, False)], B).seconds <= near + far


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mesh", ["1", "2", "6", "16", "3x5", "2x16", "2x3x4", "512", "8x16x8"])
def test_presets_take_any_mesh(preset, mesh):
    topo = topology(parse_mesh(mesh), preset)
    assert from_data(to_data(topo)) == topo
    n = 1
    for f in reversed(fabrics(topo)):
        assert f.stride == n
        n *= f.size
    assert n == np.prod([a.size for a in topo.mesh])
    if n > 1:
        both = seconds(topo, [(k, False) for k in range(len(topo.mesh))])
        once = seconds(topo, [(k, True) for k in range(len(topo.mesh))])
        assert once.seconds < both.seconds < 1.0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("mesh", "what", "message"),
    [
        ("4", {"interconnect": {"shape": "web", **LINK}}, "not a shape"),
        ("4", {"interconnect": {"shape": "ring", "alpha": 1e-6}}, "not a topology"),
        ("4", {"interconnect": {"shape": "ring", "alpha": 1e-6, "beta": -1}}, "not a topology"),
        ("4", {"interconnect": {"shape": "ring", "alpha": 1e-6, "beta": "inf"}}, "not a topology"),
        ("4", {"interconnect": {"shape": "star", "centre": 4, **LINK}}, "centre"),
        ("4", {"interconnect": {"shape": "linked rings", "rings": 3, **LINK}}, "do not make"),
        ("4", {"interconnect": {"shape": "ring", **LINK, "links": [{"from": 0, "to": 2}]}}, "no link from 0 to 2"),
        ("4", {"interconnect": {"shape": "torus", **LINK, "links": [{"from": 0, "to": 1}]}}, "all alike"),
        ("4", {"interconnect": {"shape": "torus", **LINK, "sizes": [0, 4]}}, "not a topology"),
        ("4", {"interconnect": {"d1": {"shape": "ring", **LINK}}}, "mesh axis 'd0'"),
        ("4", {"interconnect": {"d0": 3}}, "not a topology"),
        ("4", {"interconnect": []}, "not a topology"),
        ("4", {"instance_map": "{3, [[1],[2],[0]]}", "link": LINK}, "a map of 3 devices for 4"),
        ("4", {"instance_map": "{4, [[1],[2],[3],[0]]}"}, "not a topology"),
        ("4", {"instance_map": "{4, [[1],...]}", "link": LINK}, "left out"),
        ("4", {"instance_map": "{4}", "link": LINK}, "not an instance map"),
        ("6", {"levels": [{"devices": 4, "shape": "ring", **LINK}, LINK]}, "do not divide"),
        ("4", {"levels": [LINK], "interconnect": {"shape": "ring", **LINK}}, "one of"),
        ("2048", {"interconnect": {"shape": "ring", **LINK}}, "at most 1,024"),
        ("512", {"interconnect": {"shape": "full mesh", **LINK}}, "links in one full mesh"),
    ],
)  # fmt: skip
def test_interconnects_that_are_refused(mesh, what, message, tmp_path):
    with pytest.raises(TapestryError, match=message):
        topology(parse_mesh(mesh), file(tmp_path, **what))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"levels": [{"alpha": 1e-6, "betta": 1e-9}]}, "no key 'betta'\n  try: 'beta' is similar; see "),
        ({"levels": [{"alpha": 1e-6}]}, "the key 'beta' is missing"),
        ({"levels": [LINK], "device": {**DEVICE, "lunch": 1e-6}}, "no key 'lunch'\n  try: 'launch' is similar"),
        ({"levels": [LINK], "device": {**DEVICE, "bandwidth": -5}}, "'bandwidth' is -5"),
        ({"levels": [LINK], "device": {**DEVICE, "flops": {"f32": 0}}}, "'flops.f32' is 0"),
        ({"levels": [{**LINK, "beta": -1}]}, "'levels[].beta' is -1"),
        ({"levels": [LINK], "interconnect": {"shape": "ring", **LINK}}, "must be given, and 2 are"),
        ({"levels": [LINK], "others": [{"at": {"d0": [1]}, "memmory": "1GiB"}]}, "no key 'memmory'"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(what, message, tmp_path):
    with pytest.raises(TapestryError) as e:
        topology(parse_mesh("4"), file(tmp_path, **what))
    assert message in str(e.value) and "docs/reference/topology.md" in str(e.value)
    assert (ROOT / "docs/reference/topology.md").is_file()


def test_keys_that_are_no_slip_are_let_be(tmp_path):
    names = {"interconnect": {"dt": {"shape": "ring", **LINK}}, "comment": "mine", "measured": {"kernel": 1, "betta": 2}}
    assert topology(parse_mesh("dt=4"), file(tmp_path, **names)).joined


RATES = {"launch": 1e-5, "rate": 2e11, "bandwidth": 1e10}
TABLE = {"call": "all_reduce", "group": 4, "points": [[8, 1e-4], [1024, 5e-5], [3072, 3e-4]]}
MEASURED = {
    "device": {**DEVICE, "flops": {"f32": 1e11, "f64": 5e10}, "classes": {"contraction": RATES}},
    "levels": [LINK], "collectives": [TABLE, {**TABLE, "stride": 2, "points": [[8, 1e-3], [16, 2e-3]]}],
    "overlap": False, "alone": {"launch": 1e-7},
}  # fmt: skip


def test_what_was_measured_is_read_kept_and_written_back(tmp_path):
    topo = topology(parse_mesh("2x2"), file(tmp_path, **MEASURED), memory=1 << 20)
    assert from_data(json.loads(json.dumps(to_data(topo)))) == topo
    assert not topo.overlap and topo.alone and topo.alone.launch == 1e-7
    assert not topo.alone.classes and topo.alone.memory == 1 << 20  # its rates are its own
    assert topo.device.kernel("contraction", "f32").rate == 2e11 and topo.device.kernel("contraction", "f64").rate == 1e11
    assert topology(parse_mesh("1"), file(tmp_path, **MEASURED)).device.launch == 1e-7  # one device has no others beside it
    other = topo.device.kernel("map", "f32")  # of no class: the common rates
    assert (other.launch, other.rate, other.bandwidth) == (1e-6, 5e10, 1e10)


def test_times_of_calls_rise_with_bytes(tmp_path):
    """Between points lines, above them the last slope; what falls is raised; of several strides the slowest."""
    topo = topology(parse_mesh("4"), file(tmp_path, **MEASURED))
    assert topo.call_seconds("all_reduce", 2, 8) is None and topo.call_seconds("broadcast", 4, 8) is None
    plain = replace(topo, calls=topo.calls[:1])
    at = [plain.call_seconds("all_reduce", 4, n) for n in (0, 8, 1024, 2048, 3072, 5120)]
    assert at == pytest.approx([1e-4, 1e-4, 1e-4, 2e-4, 3e-4, 5e-4])
    assert topo.call_seconds("all_reduce", 4, 8) == topo.call_seconds("all_reduce", 4, 8, stride=2) == 1e-3
    assert topo.call_seconds("all_reduce", 4, 8, stride=1) == 1e-3
    one = replace(topo, calls=(replace(topo.calls[0], points=((1024, 1e-3),)),))
    assert one.call_seconds("all_reduce", 4, 2048) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"collectives": [{**TABLE, "call": "gossip"}]}, "'gossip' is no call"),
        ({"collectives": [{**TABLE, "group": 1}]}, "a group of 2"),
        ({"collectives": [{**TABLE, "points": []}]}, "1 to 1024 points"),
        ({"collectives": [{**TABLE, "points": [[8, 1e-4], [8, 2e-4]]}]}, "bytes must rise"),
        ({"collectives": [{**TABLE, "points": [[8, -1e-4]]}]}, "seconds must not be negative"),
        ({"collectives": [{**TABLE, "points": [[8, float("nan")]]}]}, "seconds must not be negative"),
        ({"collectives": [TABLE, TABLE]}, "twice"),
        ({"collectives": 3}, "not a topology"),
        ({"overlap": "no"}, "true or false"),
        ({"alone": {"bandwidth": -1}}, "rates must be positive"),
        ({"alone": []}, "not a topology"),
        ({"device": {**DEVICE, "classes": {"dance": RATES}}}, "'dance' is no class"),
        ({"device": {**DEVICE, "classes": {"map": {**RATES, "rate": 0}}}}, "class 'map'"),
        ({"device": {**DEVICE, "classes": {"map": {"launch": 1e-6}}}}, "not a topology"),
    ],
)  # fmt: skip
def test_measurements_that_are_refused(what, message, tmp_path):
    with pytest.raises(TapestryError, match=message):
        topology(parse_mesh("4"), file(tmp_path, **{"levels": [LINK], **what}))
    built = to_data(topology(parse_mesh("4"), "cpu"))
    with pytest.raises(TapestryError):
        from_data({**built, **what, "device": {**built["device"], **what.get("device", {})}})


def test_a_device_with_rates_of_its_own_has_no_classes_of_another(tmp_path):
    others = [{"devices": [1], "flops": {"f32": 5e11}}, {"devices": [2], "memory": "1GiB"}]
    topo = topology(parse_mesh("3"), file(tmp_path, **{**MEASURED, "others": others}))
    assert [bool(d.classes) for d in topo.kinds] == [True, False, True] and not topo.device.classes


@pytest.mark.parametrize(
    "spoil",
    [
        lambda j: j.pop(), lambda j: j[0].update(size=3), lambda j: j[0].update(stride=0), lambda j: j[0].update(wires=[]),
        lambda j: j[0].update(wires=j[0]["wires"][:3]), lambda j: j[0].update(wires=[[0, 9, 1.0, 1.0]]), lambda j: j[0].update(alpha=-1.0), lambda j: j[0].pop("kind"),
    ],
)  # fmt: skip
def test_built_topologies_that_are_refused(spoil, tmp_path):
    data = to_data(joined(tmp_path, "2x4", shape="torus", sizes=[4, 2]))
    spoil(data["joined"])
    with pytest.raises(TapestryError):
        from_data(data)


def test_explain_names_the_algorithm(tmp_path):
    source = file(tmp_path, interconnect={"shape": "ring", **LINK})
    build = tapestry.compile(save("mlp"), devices=4, topology=source, pins=["up:m=4@d0"])
    text = " ".join(build.explain().split())
    assert "joined by ring of 4, 1 µs" in text
    merged = [s for s in explain.document(build.build)["steps"] if s["group"]]
    plan, steps = build.build.plan, [s for s in build.build.program.steps if isinstance(s, Reduce)]
    assert merged
    for s, step in zip(merged, steps, strict=True):
        by = reductions(plan.graph.ops[step.op], plan.strategies[step.op], plan.mesh)
        (way,) = merge(s["payload_bytes"], [(0, s["kind"] == "reduce_scatter")], from_data(build.build.topology), by)
        assert s["algorithm"] == way.name and f"by {way.name}" in text
