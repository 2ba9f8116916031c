"""Integer sets and relations, exactly: the only importer of islpy.

isl is the truth for projections; `ir.index.bounds` is the fast path for boxes and is property-tested against this file.
Traps kept out of sight here: ``==`` of isl objects may hold while their hashes differ, names are ignored by comparison,
coalesced text is not canonical, and counting points of a 7-d box takes seconds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import islpy as isl

from tapestry.ir.graph import Block, Dim, Guard, Read
from tapestry.ir.index import Aff, Floor, dims_of
from tapestry.ir.kernel import Box

Point = tuple[int, ...]


class TooHard(Exception):
    """isl was not done within the operations that it was given."""


@contextmanager
def bounded(operations: int) -> Generator[None]:
    """isl with so many operations of its own and no more, which raises `TooHard` then."""
    context = isl.DEFAULT_CONTEXT
    context.reset_operations()
    context.set_max_operations(operations)
    try:
        yield
    except isl.Error as e:
        raise TooHard from e
    finally:
        context.set_max_operations(0)


@dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """A set of pairs (point of one space, point of another), as an isl map."""

    raw: Any

    def equals(self, other: Relation) -> bool:
        """Whether both hold exactly the same pairs."""
        return bool(self.raw.is_equal(other.raw))

    def inside(self, other: Relation) -> bool:
        """Whether every pair is in the other relation."""
        return bool(self.raw.is_subset(other.raw))

    def then(self, other: Relation) -> Relation:
        """Composition: (a, c) for every (a, b) here and (b, c) there."""
        return Relation(self.raw.apply_range(other.raw))

    def union(self, other: Relation) -> Relation:
        """All pairs of both."""
        return Relation(self.raw.union(other.raw).coalesce())

    def injective(self) -> bool:
        """Whether no two points map to one."""
        return bool(self.raw.is_injective())

    def image(self, box: Box) -> Relation | None:
        """The relation restricted to a box of its domain; ``None`` when nothing is left."""
        cut = self.raw.intersect_domain(_box_set(box))
        return None if cut.is_empty() else Relation(cut)

    def hull(self) -> Box:
        """The smallest box that holds the range."""
        found = self.raw.range()
        return tuple(
            (int(str(found.dim_min_val(i))), int(str(found.dim_max_val(i))) + 1) for i in range(found.dim(isl.dim_type.set))
        )

    def witness(self, other: Relation | None) -> tuple[Point, Point] | None:
        """A pair of this relation that the other lacks, or any where there is no other; ``None`` when there is none."""
        missing = self.raw if other is None else self.raw.subtract(other.raw)
        return None if missing.is_empty() else _pair(missing)

    def leaves(self, box: Box) -> tuple[Point, Point] | None:
        """A pair whose second point is outside a box; ``None`` when the range is inside."""
        outside = self.raw.subtract_range(_box_set(box))
        return None if outside.is_empty() else _pair(outside)

    def collision(self) -> tuple[Point, Point] | None:
        """Two different points that map to one; ``None`` when injective."""
        same = self.raw.apply_range(self.raw.reverse())
        n = same.dim(isl.dim_type.in_)
        different = same.subtract(isl.Map.identity(same.get_space())) if n else same
        return None if different.is_empty() else _pair(different)


def access(op: Block, read: Read, shape: tuple[int, ...]) -> Relation:
    """Pairs (index point, cell of the tensor) that a read touches.

    A guarded read touches only cells inside the tensor and under its guards; an unguarded one all that it names.
    """
    return Relation(_access(op.space, read.index, read.when, shape if read.other is not None else None))


def reads_of_outputs(op: Block, read: Read, shape: tuple[int, ...]) -> Relation:
    """Pairs (cell of the output, cell of the tensor read): the access with reduced dimensions projected out."""
    raw = access(op, read, shape).raw
    n, k = len(op.dims), len(op.reduce) + len(op.inner_dims)
    return Relation(raw.project_out(isl.dim_type.in_, n, k) if k else raw)


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of an access: some dimensions (positions in the index space) and the tensor axes that they alone decide.

    ``text`` is the relation as isl reads it; factors of equal text are equal whatever their dimensions are called.
    """

    dims: tuple[int, ...]
    axes: tuple[int, ...]
    text: str

    def image(self, box: Box) -> Box | None:
        """The smallest box that holds what a box of the dimensions reads; ``None`` when that is nothing."""
        found = Relation(isl.Map(self.text)).image(box)
        return None if found is None else found.hull()


def apart(read: Read) -> list[tuple[set[str], list[int], list[Guard]]]:
    """Dimensions, axes and guards of a read that go together: no two groups share a dimension."""
    groups: list[tuple[set[str], list[int], list[Guard]]] = []
    items = [(set(dims_of(e)), [i], list[Guard]()) for i, e in enumerate(read.index)]
    items += [(set(dims_of(g.aff)), list[int](), [g]) for g in read.when]
    for names, axes, when in items:
        for other in [g for g in groups if g[0] & names]:
            groups.remove(other)
            names, axes, when = names | other[0], other[1] + axes, other[2] + when
        groups.append((names, axes, when))
    return groups


def independent(op: Block, read: Read, shape: tuple[int, ...]) -> tuple[Factor, ...]:
    """The access as a product of factors that share no dimension.

    Over a box of the index space the cells read are then the product of what the factors read, and so are the box hulls;
    they are empty when one of the factors, or the box, is.
    """
    groups = apart(read)
    out: list[Factor] = []
    for names, axes, when in groups:
        dims = tuple(i for i, d in enumerate(op.space) if d.name in names)
        extents = tuple(shape[i] for i in axes) if read.other is not None else None
        index = tuple(read.index[i] for i in axes)
        out.append(Factor(dims, tuple(axes), _access_text(tuple(op.space[i] for i in dims), index, tuple(when), extents)))
    return tuple(out)


def used(op: Block, read: Read) -> Relation:
    """The access over the dimensions that the read depends on, and no others."""
    names = frozenset(n for e in read.index for n in dims_of(e))
    kept = tuple(d for d in op.space if d.name in names)
    return Relation(_access(kept, read.index, (), None))


def identity(shape: tuple[int, ...]) -> Relation:
    """Every cell of a tensor paired with itself."""
    box = _box_set(tuple((0, n) for n in shape))
    return Relation(box.identity())


def blocks(dims: tuple[Dim, ...], cuts: dict[str, int]) -> Relation:
    """Pairs (block ids, index point) for dimensions cut into parts: one map, however many blocks there are."""
    ids = [d.name for d in dims if cuts.get(d.name, 1) > 1]
    rename = {d.name: f"p{i}" for i, d in enumerate(dims)}
    rules = [f"0 <= {rename[d.name]} < {d.size}" for d in dims]
    for i, name in enumerate(ids):
        extent, parts = next(d.size for d in dims if d.name == name), cuts[name]
        rules.append(f"0 <= k{i} < {parts}")
        rules.append(f"floor((k{i} * {extent})/{parts}) <= {rename[name]} < floor(((k{i} + 1) * {extent})/{parts})")
    source = ", ".join(f"k{i}" for i in range(len(ids)))
    target = ", ".join(rename.values())
    return Relation(isl.Map(f"{{ [{source}] -> [{target}] : {' and '.join(rules) or 'true'} }}"))


def covers(cuts: Relation, dims: tuple[Dim, ...]) -> Point | None:
    """A point of the index space that no block holds; ``None`` when the blocks cover it."""
    missing = _box_set(tuple((0, d.size) for d in dims)).subtract(cuts.raw.range())
    return None if missing.is_empty() else _point(missing.sample_point())


def vanishes(e: Aff, ranges: Mapping[str, int]) -> dict[str, int] | None:
    """A point of a box where an index expression is not 0; ``None`` when it is 0 everywhere."""
    names = {n: f"p{i}" for i, n in enumerate(ranges)}
    rules = [f"0 <= {names[n]} < {size}" for n, size in ranges.items()]
    text = f"{{ [{', '.join(names.values())}] : {' and '.join([*rules, f'{aff_text(e, names)} != 0'])} }}"
    found = isl.Set(text)
    return None if found.is_empty() else dict(zip(ranges, _point(found.sample_point()), strict=True))


def _access(dims: tuple[Dim, ...], index: tuple[Aff, ...], when: tuple[Guard, ...], shape: tuple[int, ...] | None) -> Any:
    return isl.Map(_access_text(dims, index, when, shape))


def _access_text(dims: tuple[Dim, ...], index: tuple[Aff, ...], when: tuple[Guard, ...], shape: tuple[int, ...] | None) -> str:
    names = {d.name: f"p{i}" for i, d in enumerate(dims)}
    rules = [f"0 <= {names[d.name]} < {d.size}" for d in dims]
    rules += [f"c{i} = {aff_text(e, names)}" for i, e in enumerate(index)]
    rules += [f"{aff_text(g.aff, names)} {'>=' if g.op == 'ge' else '='} 0" for g in when]
    if shape is not None:
        rules += [f"0 <= c{i} < {n}" for i, n in enumerate(shape)]
    source, target = ", ".join(names.values()), ", ".join(f"c{i}" for i in range(len(index)))
    return f"{{ [{source}] -> [{target}] : {' and '.join(rules) or 'true'} }}"


def aff_text(e: Aff, names: dict[str, str]) -> str:
    """An index expression as isl reads it; ``names``: of its dimensions there."""
    out = str(e.const)
    for atom, coef in e.terms:
        if isinstance(atom, str):
            text = names[atom]
        elif isinstance(atom, Floor):
            text = f"floor(({aff_text(atom.arg, names)})/{atom.div})"
        else:
            text = f"(({aff_text(atom.arg, names)}) mod {atom.div})"
        out += f" {'-' if coef < 0 else '+'} {abs(coef)} * {text}"
    return out


def _box_set(box: Box) -> Any:
    names = [f"p{i}" for i in range(len(box))]
    rules = [f"{lo} <= {n} < {hi}" for n, (lo, hi) in zip(names, box, strict=True)]
    return isl.Set(f"{{ [{', '.join(names)}] : {' and '.join(rules) or 'true'} }}")


def _pair(raw: Any) -> tuple[Point, Point]:
    n = raw.dim(isl.dim_type.in_)
    both = _point(raw.wrap().sample_point())
    return both[:n], both[n:]


def _point(p: Any) -> Point:
    return tuple(int(str(p.get_coordinate_val(isl.dim_type.set, i))) for i in range(p.get_space().dim(isl.dim_type.set)))


def solution(ranges: Mapping[str, int], rules: str) -> dict[str, int] | None:
    """A point of a box (``None`` for a size: any integer) at which a condition in isl's words holds; ``None`` without one."""
    bounds = [f"0 <= {n} < {size}" for n, size in ranges.items() if size]
    found = isl.Set(f"{{ [{', '.join(ranges)}] : {' and '.join([*bounds, f'({rules})'])} }}")
    return None if found.is_empty() else dict(zip(ranges, _point(found.sample_point()), strict=True))


def possible(rules: Iterable[Mapping[str, int]]) -> bool:
    """Whether there are integers, unbounded ones, for which every linear form is at least zero; ``""`` has its constant."""
    forms = list(rules)
    names = {n: f"v{k}" for k, n in enumerate(dict.fromkeys(n for f in forms for n in f if n))}
    terms = (" + ".join(f"{c}*{names[n]}" if n else str(c) for n, c in f.items()) or "0" for f in forms)
    return not isl.Set(f"{{ [{', '.join(names.values())}] : {' and '.join(f'{t} >= 0' for t in terms) or 'true'} }}").is_empty()


def nowhere(ranges: Mapping[str, int], hold: Iterable[Aff], fails: Aff) -> bool:
    """Whether no point of a box where some expressions are at least 0 has another one below it."""
    names = {n: f"p{k}" for k, n in enumerate(ranges)}
    box = [f"0 <= {names[n]} < {s}" for n, s in ranges.items()]
    rules = [*box, *(f"{aff_text(e, names)} >= 0" for e in hold), f"{aff_text(fails, names)} < 0"]
    return bool(isl.Set(f"{{ [{', '.join(names.values())}] : {' and '.join(rules)} }}").is_empty())
