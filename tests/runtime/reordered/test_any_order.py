"""Blocks in any legal order, twice: the same bits."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from tapestry import api
from tapestry.runtime.block_tasks import Task
from tapestry.runtime.block_walk import BlockWalk, Drawn
from tapestry.tools.schedules import AnyOrderExecutor, digest, run_beside
from tests.support.command_line import document, run
from tests.support.small_models import MODELS

# --- the walk, on values that are words


def word(task: Task, values) -> list[bytes]:
    """What a task makes: a hash of its place and of all that it reads."""
    ins = b"".join(values[v] for v in task.reads)
    return [hashlib.sha256(f"{v}".encode() + ins).digest() for v in task.outs]


def random_tasks(seed: int) -> list[Task]:
    """Tasks of one to three results over three devices that read some of what earlier ones make."""
    rng, made, tasks = random.Random(seed), [], []
    for k in range(rng.randint(2, 30)):
        reads = tuple(rng.sample(made, min(len(made), rng.randint(0, 3))))
        d = rng.randrange(3)
        outs = tuple((d, f"{k}.{n}") for n in range(rng.randint(1, 3)))
        tasks.append(Task(step=k, device=d, reads=reads, outs=outs))
        made += outs
    return tasks


def walked(tasks: list[Task], seed: int = 0, wrong: int | None = None) -> BlockWalk:
    """A walk to its end; task ``wrong`` gives another word each time."""
    count = iter(range(1 << 30))

    def compute(k: int, values) -> list[bytes]:
        assert set(values) == set(tasks[k].reads)
        return [b"%d" % next(count)] * len(tasks[k].outs) if k == wrong else word(tasks[k], values)

    ends = [v for t in tasks[-2:] for v in t.outs]
    walk = BlockWalk(tasks, ends, 3, seed, compute, bytes, len)
    walk.run(lambda done, total: None)
    return walk


def test_any_order_makes_the_same():
    for seed in range(40):
        tasks, expected = random_tasks(seed), {}
        for t in tasks:
            expected.update(zip(t.outs, word(t, expected), strict=True))
        walk = walked(tasks, seed)
        told, ends = walk.told, {v for t in tasks[-2:] for v in t.outs}
        assert walk.held.keys() == ends  # what nobody needs is let go
        assert {v: expected[v] for v in ends} == walk.held
        assert not told.differ
        assert sorted(told.order) == sorted([*range(len(tasks))] * 2)
        assert told.second == len(tasks)


def test_orders_differ_and_repeat():
    tasks = random_tasks(4)
    orders = [walked(tasks, s).told.order for s in range(8)]
    assert len({tuple(o) for o in orders}) > 6
    assert orders[3] == walked(tasks, 3).told.order


def test_a_task_that_is_no_function_is_seen():
    tasks = random_tasks(4)
    for k, t in enumerate(tasks):
        assert set(t.outs) <= set(walked(tasks, wrong=k).told.differ)


def test_draws_are_a_set():
    rng, drawn, there = random.Random(1), Drawn(), set()
    for _ in range(500):
        x = rng.randrange(20)
        if x in there:
            drawn.discard(x)
            there.discard(x)
        else:
            drawn.add(x)
            there.add(x)
        assert set(drawn.items) == there == {x for x in range(20) if x in drawn}
        assert len(drawn) == len(there)


# --- programs


def sessions(name: str, **how):
    """A build, its session in the plan's order, and one in any other."""
    build = api.compile(MODELS[name](), topology="cpu", **how)
    return build, api.open_session(build.build, b"".join(build.constants.values()), make=AnyOrderExecutor)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("mlp", "3"), ("conv_chain", "4"), ("attention", "2x2"), ("norms", "1"), ("noise", "3"), ("recurrent", "2"), ("opaques", "2"),
     ("selections", "2x2"), ("halves", "2")],
)  # fmt: skip
def test_programs_in_any_order(name, mesh):
    build, other = sessions(name, mesh=mesh)
    feeds = build.random_feeds(1)
    for seed in range(3):
        _, told = run_beside(build.session, other, feeds, seed)
        assert told["same_bits"], told
        assert told["computed"] == 2 * told["twice"] == 2 * len(other.executor.tasks)


def test_a_kernel_with_a_memory_is_seen():
    build, other = sessions("mlp", mesh="2")
    feeds = build.random_feeds(1)
    run_beside(build.session, other, feeds, 0)
    at, kernel = next(iter(other.executor.kernels.items()))
    calls = iter(range(1 << 20))
    other.executor.kernels[at] = lambda ins, states: [a + next(calls) for a in kernel(ins, states)]
    _, told = run_beside(build.session, other, feeds, 0)
    assert not told["same_bits"]
    assert told["differ"]
    assert told["other_outputs"] == ["y"]


def test_hashes_of_values_of_the_host():
    from tapestry.onnx_eval.opaque_node import HostValue

    a, b = np.arange(3.0), np.array(["x", "y"], object)
    values = [a, a.astype(np.float32), a.reshape(3, 1), b, b[::-1], [a, b], [b, a], {"k": a}, {"l": a}, None, []]
    assert len({digest(HostValue(v)) for v in values}) == len(values)
    assert digest(HostValue([a, b])) == digest(HostValue([a.copy(), b.copy()]))


def test_command(tmp_path):
    (tmp_path / "m.onnx").write_bytes(MODELS["mlp"]().SerializeToString())
    build = tmp_path / "build"
    document("compile", tmp_path / "m.onnx", "--devices", "3", "--topology", "cpu", "-o", build)
    found = document("run", build, "--schedule", "random", "--seed", "5", "--check")
    told = found["schedule"]
    assert found["passed"]
    assert told["same_bits"]
    assert told["seed"] == 5
    assert "the same bits" in run("run", build, "--schedule", "random")[1]
    status, _, said = run("run", build, "--schedule", "random", "--processes", "2")
    assert status == 2
    assert "without ranks" in said
