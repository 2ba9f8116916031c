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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tapestry.errors import BuildError, LawError, TapestryError
from tapestry.ir.graph import Graph, Op, Rewrite
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import op_text, to_text
from tapestry.verify.rewriting.proofs import prove_change
from tapestry.verify.rewriting.regions import Change

HEAD = "# rewrites of version 1 of "
_STEP = re.compile(r'^step ("(?:[^"\\]|\\.)*")( exact)?\n', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay showed: steps, and how many results by what evidence; operations of the graph that they began with."""

    steps: int
    shown: Mapping[str, int]
    operations: int


@dataclass(frozen=True, slots=True)
class Log:
    """What a stored log holds: the digest of the graph that it begins with, and the steps."""

    begin: str
    steps: list[Rewrite]


def digest(ops: Mapping[str, tuple[Op, Graph]]) -> str:
    """SHA-256 of operations, each with a graph that has the types of what it writes, whatever their order."""
    return hashlib.sha256("\n".join(sorted(op_text(op, graph) for op, graph in ops.values())).encode()).hexdigest()


def proved(begin: Graph, steps: Iterable[Rewrite]) -> tuple[bytes, Counter[str]]:
    """Prove every step from a graph on; the log as it is stored, and how many results were shown by what.

    Raises:
        LawError: as `prove_step`.
    """
    parts = [f"{HEAD}{digest({op.outs[0]: (op, begin) for op in begin.ops})}\n"]
    shown = Counter[str]()
    for s in steps:
        change = Change.of(s)
        shown += prove_change(change)
        before, after = (_part(g, change, own) for g, own in ((s.before, change.gone), (s.after, change.come)))
        parts.append(f"step {json.dumps(s.by)}{' exact' if s.exact else ''}\n{to_text(before)}=>\n{to_text(after)}")
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
    steps, there = log.steps, {op.outs[0]: (op, plan) for op in plan.ops}
    shown = Counter[str]()
    for k in range(len(steps) - 1, -1, -1):
        step, where = steps[k], f"rewrite {k} ({steps[k].by})"
        change = Change.of(step)
        for t, op in change.come.items():
            if t == op.outs[0] and _unlike(there.pop(t, None), op, step.after):
                raise LawError("rewrites", f"'{t}' is not what the log says", where=where)
        kept = {op.outs[0]: op for op in step.before.ops if op.outs[0] in change.kept}
        for t, op in kept.items():
            if _unlike(there.get(t), op, step.before):
                raise LawError("rewrites", f"'{t}' is not what the log says", where=where)
        read = {t for op, _ in there.values() for t in op.inputs} | {*plan.outputs}
        loose = sorted((read & change.gone.keys()) - set(step.before.outputs))
        if loose:
            raise LawError("rewrites", f"'{loose[0]}' is read, and the log does not prove it", where=where)
        there |= {op.outs[0]: (op, step.before) for op in change.gone.values()}
        shown += prove_change(change)
    if digest(there) != log.begin:
        raise LawError("rewrites", "the log does not lead back to the graph that it says it begins with")
    return Replayed(len(steps), dict(shown), len(there))


def _unlike(found: tuple[Op, Graph] | None, op: Op, region: Graph) -> bool:
    """Whether an operation is missing, or another one than a log says."""
    return found is None or op_text(*found) != op_text(op, region)
