"""The rewrites behind a plan as text, and their replay: docs/reference/rewrites.md has the format.

A step is two graphs of IR text: what changed, with what was read to prove it, before and after. The log is held to the plan by
undoing its steps, the last one first: what a step made must be there, and what it replaced takes its place.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tapestry.errors import BuildError, LawError, TapestryError, inside, pointer_of
from tapestry.ir.graph import Graph, Op, Rewrite
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import op_text, to_text
from tapestry.verify.rewriting.proofs import Change, prove_change

HEAD = "# rewrites of version 1 of "
_STEP = re.compile(r'^step ("(?:[^"\\]|\\.)*")( exact)?\n', re.MULTILINE)


Made = tuple[Op, Graph]
"""An operation, and a graph that has the types of what it reads and writes."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay showed: steps, how many results by what evidence, and the operations that it began with."""

    steps: int
    shown: Mapping[str, int]
    begin: Mapping[str, Made]


@dataclass(frozen=True, slots=True)
class Log:
    """What a stored log holds: the digest of the graph that it begins with, and the steps."""

    begin: str
    steps: list[Rewrite]


def digest(ops: Mapping[str, Made]) -> str:
    """SHA-256 of operations, each with a graph that has the types of what it writes, whatever their order."""
    return hashlib.sha256("\n".join(sorted(op_text(op, graph) for op, graph in ops.values())).encode()).hexdigest()


def proved(begin: Graph, steps: Iterable[Rewrite]) -> tuple[bytes, Counter[str]]:
    """Prove every step from a graph on; the log as it is stored, and how many results were shown by what.

    Raises:
        LawError: as `prove_step`, of the first rule that breaks a law, with all places where it does.
    """
    broken: LawError | None = None
    parts = [f"{HEAD}{digest({op.outs[0]: (op, begin) for op in begin.ops})}\n"]
    shown = Counter[str]()
    for s in steps:
        change = Change.of(s)
        try:
            shown += prove_change(change)
        except LawError as e:
            rule = s.by.partition("@")[0]
            e.rewrites = e.rewrites or frozenset({rule})
            broken = broken or e
            if all(place.partition("@")[0] == rule for place in broken.rewrites):  # others may be wrong by what it made
                broken.rewrites |= e.rewrites
        before, after = (_part(g, change, own) for g, own in ((s.before, change.gone), (s.after, change.come)))
        parts.append(f"step {json.dumps(s.by)}{' exact' if s.exact else ''}\n{to_text(before)}=>\n{to_text(after)}")
    if broken is not None:
        raise broken
    return gzip.compress("".join(parts).encode(), mtime=0), shown


def _part(graph: Graph, change: Change, own: Mapping[str, Op]) -> Graph:
    """No more of a graph than what changed and what the proof looked at."""
    wanted = {id(op) for op in (*own.values(), *change.used.values())}
    ops = tuple(op for op in graph.ops if id(op) in wanted)
    made = dict.fromkeys(t for op in ops for t in op.outs)
    inputs = tuple(dict.fromkeys(t for op in ops for t in op.inputs if t not in made))
    tensors = {t: graph.tensors[t] for t in (*inputs, *made)}
    outputs = tuple(t for t in made if t in change.needed)
    return Graph(name="region", tensors=tensors, ops=ops, inputs=inputs, outputs=outputs)


def read(data: bytes, where: str) -> Log:
    """A stored log.

    Raises:
        BuildError: it does not read.
    """
    try:
        text = gzip.decompress(data).decode()
        if not text.startswith(HEAD):
            raise BuildError("rewrites of another version", where=where, hint="compile the model again")
        return Log(text[len(HEAD) :].partition("\n")[0], list(_steps(text)))
    except (OSError, EOFError, UnicodeDecodeError, ValueError) as e:
        raise BuildError(f"not a log of rewrites: {e}", where=where) from None


def _steps(text: str) -> Iterator[Rewrite]:
    heads = list(_STEP.finditer(text))
    ends = [h.start() for h in heads[1:]] + [len(text)]
    for head, end in zip(heads, ends, strict=False):
        before, _, after = text[head.end() : end].partition("\n=>\n")
        try:
            yield Rewrite(json.loads(head.group(1)), parse(before + "\n"), parse(after), bool(head.group(2)))
        except TapestryError as e:
            raise BuildError(f"a step of the rewrites does not read: {e.what}", where=head.group(1)) from None


def replay(log: Log, plan: Graph) -> Replayed:
    """Undo a log's steps from the plan's graph to where they began, and prove each.

    Raises:
        LawError: a step is not of this plan, or does not say the same before and after.
    """
    shown = Counter[str]()

    def prove(change: Change) -> None:
        shown.update(prove_change(change))

    begin = undone(log, plan, prove)
    return Replayed(len(log.steps), dict(shown), begin)


def undone(log: Log, plan: Graph, each: Callable[[Change], None] = lambda change: None) -> dict[str, Made]:
    """The operations that a log began with; ``each`` sees every change, the last one first.

    Raises:
        LawError: a step is not of this plan, or they lead elsewhere.
    """
    steps, there = log.steps, {op.outs[0]: (op, plan) for op in plan.ops}
    for k in range(len(steps) - 1, -1, -1):
        change, where = Change.of(steps[k]), f"rewrite {k} ({steps[k].by})"
        exchange(there, (change.come, steps[k].after), (change.gone, steps[k].before), change.kept, plan.outputs, where)
        each(change)
    if digest(there) != log.begin:
        raise LawError("rewrites", "the log does not lead back to the graph that it says it begins with")
    return there


Side = tuple[Mapping[str, Op], Graph]


def exchange(
    there: dict[str, Made], out: Side, put: Side, kept: Mapping[str, Op], outputs: tuple[str, ...], where: str
) -> None:  # fmt: skip
    """Take one side of a change out of a graph's operations and put the other one in its place.

    Raises:
        LawError: what is taken out, or was kept, is not there; or something reads a result that the change does not prove.
    """
    for t, op in out[0].items():
        if t == op.outs[0] and _unlike(there.pop(t, None), op, out[1]):
            raise LawError("rewrites", f"'{t}' is not what the log says", where=where)
    for op in {op.outs[0]: op for op in put[1].ops if op.outs[0] in kept}.values():
        if _unlike(there.get(op.outs[0]), op, put[1]):
            raise LawError("rewrites", f"'{op.outs[0]}' is not what the log says", where=where)
    read = {t for op, _ in there.values() for t in op.inputs} | {*outputs}
    loose = sorted((read & put[0].keys()) - set(put[1].outputs))
    if loose:
        raise LawError("rewrites", f"'{loose[0]}' is read, and the log does not prove it", where=where)
    lost = sorted((read & out[0].keys()) - put[0].keys())
    if lost:
        raise LawError("rewrites", f"'{lost[0]}' is read, and nothing makes it any more", where=where)
    there |= {op.outs[0]: (op, put[1]) for op in put[0].values()}


def _unlike(found: Made | None, op: Op, region: Graph) -> bool:
    """Whether an operation is missing, or another one than a log says."""
    return found is None or op_text(*found) != op_text(op, region)


# The rewrites between the lifted graph and a plan's as one JSON document that replays: docs/reference/history.schema.json.
#
# A build's log says what changed, and is undone from the plan's graph (`rewriting.rewrite_log`). The document has the graph
# that it leads back to as well, so that it can be read and replayed forwards, without the build: every step is held to the
# graph as it is then, and proved once more. An operation's id is the name of its first result.


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
