"""``tapestry.Session``: builds of one model whose weights are loaded once and stay, for any number of callers and steps."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry.api import Compiled
from tapestry.errors import RunError, TapestryError, some
from tapestry.ir.types import DTYPES, Tensor
from tapestry.tools.serving.engines import AnySize, Engine, Given, InProcess, Member, Turns, chosen, members
from tapestry.tools.serving.generation import Array, CachesLost, Request, Seeded, SharedGeneration, prompts_of, sampler_of

if TYPE_CHECKING:
    from tapestry.runtime.one_process.held_state import Places

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Numpy's name of the dtype and the sizes, by name; of what is no array, what it is."""


class Session(AbstractContextManager["Session"]):
    """Runs builds of one model as often as it is asked to; it is a context manager, and ends with the process.

    Args:
        build: a build directory or what `tapestry.compile` returned, which may be for a range of sizes; several are one model
            at several sizes, of which those of the inputs choose one.
        processes: ranks on this host, which are started now and stay; by default everything is in this process.
        threads: of each rank; in this process torch's own setting counts.
        queue: how many callers may wait for their turn; one more gets `Busy` at once.
        restart: ranks that fail are started again and the step is repeated, once; otherwise the session ends with the failure.
        timeout: seconds of silence after which a rank has failed.

    Raises:
        TapestryError: a build cannot be used, or the builds are not of one model. RunError: the ranks did not come up.
    """

    def __init__(
        self, build: Given | Sequence[Given], *, processes: int | None = None, threads: int | None = None, queue: int = 64,
        restart: bool = False, timeout: float = 30.0,
    ) -> None:  # fmt: skip
        self._owned = ExitStack()
        self._given = [build] if isinstance(build, str | Path | Compiled) else list(build)
        self._members: Sequence[Member] = members(self._given)
        self._processes, self._threads, self._timeout = processes, threads, timeout
        self._turns, self._restart, self.restarts = Turns(queue), restart, 0
        self.fill, self._fresh = 0, range(0)
        self._shared = SharedGeneration(self._turns, self._empty)
        self._engine: Engine | None = self._start()

    @property
    def sizes(self) -> list[tuple[Shapes, Shapes]]:
        """What each build takes, and what it gives."""
        return [(_about(m.inputs), _about(m.outputs)) for m in self._members]

    @property
    def inputs(self) -> Shapes:
        """What the first build takes."""
        return self.sizes[0][0]

    @property
    def outputs(self) -> Shapes:
        """What the first build gives."""
        return self.sizes[0][1]

    @property
    def capacity(self) -> int | None:
        """Cells of the caches along the axis that grows; ``None`` where nothing is kept."""
        state = self._members[0].state
        return None if state is None else state.capacity

    def reset(self) -> None:
        """Begin again with empty caches."""
        with self._turns.turn():
            self._empty()

    def run(
        self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None, *, at: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """One step. Any number of threads may call it; they take turns in the order in which they came.

        Args:
            feeds: by name, arrays of numpy or torch, or whatever speaks DLPack. In this process they are read where they lie,
                so nobody may write them before this returns; ranks get one copy, in memory that they share.
            outputs: the names of those that are wanted; the others stay where they are.
            at: where a build that keeps caches appends to them; by default behind what is there (``fill``).
            timeout: seconds that the caller waits for its turn at most.

        Returns:
            the outputs by name: new arrays, and lists for sequences.

        Raises:
            TapestryError: an input or a name is at fault, or the session is closed. Busy: too many callers wait.
            RunError: a rank failed.
        """
        k = chosen(self._members, feeds)
        member = self._members[k]
        checked, wanted = member.checked(feeds), member.wanted(outputs)
        with self._turns.turn(timeout):
            state, first = member.state, self.fill if at is None else at
            places = [(first, state.new)] * member.rows if state else []
            return self._step(k, checked, wanted, places, self._fresh)

    def generate(
        self, ids: Array | Sequence[Sequence[int]], max_new_tokens: int, *, sampler: str | Seeded = "greedy",
        mask: Array | None = None, stop: int | None = None, timeout: float | None = None,
    ) -> Array:  # fmt: skip
        """New tokens of a causal decoder [prompts, max_new_tokens], as int64.

        There may be more prompts than the build's batch has rows: one that is finished gives its row to the next, while others
        go on. Callers who come meanwhile share the rows. What a prompt gives does not depend on what runs beside it. Caches are
        empty behind the last.

        Args:
            ids: prompts [prompts, tokens], or a list of tokens each, of any length.
            sampler: ``greedy``, ``seeded`` or `Seeded`.
            mask: [prompts, tokens], which of ``ids`` count (padding may be on either side); by default all.
            stop: a token after which a prompt has ended; it stands behind the end as well.
            timeout: seconds that the caller waits at most, for its turn or, of others' batch, for a row.

        Raises:
            TapestryError: the builds are no causal decoder of tokens, or the tokens do not fit; and as `run`.
        """
        prompts = prompts_of(ids, mask)
        if not prompts or not all(prompts) or max_new_tokens < 1:
            empty = ", one without tokens" if not all(prompts) else ""
            what = f"{some(len(prompts), 'prompt')}{empty}, and {some(max_new_tokens, 'new token')}"
            raise TapestryError(what, where="generate", hint="prompts of a token at least, and a new token")
        draw, end = sampler_of(sampler), -1 if stop is None else stop  # no token is -1
        requests = [Request(p, len(p), max_new_tokens, end, draw(k)) for k, p in enumerate(prompts)]
        self._shared.run(self._members, self._step, requests, timeout)
        return np.array([q.new for q in requests], np.int64)

    def close(self) -> None:
        """Give everything back: no process, no descriptor and no weight is left. Called again it does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._owned.close()

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _empty(self) -> None:
        """Let the next step find empty caches."""
        self.fill, self._fresh = 0, range(max(m.rows for m in self._members))

    def _step(
        self, k: int, checked: Mapping[str, Any], wanted: Sequence[str], at: Places, fresh: Collection[int]
    ) -> dict[str, Any]:
        if self._engine is None:
            raise TapestryError("the session is closed")
        state = self._members[k].state
        wrong = next((p for p in at if state is not None and not 0 <= p[0] <= state.capacity - p[1]), None)
        if state is not None and wrong is not None:
            why = f"{wrong[1]} cells at {wrong[0]} of {state.capacity}"
            hint = "reset(), or a build of a larger capacity"
            raise TapestryError("the caches have no place for this step", why=why, hint=hint)
        try:
            out = self._engine.step(k, checked, wanted, at, fresh)
        except RunError as e:
            if not self._restart:
                raise
            self._engine = self._start()
            self.restarts += 1
            if state is not None and self.fill:
                self._empty()
                raise CachesLost("the ranks were started again, and their caches are empty", why=str(e)) from None
            out = self._engine.step(k, checked, wanted, at, fresh)
        self._fresh, self.fill = range(0), max(map(sum, at), default=0)
        return out

    def _start(self) -> Engine:
        if any(m.compiled.sized for m in self._members):
            if len(self._members) > 1:
                raise TapestryError("a build for several sizes is alone in a session", hint="one session for each")
            if self._processes is None:
                return AnySize(self._members[0])
        if self._processes is None:
            return InProcess(self._members)
        from tapestry.runtime.executor import owners
        from tapestry.tools.serving.rank_engine import Ranks

        owners(self._members[0].compiled.build.program.devices, self._processes)
        return Ranks(self._members, self._folders(), self._processes, threads=self._threads, timeout=self._timeout)

    def _folders(self) -> list[Path]:
        """Where the builds are; those that were never saved are, for as long as the session lives."""
        out: list[Path] = []
        for k, (given, member) in enumerate(zip(self._given, self._members, strict=True)):
            if isinstance(given, str | Path):
                out.append(Path(given))
                continue
            scratch = self._owned.enter_context(tempfile.TemporaryDirectory(prefix="tapestry-session-"))
            out.append(Path(scratch) / f"build-{k}")
            member.compiled.save(out[-1])
        return out


def _about(tensors: Mapping[str, Tensor]) -> Shapes:
    return {n: (t.about, ()) if t.on_host else (DTYPES[t.dtype][1], t.shape) for n, t in tensors.items()}
