"""The integers of a graph and its program, taken out and put back: what plans of one model at several sizes differ in.

Values are walked field by field, tables in the order of their keys; fields that are no part of what a graph says are left
alone (`dataclasses.field(compare=False)`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, TypeVar, cast

from tapestry.ir.graph import Block, Graph
from tapestry.ir.program import Launch, Program
from tapestry.ir.types import Tensor

# Integers that follow from sizes: ``floor((p . n + q) / d)`` of the sizes n of some symbols, in order, or a multiple of that.
#
# A balanced cut of an affine size is one of these for each part, so that a plan for every size is a list of them: one set for
# each device, never one map over devices, which would multiply a device's number and a size.


Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Formula:
    """``times * floor((coefs . n + const) / div) + plus``, div > 0."""

    coefs: tuple[int, ...]
    const: int
    div: int = 1
    times: int = 1
    plus: int = 0

    def at(self, sizes: Sequence[int]) -> int:
        """The value at some sizes."""
        top = sum(c * n for c, n in zip(self.coefs, sizes, strict=True)) + self.const
        return self.times * (top // self.div) + self.plus

    def scaled(self, times: int, plus: int) -> Formula:
        """So many times the formula, and a number: one way to write it for each."""
        times, plus = self.times * times, self.plus * times + plus
        if self.div == 1:
            return Formula(tuple(c * times for c in self.coefs), self.const * times + plus)
        if times == 1:
            return Formula(self.coefs, self.const + plus * self.div, self.div)
        return Formula(self.coefs, self.const % self.div, self.div, times, plus + times * (self.const // self.div))

    def text(self, names: Sequence[str]) -> str:
        """As isl reads it, in parentheses unless it is a name."""
        terms = [n if c == 1 else f"{c} * {n}" for c, n in zip(self.coefs, names, strict=True) if c]
        terms += [str(self.const)] if self.const or not terms else []
        if len(terms) == 1 and self.div == 1 and "*" not in terms[0]:
            return terms[0]
        out = f"floor(({' + '.join(terms)})/{self.div})" if self.div > 1 else f"({' + '.join(terms)})"
        return out if (self.times, self.plus) == (1, 0) else f"({self.times} * {out} + {self.plus})"


class Size(int):
    """An integer of a plan, as it is at the sizes at which the plan was made, which knows its formula.

    It is equal to another one of the same formula alone, and prints as the formula over ``n0``, ``n1``, …: what makes isl's
    text of a graph makes that of all its sizes. Arithmetic gives plain integers.
    """

    formula: Formula

    def __new__(cls, formula: Formula, value: int) -> Size:
        """The integer ``value`` with its formula."""
        out = super().__new__(cls, value)
        out.formula = formula
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.formula == other.formula

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.formula)

    def __str__(self) -> str:
        return self.formula.text(names_of(len(self.formula.coefs)))

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return str(self)


def names_of(count: int) -> tuple[str, ...]:
    """What symbols are called in conditions, whatever they are called in the model."""
    return tuple(f"n{k}" for k in range(count))


def formula_of(value: int) -> Formula | None:
    """The formula of an integer that has one."""
    return value.formula if isinstance(value, Size) else None


def text_of(value: int, names: Sequence[str]) -> str:
    """An integer, or its formula over the names of symbols."""
    found = formula_of(value)
    return str(int(value)) if found is None else found.text(names)


@dataclass(frozen=True, slots=True)
class Region:
    """Sizes that one plan is for: from ``low`` to ``high``, both included, and where ``among`` has an entry, only of those.

    Attributes:
        among: by position of the symbol.
    """

    low: Sizes
    high: Sizes
    among: Mapping[int, Sizes]

    def __contains__(self, sizes: object) -> bool:
        given = cast(Sizes, sizes)
        inside = all(a <= n <= b for a, n, b in zip(self.low, given, self.high, strict=True))
        return inside and all(given[k] in some for k, some in self.among.items())

    def text(self) -> str:
        """The condition on the sizes, as isl reads it."""
        names = names_of(len(self.low))
        rules = [f"{a} <= {n} <= {b}" for a, n, b in zip(self.low, names, self.high, strict=True)]
        rules += [f"({' or '.join(f'{names[k]} = {n}' for n in some)})" for k, some in sorted(self.among.items())]
        return " and ".join(rules)

    def along(self, k: int) -> Sequence[int]:
        """The sizes of one symbol."""
        some = self.among.get(k)
        return range(self.low[k], self.high[k] + 1) if some is None else [n for n in some if self.low[k] <= n <= self.high[k]]

    def only(self, k: int) -> Region:
        """The sizes of one symbol alone."""
        some = {0: self.among[k]} if k in self.among else dict[int, Sizes]()
        return Region((self.low[k],), (self.high[k],), some)

    def corners(self) -> Iterator[Sizes]:
        """The least and the largest sizes, each once."""
        ends = [dict.fromkeys((min(self.along(k)), max(self.along(k)))) for k in range(len(self.low))]
        return iter(product(*ends))

    def near(self, sizes: Sizes) -> Sizes:
        """Other sizes, next to some in the region, where there are other ones."""
        out: list[int] = []
        for k, n in enumerate(sizes):
            some = self.along(k)
            out.append(next((m for m in some if m > n), next((m for m in reversed(some) if m < n), n)))
        return tuple(out)

    def shown(self, names: Sequence[str]) -> str:
        """For people: ``batch 1..4, sequence 128, 256``."""
        out: list[str] = []
        for k, name in enumerate(names):
            some = self.along(k)
            whole = k not in self.among and len(some) > 1
            out.append(f"{name} {some[0]}..{some[-1]}" if whole else f"{name} {', '.join(map(str, some))}")
        return ", ".join(out)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flat:
    """A value apart: its integers in order, and everything else in order."""

    integers: list[int]
    rest: list[object]


@cache
def _fields(kind: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.compare)


def flat(*values: object) -> Flat:
    """The integers of some values, and the rest."""
    out = Flat([], [])
    for v in values:
        _walk(v, out)
    return out


def _walk(value: object, out: Flat) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        out.integers.append(value)
    elif isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        out.rest.append(len(items))
        for v in items:
            _walk(v, out)
    elif isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        for k in sorted(table):
            out.rest.append(k)
            _walk(table[k], out)
    elif is_dataclass(value) and not isinstance(value, type):
        out.rest.append(type(value))
        for name in _fields(type(value)):
            _walk(getattr(value, name), out)
    else:
        out.rest.append(repr(value) if isinstance(value, float) else value)


def rebuilt(value: T, leaf: Callable[[int], int]) -> T:
    """The value with every integer replaced by ``leaf(it)``, called in the order of `flat`; what stays is shared."""
    return cast(T, _rebuilt(value, leaf))


def _rebuilt(value: object, leaf: Callable[[int], int]) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return leaf(value)
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        new = [_rebuilt(v, leaf) for v in items]
        return items if all(a is b for a, b in zip(items, new, strict=True)) else type(items)(new)
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        done = {k: _rebuilt(table[k], leaf) for k in sorted(table)}
        return table if all(done[k] is v for k, v in table.items()) else {k: done[k] for k in table}
    if is_dataclass(value) and not isinstance(value, type):
        found = {name: _rebuilt(getattr(value, name), leaf) for name in _fields(type(value))}
        changed = {name: v for name, v in found.items() if v is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value


@dataclass(frozen=True)
class SymbolicPlan:
    """A graph and its program whose sizes are symbols; the integers that follow from them are `Size`."""

    graph: Graph
    program: Program

    def at(self, sizes: Sizes) -> tuple[Graph, Program]:
        """Both at some sizes. Equal parts are made once: nothing is searched, and nothing checked."""
        made: dict[int, object] = {}
        values: dict[Formula, int] = {}
        follows = self._follows

        def of(value: object) -> object:
            if isinstance(value, Size):
                f = value.formula
                return values[f] if f in values else values.setdefault(f, f.at(sizes))
            key = id(value)
            if key not in follows:
                return value
            if key not in made:
                made[key] = _with(value, of)
            return made[key]

        return cast(Graph, of(self.graph)), cast(Program, of(self.program))

    @cached_property
    def _follows(self) -> frozenset[int]:
        """Which objects have an integer in them that follows from sizes, by identity."""
        known: dict[int, bool] = {}

        def of(value: object) -> bool:
            if isinstance(value, Size):
                return True
            key = id(value)
            if key not in known:
                found = [of(part) for part in _parts(value)]  # all of them, for what is known of each
                known[key] = any(found)
            return known[key]

        of(self.graph)
        of(self.program)
        return frozenset(key for key, follows in known.items() if follows)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, tuple):
        return cast("tuple[object, ...]", value)
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value).values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in _fields(type(value))]
    return ()


def _with(value: object, of: Callable[[object], object]) -> object:
    """A tuple, table or dataclass with its parts replaced."""
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        return type(items)(of(v) for v in items)
    if isinstance(value, Mapping):
        return {k: of(v) for k, v in cast("Mapping[str, object]", value).items()}
    assert is_dataclass(value) and not isinstance(value, type)
    found = {name: of(getattr(value, name)) for name in _fields(type(value))}
    return replace(value, **{name: v for name, v in found.items() if v is not getattr(value, name)})


def with_formulas(graph: Graph, program: Program, places: Mapping[int, Formula]) -> SymbolicPlan:
    """A plan with formulas in the places of some of its integers.

    Raises:
        ValueError: there is no such place.
    """
    at = -1

    def leaf(value: int) -> int:
        nonlocal at
        at += 1
        return Size(places[at], value) if at in places else value

    new = rebuilt((graph, program), leaf)
    if max(places, default=-1) > at:
        raise ValueError(f"there is no integer {max(places)}: there are {at + 1}")
    return SymbolicPlan(new[0], new[1])


def alike(flats: Sequence[Flat]) -> bool:
    """Whether several values differ in their integers alone."""
    return all(f.rest == flats[0].rest and len(f.integers) == len(flats[0].integers) for f in flats[1:])


# Launches of a program for several sizes whose kernels are one function: layers of a model differ in the names of tensors.


def equal_launches(plan: SymbolicPlan) -> dict[tuple[int, int], int]:
    """A number for each launch of an operation, by step and device: equal where both are one function at every size.

    They are where operations, blocks and boxes of buffers are equal with formulas in the places of integers, whatever the
    tensors are called.
    """
    graph, program = plan.graph, plan.program
    numbers: dict[Hashable, int] = {}
    of_ops: dict[int, Hashable] = {}
    out: dict[tuple[int, int], int] = {}
    for at, step in enumerate(program.steps):
        if not isinstance(step, Launch) or not isinstance(op := graph.ops[step.op], Block):
            continue
        if step.op not in of_ops:
            of_ops[step.op] = _without_names(op, plan)
        for d, block in enumerate(step.blocks):
            boxes = [program.buffers[b].boxes[d] if b else None for b in (*step.ins, *step.outs, *step.states)]
            if block is not None:
                key = (of_ops[step.op], _symbol_key(step.mode, block, tuple(boxes)))
                out[at, d] = numbers.setdefault(key, len(numbers))
    return out


def _without_names(op: Block, plan: SymbolicPlan) -> Hashable:
    """All that an operation says but what its tensors are called and where it came from."""
    slots = {t: str(k) for k, t in enumerate(op.inputs)}
    reads = tuple(replace(r, tensor=slots[r.tensor]) for r in op.reads)
    tensors = [plan.graph.tensors[t] for t in (*op.inputs, *op.outs)]
    about = [tuple(getattr(t, f.name) for f in fields(Tensor) if f.name != "name") for t in tensors]
    return _symbol_key(replace(op, reads=reads, outs=("",) * len(op.outs), source=()), tuple(about))


def _symbol_key(*values: object) -> Hashable:
    found = flat(*values)
    return tuple(found.integers), tuple(found.rest)
