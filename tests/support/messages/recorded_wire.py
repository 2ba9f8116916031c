"""Stand-ins for the wire and for a target: what is posted is noted, and nothing is computed or sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import shape
from tapestry.runtime.processes.process_groups import Team
from tapestry.runtime.processes.wire import Wire
from tapestry.verify.deadlock import Exchange


@dataclass
class Op:
    """A message that can be posted."""

    peer: int
    tag: int
    tensor: torch.Tensor
    sends: bool


class Teams:
    """Teams without process groups."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def team(self, groups) -> Team | None:
        mine = next((tuple(sorted(g)) for g in groups if self.rank in g), None)
        return mine and Team(mine, None)


@dataclass
class Recorder(Wire):
    """Notes what is posted in place of torch.distributed; a collective is an exchange with all of the team."""

    script: list[Exchange] = field(default_factory=list[Exchange])
    width: int = 1  # devices of a rank, at most
    end: int = 0
    ahead = 0
    device = torch.device("meta")
    backend = "gloo"

    def shake_hands(self, calls):
        pass

    def groups(self, mesh, partitions, timeout):
        return Teams(self.rank)

    def receiving(self, into, peer, tag):
        return Op(peer, tag, into, sends=False)

    def sending(self, peer, tag):
        return Op(peer, tag, torch.empty(0, dtype=torch.uint8), sends=True)

    def exchange(self, step, ops):
        part = {op.tag // self.width**2 - 2 * step for op in ops}
        assert part <= {0, 1} and len(part) == 1
        sent: list[dict[int, int]] = [{}, {}]
        for op in ops:
            assert op.tensor.dtype == torch.uint8 and op.tensor.is_contiguous()
            found = sent[not op.sends]
            found[op.peer] = found.get(op.peer, 0) + op.tensor.numel()
        if step < self.end:
            self.script.append(Exchange((step, part.pop()), *sent))
        return [object()] * len(ops)

    def wait(self, work, peers, step):
        pass

    def _call(self, name, team, step, function, *args):
        each = dict.fromkeys(team.others(self.rank), args[0].nbytes)
        self.script.append(Exchange((step, 0), each, each))
        return object()


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
