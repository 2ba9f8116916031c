"""Functions in C made from a model's operations: registered one by one, compiled together when the first is wanted."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import subprocess
import tempfile
from pathlib import Path
from threading import Lock
from typing import Any

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.c.print_c import PRELUDE

FLAGS = (*native.FLAGS, "-ffp-contract=off", "-fno-trapping-math", "-fwrapv", "-fopenmp-simd")
MOST = 64  # functions that are compiled at once

_texts: dict[str, str] = {}
_known: dict[str, Any] = {}
_lock = Lock()


def register(body: str) -> str:
    """The name of the function with a body; equal bodies are one function."""
    name = f"map_{hashlib.sha256(body.encode()).hexdigest()[:24]}"
    with _lock:
        _texts.pop(name, None)  # the last one registered is the last
        _texts[name] = body
    return name


def source(name: str) -> str:
    """A file in C with a registered function alone."""
    return PRELUDE + _written(name, _texts[name])


def _written(name: str, body: str) -> str:
    return f"void {name}(const int64_t *sizes, void *const *p) {{\n{body}\n}}\n"


def function(name: str, compiles: bool = True) -> Any:
    """A registered function, compiled with those that were registered last; ``None`` where that fails, or is not to be done."""
    with _lock:
        if name not in _known and compiles:
            others = itertools.islice((n for n in reversed(_texts) if n not in _known and n != name), MOST - 1)
            batch = {n: _texts[n] for n in sorted((name, *others))}
            _known.update(dict.fromkeys(batch))
            _known.update(_compile(batch))
        return _known.get(name)


def compile_waiting() -> None:
    """Compile the functions that were registered last and wait."""
    waiting = next((n for n in reversed(_texts) if n not in _known), None)
    if waiting is not None:
        function(waiting)


def _compile(bodies: dict[str, str]) -> dict[str, Any]:
    text = PRELUDE + "".join(map(_written, bodies, bodies.values()))
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
