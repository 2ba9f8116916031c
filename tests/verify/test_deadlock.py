"""No message blocks: scripts that would are refused, those of random programs are not, and they are what the runtime posts,
which is tried on 1,024 ranks."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.errors import LawError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import shape
from tapestry.ir.plan import Plan
from tapestry.ir.program import Program, Reduce, Transfer, transfer_bytes
from tapestry.ir.syntax.parser import parse
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tapestry.runtime.processes.distributed import RankExecutor
from tapestry.runtime.processes.heartbeat import Heartbeat, shared
from tapestry.verify.deadlock import Exchange, check, scripts, simulate
from tests.support.small_models import case, mesh_of, random_plan


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


@dataclass
class Recorder:
    """Stands in for the wire: notes what is posted, and hands out arrays without data."""

    rank: int
    world: int
    heartbeat: Heartbeat
    script: list[Exchange] = field(default_factory=list)
    steps: int = 0
    left: int = 0
    agenda: list = field(default_factory=list)
    payload: int = 0
    gathered: int = 0
    batch: int = 0

    def expect(self, agenda):
        self.agenda = [(tag, {p: list(x) for p, x in receives.items()}) for tag, receives in agenda]

    def check_all(self):
        assert not self.agenda

    def post(self, tag, sends, receives):
        step, part = tag
        if receives and step < self.steps:
            assert self.agenda.pop(0) == (tag, dict(receives))
        nbytes = lambda pieces: sum(int(np.prod(s)) * d.itemsize for _, s, d in pieces)  # noqa: E731
        for pieces in sends.values():
            assert all(tuple(a.shape) == p[1] and a.dtype == p[2] for p, a in pieces)
        if sends or receives:
            given = {p: nbytes([piece for piece, _ in x]) for p, x in sends.items()}
            self.script.append(Exchange((step, part), given, {p: nbytes(x) for p, x in receives.items()}))
        return lambda: {p: [torch.empty(s, dtype=d, device="meta") for _, s, d in x] for p, x in receives.items()}

    def drain(self, keep, step):
        pass


class Shapes:
    """A target that computes shapes alone."""

    device = torch.device("meta")

    def kernel(self, graph: Graph, kernel):
        op = graph.ops[kernel.op]
        dtypes = [e.dtype for e in op.body] if kernel.mode == "partial" else [graph.tensors[t].dtype for t in op.outs]
        return lambda ins, states: [
            torch.empty(shape(b), dtype=TORCH_DTYPES[d], device="meta") for b, d in zip(kernel.outs, dtypes)
        ]

    def merge(self, monoid, states):
        return [torch.empty_like(x) for x in states[0]]


def posted(plan: Plan, program: Program, world: int) -> list[list[Exchange]]:
    """What every rank really posts, without the outputs' way to rank 0."""
    slots, out, tensors = shared(world), [], plan.graph.tensors
    source = lambda t, box: torch.empty(shape(box), dtype=TORCH_DTYPES[tensors[t].dtype], device="meta")  # noqa: E731
    for r in range(world):
        wire = Recorder(r, world, Heartbeat(slots, r), steps=len(program.steps))
        machine = RankExecutor(plan.graph, program, Shapes(), source, plan.streamed, wire=wire)  # type: ignore[arg-type]
        machine.run(source)
        out.append([e for e in wire.script if e.tag[0] < len(program.steps)])
    return out


@pytest.mark.parametrize("name", ["attention", "norms", "conv_chain", "branches"])
def test_the_runtime_posts_what_was_simulated(name):
    for mesh, worlds in (("4", (1, 2, 3, 4)), ("3x2", (5, 6))):
        for seed in range(3):
            plan = random_plan(case(name).graph, mesh_of(mesh), random.Random(f"{name} {mesh} {seed}"))
            program = lower(plan)
            for world in worlds:
                found = posted(plan, program, world)
                simulate(found)
                plain = lambda s: [(e.sends, e.receives) for e in s]  # noqa: E731
                assert [plain(s) for s in found] == [plain(s) for s in scripts(program, world)]


def test_a_thousand_ranks_get_through():
    """Data and tensor parallelism on 128 x 8 devices: all-reduces, gathers and resharding, by the runtime's own code."""
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
    found = posted(plan, program, 1024)
    assert simulate(found) == simulate(scripts(program)) > 1024 * 7
    assert sum(sum(e.sends.values()) for s in found for e in s) == total(program)
