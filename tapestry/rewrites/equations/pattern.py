"""The text of a rule as data: IR operations with open names, and what must hold of what they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from tapestry.ir.expr import PRIMITIVES
from tapestry.ir.syntax.parser import Tokens
from tapestry.ir.syntax.printer import INFIX
from tapestry.ir.types import DTYPES
from tapestry.rewrites.core.rule import Phase

DEFAULT: Phase = "search"
COMPARED = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
_OPERATORS = frozenset({*COMPARED.values(), "in", "dtype", "add", "sub", "mul", "floordiv", "one_reader"})
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//"} | {v: k for k, v in COMPARED.items()}


@dataclass(frozen=True, slots=True)
class Num:
    """A literal."""

    value: float | int | bool


@dataclass(frozen=True, slots=True)
class Var:
    """A name; ``many`` when it stands for any number of things, as in ``b..``."""

    name: str
    many: bool = False


@dataclass(frozen=True, slots=True)
class App:
    """A primitive, an open body ``F``, an open projection ``e`` or an operator, applied."""

    fn: str
    args: tuple[Node, ...]


Node = Num | Var | App


def show(n: Node) -> str:
    """A term as it is written."""
    if isinstance(n, Num):
        return str(n.value)
    if isinstance(n, Var):
        return n.name + ".." * n.many
    if n.fn in _SIGNS and len(n.args) == 2:
        sides = [f"({show(a)})" if isinstance(a, App) and a.fn in ("add", "sub") and n.fn == "mul" else show(a) for a in n.args]
        return f"{sides[0]}{'*' if n.fn == 'mul' else f' {_SIGNS[n.fn]} '}{sides[1]}"
    return f"{n.fn}({', '.join(map(show, n.args))})"


def names_in(n: Node) -> Iterator[Var]:
    """The names in a term."""
    if isinstance(n, Var):
        yield n
    for a in n.args if isinstance(n, App) else ():
        yield from names_in(a)


@dataclass(frozen=True, slots=True)
class DimPattern:
    """``i: I`` or ``b..: B..``."""

    name: str
    many: bool
    size: Node


@dataclass(frozen=True, slots=True)
class OutPattern:
    """``y: T[I, N]``, or ``y..: T..[I, N]`` for all results of an operation."""

    name: str
    many: bool
    dtype: str


@dataclass(frozen=True, slots=True)
class ReadPattern:
    """``x[b.., m]``, ``a0 = x[m]``, or ``b..[i..]`` for all the other reads of an operation."""

    alias: str
    tensor: str
    many: bool
    index: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPattern:
    """An operation with open names. ``at`` is its position in the text, for errors."""

    outs: tuple[OutPattern, ...]
    dims: tuple[DimPattern, ...]
    reduce: tuple[DimPattern, ...]
    monoid: str
    reads: tuple[ReadPattern, ...]
    body: tuple[Node, ...]
    then: tuple[Node, ...]
    at: int

    @property
    def open_body(self) -> bool:
        """Whether one open body stands for everything that is computed before the reduction."""
        return len(self.body) == 1 and is_open(self.body[0])

    @property
    def open_then(self) -> bool:
        """Whether one open body stands for everything that is computed after the reduction."""
        return len(self.then) == 1 and is_open(self.then[0])


def is_open(n: Node) -> bool:
    """Whether a term is an open body applied to names."""
    return isinstance(n, App) and n.fn not in PRIMITIVES and n.fn not in DTYPES and n.fn != "index"


def closed_part(n: Node) -> App | None:
    """The first argument of an open body where it is no name: the body then stands for what is around a closed term."""
    first = n.args[0] if isinstance(n, App) and is_open(n) and n.args else None
    return first if isinstance(first, App) else None


@dataclass(frozen=True, slots=True)
class Clause:
    """A condition, and what a refusal says where it does not hold (``""``: the condition itself, with its values)."""

    test: Node
    reason: str


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the rule's moves: a number (with the value that `find` takes), or a name of the left-hand side."""

    name: str
    target: str
    default: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleText:
    """A rule as it is written.

    Attributes:
        form: what the left-hand side is, in words, for the refusal that something else is not.
        exact: whether both sides agree on infinities and NaN, too.
        phase: when the compiler applies it (`rewrites.core.rule`).
        alone: tensors that one operation alone reads, which the graph does not return (``one_reader(t)`` under ``when:``).
        when: what else makes it legal.
        pays: what makes it worth finding; a move by hand does not ask for it.
    """

    name: str
    summary: str
    params: tuple[Param, ...]
    form: str
    exact: bool
    phase: Phase
    before: tuple[OpPattern, ...]
    after: tuple[OpPattern, ...]
    alone: frozenset[str]
    when: tuple[Clause, ...]
    pays: tuple[Clause, ...]
    text: str

    @property
    def constants(self) -> frozenset[str]:
        """Names that stand for an integer literal in a body of the left-hand side, or for the divisor of an index."""
        divisors = (
            n.args[1] for p in self.before for r in p.reads for n in r.index if isinstance(n, App) and n.fn == "floordiv"
        )
        return frozenset(n.name for n in divisors if isinstance(n, Var)) | frozenset(
            v.name
            for p in self.before
            for e in (*p.body, *p.then)
            for v in _values(e)
            if v.name not in {r.alias for r in p.reads}
            and v.name[:3] != "acc"
            and v.name not in {w.name for q in self.before for d in (*q.dims, *q.reduce) for w in names_in(d.size)}
        )


def parse_rules(text: str, file: str, properties: Iterable[str], *, laws: bool = False) -> tuple[RuleText, ...]:
    """The rules of a text.

    Args:
        properties: the functions that conditions may call.
        laws: they are proved and never applied; names that nothing binds are any integers.

    Raises:
        TextError: naming the file, line and column, and what was expected.
    """
    parser = _Parser(text, file, groups=True)
    parser.properties, parser.laws = frozenset(properties), laws
    return tuple(parser.rules())


class _Parser(Tokens):
    properties: frozenset[str] = frozenset()
    laws = False

    def rules(self) -> Iterator[RuleText]:
        while self.next.kind != "end":
            yield self.rule()

    def rule(self) -> RuleText:
        start = self.next.at
        self.need("rule")
        name, params, form, phase = self.kind("ident", "the rule's name"), self.params(), "", DEFAULT
        exact = self.take("exact")
        summary = self.string() if self.next.kind == "string" else ""
        while self.peek("form") or self.peek("phase"):
            if self.take("form"):
                form = self.string()
            elif self.take("phase"):
                phase = self.phase()
        before = self.ops({})
        self.need("=>")
        after = self.ops({o.name: o for p in before for o in p.outs})
        clauses = self.clauses("when")
        lone = {c for c in clauses if isinstance(c.test, App) and c.test.fn == "one_reader"}
        pays = self.clauses("pays")
        out = RuleText(
            name=name,
            summary=summary,
            params=params,
            form=form,
            exact=exact,
            phase=phase,
            before=before,
            after=after,
            alone=frozenset(v.name for c in lone for v in names_in(c.test)),
            when=tuple(c for c in clauses if c not in lone),
            pays=pays,
            text=self.text[start : self.last.at + len(self.last.text)],
        )
        if not self.laws:
            self.closed(out)
        return out

    def params(self) -> tuple[Param, ...]:
        out: list[Param] = []
        while self.take("," if out else "{"):
            name = self.kind("ident", "a parameter")
            self.need(":")
            target = self.kind("ident", "'number', or a name of the left-hand side")
            out.append(Param(name, "" if target == "number" else target, self.integer() if self.take("=") else 2))
        if out:
            self.need("}")
        return tuple(out)

    def phase(self) -> Phase:
        phase = next((p for p in get_args(Phase) if self.take(p)), None)
        if phase is None:
            raise self.fail(f"a phase ({', '.join(get_args(Phase))})")
        return phase

    def ops(self, before: dict[str, OutPattern]) -> tuple[OpPattern, ...]:
        out: list[OpPattern] = []
        while not out or not (self.peek("=>") or self.peek("when") or self.peek("pays") or self.peek("rule")):
            if out and self.next.kind == "end":
                break
            out.append(self.op(before))
        return tuple(out)

    def op(self, before: dict[str, OutPattern]) -> OpPattern:
        at, outs = self.next.at, [self.out()]
        while self.take(","):
            outs.append(self.out())
        for word in ("=", "op", "["):
            self.need(word)
        dims, none = self.dims()
        if none:
            raise self.wrong("a monoid stands after '|'")
        reduce, monoid = self.dims() if self.take("|") else ((), "")
        if reduce and not monoid:
            raise self.fail("a monoid")
        self.need("]")
        reads: list[ReadPattern] = []
        if self.take("reads"):
            reads.append(self.read())
            while self.take(","):
                reads.append(self.read())
        self.need("body")
        body = self.terms()
        then = self.terms() if self.take("then") else ()
        return OpPattern(
            outs=tuple(outs), dims=dims, reduce=reduce, monoid=monoid, reads=tuple(reads), body=body, then=then, at=at
        )

    def out(self) -> OutPattern:
        name, many = self.word("a tensor")
        self.need(":")
        dtype, _ = self.word("a dtype, or a name for one")
        self.need("[")
        while not self.take("]"):
            self.sum()
            self.take(",")
        return OutPattern(name, many, dtype)

    def word(self, what: str) -> tuple[str, bool]:
        if self.next.kind == "group":
            return self.kind("group", what)[:-2], True
        return self.kind("ident", what), False

    def dims(self) -> tuple[tuple[DimPattern, ...], str]:
        out: list[DimPattern] = []
        monoid = ""
        while not (self.peek("|") or self.peek("]")):
            name, many = self.word("a dimension")
            self.need(":")
            out.append(DimPattern(name, many, self.sum()))
            monoid = self.kind("ident", "a monoid") if self.next.kind == "ident" else monoid
            self.take(",")
        return tuple(out), monoid

    def read(self) -> ReadPattern:
        alias, many = self.word("a tensor")
        tensor = self.word("a tensor")[0] if self.take("=") else alias
        self.need("[")
        index: list[Node] = []
        while not self.take("]"):
            index.append(self.sum())
            self.take(",")
        return ReadPattern(alias, tensor, many, tuple(index))

    def clauses(self, head: str) -> tuple[Clause, ...]:
        out: list[Clause] = []
        if self.take(head):
            self.need(":")
            while not out or self.take(","):
                start, test = self.next.at, self.test()
                odd = next((n.fn for n in _applications(test) if n.fn not in self.properties | _OPERATORS), None)
                if odd is not None or not isinstance(test, App):
                    raise self.error(
                        f"unknown condition '{odd or show(test)}'; conditions: {', '.join(sorted(self.properties))}", start
                    )
                out.append(Clause(test, self.string() if self.take("else") else ""))
        return tuple(out)

    def test(self) -> Node:
        left = self.sum()
        if self.take("in"):
            self.need("(")
            options = self.terms()
            self.need(")")
            return App("in", (left, *options))
        for sign, fn in COMPARED.items():
            if self.take(sign):
                return App(fn, (left, self.sum()))
        return left

    def terms(self) -> tuple[Node, ...]:
        out = [self.sum()]
        while self.take(","):
            out.append(self.sum())
        return tuple(out)

    def sum(self) -> Node:
        out = self.product()
        while (sign := self.next.text) in ("+", "-"):
            self.need(sign)
            out = App("add" if sign == "+" else "sub", (out, self.product()))
        return out

    def product(self) -> Node:
        out = self.atom()
        while (sign := self.next.text) in ("*", "/", "//"):
            self.need(sign)
            out = App("floordiv" if sign == "//" else next(f for f, s in INFIX.items() if s == sign), (out, self.atom()))
        return out

    def atom(self) -> Node:
        if self.take("("):
            out = self.sum()
            self.need(")")
            return out
        if self.next.kind == "number" or any(map(self.peek, ("-", "true", "false", "inf", "nan"))):
            return Num(self.literal())
        name, many = self.word("a name or a number")
        if many or not self.take("("):
            return Var(name, many)
        args = () if self.peek(")") else self.terms()
        self.need(")")
        return App(name, args)

    def closed(self, rule: RuleText) -> None:
        """Refuse names of the right-hand side that nothing binds."""
        tensors = {r.alias for p in rule.before for r in p.reads} | {o.name for p in rule.before for o in p.outs}
        bodies = {n.fn for p in rule.before for e in (*p.body, *p.then) for n in _applications(e)}
        dims = {d.name for p in (*rule.before, *rule.after) for d in (*p.dims, *p.reduce)} | {p.name for p in rule.params}
        sizes = {v.name for p in rule.before for d in (*p.dims, *p.reduce) for v in names_in(d.size)}
        sizes |= rule.constants | {o.dtype for p in rule.before for o in p.outs} | set(DTYPES)  # of a cast
        if {o.name for o in rule.before[-1].outs} - {o.name for p in rule.after for o in p.outs}:
            raise self.error("the right-hand side does not write what the last operation of the left writes", rule.after[0].at)
        for p in rule.after:
            terms, read = (*p.body, *p.then), {r.alias for r in p.reads}
            loose = [r.tensor for r in p.reads if r.tensor not in tensors and r.alias not in tensors]
            loose += [n.fn for e in terms for n in _applications(e) if n.fn not in bodies]
            loose += [v.name for e in terms for v in names_in(e) if v.name not in read | dims | sizes and v.name[:3] != "acc"]
            if loose:
                raise self.error(f"unknown function or name '{loose[0]}' on the right-hand side", p.at)
            tensors |= {o.name for o in p.outs}


def _values(n: Node) -> Iterator[Var]:
    """The names that stand for a value of their own: none of an open body's parameters, and no index."""
    if isinstance(n, Var):
        yield n
    for a in n.args if isinstance(n, App) and n.fn != "index" and not is_open(n) else ():
        yield from _values(a)


def _applications(n: Node) -> Iterator[App]:
    if isinstance(n, App):
        if is_open(n):
            yield n
        for a in n.args:
            yield from _applications(a)
