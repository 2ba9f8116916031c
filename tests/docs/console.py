"""Running a page: its commands in a folder of its own, and their output compared with what the page shows.

The folder looks like a fresh clone: links to the repository's folders, an environment in ``.venv``, nothing else. Output is what an
80-column terminal would show, without colours.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import Block, Page
from tests.support.paths import ROOT

PACKAGE = ".package"  # what an editable install has on its path, and nothing else
CLONE = ("tapestry", "examples", "bench", "docs", "tests", "Makefile", "pyproject.toml", "constraints.txt", "README.md")
"""What a working folder links to."""

AROUND = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TRITON_INTERPRET", "TAPESTRY_TOPOLOGY")
"""What a make or a test around a page has set, and its reader has not."""

VOLATILE = (
    (r"\b\d+\.\d+ ms(, tput \d[\d.]*| at memory)", "… ms"),  # latencies of stages that were run
    (r"\b\d+(\.\d+)? s\b", "… s"),  # seconds on this machine's clock
    (r"\b(lift|simplify|search|verify|codegen|total) \d+\.\d+", r"\1 …"),  # the compiler's own seconds
    (r"\b\d+\.\d{3}(?=  \S)", "…"),  # the column of seconds of --print-passes
    (r"\b\d(\.\d+)?e-(0[6-9]|1\d)\b", "…e-…"),  # errors of rounding
    (r"\b[0-9a-f]{12,}\b", "…"),  # hashes
    (r"[ \t]+$", ""),
)
"""What may differ between two runs of one command: (pattern, what stands for it). Nothing else may."""


RARE = r"^(\d+ s: |measuring this machine ).*\n"
"""What is said of a search that takes long, and before ``--topology auto`` is measured: on a slow machine, and once on each."""


def normal(text: str) -> str:
    """``text`` with everything volatile replaced."""
    for pattern, stand_in in VOLATILE:
        text = re.sub(pattern, stand_in, text, flags=re.MULTILINE)
    return text


@dataclass(frozen=True)
class Command:
    """One command of a console block, and the output that the page shows for it."""

    line: str
    shown: str


def commands(text: str) -> list[Command]:
    """The commands of a console block; a line that ends in a backslash goes on in the next one."""
    out: list[Command] = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        n = next((k for k, x in enumerate(lines) if not x.endswith("\\\n")), len(lines) - 1) + 1
        out.append(Command("".join(lines[:n]).rstrip("\n"), "".join(lines[n:])))
    return out


def workplace(folder: Path) -> Path:
    """Make ``folder`` look like a fresh clone after ``make setup``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CLONE:
        (folder / name).symlink_to(ROOT / name)
    environment = Path(sys.executable).parent.parent
    (folder / ".venv").mkdir()
    for part in environment.iterdir():
        if part.name != ".installed":
            (folder / ".venv" / part.name).symlink_to(part)
    (folder / ".venv" / ".installed").touch()
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "tapestry").symlink_to(ROOT / "tapestry")
    return folder


def run(command: list[str], folder: Path) -> str:
    """Run a command in ``folder`` and return what it prints; an exit status other than 0 is an error."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(folder / PACKAGE), "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    for name in AROUND:
        env.pop(name, None)
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    if done.returncode:
        raise AssertionError(f"status {done.returncode}: {command[-1]}\n{done.stdout[-4000:]}")
    said = re.sub(RARE, "", done.stdout, flags=re.MULTILINE)
    return said.replace(f"{folder}/", "")


def console(block: Block, folder: Path) -> str:
    """Run a console block; its text with the real output, where that differs in more than what is volatile."""
    out: list[str] = []
    for c in commands(block.text):
        real = run(["bash", "-c", c.line], folder)
        if real and not real.endswith("\n"):
            real += "\n"
        out.append(f"$ {c.line}\n{c.shown if normal(real) == normal(c.shown) else _tidy(real)}")
    return "".join(out)


def _tidy(text: str) -> str:
    return "\n".join(x.rstrip() for x in text.splitlines()) + "\n" if text else ""


def replay(page: Page, folder: Path, blocks: Callable[[Block], bool] = lambda b: True) -> Iterator[tuple[Block, str]]:
    """Do what a page says, or some of its blocks, in order; yields every console block with the text that it should have."""
    workplace(folder)
    for block in filter(blocks, page.blocks):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
        elif block.info == "python":
            run([sys.executable, "-c", block.text], folder)
        elif block.language == "console":
            yield block, console(block, folder)
