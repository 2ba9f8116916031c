"""docs/grammar.md: its examples read back, and between them use every production, which are the parsers' methods."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tapestry import rewrites
from tapestry.ir.syntax import parser
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.rewrites import RULES
from tapestry.rewrites.equations import pattern
from tapestry.rewrites.equations.conditions import MEASURES, PROPERTIES
from tapestry.rewrites.equations.rule_texts import WORDS, load_rules
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "grammar.md").read_text()
GRAPHS = re.findall(r"```tap\n(.*?)```", PAGE, re.DOTALL)
RULE_TEXTS = re.findall(r"```rule\n(.*?)```", PAGE, re.DOTALL)
BUILT_IN = [p.read_text() for p in Path(rewrites.__path__[0]).rglob("*.tap")]
GRAMMARS = re.findall(r"```ebnf\n(.*?)```", PAGE, re.DOTALL)
NO_PRODUCTIONS = {
    "__init__",
    "next",
    "last",
    "error",
    "fail",
    "wrong",
    "peek",
    "take",
    "need",
    "kind",
    "checked",
    "closed",
    "laws",
}
TERMINALS = {"name", "literal", "integer", "string"}  # read by `Tokens`, for both


def productions(grammar: str) -> set[str]:
    return set(re.findall(r"^(\w+)\s+=", grammar, re.MULTILINE))


def called(run: Callable[[], Any], files: set[str]) -> set[str]:
    """Names of the functions of some files that a call enters."""
    names: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            names.add(frame.f_code.co_name)

    old = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(old)
    return names


@pytest.mark.parametrize("text", GRAPHS, ids=lambda t: t.split()[1])
def test_every_example_reads_back(text: str) -> None:
    graph = parse(text)
    assert to_text(graph) == text
    assert parse(to_text(graph)) == graph


def test_every_production_of_a_graph_is_a_method_and_is_used() -> None:
    methods = set(vars(parser.Parser)) | TERMINALS
    expected = {m for m in methods if not m.startswith("_")} - NO_PRODUCTIONS
    assert productions(GRAMMARS[0]) == expected
    used = called(lambda: [parse(t) for t in GRAPHS], {parser.__file__, parser.__file__})
    assert expected <= used, expected - used


def test_every_production_of_a_rule_is_a_method_and_is_used() -> None:
    expected = {m for m in vars(pattern._Parser) if not m.startswith("_")} - NO_PRODUCTIONS - {"properties"}
    assert productions(GRAMMARS[1]) == expected
    used = called(lambda: [pattern.parse_rules(t, "", WORDS) for t in RULE_TEXTS], {pattern.__file__})
    assert expected <= used, expected - used


def test_the_rule_on_the_page_holds(tmp_path) -> None:
    (tmp_path / "page.tap").write_text(RULE_TEXTS[0])
    load_rules(tmp_path / "page.tap")
    del RULES["split_max"]


def test_every_alternative_in_quotes_stands_in_an_example() -> None:
    for grammar, texts in zip(GRAMMARS, (GRAPHS, [*RULE_TEXTS, *BUILT_IN]), strict=True):
        words = set(re.findall(r"'([a-z]+|[-+*/=<>|]+)'", grammar)) - {
            "fusion",
            "search",
            "fit",
            "nan",
            "false",
            "number",
            "!=",
            "<",
            "<=",
            ">=",
        }
        missing = {w for w in words if w not in "\n".join(texts)}
        assert not missing


def test_every_condition_is_in_the_table() -> None:
    for word in (*MEASURES, *PROPERTIES):
        assert f"`{word}(" in PAGE
