"""The book of equations: every one proved for all sizes, none of its wrong variants."""

import itertools
import re

import numpy as np
import pytest

from tapestry.errors import TapestryError
from tapestry.rewrites import RULES
from tapestry.rewrites.equations import all_sizes
from tapestry.rewrites.equations.equation import Equation
from tapestry.rewrites.equations.instances import ALL_SIZES, proof_of, prove_moves
from tapestry.rewrites.equations.pattern import parse_rules
from tapestry.rewrites.equations.rounding import rounding
from tapestry.rewrites.equations.rule_texts import WORDS, equation

BOOK = {n: r.rule for n, r in RULES.items() if isinstance(r, Equation) and r.built_in and r.phase in ("algebra", "request")}
SLIPS = [  # rule, what is written, the slip
    ("reassociate_contraction", "body a * c", "body a + c"),
    ("distribute_term", "then H(acc0 + f, d..)", "then H(acc0, d..)"),
    ("distribute_difference", "acc0 - f", "f - acc0"),
    ("common_factor_minus", "body x - z", "body z - x"),
    ("common_factor_with", "acc0 + c", "acc0"),
    ("squared_distance", "acc0 * 2", "acc0"),
    ("squared_distance", "(xx + cc) - ", "(xx - cc) - "),
    ("outer_sums", "acc0 * u", "acc0 + u"),
    ("gather_first", "  then where(and(ge(P(w..), 0), lt(P(w..), V)), acc0, 0)\n\n", "  then where(lt(P(w..), 0), acc0, 0)\n\n"),
    ("scale_through", "H(acc0 * c, d..)", "H(acc0, d..)"),
    ("scale_across", "body c * w", "body w"),
    ("bias_out", "(c * M)", "c"),
    ("bias_off", "acc0 - (c * M)", "acc0 + (c * M)"),
    ("sum_of_constant", "body c * M", "body c"),
    ("square_out", "acc0 * (c * c)", "acc0 * c"),
    ("spread_out", "((c * f) * 2)", "(c * f)"),
    ("norm_through", "H(acc0 * r, d..)", "H(acc0, d..)"),
    ("mask_out", "where(P(w..), acc0, 0)", "acc0"),
    ("difference_apart", "acc0 - f", "acc0 + f"),
    ("contract_concat", "w[b.., n.., A + j, k..]", "w[b.., n.., j, k..]"),
    ("contract_concat", "z..[b.., i.., A + j, k..]", "z..[b.., i.., j, k..]"),
    ("sum_concat", "[i..: I.. | j: M - A sum]", "[i..: I.. | j: A sum]"),
    ("maximum_concat", "then max(acc0, f)", "then min(acc0, f)"),
    ("sum_zeros", ", A < M", ""),
    ("sum_zeros", "[i..: I.. | j: A sum]", "[i..: I.. | j: M sum]"),
    ("floor_out", "max(acc0, c)", "min(acc0, c)"),
    ("offset_out", "acc0 - c", "acc0 + c"),
    ("increasing_out", ", increasing(F)", ""),
    ("decreasing_out", "| m..: M.. min]", "| m..: M.. max]"),
    ("exp_product", "exp(x + z)", "exp(x * z)"),
    ("quotients_in_a_row", "x / (z * c)", "(x * c) / z"),
    ("difference_of_squares", "(x + z) * (x - z)", "(x - z) * (x - z)"),
    ("maximum_of_negatives", "neg(min(x, z))", "neg(max(x, z))"),
    ("split_sum", ", M == parts * (M // parts)", ""),
    ("shift_out", "most + c", "most * c"),
]  # fmt: skip


def written(name: str, old: str, new: str):
    """A rule of the book with a slip on its right-hand side, or in its conditions."""
    head, arrow, tail = BOOK[name].text.partition("=>")
    assert old in tail, (name, old)
    (rule,) = parse_rules(head.replace(f"rule {name}", "rule slip") + arrow + tail.replace(old, new), "slip.tap", WORDS)
    return rule


def test_a_book_of_sixty_equations() -> None:
    assert len([r for r in BOOK.values() if r.phase == "algebra"]) >= 60


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", BOOK)
def test_proved_for_all_sizes_and_on_instances(name: str) -> None:
    assert proof_of(BOOK[name]).startswith(ALL_SIZES)
    rule = RULES[name]
    assert isinstance(rule, Equation)
    assert prove_moves(rule, np.random.default_rng(3), enough=2).moves >= 2


@pytest.mark.parametrize(("name", "old", "new"), SLIPS)
def test_a_slip_is_not_proved_for_all_sizes(name: str, old: str, new: str) -> None:
    assert not all_sizes.proved(written(name, old, new))


@pytest.mark.parametrize(("name", "old", "new"), SLIPS)
def test_and_it_is_refuted_on_instances(name: str, old: str, new: str) -> None:
    rule = equation(written(name, old, new))()
    RULES["slip"] = rule
    try:
        with pytest.raises(TapestryError):
            prove_moves(rule, np.random.default_rng(0), enough=40)
    finally:
        del RULES["slip"]


def _mutants(text: str) -> list[str]:
    """A text with one operator of its right-hand side exchanged for another one."""
    head, arrow, tail = text.partition("=>")
    bodies, when, rest = tail.partition("\nwhen:")
    out = list[str]()
    for swap in (
        (" + ", " - "),
        (" - ", " + "),
        (" * ", " + "),
        ("max", "min"),
        ("min", "max"),
        (" sum]", " max]"),
        ("acc0", "(acc0 + acc0)"),
    ):
        for found in re.finditer(re.escape(swap[0]), bodies):
            line = bodies[: found.start()].rpartition("\n")[2]
            if line.lstrip().startswith(("body", "then")) or swap[0] == " sum]":
                out.append(head + arrow + bodies[: found.start()] + swap[1] + bodies[found.end() :] + when + rest)
    return out


def test_what_is_proved_for_all_sizes_is_not_refuted_on_instances() -> None:
    """All slips of one operator: the prover for all sizes must not believe any that trying refutes."""
    believed = total = 0
    for text in itertools.chain.from_iterable(_mutants(r.text) for r in BOOK.values()):
        (rule,) = parse_rules(re.sub(r"^rule \w+", "rule slip", text), "slip.tap", WORDS)
        total += 1
        if all_sizes.proved(rule):
            believed += 1
            RULES["slip"] = equation(rule)()
            try:
                prove_moves(RULES["slip"], np.random.default_rng(1), enough=4)  # type: ignore[arg-type]
            finally:
                del RULES["slip"]
    assert total >= 80 and believed <= total // 20


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("reassociate_contraction", "at most γ(d)·Σ|terms| on each side, d = K + M before and K + M after"),
        ("maxima_apart", "the same values: nothing is rounded"),
        ("double_negative", "the same bits"),
        ("exp_product", "real arithmetic; no bound is stated"),
    ],
)
def test_by_how_much_results_may_differ(name: str, bound: str) -> None:
    assert rounding(BOOK[name]) == bound


def test_the_bound_of_a_reassociation_holds() -> None:
    """(a·b)·c against a·(b·c) in single precision, within the two bounds about the real value."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s).astype(np.float32) for s in ((7, 40), (40, 30), (30, 5)))
    u, d = 2.0**-24, 40 + 30
    gamma = d * u / (1 - d * u)
    left, right = (a @ b) @ c, a @ (b @ c)
    scale = np.abs(a).astype(float) @ np.abs(b) @ np.abs(c)
    real = a.astype(float) @ b @ c
    assert (np.abs(left - real) <= gamma * scale).all() and (np.abs(right - real) <= gamma * scale).all()
