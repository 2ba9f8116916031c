"""Rewrite rules. Their table is `core.rule.rule_table`, which `built_in` fills when somebody first asks for it: reading rules
takes a while, and loading a build needs none. The book of equations is read later still, where it is asked for.
"""

from typing import Any

from tapestry.rewrites.core import rule


def _fill() -> None:
    from tapestry.rewrites import built_in  # noqa: F401  # pyright: ignore[reportUnusedImport]


def _read_book() -> None:
    others = dict(rule.TABLE)
    rule.TABLE.clear()
    from tapestry.rewrites import algebra  # noqa: F401  # pyright: ignore[reportUnusedImport]

    rule.TABLE.update(others)


rule.WAITING.append(_fill)
rule.READ_BOOK.append(_read_book)


def __getattr__(name: str) -> Any:
    if name == "RULES":
        return rule.rule_table()
    if name == "load_rules":
        from tapestry.rewrites.equations.rule_texts import load_rules

        return load_rules
    raise AttributeError(name)
