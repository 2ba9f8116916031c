"""From texts of rules to registered rules: the built-in ones, and files of the user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tapestry.errors import TapestryError
from tapestry.rewrites.core.rule import RULES, register
from tapestry.rewrites.equations.equation import Equation
from tapestry.rewrites.equations.instances import describe, prove
from tapestry.rewrites.equations.pattern import RuleText, parse_rules


def equation(text: RuleText, module: str = __name__) -> type[Equation]:
    """The rule that a text says, as a class for `rewrites.core.rule.register`."""

    class Made(Equation):
        name = text.name
        phase = text.phase
        rule = text

    Made.__name__ = Made.__qualname__ = text.name
    Made.__module__ = module
    Made.__doc__ = describe(Made())
    return Made


def register_file(path: Path) -> None:
    """Put the package's own equations of a file in the table (the tests prove them; loading does not)."""
    for text in parse_rules(path.read_text(encoding="utf-8"), path.name):
        register(equation(text))


def load_equations(path: Path) -> None:
    """Read a user's file of rules, hold each to the laws on random instances, and put it in the table.

    The file is data: nothing in it is executed.

    Raises:
        TextError: the file does not read.
        LawError: the two sides of a rule disagree, with a witness.
        TapestryError: a rule has no instance that it could be tried on, or is registered already.
    """
    if not path.is_file():
        raise TapestryError("no such file of rules", where=str(path))
    for text in parse_rules(path.read_text(encoding="utf-8"), str(path)):
        rule = equation(text, f"tapestry_rules_{path.stem}")
        register(rule)
        try:
            prove(rule(), np.random.default_rng(0))
        except TapestryError:
            del RULES[text.name]
            raise
