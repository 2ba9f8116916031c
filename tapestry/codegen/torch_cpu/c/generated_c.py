"""Functions in C made from a model's operations: registered one by one, compiled together when the first is wanted."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from pathlib import Path
from threading import Lock
from typing import Any

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.c.print_c import PRELUDE

FLAGS = (*native.FLAGS, "-ffp-contract=off", "-fno-trapping-math", "-fwrapv")
MOST = 64  # functions that are compiled at once; the operations beyond run as they would without a compiler

_waiting: dict[str, str] = {}
_known: dict[str, Any] = {}
_lock = Lock()


def register(body: str) -> str:
    """The name of the function with a body; equal bodies are one function."""
    name = f"map_{hashlib.sha256(body.encode()).hexdigest()[:24]}"
    with _lock:
        if name not in _known:
            _waiting[name] = body
    return name


def function(name: str, compiles: bool = True) -> Any:
    """A registered function, compiled with all others that wait; ``None`` where that fails, or is not to be done."""
    with _lock:
        if name not in _known and not compiles:
            return None
        if name not in _known:
            now = dict(sorted(_waiting.items())[:MOST])
            _known.update(dict.fromkeys(_waiting))
            _waiting.clear()
            _known.update(_compile(now))
        return _known[name]


def compile_waiting() -> None:
    """Compile every function that waits."""
    waiting = next(iter(_waiting), None)
    if waiting is not None:
        function(waiting)


def _compile(bodies: dict[str, str]) -> dict[str, Any]:
    text = PRELUDE + "".join(f"void {n}(const int64_t *sizes, void *const *p) {{\n{b}\n}}\n" for n, b in bodies.items())
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "maps.c"
            source.write_text(text)
            library = ctypes.CDLL(str(native.compiled([source], (*FLAGS, "-lm"))))
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {n: getattr(library, n) for n in bodies}
    for f in found.values():
        f.restype = None
    return found
