"""What the pages of docs/seeds say of the founding documents, counted: statements, what is wrong in them, what is not done.

A statement is a quotation of the document (a block quote, or a paragraph that begins with one in bold type), a numbered heading, or
a row of a table whose last column is "here".
Behind the first one, what begins with **Wrong is an error of the document's; what is not done says **not done** or "Not done:", or
is an entry of a list under a heading of that name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import FENCE
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "seeds"
STATEMENT = re.compile(r"^#{2,4} \d+[.:)]? .*$|(?:^>.*\n?)+|^\*\*[\"“].*$", re.MULTILINE)
TABLE = re.compile(r"^\|.*\| here \|\n\|[-| :]+\|\n((?:\|.*\n?)+)", re.MULTILINE)
WRONG = re.compile(r"\*(?:wrong|not what)\b", re.IGNORECASE)
NOT_DONE = re.compile(r"\*\*not done\b|(?<![*\w] )\bNot done:", re.IGNORECASE)
UNDONE_LIST = re.compile(r"^#+ (?:what is )?not done *\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many statements, how many errors of the document, and how much is not done."""

    statements: int
    wrong: int
    not_done: int


def counts(text: str) -> Counts:
    """What a page says."""
    text = FENCE.sub("", text)
    found = list(STATEMENT.finditer(text))
    behind = text[found[0].start() :] if found else ""
    listed = sum(len(re.findall(r"^[-*] ", m[1], re.MULTILINE)) for m in UNDONE_LIST.finditer(text))
    rows = sum(m[1].count("\n") + (not m[1].endswith("\n")) for m in TABLE.finditer(text))
    return Counts(len(found) + rows, len(WRONG.findall(behind)), listed + len(NOT_DONE.findall(behind)))


def seed_pages() -> list[Path]:
    """The pages, by name."""
    return sorted(FOLDER.glob("*.md"))


def title(text: str) -> str:
    """The first heading of a page."""
    return re.sub(r",? statement by statement$", "", text.partition("\n")[0].lstrip("# ").strip())
