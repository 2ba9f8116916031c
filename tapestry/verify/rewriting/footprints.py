"""Dependences by isl: which cells of the inputs each cell of the output reads, before and after, for all cells at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry.ir import laws, space
from tapestry.ir.expr import Arg, Call, Const, Expr, arg_positions, call, rewrite
from tapestry.ir.graph import Block, Graph, Rewrite, map_exprs, with_ops
from tapestry.ir.kernel import whole
from tapestry.ir.space import Point
from tapestry.ir.types import FLOATS

OPERATIONS = 400_000  # of isl, for one comparison: about a second


@dataclass(frozen=True, slots=True)
class Difference:
    """A pair of cells that is a dependence on one side alone: ``lost`` or ``gained``."""

    verb: str
    source: str
    cell: Point
    read: Point


def compare(before: Graph, after: Graph) -> list[Difference] | None:
    """A witness for every input and direction in which dependences differ; ``None`` where isl takes too long."""
    try:
        with space.bounded(OPERATIONS):
            return _compare(before, after)
    except space.TooHard:
        return None


def _compare(before: Graph, after: Graph) -> list[Difference]:
    (out,) = before.outputs
    box = whole(before.tensors[out].shape)
    old, new = laws.dependences(before, out), laws.dependences(after, after.outputs[0])
    found = list[Difference]()
    for source in {**old, **new}:
        for one, other, verb in ((old.get(source), new.get(source), "lost"), (new.get(source), old.get(source), "gained")):
            if one is None or (one := one.image(box)) is None:
                continue
            point = one.witness(other)
            if point is not None:
                found.append(Difference(verb, source, *point))
    return found


# A graph whose values are assumed to be finite: tests for NaN and infinities are false, and what only they chose is gone.
#
# This is no rewrite that can be proved: it is the user's word (``--assume-finite``). It stands in the log under a name of its
# own, so that a checker counts what rests on it, and makes the same graph again.


ASSUMED = "assume_finite"
TESTS = ("isnan", "isinf")
FALSE = Const(False, "bool")


def assume_finite(graph: Graph) -> Graph:
    """The graph without its tests for NaN and infinities, with that in its log; the same graph where it has none."""
    out = _assumed(graph)
    return replace(out, log=Rewrite(ASSUMED, graph, out)) if out.ops != graph.ops else graph


def tests_dropped(graph: Graph) -> int:
    """How many operations behind a graph are as they are by this assumption."""
    step = graph.log
    while step is not None and step.by != ASSUMED:
        step = step.before.log
    return 0 if step is None else sum(a is not b for a, b in zip(step.before.ops, step.after.ops, strict=True))


def follows(before: Graph, after: Graph) -> bool:
    """Whether a graph is another one under the assumption, operation by operation."""
    return _assumed(before).ops == after.ops


def _assumed(graph: Graph) -> Graph:
    never = set[str]()  # tensors that are false everywhere
    ops = list(graph.ops)
    for k, op in enumerate(ops):
        if not isinstance(op, Block):
            continue
        known = {i: FALSE for i, r in enumerate(op.reads) if r.tensor in never and not r.when and r.other is None}
        new = map_exprs(
            op, lambda e, known=known: _without(rewrite(e, lambda x: known.get(x.pos, x) if isinstance(x, Arg) else x))
        )
        if new != op:
            ops[k] = new = _pruned(new)
        if not new.monoid and all(e == FALSE for e in new.body):
            never |= {*new.outs}
    return with_ops(graph, tuple(ops))


def _without(e: Expr) -> Expr:
    """An expression with tests of floats false, and the choices made that follow."""
    if not isinstance(e, Call):
        return e
    args = tuple(map(_without, e.args))
    if e.fn in TESTS and args[0].dtype in FLOATS:
        return FALSE
    if e.fn == "where" and args[0] == FALSE:
        return args[2]
    if e.fn in ("and", "or") and FALSE in args:
        return FALSE if e.fn == "and" else args[1 - args.index(FALSE)]
    return e if args == e.args else replace(e, args=args) if e.fn == "cast" else call(e.fn, *args)


def _pruned(op: Block) -> Block:
    """An operation without the reads that nothing uses any more."""
    used = sorted(arg_positions((*op.point, *op.then)))
    places = {k: i for i, k in enumerate(used)}
    moved = map_exprs(op, lambda e: rewrite(e, lambda x: replace(x, pos=places[x.pos]) if isinstance(x, Arg) else x))
    return replace(moved, reads=tuple(op.reads[k] for k in used))
