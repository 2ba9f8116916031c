"""Errors that a user of Tapestry can cause and act on.

A broken invariant of our own is an ``AssertionError``; everything that the user's model, command line or build
directory can cause is a `TapestryError`, which the command line prints without a traceback (exit status 2).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches

from tapestry.options import in_python
from tapestry.system import quoting


class TapestryError(Exception):
    """What went wrong, where, why (a witness), and what to try.

    Args:
        what: one sentence, without a full stop.
        where: the ONNX node, IR line, file or command-line option concerned.
        why: the concrete point, value or number that shows it.
        hint: what the user may try.
    """

    status = 2  # of the command line

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.hint = what, where, why, hint
        self.pointer = ""  # a JSON pointer (RFC 6901) to the part of a document that it is of

    def __str__(self) -> str:
        return in_python(self.text())

    def text(self) -> str:
        """The error as the command line prints it, where options are flags."""
        lines = [self.what if not self.where else f"{self.where}: {self.what}"]
        if self.pointer:
            lines.append(f"  at: {self.pointer}")
        if self.why:
            lines.append(f"  because: {self.why}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return quoting.lines("\n".join(lines))


@contextmanager
def inside(pointer: str) -> Generator[None]:
    """Errors from here on are of a part of a document: its JSON pointer comes before the one that they have."""
    try:
        yield
    except TapestryError as e:
        e.pointer = pointer + e.pointer
        raise


def pointer_of(message: str) -> str:
    """The JSON pointer that msgspec's message names as a path, ``$.steps[12].reads[0]``; "" where it names none."""
    path = re.search(r"at `\$(.*)`$", message)
    return "".join(f"/{a or b}" for a, b in re.findall(r"\.(\w+)|\[(\d+)\]", path[1])) if path else ""


def similar(word: str, known: Iterable[str], most: int = 12) -> str:
    """What to try in place of a word that is not known: the one that it resembles, else those that there are, if few."""
    there = list(known)
    close = get_close_matches(word, there, 1)
    return f"'{close[0]}' is similar" if close else f"one of {', '.join(there)}" if 0 < len(there) <= most else ""


def some(n: int, what: str) -> str:
    """``1 weight``, ``1,024 weights``."""
    return f"{n:,} {what}" + ("" if n == 1 else "es" if what.endswith(("ch", "ss")) else "s")


class ModelError(TapestryError):
    """The ONNX file is malformed, unsafe or not supported."""


class TextError(TapestryError):
    """IR text does not parse."""


class PlanError(TapestryError):
    """No plan meets what was asked (a pin that is impossible, memory that cannot suffice)."""


class BuildError(TapestryError):
    """A build directory is missing, malformed, or not what its hashes say."""


def damaged(what: str, where: object) -> BuildError:
    """A build, or a file of one, that does not say what it should."""
    return BuildError(what, where=str(where), hint="compile the model again")


class PluginError(TapestryError):
    """A plug-in is missing, does not load, or is not what it should be; names its package."""


class LawError(TapestryError):
    """A law of the IR is broken.

    Args:
        law: the law's name, as in ``certificate.json``.

    Attributes:
        rewrites: the rules that broke it, as ``rule@result`` where only that result is another one.
    """

    status = 1
    rewrites: frozenset[str] = frozenset()

    def __init__(self, law: str, what: str, *, where: str = "", why: str = "") -> None:
        super().__init__(f"law '{law}' is broken: {what}", where=where, why=why)
        self.law = law


class RunError(TapestryError):
    """A run on several processes failed: which rank, at what step, why."""

    status = 1


def absent(e: ModuleNotFoundError) -> TapestryError:
    """What to say where a package is not installed that a command needs, as a GPU's compiler or the reference.

    Raises:
        ModuleNotFoundError: the module is one of ours.
    """
    package = (e.name or "").partition(".")[0]
    if package in ("", "tapestry"):
        raise e
    return TapestryError(f"the Python package '{package}' is not installed here", hint=f"pip install {package}")


@contextmanager
def refusing(kind: type[TapestryError], what: str, where: str, hint: str) -> Generator[None]:
    """The last net under what reads files: whatever they make a library or an assertion say becomes an error of the user's,
    which says where and why and keeps the first exception as its cause.

    Onnx's checker and its inference let through what lifters then stumble over (a scale of the wrong length, an axis that is
    none); so an assertion does not tell a bug of ours from a fault of the file.
    """
    try:
        yield
    except (TapestryError, MemoryError, OSError):
        raise
    except ModuleNotFoundError as e:
        raise absent(e) from None
    except Exception as e:
        if "allocate memory" in str(e) or type(e).__name__ == "OutOfMemoryError":  # torch has no one type for it
            raise MemoryError from e
        why = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise kind(what, where=where, why=why, hint=hint) from e


def unusable(build: str) -> AbstractContextManager[None]:
    """The net under what reads a build that nobody verified."""
    hint = "tapestry verify, and compile the model again; if that does not help, it is a bug"
    return refusing(BuildError, "the build cannot be used", build, hint)
