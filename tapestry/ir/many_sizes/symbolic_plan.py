"""The integers of a graph and its program, taken out and put back: what plans of one model at several sizes differ in.

Values are walked field by field, tables in the order of their keys; fields that are no part of what a graph says are left
alone (`dataclasses.field(compare=False)`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar, cast

from tapestry.ir.graph import Graph
from tapestry.ir.many_sizes.size_formula import Formula, Size, Sizes
from tapestry.ir.program import Program

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
