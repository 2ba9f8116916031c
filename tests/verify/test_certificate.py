"""The plan checker: it accepts every plan of any strategies, and refuses every program with one fault in it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tapestry.errors import LawError
from tapestry.ir.graph import Split
from tapestry.ir.plan import Plan
from tapestry.ir.program import Launch, Program, Reduce, Step, Transfer
from tapestry.plan.lower import lower
from tapestry.plan.search.planner import search
from tapestry.plan.strategy import strategies
from tapestry.plan.topology import parse_mesh, topology
from tapestry.verify import certificate
from tapestry.verify.boxes import coverage
from tests.support.faults.plan_faults import FAULTS
from tests.support.faults.sound_plans import PLANS, halo_plan, row_parallel_plan, scatter_plan
from tests.support.small_models import MODELS, assert_same, case, execute, mesh_of, peak, planned_transfers, random_plan

MESHES = ["1", "2", "3", "4", "2x2", "2x3"]


# --- any plan passes, and computes what the interpreter computes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [n for n in MODELS if n != "noise"])
def test_any_strategies_pass_and_run_right(name, mesh):
    c = case(name)
    for seed in range(2):
        plan = random_plan(c.graph, mesh_of(mesh), random.Random(f"{name} {mesh} {seed}"))
        program = lower(plan)
        laws = certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=plan.mesh)
        assert all(count > 0 for count in laws.values())
        outs, measured = execute(c.graph, program, c)
        assert_same(outs, c.expected, c.graph, plan.strategies)
        assert measured.peak == peak(program)
        assert measured.transfers == planned_transfers(program)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [n for n in MODELS if n != "noise"])
def test_devices_in_any_order_along_an_axis(name):
    """The same laws, values, peaks and bytes; monoids that do not commute are merged in the order of coordinates."""
    c = case(name)
    for mesh in ("4", "2x3"):
        rng = random.Random(f"{name} {mesh} order")
        plain = mesh_of(mesh)
        plan = random_plan(c.graph, tuple(replace(a, order=tuple(rng.sample(range(a.size), a.size))) for a in plain), rng)
        program = lower(plan)
        certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=plan.mesh)
        outs, measured = execute(c.graph, program, c)
        assert_same(outs, c.expected, c.graph, plan.strategies)
        assert measured.peak == peak(program) and measured.transfers == planned_transfers(program)
        assert sorted(planned_transfers(program)) == sorted(planned_transfers(lower(replace(plan, mesh=plain))))


@pytest.mark.parametrize("name", PLANS)
def test_what_was_looked_at_is_counted(name):
    """Two checks of memory for each device, and two of every buffer that a step writes."""
    plan = PLANS[name]()
    program = lower(plan)
    laws = certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=plan.mesh)
    assert laws["memory"] == 2 * program.devices
    assert laws["written_once"] >= 2 * len(program.buffers) and laws["agreement"] > len(program.steps)


def renamed(program: Program, to: tuple[int, ...]) -> Program:
    """The program in which each device does what another one did."""

    def moved(rows: tuple) -> tuple:
        return tuple(rows[to.index(d)] for d in range(len(to))) if rows else rows

    def step(s: Step) -> Step:
        match s:
            case Launch():
                return replace(s, blocks=moved(s.blocks))
            case Transfer():
                return replace(s, messages=tuple(replace(m, src=to[m.src], dst=to[m.dst]) for m in s.messages))
            case Reduce():
                return replace(s, groups=tuple(tuple(to[d] for d in g) for g in s.groups), known=tuple(map(moved, s.known)))
            case _:
                return s

    buffers = {n: replace(b, boxes=moved(b.boxes)) for n, b in program.buffers.items()}
    return replace(program, buffers=buffers, steps=tuple(map(step, program.steps)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLANS)
def test_a_right_program_of_other_devices_than_the_plans_is_refused(name):
    """It computes the same, and yet no device computes what the plan says that it does."""
    plan = PLANS[name]()
    program = lower(plan)
    n = program.devices
    assert renamed(program, tuple(range(n))) == program
    other = renamed(program, tuple((d + 1) % n for d in range(n)))
    c = case(
        {"halo": "conv_chain", "row": "mlp", "scatter": "batched", "norm": "norms", "opaque": "opaques"}[name.split("_")[0]]
    )
    assert_same(execute(c.graph, other, c)[0], c.expected, c.graph)
    with pytest.raises(LawError, match="a device does not compute what the plan gives it") as e:
        certificate.check(plan.annotated(), other, stated_peak=peak(other), mesh=plan.mesh)
    assert e.value.law == "split_partition"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mlp", "conv_groups", "attention", "reductions", "opaques", "views"])
def test_graphs_before_simplification_run_as_well(name):
    c = case(name, False)
    for mesh in ("3", "2x2"):
        plan = random_plan(c.graph, mesh_of(mesh), random.Random(mesh))
        program = lower(plan)
        certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=plan.mesh)
        assert_same(execute(c.graph, program, c)[0], c.expected, c.graph)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["batched", "reductions", "gathers", "selections"])
def test_every_single_strategy_of_every_operation(name):
    """One operation spread in each possible way, the others replicated."""
    c, mesh = case(name), mesh_of("2x2")
    alone = tuple(strategies(op, mesh)[0] for op in c.graph.ops)
    for i, op in enumerate(c.graph.ops):
        offered = strategies(op, mesh)
        assert len(set(offered)) == len(offered)
        for s in random.Random(i).sample(offered, min(6, len(offered))):
            plan = Plan(graph=c.graph, mesh=mesh, strategies=(*alone[:i], s, *alone[i + 1 :]))
            program = lower(plan)
            certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=plan.mesh)
            assert_same(execute(c.graph, program, c)[0], c.expected, c.graph, s)


# --- one fault at a time


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, build):
    laws, make = FAULTS[name]
    plan = build()
    program = lower(plan)
    certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=plan.mesh)  # before the fault all is well
    cases = make(plan, program)
    chosen = cases if len(cases) <= 12 else random.Random(name).sample(cases, 12)
    for wrong_plan, wrong, options in chosen:
        given = {"stated_peak": peak(program), **options}
        with pytest.raises(LawError) as caught:
            certificate.check(wrong_plan.annotated(), wrong, mesh=wrong_plan.mesh, **given)
        e = caught.value
        assert e.law in laws, (e.law, str(e))
        assert e.where or e.why or "device" in e.what, str(e)
        assert f"law '{e.law}' is broken" in str(e)


def test_every_kind_of_fault_is_tried():
    plans = [(plan, lower(plan)) for plan in (build() for build in PLANS.values())]
    assert [name for name, (_, make) in FAULTS.items() if not any(make(*p) for p in plans)] == []
    assert len(FAULTS) >= 40


def test_an_unsplit_reduction_needs_no_merge_but_a_split_one_does():
    plan = row_parallel_plan()
    program = lower(plan)
    assert any(isinstance(s, Reduce) for s in program.steps)
    assert any(isinstance(s, Launch) and s.mode == "finish" for s in program.steps)
    scattered = lower(scatter_plan())
    assert any(isinstance(s, Reduce) and s.kind == "reduce_scatter" for s in scattered.steps)
    halo = lower(halo_plan())
    assert any(isinstance(s, Transfer) and s.kind == "halo" for s in halo.steps)


def test_a_graph_that_breaks_a_law_fails_the_certificate():
    plan = halo_plan()
    program = lower(plan)
    graph = plan.annotated()
    ops = (replace(graph.ops[0], splits=(Split("h", 99, "mesh.d0"),)), *graph.ops[1:])
    with pytest.raises(LawError) as caught:
        certificate.check(replace(graph, ops=ops), program)
    assert caught.value.law == "split_partition" and caught.value.where


def test_the_planners_own_plans_pass():
    for name in ("conv_chain", "attention", "opaques"):
        for mesh in ("2", "3", "2x2"):
            found = search(case(name).graph, topology(parse_mesh(mesh)))
            laws = certificate.check(
                found.plan.annotated(), found.program, stated_peak=peak(found.program), limit=1 << 34, mesh=found.plan.mesh
            )
            assert laws["memory"] >= 2 * found.program.devices


# --- the sweep that the checker covers with


def test_coverage_is_exact():
    assert coverage([((0, 1),), ((0, 2),), ((3, 4),)], ((0, 4),)) == ((2,), (0,))  # the right total size, and wrong
    assert coverage([()], ()) == (None, None)
    assert coverage([], ()) == ((), None)
    rng = random.Random(1)
    for _ in range(300):
        rank = rng.randint(1, 3)
        target = tuple((lo := rng.randint(0, 3), lo + rng.randint(0, 4)) for _ in range(rank))
        boxes = [
            tuple((lo := rng.randint(0, 6), lo + rng.randint(0, 4)) for _ in range(rank)) for _ in range(rng.randint(0, 5))
        ]
        gap, twice = coverage(boxes, target)
        counts = {point: sum(all(lo <= x < hi for x, (lo, hi) in zip(point, b)) for b in boxes) for point in _points(target)}
        assert (gap is None) == all(n > 0 for n in counts.values())
        assert (twice is None) == all(n < 2 for n in counts.values())
        assert gap is None or counts[gap] == 0
        assert twice is None or counts[twice] > 1


def _points(box):
    out = [()]
    for lo, hi in box:
        out = [(*p, x) for p in out for x in range(lo, hi)]
    return out
