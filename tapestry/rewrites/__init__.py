"""Rewrite rules. Their table is `core.rule.rule_table`, which `built_in` fills when somebody first asks for it: reading a book
of equations takes a while, and loading a build needs none.
"""

from typing import Any

from tapestry.rewrites.core import rule


def _fill() -> None:
    from tapestry.rewrites import built_in  # noqa: F401  # pyright: ignore[reportUnusedImport]


rule.WAITING.append(_fill)


def __getattr__(name: str) -> Any:
    if name == "RULES":
        return rule.rule_table()
    if name == "load_rules":
        from tapestry.rewrites.equations.rule_texts import load_rules

        return load_rules
    raise AttributeError(name)
