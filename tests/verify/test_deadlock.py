"""No message blocks: scripts that would are refused, those of random programs are not, and they are what the runtime posts,
which is tried on 1,024 ranks."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.errors import LawError
from tapestry.ir.kernel import shape
from tapestry.ir.plan import Plan
from tapestry.ir.program import Free, Program, Reduce, Step, Transfer, reads, transfer_bytes
from tapestry.ir.syntax.parser import parse
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tapestry.runtime.processes.distributed import RankExecutor
from tapestry.runtime.processes.heartbeat import Heartbeat, shared
from tapestry.runtime.step_messages import owners
from tapestry.verify import deadlock
from tapestry.verify.deadlock import Exchange, check, simulate
from tests.support.messages.recorded_wire import Recorder, Shapes
from tests.support.small_models import case, mesh_of, random_plan


def scripts(program: Program, world: int | None = None) -> list[list[Exchange]]:
    """What every rank posts, one exchange after another; consecutive devices share a rank, as evenly as can be."""
    n = world or program.devices
    owner = [r for r in range(n) for _ in range((r + 1) * program.devices // n - r * program.devices // n)]
    out: list[list[Exchange]] = [[] for _ in range(n)]
    for tag, flow in exchanges(program):
        deadlock.post(out, tag, flow, owner)
    return out


def exchanges(program: Program) -> Iterator[tuple[tuple[int, int], deadlock.Flow]]:
    """((step, part), bytes between devices) of everything that is sent, in the order of all ranks.

    States are merged, and sent back where each device merges a part, when a step first names the result (at the end, where it
    is an output and no step does).
    """
    open_: dict[str, tuple[int, Reduce]] = {}
    for i, step in enumerate((*program.steps, None)):
        for name in program.outputs.values() if step is None else named(step):
            if name in open_:
                at, reduce = open_[name]
                open_ = {b: x for b, x in open_.items() if x[0] != at}
                yield (at, 1), dict(deadlock.merged_flow(reduce, program, there=False))
        if isinstance(step, Transfer):
            yield (i, 0), next(deadlock.flows(step, program))
        elif isinstance(step, Reduce):
            yield (i, 0), next(deadlock.flows(step, program))
            if step.kind == "all_reduce":
                open_ |= dict.fromkeys(step.dsts, (i, step))


def named(step: Step) -> tuple[str, ...]:
    """The buffers that a step reads or frees."""
    return step.buffers if isinstance(step, Free) else reads(step)


def both(tag: int, peer: int, out: int = 4, back: int = 4) -> Exchange:
    return Exchange((tag, 0), {peer: out}, {peer: back})


GOOD = [[both(0, 1), both(2, 2)], [both(0, 0), both(1, 2)], [both(1, 1), both(2, 0)]]


def test_a_safe_script_gets_through():
    assert simulate(GOOD) == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[both(0, 1), both(2, 2)], [both(1, 2), both(0, 0)], [both(2, 0), both(1, 1)]], "wait for each other"),
        ([[both(0, 1)], [both(0, 0), both(1, 0)]], "rank 0 ended"),
        ([[both(0, 1), both(1, 1)], [both(1, 0), both(0, 0)]], "different messages"),
        ([[both(0, 1, out=8)], [both(0, 0)]], "sent"),
        ([[Exchange((0, 0), {1: 4}, {})], [Exchange((0, 0), {}, {})]], "rank 1 ended"),
        ([[both(0, 0)]], "rank 0 exchanges with rank 0"),
        ([[both(0, 5)]], "rank 0 exchanges with rank 5"),
    ],
)  # fmt: skip
def test_scripts_that_block_are_refused(bad, message):
    with pytest.raises(LawError, match="no_deadlock") as e:
        simulate(bad)
    assert re.search(message, str(e.value))


def total(program: Program) -> int:
    return sum(transfer_bytes(s, program) for s in program.steps if isinstance(s, Transfer | Reduce))


@pytest.mark.parametrize("name", ["attention", "norms", "reductions", "branches"])
def test_scripts_carry_the_bytes_that_the_plan_counts(name):
    for mesh in ("2", "5", "2x2", "3x2"):
        for seed in range(3):
            plan = random_plan(case(name).graph, mesh_of(mesh), random.Random(f"{name} {mesh} {seed}"))
            program = lower(plan)
            found = scripts(program)
            simulate(found)
            check(program)
            assert sum(sum(e.sends.values()) for s in found for e in s) == total(program)


# what the runtime posts


def posted(plan: Plan, program: Program, world: int) -> tuple[list[list[Exchange]], int, set[int]]:
    """What every rank really posts, without the outputs' way to rank 0; bytes in all; steps that are collectives."""
    slots, out, tensors, payload = shared(world), [], plan.graph.tensors, 0
    source = lambda t, box: torch.empty(shape(box), dtype=TORCH_DTYPES[tensors[t].dtype], device="meta")  # noqa: E731
    width = max(Counter(owners(program.devices, world)).values())
    collective: set[int] = set()
    for r in range(world):
        wire = Recorder(r, world, bytes(16), Heartbeat(slots, r), end=len(program.steps), width=width, checking=False)
        machine = RankExecutor(plan.graph, program, Shapes(), source, plan.streamed, wire=wire)
        machine.run(source)
        out.append(wire.script)
        payload += wire.payload
        collective |= {at for at, m in machine.moves.items() if m.collective}
    return out, payload, collective


def partners(script: list[Exchange], collective: set[int]) -> list[tuple]:
    """What is to be compared: of collectives who, of messages also how much; messages without bytes are not posted."""
    out = []
    for e in script:
        sent, received = ({p: n for p, n in x.items() if n} for x in (e.sends, e.receives))
        if e.tag[0] in collective:
            out += [(e.tag, e.partners)] if e.tag[1] == 0 else []
        elif sent or received:
            out.append((e.tag, sent, received))
    return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["attention", "norms", "conv_chain", "branches"])
def test_the_runtime_posts_what_was_simulated(name):
    by_calls = 0
    for mesh, worlds in (("4", (1, 2, 3, 4)), ("3x2", (5, 6))):
        for seed in range(3):
            plan = random_plan(case(name).graph, mesh_of(mesh), random.Random(f"{name} {mesh} {seed}"))
            program = lower(plan)
            for world in worlds:
                found, payload, collective = posted(plan, program, world)
                simulate(found)
                wanted = scripts(program, world)
                assert [partners(s, collective) for s in found] == [partners(s, collective) for s in wanted]
                assert world < program.devices or payload == total(program)
                by_calls += len(collective)
    assert by_calls > 0 or name == "conv_chain"


@pytest.mark.slow
def test_a_thousand_ranks_get_through():
    """Data and tensor parallelism on 128 x 8 devices, by the runtime's own code: sums among 8 by a call, then a resharding in
    which each rank has messages for 127 others or more. Every rank posts what was simulated."""
    graph = parse("""graph g
input x: f32[1024, 64]
input w: f32[64, 64]
input v: f32[64, 64]
h: f32[1024, 64] = op [i: 1024, n: 64 | m: 64 sum]
  reads x[i, m], w[m, n]
  body x * w
y: f32[1024, 64] = op [i: 1024, n: 64 | m: 64 sum]
  reads h[i, m], v[m, n]
  body h * v
z: f32[1024, 64] = op [i: 1024, n: 64]
  reads y[i, n]
  body exp(y)
output z
""")
    mesh = mesh_of("128x8")
    pick = lambda k, dims, out: next(s for s in strategies(graph.ops[k], mesh) if s.dims == dims and s.out == out)  # noqa: E731
    chosen = (pick(0, ("i", "n"), (0, 1)), pick(1, ("i", "m"), (0, None)), pick(2, ("i", "n"), (0, 1)))
    plan = Plan(graph=graph, mesh=mesh, strategies=chosen, outputs={"z": (None, 0)})
    program = lower(plan)
    found, payload, collective = posted(plan, program, 1024)
    wanted = scripts(program)
    assert simulate(found) > 1024 * 7 and simulate(wanted) > 1024 * 7 and payload == total(program)
    assert [partners(s, collective) for s in found] == [partners(s, collective) for s in wanted]
    assert collective == {k for k, s in enumerate(program.steps) if isinstance(s, Reduce)} and len(collective) == 1
    (moved,) = (k for k, s in enumerate(program.steps) if isinstance(s, Transfer))
    last = [[len(e.partners) for e in s if e.tag[0] == moved] for s in found]
    assert all(len(rounds) == 1 and rounds[0] >= 127 for rounds in last)
