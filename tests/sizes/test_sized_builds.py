"""One build for every size of a range: what it computes at sizes that were never seen, and what that costs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tapestry
from tapestry import api
from tapestry.build.sized_builds import SizedBuild
from tapestry.codegen.torch_cpu import native
from tapestry.compiler import pipeline
from tapestry.compiler.pass_runner import Runner
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import TapestryError
from tapestry.lift import onnx_to_graph as lift
from tapestry.lift.sizes.model_sizes import same_model
from tapestry.onnx_eval.ort_session import ort_session
from tapestry.sizes.sized_plans import PlanAtSizes
from tapestry.verify import certificate
from tapestry.verify.many_sizes import sized_laws
from tapestry.verify.many_sizes.sized_memory import peaks_at
from tapestry.viz import progress
from tests.support.programs.sized_models import PINS, compiled, path_of

CASES = [
    ("rows", 1, (), ("batch=1..40",)),
    ("rows", 2, PINS["rows"], ("batch=2..40",)),
    ("waves", 2, PINS["waves"], ("length=6..90",)),
    ("tokens", 1, (), ("batch=1..4", "sequence=1..70")),
    ("tokens", 2, (), ("batch=2..6", "sequence=7,20,64")),
    ("patches", 1, (), ("length=8..90",)),
    ("patches", 2, PINS["patches"], ("length=16..90",)),
]


def sized(c: tapestry.Compiled) -> SizedBuild:
    assert c.sized is not None
    return c.sized


def some_sizes(s: SizedBuild, count: int, seed: int) -> list[dict[str, int]]:
    """Sizes at random, and the corners."""
    draw = random.Random(seed)
    found = [tuple(draw.choice(list(s.asked.along(k))) for k in range(len(s.symbols))) for _ in range(count)]
    return [dict(zip(s.symbols, n, strict=True)) for n in dict.fromkeys([*s.asked.corners(), *found])]


def made_for(c: tapestry.Compiled, sizes: dict[str, int]) -> api.Session:
    """A session of a build that is made for some sizes alone: lifted there, with the strategies of the region."""
    s, n = sized(c), tuple(sizes.values())
    k, at = s.at(n)
    r = s.regions[k]
    options = pipeline.Options(
        model=Path(c.build.model), topology="cpu", stages="1",
        mesh=c.build.plan.mesh, pins=c.report["requests"]["pins"], micro_batches="1",
    )  # fmt: skip
    same = same_model(lift.read_model(options.model, False).model, s.inputs, s.symbols, r.region, r.made_at)
    plans = PlanAtSizes(options, s.symbols, r.build, r.made_at, {}, same)
    graph = replace(plans.graph(n), weights=r.build.plan.graph.weights)
    build = replace(at, plan=replace(at.plan, graph=graph), program=plans.lowered(graph, n))
    return api.open_session(build, r.constants)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_any_size_is_right(case):
    c = compiled(*case[:3], *case[3])
    peer = ort_session(path_of(case[0]))
    for k, sizes in enumerate(some_sizes(sized(c), 6, 3)):
        feeds = c.at(sizes).random_feeds(k)
        out = c.run(feeds)
        for name, want in zip(out, peer.run(list(out), feeds), strict=True):
            np.testing.assert_allclose(out[name], want, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_bits_are_those_of_a_build_for_the_size(case):
    c = compiled(*case[:3], *case[3])
    for k, sizes in enumerate(some_sizes(sized(c), 3, 5)):
        if min(sizes.values()) == 1:  # the model lifted at size 1 has fewer dimensions
            continue
        feeds = c.at(sizes).random_feeds(k)
        ours, fixed = c.run(feeds), made_for(c, sizes).run(feeds).outputs
        assert all(ours[t].tobytes() == fixed[t].tobytes() for t in fixed), sizes


def test_a_new_size_costs_no_search_no_proof_and_no_compiling(tmp_path, monkeypatch):
    compiled("tokens", 1, (), "batch=1..4", "sequence=1..70").save(tmp_path / "b")
    c = tapestry.load(tmp_path / "b")
    c.prepare()

    def never(*_, **__):
        raise AssertionError("this is not done for a size")

    for place, name in ((Runner, "run"), (certificate, "check"), (sized_laws, "check_sizes"), (native, "compiled")):
        monkeypatch.setattr(place, name, never)
    monkeypatch.setattr("subprocess.run", never)
    for sizes in some_sizes(sized(c), 5, 11):
        out = c.run(c.at(sizes).random_feeds(0))
        assert out["y"].shape[:2] == (sizes["batch"], sizes["sequence"])
    with tapestry.Session(c) as s:
        x = np.zeros((3, 17, 32), np.float32)
        assert s.run({"x": x})["y"].shape == x.shape


def test_a_size_outside_is_refused_with_its_range():
    c = compiled("tokens", 2, (), "batch=2..6", "sequence=7,20,64")
    with pytest.raises(TapestryError, match=r"(?s)batch 7 is outside the build's range 2\.\.6.*2\.\.7"):
        c.run({"x": np.zeros((7, 20, 32), np.float32)})
    with pytest.raises(TapestryError, match=r"(?s)sequence 21 is outside the build's sizes 7, 20, 64.*7,20,21,64"):
        c.at({"batch": 2, "sequence": 21})
    with pytest.raises(TapestryError, match=r"(?s)no input 'xs'.*the inputs are x"):
        c.run({"xs": np.zeros((7, 20, 32), np.float32)})
    with pytest.raises(TapestryError, match="no given input has the axis 'batch'"):
        c.run({})
    with pytest.raises(TapestryError, match="'x' has 2 axes"):
        c.run({"x": np.zeros((7, 20), np.float32)})
    with pytest.raises(TapestryError, match="is no range of sizes"):
        compiled("rows", 1, (), "batch=9..3")
    with pytest.raises(TapestryError, match="'rows' is no symbol"):
        compiled("rows", 1, (), "rows=1..3")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["added", "looked_up"])
def test_sizes_that_follow_from_others_have_no_range_of_their_own(name, tmp_path):
    shapes = ("batch=1..3", "rows=1..3", "sequence=4", "past=2..9", "total=6..13")
    c, peer = compiled(name, 1, (), *shapes), ort_session(path_of(name))
    assert sized(c).symbols == ("batch", "past") and len(sized(c).regions) == 1
    assert {s: of["is"] for s, of in c.report["sizes"]["follow"].items()} == {"rows": "batch", "total": "sequence + past"}
    for k, sizes in enumerate(some_sizes(sized(c), 3, 7)):
        feeds = c.at(sizes).random_feeds(k)
        assert feeds["attention_mask"].shape == (sizes["batch"], 4 + sizes["past"])
        np.testing.assert_allclose(c.run(feeds)["y"], peer.run(None, feeds)[0], rtol=1e-5)
    c.save(tmp_path / "b")
    assert verify_build(tmp_path / "b")[1]["sizes"] > 0
    with pytest.raises(TapestryError, match=r"(?s)total has to be sequence \+ past.*which is 6\.\.13"):
        compiled(name, 1, (), *shapes[:-1], "total=5..20")


def test_sizes_that_the_user_knows_to_be_equal():
    c = compiled("joined", 1, (), "batch=2..4", "sequence=batch")
    assert sized(c).symbols == ("batch",) and c.at({"batch": 3}).random_feeds(0)["x"].shape == (3, 3, 8)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch", ["1..8", "1..2"])
def test_a_corner_in_which_a_cut_is_impossible_has_a_plan_without_it(batch):
    """One prompt is not cut into two, whatever its length: a plan cuts something else there."""
    c = compiled("encoder", 2, (), f"batch={batch}", "sequence=16..256")
    regions = sized(c).regions
    assert len(regions) == 2 and sorted(r.region.low for r in regions)[0] == (1, 16)
    peer = ort_session(path_of("encoder"))
    for k, sizes in enumerate(some_sizes(sized(c), 4, 9)):
        feeds = c.at(sizes).random_feeds(k)
        np.testing.assert_allclose(c.run(feeds)["y"], peer.run(None, feeds)[0], rtol=1e-4, atol=1e-4)


def test_a_pin_that_a_corner_cannot_keep_to_names_the_corner():
    with pytest.raises(TapestryError, match=r"(?s)pin is impossible.*in a plan for batch 1\b"):
        compiled("rows", 2, PINS["rows"], "batch=1..40")


@pytest.mark.slow
def test_progress_says_how_many_plans_are_done():
    said: list[tuple[str, str]] = []
    shapes = {"batch": "1..8", "sequence": "16..64"}
    tapestry.compile(path_of("encoder"), devices=2, topology="cpu", shapes=shapes, progress=lambda *s: said.append(s))
    plans = [name for phase, name in said if phase == "sizes"]
    assert plans[0].startswith("0 plans done; the next is for batch 1..8") and plans[1].startswith("1 plan done")
    watch = progress.Watch(["lift", "solve"], lambda *_: None)
    for phase, name in (("sizes", plans[1]), ("search", "solve")):
        watch.begin(phase, name)
    watch.found(1.0, 0.5)
    assert plans[1] in watch.line() and "solve" in watch.line() and "gap" not in watch.line()


def test_the_largest_peak_is_met_and_the_formula_is_what_runs_use():
    c = compiled("waves", 2, PINS["waves"], "length=6..90")
    s, seen = sized(c), [0, 0]
    for n in range(6, 91):
        peaks = peaks_at(s.regions[0].plan, (n,))
        assert peaks == list(s.at((n,))[1].peak_bytes)
        seen = [max(a, b) for a, b in zip(seen, peaks, strict=True)]
        if n % 4 == 0:
            session = c.at({"length": n}).session
            assert session.run(c.at({"length": n}).random_feeds(0)).measured.peak == peaks
    assert seen == s.regions[0].about["largest_peak_bytes"]


def test_a_product_of_sizes_gets_a_plan_for_each_of_one(tmp_path):
    c = compiled("joined", 1, (), "batch=2..4", "sequence=2..50")
    assert [r.region.low[0] for r in sized(c).regions] == [r.region.high[0] for r in sized(c).regions]
    assert len(sized(c).regions) == 3
    x = np.random.default_rng(0).standard_normal((3, 29, 8)).astype(np.float32)
    want = ort_session(path_of("joined")).run(["y"], {"x": x})[0]
    np.testing.assert_allclose(c.run({"x": x})["y"], want, rtol=1e-4, atol=1e-5)
    c.save(tmp_path / "b")
    assert verify_build(tmp_path / "b")[1]["sizes"] > 0
    assert "batch 2" in c.explain() and "one build for" in c.explain()


def test_the_smaller_of_two_sizes_is_right_where_the_ranges_meet():
    """Where one is always the smaller at the ends of each range alone, and at the least and the largest of both."""
    c, peer = compiled("shorter", 1, (), "n=2..6", "m=5..30"), ort_session(path_of("shorter"))
    for sizes in ({"n": 6, "m": 5}, {"n": 5, "m": 5}, {"n": 2, "m": 30}, {"n": 6, "m": 30}):
        x, other = (np.random.default_rng(k).standard_normal((n, 6)).astype(np.float32) for k, n in enumerate(sizes.values()))
        out = c.run({"x": x, "other": other})
        for name, want in zip(out, peer.run(list(out), {"x": x, "other": other}), strict=True):
            np.testing.assert_allclose(out[name], want, rtol=1e-5, atol=1e-6)
