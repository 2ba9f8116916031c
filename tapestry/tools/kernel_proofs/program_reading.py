"""What a reader of a source needs: cells that statements touch, and what a loop leaves behind, over terms."""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tapestry.ir.index import Aff, const
from tapestry.tools.kernel_proofs.kernel_text import Buffer, KernelLaunch
from tapestry.tools.kernel_proofs.lane_tiles import (
    Pointer,
    Shape,
    Tile,
    dot,
    each,
    folded,
    lane,
    lanes,
    moved,
    scalar,
    together,
)
from tapestry.tools.kernel_proofs.recurrences import closed
from tapestry.tools.kernel_proofs.term import term_arithmetic as term_arithmetic_module
from tapestry.tools.kernel_proofs.term.term_arithmetic import Kind, kind_of
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported
from tapestry.tools.kernel_proofs.triton_calls import REAL


class Calls:
    """Functions of ``tl`` by name, over one proof's terms."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def tile(self, x: Any) -> Tile:
        """A value as a tile."""
        if isinstance(x, Tile):
            return x
        if isinstance(x, bool | int | float):
            return scalar(self.terms, x)
        raise Unsupported(f"a {type(x).__name__} where a number is needed")

    def each(self, function: Callable[..., int], *values: Any) -> Tile:
        """A function of terms, lane by lane."""
        return each(self.terms, function, *map(self.tile, values))

    # arithmetic
    def operator(self, fn: str, a: Any, b: Any) -> Any:
        """A binary operator, of numbers, tiles and pointers."""
        if isinstance(b, Pointer) and fn == "add":
            a, b = b, a
        if isinstance(a, Pointer):
            if fn not in ("add", "sub"):
                raise Unsupported(f"{fn} of a pointer")
            return Pointer(a.buffer, self.operator(fn, a.at, self.tile(b)))
        if fn in ("and", "or", "xor", "shl", "shr"):
            return self.each(partial(term_arithmetic_module.bits, self.terms, fn), a, b)
        if fn in ("lt", "le", "gt", "ge", "eq", "ne"):
            return self.each(partial(self.terms.compared, fn), a, b)
        return self.each(partial(term_arithmetic_module.arithmetic, self.terms, fn), a, b)

    # makers
    def full(self, shape: Any, value: Any, kind: Kind) -> Tile:
        """``tl.full``."""
        made = self.cast(self.tile(value), kind)
        return Tile(made.term, tuple(shape))

    def arange(self, lo: int, hi: int) -> Tile:
        """``tl.arange``."""
        return Tile(self.terms.int(lane(self.terms, 0, hi - lo) + lo), (hi - lo,))

    def cast(self, x: Tile, kind: Kind) -> Tile:
        """Another type."""
        return Tile(term_arithmetic_module.cast(self.terms, x.term, kind), x.shape)

    def broadcast_to(self, x: Any, shape: Any) -> Tile:
        """``tl.broadcast_to``."""
        (made,), whole = together(self.terms, [self.tile(x)], tuple(shape))
        if whole != tuple(shape):
            raise Unsupported(f"{self.tile(x).shape} does not broadcast to {shape}")
        return Tile(made.term, whole)

    def where(self, c: Any, a: Any, b: Any) -> Tile:
        """``tl.where``."""
        return self.each(self.terms.where, c, a, b)

    def extreme(self, fn: str, a: Any, b: Any, propagate_nan: Any = None) -> Tile:
        """``tl.maximum`` and ``tl.minimum``."""
        return self.each(partial(term_arithmetic_module.extreme, self.terms, fn), a, b)

    def real(self, fn: str, x: Any) -> Tile:
        """A function of one real number."""
        return self.each(partial(term_arithmetic_module.real, self.terms, fn), x)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """``tl.fma``."""
        return self.operator("add", self.operator("mul", a, b), c)

    def dot(self, a: Tile, b: Tile, acc: Any = None, **how: Any) -> Tile:
        """``tl.dot``; its other options concern precision and types."""
        if set(how) - {"input_precision", "out_dtype", "max_num_imprecise_acc"}:
            raise Unsupported(f"options {sorted(how)} of a product")
        made = dot(self.terms, a, b)
        return made if acc is None else self.operator("add", acc, made)

    def zeros(self, shape: Any, kind: Kind) -> Tile:
        """``tl.zeros``."""
        return self.full(shape, 0, kind)

    def reduction(self, fn: str, x: Any, axis: int) -> Tile:
        """``tl.sum``, ``tl.max`` and ``tl.min``."""
        return folded(self.terms, fn, self.tile(x), axis)

    def transposed(self, x: Tile) -> Tile:
        """``tl.trans`` of two axes."""
        if len(x.shape) != 2:
            raise Unsupported("a transposition of more than two axes")
        a, b = x.shape
        return moved(self.terms, x, [lane(self.terms, 1, a), lane(self.terms, 0, b)], (b, a))

    def reshaped(self, x: Tile, shape: Shape) -> Tile:
        """``reshape``, row-major."""
        terms = self.terms
        if math.prod(shape) != math.prod(x.shape):
            raise Unsupported("a reshape to another size")
        flat: Aff = const(0)
        for n, e in zip(shape, lanes(terms, shape), strict=True):
            flat = flat * n + e
        places = list[Aff]()
        for k, n in enumerate(x.shape):
            inner = math.prod(x.shape[k + 1 :])
            places.append(terms.remainder(terms.divided(flat, inner), n))
        return moved(terms, x, places, shape)

    def table(self) -> dict[str, Callable[..., Any]]:
        """``tl.NAME`` to what it does; options that concern the hardware are ignored."""
        return {
            "arange": self.arange,
            "full": self.full,
            "where": self.where,
            "dot": self.dot,
            "trans": self.transposed,
            "zeros": self.zeros,
            "broadcast_to": self.broadcast_to,
            "fma": self.fused,
            "maximum": partial(self.extreme, "max"),
            "minimum": partial(self.extreme, "min"),
            "div_rn": partial(self.operator, "truediv"),
            "sum": partial(self.reduction, "add"),
            **{fn: partial(self.reduction, fn) for fn in ("max", "min")},
            **{fn: partial(self.real, fn) for fn in REAL},
        }


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


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of what a function takes."""
    return [a.arg for a in function.args.args]


class Reading(ABC):
    """A launch read statement by statement.

    Attributes:
        known: the functions of the file by name, as the parser has them.
        around: variables of the loops that a statement stands in.
        inside: under which conditions a statement runs.
        unrolled: whether loops are read step by step.
    """

    def __init__(self, terms: Terms, known: Mapping[str, Any], launch: KernelLaunch, buffers: Mapping[str, Buffer]) -> None:
        self.terms, self.known, self.launch, self.buffers = terms, known, launch, buffers
        self.calls = Calls(terms)
        pass_ = terms.fresh()[1:]
        self.program = Program(terms, {f"p{k}.{pass_}": n for k, n in enumerate(launch.grid)})
        self.around, self.inside, self.unrolled = tuple[str, ...](), terms.true, False

    @abstractmethod
    def statement(self, line: Any, env: dict[str, Any], /) -> None:
        """Read one statement."""

    def started(self, unrolled: bool) -> tuple[Any, dict[str, Any]]:
        """The function that is launched, and its parameters by name with what each gets.

        Args:
            unrolled: read loops step by step; for those that carry what has no closed form.
        """
        self.unrolled = unrolled
        if self.launch.function not in self.known:
            raise Unsupported(f"no function '{self.launch.function}'")
        function, params = self.known[self.launch.function], self.launch.params
        given = parameters(function)
        if set(given) != set(params):
            raise Unsupported(f"parameters {given}, not {list(params)}")
        return function, {n: Pointer(v, scalar(self.terms, 0)) if isinstance(v, str) else v for n, v in params.items()}

    def block(self, lines: Iterable[Any], env: dict[str, Any]) -> None:
        """Read statements one after another; what is not known says at which line."""
        for line in lines:
            try:
                self.statement(line, env)
            except Unsupported as e:
                if "line" in str(e):
                    raise
                raise Unsupported(f"line {line.lineno}: {e}") from None

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
        self,
        number: int,
        step: tuple[str, int],
        runs: int,
        before: dict[str, Any],
        starts: dict[str, Tile],
        env: dict[str, Any],
        assigned: set[str],
    ) -> None:
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
