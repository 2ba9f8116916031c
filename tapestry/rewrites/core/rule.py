"""What a rewrite rule is: it finds Moves (or says why not), and applies one.

A rule is a subclass of `Rule` with a name, a phase, ``find`` and ``apply``; its docstring shows ``before`` and ``after`` in
IR text under those headings and says when it is legal. `register` puts it in the table, from inside this package or from a
user's own file; `rewrites.core.rule_check.check_rule` holds every registered rule to the laws.

The phase says when the compiler applies a rule. Those of the phase ``simplify`` always help and run to a fixpoint; all others
are choices. Where a rule does not apply it says so in one way, a `Refusal` with a reason and a witness.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, TypeVar, get_args, runtime_checkable

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.syntax.printer import name as quoted_name

Param = str | int


@dataclass(frozen=True, slots=True)
class Move:
    """One application of a rule: ``split@y{dim=n,parts=8,to=mesh.d0}``."""

    rule: str
    at: str
    params: tuple[tuple[str, Param], ...] = ()

    def __str__(self) -> str:
        inside = ",".join(f"{k}={v}" for k, v in self.params)
        return f"{self.rule}@{quoted_name(self.at)}" + (f"{{{inside}}}" if inside else "")

    def text(self, key: str) -> str:
        """A parameter that is a word."""
        value = self._get(key)
        if not isinstance(value, str):
            raise TapestryError(f"parameter '{key}' is {value}, not a word", where=str(self))
        return value

    def number(self, key: str) -> int:
        """A parameter that is an integer."""
        value = self._get(key)
        if not isinstance(value, int):
            raise TapestryError(f"parameter '{key}' is '{value}', not an integer", where=str(self))
        return value

    def _get(self, key: str) -> Param:
        found = dict(self.params).get(key)
        if found is None:
            raise TapestryError(f"parameter '{key}' is missing", where=str(self))
        return found


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a rule does not apply at an operation, with a concrete point where there is one."""

    rule: str
    at: str
    reason: str
    witness: str = ""

    def __str__(self) -> str:
        return f"{self.rule}@{quoted_name(self.at)}: {self.reason}" + (f" (e.g. {self.witness})" if self.witness else "")


def refuse(reason: str, witness: str = "") -> Refusal:
    """A refusal of whatever a rule is looking at; who asked the rule fills in the rule and the place."""
    return Refusal("", "", reason, witness)


Phase = Literal["simplify", "fusion", "algebra", "search", "fit", "request"]
"""When a rule is applied:

- ``simplify``: always, to a fixpoint, since it never costs anything;
- ``fusion``: before the search, where the price of the operations falls (`plan.alternatives`);
- ``algebra``: where the price of a region falls, several in a row (`plan.structural_search`);
- ``search``: where the best plan of the rewritten graph is better (`plan.structural_search`), the phase of users' rules;
- ``fit``: to bring a plan under the memory that there is (`plan.memory`);
- ``request``: by the strategies of a plan or by a user's move alone, never tried by itself.
"""


class Rule:
    """A rewrite rule; see the module's docstring. Most are an `OpRule` or a `PairRule`, which need one method, ``match``."""

    name: ClassVar[str]
    phase: ClassVar[Phase] = "search"
    exact: ClassVar[bool] = False  # whether results are the same bits, on infinities and NaN as well

    @property
    def built_in(self) -> bool:
        """Whether the rule is the package's own; the tests prove those, and `applied` those of users at every place."""
        return type(self).__module__.startswith("tapestry.")

    @property
    def doc(self) -> str:
        """What the rule does, with an example: the docstring of its class."""
        return inspect.cleandoc(type(self).__doc__ or "")

    @property
    def kind(self) -> str:
        """``simplify`` for what always helps, ``move`` for a choice."""
        return "simplify" if self.phase == "simplify" else "move"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Every place where the rule applies, and refusals where a user might expect it to."""
        raise NotImplementedError

    def offered(self, move: Move, found: object) -> Move | Refusal:
        """A move, or the refusal that was found of it."""
        return replace(found, rule=self.name, at=move.at) if isinstance(found, Refusal) else move

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph after one move.

        Raises:
            TapestryError: the move is not legal here; the message is the refusal's.
        """
        raise NotImplementedError

    def sweep(self, graph: Graph) -> Graph:
        """The graph after every move that the rule finds."""
        while (move := next((m for m in self.find(graph) if isinstance(m, Move)), None)) is not None:
            graph = self.apply(graph, move)
        return graph


@runtime_checkable
class Sized(Protocol):
    """A rule whose moves cut something into parts: the search asks for the sizes of the mesh's axes."""

    def sized(self, graph: Graph, parts: int) -> Iterator[Move | Refusal]:
        """Every place where the rule applies with so many parts, and refusals."""
        ...


TABLE: dict[str, Rule] = {}
WAITING: list[Callable[[], None]] = []
"""What fills the table, but for the book of equations, before it is first used."""
BOOK = "algebra"  # the word for the book, where rules are asked for
READ_BOOK: list[Callable[[], None]] = []
"""What puts the book of equations in front of the table, where somebody asks for it or for all rules."""


def own_rules() -> dict[str, Rule]:
    """The table of rules by name, in the order in which they are tried; the book is among them only if it was read before."""
    while WAITING:
        WAITING.pop()()
    return TABLE


def rule_table() -> dict[str, Rule]:
    """The table of all rules by name, in the order in which they are tried."""
    own_rules()
    while READ_BOOK:
        READ_BOOK.pop()()
    return TABLE


def rule_named(name: str) -> Rule | None:
    """A rule; the book is read only if no other rule has the name."""
    return own_rules().get(name) or rule_table().get(name)


LEFT_OUT: ContextVar[frozenset[str]] = ContextVar("LEFT_OUT", default=frozenset())
"""Rules whose proof failed in this compilation, as ``rule@result`` where it failed for that result: they do nothing there."""


@contextmanager
def leaving_out(rules: frozenset[str]) -> Generator[None]:
    """Inside, `LEFT_OUT` has these as well."""
    token = LEFT_OUT.set(LEFT_OUT.get() | rules)
    try:
        yield
    finally:
        LEFT_OUT.reset(token)


def left_out(rule: str, results: Iterable[str]) -> bool:
    """Whether a rule may not make these results."""
    there = LEFT_OUT.get()
    return bool(there) and not there.isdisjoint((rule, *(f"{rule}@{t}" for t in results)))


R = TypeVar("R", bound=type)


def register(rule: R) -> R:
    """Class decorator: put a rule in the table."""
    instance = rule()
    if not isinstance(instance, Rule):
        raise TapestryError(f"{rule.__name__} is not a rule", hint="a subclass of Rule, with name, phase, find and apply")
    table = TABLE if instance.built_in else rule_table()
    if instance.name in table:
        whose = "the package's own" if table[instance.name].built_in else "registered already"
        raise TapestryError(f"there is a rule named '{instance.name}', {whose}", hint="another name")
    if instance.phase not in (phases := get_args(Phase)):
        raise TapestryError(f"rule '{instance.name}' has no phase '{instance.phase}'", hint=f"one of {', '.join(phases)}")
    table[instance.name] = instance
    return rule


def parse_move(text: str) -> Move:
    """Read ``rule@tensor{key=value,…}``; the tensor may be quoted.

    Raises:
        TapestryError: the text is not a move.
    """
    m = re.fullmatch(r'\s*(\w+)@("(?:[^"\\]|\\.)*"|[^{"]+?)\s*(?:\{(.*)\})?\s*', text)
    if not m:
        raise TapestryError(f"'{text}' is not a move", hint="split@y{dim=n,parts=8,to=mesh.d0}")
    params: list[tuple[str, Param]] = []
    for item in filter(None, (m.group(3) or "").split(",")):
        key, eq, value = item.partition("=")
        if not eq:
            raise TapestryError(f"'{item}' is not key=value", where=text)
        params.append((key.strip(), int(value) if re.fullmatch(r"-?\d+", value.strip()) else value.strip()))
    at = m.group(2)
    return Move(m.group(1), at[1:-1].replace('\\"', '"') if at.startswith('"') else at, tuple(params))
