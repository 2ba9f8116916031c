"""What readers of all languages share: cells that statements touch, and what a loop leaves behind, over terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tapestry.ir.index import Aff
from tapestry.verify.kernels.kernel_text import Buffer, Launch
from tapestry.verify.kernels.reading.lane_tiles import Pointer, Shape, Tile, lanes, scalar, together
from tapestry.verify.kernels.reading.recurrences import closed
from tapestry.verify.kernels.reading.triton_calls import Calls
from tapestry.verify.kernels.term_arithmetic import Kind, kind_of
from tapestry.verify.kernels.terms import Terms, Unsupported

MOST_STEPS = 64  # of an unrolled loop


@dataclass(frozen=True, slots=True)
class Access:
    """Cells that a statement touches: the offset at every lane of a shape, where the mask holds."""

    buffer: str
    at: Aff
    mask: int
    shape: Shape
    line: int
    loops: tuple[str, ...] = ()  # variables of the loops that the statement stands in


@dataclass(frozen=True, slots=True)
class Store:
    """An access that writes, and the value."""

    to: Access
    value: int


@dataclass
class Program:
    """What one launch does."""

    terms: Terms
    grid: dict[str, int]  # variables of the programs, and how many there are
    loads: list[Access] = field(default_factory=list[Access])
    stores: list[Store] = field(default_factory=list[Store])


@dataclass(frozen=True, slots=True)
class Steps:
    """A loop's variable by name, its first value, the end that it does not reach, and how much it grows."""

    name: str
    first: Any
    end: Any
    step: int
    always_unrolled: bool = False


class Return(Exception):
    """The end of a function, with its value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Reading:
    """A launch read statement by statement.

    Attributes:
        around: variables of the loops that a statement stands in.
        inside: under which conditions a statement runs.
        unrolled: whether loops are read step by step.
    """

    def __init__(self, terms: Terms, launch: Launch, buffers: Mapping[str, Buffer]) -> None:
        self.terms, self.launch, self.buffers = terms, launch, buffers
        self.calls = Calls(terms)
        pass_ = terms.fresh()[1:]
        self.program = Program(terms, {f"p{k}.{pass_}": n for k, n in enumerate(launch.grid)})
        self.around, self.inside, self.unrolled = tuple[str, ...](), terms.true, False

    # loops
    def loop(self, along: Steps, run: Callable[[], None], assigned: set[str], env: dict[str, Any]) -> None:
        """Read a loop; ``run`` reads its body, which assigns some names of ``env``."""
        name, first, end, step = along.name, along.first, along.end, along.step
        if (self.unrolled or along.always_unrolled) and isinstance(first, int) and isinstance(end, int):
            if len(range(first, end, step)) > MOST_STEPS:
                raise Unsupported("a long unrolled loop")
            for k in range(first, end, step):
                env[name] = scalar(self.terms, k)
                run()
            return
        terms = self.terms
        a, b = (terms.aff(self.calls.tile(x).term) for x in (first, end))
        most = max(0, -(-terms.reach(b - a)[1] // step))
        if not most:
            return
        variable = f"k{terms.fresh()[1:]}"
        number = len(terms.keys)
        at = terms.variable(variable, most)
        env[name] = Tile(terms.int(a + at * step))
        runs = terms.at_least(b - a - at * step - 1)
        before: dict[str, Any] = dict(env)
        outside = self.inside
        carried = sorted(assigned & {n for n, v in before.items() if isinstance(v, Tile)} - {name})
        for n in carried:
            first_value: Tile = before[n]
            kind = terms.kinds[first_value.term] if terms.kinds[first_value.term] != "int" else "real"
            env[n] = Tile(terms.carried(number, n, lanes(terms, first_value.shape), kind), first_value.shape)
        starts = {n: env[n] for n in carried}
        self.inside, self.around = terms.all([outside, runs]), (*self.around, variable)
        run()
        self.inside, self.around = outside, self.around[:-1]
        self._after(number, (variable, most), runs, before, starts, env, assigned | {name})

    def _after(
        self, number: int, step: tuple[str, int], runs: int, before: dict[str, Any], starts: dict[str, Tile],
        env: dict[str, Any], assigned: set[str],
    ) -> None:  # fmt: skip
        """What variables hold when a loop is over."""
        updates: dict[str, Any] = {n: env[n] for n in starts}
        free = f"loop {number}"
        for n in assigned:  # of what a step makes anew, the last one is not known
            env[n] = None
        changed = {n: u for n, u in updates.items() if isinstance(u, Tile) and u.term != starts[n].term}
        found = closed(self.terms, free, step, runs, {n: before[n] for n in changed}, {n: starts[n] for n in changed}, changed)
        for n in starts:
            if isinstance(updates[n], Tile) and n not in changed:
                env[n] = before[n]
            elif n in found:
                env[n] = found[n]
        for n, value in list(env.items()):
            if isinstance(value, Tile) and (free in self.terms.free[value.term] or step[0] in self.terms.free[value.term]):
                env[n] = None

    # memory
    def load(self, pointer: Any, mask: Any, other: Any, line: int) -> Tile:
        """The cells that a pointer points to where a mask holds, else ``other``."""
        access, tiles = self.access(pointer, mask, line)
        self.program.loads.append(access)
        kind = kind_of(self.buffers[access.buffer].dtype).kind
        terms = self.terms
        if other is None:
            rest = terms.unknown
        elif kind == "bool":
            rest = terms.compared("ne", self.calls.tile(other).term, terms.int(Aff()))
        else:
            rest = self.calls.cast(self.calls.tile(other), Kind(kind, 64)).term
        return Tile(terms.load(access.buffer, kind, access.at, tiles[1].term, rest), access.shape)

    def access(self, pointer: Any, mask: Any, line: int) -> tuple[Access, list[Tile]]:
        """What a statement touches; and offset and mask as tiles of one rank."""
        if not isinstance(pointer, Pointer):
            raise Unsupported("an address that is no pointer")
        terms = self.terms
        tiles, shape = together(terms, [pointer.at, self.calls.tile(True if mask is None else mask)])
        if any(x.startswith("loop ") for t in tiles for x in terms.free[t.term]):
            raise Unsupported("an address from what a loop carries")
        inside = terms.all([self.inside, tiles[1].term])
        loops = tuple(v for v in self.around if terms.sizes.get(v, 1) > 1)
        return Access(pointer.buffer, terms.aff(tiles[0].term), inside, shape, line, loops), tiles

    def store(self, pointer: Any, value: Tile, mask: Any, line: int) -> None:
        """A value stored where a mask holds."""
        terms = self.terms
        access, tiles = self.access(pointer, mask, line)
        (value, *_), shape = together(terms, [value, *tiles])
        if shape != access.shape:
            raise Unsupported("a value that is wider than where it is stored")
        self.program.stores.append(Store(access, value.term))
