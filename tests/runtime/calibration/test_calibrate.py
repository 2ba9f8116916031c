"""Calibration: the fit finds the model behind measurements and says how far off it is; real processes; traces; the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import tapestry
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.errors import TapestryError
from tapestry.ir.collective_calls import CALLS
from tapestry.plan.cost.kernel_class import kernel_class
from tapestry.plan.topology import from_data, parse_mesh, topology
from tapestry.plan.topology.measured_costs import CLASSES
from tapestry.runtime.calibration import automatic, rounds, start
from tapestry.runtime.calibration import document as document_module
from tapestry.runtime.calibration.call_clock import CallPoint
from tapestry.runtime.calibration.document import document, write
from tapestry.runtime.calibration.kernel_clock import KernelClock
from tapestry.runtime.calibration.measure import Measurements, Task
from tapestry.runtime.calibration.probes import probes
from tapestry.runtime.calibration.rate_fit import KernelPoint, fit_kernels, fit_table, rising
from tests.support.command_line import run
from tests.support.small_models import save

LAUNCH, RATE, BANDWIDTH = 2e-5, 5e10, 8e9
SIZES = [(w, n) for w, n in product((1e4, 1e6, 1e8), (1e3, 1e5, 1e7)) if w * n < 1e15]


def seconds(work: float, nbytes: float) -> float:
    return LAUNCH + work / RATE + nbytes / BANDWIDTH


def points(kind: str, law=seconds) -> list[KernelPoint]:
    """Measurements of a synthetic clock."""
    return [KernelPoint(kind, w, 0.0, n, law(w, n)) for w, n in SIZES]


def test_the_model_behind_the_measurements_is_found():
    rates, how = fit_kernels(points("row"))
    assert (rates.launch, rates.rate, rates.bandwidth) == pytest.approx((LAUNCH, RATE, BANDWIDTH), rel=1e-6)
    assert how["points"] == len(SIZES) and how["held_back"] == 2 and how["worst_error"] < 1e-6


def test_noise_moves_the_fit_little_and_is_said():
    rng = np.random.default_rng(3)
    law = lambda w, n: seconds(w, n) * float(np.exp(rng.normal(0, 0.05)))  # noqa: E731
    many = [p for _ in range(12) for p in points("row", law)]
    rates, how = fit_kernels(many)
    assert (rates.launch, rates.rate, rates.bandwidth) == pytest.approx((LAUNCH, RATE, BANDWIDTH), rel=0.1)
    assert 0.01 < how["median_error"] < 0.1


def test_another_law_is_a_large_error():
    """Time that grows with the square of the work is no launch, rate and bandwidth: what was kept back shows it."""
    _, how = fit_kernels([KernelPoint("row", w, 0.0, 8.0, 1e-6 + 1e-14 * w**2) for w in np.geomspace(1e2, 1e8, 13)])
    assert how["worst_error"] > 1.0


def test_nothing_is_negative_and_what_costs_nothing_is_fast():
    rates, how = fit_kernels([KernelPoint("map", 0.0, 0.0, n, 1e-5 + n / 1e9) for n in np.geomspace(8, 1e8, 9)])
    assert rates.launch == pytest.approx(1e-5) and rates.bandwidth == pytest.approx(1e9) and rates.rate >= 1e15
    assert how["worst_error"] < 1e-6


def test_times_by_bytes_do_not_fall_and_predict_what_was_kept_back():
    assert rising([(8, 4.0), (16, 1.0), (32, 5.0)]) == [
        (8, pytest.approx(2.0)),
        (16, pytest.approx(2.0)),
        (32, pytest.approx(5.0)),
    ]
    line = [(n, 1e-4 + n * 1e-9) for n in (8, 1024, 8192, 65536, 1 << 20, 1 << 23)]
    at = lambda kept, n: float(np.interp(n, *zip(*kept, strict=True)))  # noqa: E731
    assert fit_table(line, at)[1]["worst_error"] < 1e-6
    steps = [(n, 1e-4 if n < 5000 else 1e-2) for n, _ in line]
    assert fit_table(steps, at)[1]["worst_error"] > 1.0


def measured(processes: int = 4) -> Measurements:
    """What a synthetic machine says, where four processes share two cores: alone it is twice as fast."""
    kinds = [p for kind in CLASSES for p in points(kind)]
    calls = [CallPoint(c, g, 1, n, 1e-4 * g + n * 1e-9) for c in CALLS for g in (2, 4) for n in (8, 4096, 65536, 1 << 20)]
    dtypes = [KernelPoint("contraction", 1e9, 0.0, 1e6, s, t) for t, s in (("f32", 1e-2), ("f64", 2e-2))]
    alone = [KernelPoint(p.kind, p.work, 0.0, p.nbytes, p.seconds / 2) for p in kinds]
    task = Task(processes=processes, here=processes, threads=1, seconds=1.0)
    return Measurements(task=task, memory=1 << 34, kernels=kinds, alone=alone, dtypes=dtypes, calls=calls, hidden=0.2)


def test_a_document_is_a_topology(tmp_path: Path):
    made = document(measured(), {"cpu": "synthetic"})
    write(tmp_path / "here.json", made)
    topo = topology(parse_mesh("2x2"), str(tmp_path / "here.json"))
    assert not topo.overlap and topo.device.memory == 1 << 32 and topo.alone and topo.alone.memory == 1 << 34
    for kind in CLASSES:
        found, alone = topo.device.classes[kind], topo.alone.classes[kind]
        assert (found.launch, found.rate) == pytest.approx((LAUNCH, RATE), rel=1e-6)
        assert (alone.launch, alone.rate) == pytest.approx((LAUNCH / 2, 2 * RATE), rel=1e-6)
    assert topo.device.rate("f64") == pytest.approx(topo.device.rate("f32") / 2)
    for call in CALLS:
        assert topo.call_seconds(call, 4, 65536) == pytest.approx(4e-4 + 65536e-9, rel=1e-3)
    assert topo.links[0].alpha == pytest.approx(2e-4, rel=1e-3) and topo.links[0].beta == pytest.approx(1e-9, rel=1e-3)
    assert {"map", "contraction alone", "all_reduce of 4"} <= set(made["fit"])
    assert all(row["worst_error"] < 1e-3 for row in made["fit"].values())


def test_rates_beside_others_are_those_alone_by_how_much_slower_the_same_kernels_were(tmp_path: Path):
    """One kernel in four was held up for long: the others say how much slower a class is, and its rates stay in proportion."""
    found = measured()
    waited = [replace(p, seconds=p.seconds * (7 if k % 4 == 0 else 1)) for k, p in enumerate(found.kernels)]
    made = document(replace(found, kernels=waited), {})
    for kind in CLASSES:
        beside, alone = made["device"]["classes"][kind], made["alone"]["classes"][kind]
        assert beside["launch"] / alone["launch"] == pytest.approx(2)
        assert alone["rate"] / beside["rate"] == pytest.approx(2) == alone["bandwidth"] / beside["bandwidth"]
    assert made["alone"]["vector"] / made["device"]["vector"] == pytest.approx(2)


def test_nonsense_is_not_written(tmp_path: Path):
    nonsense = {"device": {"memory": 1, "bandwidth": 0, "flops": {"other": 1.0}}, "levels": [{"alpha": 0, "beta": 0}]}
    with pytest.raises(TapestryError, match="rates must be positive"):
        write(tmp_path / "bad.json", nonsense)
    assert list(tmp_path.iterdir()) == []


def test_probes_are_of_the_classes_that_they_say():
    found = list(probes())
    assert {p.kind for p in found} == set(CLASSES)
    assert [kernel_class(p.graph.ops[0]) for p in found] == [p.kind for p in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CLASSES)
def test_a_probe_runs_on_the_targets_own_kernels(kind: str):
    """The smallest of each class: what it computes is counted as the cost model counts it, and its weights are its own."""
    clock = KernelClock(next(p for p in probes() if p.kind == kind), TorchCpu())
    point = clock.point(clock.seconds(0.0005))
    assert point.seconds > 0 and point.nbytes > 0 and point.work > 0
    if kind == "contraction":
        assert point.work == 2 * 64 * 64 and point.nbytes == 4 * (64 + 64 + 64 * 64)
        assert len(clock.launches) > 1  # as many as are beyond a core's cache


FEW = """
import sys
from tapestry import flags
flags.before_torch()
from tapestry.cli import main
from tapestry.runtime.calibration import call_clock, measure
every = list(call_clock.probes())
measure.few_probes = lambda: (p for k in sorted({p.kind for p in every}) for p in [q for q in every if q.kind == k][:2])
measure.SIZES = (8, 4096, 65536, 1 << 20)
sys.exit(main(sys.argv[1:]))
"""


def document_of(*argv: str | Path) -> dict:
    """The document of a command with few things to measure; in a process of its own, because it forks."""
    command = [sys.executable, "-c", FEW, *map(str, argv), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_processes_measure_together(tmp_path: Path):
    """Two real processes, in as little time as that takes: every class, every call, and what one of them does alone."""
    out = tmp_path / "two.json"
    made = document_of("calibrate", "-o", out, "--processes", "2", "--threads", "1", "--seconds", "0.3")
    assert made == json.loads(out.read_text()) and made["measured"]["processes"] == 2
    topo = topology(parse_mesh("2"), str(out))
    assert set(topo.device.classes) == set(CLASSES) and topo.alone and set(topo.alone.classes) == set(CLASSES)
    assert {c.call for c in topo.calls} == set(CALLS) and {c.group for c in topo.calls} == {2}
    assert 1e-7 < topo.call_seconds("all_reduce", 2, 8) < 1 and 1e8 < topo.device.rate("f32") < 1e14


@pytest.mark.slow
def test_calls_alone_are_measured_for_a_device_that_is_given(tmp_path: Path):
    made = document_of("calibrate", "-o", tmp_path / "h.json", "--processes", "2", "--seconds", "0.2", "--device", "h100")
    topo, preset = topology(parse_mesh("2"), str(tmp_path / "h.json")), topology(parse_mesh("2"), "h100")
    assert topo.device == preset.device and topo.alone is None and topo.overlap
    assert {c.call for c in topo.calls} == set(CALLS) and not made["measured"]["kernels"]


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first to ask measures; what was kept is used again, by other numbers of devices that are as many processes too."""
    asked: list[int] = []

    def measure(path: Path, processes: int) -> None:
        asked.append(processes)
        write(path, document(measured(processes), {}))

    monkeypatch.setattr(automatic, "_measure", measure)
    monkeypatch.setenv("TAPESTRY_CACHE", str(tmp_path))
    assert automatic.automatic(2) == "cpu" and not asked  # the tests' own environment says so
    monkeypatch.delenv("TAPESTRY_TOPOLOGY")
    first, most = automatic.automatic(2), 2 * (os.cpu_count() or 1)
    before = Path(first).read_bytes()
    assert automatic.automatic(2) == first and Path(first).read_bytes() == before and len(asked) == 1
    many = automatic.automatic(most)
    assert automatic.automatic(most + 1) == many and len(asked) == (1 if many == first else 2)
    topology(parse_mesh("2"), first)


@pytest.mark.slow
def test_a_plan_says_of_which_machine_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The default topology of a compilation is the measured one; equal measurements give equal plans."""
    monkeypatch.delenv("TAPESTRY_TOPOLOGY")
    monkeypatch.setenv("TAPESTRY_CACHE", str(tmp_path))
    monkeypatch.setattr(automatic, "_measure", lambda path, processes: write(path, document(measured(processes), {})))
    first, again = (tapestry.compile(save("mlp"), devices=2) for _ in range(2))
    assert first.report["topology"] == {"name": "auto", "measured": True, "figures": {}}
    assert first.build.topology == again.build.topology and first.build.moves == again.build.moves
    assert from_data(first.build.topology).device.classes
    fixed = tapestry.compile(save("mlp"), devices=2, topology="cpu")
    assert fixed.report["topology"] == {"name": "cpu", "measured": False, "figures": {}}


def test_what_cannot_be_measured_is_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TAPESTRY_TOPOLOGY")
    monkeypatch.setenv("TAPESTRY_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("not a folder")
    assert automatic.automatic(2) == "cpu"
    monkeypatch.setenv("TAPESTRY_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "false")
    assert automatic.automatic(2) == "cpu"


DAY = 86400.0


class Machine:
    """An invented machine: how much slower each round is than the first, how long a round takes, what others take of the cores."""

    def __init__(self, slower: list[float], seconds: float = 5.0, others: float = 0.0) -> None:
        self.slower, self.seconds, self.share, self.now, self.done = slower, seconds, others, 1e9, 0

    def round(self) -> dict[str, object]:
        by = self.slower[self.done]
        self.done, self.now = self.done + 1, self.now + self.seconds
        m = measured(2)
        return document(replace(m, kernels=[replace(p, seconds=by * p.seconds) for p in m.kernels]), {})

    def others(self) -> float:
        return self.share * self.now * (os.cpu_count() or 1)

    def agreed(self, monkeypatch: pytest.MonkeyPatch, most: int = document_module.ROUNDS) -> dict[str, object]:
        monkeypatch.setattr(rounds.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(rounds, "others", self.others)
        found = rounds.agreed(self.round, most)
        monkeypatch.undo()
        return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("slower", "taken", "agreement"),
    [
        ([1.0, 1.06], 2, 0.06),  # two rounds that agree are enough
        ([1.0, 2.0, 2.1], 3, 0.05),  # the first one was disturbed
        ([1.0, 2.0, 4.0, 1.3], 4, 0.3),  # none agree: the best there was
    ],
)
def test_a_machine_is_measured_until_two_rounds_agree(slower, taken, agreement, monkeypatch: pytest.MonkeyPatch):
    machine = Machine(slower)
    found = machine.agreed(monkeypatch)
    assert machine.done == taken == found["measured"]["rounds"]
    assert found["measured"]["agreement"] == pytest.approx(agreement) and found["margin"] >= min(agreement, 0.25) - 1e-9
    assert found["measured"]["others"] == 0.0


@pytest.mark.slow
def test_of_two_rounds_that_agree_the_faster_one_is_kept(monkeypatch: pytest.MonkeyPatch):
    found = Machine([3.0, 1.05, 1.0]).agreed(monkeypatch)
    assert found["measured"]["kernels"] == document(measured(2), {})["measured"]["kernels"]


def test_a_slow_machine_is_measured_in_one_round_and_says_so(monkeypatch: pytest.MonkeyPatch):
    machine = Machine([1.0, 1.0], seconds=48.0)
    found = machine.agreed(monkeypatch)
    assert machine.done == 1 and found["measured"]["agreement"] is None


def test_other_work_during_the_measurement_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "t.json", Machine([1.0, 1.0], others=0.4).agreed(monkeypatch))
    figures = topology(parse_mesh("2"), str(tmp_path / "t.json")).figures
    assert figures["others"] == pytest.approx(0.4) and figures["agreement"] == pytest.approx(0.0)


def test_work_of_others_is_that_of_the_cores_less_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "stat").write_text("cpu  1000 200 300 50000 7000 10 20 30 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    monkeypatch.setattr(rounds, "Path", lambda _: tmp_path / "stat")
    monkeypatch.setattr(os, "times", lambda: (1.0, 0.5, 2.0, 0.25, 99.0))
    assert rounds.others() == pytest.approx(1560 / os.sysconf("SC_CLK_TCK") - 3.75)


def kept(path: Path, **said: object) -> Path:
    """A measured file as `automatic` leaves it, made two days ago."""
    made = document(measured(2), {})
    sure = {"when": time.time() - 2 * DAY, "rounds": 2, "agreement": 0.06, "others": 0.0, **said}
    write(path, {**made, "measured": {**made["measured"], **sure}})
    os.utime(path, (time.time() - 2 * DAY,) * 2)
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("said", "load", "again"),
    [
        ({}, 0.0, False),  # sure figures stay
        ({"others": 0.4}, 0.0, True),
        ({"others": 0.4}, 99.0, False),  # still busy
        ({"agreement": 0.5}, 0.0, True),
        ({"agreement": None, "rounds": 1}, 0.0, True),
    ],
)
def test_figures_made_under_load_are_made_again_when_the_load_is_gone(
    said, load, again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TAPESTRY_CACHE", str(tmp_path))
    monkeypatch.delenv("TAPESTRY_TOPOLOGY")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    asked: list[int] = []
    monkeypatch.setattr(automatic, "_measure", lambda path, processes: asked.append(processes))
    path = kept(automatic.place(2)[0], **said)
    assert automatic.automatic(2) == str(path)
    assert automatic.automatic(2) == str(path) and len(asked) == int(again)  # not twice at once


@pytest.mark.slow
def test_compile_and_explain_say_how_old_and_how_sure_the_figures_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TAPESTRY_CACHE", str(tmp_path))
    monkeypatch.delenv("TAPESTRY_TOPOLOGY")
    kept(automatic.place(2)[0])
    for command in (["compile", save("mlp"), "-o", tmp_path / "b", "--devices", "2"], ["explain", tmp_path / "b"]):
        said = run(*command)[1].splitlines()
        assert any(line.rstrip().endswith("measured 2 days ago, two rounds within 6%") for line in said)
    kept(automatic.place(2)[0], others=0.4, agreement=0.3)
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0,) * 3)
    said = " ".join(run("compile", save("mlp"), "-o", tmp_path / "b", "--devices", "2")[1].split())
    assert "within 30%, while other work took 40% of the cores; again: tapestry calibrate --auto --processes 2" in said
    assert "measured" not in run("compile", save("mlp"), "-o", tmp_path / "b", "--devices", "2", "--topology", "cpu")[1]


def test_the_command_measures_again_what_auto_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TAPESTRY_CACHE", str(tmp_path))
    machine = Machine([1.0, 1.0])
    monkeypatch.setattr(start, "calibrate", lambda make, processes, threads, **how: machine.round())
    assert run("calibrate", "--auto", "--processes", "2")[0] == 0
    monkeypatch.delenv("TAPESTRY_TOPOLOGY")
    path = Path(automatic.automatic(2))
    assert machine.done == 2 and json.loads(path.read_text())["measured"]["rounds"] == 2
    assert run("calibrate", "--auto", "--device", "h100")[0] == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("said", [{"when": "x", "others": 1}, {"when": -1, "others": 1}, {"when": float("nan"), "others": 0}])
def test_figures_that_cannot_be_are_refused(said, tmp_path: Path):
    (tmp_path / "t.json").write_text(json.dumps({**document(measured(2), {}), "measured": said}))
    with pytest.raises(TapestryError, match="not a topology"):
        topology(parse_mesh("2"), str(tmp_path / "t.json"))
