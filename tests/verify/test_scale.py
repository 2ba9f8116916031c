"""Hundreds of devices and equal layers: what is proved once must hold wherever it is used, and nothing may hide behind it."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from tapestry.build import store
from tapestry.errors import LawError
from tapestry.ir import space
from tapestry.ir.graph import Block
from tapestry.ir.plan import Plan, Strategy
from tapestry.ir.program import Launch, Message, Program, Reduce, Transfer
from tapestry.ir.syntax.parser import parse
from tapestry.plan.lower import lower
from tapestry.plan.search.planner import search
from tapestry.plan.solver.dominance import undominated
from tapestry.plan.solver.network import Factor, evaluate
from tapestry.plan.strategy import MAX_STRATEGIES, every_strategy
from tapestry.plan.topology import parse_mesh, to_data, topology
from tapestry.verify import certificate
from tapestry.verify.box_lists import Lists, spans_of
from tests.support.faults.plan_faults import FAULTS
from tests.support.small_models import MODELS, case, peak

MESH = parse_mesh("8x8x8")


def layers(count: int) -> str:
    """Equal layers: a linear map of the last axis and a shift along the sequence."""
    lines = ["graph layers", "input x0: f32[16, 64, 128]", "input w: f32[128, 128]"]
    for k in range(count):
        lines += [
            f"y{k}: f32[16, 64, 128] = op [b: 16, s: 64, n: 128 | m: 128 sum]", f"  reads x{k}[b, s, m], w[m, n]", f"  body x{k} * w",
            f"x{k + 1}: f32[16, 64, 128] = op [b: 16, s: 64, n: 128]", f"  reads y{k}[b, s - 1, n] else 0.0", f"  body y{k}",
        ]  # fmt: skip
    return "\n".join([*lines, f"output x{count}"]) + "\n"


def plan(count: int) -> Plan:
    """Batch, sequence and the reduced dimension cut: halos, gathers, reduce-scatters and all-reduces on 512 devices."""
    graph = parse(layers(count))
    linear = [Strategy(("b", "s", "m"), (0, 1, 2)), Strategy(("b", "s", "m"), (0, 1, None))]
    chosen = [linear[k // 2 % 2] if k % 2 == 0 else Strategy(("b", "s", "n"), (0, 1, 2)) for k in range(2 * count)]
    return Plan(graph=graph, mesh=MESH, strategies=tuple(chosen))


def check(p: Plan, program: Program, **options: object) -> dict[str, int]:
    given = {"stated_peak": peak(program), "mesh": p.mesh, **options}
    return certificate.check(p.annotated(), program, **given)


def test_512_devices_are_planned_and_checked_in_seconds():
    start = time.process_time()
    graph, topo = parse(layers(4)), topology(MESH, "h100")
    found = search(graph, topo)
    laws = check(found.plan, found.program, limit=topo.device.memory)
    assert found.gap <= 0.05 and found.program.devices == 512
    assert laws["access_preserved"] >= 512 * 8 and laws["memory"] == 1024
    assert time.process_time() - start < 30


def test_counts_are_of_checks_and_not_of_proofs():
    """Twice the layers, twice the checks, though nothing new is proved."""
    one, two, four = (check(plan(n), lower(plan(n))) for n in (2, 4, 8))
    for law in ("read_after_write", "access_preserved", "split_partition"):
        assert four[law] - two[law] == 2 * (two[law] - one[law]) > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_among_512_devices_is_found(name):
    laws, make = FAULTS[name]
    p = plan(2)
    program = lower(p)
    check(p, program)
    cases = make(p, program)
    for wrong_plan, wrong, options in random.Random(name).sample(cases, min(2, len(cases))):
        with pytest.raises(LawError) as caught:
            check(wrong_plan, wrong, **{"stated_peak": peak(program), **options})
        assert caught.value.law in laws, str(caught.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Transfer, Launch, Reduce])
def test_a_fault_in_one_of_many_equal_steps_is_found(kind):
    """The last of equal layers is damaged after the others have been proved."""
    p = plan(6)
    program = lower(p)
    check(p, program)
    at = max(i for i, s in enumerate(program.steps) if isinstance(s, kind))
    step = program.steps[at]
    match step:
        case Transfer():
            m = step.messages[77]
            wrong = [replace(step, messages=step.messages[1:]), replace(step, messages=(*step.messages, m))]
            wrong.append(
                replace(step, messages=(*step.messages[:77], Message(m.src, m.dst, (*m.box[:-1], (0, 1))), *step.messages[78:]))
            )
        case Launch():
            wrong = [replace(step, blocks=(step.blocks[1], *step.blocks[1:])), replace(step, blocks=(*step.blocks[:-1], None))]
        case Reduce():
            g = step.groups
            swapped = ((g[1][0], *g[0][1:]), (g[0][0], *g[1][1:]), *g[2:])
            wrong = [replace(step, groups=g[1:]), replace(step, groups=swapped), replace(step, groups=(g[0][1:], *g[1:]))]
    for w in wrong:
        with pytest.raises(LawError):
            check(p, replace(program, steps=(*program.steps[:at], w, *program.steps[at + 1 :])))


def test_the_plan_of_512_devices_reads_back_and_is_small():
    p = plan(6)
    program = lower(p)
    build = store.Build(
        model="m", model_sha256="0", plan=p, program=program, topology=to_data(topology(MESH)), target="torch-cpu", memory=1 << 30,
        peak_bytes=tuple(peak(program)), report={}, moves=(), constants={},
    )  # fmt: skip
    data = store.encode(build)
    again = store.decode(data)
    assert again.program == program and again.plan == p
    assert check(again.plan, again.program) == check(p, program)
    longer = plan(12)
    program = lower(longer)
    more = store.encode(replace(build, plan=longer, program=program, peak_bytes=tuple(peak(program))))
    assert len(more) < 1.3 * len(data) < 2e6  # lists of boxes and messages are written once


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MODELS)
def test_footprints_by_factors_are_those_of_the_whole_access(name):
    graph, rng, lists = case(name).graph, random.Random(name), Lists()
    for op in graph.ops:
        if not isinstance(op, Block):
            continue
        boxes = [tuple(sorted((rng.randint(0, d.size), rng.randint(0, d.size))) for d in op.space) for _ in range(4)]
        points = spans_of([*boxes, None], len(op.space), "agreement", "")
        for k, r in enumerate(op.reads):
            found = lists.footprint(op, graph, k, points)
            assert found.box(4) is None
            for d, box in enumerate(boxes):
                image = space.access(op, r, graph.tensors[r.tensor].shape).image(tuple(box))
                empty = image is None or any(lo >= hi for lo, hi in box)
                assert found.box(d) == (None if empty else image.hull()), (op.outs, k, box)


@pytest.mark.parametrize("seed", range(40))
def test_dropping_dominated_labels_keeps_an_optimum(seed):
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 5, 5)]
    kinds: dict[tuple[int, int], np.ndarray] = {}
    factors = [Factor((i,), rng.integers(0, 6, n).astype(float)) for i, n in enumerate(sizes)]
    for a, b in itertools.combinations(range(5), 2):
        if rng.random() < 0.5:
            table = kinds.setdefault((sizes[a], sizes[b]), rng.integers(0, 4, (sizes[a], sizes[b])).astype(float))
            if seed % 4 == 0 and rng.random() < 0.3:
                table = np.where(rng.random(table.shape) < 0.2, np.inf, table)
            factors.append(Factor((a, b), table))
    tables = [(f.nodes, f.table) for f in factors]
    every = list(itertools.product(*map(range, sizes)))
    best = min(evaluate(c, factors) for c in every)
    fewer = undominated(sizes, tables)
    if fewer is None:
        return
    small = [Factor(*t) for t in fewer.restrict(tables)]
    left = list(itertools.product(*map(range, fewer.sizes)))
    assert min(evaluate(c, small) for c in left) == best
    for c in left:
        assert evaluate(c, small) == evaluate(fewer.restore(c), factors)
    for c in every:
        assert evaluate(fewer.shrink(c), small) <= evaluate(c, factors)


def test_three_mesh_axes_get_every_strategy():
    op = next(op for op in parse(layers(1)).ops if op.reduce)
    for mesh in ("4x4x4", "8x8x8", "2x4x8"):
        offered = every_strategy(op, parse_mesh(mesh))
        assert 100 < len(offered) <= MAX_STRATEGIES and len(set(offered)) == len(offered)
