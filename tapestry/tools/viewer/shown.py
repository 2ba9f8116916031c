"""Pages of builds in memory: in a notebook, in a file, in a browser."""

from __future__ import annotations

import html
import tempfile
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapestry.build.atomic import write_text
from tapestry.build.store import Build
from tapestry.tools.viewer.build_data import Source
from tapestry.tools.viewer.saved import of_sources

Parts = tuple[Build, Mapping[str, int], Sequence[Mapping[str, Any]], bytes]
"""A build with the laws and the evidence of its certificate, and its log of rewrites."""


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """One HTML file that needs nothing else."""

    html: str

    def save(self, file: str | Path) -> Path:
        """Write it, whole or not at all."""
        write_text(Path(file), self.html)
        return Path(file)

    def open(self) -> Path:
        """Show it in the browser, from a temporary file."""
        with tempfile.NamedTemporaryFile("w", suffix=".html", delete=False, encoding="utf-8") as f:
            f.write(self.html)
        webbrowser.open(Path(f.name).as_uri())
        return Path(f.name)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page in a frame of its own, which can reach nothing of the notebook."""
        sandbox = "allow-scripts allow-downloads"
        frame = f'width="100%" height="760" style="border: 1px solid #ccc" sandbox="{sandbox}"'
        return f'<iframe {frame} srcdoc="{html.escape(self.html)}"></iframe>'


def view(builds: Sequence[Parts]) -> Page:
    """The page of one build, or of two beside each other."""
    names = [Path(b.model).stem for b, *_ in builds]
    names = names if len(set(names)) == len(names) else [f"{n} {k + 1}" for k, n in enumerate(names)]
    return Page(
        of_sources(
            [
                Source(build=b, name=n, laws=laws, evidence=evidence, rewrites=rewrites)
                for (b, laws, evidence, rewrites), n in zip(builds, names, strict=True)
            ]
        )
    )
