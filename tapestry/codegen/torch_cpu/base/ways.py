"""Ordered ways of computing something: the first that takes what is asked for, and why those before it refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

A = TypeVar("A")
K = TypeVar("K")
Tried = tuple[tuple[str, str], ...]
"""(name, why it refused) of ways that were tried."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a way does not compute what is asked for."""

    why: str

    def __bool__(self) -> Literal[False]:
        """False, so that ``a or b`` is the first of two that does not refuse."""
        return False


@dataclass(frozen=True, slots=True)
class Way(Generic[A, K]):
    """One row of a table.

    Attributes:
        match: from what is asked for to what computes it, or a refusal.
        why: why the row stands at its place in the table.
    """

    name: str
    match: Callable[[A], K | Refusal]
    why: str


@dataclass(frozen=True, slots=True)
class Chosen(Generic[K]):
    """The first way that did not refuse, what it gave, and the refusals before it."""

    name: str
    made: K
    tried: Tried


def first(table: Sequence[Way[A, K]], asked: A) -> Chosen[K] | Refusal:
    """The first row of a table that takes what is asked for; a refusal that names the last one's where none does."""
    tried: list[tuple[str, str]] = []
    for way in table:
        made = way.match(asked)
        if not isinstance(made, Refusal):
            return Chosen(way.name, made, tuple(tried))
        tried.append((way.name, made.why))
    return Refusal("; ".join(why for _, why in tried))
