"""What the pages of docs/seeds say of the founding documents, counted: statements, those that are wrong there, what is not done.

A statement is a numbered heading, or else a quotation of the document; what is said of it reaches to the next one. It is wrong
where the page says **wrong …** of it, and not done where it says **not done**; a list under a heading that says so counts too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import FENCE
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "seeds"
NUMBERED = re.compile(r"^#{2,4} \d+[.:)]? .*$", re.MULTILINE)
QUOTED = re.compile(r"(?:^>.*\n?)+", re.MULTILINE)
WRONG = re.compile(r"\*\*wrong\b", re.IGNORECASE)
NOT_DONE = re.compile(r"\*\*not done\b", re.IGNORECASE)
UNDONE_LIST = re.compile(r"^#+ [^\n]*\bnot done\b[^\n]*\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many statements, and how many of them are wrong in the document, or not done."""

    statements: int
    wrong: int
    not_done: int


def counts(text: str) -> Counts:
    """What a page says."""
    text = FENCE.sub("", text)
    starts = [m.start() for m in NUMBERED.finditer(text)] or [m.start() for m in QUOTED.finditer(text)]
    ends = [*starts[1:], len(text)]
    undone = list(UNDONE_LIST.finditer(text))
    parts = [text[a:b] for a, b in zip(starts, ends, strict=True)]
    listed = sum(len(re.findall(r"^[-*] ", m[1], re.MULTILINE)) for m in undone if not NUMBERED.match(m[0]))
    wrong = sum(bool(WRONG.search(p)) for p in parts)
    return Counts(len(parts), wrong, listed + sum(bool(NOT_DONE.search(p)) for p in parts))


def seed_pages() -> list[Path]:
    """The pages, by name."""
    return sorted(FOLDER.glob("*.md"))


def title(text: str) -> str:
    """The first heading of a page."""
    return re.sub(r",? statement by statement$", "", text.partition("\n")[0].lstrip("# ").strip())
