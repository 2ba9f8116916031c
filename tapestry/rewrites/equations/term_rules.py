"""Two small terms with equal values as the text of a rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tapestry.rewrites.equations.small_terms import REDUCTIONS, Family, Term, joins, reduces

MONOIDS = {"SUM": "sum", "MAX": "max", "MIN": "min", "pick": "sum"}
_SIGNS = {"add": " + ", "sub": " - ", "mul": " * ", "div": " / "}


@dataclass(slots=True)
class _Side:
    """The operations of one side as texts, the last one being the result.

    Attributes:
        opened: leaf → the open body that stands for it.
        rest: whether the result goes through an open body of the rest.
    """

    family: Family
    opened: Mapping[str, str]
    rest: bool
    single: bool
    ops: list[str] = field(default_factory=list[str])
    letter: str = "f"
    made: int = 0
    space: frozenset[str] = frozenset()

    def op(self, name: str, t: Term) -> None:
        """One operation, behind those that it reads."""
        reads: dict[str, str] = {}
        dims = self._order(self.family.dims_of(t))
        main = t if is_reduction(t) else next((r for r in _reductions(t) if self.family.dims_of(r) == frozenset(dims)), None)
        over, body, then = "", "", ""
        if main is None:
            body = self._expr(t, reads, {}, None)
        else:
            inner, moved, over = self._space(main)
            self.space = self.family.dims_of(inner)
            body = self._expr(inner, reads, moved, None)
            self.space = frozenset()
            if main[0] == "pick":
                body = f"where(eq(P(p..), index(v)), {body}, 0)"
                reads["p"] = "p..[i..]"
            then = "" if main is t else self._expr(t, reads, {}, main)
        if self.rest and name == "y":
            reads["d"] = f"d..[{', '.join(self._index(dims))}]"
            body, then = (body, f"H({then or 'acc..'}, d..)") if main is not None else (f"H({body}, d..)", "")
        shape = ", ".join(self._size(d) for d in dims)
        head = ", ".join(f"{i}: {self._size(d)}" for d, i in zip(dims, self._index(dims), strict=True))
        self.ops.append(
            f"{name}: T[{shape}] = op [{head}{over}]\n  reads {', '.join(reads.values())}\n  body {_bare(body)}"
            + (f"\n  then {_bare(then)}" if then else "")
        )

    def _space(self, main: Term) -> tuple[Term, dict[str, str], str]:
        """What a reduction reduces, where a part of m begins, and its dimensions as written."""
        if main[0] == "pick":
            return main[1], {}, " | v: V sum"
        dim, part = main[1], main[3] if len(main) > 3 else ""
        if part:
            size, at = ("A", "j") if part == "low" else ("M - A", "A + j")
            return main[2], {dim: at}, f" | j: {size} {MONOIDS[main[0]]}"
        (index,) = self._index([dim])
        return main[2], {}, f" | {index}: {self._size(dim)} {MONOIDS[main[0]]}"

    def _expr(self, t: Term, reads: dict[str, str], moved: Mapping[str, str], state: Term | None) -> str:
        """A term at a point; reductions in it are operations of their own, but the one whose state is at hand."""
        if t == state:
            return "acc0"
        if t[0] == "size":
            return t[1].upper()
        if t[0] in self.family.leaves or is_reduction(t):
            name = t[0]
            if is_reduction(t):
                self.made += 1
                name = f"{self.letter}{self.made}"
                space = self.space
                self.op(name, t)
                self.space = space
            many = ".." if name in self.opened else ""
            index = [moved.get(d, i) for d, i in self._indexed(self._order(self.family.dims_of(t)))]
            reads[name] = f"{name}{many}[{', '.join(index)}]"
            return f"{self.opened[name]}({name}..)" if many else name
        args = [self._operand(a, reads, moved, state) for a in t[1:]]
        if t[0] == "join":
            return f"where(lt(index(m), A), {args[0]}, {args[1]})"
        return f"({args[0]}{_SIGNS[t[0]]}{args[1]})" if t[0] in _SIGNS else f"{t[0]}({', '.join(map(_bare, args))})"

    def _operand(self, t: Term, reads: dict[str, str], moved: Mapping[str, str], state: Term | None) -> str:
        """An operand: computed by an operation of its own where a contraction reads it at each of many points."""
        apart = t[0] not in self.family.leaves and t[0] != "size" and not is_reduction(t)
        if not (apart and self.space - self.family.dims_of(t) and len(self.space) > 2) or moved:
            return self._expr(t, reads, moved, state)
        self.made += 1
        name, space = f"{self.letter}{self.made}", self.space
        self.op(name, t)
        self.space = space
        reads[name] = f"{name}[{', '.join(self._index(self._order(self.family.dims_of(t))))}]"
        return name

    def _order(self, dims: frozenset[str]) -> list[str]:
        return [d for d in self.family.dims if d in dims]

    def _many(self, d: str) -> str:
        return "" if d == "v" or (d == "m" and self.single) else ".."

    def _size(self, d: str) -> str:
        return d.upper() + self._many(d)

    def _index(self, dims: list[str]) -> list[str]:
        return [d + self._many(d) for d in dims]

    def _indexed(self, dims: list[str]) -> Iterator[tuple[str, str]]:
        return zip(dims, self._index(dims), strict=True)


def is_reduction(t: Term) -> bool:
    """Whether the last operation of a term reduces."""
    return t[0] in REDUCTIONS or t[0] == "pick"


def _reductions(t: Term) -> Iterator[Term]:
    """The outermost reductions in a term, the last first."""
    for a in reversed(t[1:]):
        if not isinstance(a, str):
            if is_reduction(a):
                yield a
            else:
                yield from _reductions(a)


def _bare(text: str) -> str:
    """A text without the parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth:
            return text[1:-1] if k == len(text) - 1 else text
    return text


def rule_text(
    family: Family, before: Term, after: Term, name: str, opened: Mapping[str, str] | None = None, *, rest: bool = False
) -> str:
    """The equation as a rule: leaves stay as they are, or are open bodies; the result may go on through an open one."""
    single = joins(before) or joins(after)
    sides = [_Side(family, opened or {}, rest, single, letter=letter) for letter in "fg"]
    for side, t in zip(sides, (before, after), strict=True):
        side.op("y", t)
    when = ["float(T)"] + (["0 < A", "A < M"] if single else []) + (["placeless(P)"] if "P(" in "".join(sides[0].ops) else [])
    body = "\n=>\n".join("\n".join(s.ops) for s in sides)
    form = "a reduction" if reduces(before) else "arithmetic at a point"
    head = f'rule {name} "{shown(before)} = {shown(after)}."\nphase algebra\nform "{form} like {shown(before)}"'
    return f"{head}\n\n{body}\n\nwhen: {', '.join(when)}\n"


def passes(family: Family, t: Term) -> int:
    """How many operations a term is."""
    side = _Side(family, {}, rest=False, single=joins(t))
    side.op("y", t)
    return len(side.ops)


def shown(t: Term) -> str:
    """A term as mathematics."""
    signs = {"SUM": "Σ", "MAX": "max", "MIN": "min"}
    if t[0] in signs and isinstance(t[1], str):
        part = {"low": "<A", "high": "≥A"}.get(t[3] if len(t) > 3 else "", "")
        return f"{signs[t[0]]}_{t[1]}{part} {shown(t[2])}"
    if t[0] == "size":
        return t[1].upper()
    args = [shown(a) for a in t[1:]]
    if t[0] in _SIGNS:
        return f"({args[0]}{_SIGNS[t[0]].replace('*', '·').replace(' · ', '·')}{args[1]})"
    return f"{t[0]}({', '.join(args)})" if args else t[0]
