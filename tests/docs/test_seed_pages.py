"""docs/seeds.md: the pages of the founding documents, and what is counted of them."""

from __future__ import annotations

import pytest

from tests.docs.seed_pages import Counts, counts, seed_pages, title
from tests.support.paths import ROOT

HEADED = """# Slides, statement by statement

### 1. A ring of four

**done**: `tapestry tiles`

```console
$ echo "### 9. no heading, **wrong** nowhere"
```

### 2. A torus

**wrong there**: it is not symmetric

### 3. A hypercube

**not done**: nobody asked
"""
BOLD = """# PopRT

**"The latency."** The same is printed. *Not what a pipeline gives*: it is more.

**"The nodes."** As they are. Not done: their names.
"""
TABLED = """# Options

> There are two.

| PopRT | here |
| --- | --- |
| `--one` | `--uno` |
| `--two` | none. Not done: it |

| other | table |
|---|---|
| of | ours |
"""
QUOTED = """# Blocks

**Wrong in the document** are some.

> All of it
> splits.

So it does.

> The stop is n.

**Wrong in the document**: it is n - 1.

## What is not done

- One thing.
- Another.
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (HEADED, Counts(3, 1, 1)),
        (QUOTED, Counts(2, 1, 2)),
        (BOLD, Counts(2, 1, 1)),
        (TABLED, Counts(3, 0, 1)),
        ("# Nothing\n", Counts(0, 0, 0)),
    ],
)
def test_statements_are_counted(text: str, found: Counts):
    assert counts(text) == found


def test_titles_are_the_documents():
    assert title(HEADED) == "Slides"


@pytest.mark.parametrize("page", [pytest.param(p, id=p.stem) for p in seed_pages()])
def test_every_page_is_in_the_index_and_has_statements(page):
    index = (ROOT / "docs" / "seeds.md").read_text()
    assert f"(seeds/{page.name})" in index
    assert counts(page.read_text()).statements > 5
