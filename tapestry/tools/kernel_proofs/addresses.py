"""Where a kernel writes and reads: every cell of its block once, and nothing outside of what it was given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tapestry.errors import LawError
from tapestry.ir import space
from tapestry.ir.index import Aff, dims_of
from tapestry.ir.kernel import Box, shape
from tapestry.ir.types import Array
from tapestry.tools.kernel_proofs.kernel_text import Buffer
from tapestry.tools.kernel_proofs.lane_tiles import lanes
from tapestry.tools.kernel_proofs.program_reading import Access, Program, Store
from tapestry.tools.kernel_proofs.term.evaluation import Evaluation, OutOfReach, evaluated_together
from tapestry.tools.kernel_proofs.term.integer_conditions import OPERATIONS
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported

PART_POINTS = 1 << 21  # points looked at together
MOST_POINTS = 1 << 27  # points that are looked at one by one


class Undecided(Exception):
    """Whether conditions can hold together is not known."""


class Conditions:
    """Asks isl about terms of one proof; answers are kept."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.known: dict[tuple[int, ...], bool] = {}
        self.asked = 0

    def follows(self, given: int, c: int) -> bool:
        """Whether ``c`` holds wherever ``given`` does."""
        terms = self.terms
        if c == terms.true or c == given or (terms.keys[given][0] == "all" and c in terms.keys[given][1]):
            return True
        if c == terms.false:
            return self.never(given)
        return all(self.never(given, terms.negated(p)) for p in terms.conjuncts(c))

    def never(self, *conditions: int) -> bool:
        """Whether conditions cannot hold together."""
        key = tuple(sorted(set(conditions) - {self.terms.true}))
        if key not in self.known:
            try:
                self.known[key] = self.witness(*key) is None
            except Undecided:
                self.known[key] = False
        return self.known[key]

    def same(self, a: int, b: int, given: int) -> bool:
        """Whether two conditions hold at the same points of those where ``given`` does."""
        return a == b or (self.follows(self.terms.all((given, a)), b) and self.follows(self.terms.all((given, b)), a))

    def equal(self, a: Aff, b: Aff, given: int) -> bool:
        """Whether two integers are equal wherever ``given`` holds."""
        if a == b:
            return True
        zero = self.terms.is_zero(a - b)
        return zero == self.terms.true or (zero != self.terms.false and self.follows(given, zero))

    def witness(self, *conditions: int) -> dict[str, int] | None:
        """A point at which all hold, as far as they are about integers; ``None`` where there is none.

        Raises:
            Undecided: isl gave up, or there are too many points.
        """
        self.asked += 1
        names: dict[str, str] = {}
        text = " and ".join(self._text(c, names, True) for c in conditions) or "true"
        text = " and ".join([text, *self._leaves(names)])
        if any(n[0] == "#" and self._computed(int(n[1:])) for n in names):
            return self._looked_for(conditions, sorted({n for c in conditions if self._whole(c) for n in self.terms.free[c]}))
        ranges = {short: (0 if name[0] == "#" else self.terms.sizes[name]) for name, short in names.items()}
        try:
            with space.bounded(OPERATIONS):
                found = space.solution(ranges, text)
        except space.TooHard:
            raise Undecided from None
        back = {short: name for name, short in names.items()}
        return None if found is None else {back[n]: v for n, v in found.items()}

    def _leaves(self, names: dict[str, str]) -> list[str]:
        """What is known of integers that are no variables."""
        done, rules = set[str](), list[str]()
        while rest := [n for n in names if n[0] == "#" and n not in done]:
            for name in rest:
                done.add(name)
                key = self.terms.keys[int(name[1:])]
                if key[0] != "where":
                    continue
                yes, no = (f"{names[name]} = {self._aff(self.terms.aff(x), names)}" for x in key[2:4])
                holds, fails = (self._text(key[1], names, way) for way in (True, False))
                rules.append(f"(({holds} and {yes}) or ({fails} and {no}))")
        return rules

    def _computed(self, t: int) -> bool:
        """Whether an integer is made of variables by something that isl has no word for."""
        return self.terms.keys[t][0] not in ("where", "load") and not self._loads(t)

    def _loads(self, t: int) -> bool:
        key = self.terms.keys[t]
        return key[0] == "load" or any(
            self._loads(int(d[1:])) for d in dims_of(self.terms.aff(t)) if d[0] == "#" and int(d[1:]) != t
        )

    def _whole(self, c: int) -> bool:
        """Whether a condition is about integers alone."""
        kind = self.terms.keys[c][0]
        return kind in ("ge", "eq", "true", "false") or (kind in ("not", "all") and all(map(self._whole, self.terms.parts(c))))

    def _looked_for(self, conditions: Sequence[int], names: Sequence[str]) -> dict[str, int] | None:
        """A point at which all hold, looked for at every one."""
        whole = [p for c in conditions for p in self.terms.conjuncts(c) if self._whole(p)]
        sizes = [self.terms.sizes[n] for n in names]
        if math.prod(sizes) > MOST_POINTS or not whole:
            raise Undecided
        step = max(1, PART_POINTS * sizes[0] // math.prod(sizes)) if sizes else 1
        for lo in range(0, sizes[0] if sizes else 1, step):
            at = {names[0]: np.arange(lo, min(lo + step, sizes[0]))} if names else {}
            try:
                run = Evaluation(self.terms, at, {})
                own, arrays = evaluated_together([run.of(c) for c in whole])
            except (OutOfReach, Unsupported, KeyError):
                raise Undecided from None
            found = np.argwhere(np.logical_and.reduce(np.broadcast_arrays(*arrays)))
            if len(found):
                return {n: int(at[n][v] if n in at else v) for n, v in zip(own, found[0], strict=True)}
        return None

    def _text(self, c: int, names: dict[str, str], positive: bool) -> str:
        """A condition, or its negation; one that is not about integers may hold and fail anywhere."""
        key = self.terms.keys[c]
        match key:
            case ("true",) | ("false",):
                return "true" if (key[0] == "true") == positive else "false"
            case ("ge", a):
                return f"{self._aff(a, names)} {'>=' if positive else '<'} 0"
            case ("eq", a):
                return f"{self._aff(a, names)} {'=' if positive else '!='} 0"
            case ("not", x):
                return self._text(x, names, not positive)
            case ("all", parts):
                return "(" + (" and " if positive else " or ").join(self._text(p, names, positive) for p in parts) + ")"
            case _:
                return "true"

    def _aff(self, e: Aff, names: dict[str, str]) -> str:
        for n in sorted(dims_of(e)):
            names.setdefault(n, f"x{len(names)}")
        return space.aff_text(e, names)


PART = 1 << 22  # addresses looked at together
MOST = 1 << 28  # addresses of one statement that are looked at one by one


def reads(terms: Terms, ask: Conditions, loads: Sequence[Access], buffers: Mapping[str, Buffer]) -> int:
    """Check that no load leaves its buffer; returns how many statements were looked at.

    Raises:
        LawError: one does, at the program and lane that it names.
    """
    for a in loads:
        size = buffers[a.buffer].size
        lo, hi = terms.reach(a.at)
        if lo >= 0 and hi < size:
            continue
        for outside in (terms.at_least(a.at * -1 - 1), terms.at_least(a.at - size)):
            try:
                found = ask.witness(a.mask, outside)
            except Undecided:
                raise Unsupported(f"line {a.line}: isl does not decide whether a read stays inside") from None
            if found is not None:
                place = ", ".join(f"{n} {v}" for n, v in sorted(found.items()) if n[0] != "#")
                what = f"a read leaves '{a.buffer}' of {size} elements"
                raise LawError("kernel_reads", what, where=f"line {a.line}", why=f"at {place}")
    return len(loads)


def variables(terms: Terms, store: Store, grid: Mapping[str, int]) -> dict[str, int]:
    """What a statement that writes runs over: programs, lanes, steps of loops."""
    names = {v: n for v, n in grid.items() if n != 1}
    names |= {str(v): terms.sizes[str(v)] for v in lanes(terms, store.to.shape) if v.terms}
    free = terms.free[terms.int(store.to.at)] | terms.free[store.to.mask]
    names |= {n: terms.sizes[n] for n in store.to.loops}
    unknown = free - names.keys()
    if unknown:
        raise Unsupported(f"line {store.to.line}: an address from {sorted(unknown)}")
    return names


def placed(terms: Terms, store: Store, names: Mapping[str, int]) -> Iterator[Array]:
    """The cells that a statement writes, each as often as it does, a part of the programs at a time."""
    total = math.prod(names.values())
    if total > MOST:
        raise Unsupported(f"line {store.to.line}: {total:,} addresses")
    first, count = next(iter(names.items()), ("", 1))
    step = max(1, PART * count // max(total, 1))
    for lo in range(0, count, step):
        at = {n: np.arange(size) for n, size in names.items()}
        if first:
            at[first] = np.arange(lo, min(count, lo + step))
        run = Evaluation(terms, at, {})
        try:
            _, (place, inside) = evaluated_together([run.aff(store.to.at), run.of(store.to.mask)])
        except OutOfReach:
            raise Unsupported(f"line {store.to.line}: too many addresses at once") from None
        extents = [len(a) for a in at.values()]
        full = np.broadcast_shapes(place.shape, inside.shape)
        times = math.prod(extents) // max(1, math.prod(full))  # what an address does not depend on repeats it
        cells = np.broadcast_to(place, full)[np.broadcast_to(inside, full)]
        yield np.repeat(cells, times) if times > 1 else cells


def writes(terms: Terms, stores: Sequence[Store], grid: Mapping[str, int], name: str, size: int, wanted: Array | None) -> Array:
    """How often each cell of a buffer is written: once where ``wanted`` (at most once without), elsewhere never.

    Raises:
        LawError: a cell is not, or twice, or lies outside of the buffer.
    """
    counts = np.zeros(size, np.int32)
    line = 0
    for store in stores:
        if store.to.buffer != name:
            continue
        line = store.to.line
        for cells in placed(terms, store, variables(terms, store, grid)):
            if len(cells) and (int(cells.min()) < 0 or int(cells.max()) >= size):
                bad = int(cells.min()) if int(cells.min()) < 0 else int(cells.max())
                what = f"a write leaves '{name}' of {size} elements"
                raise LawError("kernel_writes", what, where=f"line {line}", why=f"at {bad}")
            counts += np.bincount(cells, minlength=size).astype(np.int32)
    wrong = np.flatnonzero(counts > 1 if wanted is None else counts != wanted)
    if len(wrong):
        cell = int(wrong[0])
        raise LawError(
            "kernel_writes",
            f"cell {cell} of '{name}' is written {int(counts[cell])} times",
            where=f"line {line}",
            why=f"{len(wrong)} of {size} cells are wrong",
        )
    return counts


def reads_of_scratch(terms: Terms, program: Program, buffers: Mapping[str, Buffer], filled: Mapping[str, Array]) -> None:
    """Check that a pass reads those cells of scratch alone that were written.

    Raises:
        LawError: it reads another one.
    """
    for a in program.loads:
        if not buffers[a.buffer].scratch or (a.buffer in filled and bool(np.all(filled[a.buffer]))):
            continue
        if a.buffer not in filled:
            raise LawError("kernel_reads", f"'{a.buffer}' is read before it is written", where=f"line {a.line}")
        for cells in placed(terms, Store(a, terms.unknown), variables(terms, Store(a, terms.unknown), program.grid)):
            if not np.all(filled[a.buffer][cells]):
                raise LawError("kernel_reads", f"a cell of '{a.buffer}' is read that nobody wrote", where=f"line {a.line}")


def cells_of(block: Box, box: Box, along: Sequence[bool]) -> Array:
    """Which cells of a buffer belong to a block, as 0 and 1; ``along`` says on which axes the buffer has the block's cells."""
    out = np.zeros(shape(box), np.int32)
    parts = (slice(lo - at, hi - at) if own else slice(None) for (lo, hi), (at, _), own in zip(block, box, along, strict=True))
    out[tuple(parts)] = 1
    return out.reshape(-1)
