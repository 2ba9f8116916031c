"""What is to be done when devices are lost in the middle of a run: from what the others still hold, and no more than that."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any

from tapestry.ir.program import Load, Program
from tapestry.runtime.reordered.block_tasks import Task, Value
from tapestry.runtime.reordered.block_walk import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The tasks that are left after a loss.

    Attributes:
        tasks: in an order in which they can be done.
        lost: values that were there, are gone, and are to be made again.
        again: of the tasks, those that had been done before; ``restart``: all that had been, which a restart does again.
    """

    tasks: tuple[Task, ...]
    lost: int
    again: Work
    restart: Work

    def document(self) -> dict[str, Any]:
        """For the JSON of ``run``."""
        rows = {"again": self.again, "restart": self.restart}
        return {
            "lost_blocks": self.lost, "left_blocks": len(self.tasks),
            **{name: {"blocks": w.tasks, "flops": w.flops, "bytes": w.nbytes} for name, w in rows.items()},
        }  # fmt: skip


def rest_of(
    tasks: Sequence[Task], program: Program, ends: Collection[Value], held: Set[Value], reached: Sequence[int], gone: Set[int],
    weights: Collection[str],
) -> Rest:  # fmt: skip
    """What is left to do so that all of ``ends`` are held.

    Args:
        held: values that are there.
        reached: for each device the step that it was at.
        gone: devices that are lost; their tasks are done elsewhere. The others have their ``weights`` loaded.
    """
    maker = {v: k for k, t in enumerate(tasks) for v in t.outs}
    todo, stack, missing = set[int](), [v for v in ends if v not in held], set[Value]()
    while stack:
        v = stack.pop()
        missing.add(v)
        k = maker[v]
        if k not in todo:
            todo.add(k)
            stack += [r for r in tasks[k].reads if r not in held]
    again, restart = Work(), Work()
    for k, t in enumerate(tasks):
        if t.step >= reached[t.device]:
            continue
        restart.add(1, t.flops, t.planned)
        if k in todo:
            step = program.steps[t.step]
            loaded = isinstance(step, Load) and program.buffers[step.buffer].tensor in weights and t.device not in gone
            again.add(1, t.flops, 0 if loaded else t.planned)
    lost = sum(tasks[maker[v]].step < reached[v[0]] for v in missing if v[0] in gone)
    return Rest(tasks=tuple(tasks[k] for k in sorted(todo)), lost=lost, again=again, restart=restart)


def adopted(hosts: Sequence[int], survivors: Sequence[int]) -> tuple[int, ...]:
    """The rank of each device when some ranks are lost: devices of those go to the ranks that have fewest."""
    out = [r if r in survivors else -1 for r in hosts]
    for d, r in enumerate(out):
        if r < 0:
            out[d] = min(survivors, key=lambda s: (out.count(s), s))
    return tuple(out)
