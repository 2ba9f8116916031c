"""Attention: values weighted by exponentials of scores, in one pass over the keys, recognised by its projections."""

from __future__ import annotations

from dataclasses import dataclass

from tapestry.ir.expr import Call, Const, Expr, Let, call, number, walk
from tapestry.ir.graph import Dim
from tapestry.ir.recognition.contraction import Nest, dims_read, inner_product
from tapestry.ir.recognition.exponential import Exponential, exponential


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """``sum over key of weight(score) * value``.

    Attributes:
        rows, columns, batch: map dimensions of the scores but not of keys and values; of the values alone; the others.
        depth: those that scores are sums of products over, if they are.
        weights: how scores become weights.
    """

    value: Expr
    score: Expr
    rows: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    batch: tuple[Dim, ...]
    key: Dim
    depth: tuple[Dim, ...] = ()
    weights: Exponential


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Weighed):
    """Values weighted by scores that are made of ``sum over depth of query * keys``."""

    query: Expr
    keys: Expr


def attention(op: Nest) -> Attention | None:
    """The attention that an operation is; ``None`` where it is none."""
    weights, product = exponential(op.monoid, sums=2), inner_product(op)
    if weights is None or product is None or len(op.reduce) != 1 or product is not op.inner[0].body:
        return None
    score, _, value = op.body
    if not counts_ones(op.body, weights.hidden(score.dtype)):
        return None
    key, dims = op.reduce[0], op.inner[0].dims
    depth = {d.name for d in dims if d.size > 1}
    keyed = {key.name} if key.size > 1 else set[str]()
    of_s, of_v = dims_read(op, score), dims_read(op, value)
    for query, keys in (product.args, product.args[::-1]):
        of_q, of_k = dims_read(op, query), dims_read(op, keys)
        if of_q & keyed or not keyed <= of_k or not depth <= of_q & of_k or of_v & depth:
            continue
        columns = tuple(d for d in op.dims if d.name in of_v - of_q - of_k - of_s)
        rows = tuple(d for d in op.dims if d.name in (of_q | of_s) - of_k - of_v)
        return Attention(
            query=query,
            keys=keys,
            value=value,
            score=score,
            rows=rows,
            columns=columns,
            batch=tuple(d for d in op.dims if d not in rows + columns),
            key=key,
            depth=dims,
            weights=weights,
        )
    return None


def weighed(op: Nest) -> Weighed | None:
    """Values weighted by the exponentials of scores that are there; ``None`` where an operation is something else."""
    weights = exponential(op.monoid, sums=2)
    if weights is None or op.inner or len(op.reduce) != 1 or not counts_ones(op.body, weights.hidden(op.body[0].dtype)):
        return None
    score, _, value = op.body
    of_s, of_v = dims_read(op, score), dims_read(op, value)
    columns = tuple(d for d in op.dims if d.name in of_v - of_s)
    rows = tuple(d for d in op.dims if d.name in of_s - of_v)
    batch = tuple(d for d in op.dims if d not in rows + columns)
    return Weighed(value=value, score=score, rows=rows, columns=columns, batch=batch, key=op.reduce[0], weights=weights)


def counts_ones(body: tuple[Expr, ...], hidden: Const) -> bool:
    """Whether the second lifted field is 1 wherever the first, a score, is not hidden."""
    score, one = body[:2]
    if isinstance(score, Call) and isinstance(one, Call) and score.fn == one.fn == "where" and score.args[2] == hidden:
        return score.args[0] == one.args[0] and one.args[1] == number(1, one.dtype)
    return one == number(1, one.dtype)


def linear_score(e: Expr, hidden: Const) -> tuple[float, Expr | None] | None:
    """(scale, bias) of a score ``scale * product + bias``, where hiding it is a bias too; ``None`` where it is not linear."""
    if isinstance(e, Let):
        return 1.0, None
    if not isinstance(e, Call):
        return None
    if e.fn in ("mul", "div"):
        inner, factor = e.args if isinstance(e.args[1], Const) else e.args[::-1]
        linear = linear_score(inner, hidden)
        if linear is None or linear[1] is not None or not isinstance(factor, Const) or (e.fn == "div" and factor is e.args[0]):
            return None
        value = float(factor.value)
        return (linear[0] * value if e.fn == "mul" else linear[0] / value), None
    if e.fn == "add":
        inner, bias = e.args if _has_product(e.args[0]) else e.args[::-1]
        linear = None if _has_product(bias) else linear_score(inner, hidden)
        return linear and (linear[0], bias if linear[1] is None else linear[1] + bias)
    if e.fn == "where" and e.args[2] == hidden and not _has_product(e.args[0]):
        linear = linear_score(e.args[1], hidden)
        zero: Expr = number(0, e.dtype)
        return linear and (linear[0], call("where", e.args[0], linear[1] or zero, e.args[2]))
    return None


def _has_product(e: Expr) -> bool:
    return any(isinstance(x, Let) for x in walk(e))
