"""What is known of operations that look the same is what rules say of each of them."""

from collections.abc import Iterator

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.algebra import Book
from tapestry.plan.solver.budget import Meter
from tapestry.plan.topology import parse_mesh, topology
from tapestry.rewrites import RULES
from tapestry.rewrites.core.cones import Cones
from tapestry.rewrites.core.driver import rules_of, simplify
from tapestry.rewrites.core.matching import MatchRule
from tapestry.rewrites.core.rule import Move, Refusal
from tapestry.rewrites.core.rule_check import documented
from tapestry.rewrites.equations.equation import Equation

EXAMPLES = tuple(r.name for phase in ("algebra", "simplify") for r in rules_of(phase))
CHAIN = """graph g
input x: f32[64, 64]
input a: f32[64, 64]
input b: f32[64, 1]
{last}
{p}: f32[64, 64] = op [i: 64, n: 64 | m: 64 sum]
  reads x[i, m], w = {by}[m, n]
  body x * w
q: f32[64, 1] = op [i: 64, n: 1 | m: 64 sum]
  reads l = {p}[i, m], r = {of}[m, n]
  body l * r
output q{more}
"""


def chain(last: str = "", of: str = "b", more: str = "", by: str = "a", p: str = "p") -> str:
    return CHAIN.format(last=last, of=of, more=more, by=by, p=p)


def graphs() -> Iterator[Graph]:
    """Every rule's example, and one graph in forms that differ in what surrounds an equation's operations alone."""
    yield from (parse(documented(RULES[name])[0]) for name in EXAMPLES)
    one = "s: f32[64, 1] = op [i: 64, n: 1]\n  reads b[i, n]\n  body b * 2.0"
    yield parse(chain())
    yield parse(chain(more=", p"))  # the first product is needed elsewhere
    yield parse(chain(last=one, of="s"))
    yield parse(chain(by="x"))


def book() -> Book:
    return Book(topology=topology(parse_mesh("1"), "cpu"), meter=Meter(), units=1e12)


def test_the_book_finds_what_its_equations_find() -> None:
    """One memory for all graphs: what was noted of one must be right for all others."""
    one, met = book(), 0
    for _ in range(2):
        for graph in graphs():
            rules = [r for r in rules_of("algebra") if isinstance(r, Equation)]
            own = [m for r in rules for m in r.find(graph) if not isinstance(m, Refusal)]
            assert list(one.moves(graph)) == own, to_text(graph)
            met += len(own)
    assert met > len(EXAMPLES)


def test_simplification_is_the_same_with_what_is_known() -> None:
    cones, changed = Cones(), 0
    for graph in graphs():
        moves = [m for r in rules_of("algebra") for m in r.find(graph) if isinstance(m, Move)]
        for after in (graph, *filter(None, (applied(graph, m) for m in moves))):
            with_known, without = simplify(after, cones=cones), simplify(after)
            assert to_text(with_known) == to_text(without)
            changed += with_known.ops != after.ops
    assert changed > 10


def applied(graph: Graph, move: Move) -> Graph | None:
    try:
        return RULES[move.rule].apply(graph, move)
    except TapestryError:
        return None


def test_who_reads_what_is_made_is_part_of_a_cone_and_names_are_not() -> None:
    cones = Cones()

    def at(text: str, out: str, reach: int) -> object:
        graph = parse(text)
        return cones.at(cones.draft(graph), graph.ops[graph.find(out)], reach)[0]

    alone, shared = chain(), chain(more=", p")
    assert at(alone, "q", 1) != at(shared, "q", 1) and at(alone, "q", 0) == at(shared, "q", 0)
    assert at(alone, "q", 1) == at(chain(p="first"), "q", 1) != at(chain(by="x"), "q", 1)


def test_rules_that_say_how_far_they_look_look_no_farther() -> None:
    assert {r.name: r.reach for r in rules_of("simplify") if isinstance(r, MatchRule) and r.reach is not None} == {
        "compose_views": 1, "fuse_epilogue": 1, "fuse_maps": 1, "fuse_places": 1, "select_first": 0,
    }  # fmt: skip
