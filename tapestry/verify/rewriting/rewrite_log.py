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
from dataclasses import dataclass

from tapestry.errors import BuildError, LawError, TapestryError, damaged
from tapestry.ir.graph import Graph, Op, Rewrite
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import op_text, to_text
from tapestry.verify.rewriting.proofs import prove_change
from tapestry.verify.rewriting.regions import Change, region

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
    return region(graph, ops, tuple(t for op in ops for t in op.outs if t in change.needed))


def read(data: bytes, where: str) -> Log:
    """A stored log.

    Raises:
        BuildError: it does not read.
    """
    try:
        text = gzip.decompress(data).decode()
        if not text.startswith(HEAD):
            raise damaged("rewrites of another version", where)
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
) -> None:
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
