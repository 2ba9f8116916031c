"""Tokens, one after another: what a step of a build does for the rows of a batch, each of which goes on by itself.

A build that keeps caches gets the tokens that they do not have yet: of a row that begins, as many as fit in a step; of one that
goes on, its last. One without caches computes the whole sequence anew, with what is not there yet behind it, which a causal
model does not look at (that is tried with each new row, and refused where it is not so).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry.errors import RunError, TapestryError
from tapestry.ir.types import FLOATS, numpy_dtype
from tapestry.runtime.feeds import check_indices
from tapestry.tools.serving.engines import Busy, Member, Turns

if TYPE_CHECKING:
    from tapestry.runtime.one_process.held_state import Places

Array = np.ndarray[Any, Any]


# How the next token is chosen from scores.


Draw = Callable[[Array], int]
"""From scores [vocabulary] to a token."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """Draws tokens by their probabilities: the same for the same seed and number of the prompt, whatever runs beside it.

    Attributes:
        temperature: scores are divided by it.
        top_k: only so many likeliest tokens may come; 0 is all.
        first: the number of a call's first prompt; the others follow.
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    first: int = 0

    def sampler(self, number: int) -> Draw:
        """What draws the tokens of one prompt of a call."""
        if not self.temperature > 0 or min(self.seed, self.top_k, self.first) < 0:
            what = f"temperature {self.temperature:g}, seed {self.seed}, top_k {self.top_k}, first {self.first}"
            raise TapestryError(what, hint="a temperature above 0, the others 0 or more")
        rng = np.random.default_rng([self.seed, self.first + number])

        def draw(scores: Array) -> int:
            x = scores.astype(np.float64) / self.temperature
            if 0 < self.top_k < len(x):
                x[x < np.partition(x, -self.top_k)[-self.top_k]] = -np.inf
            up = np.cumsum(np.exp(x - x.max()))
            return min(int((up <= rng.random() * up[-1]).sum()), len(x) - 1)

        return draw


def greedy(scores: Array) -> int:
    """The likeliest token, the first of equal ones."""
    return int(scores.argmax())


def sampler_of(name: str | Seeded) -> Callable[[int], Draw]:
    """A sampler by its name, or with settings: of each prompt by its number."""
    if isinstance(name, Seeded):
        return name.sampler
    known: dict[str, Callable[[int], Draw]] = {"greedy": lambda _: greedy, "seeded": Seeded().sampler}
    if name not in known:
        raise TapestryError(f"there is no sampler '{name}'", hint="greedy or seeded")
    return known[name]


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
            why = f"there is {', '.join(first.inputs)}"
            raise TapestryError(f"no input '{IDS}' [batch, tokens]", where="generate", why=why)
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
        shape = first.inputs[IDS].shape
        found = [n for n, t in first.outputs.items() if len(t.shape) == 3 and t.shape[:2] == shape and t.dtype in FLOATS]
        if len(found) != 1:
            what = "no output of scores [batch, tokens, vocabulary]"
            raise TapestryError(what, where="generate", why=", ".join(first.outputs))
        self.scores = found[0]

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


# Prompts that share the rows of a build: one that is finished gives its row to the next at once, while others go on.
#
# Callers share it as well. Whoever waits for tokens and finds nobody computing does the next step, for all.


class ContinuousBatch:
    """The rows of a batch, and requests that wait for one.

    Attributes:
        callers: how many take part.
        failed: why no step follows.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.rows: list[Request | None] = [None] * sequences.batch
        self.waiting: deque[Request] = deque()
        self.changed, self.stepping = Condition(Lock()), False
        self.callers = 0
        self.failed: Exception | None = None

    def free(self) -> bool:
        """Whether a request that comes now gets a row in the next step."""
        return len(self.waiting) < sum(q is None or q.ended for q in self.rows)

    def run(self, requests: Sequence[Request], until: float | None = None) -> None:
        """Go on until all of some requests, which wait here, have ended.

        Args:
            until: when the first of them must have a row, as `time.monotonic` counts.

        Raises:
            Busy: it has none by then.
            TapestryError: the scores of one are NaN or infinite.
        """
        try:
            while self._mine(requests, until):
                try:
                    self._step()
                except Exception as e:
                    self.failed = e
                    raise
                finally:
                    with self.changed:
                        self.stepping = False
                        self.changed.notify_all()
            for q in requests:
                if q.refused is not None:
                    raise q.refused
        finally:
            with self.changed:
                for q in requests:
                    q.ended = True

    def _mine(self, requests: Sequence[Request], until: float | None) -> bool:
        """Wait for what others compute; whether this caller computes the next step."""
        with self.changed:
            while not all(q.ended for q in requests):
                if self.failed is not None:
                    raise self.failed
                if not self.stepping:
                    self.stepping = True
                    self._admit()
                    return True
                left = None if until is None or any(q in self.rows or q.fed for q in requests) else until - time.monotonic()
                if left is not None and left <= 0:
                    raise Busy("no row of the batch came free in time", hint="a longer timeout=, or fewer callers")
                self.changed.wait(left)
            return False

    def _admit(self) -> None:
        """Give rows that nobody has to those who wait."""
        for r, q in enumerate(self.rows):
            if q is not None and not q.ended:
                continue
            self.rows[r] = None
            while self.waiting and self.rows[r] is None:
                one = self.waiting.popleft()
                self.rows[r] = None if one.ended else one

    def _step(self) -> None:
        """One step for all rows."""
        try:
            found = self.sequences.advance(self.rows)
        except CachesLost:
            for q in self.rows:
                if q is not None:
                    q.fed = 0
            return
        for q, scores in found:
            q.take(scores)


class SharedGeneration:
    """Generation of a session's callers: the first takes the session's turn, others join its batch until the last is through.

    Args:
        empty: is called before the first step and after the last: what the caches have is nobody's.
    """

    def __init__(self, turns: Turns, empty: Callable[[], None]) -> None:
        self._turns, self._empty, self._lock = turns, empty, Lock()
        self._line = Turns(turns.limit)
        self._batch: ContinuousBatch | None = None
        self._turn = ExitStack()

    def run(self, members: Sequence[Member], step: Step, requests: Sequence[Request], timeout: float | None) -> None:
        """Generate, in rows of a batch that other callers may have a part in.

        Raises:
            TapestryError: the builds are no causal decoder of tokens, or the tokens do not fit. Busy: as `Turns`, and where no
                row comes free in time.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._line.turn(timeout):
            batch = self._joined(requests) or self._begun(members, step, requests, timeout)
        try:
            batch.run(requests, until)
        finally:
            with self._lock:
                batch.callers -= 1
                if not batch.callers:
                    self._batch = None
                    self._empty()
                    self._turn.close()

    def _begun(
        self, members: Sequence[Member], step: Step, requests: Sequence[Request], timeout: float | None
    ) -> ContinuousBatch:
        """A batch, once it is the session's turn for it."""
        with ExitStack() as turn:
            turn.enter_context(self._turns.turn(timeout))
            batch = ContinuousBatch((Cached if members[0].caches else Whole)(members, step))
            for q in requests:
                batch.sequences.check(q)
            self._empty()
            batch.waiting.extend(requests)
            batch.callers = 1
            with self._lock:
                self._batch, self._turn = batch, turn.pop_all()
        return batch

    def _joined(self, requests: Sequence[Request]) -> ContinuousBatch | None:
        """The batch that runs, with these requests in line; not if somebody waits for the session's turn.

        Raises:
            Busy: as many callers as may wait have no row.
        """
        with self._lock:
            batch = self._batch
            if batch is None or batch.failed is not None or self._turns.waiting:
                return None
            for q in requests:
                batch.sequences.check(q)
            with batch.changed:
                if batch.callers > self._turns.limit and not batch.free():
                    raise Busy(f"{self._turns.limit} callers wait already", hint="fewer callers at a time, or a larger queue=")
                batch.waiting.extend(requests)
                batch.callers += 1
            return batch
