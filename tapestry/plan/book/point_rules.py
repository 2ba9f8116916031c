"""An equation of terms of arithmetic as the text of a rule that holds in fused operations.

Every leaf is an open body of reads of its own, the term stands in an open body of what is around it, and what the right-hand
side computes along fewer groups than the whole is an operation of its own before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tapestry.plan.book.mined_terms import LETTERS, Mined
from tapestry.rewrites.equations.small_terms import Term
from tapestry.rewrites.equations.term_rules import shown

AT_A_POINT, BEHIND, REDUCED = "at a point", "behind a reduction", "of what is reduced"
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def texts(mined: Mined, after: Term, name: str) -> Iterator[tuple[str, str]]:
    """(where it holds, text) for the places at which an equation may stand."""
    alike = all(dims == mined.whole or n.startswith("k") for n, dims in mined.leaves)
    for where, suffix in ((AT_A_POINT, ""), (BEHIND, "_behind"), *(((REDUCED, "_reduced"),) if alike else ())):
        yield where, _Text(mined, where).rule(after, name + suffix)


@dataclass(slots=True)
class _Text:
    """Writes one rule.

    Attributes:
        apart: operations before the last one of the right-hand side.
    """

    mined: Mined
    where: str
    apart: list[str] = field(default_factory=list[str])

    def rule(self, after: Term, name: str) -> str:
        """The text."""
        before, whole = self.mined.term, self.mined.whole
        left = self._last(self._term(before), sorted(self._leaves(before)), [])
        term = self._split(after, whole)
        made = self._made(term)
        right = self._last(self._term(term), sorted(self._leaves(term)), made)
        wide = [d for d in whole if made and d not in self._narrow(term)]
        when = "".join(f", 1 < {d.upper()}" for d in wide)
        title, form = f"{shown(before)} = {shown(after)}", f"arithmetic {self.where} like {shown(before)}"
        return f'rule {name} "{title}."\nphase algebra\nform "{form}"\n\n' + (
            f"{left}\n=>\n{chr(10).join([*self.apart, right])}\n\nwhen: float(T){when}\n"
        )

    def _narrow(self, t: Term) -> str:
        return "".join(sorted({d for n in self._made(t) for d in self._dims(n)}))

    def _last(self, term: str, leaves: list[str], made: list[str]) -> str:
        whole = self.mined.whole
        index, sizes = self._index(whole), ", ".join(f"{d.upper()}.." for d in whole)
        dims = ", ".join(f"{d}..: {d.upper()}.." for d in whole)
        reads = [f"{n}..[{self._index(self._dims(n))}]" for n in leaves] + [f"{n}[{self._index(self._dims(n))}]" for n in made]
        if self.where == AT_A_POINT:
            return f"y: T[{sizes}] = op [{dims}]\n  reads {', '.join(reads)}, d..[{index}]\n  body H({term}, d..)"
        if self.where == BEHIND:
            return (
                f"y: T[{sizes}] = op [{dims} | r..: R.. S]\n  reads z..[{index}, r..], {', '.join(reads)}, d..[{index}]\n"
                f"  body Z(z..)\n  then H({term}, acc.., d..)"
            )
        reads = [r.replace("[]", "[j..]").replace("[i", "[j.., i") for r in reads]
        return (
            f"y: T[J..] = op [j..: J.. | {dims} S]\n  reads {', '.join(reads)}, d..[j.., {index}], e..[j..]\n"
            f"  body H({term}, d..)\n  then G(acc.., e..)"
        )

    def _split(self, t: Term, whole: str) -> Term:
        """A term in which what varies along fewer groups is the result of an operation of its own."""
        if len(t) == 1 or self._literal(t):
            return t
        if len(self._dims_of(t)) < len(whole):
            name = f"f{len(self.apart) + 1}_{self._dims_of(t)}"
            leaves = sorted(self._leaves(t))
            dims = self._dims_of(t)
            head = ", ".join(f"{d}..: {d.upper()}.." for d in dims)
            self.apart.append(
                f"{name}: T[{', '.join(f'{d.upper()}..' for d in dims)}] = op [{head}]\n"
                f"  reads {', '.join(f'{n}..[{self._index(self._dims(n))}]' for n in leaves)}\n  body {self._bare(t)}"
            )
            return (name,)
        return (t[0], *(self._split(a, whole) for a in t[1:]))

    def _term(self, t: Term) -> str:
        if len(t) == 1:
            late = "acc.., " if self.where == BEHIND and self._dims(t[0]) == self.mined.whole else ""
            return t[0] if t[0].startswith("f") else f"{t[0].upper()}({late}{t[0]}..)"
        args = [self._term(a) for a in t[1:]]
        return f"neg({args[0]})" if t[0] == "neg" else f"({args[0]} {_SIGNS[t[0]]} {args[1]})"

    def _bare(self, t: Term) -> str:
        args = [f"{a[0].upper()}({a[0]}..)" if len(a) == 1 else f"({self._bare(a)})" for a in t[1:]]
        return f"neg({args[0]})" if t[0] == "neg" else f"{args[0]} {_SIGNS[t[0]]} {args[1]}"

    def _dims(self, name: str) -> str:
        return name.partition("_")[2] if name.startswith("f") else dict(self.mined.leaves)[name]

    def _dims_of(self, t: Term) -> str:
        own = set(self._dims(t[0])) if len(t) == 1 else {d for a in t[1:] for d in self._dims_of(a)}
        return "".join(sorted(own, key=LETTERS.index))

    def _literal(self, t: Term) -> bool:
        return t[0].startswith("k") if len(t) == 1 else all(map(self._literal, t[1:]))

    def _leaves(self, t: Term) -> set[str]:
        return ({t[0]} - set(self._made(t))) if len(t) == 1 else {n for a in t[1:] for n in self._leaves(a)}

    def _made(self, t: Term) -> list[str]:
        found = ([t[0]] if t[0].startswith("f") else []) if len(t) == 1 else [n for a in t[1:] for n in self._made(a)]
        return list(dict.fromkeys(found))

    def _index(self, dims: str) -> str:
        return ", ".join(f"{d}.." for d in dims)
