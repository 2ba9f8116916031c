"""Pages of the documentation, taken apart: fenced blocks that do something, and spans that are generated.

Fenced blocks, by the words behind the three backticks:

- ``console``: lines that start with ``$ `` are run in order; what stands below each is its output.
- ``python FILE``, ``tap FILE``, ``json FILE``: the block is written to FILE in the page's working folder.
- ``python`` alone: a program that is run and must end without an error.
- everything else is for reading only. ``sh`` is for commands that no test can run; a comment ``<!-- not run: why -->`` says why.

``<!-- slow -->`` before a block sends its whole page to ``make test-all``, ``<!-- slow, alone -->`` that block, on which no quick one builds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.paths import ROOT

FENCE = re.compile(r"(?P<before><!--[^\n]*-->\n)?^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- from: (?P<name>[\w.-]+) -->(?P<text>.*?)<!-- /from -->", re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: .+ -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: the words behind its backticks, its text, the comment line before it, and where its text begins."""

    info: str
    text: str
    before: str
    start: int

    @property
    def language(self) -> str:
        """The first word, such as ``console``."""
        return self.info.split()[0] if self.info.split() else ""

    @property
    def file(self) -> str | None:
        """The file that the block is written to."""
        words = self.info.split()
        return words[1] if len(words) == 2 and self.language in ("python", "tap", "json") else None

    @property
    def runs(self) -> bool:
        """Whether a test does something with it."""
        return self.language == "console" or self.file is not None or self.info == "python"

    @property
    def alone(self) -> bool:
        """Whether ``make test`` leaves out this block, and runs the rest of its page."""
        return self.before.strip() == "<!-- slow, alone -->"


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """The path below the repository's root."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """The file's text."""
        return self.path.read_text()

    @property
    def blocks(self) -> list[Block]:
        """All fenced blocks, in order."""
        return [Block(m["info"].strip(), m["text"], m["before"] or "", m.start("text")) for m in FENCE.finditer(self.text)]

    @property
    def slow(self) -> bool:
        """Whether a block of the page says that it takes more than about 20 seconds."""
        return any(b.before.strip() == "<!-- slow -->" for b in self.blocks)

    @property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return FENCE.sub("", self.text)


def pages() -> list[Page]:
    """README, CONTRIBUTING and every page below docs."""
    top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [Page(p) for p in (*top, *sorted((ROOT / "docs").rglob("*.md")))]
