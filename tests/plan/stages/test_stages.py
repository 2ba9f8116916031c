"""Plans with pipeline stages: any of them passes the checker and computes what the interpreter computes; one fault does not."""

import random
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.build import store
from tapestry.errors import BuildError, LawError
from tapestry.ir.plan import Arrival, Plan, Stage, stages_refused
from tapestry.ir.program import Launch, Load, Transfer
from tapestry.plan.pipelines.staged_plan import link_between, lower_plan, spread, stage_topology
from tapestry.plan.simulate import critical_path, simulate
from tapestry.plan.strategy import strategies
from tapestry.plan.topology import topology
from tapestry.verify import certificate
from tests.support.faults.plan_faults import FAULTS
from tests.support.small_models import (
    MODELS,
    N,
    assert_same,
    case,
    execute,
    mesh_of,
    net,
    peak,
    planned_transfers,
    random_layout,
)

STAGES = {
    "halves": ("4", [(0, "2"), (2, "2")]),
    "idle": ("4", [(1, "1"), (2, "2")]),
    "uneven": ("4", [(0, "1"), (1, "3")]),
    "backwards": ("4", [(2, "2"), (0, "2")]),
    "three": ("2x4", [(0, "2x2"), (4, "1"), (5, "2")]),
}


def staged_plan(name: str, stages: str, seed: int) -> Plan:
    """Random strategies, placements and arrivals."""
    rng, graph = random.Random(f"{name} {stages} {seed}"), case(name).graph
    mesh, places = STAGES[stages]
    found = tuple(Stage(first, mesh_of(m)) for first, m in places)
    of = sorted(rng.randrange(len(found)) for _ in graph.ops)
    chosen = tuple(rng.choice(strategies(op, found[k].mesh)) for op, k in zip(graph.ops, of, strict=True))
    arrivals = [
        Arrival(t, k, random_layout(graph.tensors[t].shape, found[k].mesh, rng))
        for t, i in graph.producers().items() for k in range(of[i] + 1, len(found)) if rng.random() < 0.7
    ]  # fmt: skip
    return Plan(graph=graph, mesh=mesh_of(mesh), strategies=chosen, stages=found, stage_of=tuple(of), arrivals=tuple(arrivals))


def checked(plan: Plan, program, **options):
    return certificate.check(plan.annotated(), program, stated_peak=peak(program), places=plan.places, **options)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", [n for n in MODELS if n != "noise"])
def test_any_placement_passes_and_runs_right(name, stages):
    c, plan = case(name), staged_plan(name, stages, 0)
    assert not stages_refused(plan)
    program = lower_plan(plan)
    checked(plan, program)
    outs, measured = execute(c.graph, program, c)
    assert_same(outs, c.expected, c.graph, plan.strategies)
    assert measured.peak == peak(program)
    assert measured.transfers == planned_transfers(program)
    for step in program.steps:
        if isinstance(step, Launch):
            assert {d for d, b in enumerate(step.blocks) if b is not None} == set(plan.stage(step.op).devices)


@pytest.mark.parametrize("name", ["mlp", "attention", "branches", "conv_chain"])
def test_a_weight_is_only_where_it_is_read(name):
    for seed in range(4):
        plan = staged_plan(name, "halves", seed)
        program = lower_plan(plan)
        for s in program.steps:
            b = program.buffers[s.buffer] if isinstance(s, Load) else None
            if b is not None and b.tensor in plan.graph.weights:
                readers = {plan.stage(i) for i, op in enumerate(plan.graph.ops) if b.tensor in op.inputs}
                assert {d for d, box in enumerate(b.boxes) if box} <= {d for at in readers for d in at.devices}


@pytest.mark.parametrize("name", ["mlp", "attention", "norms", "batched"])
def test_the_clock_knows_stages(name):
    """On the simulated clock nothing begins before what it reads is there, and the critical path adds up."""
    plan = staged_plan(name, "three", 1)
    program = lower_plan(plan)
    timed = simulate(plan, program, topology(plan.mesh, "h100"))
    assert timed.total > 0
    hops = critical_path(timed)
    assert sum(h.seconds for h in hops) == pytest.approx(timed.total)
    for t in timed.timed:
        step = program.steps[t.step]
        if isinstance(step, Launch):
            assert set((t.end == t.end).nonzero()[0]) == set(plan.stage(step.op).devices)


def test_one_stage_of_all_devices_is_the_plan_without():
    for name in ("mlp", "attention"):
        plan = staged_plan(name, "halves", 0)
        graph, mesh = plan.graph, mesh_of("2x2")
        rng = random.Random(name)
        chosen = tuple(rng.choice(strategies(op, mesh)) for op in graph.ops)
        plain = Plan(graph=graph, mesh=mesh, strategies=chosen)
        one = replace(plain, stages=(Stage(0, mesh),), stage_of=(0,) * len(graph.ops))
        assert lower_plan(one) == lower_plan(plain)
        topo = topology(mesh, "h100")
        assert simulate(one, lower_plan(one), topo).total == simulate(plain, lower_plan(plain), topo).total


def test_replicas_share_the_sending():
    held = [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),), None, None, None, None]
    wanted = [None] * 4 + [((0, 8),)] * 4
    messages = spread(held, wanted)
    assert sorted((m.src, m.dst) for m in messages) == [(0, 4), (0, 5), (1, 6), (1, 7), (2, 4), (2, 5), (3, 6), (3, 7)]


def test_links_of_parts_of_a_mesh():
    topo = topology(mesh_of("2x4"), "h100")
    slow, fast = topo.links
    assert link_between(topo, 0, 3) == fast and link_between(topo, 3, 4).beta == max(slow.beta, fast.beta)
    assert link_between(topo, 5, 5).beta == 0
    sub = stage_topology(topo, Stage(4, mesh_of("2x4")[1:]))
    assert sub.links == (fast,) and sub.device == topo.device


# --- one fault at a time


GENERIC = [
    "transfer_dropped", "load_dropped", "launch_dropped", "message_dropped", "message_sent_twice", "stated_peak_wrong",
    "memory_exceeded",
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GENERIC)
def test_faults_of_any_program_are_found(name):
    laws, make = FAULTS[name]
    for model in ("mlp", "conv_chain"):
        plan = staged_plan(model, "halves", 3)
        program = lower_plan(plan)
        cases = make(plan, program)
        assert cases
        for wrong_plan, wrong, options in cases[:12]:
            with pytest.raises(LawError) as caught:
                given = {"stated_peak": peak(program), **options}
                certificate.check(wrong_plan.annotated(), wrong, places=wrong_plan.places, **given)
            assert caught.value.law in laws | {"written_once"}  # a merge that is dropped is reported as such


def test_an_operation_in_another_stage_than_planned_is_refused():
    plan = staged_plan("mlp", "halves", 3)
    program = lower_plan(plan)
    for i in range(len(plan.graph.ops)):
        moved = tuple(1 - k if n == i else k for n, k in enumerate(plan.stage_of))
        wrong = replace(plan, stage_of=moved)
        with pytest.raises(LawError) as caught:
            certificate.check(plan.annotated(), program, places=wrong.places)
        assert caught.value.law == "split_partition"


def test_a_device_outside_the_stage_may_not_help():
    """A launch that a third device repeats is right cell by cell, but not what the plan says."""
    plan = staged_plan("mlp", "idle", 0)
    program = lower_plan(plan)
    found = 0
    for n, step in enumerate(program.steps):
        if not isinstance(step, Launch) or step.mode != "full" or plan.stage_of[step.op] != 0:
            continue
        names = {b for b in (*step.ins, *step.outs) if b}

        def also(boxes):
            return (boxes[1], *boxes[1:])  # device 0, which is in no stage, does as device 1

        buffers = {b: replace(x, boxes=also(x.boxes)) if b in names else x for b, x in program.buffers.items()}
        steps = [replace(s, blocks=also(s.blocks)) if k == n else s for k, s in enumerate(program.steps)]
        with pytest.raises(LawError):
            checked(plan, replace(program, buffers=buffers, steps=tuple(steps)))
        found += 1
    assert found


@pytest.mark.parametrize(
    "stages", [[(0, "2"), (1, "2")], [(0, "2"), (3, "2")], [(-1, "2"), (2, "2")]], ids=["overlap", "beyond", "before"]
)
def test_impossible_stages_are_refused(stages):
    plan = staged_plan("mlp", "halves", 3)
    wrong = replace(plan, stages=tuple(Stage(first, mesh_of(m)) for first, m in stages))
    assert stages_refused(wrong)
    with pytest.raises(LawError) as caught:
        certificate.check(plan.annotated(), lower_plan(plan), places=wrong.places)
    assert caught.value.law == "split_partition"


def test_messages_to_a_device_without_a_place_are_refused():
    plan = staged_plan("mlp", "idle", 0)
    program = lower_plan(plan)
    at = next(n for n, s in enumerate(program.steps) if isinstance(s, Transfer) and s.messages)
    step = program.steps[at]
    wrong = replace(step, messages=(*step.messages, replace(step.messages[0], dst=0)))
    with pytest.raises(LawError):
        checked(plan, replace(program, steps=(*program.steps[:at], wrong, *program.steps[at + 1 :])))


@pytest.mark.slow
def test_no_stage_begins_between_the_maker_and_the_reader_of_a_host_value(tmp_path):
    """What a shape depends on stays on the host of its stage: cuts are elsewhere, and a file that says otherwise is refused."""
    nodes = [
        N("MatMul", ["x", "w"], ["a"], "a"), N("NonZero", ["k"], ["n"], "nz"), N("MatMul", ["a", "w"], ["b"], "b"), N("MatMul", ["b", "w"], ["c"], "c"),
        N("Gather", ["c", "n"], ["g"], "g"), N("MatMul", ["c", "w"], ["d"], "d"), N("MatMul", ["d", "w"], ["e"], "e"),
    ]  # fmt: skip
    weights = {"w": np.eye(8, dtype=np.float32)}
    model = net(nodes, {"x": (T.FLOAT, [8, 8]), "k": (T.FLOAT, [4])}, {"g": T.FLOAT, "e": T.FLOAT}, weights)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    build = tapestry.compile(tmp_path / "m.onnx", devices=2, stages=2, micro_batches=1, time_limit=3.0)
    plan = build.build.plan
    at = {o: plan.stage_of[i] for i, op in enumerate(plan.graph.ops) for o in op.outs}
    assert at["n"] == at["g"] and max(at.values()) == 1
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    outs = build.run({"x": x, "k": np.array([0, 2, 0, 1], np.float32)})
    assert np.allclose(outs["g"], x[[[1, 3]]]) and np.allclose(outs["e"], x)
    i = next(i for i, op in enumerate(plan.graph.ops) if "g" in op.outs)
    moved = replace(plan, stage_of=tuple(1 - plan.stage_of[i] if k >= i else s for k, s in enumerate(plan.stage_of)))
    assert "reads" in stages_refused(moved)


# --- on disk


def build_of(plan: Plan) -> store.Build:
    program = lower_plan(plan)
    return store.Build(
        model="m.onnx", model_sha256="0" * 64, plan=plan, program=program, topology={}, target="torch-cpu", memory=1 << 30,
        peak_bytes=tuple(peak(program)), report={}, moves=(), constants={},
    )  # fmt: skip


def test_stages_are_stored():
    build = build_of(staged_plan("attention", "three", 0))
    again = store.decode(store.encode(build))
    assert again.plan == build.plan and again.program == build.program


@pytest.mark.parametrize(
    "change",
    [
        lambda p: replace(p, stage_of=p.stage_of[:-1]),
        lambda p: replace(p, stage_of=(7, *p.stage_of[1:])),
        lambda p: replace(p, stage_of=p.stage_of[::-1]),
        lambda p: replace(p, stages=(p.stages[0], p.stages[0])),
        lambda p: replace(p, stages=(p.stages[0], Stage(3, p.stages[1].mesh))),
        lambda p: replace(p, stages=()),
        lambda p: replace(p, arrivals=(Arrival("nowhere", 0, (None,)),)),
        lambda p: replace(p, arrivals=(Arrival(p.graph.ops[0].outs[0], 1, (None, None)),)),
    ],
)
def test_a_file_with_impossible_stages_is_refused(change):
    build = build_of(staged_plan("mlp", "halves", 3))
    data = store.encode(replace(build, plan=change(build.plan)))
    with pytest.raises(BuildError):
        store.decode(data)
