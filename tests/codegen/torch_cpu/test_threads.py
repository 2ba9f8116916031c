"""Threads that share a run's kernels: the same bits as one thread, forks, callers at the same time, and no data race."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from tapestry import api
from tapestry.codegen.torch_cpu import native
from tapestry.system import cores
from tests.conftest import share_everything
from tests.support import small_models

pytestmark = pytest.mark.usefixtures("c_compiler")


def outputs(model: onnx.ModelProto, threads: int) -> dict[str, np.ndarray]:
    """What a model gives on so many threads, all kernels cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = api.compile(model, mesh="1")
        return {t: np.asarray(a) for t, a in made.run(made.random_feeds(3)).items()}
    finally:
        torch.set_num_threads(before)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", small_models.MODELS)
def test_the_bits_are_those_of_one_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    share_everything(monkeypatch, 7)
    model = small_models.MODELS[name]()
    one, many = outputs(model, 1), outputs(model, 7)
    for t, a in one.items():
        np.testing.assert_array_equal(many[t], a)


@pytest.mark.usefixtures("threads")
def test_callers_at_the_same_time_and_forks() -> None:
    model = small_models.MODELS["conv_chain"]()
    made, *others = (api.compile(model, mesh="1") for _ in range(5))
    feeds = made.random_feeds(0)
    want = {t: np.asarray(a) for t, a in made.run(feeds).items()}

    def same(compiled: api.Compiled) -> bool:
        return all(np.array_equal(np.asarray(a), want[t]) for _ in range(20) for t, a in compiled.run(feeds).items())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, others))
    child = os.fork()  # the child's threads are its own: those of the parent are not there
    if not child:
        os._exit(0 if same(made) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same(made)


def test_a_quota_of_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the process's group and those around it, rounded up; nothing said is no limit."""
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(cores, "_folders", lambda: [tmp_path / "outer" / "inner", tmp_path / "outer", tmp_path])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    usable = cores.usable.__wrapped__
    assert usable()[0] == 64
    (tmp_path / "outer" / "cpu.max").write_text("350000 100000\n")
    (tmp_path / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    assert usable() == (4, "the control group has 3.5 cores' worth of time")
    (tmp_path / "cpu.cfs_quota_us").write_text("50000")
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    assert usable()[0] == 1


DRIVER = """
#include "run.c"
static _Atomic int64_t done[4096];
static int64_t plain[64];
static void step(const void *sizes, const void *buffers, int64_t part, int64_t parts) {
    (void)buffers;
    int64_t i = (int64_t)(intptr_t)sizes;
    Range own = share(64, part, parts);
    for (int64_t k = own.begin; k < own.end; k++) plain[k] = plain[k] * 31 + i;
    done[i]++;
}
int main(void) {
    enum { STEPS = 300, RUNS = 200 };
    static Step steps[STEPS];
    for (int64_t i = 0; i < STEPS; i++)
        steps[i] = (Step){step, (void *)(intptr_t)i, 0, 1 + i % 16, i % 7 * 20000, i % 2 ? TIMED : 0};
    for (int r = 0; r < RUNS; r++) {
        tapestry_run(steps, STEPS, 1 + r % 5);
        for (int64_t i = 0; i < STEPS; i++) {
            const Step *s = steps + i;
            if (done[i] != (r % 5 ? s->parts : 1)) return 1; /* small steps are the caller's, and so are all for a time */
            if (i % 2 && r % 5 && s->parts != parts_of(s, 1 + r % 5)) return 3;
            if (s->parts > s->units || (s->parts > 1 && (s->nanoseconds < ALONE || s->timed < TIMED))) return 4;
            done[i] = 0;
        }
    }
    int64_t want = 0;
    for (int r = 0; r < RUNS; r++)
        for (int64_t i = 0; i < STEPS; i++) want = want * 31 + i;
    for (int k = 0; k < 64; k++)
        if (plain[k] != want) return 2;
    return 0;
}
"""


@pytest.mark.parametrize("sanitizer", ["thread", "undefined"])
def test_every_part_is_done_once_without_a_race(sanitizer: str, tmp_path: Path) -> None:
    """Steps of 64 cells, each read and written by its own part alone, one step after the other; read back after each run."""
    source, program = tmp_path / "driver.c", tmp_path / "driver"
    source.write_text(DRIVER)
    folder = Path(native.__file__).parent
    command = [
        "cc",
        "-O1",
        "-g",
        "-std=gnu11",
        "-march=native",
        f"-fsanitize={sanitizer}",
        "-fwrapv",
        f"-I{folder}",
        "-pthread",
    ]
    made = subprocess.run([*command, "-o", str(program), str(source)], capture_output=True, text=True)
    if made.returncode and re.search(r"lib(t|ub)san", made.stderr):
        pytest.skip("the compiler has no such sanitizer")
    assert not made.returncode, made.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the sanitizer does not know this kernel's addresses")
    assert not ran.returncode and not ran.stderr, ran.stderr[-2000:]


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch has one thread")
def test_torch_imported_first_does_not_spin() -> None:
    """Its idle threads would take the cores from ours for milliseconds after each of its operators."""
    program = """
import time, torch
x = torch.ones(1 << 17)

def seconds():
    start = time.process_time()
    for _ in range(20):
        x.add_(1)
        time.sleep(0.01)
    return time.process_time() - start

seconds()
before = seconds()
from tapestry import flags
flags.before_torch()
from tapestry.codegen.torch_cpu.c import thread_parts
thread_parts.quiet_torch()
time.sleep(0.1)
print(seconds() / before)
"""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 0.5
