"""The rewrites between the lifted graph and a plan's as one JSON document that replays: docs/reference/history.schema.json.

A build's log says what changed, and is undone from the plan's graph (`rewriting.rewrite_log`). The document has the graph
that it leads back to as well, so that it can be read and replayed forwards, without the build: every step is held to the
graph as it is then, and proved once more. An operation's id is the name of its first result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tapestry.errors import BuildError, LawError, TapestryError, inside, pointer_of
from tapestry.ir.graph import Graph, Op, Rewrite
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.verify.rewriting.proofs import prove_change
from tapestry.verify.rewriting.regions import Change
from tapestry.verify.rewriting.rewrite_log import Log, Made, digest, exchange, replay, undone

SCHEMA = "tapestry-history/1"


class StepData(msgspec.Struct, forbid_unknown_fields=True):
    """A rewrite: by which move or rule, the regions before and after as IR text, and ids of what went, came and was kept."""

    by: str
    before: str
    after: str
    gone: tuple[str, ...]
    come: tuple[str, ...]
    kept: tuple[str, ...]
    exact: bool = False


class HistoryData(msgspec.Struct, forbid_unknown_fields=True):
    """The first graph as IR text, the steps in order, and SHA-256 of the operations at both ends."""

    schema: str
    begin: str
    begin_sha256: str
    end_sha256: str
    steps: tuple[StepData, ...]


@dataclass(frozen=True, slots=True)
class History:
    """What a replay gave: the last graph, and how many results were shown to be the same by what."""

    graph: Graph
    steps: int
    shown: Mapping[str, int]
    end_sha256: str


def to_document(log: Log, plan: Graph) -> dict[str, Any]:
    """The document of a build's log. A weight that the plan does not read any more is an input of its first graph: the log does
    not say which bytes it was.

    Raises:
        LawError: as `rewrite_log.replay`.
    """
    steps: list[StepData] = []
    for step in log.steps:
        change = Change.of(step)
        texts = to_text(step.before), to_text(step.after)
        steps.append(StepData(step.by, *texts, _ids(change.gone), _ids(change.come), _ids(change.kept), step.exact))
    begin = _assembled(replay(log, plan).begin, plan)
    data = HistoryData(SCHEMA, to_text(begin), log.begin, digest({op.outs[0]: (op, plan) for op in plan.ops}), tuple(steps))
    return msgspec.to_builtins(data)


def first_graph(log: Log, plan: Graph) -> Graph:
    """The graph that a log begins with; nothing is proved. A weight that the plan does not read any more is an input of it.

    Raises:
        LawError: as `rewrite_log.undone`.
    """
    return _assembled(undone(log, plan), plan)


def _ids(ops: Mapping[str, Op]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(op.outs[0] for op in ops.values()))


def from_document(data: bytes, where: str) -> History:
    """Replay a document: every step is applied and proved.

    Raises:
        BuildError: it does not read; LawError: a step is not of the graph before it, does not say the same before and after, or
            they lead elsewhere. The error's ``pointer`` says to what in the document it belongs.
    """
    try:
        d = msgspec.json.decode(data, type=HistoryData)
        if d.schema != SCHEMA:
            raise ValueError(f"schema '{d.schema}' at `$.schema`")
    except (msgspec.MsgspecError, RecursionError, ValueError) as e:
        error = BuildError(f"not a history of rewrites: {e}", where=where)
        error.pointer = pointer_of(str(e))
        raise error from None
    with inside("/begin"):
        begin = parse(d.begin, where)
    there: dict[str, Made] = {op.outs[0]: (op, begin) for op in begin.ops}
    with inside("/begin_sha256"):
        _check_held(there, d.begin_sha256, "the first graph")
    shown = Counter[str]()
    for k, s in enumerate(d.steps):
        with inside(f"/steps/{k}"):
            shown += _step(s, there, begin, where)
    with inside("/end_sha256"):
        _check_held(there, d.end_sha256, "the last graph")
    return History(_assembled(there, begin), len(d.steps), dict(shown), d.end_sha256)


def _check_held(there: Mapping[str, Made], sha256: str, what: str) -> None:
    found = digest(there)
    if found != sha256:
        raise LawError("rewrites", f"{what} is another one than the document says", why=f"its SHA-256 is {found}")


def _step(s: StepData, there: dict[str, Made], begin: Graph, where: str) -> Counter[str]:
    """Apply one step to the operations, and prove it."""
    sides: list[Graph] = []
    for name, text in (("before", s.before), ("after", s.after)):
        with inside(f"/{name}"):
            sides.append(parse(text, where))
    change = Change.of(Rewrite(s.by, sides[0], sides[1], s.exact))
    if (s.gone, s.come, s.kept) != (_ids(change.gone), _ids(change.come), _ids(change.kept)):
        raise LawError("rewrites", "'gone', 'come' and 'kept' are not those of its texts", where=s.by)
    exchange(there, (change.gone, sides[0]), (change.come, sides[1]), change.kept, begin.outputs, s.by)
    return prove_change(change)


def _assembled(there: Mapping[str, Made], of: Graph) -> Graph:
    """Operations, each behind what it reads, as a graph with the inputs, outputs and weights of another one."""
    makers = {t: op for op, _ in there.values() for t in op.outs}
    order: dict[str, Op] = {}
    for first in makers.values():
        _after(first, makers, order)
    tensors = {t: g.tensors[t] for op, g in there.values() for t in (*op.inputs, *op.outs)}
    tensors = {t: x for t, x in of.tensors.items() if t in {*of.inputs, *of.weights}} | tensors
    given = [t for op in order.values() for t in op.inputs if t not in makers and t not in of.weights]
    inputs = tuple(dict.fromkeys((*of.inputs, *given)))
    read = {t for op in order.values() for t in op.inputs}
    weights = {t: w for t, w in of.weights.items() if t in read or t in of.outputs}
    kinds = dict.fromkeys(inputs, "input") | dict.fromkeys(weights, "weight") | dict.fromkeys(makers, "value")
    table = {t: replace(x, kind=kinds[t]) for t, x in tensors.items() if t in kinds}
    return Graph(name=of.name, tensors=table, ops=tuple(order.values()), inputs=inputs, outputs=of.outputs, weights=weights)


def _after(op: Op, makers: Mapping[str, Op], order: dict[str, Op]) -> None:
    """Put an operation behind all that it reads.

    Raises:
        TapestryError: operations read each other in a circle.
    """
    stack: list[tuple[Op, Iterable[str]]] = [(op, iter(op.inputs))]
    open_ops = {op.outs[0]}
    while stack:
        at, rest = stack[-1]
        maker = next((makers[t] for t in rest if t in makers and makers[t].outs[0] not in order), None)
        if maker is None:
            order.setdefault(at.outs[0], at)
            stack.pop()
        elif maker.outs[0] in open_ops and any(maker is o for o, _ in stack):
            raise TapestryError("operations read each other in a circle", where=f"'{maker.outs[0]}'")
        else:
            open_ops.add(maker.outs[0])
            stack.append((maker, iter(maker.inputs)))
