"""Costs beyond time: expressions over terms, and the number of devices that an objective prefers."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

import tapestry
from tapestry import build_report
from tapestry.errors import LawError, TapestryError
from tapestry.plan.cost.objective import TERMS, limits, objective, terms
from tapestry.plan.topology import from_data, parse_mesh, to_data, topology
from tests.support.command_line import run
from tests.support.stages.stage_graphs import NODES

MODEL = """
graph two
input x: f32[8, 64]
input w: f32[64, 64]
input v: f32[64, 64]
h: f32[8, 64] = op [i: 8, n: 64 | m: 64 sum]
  reads x[i, m], w[m, n]
  body x * w
y: f32[8, 64] = op [i: 8, n: 64 | m: 64 sum]
  reads h[i, m], v[m, n]
  body h * v
output y
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "two.tap").write_text(MODEL)
    device = {**NODES["device"], "watts": 300, "price": 2.5}
    (tmp_path / "priced.json").write_text(json.dumps({**NODES, "device": device}))
    return tmp_path / "two.tap"


def compiled(model, **options):
    return tapestry.compile(model, topology=str(model.parent / "priced.json"), **options)


def expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([*TERMS, "2", "1e-3", "0.5"])
    kind = rng.choice(["+", "-", "*", "/", "max", "min", "neg"])
    a, b = expression(rng, depth - 1), expression(rng, depth - 1)
    return f"-({a})" if kind == "neg" else f"{kind}({a}, {b})" if kind in ("max", "min") else f"({a}) {kind} ({b})"


@pytest.mark.parametrize("seed", range(40))
def test_an_expression_has_the_value_that_python_gives_it(seed):
    rng = random.Random(seed)
    text = expression(rng, 3)
    of = {t: rng.choice([0.0, 0.25, 1.0, 7.0]) for t in TERMS}
    try:
        wanted = float(eval(text, {"__builtins__": {}, "max": max, "min": min}, dict(of)))
    except ZeroDivisionError:
        wanted = float("inf")
    found = objective(text)
    assert found.value(of) == pytest.approx(wanted)
    if found.rising:  # then nothing falls where a term grows
        for t in TERMS:
            assert found.value({**of, t: of[t] + 1}) >= found.value(of) - 1e-12


@pytest.mark.parametrize(
    "text",
    ["", "seconds +", "secs", "__import__('os')", "seconds.real", "devices**9", "seconds if devices else 1", "'a'", "True",
     "max()", "max(*seconds)", "[seconds]", "1e999", "seconds\x00", "(" * 200 + "1" + ")" * 200, "1+" * 300 + "1", "lambda: 1"],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(TapestryError):
        objective(text)


@pytest.mark.parametrize("text", ["seconds", "seconds<1", "hours<=1", "energy<=-1", "energy<=nan", "bytes<=lots"])
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(TapestryError):
        limits([text])


def test_terms_are_of_all_devices_for_all_of_the_time(model):
    topo = topology(parse_mesh("3"), str(model.parent / "priced.json"))
    assert terms(topo, 2.0, 10) == {"seconds": 2.0, "devices": 3.0, "bytes": 10.0, "energy": 1800.0, "money": 7.5 * 2 / 3600}
    assert from_data(json.loads(json.dumps(to_data(topo)))) == topo


@pytest.mark.parametrize("text", ["seconds", "seconds + 5e-6*devices", "energy", "max(seconds, 2e-5*devices)"])
def test_the_number_of_devices_is_the_best_of_all(model, text):
    """Against a compilation for every number of devices."""
    found = compiled(model, max_devices=4, objective=text)
    m = found.report["machines"]
    every = [compiled(model, devices=n, objective=text).report["machines"]["value"] for n in (1, 2, 3, 4)]
    assert m["value"] == pytest.approx(min(every))
    assert every[m["terms"]["devices"] - 1] == pytest.approx(min(every)) and m["terms"]["devices"] == found.build.plan.devices
    assert m["least"] is None or m["least"] <= m["value"]
    assert len(m["tried"]) + len(m["skipped"]) == 4
    for r in m["front"]:
        others = [s for s in m["tried"] if s is not r]
        assert not any(all(s[k] <= r[k] for k in TERMS) and any(s[k] < r[k] for k in TERMS) for s in others)
    found.verify()


def test_limits_are_kept_and_said(model):
    free = compiled(model, max_devices=4).report["machines"]
    few = compiled(model, max_devices=4, limits=["devices<=2"]).report["machines"]
    assert free["terms"]["devices"] > 2 and few["terms"]["devices"] == 2 and few["limits"] == ["devices<=2"]
    with pytest.raises(TapestryError, match="no plan keeps energy<=1e-09"):
        compiled(model, max_devices=4, limits=["energy<=1e-9"])
    small = compiled(model, devices=2, limits=["bytes<=24KB"], objective="seconds")
    assert max(small.report["peak_bytes"]) <= 24_000


@pytest.mark.parametrize("limit", ["bytes<=1MiB", "seconds<=0.12345678"])
def test_a_limit_is_written_as_it_is_read(model, limit):
    """In full: six digits of a number of bytes are no number of bytes."""
    assert limits([str(x) for x in limits([limit])]) == limits([limit])
    compiled(model, devices=2, limits=limit).verify()


def test_an_objective_without_a_value_is_refused(model):
    for text in ("seconds/0", "1e300*1e300*seconds"):
        with pytest.raises(TapestryError, match="no finite value"):
            compiled(model, max_devices=2, objective=text)
    found = compiled(model, max_devices=2, objective="seconds/(devices-1)")
    assert found.report["machines"]["terms"]["devices"] == 2 and "no value" in found.explain()
    found.verify()
    never_rules_out = compiled(model, max_devices=2, objective="min(1e300*1e300*bytes, seconds)").report["machines"]
    assert never_rules_out["least"] is None and len(never_rules_out["tried"]) >= 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.clear(),
        lambda m: m.update(value=None),
        lambda m: m.update(objective=5),
        lambda m: m.update(limits="x"),
        lambda m: m.update(max_devices=0),
        lambda m: m.update(least=2 * m["value"]),
        lambda m: m["tried"][0].update(value=0.0),
    ],
)
def test_a_report_is_held_to_its_own_objective(model, change):
    found = compiled(model, max_devices=2, objective="seconds + 1e-3*devices")
    report = json.loads(json.dumps(found.report))
    change(report["machines"])
    with pytest.raises(LawError, match="machines"):
        build_report.check_report(replace(found.build, report=report))


@pytest.mark.slow
def test_bytes_in_an_objective_move_along_the_front(model):
    fast, small = (compiled(model, devices=4, objective=o).report["machines"] for o in ("seconds", "bytes"))
    assert small["terms"]["bytes"] <= fast["terms"]["bytes"] and len(small["tried"]) <= 2


def test_energy_needs_watts_and_a_report_is_held_to_the_plan(model):
    with pytest.raises(TapestryError, match="nothing is known of energy"):
        tapestry.compile(model, topology="cpu", max_devices=2, objective="energy")
    found = compiled(model, max_devices=2, objective="seconds + devices")
    report = json.loads(json.dumps(found.report))
    report["machines"]["terms"]["energy"] *= 2
    with pytest.raises(LawError, match="machines"):
        build_report.check_report(replace(found.build, report=report))


def test_on_the_command_line(model, tmp_path):
    args = ["compile", model, "-o", tmp_path / "b", "--topology", model.parent / "priced.json", "--max-devices", "3"]
    status, out, err = run(*args, "--objective", "seconds + 1*devices")
    assert status == 0 and "seconds + 1*devices = 1" in out, err
    assert "devices 1" in run("explain", tmp_path / "b")[1]
    assert run(*args, "--devices", "2")[0] == 2
