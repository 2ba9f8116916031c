"""Kernels in C: compiled once per machine with the compiler that is there, and kept in the user's cache.

They do what torch's operators do not: clamps that keep a NaN in the epilogue of a convolution, no set-up per call. Without a
compiler (or with ``TAPESTRY_NATIVE=0``) everything runs on torch's operators instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path

from tapestry import flags

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-pthread")
TIMEOUT = 120  # seconds for the compiler
_SOURCES = Path(__file__).parent
_PLACE, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Conv(ctypes.Structure):
    """``Conv`` of conv.h: sizes, and strides in elements."""

    _fields_ = [
        *((name, _PLACE) for name in (
            "images", "groups", "channels", "features",
            *(f"{of}_{axis}" for of in ("in", "out", "kernel", "stride", "pad", "dilation") for axis in "dhw"),
            *(f"{of}_{step}" for of in "xyr" for step in ("image", "frame", "row", "pixel")), "clamped",
        )), ("low", ctypes.c_float), ("high", ctypes.c_float), ("then", _POINTER),
    ]  # fmt: skip


class Buffers(ctypes.Structure):
    """``Buffers`` of conv.h: addresses."""

    _fields_ = [(name, _POINTER) for name in ("x", "w", "bias", "residual", "zeros", "y")]


class Attention(ctypes.Structure):
    """``Attention`` of attention.c: sizes, and strides in elements."""

    _fields_ = [
        *((name, _PLACE) for name in ("outer", "inner", "group", "rows", "keys", "depth")),
        *((name, _PLACE * n) for name, n in (("q", 3), ("k", 3), ("v", 3), ("mask", 4), ("out", 3), ("other", 3))),
        ("normal", _PLACE), ("scale", ctypes.c_float),
        *((name, _PLACE) for name in ("crossed", "columns", "turned")),
    ]  # fmt: skip


class Heads(ctypes.Structure):
    """``Heads`` of attention.c: addresses."""

    _fields_ = [
        *((name, _POINTER) for name in (
            "q", "k", "v", "mask", "out", "other", "score", "reads",
        )),
        ("count", _PLACE),
    ]  # fmt: skip


MOST_AXES = 6


class Copy(ctypes.Structure):
    """``Copy`` of copy.c: sizes, and strides in cells."""

    _fields_ = [("rank", _PLACE), ("bytes", _PLACE), *((name, _PLACE * MOST_AXES) for name in ("extent", "from", "to"))]


class Copied(ctypes.Structure):
    """``Copied`` of copy.c: addresses."""

    _fields_ = [("x", _POINTER), ("y", _POINTER), ("places", _POINTER * MOST_AXES)]


class Recurrence(ctypes.Structure):
    """``Recurrence`` of recurrence.c."""

    _fields_ = [
        *((name, _PLACE) for name in ("steps", "ways", "batch", "hidden", "gates", "early")), ("packed", _PLACE * 2),
        ("reversed", _PLACE), ("before", _POINTER), ("after", _POINTER),
    ]  # fmt: skip


class Sequences(ctypes.Structure):
    """``Sequences`` of recurrence.c: addresses."""

    _fields_ = [
        (name, _POINTER)
        for name in ("gates", "early", "late", "bias", "peepholes", "state", "cell", "shown", "last", "last_cell")
    ]


class Step(ctypes.Structure):
    """``Step`` of run.c: a kernel, the addresses of its sizes and buffers, and in how many parts of what time it is done."""

    _fields_ = [
        *((name, _POINTER) for name in ("kernel", "sizes", "buffers")),
        *((name, _PLACE) for name in ("units", "nanoseconds", "timed", "parts")),
    ]


_KERNELS = {
    "copy": (Copy, Copied), "recurrence": (Recurrence, Sequences),
    **dict.fromkeys(("conv", "depthwise", "winograd"), (Conv, Buffers)),
    **dict.fromkeys(("attention", "scored", "attend"), (Attention, Heads)),
}  # fmt: skip
"""Kernels of the library, with what each takes."""
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    **{f"tapestry_{n}": (None, (*map(ctypes.POINTER, given), _PLACE, _PLACE)) for n, given in _KERNELS.items()},
    "tapestry_lanes": (_PLACE, ()),
    "tapestry_packed_size": (_PLACE, (_PLACE, _PLACE)),
    "tapestry_pack": (None, (_POINTER, _POINTER, _PLACE, _PLACE)),
    "tapestry_run": (None, (ctypes.POINTER(Step), _PLACE, _PLACE)),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels; ``None`` where they cannot be had, and torch's operators do."""
    if not flags.native_kernels():
        return None
    try:
        out = ctypes.CDLL(str(compiled([p for p in sorted(_SOURCES.iterdir()) if p.suffix in (".c", ".h")], FLAGS)))
    except (OSError, subprocess.SubprocessError):
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(out, name)
        function.restype, function.argtypes = result, arguments
    return out


@functools.cache
def random_words() -> ctypes.CDLL | None:
    """``tapestry_philox`` of random/philox.c; ``None`` where it cannot be had, and numpy does it."""
    if not flags.native_kernels():
        return None
    try:
        out = ctypes.CDLL(str(compiled(sorted((_SOURCES / "random").glob("*.c")), FLAGS)))
    except (OSError, subprocess.SubprocessError):
        return None
    word = ctypes.c_uint32
    out.tapestry_philox.restype = None
    out.tapestry_philox.argtypes = (ctypes.c_uint64, word, word, _PLACE, _PLACE, _POINTER, _POINTER)
    return out


def compiled(sources: Sequence[Path], options: Sequence[str]) -> Path:
    """The shared library of some files for this machine, compiled unless it is there.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it fails.
    """
    path = cached(options, *(p.read_bytes() for p in sources)).with_suffix(".so")
    if present(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = path.with_suffix(".lock")
    with place.open("w") as lock:
        with suppress(OSError):  # a file system without locks: processes may compile the same
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not present(path):
                _compile([p for p in sources if p.suffix == ".c"], options, path)
            place.unlink(missing_ok=True)
        finally:
            with suppress(OSError):  # at once: a process that was forked meanwhile may have the file open for long
                fcntl.flock(lock, fcntl.LOCK_UN)
    return path


def _compile(sources: Sequence[Path], options: Sequence[str], path: Path) -> None:
    """Several files are compiled at the same time; the library appears whole."""

    def run(*more: str) -> None:
        line = [*shlex.split(flags.c_compiler()), *options, *more]
        subprocess.run(line, check=True, capture_output=True, timeout=TIMEOUT)  # noqa: S603

    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        new, files = Path(scratch) / path.name, list(map(str, sources))
        if len(files) > 1:
            objects = [str(Path(scratch) / f"{k}.o") for k in range(len(files))]
            with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool:
                list(pool.map(run, repeat("-c"), repeat("-o"), objects, files))
            files = objects
        run("-o", str(new), *files)
        new.replace(path)


def cached(options: Sequence[str], *texts: bytes) -> Path:
    """The place in the user's cache for what the compiler makes of texts on this machine."""
    command = [*shlex.split(flags.c_compiler()), *options, platform.machine(), _processor()]
    digest = hashlib.sha256(b"".join(("\0".join(command).encode(), *texts)))
    return flags.cache_folder() / "native" / digest.hexdigest()[:32]


def present(library: Path) -> bool:
    """Whether there is a library, of this user's making."""
    return library.is_file() and library.stat().st_uid == os.getuid()


def _processor() -> str:
    """What ``-march=native`` depends on: the processor's features, as the system lists them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), lines[0] if lines else "")
