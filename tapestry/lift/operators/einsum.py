"""Einsum: sums of products whose dimensions are the letters of the equation, ``e0, e1, …`` for those under an ellipsis."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tapestry.ir.expr import Acc, Arg, Expr, call, cast
from tapestry.ir.graph import Dim, Read
from tapestry.ir.index import const, dim
from tapestry.ir.types import Tensor
from tapestry.lift.builder import Node, accumulator
from tapestry.lift.registry import Declined, lifts


@dataclass(frozen=True, slots=True)
class Term:
    """One operand: a tensor, and the dimension along each of its axes ("" where it is broadcast)."""

    tensor: str
    axes: tuple[str, ...]


@lifts("Einsum")
def lift_einsum(n: Node) -> None:
    """Operands are contracted from the left, two by two; a letter goes once neither the result nor a later operand has it."""
    found = _terms(n)
    if found is None:
        raise Declined
    terms, out, sizes = found
    while len(terms) > 2:
        later = {a for t in terms[2:] for a in t.axes} | set(out)
        kept = tuple(dict.fromkeys(a for t in terms[:2] for a in t.axes if a in later))
        terms = [Term(_emit(n, n.temp("e"), terms[:2], kept, sizes, n.dtype()), kept), *terms[2:]]
    _emit(n, n.outs[0], terms, out, sizes, n.out().dtype)


def _terms(n: Node) -> tuple[list[Term], tuple[str, ...], dict[str, int]] | None:
    """Operands, dimensions of the result and sizes; ``None`` where the equation does not fit the shapes."""
    text = str(n.attr("equation", b"").decode() if isinstance(n.attr("equation", ""), bytes) else n.attr("equation", ""))
    text = re.sub(r"\s", "", text)
    left, arrow, right = text.partition("->")
    words = left.split(",")
    if len(words) != len(n.ins) or any(not re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", w) for w in (*words, right)):
        return None
    ranks = [len(n.shape(k)) - len(w.replace("...", "")) for k, w in enumerate(words) if "..." in w]
    most = max(ranks, default=0)
    sizes: dict[str, int] = {}
    terms: list[Term] = []
    for k, w in enumerate(words):
        shape = n.shape(k)
        axes = _axes(w, len(shape), most)
        if axes is None:
            return None
        for a, size in zip(axes, shape, strict=True):
            sizes[a] = size if sizes.get(a, 1) == 1 else sizes[a]
        terms.append(Term(n.ins[k], axes))
    for k, t in enumerate(terms):
        if any(s not in (1, sizes[a]) for a, s in zip(t.axes, n.shape(k), strict=True)):
            return None
        terms[k] = Term(t.tensor, tuple("" if s == 1 and sizes[a] > 1 else a for a, s in zip(t.axes, n.shape(k), strict=True)))
    covered = tuple(f"e{i}" for i in range(most))
    letters = "".join(words).replace("...", "")
    out = (*covered, *sorted(c for c in set(letters) if letters.count(c) == 1)) if not arrow else _axes(right, None, most)
    if out is None or len(set(out)) != len(out) or not set(out) <= set(sizes):
        return None
    return terms, out, sizes


def _axes(word: str, rank: int | None, most: int) -> tuple[str, ...] | None:
    """The dimension of every axis; an ellipsis stands for the last of the ``most`` covered ones."""
    head, dots, tail = word.partition("...")
    covered = (most if rank is None else rank - len(head) - len(tail)) if dots else 0
    if covered < 0 or (rank is not None and len(head) + len(tail) + covered != rank):
        return None
    return (*head, *(f"e{i}" for i in range(most - covered, most)), *tail)


def _emit(n: Node, out: str, terms: list[Term], kept: tuple[str, ...], sizes: dict[str, int], dtype: str) -> str:
    """Emit the product of one or two operands, summed over what is not kept."""
    reads: list[tuple[Read, Tensor]] = [n.read(t.tensor, [dim(a) if a else const(0) for a in t.axes]) for t in terms]
    gone = [a for a in dict.fromkeys(a for t in terms for a in t.axes if a) if a not in kept]
    dims = [Dim(a, sizes[a]) for a in kept]
    wide = accumulator(dtype) if gone else dtype
    values: list[Expr] = [cast(Arg(k, t.dtype), wide) for k, (_, t) in enumerate(reads)]
    body = values[0] if len(values) == 1 else call("mul", *values)
    if not gone:
        return n.block(out, dims, reads, body)
    then = [] if wide == dtype else [cast(Acc(0, wide), dtype)]
    return n.reduce([out], dims, [Dim(a, sizes[a]) for a in gone], "sum", reads, [body], then)[0]
