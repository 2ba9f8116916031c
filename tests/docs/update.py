"""``python -m tests.docs.update [PAGE …]``: write real output and generated parts into the pages.

Without arguments all pages are done; ``--generated`` leaves out the commands, which takes a second. The schemas of
docs/reference are written in any case.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.docs.console import replay
from tests.docs.generated import generate
from tests.docs.pages import GENERATED, Page, pages
from tests.docs.schemas import SCHEMAS, file_of, schema


def generated(text: str) -> str:
    """``text`` with every generated span made anew."""

    def span(m: object) -> str:
        name = m["name"]  # type: ignore[index]
        new = generate(name)
        edge = "\n" if "\n" in new else ""
        return f"<!-- from: {name} -->{edge}{new}{edge}<!-- /from -->"

    return GENERATED.sub(span, text)


def replayed(page: Page) -> str:
    """The page's text with the real output of its commands."""
    text, shift = page.text, 0
    with tempfile.TemporaryDirectory() as folder:
        for block, new in replay(page, Path(folder).resolve() / "tapestry"):
            at = block.start + shift
            text = text[:at] + new + text[at + len(block.text) :]
            shift += len(new) - len(block.text)
    return text


def main(arguments: list[str]) -> None:
    """Update the pages named, or all."""
    names = [a for a in arguments if not a.startswith("-")]
    for name in SCHEMAS:
        if file_of(name).read_text() != schema(name):
            file_of(name).write_text(schema(name))
            print(f"{file_of(name)} updated")
    for page in pages():
        if names and page.name not in names:
            continue
        text = page.text if "--generated" in arguments else replayed(page)
        text = generated(text)
        if text != page.path.read_text():
            page.path.write_text(text)
            print(f"{page.name} updated")


if __name__ == "__main__":
    main(sys.argv[1:])
