"""Laws of slices, pads, concats and clips, proved by cases; slips are not, or no draw of sizes refutes them."""

import re

import pytest

from bench.book.law_values import differs
from bench.book.tensorright import kind, laws
from tapestry.rewrites.equations import by_cases
from tapestry.rewrites.equations.instances import BY_CASES, proof_of
from tapestry.rewrites.equations.pattern import parse_rules
from tapestry.rewrites.equations.rule_texts import WORDS

LAWS = {r.name: r for r in laws()}
QUICK = ("concat_04", "concat_05", "slice_06", "slice_11", "reverse_03", "pad_02", "clamp_02", "max_01", "logical_10", "logical_03",
         "divmod_06", "dyupslice_01", "broadcast_07", "mul_09", "reverse_01", "dyslice_02")  # fmt: skip
SLIPS = [  # law, what is written on the right-hand side or behind it, the slip
    ("concat_04", "G - S", "G - E"),
    ("concat_05", "x[b.., i - L]", "x[b.., i]"),
    ("concat_05", "lt(index(i), L + N)", "le(index(i), L)"),
    ("slice_06", "(S - L) + i", "S + i"),
    ("slice_06", "S >= L, ", ""),
    ("slice_11", "S >= N", "S >= 0"),
    ("reverse_03", "J - 1 - j", "J - j"),
    ("clamp_02", "\nwhen: C <= D", ""),
    ("max_01", "body x", "body neg(x)"),
    ("logical_10", "gt(x, z)", "ge(x, z)"),
    ("divmod_06", "N <= C", "N <= C + 1"),
    ("dyupslice_01", "body z + x", "body z"),
    ("mul_09", "x * x", "x * abs(x)"),
    ("reverse_01", "\nwhen: N == 1", ""),
    ("dyslice_02", "S == 0", "S == 1"),
]  # fmt: skip


def slipped(name: str, old: str, new: str):
    head, arrow, tail = LAWS[name].text.partition("=>")
    assert old in tail, (name, old)
    (rule,) = parse_rules(head + arrow + tail.replace(old, new), "slip.tap", WORDS, laws=True)
    return rule


def refuted(rule, draws: int) -> bool:
    for seed in range(draws):
        try:
            if differs(rule, seed):
                return True
        except LookupError:
            continue
    return False


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", QUICK)
def test_laws_are_proved_for_all_sizes(name: str) -> None:
    assert kind(LAWS[name]) and not refuted(LAWS[name], 10)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "old", "new"), SLIPS)
def test_a_slip_is_refuted_by_some_draw_and_proved_by_none(name: str, old: str, new: str) -> None:
    rule = slipped(name, old, new)
    assert not kind(rule) and refuted(rule, 200)


def test_every_law_of_the_corpus_is_there() -> None:
    assert len({n.removesuffix("_above") for n in LAWS}) == 118


def test_a_users_rule_says_that_it_was_proved_by_cases() -> None:
    (rule,) = parse_rules(LAWS["logical_10"].text, "own.tap", WORDS)
    assert proof_of(rule).startswith(BY_CASES)


@pytest.mark.slow
def test_what_is_proved_is_never_refuted() -> None:
    """All slips of one sign or constant of all laws."""
    believed = total = 0
    for name, law in LAWS.items():
        head, arrow, tail = law.text.partition("=>")
        for old, new in ((" + ", " - "), (" - ", " + "), ("lt(", "le("), ("ge(", "gt("), (" 1", " 0"), ("max", "min")):
            for found in re.finditer(re.escape(old), tail):
                text = head + arrow + tail[: found.start()] + new + tail[found.end() :]
                (rule,) = parse_rules(text, name, WORDS, laws=True)
                total += 1
                if by_cases.proved(rule):
                    believed += 1
                    assert not refuted(rule, 30), text
    assert total >= 150 and believed < total // 2
