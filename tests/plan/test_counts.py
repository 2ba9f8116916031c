"""Counts are not sent: what the blocks say is filled in at the merge, and the checker works it out for itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.errors import LawError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.plan import Plan, Strategy
from tapestry.ir.program import Program, Reduce, transfer_bytes
from tapestry.ir.recognition.state import counted
from tapestry.ir.syntax.parser import parse
from tapestry.plan.cost.compute import state_bytes
from tapestry.plan.lower import lower
from tapestry.plan.strategy import op_boxes
from tapestry.plan.topology import parse_mesh
from tapestry.rewrites.core.rule_check import random_feeds
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.verify import certificate, interp
from tests.support.small_models import assert_same


def graph(body: str = "1.0, x, 0.0", monoid: str = "moments", then: str = "acc1, acc2 / acc0") -> Graph:
    outs = ", ".join(f"y{k}: f32[6, 4]" for k in range(len(then.split(","))))
    names = ", ".join(f"y{k}" for k in range(len(then.split(","))))
    return parse(f"""graph g
input x: f32[6, 4, 11, 7]
{outs} = op [a: 6, b: 4 | m: 11 {monoid}, n: 7 {monoid}]
  reads x[a, b, m, n]
  body {body}
  then {then}
output {names}
""")


def plan(g: Graph, mesh: str, dims: tuple[str | None, ...], out: tuple[int | None, ...]) -> Plan:
    return Plan(graph=g, mesh=parse_mesh(mesh), strategies=(Strategy(dims, out),))


class Poisoned(TorchCpu):
    """Leaves no count in the partial states: a merge that looks at one gives NaN."""

    def kernel(self, graph: Graph, kernel: Kernel) -> Any:
        run = super().kernel(graph, kernel)

        def spoiled(ins: Any, states: Any) -> Any:
            out = run(ins, states)
            return [out[0].fill_(float("nan")), *out[1:]] if kernel.mode == "partial" else out

        return spoiled


CASES = [
    ("3", ("m",), (None,)), ("3", ("m",), (0,)), ("2x2", ("m", "n"), (None, None)), ("2x2", ("m", "m"), (1, None)),
    ("2x3", ("n", "m"), (0, None)), ("2x2", ("m", "a"), (None, 0)),
]  # fmt: skip


@pytest.mark.parametrize("mesh,dims,out", CASES, ids=str)
def test_merges_never_look_at_a_count(mesh, dims, out) -> None:
    """Parts of different sizes, one merge after another, scattered or not."""
    g = graph()
    p = plan(g, mesh, dims, out)
    program = lower(p)
    certificate.check(p.annotated(), program, mesh=p.mesh)
    reduces = [s for s in program.steps if isinstance(s, Reduce)]
    assert reduces and all(len(s.sent) == 2 for s in reduces)
    assert all(set(s.known[0]) <= {float(k * n) for k in range(1, 12) for n in range(1, 8)} for s in reduces)
    feeds = random_feeds(g, np.random.default_rng(0))

    def source(tensor: str, box: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(feeds[tensor][tuple(slice(*b) for b in box)]))

    outs, measured = LocalExecutor(g, program, Poisoned(), source).run(source)
    assert_same({t: a.numpy() for t, a in outs.items()}, interp.run(g, feeds, wide=True), g)
    assert sum(b for _, b in measured.transfers.values()) == sum(transfer_bytes(s, program) for s in reduces)


def test_two_thirds_of_the_bytes() -> None:
    p = plan(graph(), "4", ("m",), (None,))
    (step,) = (s for s in lower(p).steps if isinstance(s, Reduce))
    assert transfer_bytes(step, lower(p)) == 2 * 3 * 2 * (6 * 4 * 4)  # two fields of 24 cells
    op = p.graph.ops[0]
    assert state_bytes(op, op_boxes(op, ("m",), p.mesh)) == 2 * 24 * 4


def test_what_counts() -> None:
    assert counted(graph().ops[0]) == {0: 1.0}  # type: ignore[arg-type]
    assert counted(graph("2.0", "sum", "acc0").ops[0]) == {0: 2.0}  # type: ignore[arg-type]
    for other in (
        graph("x", "sum", "acc0"),
        graph("x, 1.0", "logsumexp", "acc0, acc1"),
        graph("2.0", "max", "acc0"),
        graph("x, x, 0.0"),
    ):
        assert counted(other.ops[0]) == {}  # type: ignore[arg-type]


def broken(program: Program, **changes: Any) -> Program:
    return replace(program, steps=tuple(replace(s, **changes) if isinstance(s, Reduce) else s for s in program.steps))


def test_a_wrong_count_is_refused() -> None:
    p = plan(graph(), "3", ("m",), (None,))
    program, values = lower(p), (21.0, 28.0, 28.0)
    (step,) = (s for s in program.steps if isinstance(s, Reduce))
    assert step.known == (values, (), ())
    for known, message in [
        (((21.0, 28.0, 27.0), (), ()), "not what a device's part counts"),
        (((21.0, 28.0), (), ()), "not known for every device"),
        ((values, values, ()), "field 1 of the states is no count"),
        (((), (), (0.0, 0.0, 0.0)), "field 2 of the states is no count"),  # constant, but not merged by a sum
        ((values,), "differ in number"),
    ]:
        with pytest.raises(LawError, match=message):
            certificate.check(p.annotated(), broken(program, known=known), mesh=p.mesh)
