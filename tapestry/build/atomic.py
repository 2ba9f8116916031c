"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tapestry.errors import BuildError, TapestryError


@contextmanager
def _told(path: Path, temporary: Path) -> Generator[None]:
    """What cannot be written is told of its own place: many a message names none, or one that is gone by then."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)  # (numpy gives no number)
        if not (full if e.filename is None else str(e.filename).startswith(str(temporary))):
            raise
        raise TapestryError("cannot be written", where=str(path), why=e.strerror or str(e), hint="a place with room") from e


@contextmanager
def new_file(path: Path) -> Generator[Path]:
    """A temporary file beside ``path`` that takes its place in one step, once it has been filled."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with _told(path, temporary):
            yield temporary
            temporary.chmod(0o644)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file of text, whole or not at all."""
    with new_file(path) as temporary:
        temporary.write_text(text, "utf-8")


def write_json(path: Path, document: Any) -> None:
    """Write a document for people and programs, whole or not at all."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def equal_sizes(a: Path, b: Path) -> bool:
    """Whether both files are there and of one size."""
    return a.is_file() and b.is_file() and a.stat().st_size == b.stat().st_size


def check_place(folder: Path, mark: str) -> None:
    """Refuse a place that holds something that `new_folder` would not replace.

    Raises:
        BuildError: it does.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / mark).is_file())):
        raise BuildError("the output exists and was not written by this command", where=str(folder), hint="another -o")


@contextmanager
def new_folder(folder: Path, mark: str) -> Generator[Path]:
    """An empty folder that takes the place of another one in one step, once it has been filled.

    Raises:
        BuildError: the place holds something else than a folder with the file ``mark`` in it, or an empty one.
    """
    folder = Path(os.path.realpath(folder))  # through a link: an exchange would leave the link beside the target
    check_place(folder, mark)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with _told(folder, temporary):
            yield temporary
            temporary.chmod(0o755)
            _swap(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(new: Path, old: Path) -> None:
    """Put ``new`` in the place of ``old`` (which then stands where ``new`` was)."""
    if not old.exists():
        os.rename(new, old)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, exchange = -100, 2
    if hasattr(libc, "renameat2") and libc.renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), exchange) == 0:
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{old.name}.", dir=old.parent)) / "old"
    os.rename(old, aside)
    os.rename(new, old)
    shutil.rmtree(aside.parent, ignore_errors=True)
