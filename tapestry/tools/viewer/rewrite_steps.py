"""The rewrites behind a plan, step by step: what went and what came in each, the gain in memory traffic, and by what it was
shown that results are the same. Equal changes are shown once, with how often they happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tapestry.ir.graph import Graph, Op
from tapestry.ir.syntax.printer import signature
from tapestry.tools.viewer.op_shapes import Row, text_of
from tapestry.verify.rewriting.proofs import prove_change
from tapestry.verify.rewriting.regions import Change
from tapestry.verify.rewriting.rewrite_log import Log

MOST = 12  # distinct changes of a step that are shown; the counts are of all
LARGEST = 60  # operations of a change that are drawn


def steps(log: Log) -> list[Row]:
    """Every step of a log, proved once more.

    Raises:
        LawError: a step changes what is computed.
    """
    return [_step(Change.of(s)) for s in log.steps]


def _step(change: Change) -> Row:
    before, after = change.step.before, change.step.after
    kinds: dict[tuple[object, ...], Row] = {}
    counts, bytes_each = Counter[tuple[object, ...]](), Counter[str]()
    for gone, come in _apart(change):
        key = (tuple(signature(op, before) for op in gone), tuple(signature(op, after) for op in come), len(gone), len(come))
        counts[key] += 1
        if key not in kinds:
            kinds[key] = _sides(gone, before, come, after)
        for side in ("before", "after"):
            bytes_each[side] += kinds[key][f"bytes_{side}"]
    shown = sorted(kinds, key=lambda k: -counts[k])[:MOST]
    return {
        "by": change.step.by,
        "exact": change.step.exact,
        "evidence": dict(prove_change(change)),
        "ops": [len({id(op) for op in ops.values()}) for ops in (change.gone, change.come)],
        "bytes": [bytes_each["before"], bytes_each["after"]],
        "distinct": len(kinds),
        "places": counts.total(),
        "changes": [{"times": counts[k], **kinds[k]} for k in shown],
    }


def _apart(change: Change) -> Iterator[tuple[list[Op], list[Op]]]:
    """The change as pairs of operations that went and came, apart where no tensor that either wrote joins them."""
    sides = [list({id(op): op for op in ops.values()}.values()) for ops in (change.gone, change.come)]
    own = {t for ops in sides for op in ops for t in op.outs}
    parent: dict[str, str] = {}

    def root(t: str) -> str:
        while parent.setdefault(t, t) != t:
            parent[t] = t = parent[parent[t]]
        return t

    kept = change.needed & {t for op in sides[1] for t in op.outs}  # made before and after: what reads them stands apart
    for ops in sides:
        for op in ops:
            for t in (*op.outs, *(x for x in op.inputs if x in own and x not in kept)):
                parent[root(t)] = root(op.outs[0])
    groups: dict[str, tuple[list[Op], list[Op]]] = {}
    for k, ops in enumerate(sides):
        for op in ops:
            groups.setdefault(root(op.outs[0]), ([], []))[k].append(op)
    yield from groups.values()


def _sides(gone: list[Op], before: Graph, come: list[Op], after: Graph) -> Row:
    out: Row = {}
    for name, ops, graph in (("before", gone, before), ("after", come, after)):
        out[name] = [{"outs": op.outs, "ins": op.inputs, "text": text_of(op, graph)} for op in ops[:LARGEST]]
        out[f"bytes_{name}"] = traffic(ops, graph)
    return out


def traffic(ops: list[Op], graph: Graph) -> int:
    """Bytes that operations read and write, each tensor once per operation; values of a size unknown count as none."""
    tensors: Mapping[str, Any] = graph.tensors
    return sum(tensors[t].nbytes for op in ops for t in (*op.inputs, *op.outs) if t in tensors and not tensors[t].on_host)
