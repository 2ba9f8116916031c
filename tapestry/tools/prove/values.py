"""Values up to equality: every cell that a model or a program computes, as a function of places in the model's tensors.

A `Node` is a function of integers (its *slots*): a tensor's cell, a primitive of other nodes, a reduction of them. A `Ref` is a
node at quasi-affine places. Nodes are interned, so that two computations are equal where their nodes are the same and their
places are equal; that is congruence, for any operator, and no rule is written for one. A slot stands for every argument that
the first user of the node read at one place, so that a second user must read those at one place too.

Equality is that of real functions: a merge may be reassociated, sums of partial states are complete only where their domains
are a partition, and rounding is not looked at. Nothing here runs a model or searches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import inf, isfinite
from typing import Any, cast

import numpy as np

from tapestry.ir.expr import PRIMITIVES, Call, Const
from tapestry.ir.index import Aff, const, dim, dims_of, evaluate, modulo, span, substitute
from tapestry.ir.space import vanishes
from tapestry.ir.types import FLOATS, numpy_dtype
from tapestry.verify.interp import value as evaluate_expression

# Parts of a reduction's domain: a set of places per reduced dimension, and their product.


@dataclass(frozen=True, slots=True)
class Domain:
    """A product of sets of places, one per reduced dimension; each set as disjoint ranges in order."""

    axes: tuple[tuple[tuple[int, int], ...], ...]

    def whole(self, sizes: Sequence[int]) -> bool:
        """Whether it is all of a box that begins at 0."""
        return all(a == ((0, n),) for a, n in zip(self.axes, sizes, strict=True))

    def meets(self, other: Domain) -> bool:
        """Whether some point is in both."""
        pairs = (product(a, b) for a, b in zip(self.axes, other.axes, strict=True))
        return all(any(max(x[0], y[0]) < min(x[1], y[1]) for x, y in p) for p in pairs)

    def join(self, other: Domain, overlap: bool) -> Domain | None:
        """The union; None where it is no product, or where both have a point and may not (``overlap``)."""
        if self.meets(other) and not overlap:
            return None
        apart = [k for k, (a, b) in enumerate(zip(self.axes, other.axes, strict=True)) if a != b]
        if not apart:
            return self
        if len(apart) > 1:
            return None
        k = apart[0]
        return Domain((*self.axes[:k], union((*self.axes[k], *other.axes[k])), *self.axes[k + 1 :]))

    def text(self) -> str:
        """As a person reads it."""
        return " x ".join("+".join(f"{lo}..{hi - 1}" for lo, hi in a) for a in self.axes)


def join_all(parts: Sequence[Domain], overlap: bool) -> Domain | None:
    """Union of ``parts`` as a product. None if it is none, or if parts overlap and ``overlap`` is False."""
    if not overlap and any(a.meets(b) for k, a in enumerate(parts) for b in parts[:k]):
        return None
    rest = list(parts)
    while len(rest) > 1:
        first = rest.pop(0)
        for k, other in enumerate(rest):
            both = first.join(other, overlap)
            if both is not None:
                rest[k] = both
                break
        else:
            return None
    return rest[0]


def union(items: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges in order, with those that meet or touch as one."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(items):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], hi))
        else:
            out.append((lo, hi))
    return tuple(out)


Ranges = Mapping[str, int]
NEVER = 1 << 20
PLACE = ""  # the leaf whose cells are their own places: no tensor is called so


@dataclass(frozen=True, slots=True)
class Ref:
    """A node at places: one index expression per slot, over the dimensions of the space where it is used."""

    node: int
    index: tuple[Aff, ...]


Value = Ref | Const
Slots = tuple[Aff, ...]


@dataclass(slots=True)
class Node:
    """A function of ``slots`` integers.

    Attributes:
        kind: ``leaf`` (a tensor of the model), ``call`` (a primitive), ``reduce``, ``part`` (a reduction over a part of its
            domain) or ``opaque``.
        label: the tensor, the primitive with its dtype, the monoid with its field, the domain or the operator's bytes.
        args: nodes or literals; the places of a node's slots are over ``v0 …`` (the slots of this one) and ``r0 …``.
        bound: sizes of the dimensions ``r0 …`` that are merged.
        origin: how the model calls it: the tensor that it was first computed for.
        model: whether the model computes it.
    """

    kind: str
    label: tuple[Any, ...]
    args: tuple[Value, ...]
    slots: int
    dtype: str = ""
    bound: tuple[int, ...] = ()
    origin: str = ""
    model: bool = False


@dataclass(slots=True)
class Miss:
    """A place where a program does what the model does, but not of the same cells."""

    rank: int
    tensor: str
    origin: str
    text: str


@dataclass(slots=True)
class Table:
    """All nodes, interned.

    Attributes:
        building: whether what is added is the model's.
        rank, tensor: whose value is computed now, for messages.
        misses: where arguments agree in what they are and not in where they are read.
        axes: for nodes of the model's tensors, what each slot is there: ``y2`` is the tensor's axis 2.
        padded: nodes that the model reads with a number around them, as the nodes with it.
    """

    nodes: list[Node] = field(default_factory=list[Node])
    known: dict[Any, list[int]] = field(default_factory=dict[Any, list[int]])
    building: bool = True
    rank: int = -1
    tensor: str = ""
    misses: list[Miss] = field(default_factory=list[Miss])
    axes: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    partial: dict[int, bool] = field(default_factory=dict[int, bool])
    chosen: dict[int, int] = field(default_factory=dict[int, int])
    padded: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def add(self, key: Any, node: Node) -> int:
        """A new node under a key."""
        node.origin, node.model = node.origin or self.tensor, self.building
        self.nodes.append(node)
        self.known.setdefault(key, []).append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def interned(self, key: Any, node: Node) -> int:
        """The node of a key, under which there is one alone."""
        return self.known[key][0] if key in self.known else self.add(key, node)

    def leaf(self, name: str, rank: int, dtype: str) -> int:
        """The node of a tensor of the model by its cells."""
        return self.interned(("leaf", name, dtype), Node("leaf", (name,), (), rank, dtype, origin=name))

    def dtype(self, v: Value) -> str:
        """Element type of a value."""
        return v.dtype if isinstance(v, Const) else self.nodes[v.node].dtype

    def iota(self, place: Aff, dtype: str = "i64") -> Value:
        """The value of an index expression."""
        if not place.terms:
            return Const(place.const, dtype)
        return Ref(self.leaf(PLACE, 1, dtype), (place,))

    def is_place(self, v: Value) -> Aff | None:
        """The index expression that a value is, if it is one."""
        if isinstance(v, Const):
            return const(v.value) if isinstance(v.value, int) and not isinstance(v.value, bool) else None
        node = self.nodes[v.node]
        return v.index[0] if node.kind == "leaf" and node.label == (PLACE,) else None

    def call(self, fn: str, args: Sequence[Value], dtype: str, ranges: Ranges) -> Value:
        """A primitive of values over a space."""
        if all(isinstance(a, Const) for a in args) and fn in PRIMITIVES:
            literals = tuple(a for a in args if isinstance(a, Const))
            with np.errstate(all="ignore"):
                return Const(evaluate_expression(Call(fn, literals, dtype), [], [], {}, False).item(), dtype)
        simple = self._simplified(fn, args, dtype, ranges)
        if simple is not None:
            return simple
        return self._applied((fn, dtype), ordered(fn, args), ranges)

    def _applied(self, label: tuple[Any, ...], args: Sequence[Value], ranges: Ranges) -> Ref:
        """The call of a label, matched with a known one or new."""
        found = self.applied_before(label, args, ranges)
        if found is not None:
            return found
        key, places = keyed("call", label, args), [e for a in args if isinstance(a, Ref) for e in a.index]
        number: dict[Aff, int] = {}
        slots = [number.setdefault(e, len(number)) for e in places]
        take = iter(slots)
        made = tuple(Ref(a.node, tuple(dim(f"v{next(take)}") for _ in a.index)) if isinstance(a, Ref) else a for a in args)
        return Ref(self.add(key, Node("call", label, made, len(number), label[1])), tuple(number))

    def applied_before(self, label: tuple[Any, ...], args: Sequence[Value], ranges: Ranges) -> Ref | None:
        """The known call of a label; None where there is none."""
        places = [e for a in args if isinstance(a, Ref) for e in a.index]
        for at in self.known.get(keyed("call", label, args), ()):
            found = self._slots_of(at, places, ranges)
            if found is not None:
                return Ref(at, found)
        return None

    def _slots_of(self, at: int, places: Sequence[Aff], ranges: Ranges) -> Slots | None:
        """The places of a known call's slots, if arguments that share one there are read at one place here."""
        node, out = self.nodes[at], dict[str, Aff]()
        take = iter(places)
        for a in node.args:
            for e in a.index if isinstance(a, Ref) else ():
                here, slot = next(take), str(e)
                if not same(out.setdefault(slot, here), here, ranges):
                    self._missed(at, a, slot, out[slot], here, ranges)
                    return None
        return tuple(out[f"v{k}"] for k in range(node.slots))

    def _missed(self, at: int, arg: Value, slot: str, there: Aff, here: Aff, ranges: Ranges) -> None:
        node = self.nodes[at]
        if not node.model or self.building:
            return
        first = next(a for a in node.args if isinstance(a, Ref) and any(str(e) == slot for e in a.index))
        assert isinstance(arg, Ref)
        point = vanishes(there - here, ranges) or dict.fromkeys(ranges, 0)
        names = [
            self.line(a.node, next(k for k, e in enumerate(a.index) if str(e) == slot), int(evaluate(e, point)))
            for a, e in ((arg, here), (first, there))
        ]
        where = ", ".join(f"{n}={k}" for n, k in point.items())
        self.miss(f"[{where}] reads {names[0]} together with {names[1]}; the model reads both at one place", node.origin)

    def line(self, at: int, slot: int, place: int) -> str:
        """A place of a node's slot, as a person says it: row 3 of x."""
        known = self.axes.get(at, tuple(f"y{k}" for k in range(self.nodes[at].slots)) if self.nodes[at].kind == "leaf" else ())
        axis = known[slot][1:] if slot < len(known) and known[slot][:1] == "y" and known[slot][1:].isdigit() else ""
        return f"{self.origin(at)} at {place} of axis {axis}" if axis else f"{self.origin(at)} at place {place}"

    def miss(self, text: str, origin: str) -> None:
        """Remember where a program is not what the model is."""
        self.misses.append(Miss(self.rank, self.tensor, origin, text))

    def origin(self, at: int) -> str:
        """What a person calls a node."""
        return self.nodes[at].origin or f"node {at}"

    def _simplified(self, fn: str, args: Sequence[Value], dtype: str, ranges: Ranges) -> Value | None:
        """What holds of every index expression, of equal choices, and of finite numbers; None where nothing does."""
        if fn == "where":
            return self._choice(args, dtype, ranges)
        places = [self.is_place(a) for a in args]
        if all(p is not None for p in places) and dtype in ("i64", "bool", "i32"):
            return self._placed(fn, [p for p in places if p is not None], dtype, ranges)
        if fn in ("isnan", "isinf"):
            return Const(False, "bool")  # of finite numbers
        if fn in ("mul", "div") and len(args) == 2:
            return self._scaled(fn, args, dtype, ranges)
        if fn in ("add", "max", "min", "or", "and"):
            return self._merged(fn, args)
        return None

    def tested(self, test: Value) -> Aff | None:
        """The index expression that a test asks to be at least 0."""
        asked = self.args_of(test, "test ge")
        return self.is_place(asked[0]) if asked else None

    def given(self, v: Value, holds: Callable[[Aff], bool]) -> Value:
        """A value where some index expressions are known to be at least 0: choices by what follows are made."""
        while choice := self.args_of(v, "where"):
            test, yes, no = choice
            asked = self.tested(test)
            if asked is None or not (holds(asked) or holds(asked * -1 - 1)):
                return v
            v = yes if holds(asked) else no
        return v

    def _choice(self, args: Sequence[Value], dtype: str, ranges: Ranges) -> Value | None:
        test, yes, no = args
        if isinstance(test, Const):
            return yes if test.value else no
        if yes == no:
            return yes
        place = self.tested(test)
        if place is not None:
            sides = (yes, place), (no, place * -1 - 1)
            inner = tuple(self.given(v, lambda e, known=known: low(e - known, ranges) >= 0) for v, known in sides)
            if inner != (yes, no):
                return self.call("where", (test, *inner), dtype, ranges)
        sides = self.args_of(test, "eq") or ()
        ends = {x.value for x in sides if isinstance(x, Const)}
        rows = [self.nodes[x.node] for x in sides if isinstance(x, Ref)]
        if inf in ends or (-inf in ends and any(n.model and n.label == ("max", 0) for n in rows)):
            return no  # of finite numbers, and of rows that have a value
        return None

    def _placed(self, fn: str, places: list[Aff], dtype: str, ranges: Ranges) -> Value | None:
        """Arithmetic and comparisons of index expressions."""
        if fn == "cast":
            return self.iota(places[0], dtype) if dtype in ("i64", "i32") else None
        if fn == "neg":
            return self.iota(places[0] * -1, dtype)
        if len(places) != 2:
            return None
        a, b = places
        if fn in ("add", "sub"):
            return self.iota(a + b if fn == "add" else a - b, dtype)
        if fn == "mul" and not (a.terms and b.terms):
            return self.iota(a * b.const if not b.terms else b * a.const, dtype)
        if fn == "mod" and not b.terms and b.const > 0:
            return self.iota(modulo(a, b.const, ranges), dtype)
        apart = {"lt": b - a - 1, "le": b - a, "gt": a - b - 1, "ge": a - b, "eq": a - b}.get(fn)
        return None if apart is None else self.test("eq" if fn == "eq" else "ge", apart, ranges)

    def test(self, op: str, place: Aff, ranges: Ranges) -> Value:
        """Whether an index expression is at least 0 (``ge``) or 0 (``eq``); a literal where that is known."""
        low, high = span(place, ranges)
        if (low >= 0 and op == "ge") or low == high == 0:
            return Const(True, "bool")
        if high < 0 or (op == "eq" and low > 0):
            return Const(False, "bool")
        return self._applied((f"test {op}", "bool"), [self.iota(place)], ranges)

    def _scaled(self, fn: str, args: Sequence[Value], dtype: str, ranges: Ranges) -> Value | None:
        """Multiples in one form, those of multiples too: ``(x * 4) / 4`` is x, and ``x * 0.125`` is ``x / 8``."""
        a, b = args
        if fn == "mul" and isinstance(a, Const):
            a, b = b, a
        if not isinstance(a, Ref) or not isinstance(b, Const) or not isfinite(b.value):
            return None
        if b.value == 1:
            return a
        if dtype not in FLOATS or not b.value:  # a quotient of whole numbers is cut off
            return None
        x, inner = self.unscaled(a)
        factor = inner * (Fraction(b.value) if fn == "mul" else 1 / Fraction(b.value))
        if x == a and (fn, b) == _multiple(factor, dtype):
            return None
        return self.multiple(x, factor, dtype, ranges)

    def unscaled(self, v: Value) -> tuple[Value, Fraction]:
        """A value and a number of which it is the product."""
        x, c = self.args_of(v, "mul", "div") or (v, None)
        if isinstance(x, Ref) and isinstance(c, Const) and self.dtype(v) in FLOATS and c.value and isfinite(c.value):
            return x, Fraction(c.value) if self.args_of(v, "mul") else 1 / Fraction(c.value)
        return v, Fraction(1)

    def multiple(self, x: Value, factor: Fraction, dtype: str, ranges: Ranges) -> Value:
        """A value times a number."""
        if factor == 1:
            return x
        fn, by = _multiple(factor, dtype)
        return self.call(fn, (x, by), dtype, ranges)

    def _merged(self, fn: str, args: Sequence[Value]) -> Value | None:
        """Two parts of one reduction, merged by its own operation: the reduction over both, if they are disjoint.

        A number that changes nothing is left out."""
        a, b = args
        for one, other in ((a, b), (b, a)):
            if fn in NEUTRAL and isinstance(one, Const) and one.value == NEUTRAL[fn]:
                return other
        if fn != "add" and a == b:
            return a
        if not isinstance(a, Ref) or not isinstance(b, Ref):
            return None
        if self.nodes[a.node].kind != "part" or self.nodes[b.node].kind != "part" or a.index != b.index:
            return None
        (base, mine), (other, theirs) = self.parted(a.node), self.parted(b.node)
        if base != other or MERGES.get(self.merges_by(base)) != fn:
            return None
        both = mine.join(theirs, fn not in ("add", "mul"))
        return None if both is None else self.part(base, both, a.index)

    def part(self, base: int, domain: Domain, index: Slots) -> Ref:
        """A reduction over a part of its domain; the reduction itself where that is all of it."""
        node = self.nodes[base]
        if domain.whole(node.bound):
            return Ref(base, index)
        made = Node("part", (base, domain), (), node.slots, node.dtype, origin=node.origin)
        return Ref(self.interned(("part", base, domain), made), index)

    def parted(self, at: int) -> tuple[int, Domain]:
        """The reduction that a part is of, and which part."""
        base, domain = cast("tuple[int, Domain]", self.nodes[at].label)
        return base, domain

    def merges_by(self, at: int) -> str:
        """The monoid of a reduction."""
        return str(self.nodes[at].label[0])

    def arguments(self, ref: Ref) -> tuple[Value, ...]:
        """The arguments of a call, at the places that a reference gives its slots."""
        node = self.nodes[ref.node]
        env = {f"v{k}": e for k, e in enumerate(ref.index)}
        return tuple(Ref(a.node, tuple(env[str(e)] for e in a.index)) if isinstance(a, Ref) else a for a in node.args)

    def args_of(self, v: Value, *fns: str) -> tuple[Value, ...] | None:
        """The arguments of a value that is a call of one of some primitives; None of any other."""
        node = self.nodes[v.node] if isinstance(v, Ref) else None
        called = node is not None and node.kind == "call" and node.label[0] in fns
        return self.arguments(v) if called and isinstance(v, Ref) else None

    def has_part(self, at: int) -> bool:
        """Whether a node is made of a partial reduction by primitives."""
        if at not in self.partial:
            node = self.nodes[at]
            called = (a.node for a in node.args if isinstance(a, Ref)) if node.kind == "call" else ()
            self.partial[at] = node.kind == "part" or any(map(self.has_part, called))
        return self.partial[at]

    def choice_below(self, at: int) -> int:
        """How many steps below a node that no model computes there is a choice by place; `NEVER` where there is none."""
        if at not in self.chosen:
            node = self.nodes[at]
            made = node.kind in ("call", "reduce") and not node.model
            refs = [a.node for a in node.args if isinstance(a, Ref)] if made else []
            where = (node.kind, node.label[0]) == ("call", "where")
            here = where and any(self.nodes[a].label[0] in ("test ge", "test eq") for a in refs[:1])
            self.chosen[at] = 0 if here else 1 + min((self.choice_below(a) for a in refs), default=NEVER)
        return self.chosen[at]

    def read(self, v: Value, env: Mapping[str, Aff], ranges: Ranges) -> Value:
        """A value over one space as a value over another one, of sizes ``ranges``."""
        if isinstance(v, Const):
            return v
        return self.resolved(Ref(v.node, tuple(moved(e, env, ranges) for e in v.index)), ranges)

    def resolved(self, ref: Ref, ranges: Ranges) -> Value:
        """A choice by an index expression that is known in a smaller space, as what it chooses."""
        choice = self.args_of(ref, "where")
        place = self.args_of(choice[0], "test ge", "test eq") if choice else None
        if not choice or not place or not isinstance(choice[0], Ref) or not isinstance(place[0], Ref):
            return ref
        found = self.test(self.nodes[choice[0].node].label[0][-2:], place[0].index[0], ranges)
        if not isinstance(found, Const):
            return ref
        kept = choice[1] if found.value else choice[2]
        return self.resolved(kept, ranges) if isinstance(kept, Ref) else kept


MERGES = {"sum": "add", "max": "max", "min": "min", "any": "or", "all": "and", "prod": "mul"}
NEUTRAL: dict[str, Any] = {"add": 0, "and": True, "or": False}


@lru_cache(maxsize=1 << 12)
def _multiple(factor: Fraction, dtype: str) -> tuple[str, Const]:
    """How a multiple is written: a number of its type; a quotient where that is one by a whole number."""
    if 1 not in (abs(factor.numerator), factor.denominator):
        with np.errstate(all="ignore"):
            rounded = float(np.asarray(float(factor)).astype(numpy_dtype(dtype)))
        factor = Fraction(rounded) if isfinite(rounded) and rounded else factor
    if factor.numerator == 1:
        return "div", Const(float(factor.denominator), dtype)
    return "mul", Const(float(factor), dtype)


def keyed(kind: str, label: tuple[Any, ...], args: Sequence[Value]) -> Any:
    """What a call or a reduction is found by."""
    return kind, label, tuple(a.node if isinstance(a, Ref) else (repr(a.value), a.dtype) for a in args)


def ordered(fn: str, args: Sequence[Value]) -> list[Value]:
    """The arguments of a primitive in the order in which a node has them."""
    turned = fn in PRIMITIVES and PRIMITIVES[fn].commutative
    return sorted(args, key=lambda v: v.node if isinstance(v, Ref) else inf) if turned else list(args)


_MOVED: dict[Any, Aff] = {}


def moved(e: Aff, env: Mapping[str, Aff], ranges: Ranges) -> Aff:
    """An index expression with dimensions replaced; remembered, because equal layers ask the same."""
    if len(e.terms) == 1 and e.terms[0][1] == 1 and not e.const and isinstance(e.terms[0][0], str):
        return env.get(e.terms[0][0], e)
    if not e.terms:
        return e
    key = (e, tuple((n, env[n]) for n in sorted(dims_of(e)) if n in env), tuple(ranges.items()))
    found = _MOVED.get(key)
    if found is None:
        found = _MOVED[key] = substitute(e, env, ranges)
    return found


def low(e: Aff, ranges: Ranges) -> int:
    """A number that an index expression is never below."""
    return span(e, ranges)[0]


def same(a: Aff, b: Aff, ranges: Ranges) -> bool:
    """Whether two index expressions are equal at every point of a space."""
    return a == b or _may_coincide(a, b, tuple(ranges.items()))


@lru_cache(maxsize=1 << 16)
def _may_coincide(a: Aff, b: Aff, ranges: tuple[tuple[str, int], ...]) -> bool:
    apart = substitute(a - b, {}, dict(ranges))
    low, high = span(apart, dict(ranges))
    if low == high == 0:
        return True
    # bounds of an affine expression are exact: all of it is 0, or some point is not
    return not (low > 0 or high < 0) and not apart.is_affine and vanishes(apart, dict(ranges)) is None


def extents(shape: Sequence[int]) -> dict[str, int]:
    """Sizes of a tensor's axes ``y0, …``; an axis of one cell is no dimension."""
    return {f"y{k}": n for k, n in enumerate(shape) if n != 1}
