"""The cache of measured choices: what is read back is what was written, and anything else is ignored with a warning."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

import tapestry
from tapestry import api
from tapestry.cli import entry
from tapestry.codegen import kernel_sources
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import kernel_key
from tapestry.codegen.triton.run import tuned
from tapestry.codegen.triton.run.device_target import TritonTarget
from tapestry.codegen.triton.run.tune import Trial, choose
from tapestry.codegen.triton.run.tuned import Cache, Choice, config_from, digest, local_cache
from tapestry.codegen.triton.task.chips import CHIPS
from tapestry.compiler import passes
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import BuildError, TapestryError
from tapestry.plan.topology.presets import GPUS
from tests.support.small_models import save

CHOICE = Choice(config=KernelConfig(bm=32, bn=128, num_warps=8), library=True)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    found = Cache(tmp_path / "tune", "NVIDIA H200", "3.9.0")
    found.write("key", CHOICE, {"seconds": 1e-4})
    return found


def test_an_entry_comes_back(cache: Cache) -> None:
    assert cache.read("key") == CHOICE
    cache.write("key", Choice(), {})
    assert cache.read("key") == Choice()
    assert [p.suffix for p in cache.folder.iterdir()] == [".json"]  # nothing half-written is left


def test_entries_are_of_one_kernel_device_and_version(cache: Cache) -> None:
    assert cache.read("other") is None
    assert replace(cache, device="NVIDIA H100").read("key") is None
    assert replace(cache, version="3.6.0").read("key") is None


def rewritten(path: Path, **changes: object) -> str:
    """An entry with other content and a right hash."""
    body = json.loads(path.read_text()) | changes
    del body["sha256"]
    return json.dumps({**body, "sha256": digest(body)})


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: "", lambda p: "[]", lambda p: "{", lambda p: "null", lambda p: "{}", lambda p: "[" * 100_000,
        lambda p: p.read_text()[:-9], lambda p: p.read_text().replace("128", "256"),
        lambda p: rewritten(p, device="NVIDIA H100"), lambda p: rewritten(p, key="another"), lambda p: rewritten(p, format=0),
        lambda p: rewritten(p, knobs={"bm": 0}), lambda p: rewritten(p, knobs={"bm": 1 << 30}), lambda p: rewritten(p, knobs={"bm": "32"}),
        lambda p: rewritten(p, knobs={"speed": 1}), lambda p: rewritten(p, knobs=[3]), lambda p: rewritten(p, knobs={"bm": True}),
    ],
)  # fmt: skip
def test_damaged_entries_are_ignored_with_a_warning(cache: Cache, damage, caplog: pytest.LogCaptureFixture) -> None:
    path = cache.path("key")
    path.write_text(damage(path))
    with caplog.at_level(logging.WARNING, "tapestry"):
        assert cache.read("key") is None
    assert "is ignored" in caplog.text and str(path) in caplog.text
    cache.write("key", CHOICE, {})
    assert cache.read("key") == CHOICE


def test_bytes_that_are_no_text(cache: Cache) -> None:
    cache.path("key").write_bytes(b"\xff\xfe\x00")
    assert cache.read("key") is None


def test_a_folder_in_the_place_of_an_entry(cache: Cache) -> None:
    cache.path("other").mkdir()
    assert cache.read("other") is None


def test_the_interpreter_has_no_cache(tmp_path: Path) -> None:
    assert local_cache(tmp_path, torch.device("cpu")) is None


def test_knobs_from_data() -> None:
    assert config_from({"bm": 32, "num_stages": 2}) == KernelConfig(bm=32, num_stages=2)


def test_a_build_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled where there is a GPU that was tuned on: its knobs are in the plan, and its kernels are generated with them."""
    plain = api.compile(save("mlp"), target="triton:sm90", time_limit=1)
    assert plain.build.knobs == {}
    cache = Cache(tmp_path / "tune", "NVIDIA H200", "3.9.0")
    graph, program = plain.build.plan.graph, plain.build.program
    (name, (first, made)), *_ = kernel_sources.named_kernels(graph, program).items()
    changed = replace(made.config, num_warps=16, num_stages=5)
    cache.write(cache.key(graph, first), Choice(config=changed), {})
    monkeypatch.setattr(passes, "cache_of_target", lambda folder, target, precision: cache)
    found = api.compile(save("mlp"), target="triton:sm90", time_limit=1)
    assert list(found.build.knobs) == [kernel_key(graph, first)]
    assert next(iter(plain.kernels)) == name
    assert kernel_sources.named_kernels(graph, program, knobs=found.build.knobs)[name][1].config == changed
    found.save(tmp_path / "b")
    build, _, _ = verify_build(tmp_path / "b")
    assert build.knobs == found.build.knobs
    broken = {k: {"bm": -1} for k in build.knobs}
    with pytest.raises(BuildError, match="knob bm"):
        kernel_sources.triton_sources(graph, program, knobs=broken)


def test_without_a_gpu_nothing_is_looked_up(tmp_path: Path) -> None:
    assert tuned.cache_of_target(tmp_path, "triton:sm90", "ieee") is None
    (tmp_path / "tune").mkdir()
    if not torch.cuda.is_available():
        assert tuned.cache_of_target(tmp_path, "triton:sm90", "ieee") is None


WRONG = "wrong: output 0 is off by 2 of 1"


def trials(*said: float | str) -> list[Trial]:
    """The default, then other candidates: their times, or why they are refused."""
    return [
        Trial(
            config=KernelConfig(bm=16 << k), seconds=None if isinstance(s, str) else s, refused=s if isinstance(s, str) else ""
        )
        for k, s in enumerate(said)
    ]


@pytest.mark.parametrize(
    ("said", "reported", "refused"),
    [
        ((WRONG, WRONG), WRONG, True), ((WRONG, 1e-3), WRONG, False), ((1e-3, WRONG), "", False),
        (("does not compile: x", WRONG), WRONG, True), (("does not compile: x", 1e-3), "", False),
    ],
)  # fmt: skip
def test_wrong_values_are_not_kept_quiet(cache: Cache, said, reported: str, refused: bool) -> None:
    choice, numbers = choose(trials(*said))
    assert numbers["wrong"] == reported and bool(choice.wrong) == refused
    cache.write("key", choice, numbers)
    assert cache.read("key") == choice


def test_a_kernel_that_was_found_wrong_is_not_run() -> None:
    found = api.compile(save("mlp"), target="triton:sm90", time_limit=1)
    graph = found.build.plan.graph
    kernel, _ = next(iter(kernel_sources.distinct_kernels(graph, found.build.program).values()))
    target = TritonTarget(tuned=lambda graph, kernel: Choice(wrong=WRONG))
    with pytest.raises(TapestryError, match=r"(?s)computed wrong values.*off by 2"):
        target.kernel(graph, kernel)


def test_tune_fails_where_a_kernel_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = {"kernel": "y", "launches": 1, "default_seconds": None, "seconds": None, "library_seconds": None, "tried": 1}
    said = {
        "device": "H100",
        "triton": "3.6",
        "cache": "",
        "kernels": [{**row, "refused": [], "wrong": WRONG}],
        "passed": False,
    }
    monkeypatch.setattr(api, "tune", lambda *_, **__: said)
    assert entry.main(["tune", str(tmp_path)]) == 1
    assert "off by 2" in " ".join(capsys.readouterr().out.split())


def test_a_check_runs_as_often_as_the_executor_has_ways() -> None:
    """On a GPU the third run only replays what the second one captured."""
    found = api.compile(save("mlp"), time_limit=1)
    session, feeds, runs = found.session, found.random_feeds(), list[int]()
    session.executor.ways, run = 3, session.compute

    def third_is_off(feeds, progress=lambda done, total: None):
        runs.append(len(runs))
        result = run(feeds, progress)
        return replace(result, outputs={n: a + (len(runs) == 3) for n, a in result.outputs.items()})

    session.compute = third_is_off
    _, document = api.run_checked(found, feeds, check=True)
    assert not document["passed"] and "run 3 gave other bits" in document["reason"] and len(runs) == 3
    _, document = api.run_checked(found, feeds, check=False)
    assert document["passed"] and len(runs) == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("target", "here", "card"),
    [("triton:sm90", "", "h100"), ("triton:sm90", "NVIDIA H200", "h200"), ("triton", "NVIDIA H100 PCIe", "h100"),
     ("triton:sm100", "NVIDIA H200", "b200"), ("triton:sm80", "", "a100-pcie"), ("triton:gfx942", "", "mi300x")],
)  # fmt: skip
def test_kernels_of_a_gpu_are_planned_for_its_card(target: str, here: str, card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(here))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: here)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert tuned.card_of(target) == card
    if here and tuned.chip_name(torch.device("cuda")) == tuned.plain(target):
        monkeypatch.setitem(CHIPS, "sm90", CHIPS["sm90"])
        TritonTarget(torch.device("cuda"))
        assert CHIPS["sm90"].card == GPUS[card]
    if not here:
        assert api.compile(save("mlp"), target=target, time_limit=1).build.topology["name"] == card


def test_a_version_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    there = tapestry.__version__
    monkeypatch.setattr(metadata, "version", missing)
    assert tapestry.__version__ == there
