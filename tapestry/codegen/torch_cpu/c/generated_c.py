"""Functions in C made from a model's operations: registered one by one, compiled together when the first is wanted.

The user's cache finds a function by its name, whatever it was compiled together with.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.c.print_c import PRELUDE

FLAGS = (*native.FLAGS, "-ffp-contract=off", "-fno-trapping-math", "-fwrapv", "-fopenmp-simd")
READ = re.compile(r"\bp\d+\[")
MOST = 64  # functions that are compiled at once

BRANCHES = """
/* gcc 12 loses values of `i >= 2 ? p[2 * i] : 0` beside `i >= 2 ? p[2 * i + 1] : 0`, where it loads both under one mask. */
#if defined(__GNUC__) && !defined(__clang__)
#define BRANCHES __attribute__((optimize("no-tree-loop-if-convert")))
#else
#define BRANCHES
#endif
"""

_texts: dict[str, str] = {}
_known: dict[str, Any] = {}
_lock = Lock()


def register(body: str, compiles: bool = True) -> str:
    """The name of the function with a body; equal bodies are one function.

    Args:
        compiles: whether it may be compiled; otherwise it is there already, or is not used.
    """
    name = f"map_{hashlib.sha256(body.encode()).hexdigest()[:24]}"
    if not compiles:
        return name
    with _lock:
        _texts.pop(name, None)  # the last one registered is the last
        _texts[name] = body
    return name


def _c_function(name: str, body: str) -> str:
    return f"void {name}(const int64_t *sizes, void *const *p, int64_t part, int64_t parts) {{\n{body}\n}}\n"


def reads_under_conditions(body: str) -> bool:
    """Whether a buffer is read in an arm of a ``(test ? one : other)``; the compiler may make masked loads of that."""
    return any(READ.search(_arms(body, m.end())) for m in re.finditer(r" \? ", body))


def _arms(body: str, at: int) -> str:
    """The arms of a conditional, up to the parenthesis that closes it or the end of its statement."""
    depth = 0
    for k in range(at, len(body)):
        depth += {"(": 1, ")": -1}.get(body[k], 0)
        if depth < 0 or body[k] == ";":
            return body[at:k]
    return body[at:]


def function(name: str, compiles: bool = True) -> Any:
    """A registered function, compiled with those that were registered last; ``None`` where that fails, or is not to be done."""
    with _lock:
        if name not in _known and compiles:
            others = itertools.islice((n for n in reversed(_texts) if n not in _known and n != name), MOST - 1)
            batch = {n: _texts[n] for n in sorted((name, *others))}
            _known.update(dict.fromkeys(batch))
            _known.update(_compile(batch))
        return _known.get(name)


def registered() -> str:
    """A source file of all functions that this process has generated; nothing where there is none."""
    return _file(_texts) if _texts else ""


def compile_waiting() -> None:
    """Compile the functions that were registered last and wait."""
    waiting = next((n for n in reversed(_texts) if n not in _known), None)
    if waiting is not None:
        function(waiting)


def _compile(bodies: dict[str, str]) -> dict[str, Any]:
    places = native.cached((*FLAGS, "-lm"), (BRANCHES + PRELUDE).encode())
    try:
        new = {n: body for n, body in bodies.items() if not native.present(places / n)}
        if new:
            _make(new, places)
        found = {n: getattr(ctypes.CDLL(str(places / n)), n) for n in bodies}
    except (OSError, subprocess.SubprocessError):
        return {}
    for f in found.values():
        f.restype = None
    return found


def _file(bodies: Mapping[str, str]) -> str:
    texts = ("BRANCHES " * reads_under_conditions(body) + _c_function(n, body) for n, body in bodies.items())
    return BRANCHES + PRELUDE + "".join(texts)


def _make(bodies: dict[str, str], places: Path) -> None:
    """Compile functions into one library, and put a link to it at the place of each."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "maps.c"
        source.write_text(_file(bodies))
        library = native.compiled([source], (*FLAGS, "-lm"))
    places.mkdir(exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=places) as scratch:
        for n in bodies:
            link = Path(scratch) / n
            link.symlink_to(library)
            link.replace(places / n)  # another process may do the same
