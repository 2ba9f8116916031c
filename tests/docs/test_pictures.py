"""The drawings of the pages are those that the program makes today."""

from __future__ import annotations

import re

import pytest

from tests.docs import pictures
from tests.docs.pages import pages


@pytest.mark.slow
def test_drawings_are_those_of_today(tmp_path):
    made = pictures.drawings(pictures.plans(tmp_path))
    stale = [n for n, picture in made.items() if (pictures.IMAGES / f"{n}.svg").read_text() != picture]
    assert stale == [], "python -m tests.docs.pictures"


def test_every_picture_is_shown_somewhere():
    shown = {m[1] for p in pages() for m in re.finditer(r"images/([\w-]+)\.(?:svg|png)", p.text)}
    assert {p.stem for p in pictures.IMAGES.iterdir()} == shown
