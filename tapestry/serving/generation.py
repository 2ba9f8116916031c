"""Tokens, one after another: prompts go through a build at once, what follows a token at a time.

Rows of a batch have prompts of different lengths: they begin together, and the mask says which cells of each row count. A build
that keeps caches appends every step to them; one without computes the whole sequence anew, with what is not there yet behind
it, which a causal model does not look at (that is tried once, and refused where it is not so).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapestry.errors import RunError, TapestryError
from tapestry.ir.types import FLOATS, numpy_dtype
from tapestry.serving.members import Member

Array = np.ndarray[Any, Any]
IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
Step = Callable[[int, Mapping[str, Any], Sequence[str], int], dict[str, Any]]
"""One step of a member: (member, inputs, outputs that are wanted, where its caches are appended to)."""
CLOSE = 1e-4  # relative: what tokens that are not there yet may change


class CachesLost(RunError):
    """Ranks were started again, and have nothing of what steps before left there."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """Draws tokens by their probabilities: the same for the same seed.

    Attributes:
        temperature: scores are divided by it.
        top_k: only so many likeliest tokens may come; 0 is all.
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0

    def sampler(self) -> Callable[[Array], Array]:
        """From scores [rows, vocabulary] to a token for each row, which are drawn in turns."""
        if not self.temperature > 0 or self.top_k < 0:
            raise TapestryError(f"temperature {self.temperature:g}, top_k {self.top_k}", hint="above 0, and 0 or more")
        rng = np.random.default_rng(self.seed)

        def draw(scores: Array) -> Array:
            x = scores.astype(np.float64) / self.temperature
            if 0 < self.top_k < x.shape[1]:
                x[x < np.partition(x, -self.top_k, axis=1)[:, -self.top_k, None]] = -np.inf
            p = np.exp(x - x.max(axis=1, keepdims=True))
            up = np.cumsum(p, axis=1)
            return (up <= rng.random(len(up))[:, None] * up[:, -1:]).sum(axis=1)

        return draw


def greedy(scores: Array) -> Array:
    """The likeliest token of each row, the first of equal ones."""
    return scores.argmax(axis=1)


def sampler_of(name: str | Seeded) -> Callable[[Array], Array]:
    """A sampler by its name, or with settings."""
    if isinstance(name, Seeded):
        return name.sampler()
    known = {"greedy": lambda: greedy, "seeded": Seeded().sampler}
    if name not in known:
        raise TapestryError(f"there is no sampler '{name}'", hint="greedy or seeded")
    return known[name]()


def generate(
    members: Sequence[Member], step: Step, prompts: Sequence[Sequence[int]], count: int, sampler: Callable[[Array], Array],
    stop: int | None = None,
) -> Array:  # fmt: skip
    """New tokens [rows, count]; a row that has come to ``stop`` has nothing else behind it.

    Args:
        prompts: a row each, at most as many as the build's batch.
        count: how many tokens to add.

    Raises:
        TapestryError: the builds are no causal decoder of tokens, or the tokens do not fit.
    """
    sequences = (Cached if members[0].caches else Whole)(members, step)
    rows = [list(map(int, p)) for p in prompts]
    if not rows or not all(rows) or count < 1 or len(rows) > sequences.batch:
        what = f"{len(rows)} prompts of {min(map(len, rows), default=0)} tokens or more, and {count} new ones"
        raise TapestryError(what, hint=f"1 to {sequences.batch} prompts of a token at least, and a new token")
    sequences.check(max(map(len, rows)), count)
    end = -1 if stop is None else stop  # no token is -1
    out = np.full((len(rows), count), end, np.int64)
    ended = np.zeros(len(rows), bool)
    scores = sequences.begin(rows)
    for k in range(count):
        out[:, k] = np.where(ended, end, sampler(scores))
        ended |= out[:, k] == end
        for row, token in zip(rows, out[:, k], strict=True):
            row.append(int(token))
        if ended.all():
            break
        if k + 1 < count:
            try:
                scores = sequences.go_on(rows)
            except CachesLost:
                scores = sequences.begin(rows)
    return out


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

    def run(self, k: int, feeds: Mapping[str, Array], at: int = 0) -> Array:
        """The scores of a step."""
        return self.step(k, self.members[k].checked(feeds), [self.scores], at)[self.scores]

    @abstractmethod
    def check(self, longest: int, count: int) -> None:
        """Refuse what does not fit, before anything is computed."""

    @abstractmethod
    def begin(self, rows: Sequence[Sequence[int]]) -> Array:
        """Scores behind the prompts."""

    @abstractmethod
    def go_on(self, rows: Sequence[Sequence[int]]) -> Array:
        """Scores behind rows that have got one token more."""


class Cached(Sequences):
    """Every token goes through the build once; what is kept of it is masked row by row."""

    def __init__(self, members: Sequence[Member], step: Step) -> None:
        super().__init__(members, step)
        state = members[0].state
        assert state is not None
        self.capacity, self.fill = state.capacity, 0
        self.there = np.zeros((self.batch, self.capacity), np.int64)  # cells that count, by row
        self.single: dict[int, dict[str, Array]] = {}  # inputs of a step of one token, by member, which go on from step to step
        if MASK not in members[0].inputs or POSITIONS not in members[0].inputs:
            raise TapestryError(f"rows of different lengths need {MASK} and {POSITIONS}", where="generate")

    def check(self, longest: int, count: int) -> None:
        """The caches hold everything but the last token."""
        if longest + count - 1 > self.capacity:
            why = f"{longest} + {count} - 1 > {self.capacity}"
            raise TapestryError("the caches have no place for so many tokens", where="generate", why=why)

    def begin(self, rows: Sequence[Sequence[int]]) -> Array:
        """The prompts, in parts of the sizes that there are."""
        self.fill, longest = 0, max(map(len, rows))
        self.there[:] = 0
        self.single.clear()
        last: list[Array | None] = [None] * len(rows)
        while self.fill < longest:
            k = self._member(longest - self.fill)
            lo, size = self.fill, self.sizes[k]
            ids, new = np.zeros((2, self.batch, size), np.int64)
            for r, row in enumerate(self._all(rows)):
                part = row[lo : lo + size]
                ids[r, : len(part)], new[r, : len(part)] = part, 1
            lengths = np.array([len(row) for row in self._all(rows)])
            positions = np.minimum(lo + np.arange(size), lengths[:, None] - 1)
            scores = self.run(k, self.feeds(k, ids, np.concatenate((self.there, new), 1), positions), lo)
            self.there[:, lo : lo + size] = new
            self.fill = min(lo + size, longest)
            for r, row in enumerate(rows):
                if lo <= len(row) - 1 < lo + size:
                    last[r] = scores[r, len(row) - 1 - lo].copy()
        return np.stack([x for x in last if x is not None])

    def go_on(self, rows: Sequence[Sequence[int]]) -> Array:
        """One token of every row."""
        k = self._member(1)
        if k not in self.single:
            ids, new = np.zeros((2, self.batch, self.sizes[k]), np.int64)
            new[:, 0] = 1
            self.single[k] = self.feeds(k, ids, np.concatenate((self.there, new), 1), ids)
        feeds, every = self.single[k], self._all(rows)
        feeds[IDS][:, 0] = [row[-1] for row in every]
        feeds[POSITIONS].T[:] = [len(row) - 1 for row in every]
        scores = self.run(k, feeds, self.fill)
        self.there[:, self.fill] = 1
        for other in self.single.values():
            other[MASK][:, self.fill] = 1
        self.fill += 1
        return scores[: len(rows), 0]

    def _all(self, rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """As many rows as the build has: the first again where there are fewer."""
        return [*rows, *[rows[0]] * (self.batch - len(rows))]

    def _member(self, count: int) -> int:
        """The build for so many tokens: the smallest that takes them all, or else the largest, that still has a place."""
        fits = [k for k, size in enumerate(self.sizes) if self.fill + size <= self.capacity]
        if not fits:
            why = f"steps of {min(self.sizes)} at {self.fill} of {self.capacity}"
            raise TapestryError(
                "the caches have no place for a step", where="generate", why=why, hint="a build of one token too"
            )
        enough = [k for k in fits if self.sizes[k] >= count]
        return min(enough, key=self.sizes.__getitem__) if enough else max(fits, key=self.sizes.__getitem__)


class Whole(Sequences):
    """Every step computes everything; what is not there yet lies behind each row and is masked."""

    def check(self, longest: int, count: int) -> None:
        """The largest build holds everything but the last token."""
        if longest + count - 1 > max(self.sizes):
            why = f"{longest} + {count} - 1 > {max(self.sizes)}"
            raise TapestryError("no build is long enough for so many tokens", where="generate", why=why)

    def begin(self, rows: Sequence[Sequence[int]]) -> Array:
        """The prompts; with other tokens behind them the scores must be the same."""
        scores, again = self._last(rows, 0), self._last(rows, 1)
        apart = float(np.abs(scores - again).max() / max(float(np.abs(scores).max()), 1e-30))
        if not apart <= CLOSE:
            why = f"tokens behind the end of a prompt change its scores by {apart:.2g} of their size"
            raise TapestryError("the model is no causal decoder", where="generate", why=why)
        return scores

    def go_on(self, rows: Sequence[Sequence[int]]) -> Array:
        """Everything again, with one token more."""
        return self._last(rows, 0)

    def _last(self, rows: Sequence[Sequence[int]], padding: int) -> Array:
        longest = max(map(len, rows))
        k = min((k for k, size in enumerate(self.sizes) if size >= longest), key=self.sizes.__getitem__)
        ids, mask = np.full((self.batch, self.sizes[k]), padding, np.int64), np.zeros((self.batch, self.sizes[k]), np.int64)
        for r in range(self.batch):
            row = rows[r if r < len(rows) else 0]
            ids[r, : len(row)], mask[r, : len(row)] = row, 1
        positions = np.broadcast_to(np.arange(self.sizes[k]), ids.shape)
        scores = self.run(k, self.feeds(k, ids, mask, positions))
        return np.stack([scores[r, len(row) - 1] for r, row in enumerate(rows)])
