"""From texts of rules to registered rules: the built-in ones, and files of the user's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from tapestry.errors import TapestryError, similar
from tapestry.plugins import entry_points as plugins
from tapestry.rewrites.core.driver import rules_of
from tapestry.rewrites.core.rule import BOOK, register, rule_table
from tapestry.rewrites.equations.conditions import MEASURES, PROPERTIES
from tapestry.rewrites.equations.equation import Equation
from tapestry.rewrites.equations.pattern import RuleText, parse_rules

if TYPE_CHECKING:
    from tapestry.rewrites.equations.instances import Proof


KIND = "rules"  # of plug-ins
_BROUGHT: dict[str, dict[str, Proof | None]] = {}
WORDS = frozenset(MEASURES) | frozenset(PROPERTIES)


def equation(text: RuleText, module: str = __name__) -> type[Equation]:
    """The rule that a text says, as a class for `rewrites.core.rule.register`."""

    class Made(Equation):
        name = text.name
        phase = text.phase
        rule = text
        exact = text.exact

        @property
        def doc(self) -> str:
            """The equation, and an example of it."""
            from tapestry.rewrites.equations.instances import describe

            return describe(self)

    Made.__name__ = Made.__qualname__ = text.name
    Made.nothing = f"this is not {text.form or f'the left-hand side of {text.name}'}"
    Made.__module__ = module
    return Made


def register_file(path: Path) -> None:
    """Put the package's own equations of a file in the table (the tests prove them; loading does not)."""
    for text in parse_rules(path.read_text(encoding="utf-8"), path.name, WORDS):
        register(equation(text))


def load_rules(path: str | Path) -> dict[str, Proof | None]:
    """Put the rules of a user's file in the table; their names, and how each was proved.

    A ``.tap`` file holds equations: it is data, and nothing in it is executed. Each is proved on random instances first. Any
    other file is the user's own Python, and is imported: its ``@register`` lines put its rules in the table, and nothing is
    proved yet. Every rule of a user's is proved wherever it is applied (`rewrites.core.driver`). The word ``algebra`` stands
    for the package's own book of equations, which the tests prove.

    Raises:
        TextError: a file of equations does not read.
        LawError: the two sides of an equation disagree, with a witness.
        TapestryError: the file is missing or fails to import; an equation has no instance to try it on.
    """
    path, name = Path(path), str(path)
    if name == BOOK:
        return dict.fromkeys(r.name for r in rules_of("algebra") if r.built_in)
    if not path.is_file() and plugins.has(KIND, name):
        return _of_plugin(name)
    if not path.is_file():
        raise TapestryError("no such file of rules", where=name, hint=similar(name, plugins.names(KIND)))
    if path.suffix == ".tap":
        return _load_equations(path)
    there = set(rule_table())
    _import(path.resolve())
    return dict.fromkeys(n for n in rule_table() if n not in there)


def _of_plugin(name: str) -> dict[str, Proof | None]:
    """The rules of another package: those of a file of equations, or of a module; once."""
    found = plugins.get(KIND, name)
    if name not in _BROUGHT:
        if isinstance(found, ModuleType):
            made = dict.fromkeys(n for n, r in rule_table().items() if type(r).__module__ == found.__name__)
        else:
            made = load_rules(Path(found)) if isinstance(found, str | Path) and Path(found).is_file() else {}
        if not made:
            raise plugins.refused(KIND, name, "neither the path of a file of rules, nor a module that registers some")
        _BROUGHT[name] = made
    return _BROUGHT[name]


def _load_equations(path: Path) -> dict[str, Proof | None]:
    from tapestry.rewrites.equations.instances import prove_moves

    out: dict[str, Proof | None] = {}
    for text in parse_rules(path.read_text(encoding="utf-8"), str(path), WORDS):
        register(equation(text, f"tapestry_rules_{path.stem}"))
        try:
            rule = rule_table()[text.name]
            assert isinstance(rule, Equation)
            assert rule.doc
            out[text.name] = prove_moves(rule, np.random.default_rng(0))
        except TapestryError:
            del rule_table()[text.name]
            raise
    return out


def _import(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"tapestry_rules_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise TapestryError("neither a file of equations (.tap) nor one of Python (.py)", where=str(path))
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except TapestryError:
        raise
    except Exception as e:
        raise TapestryError(f"the rules do not import: {e}", where=str(path)) from e
