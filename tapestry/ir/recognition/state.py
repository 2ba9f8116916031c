"""The states of an operation: where each field of its monoid's state varies, and which fields are known without looking.

The maximum and the sum of a softmax are one number per row, while the values that attention accumulates beside them also
run over features. A field that does not vary along a map dimension is kept once: its box there is ``[0, 1)``.

A field whose lifted value is a constant and whose merge is a sum is, over a part of the reduced dimensions, that constant
times the number of points. The count of a variance's (n, mean, M2) is one. Whoever knows the blocks knows it, so it is not
sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, arg_positions, walk
from tapestry.ir.graph import Block
from tapestry.ir.index import Floor, dims_of
from tapestry.ir.kernel import Box
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognition.contraction import dims_read, only_sums


@lru_cache(maxsize=1 << 12)
def varies(op: Block) -> tuple[tuple[bool, ...], ...]:
    """For each field, and for each map dimension, whether the field varies along it.

    A field depends on what its lifted value reads, and on every field that ``combine`` mixes into it. Where the state is
    the result itself, each field is an output and has all dimensions; along one of a single point every field counts as
    varying, for once and at each point is the same.
    """
    if op.monoid is None or not op.lowers:
        return tuple((True,) * len(op.dims) for _ in op.body)
    found = [dims_read(op, e) for e in op.body]
    along = [frozenset[str]().union(*(found[j] for j in behind)) for behind in mixed(op)]
    return tuple(tuple(d.name in own or d.size == 1 for d in op.dims) for own in along)


def mixed(op: Block) -> list[frozenset[int]]:
    """For each field of an operation's states, the fields that ``combine`` makes it of, itself among them."""
    assert op.monoid is not None
    combined = MONOIDS[op.monoid].combiner(op.dtypes)
    count = len(op.body)
    found = [frozenset({k, *(x.pos % count for x in walk(e) if isinstance(x, Arg))}) for k, e in enumerate(combined)]
    for _ in range(count):
        found = [frozenset[int]().union(*(found[j] for j in own)) for own in found]
    return found


def reads_behind(op: Block, output: int) -> frozenset[int]:
    """Positions of the reads that one result of an operation depends on."""
    if op.monoid is None:
        return arg_positions((op.body[output],))
    then = op.then[output]
    fields = frozenset[int]().union(*(mixed(op)[x.field] for x in walk(then) if isinstance(x, Acc)))
    body = tuple(op.body[k] for k in fields)
    inner = tuple(op.inner[x.pos].body for e in body for x in walk(e) if isinstance(x, Let))
    return arg_positions((then, *body, *inner))


def state_box(op: Block, field: int, box: Box) -> Box:
    """The box of a field's buffer for a box over the map dimensions."""
    return tuple(b if v else (0, min(1, b[1] - b[0])) for b, v in zip(box, varies(op)[field], strict=True))


@lru_cache(maxsize=1 << 12)
def row_groups(op: Block) -> dict[str, int]:
    """For map dimensions of a reduction, the number of neighbours with the same states.

    The size of a dimension that the body does not depend on; k where the body depends on it as ``floor(d/k)`` alone and whole
    groups fill it; 1, and left out, for the others.
    """
    seen: dict[str, set[int]] = {d.name: set() for d in op.dims}
    reads = (op.reads[k] for k in op.body_reads())
    places = [e for r in reads for e in (*r.index, *(g.aff for g in r.when))]
    places += [x.aff for e in op.point for x in walk(e) if isinstance(x, Index)]
    for atom in {a for e in places for a, _ in e.terms}:
        whole = isinstance(atom, Floor) and atom.arg.is_dim
        for name in {atom} if isinstance(atom, str) else dims_of(atom.arg):
            if name in seen:
                seen[name].add(atom.div if whole and isinstance(atom, Floor) else 1)
    out = {d.name: (min(seen[d.name]) if len(seen[d.name]) == 1 else 1) if seen[d.name] else d.size for d in op.dims}
    return {d.name: out[d.name] for d in op.dims if out[d.name] > 1 and d.size % out[d.name] == 0}


def layered(op: Block) -> bool:
    """Whether some of an operation is computed on a part of its index space alone: inner reductions, states of rows."""
    fields = {v for v in varies(op) if any(v)} if op.monoid else set[tuple[bool, ...]]()
    return bool(op.inner) or len(fields) > 1 or any(not all(v) for v in fields)


@lru_cache(maxsize=1 << 12)
def native(op: Block) -> str:
    """The dtype that partial sums of an operation may be rounded to before they travel: a float of 16 bits, to which each sum,
    scaled or shifted at most, is rounded anyhow; "" where there is none."""
    wide = all(e.dtype == "f32" for e in op.body) and only_sums(op.monoid) and not counted(op)
    found = frozenset[str]().union(*map(_rounded, op.then)) if wide else frozenset[str]()
    return next(iter(found)) if len(found) == 1 and found <= {"bf16", "f16"} else ""


def _rounded(e: Expr) -> frozenset[str]:
    """What the sums in an expression are rounded to first: "" for those that are not yet, "?" for those that never are."""
    if isinstance(e, Acc):
        return frozenset({""})
    if not isinstance(e, Call):
        return frozenset()
    each = [_rounded(a) for a in e.args]
    found = frozenset[str]().union(*each)
    if "" not in found:
        return found
    if e.fn == "cast" and e.dtype in ("bf16", "f16"):
        return found - {""} | {e.dtype}
    linear = e.fn in ("add", "sub", "neg", "cast") or (e.fn == "mul" and not all(each)) or (e.fn == "div" and not each[1])
    return found if linear else found - {""} | {"?"}


def counted(op: Block) -> Mapping[int, float]:
    """Field number to what one point adds to it, for the fields of an operation's states that count."""
    return _counted(op) if op.monoid in MONOIDS else {}


@lru_cache(maxsize=1 << 12)
def _counted(op: Block) -> Mapping[int, float]:
    assert op.monoid is not None
    dtypes = op.dtypes
    merged = MONOIDS[op.monoid].combiner(dtypes)
    out: dict[int, float] = {}
    for k, e in enumerate(op.body):
        adds = merged[k] == (Arg(k, e.dtype) + Arg(len(dtypes) + k, e.dtype))
        if isinstance(e, Const) and e.dtype != "bool" and adds:
            out[k] = float(e.value)
    return out
