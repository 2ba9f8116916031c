"""The rewrites behind a plan as text, and their replay: docs/reference/rewrites.md has the format.

A step is two graphs of IR text: what changed, with what was read to prove it, before and after. The log is held to the plan by
undoing its steps, the last one first: what a step made must be there, and what it replaced takes its place.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tapestry.errors import BuildError, LawError, TapestryError
from tapestry.ir.graph import Graph, Op, Rewrite
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import op_text, to_text
from tapestry.verify.rewriting.proofs import prove_step
from tapestry.verify.rewriting.regions import MOST_KEPT, Change

HEAD = "# rewrites of version 1\n"
_STEP = re.compile(r'^step ("(?:[^"\\]|\\.)*")( exact)?\n', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay showed: steps, and how many results by what evidence; operations of the graph that they began with."""

    steps: int
    shown: Mapping[str, int]
    operations: int


def written(steps: Iterable[Rewrite]) -> bytes:
    """The log as it is stored."""
    parts = [HEAD]
    for s in steps:
        small = _small(s)
        parts.append(f"step {json.dumps(s.by)}{' exact' if s.exact else ''}\n{to_text(small.before)}=>\n{to_text(small.after)}")
    return gzip.compress("".join(parts).encode(), mtime=0)


def _small(step: Rewrite) -> Rewrite:
    """The step with no more of both graphs than its proof looks at."""
    change = Change.of(step)
    kept = dict[str, Op]()
    reach = [t for op in (*change.gone.values(), *change.come.values()) for t in op.inputs]
    place = {t: k for k, op in enumerate(step.before.ops) for t in op.outs}
    for _ in range(MOST_KEPT):
        near = [t for t in reach if t in change.kept and t not in kept]
        if not near:
            break
        op = change.kept[max(near, key=lambda t: place[t])]
        kept |= dict.fromkeys(op.outs, op)
        reach += op.inputs
    wanted = {id(op) for op in kept.values()}
    sides = [
        _part(graph, wanted | {id(op) for op in own.values()}, change.needed)
        for graph, own in ((step.before, change.gone), (step.after, change.come))
    ]
    return Rewrite(step.by, sides[0], sides[1], step.exact)


def _part(graph: Graph, wanted: set[int], needed: frozenset[str]) -> Graph:
    ops = tuple(op for op in graph.ops if id(op) in wanted)
    made = {t for op in ops for t in op.outs}
    inputs = tuple(dict.fromkeys(t for op in ops for t in op.inputs if t not in made))
    tensors = {t: graph.tensors[t] for t in (*inputs, *made)}
    return Graph(name="region", tensors=tensors, ops=ops, inputs=inputs, outputs=tuple(t for t in made if t in needed))


def read(data: bytes, where: str) -> list[Rewrite]:
    """The steps of a stored log.

    Raises:
        BuildError: it does not read.
    """
    try:
        text = gzip.decompress(data).decode()
        if not text.startswith(HEAD):
            raise BuildError("rewrites of another version", where=where, hint="compile the model again")
        return list(_steps(text))
    except (OSError, EOFError, UnicodeDecodeError, ValueError) as e:
        raise BuildError(f"not a log of rewrites: {e}", where=where) from None


def _steps(text: str) -> Iterator[Rewrite]:
    heads = list(_STEP.finditer(text))
    for head, end in zip(heads, [*(h.start() for h in heads[1:]), len(text)], strict=True):
        before, _, after = text[head.end() : end].partition("\n=>\n")
        try:
            yield Rewrite(json.loads(head.group(1)), parse(before + "\n"), parse(after), bool(head.group(2)))
        except TapestryError as e:
            raise BuildError(f"a step of the rewrites does not read: {e.what}", where=head.group(1)) from None


def replay(steps: list[Rewrite], plan: Graph) -> Replayed:
    """Undo the steps from the plan's graph to where they began, and prove each.

    Raises:
        LawError: a step is not of this plan, or does not say the same before and after.
    """
    there = {op.outs[0]: op for op in plan.ops}
    shown = Counter[str]()
    for k in range(len(steps) - 1, -1, -1):
        step, where = steps[k], f"rewrite {k} ({steps[k].by})"
        change = Change.of(step)
        for t, op in change.come.items():
            if t == op.outs[0] and _unlike(there.pop(t, None), plan, op, step.after):
                raise LawError("rewrites", f"'{t}' is not what the log says", where=where)
        kept = {op.outs[0]: op for op in step.before.ops if op.outs[0] in change.kept}
        for t, op in kept.items():
            if _unlike(there.get(t), plan, op, step.before):
                raise LawError("rewrites", f"'{t}' is not what the log says", where=where)
        read = {t for op in there.values() for t in op.inputs} | {*plan.outputs}
        loose = sorted((read & change.gone.keys()) - set(step.before.outputs))
        if loose:
            raise LawError("rewrites", f"'{loose[0]}' is read, and the log does not prove it", where=where)
        there |= {op.outs[0]: op for op in change.gone.values()}
        shown += prove_step(step)
    return Replayed(len(steps), dict(shown), len(there))


def _unlike(op: Op | None, graph: Graph, other: Op, region: Graph) -> bool:
    """Whether an operation that should be the same is not; types of what it touches are part of it where both know them."""
    if op is None:
        return True
    if op is other or op == other:
        return any(graph.tensors.get(t, region.tensors[t]).dtype != region.tensors[t].dtype for t in other.outs)
    return op.outs != other.outs or op_text(op, region) != op_text(other, region)
