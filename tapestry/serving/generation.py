"""Tokens, one after another: what a step of a build does for the rows of a batch, each of which goes on by itself.

A build that keeps caches gets the tokens that they do not have yet: of a row that begins, as many as fit in a step; of one that
goes on, its last. One without caches computes the whole sequence anew, with what is not there yet behind it, which a causal
model does not look at (that is tried with each new row, and refused where it is not so).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry.errors import RunError, TapestryError
from tapestry.ir.types import FLOATS, numpy_dtype
from tapestry.runtime.feeds import check_indices
from tapestry.serving.members import Member
from tapestry.serving.sampling import Array, Draw

if TYPE_CHECKING:
    from tapestry.runtime.one_process.held_state import Places

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
Step = Callable[[int, Mapping[str, Any], Sequence[str], "Places", Collection[int]], dict[str, Any]]
"""One step of a member: (member, inputs, outputs wanted, where caches are appended to, rows that are emptied first)."""
CLOSE = 1e-4  # relative: what tokens that are not there yet may change


class CachesLost(RunError):
    """Ranks were started again, and have nothing of what steps before left there."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what comes behind it.

    Attributes:
        tokens: the prompt's, and what has come.
        prompt: how many are the prompt's.
        count: how many are to come.
        stop: a token that ends it; -1 is none.
        draw: chooses a token by its scores.
        fed: how many tokens the caches have.
        ended: whether it has all that it wants, or nobody wants more of it, or there is no next token.
        refused: why there is none.
    """

    tokens: list[int]
    prompt: int
    count: int
    stop: int
    draw: Draw
    fed: int = 0
    ended: bool = False
    refused: TapestryError | None = None

    def take(self, scores: Array) -> None:
        """One token more; none, and the end, where the best of the scores is NaN or infinite."""
        best = scores.max()  # NaN where one is
        if not np.isfinite(best):
            what = f"scores [{len(scores)}] of token {len(self.tokens)}: the best is {best}"
            self.refused = TapestryError(what, hint="`tapestry run --check` on the same tokens shows where it comes from")
            self.ended = True
            return
        token = self.draw(scores)
        self.tokens.append(token)
        self.ended |= token == self.stop or len(self.tokens) == self.prompt + self.count

    @property
    def new(self) -> list[int]:
        """What came, with the stop token behind its end."""
        new = self.tokens[self.prompt :]
        return new + [self.stop] * (self.count - len(new))


def prompts_of(ids: Array | Sequence[Sequence[int]], mask: Array | None) -> list[list[int]]:
    """The tokens of each prompt that a mask has; all without one."""
    marks = [[1] * len(row) for row in ids] if mask is None else mask
    return [[int(t) for t, m in zip(row, some, strict=True) if m] for row, some in zip(ids, marks, strict=True)]


Rows = Sequence[Request | None]
"""Who has each row of the batch."""


class Sequences(ABC):
    """What both ways have in common: the names of inputs, and the scores of each row's last token."""

    def __init__(self, members: Sequence[Member], step: Step) -> None:
        self.members, self.step = members, step
        first = members[0]
        if IDS not in first.inputs or len(first.inputs[IDS].shape) != 2:
            raise TapestryError(
                f"no input '{IDS}' [batch, tokens]", where="generate", why=f"there is {', '.join(first.inputs)}"
            )
        other = next((n for n in first.inputs if n not in (IDS, MASK, POSITIONS)), None)
        if other is not None:
            raise TapestryError(
                f"nobody gives input '{other}'", where="generate", why=f"a decoder of tokens takes {IDS}, {MASK}, {POSITIONS}",
                hint="compile with --state, where it is a cache",
            )  # fmt: skip
        self.batch = first.inputs[IDS].shape[0]
        if any(m.inputs[IDS].shape[0] != self.batch for m in members):
            raise TapestryError("the builds have different batches", where="generate", hint="builds of one batch")
        self.sizes = [m.inputs[IDS].shape[1] for m in members]
        self.scores = self._scores(first)

    def _scores(self, m: Member) -> str:
        """The output [batch, tokens, vocabulary]."""
        shape = m.inputs[IDS].shape
        found = [n for n, t in m.outputs.items() if len(t.shape) == 3 and t.shape[:2] == shape and t.dtype in FLOATS]
        if len(found) != 1:
            raise TapestryError(
                "no output of scores [batch, tokens, vocabulary]", where="generate", why=f"{', '.join(m.outputs)}"
            )
        return found[0]

    def feeds(self, k: int, ids: Array, mask: Array, positions: Array) -> dict[str, Array]:
        """Inputs of a member."""
        given = {IDS: ids, MASK: mask, POSITIONS: positions}
        return {n: given[n].astype(numpy_dtype(t.dtype)) for n, t in self.members[k].inputs.items()}

    def run(self, k: int, feeds: Mapping[str, Array], at: Places = (), fresh: Collection[int] = ()) -> Array:
        """The scores of a step."""
        return self.step(k, self.members[k].checked(feeds), [self.scores], at, fresh)[self.scores]

    def check(self, q: Request) -> None:
        """Refuse a request that does not fit, before anything is computed."""
        self.fits(q.prompt + q.count - 1)
        try:
            ids = np.array([q.tokens], numpy_dtype(self.members[0].inputs[IDS].dtype))
        except OverflowError as e:
            raise TapestryError("a token is no number of the input's type", where=IDS, why=str(e)) from None
        given = {IDS: ids, POSITIONS: np.array([[q.prompt + q.count - 2]])}
        check_indices(given, [(n, (), least, size) for n, _, least, size in self.members[0].bounds if n in given])

    @abstractmethod
    def fits(self, tokens: int) -> None:
        """Refuse so many tokens, if there is no place for them."""

    @abstractmethod
    def advance(self, rows: Rows) -> list[tuple[Request, Array]]:
        """A step: rows that have all of their tokens behind it, each with the scores of the next one."""


class Cached(Sequences):
    """Every token goes through the build once; each row of the caches has those of one request, from its first cell on."""

    def __init__(self, members: Sequence[Member], step: Step) -> None:
        super().__init__(members, step)
        state = members[0].state
        assert state is not None
        self.capacity = state.capacity
        if MASK not in members[0].inputs or POSITIONS not in members[0].inputs:
            raise TapestryError(f"rows of different lengths need {MASK} and {POSITIONS}", where="generate")
        apart = next((m.state.apart for m in members if m.state and m.state.apart), "") if self.batch > 1 else ""
        if apart:
            raise TapestryError("rows cannot go on by themselves", where="generate", why=apart, hint="a build of batch 1")
        self.given: list[dict[str, Array]] = []  # inputs of each member, which go on from step to step
        for k, size in enumerate(self.sizes):
            ids = np.zeros((self.batch, size), np.int64)
            mask = np.zeros((self.batch, self.capacity + size), np.int64)
            mask[:, self.capacity] = 1
            self.given.append(self.feeds(k, ids, mask, ids))

    def fits(self, tokens: int) -> None:
        """The caches hold everything but the last token."""
        if tokens > self.capacity:
            what = f"the prompt and new tokens need {tokens} cells; the caches have {self.capacity}"
            raise TapestryError(what, where="generate", hint="fewer tokens, or a build with a larger past")

    def advance(self, rows: Rows) -> list[tuple[Request, Array]]:
        """The tokens that the caches lack, as many of each row as a step takes."""
        fresh = [r for r, q in enumerate(rows) if q is not None and q.fed == 0]
        for f in self.given if fresh else ():
            f[MASK][fresh, : self.capacity] = 0
        k = self._member(max(len(q.tokens) - q.fed for q in rows if q is not None))
        size, feeds = self.sizes[k], self.given[k]
        ids, mask, positions = feeds[IDS], feeds[MASK], feeds[POSITIONS]
        at = [(q.fed, min(size, len(q.tokens) - q.fed)) if q is not None else (0, 0) for q in rows]
        if size > 1:
            mask[:, self.capacity + 1 :] = 0
        for r, (q, (first, n)) in enumerate(zip(rows, at, strict=True)):
            if q is None:  # it sees itself alone, so that it has numbers
                ids[r], positions[r], mask[r, : self.capacity] = 0, 0, 0
            elif size == 1:
                ids[r, 0], positions[r, 0] = q.tokens[first], first
            else:
                ids[r, :n], ids[r, n:] = q.tokens[first : first + n], 0
                positions[r] = np.minimum(first + np.arange(size), first + n - 1)
                mask[r, self.capacity : self.capacity + n] = 1
        scores = self.run(k, feeds, at, fresh)
        out: list[tuple[Request, Array]] = []
        for r, (q, (first, n)) in enumerate(zip(rows, at, strict=True)):
            if q is None:
                continue
            for f in self.given:
                f[MASK][r, first : first + n] = 1
            q.fed = first + n
            if q.fed == len(q.tokens):
                out.append((q, scores[r, n - 1]))
        return out

    def _member(self, count: int) -> int:
        """The build for so many tokens: the smallest that takes them all, or else the largest."""
        enough = [k for k, size in enumerate(self.sizes) if size >= count]
        return min(enough or range(len(self.sizes)), key=lambda k: self.sizes[k] if enough else -self.sizes[k])


class Whole(Sequences):
    """Every step computes everything; what is not there yet lies behind each row and is masked."""

    def fits(self, tokens: int) -> None:
        """The largest build holds everything but the last token."""
        if tokens > max(self.sizes):
            why = f"{tokens} > {max(self.sizes)}"
            raise TapestryError("no build is long enough for so many tokens", where="generate", why=why)

    def advance(self, rows: Rows) -> list[tuple[Request, Array]]:
        """Everything again; where a row begins, with other tokens behind all of them too, whose scores must be the same."""
        there = [(r, q) for r, q in enumerate(rows) if q is not None]
        found = self._last(there, 0)
        if any(q.fed == 0 for _, q in there):
            apart = float(np.abs(found - self._last(there, 1)).max() / max(float(np.abs(found).max()), 1e-30))
            if not apart <= CLOSE:
                why = f"tokens behind the end of a prompt change its scores by {apart:.2g} of their size"
                raise TapestryError("the model is no causal decoder", where="generate", why=why)
        for _, q in there:
            q.fed = len(q.tokens)
        return [(q, scores) for (_, q), scores in zip(there, found, strict=True)]

    def _last(self, there: Sequence[tuple[int, Request]], padding: int) -> Array:
        longest = max(len(q.tokens) for _, q in there)
        k = min((k for k, size in enumerate(self.sizes) if size >= longest), key=self.sizes.__getitem__)
        ids, mask = np.full((self.batch, self.sizes[k]), padding, np.int64), np.zeros((self.batch, self.sizes[k]), np.int64)
        mask[:, 0] = 1
        for r, q in there:
            ids[r, : len(q.tokens)], mask[r, : len(q.tokens)] = q.tokens, 1
        positions = np.broadcast_to(np.arange(self.sizes[k]), ids.shape)
        scores = self.run(k, self.feeds(k, ids, mask, positions))
        return np.stack([scores[r, len(q.tokens) - 1] for r, q in there])
