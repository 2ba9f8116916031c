"""Two small terms with equal values as the text of a rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tapestry.tools.rulebook.small_terms import REDUCTIONS, Family, Term, parts

_SIGNS = {"add": " + ", "sub": " - ", "mul": " * "}
_MONOIDS = {"SUM": "sum", "MAX": "max", "MIN": "min", "pick": "sum"}


@dataclass(slots=True)
class _Side:
    """The operations of one side as texts, the last one being the result.

    Attributes:
        opened: the leaf that an open body stands for, if any.
        rest: whether the result goes through an open body of the rest.
    """

    family: Family
    letter: str = "f"
    opened: str = ""
    rest: bool = False
    ops: list[str] = field(default_factory=list[str])
    made: int = 0

    def op(self, name: str, t: Term) -> None:
        """One operation, behind those that it reads."""
        reads: dict[str, str] = {}
        dims = self.family.dims_of(t)
        main = t if t[0] in REDUCTIONS else next((r for r in _reductions(t) if self.family.dims_of(r) == dims), None)
        over, then = "", ""
        if main is None:
            body = self._expr(t, reads)
        else:
            over = f" | {self._index(main[1])}: {self._index(main[1]).upper()} {_MONOIDS[main[0]]}"
            body = self._expr(main[2], reads, space=self.family.dims_of(main[2]))
            if main[0] == "pick":
                body = f"where(eq(P(p..), index(v)), {body}, 0)"
                reads["p"] = "p..[i..]"
            then = "" if main is t else self._expr(t, reads, state=main)
        if self.rest and name == "y":
            reads["d"] = f"d..[{self._index(dims)}]"
            body, then = (body, f"H({then or 'acc..'}, d..)") if main is not None else (f"H({body}, d..)", "")
        head = ", ".join(f"{self._index(d)}: {self._index(d).upper()}" for d in self.family.dims if d in dims)
        last = f"\n  then {_bare(then)}" if then else ""
        made = f"{name}: T[{self._index(dims).upper()}] = op [{head}{over}]\n  reads {', '.join(reads.values())}"
        self.ops.append(f"{made}\n  body {_bare(body)}{last}")

    def _expr(self, t: Term, reads: dict[str, str], *, space: frozenset[str] = frozenset(), state: Term | None = None) -> str:
        """A term at a point of a space; what reduces in it is an operation of its own, but the one whose state is at hand.

        So is what a contraction reads at each of many points.
        """
        if t == state:
            return "acc0"
        if t[0] == "size":
            return t[1].upper()
        name, dims = t[0], self.family.dims_of(t)
        if name in self.family.leaves or name in REDUCTIONS or (len(space) > 2 and space - dims):
            if name not in self.family.leaves:
                self.made += 1
                self.op(name := f"{self.letter}{self.made}", t)
            many = ".." if name == self.opened else ""
            reads[name] = f"{name}{many}[{self._index(dims)}]"
            return f"F({name}..)" if many else name
        args = [self._expr(a, reads, space=space, state=state) for a in t[1:]]
        return f"({args[0]}{_SIGNS[name]}{args[1]})" if name in _SIGNS else f"{name}({', '.join(map(_bare, args))})"

    def _index(self, dims: str | frozenset[str]) -> str:
        return ", ".join(d if d == "v" else f"{d}.." for d in self.family.dims if d in dims)


def _reductions(t: Term) -> Iterator[Term]:
    """The outermost reductions in a term, the last first."""
    for a in reversed(parts(t)):
        if a[0] in REDUCTIONS:
            yield a
        else:
            yield from _reductions(a)


def _bare(text: str) -> str:
    """A text without the parentheses around all of it."""
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth:
            return text[1:-1] if text[0] == "(" and k == len(text) - 1 else text
    return text


def rule_text(family: Family, before: Term, after: Term, name: str, opened: str = "", *, rest: bool = False) -> str:
    """The equation as a rule: one leaf may be an open body; the result may go on through an open one."""
    sides = [_Side(family, letter, opened, rest) for letter in "fg"]
    for side, t in zip(sides, (before, after), strict=True):
        side.op("y", t)
    body = "\n=>\n".join("\n".join(s.ops) for s in sides)
    when = "float(T)" + (", placeless(P)" if "P(" in body else "")
    form = f'form "a reduction like {shown(before)}"'
    return f'rule {name} "{shown(before)} = {shown(after)}."\nphase algebra\n{form}\n\n{body}\n\nwhen: {when}\n'


def passes(family: Family, t: Term) -> int:
    """How many operations a term is."""
    side = _Side(family)
    side.op("y", t)
    return len(side.ops)


def shown(t: Term) -> str:
    """A term as mathematics."""
    if t[0] == "size":
        return t[1].upper()
    args = [shown(a) for a in parts(t)]
    if t[0] in ("SUM", "MAX", "MIN"):
        return f"{'Σ' if t[0] == 'SUM' else t[0].lower()}_{t[1]} {args[0]}"
    if t[0] in _SIGNS:
        return f"({args[0]}{_SIGNS[t[0]].replace(' * ', '·')}{args[1]})"
    return f"{t[0]}({', '.join(args)})" if args else t[0]
