"""Pipeline stages that a user or a file gives: by the nodes at which stages end, or by the stage of every node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from tapestry.errors import PlanError
from tapestry.ir.graph import Graph
from tapestry.plan.pipelines.stage_constraints import needed, stage_numbers
from tapestry.sharding.annotations import Annotations


def at_nodes(nodes: Sequence[str], lifted: Graph) -> dict[str, int]:
    """The stage of every tensor when stages end with these nodes (or, with commas, at several nodes together): each has what
    its nodes need and no earlier stage has; the last one has the rest.

    Raises:
        PlanError: there is no such operation, or a stage would have none.
    """
    makers, out = lifted.producers(), dict[str, int]()
    ends = [[*_operations(text, lifted)] for text in nodes]
    stages = needed(ends, lambda i: [makers[t] for t in lifted.ops[i].inputs if t in makers])
    for k, (text, mine) in enumerate(zip(nodes, stages, strict=True)):
        if not mine:
            before = f"'{text}' is needed by what '{nodes[k - 1]}' ends with" if k else ""
            raise PlanError("a stage would have no operation", where=f"--stage-at {text}", why=before, hint="another order")
        out |= {t: k for i in mine for t in lifted.ops[i].outs}
    rest = {t: len(nodes) for op in lifted.ops for t in op.outs if t not in out}
    if not rest:
        hint = "the last stage has what is left: leave this node out"
        raise PlanError("the last stage would have no operation", where=f"--stage-at {nodes[-1]}", hint=hint)
    return out | rest


def _operations(text: str, lifted: Graph) -> Iterator[int]:
    """The operations of the nodes that a text names: one name, or several with commas between them."""
    named = [text] if any(text in (*op.source, *op.outs) for op in lifted.ops) else text.split(",")
    for name in named:
        found = [i for i, op in enumerate(lifted.ops) if name in op.source or name in op.outs]
        if not found:
            known = sorted({s for op in lifted.ops for s in op.source})
            hint = f"for example {', '.join(get_close_matches(name, known, 4) or known[:6])}"
            why = "it is no node, or lifting folded it away"
            raise PlanError(f"there is no operation '{name}'", where=f"--stage-at {text}", why=why, hint=hint)
        yield from found


def of_file(marks: Annotations, lifted: Graph) -> dict[str, int]:
    """The stage of every tensor as the file's nodes say; one without a stage is in the first that has all it reads.

    Raises:
        PlanError: none of the operations is in one of the stages.
    """
    numbers = {k: n for n, k in enumerate(sorted({*marks.stage_of.values(), *marks.node_stages.values()}))}
    known: dict[str, int] = {}
    for op in lifted.ops:
        of_nodes = [numbers[marks.node_stages[s]] for s in op.source if s in marks.node_stages]
        for t in op.outs:
            if t in marks.stage_of or of_nodes:
                known[t] = numbers[marks.stage_of[t]] if t in marks.stage_of else max(of_nodes)
    found = {t: k for op, k in zip(lifted.ops, stage_numbers(lifted, known), strict=True) for t in op.outs}
    missing = set(range(len(numbers))) - set(found.values())
    if missing:
        what = f"pipeline stage {min(missing)} of the file has no operation"
        raise PlanError(what, where=marks.configuration, why="its nodes are views, constants, or dead", hint="--stages 1")
    return found
