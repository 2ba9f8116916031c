"""Blocks in any legal order, twice, elsewhere, lost and computed again: the same bits, no more work than is needed."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import numpy as np
import pytest

from tapestry import api
from tapestry.runtime.block_walk import Asked, BlockWalk, Drawn, Task
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
        reads = {v: rng.randint(1, 9) for v in rng.sample(made, min(len(made), rng.randint(0, 3)))}
        d = rng.randrange(3)
        outs = tuple((d, f"{k}.{n}") for n in range(rng.randint(1, 3)))
        tasks.append(Task(step=k, device=d, reads=reads, outs=outs, flops=rng.randint(0, 9), loaded=0 if reads else 5))
        made += outs
    return tasks


def walked(tasks: list[Task], asked: Asked, wrong: int | None = None) -> BlockWalk:
    """A walk to its end; task ``wrong`` gives another word each time."""
    count = iter(range(1 << 30))

    def compute(k: int, values) -> list[bytes]:
        assert set(values) == set(tasks[k].reads)
        return [b"%d" % next(count)] * len(tasks[k].outs) if k == wrong else word(tasks[k], values)

    ends = [v for t in tasks[-2:] for v in t.outs]
    walk = BlockWalk(tasks, ends, 3, asked, compute, bytes, len)
    walk.run(lambda done, total: None)
    return walk


ASKED = [Asked(), Asked(twice=False), Asked(lose=0.4), Asked(lose=1.0), Asked(devices=1), Asked(devices=2, lose=0.3)]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_any_order_makes_the_same(asked):
    for seed in range(40):
        tasks, expected = random_tasks(seed), {}
        for t in tasks:
            expected.update(zip(t.outs, word(t, expected), strict=True))
        walk = walked(tasks, replace(asked, seed=seed))
        told, ends = walk.told, {v for t in tasks[-2:] for v in t.outs}
        assert walk.held.keys() == ends  # what nobody needs is let go
        assert {v: expected[v] for v in ends} == walk.held
        assert not told.differ
        assert told.first.tasks == len(tasks)
        assert told.first.flops == sum(t.flops for t in tasks)
        assert len(told.order) == told.first.tasks + told.again.tasks + told.second
        assert set(walk.where.values()) <= set(walk.living)
        assert len(told.gone) <= asked.devices
        if not asked.lose and not asked.devices:
            assert (told.again.tasks, told.second) == (0, len(tasks) if asked.twice else 0)


def test_orders_differ_and_repeat():
    tasks = random_tasks(4)
    orders = [walked(tasks, Asked(seed=s)).told.order for s in range(8)]
    assert len({tuple(o) for o in orders}) > 6
    assert orders[3] == walked(tasks, Asked(seed=3)).told.order


def test_a_task_that_is_no_function_is_seen():
    tasks = random_tasks(4)
    for k, t in enumerate(tasks):
        assert set(t.outs) <= set(walked(tasks, Asked(), wrong=k).told.differ)


def test_what_is_lost_is_made_of_what_is_held():
    """A chain of which each link is let go once the next is there: of a lost end everything is made again; of a lost leaf beside
    a link that is held, the leaf alone."""
    chain = [Task(step=0, device=0, reads={}, outs=((0, "0"),), flops=1, loaded=8)]
    chain += [Task(step=k, device=0, reads={(0, f"{k - 1}"): 4}, outs=((0, f"{k}"),), flops=1) for k in range(1, 6)]
    walk = BlockWalk(chain, [(0, "5")], 2, Asked(twice=False), lambda k, v: [b"x"] * 1, bytes, len)
    walk.run(lambda done, total: None)
    assert walk.told.again.tasks == 0
    walk._lose([(0, "5")])
    walk.run(lambda done, total: None)
    assert (walk.told.again.tasks, walk.told.again.flops, walk.told.again.nbytes) == (6, 6, 8)
    assert (walk.told.restart.tasks, walk.told.restart.flops) == (6, 6)
    fan = [Task(step=0, device=0, reads={}, outs=((0, "a"),), flops=7)]
    fan += [Task(step=k, device=1, reads={(0, "a"): 4}, outs=((1, f"{k}"),), flops=k) for k in (1, 2)]
    walk = BlockWalk(fan, [(0, "a"), (1, "1"), (1, "2")], 2, Asked(twice=False), lambda k, v: [b"x"], bytes, len)
    walk.run(lambda done, total: None)
    walk._lose_device(1)
    walk.run(lambda done, total: None)
    assert (walk.told.again.tasks, walk.told.again.flops, walk.told.again.nbytes) == (2, 3, 0)  # both are now where 'a' is
    assert walk.told.restart.flops == 10
    assert walk.told.first.nbytes == 8


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("mlp", "3"), ("conv_chain", "4"), ("attention", "2x2"), ("norms", "1"), ("noise", "3"), ("recurrent", "2"), ("opaques", "2"),
     ("selections", "2x2"), ("halves", "2")],
)  # fmt: skip
def test_programs_in_any_order(name, mesh):
    build, other = sessions(name, mesh=mesh)
    feeds, many = build.random_feeds(1), mesh != "1"
    for k, asked in enumerate((Asked(), Asked(lose=0.3), Asked(devices=int(many), twice=False))):
        _, told = run_beside(build.session, other, feeds, replace(asked, seed=k))
        assert told["same_bits"], told
        assert told["computed"] == told["plan"]["blocks"] + told["again"]["blocks"] + told["twice"]
        assert (told["elsewhere"] > 0) == many


def test_a_kernel_with_a_memory_is_seen():
    build, other = sessions("mlp", mesh="2")
    feeds = build.random_feeds(1)
    run_beside(build.session, other, feeds, Asked())
    at, kernel = next(iter(other.executor.kernels.items()))
    calls = iter(range(1 << 20))
    other.executor.kernels[at] = lambda ins, states: [a + next(calls) for a in kernel(ins, states)]
    _, told = run_beside(build.session, other, feeds, Asked())
    assert not told["same_bits"]
    assert told["differ"]
    _, told = run_beside(build.session, other, feeds, Asked(twice=False))  # once more than the plain run is enough
    assert told["other_outputs"] == ["y"]


def test_transfers_and_merges_need_what_the_plan_sends():
    """The bytes of a run without losses are those of the plan: each device loads its boxes and fetches what it lacks."""
    build, other = sessions("mlp", mesh="4")
    program, tasks = build.build.program, other.executor.tasks
    boxes = [
        b.boxes[d] for s in program.steps if type(s).__name__ == "Load" for b in [program.buffers[s.buffer]] for d in range(4)
    ]
    assert sum(t.loaded > 0 for t in tasks) == sum(b is not None for b in boxes)
    sent = sum(n["bytes"] for n in build.report["transfers"] if n["kind"] not in ("all_reduce", "reduce_scatter"))
    moved = {type(program.steps[t.step]).__name__ for t in tasks if t.planned - t.loaded}
    assert moved <= {"Transfer", "Reduce"}
    assert sent == sum(t.planned for t in tasks if type(program.steps[t.step]).__name__ == "Transfer")


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
    found = document("run", build, "--schedule", "random", "--seed", "5", "--lose", "0.3", "--lose-devices", "1", "--check")
    told = found["schedule"]
    assert found["passed"]
    assert told["same_bits"]
    assert (told["seed"], len(told["lost_devices"])) == (5, 1)
    assert told["restart"]["bytes"] > 0
    assert "the same bits" in run("run", build, "--schedule", "random")[1]
    order = ["--schedule", "random"]
    for wrong, hint in (
        (["--lose", "0.5"], "--schedule random"), ([*order, "--lose-devices", "3"], "at most 2"),
        ([*order, "--processes", "2"], "without ranks"), ([*order, "--lose", "2"], "0 to 1"),
    ):  # fmt: skip
        status, _, said = run("run", build, *wrong)
        assert status == 2
        assert hint in said
