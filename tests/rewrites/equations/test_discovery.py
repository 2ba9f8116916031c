"""New equations by values: what is enumerated, what counts as new, and what a command prints of it."""

import json

import numpy as np
import pytest

from tapestry.ir.syntax.parser import parse
from tapestry.plan.topology import parse_mesh, topology
from tapestry.rewrites import RULES
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.equations import all_sizes
from tapestry.rewrites.equations.instances import prove_moves
from tapestry.rewrites.equations.pattern import parse_rules
from tapestry.rewrites.equations.rule_texts import WORDS, equation
from tapestry.tools.rulebook.discovery import Discovery, derives
from tapestry.tools.rulebook.small_terms import FAMILIES, Draw, Enumeration, ordered, rewritten
from tapestry.tools.rulebook.term_rules import rule_text
from tests.support.command_line import run

BY_NAME = {f.name: f for f in FAMILIES}
REDUCTION = BY_NAME["one reduction"]
X, C = ("x",), ("c",)
MARGIN = """graph margin
input c: f32[512, 1]
input x: f32[512, 1024]
y: f32[512] = op [i: 512 | m: 1024 min]
  reads c[i, 0], x[i, m]
  body c - x
output y
"""


def search(terms: int, family: str = "one reduction", without=(), **corpus) -> Discovery:
    graphs = {n: simplify(parse(t)) for n, t in corpus.items()}
    return Discovery(graphs, topology(parse_mesh("1"), "cpu"), terms, (BY_NAME[family],), frozenset(without))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_pairs_have_equal_values_in_draws_that_were_not_asked(family) -> None:
    for before, after in list(Enumeration(family, 400).equations(2))[:60]:
        draw = Draw(family, 2)
        sides = [np.broadcast_to(draw.value(t), [draw.sizes[d] for d in family.dims]) for t in (before, after)]
        assert (sides[0] == sides[1]).all(), (before, after)


def test_a_known_law_is_found_and_a_wrong_one_is_not() -> None:
    pairs = {frozenset(map(ordered, p)) for p in Enumeration(REDUCTION, 2000).equations(2)}
    law = {ordered(("MIN", "m", ("sub", C, X))), ordered(("sub", C, ("MAX", "m", X)))}
    wrong = {ordered(("MIN", "m", ("sub", C, X))), ordered(("sub", C, ("MIN", "m", X)))}
    assert law in pairs and wrong not in pairs


def test_an_instance_of_a_known_equation_follows() -> None:
    known = [(("MIN", "m", ("sub", C, X)), ("sub", C, ("MAX", "m", X)))]
    longer = ("mul", ("MIN", "m", ("sub", ("add", C, ("r",)), ("mul", X, X))), C)
    done = rewritten(REDUCTION, longer, known)
    assert done == ("mul", ("sub", ("add", C, ("r",)), ("MAX", "m", ("mul", X, X))), C)
    assert REDUCTION.work(done) < REDUCTION.work(longer)


def test_texts_are_rules_and_the_prover_tells_right_from_wrong() -> None:
    for right, proved in ((("sub", C, ("MAX", "m", X)), True), (("sub", C, ("MIN", "m", X)), False)):
        text = rule_text(REDUCTION, ("MIN", "m", ("sub", C, X)), right, "found", "x", rest=True)
        (rule,) = parse_rules(text, "found", WORDS)
        assert all_sizes.proved(rule) is proved


def test_the_book_derives_its_own_and_no_stranger() -> None:
    begin = simplify(parse(MARGIN))
    end = parse(MARGIN.replace("min]", "max]").replace("body c - x", "body x\n  then c - acc0"))
    assert derives(begin, end) and not derives(begin, parse(MARGIN.replace("c - x", "c + x")))


@pytest.mark.slow
def test_what_was_taken_into_the_book_is_found_again_without_it() -> None:
    """… in the same order each time, and the table of rules is as before."""
    before = dict(RULES)
    found = [search(1500, without=("difference_least", "difference_most"), margin=MARGIN).found() for _ in range(2)]
    assert found[0] == found[1] and found[0][0].title == "min_m (c - x) = (c - max_m x)"
    (saving,) = found[0][0].savings
    assert saving.model == "margin" and saving.after < saving.before and saving.places == 1
    assert before == RULES
    assert not [f for f in search(1500).found() if "(c - x)" in f.title]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "terms", "titles"),
    [
        ("contractions", 3000, {"gate_out": "Σ_m ((u·x)·z) = (Σ_m (x·z)·u)"}),
        ("gathers", 1500, {"table_summed": "Σ_m pick(a) = pick(Σ_m a)"}),
        pytest.param(
            "tropical", 3000,
            {"last_states": "max_n max_m (w + x) = max_m (max_n w + x)", "bonus_out": "max_m ((u + x) + z) = (max_m (x + z) + u)"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_the_other_families_find_what_the_book_has_of_them(family, terms, titles) -> None:
    found = {f.title for f in search(terms, family, without=titles).found()}
    assert found.issuperset(titles.values())
    assert not {f.title for f in search(terms, family).found()}.intersection(titles.values())


def test_discovery_on_the_command_line() -> None:
    status, out, _ = run("rules", "--discover", "--terms", "150", "--json")
    document = json.loads(out)
    assert status == 0 and document["counts"]["terms"] <= 150 * len(FAMILIES)
    for row in document["discovered"]:
        (rule,) = parse_rules(row["text"], "found", WORDS)
        assert all_sizes.proved(rule) and row["shown"]


def test_a_body_behind_a_reduction_does_not_look_along_it() -> None:
    """Σ(F(c) + x) = Σx + M·F(c) holds where F does not look at the place along the sum; where it does, the move is refused."""
    sides = ("SUM", "m", ("add", C, X)), ("add", ("SUM", "m", X), ("mul", C, ("size", "m")))
    text = rule_text(REDUCTION, *sides, "behind", "c")
    (rule,) = parse_rules(text, "behind", WORDS)
    RULES["behind"] = found = equation(rule)()
    try:
        assert prove_moves(found, np.random.default_rng(0), enough=6).moves >= 6
    finally:
        del RULES["behind"]
