"""Running `tapestry` inside the test process."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from functools import lru_cache
from pathlib import Path

from tapestry import cli
from tests.support.small_models import save

TRACE = "Traceback (most recent call last)"


def run(*argv: str | Path) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([str(a) for a in argv])
        except SystemExit as e:  # argparse
            status = int(e.code or 0)
    assert TRACE not in err.getvalue()
    return status, out.getvalue(), err.getvalue()


def document(*argv: str | Path) -> dict:
    """The one JSON document of a command that must succeed."""
    status, out, err = run(*argv, "--json")
    assert status == 0, err
    return json.loads(out)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@lru_cache(maxsize=1)
def attention_build() -> Path:
    """A build directory that tests read and copy."""
    folder = Path(tempfile.mkdtemp(prefix="tapestry-build-")) / "build"
    status, _, err = run("compile", save("attention"), "-o", folder, "--devices", "2", "-q")
    assert (status, err) == (0, "")
    return folder
