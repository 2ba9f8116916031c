"""Settings of all tests: hypothesis' profile, torch's threads, and the cases that `make test` leaves to `make test-all`."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import settings

from tests.support.sampling import sample

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

os.environ["TAPESTRY_TOPOLOGY"] = "cpu"  # what this machine measures is no test's business
os.environ["TAPESTRY_STRICT"] = "1"  # a rule that proposes what its proof refuses is our mistake
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's products here are small, and there is a test on every core
settings.register_profile("all", deadline=None)  # a first call pays for imports
settings.register_profile("quick", deadline=None, max_examples=20)

FAMILIES = (
    ("test_conformance", "test_special_values"),  # all cases of onnx's suite are made once
    ("test_author_names", "test_doors", "test_repeated_layers", "test_layouts", "test_torch_ranks"),  # torch.onnx starts once
)
"""Files that share what takes long to begin with."""

LONG = ("test_docs", "test_distributed", "test_loading", *(names[0] for names in FAMILIES))
"""Files and families that take long with few cases: they begin first, so that no worker waits for them at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries fewer examples of each property."""
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "all")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the cases that `sampled` leaves out of `make test`."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        (count,) = cases[0].get_closest_marker("sampled").args
        chosen = sample([c.nodeid for c in cases], count)
        for case in cases:
            if case.nodeid not in chosen:
                case.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What imports and collection made stays to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What is frozen as Python ends is never freed, and triton's binding would report it as leaked."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Give the files of a family to one worker, and every other file to one worker: what its cases share is made once."""
    from xdist.scheduler import LoadScopeScheduling

    if config.getoption("dist") != "load":
        return None  # somebody asked for another way
    family = {file: names[0] for names in FAMILIES for file in names}

    class ByFamily(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, *_ = nodeid.split("::", maxsplit=1)
            return family.get(Path(file).stem, file)

        def _assign_work_unit(self, node: WorkerController) -> None:
            first = next((scope for scope in self.workqueue if Path(scope).stem in LONG), None)
            if first:
                self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return ByFamily(config, log)


def _set(n: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def c_compiler() -> None:
    """Tests of our kernels in C are left out where they cannot be compiled; the library is made when the first of them runs."""
    from tapestry.codegen.torch_cpu import native

    if native.library() is None:
        pytest.skip("there is no C compiler")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What our own kernels want."""
    yield from _set(1)


def share_everything(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Have so many threads share every kernel in C."""
    from tapestry.codegen.torch_cpu.c.c_calls import CCall
    from tapestry.codegen.torch_cpu.c.thread_parts import Work
    from tapestry.system import cores

    estimated = cast(property, CCall.in_all).fget
    assert estimated
    monkeypatch.setattr(CCall, "in_all", property(lambda c: Work(estimated(c).units, 1e9)))
    monkeypatch.setattr(cores, "usable", lambda: (count, ""))


@pytest.fixture(params=[1, 5])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread; or several, which share every kernel in C, however little it does."""
    if request.param > 1:
        share_everything(monkeypatch, request.param)
    yield from _set(request.param)
