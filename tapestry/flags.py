"""The only place that reads or sets the environment."""

from __future__ import annotations

import os
from pathlib import Path


def debug_level() -> int:
    """``TAPESTRY_DEBUG``: 1 every pass with its seconds and sizes, 2 the laws between passes, 3 the IR after each pass."""
    value = os.environ.get("TAPESTRY_DEBUG", "0")
    return int(value) if value.isdigit() else 0


def native_kernels() -> bool:
    """``TAPESTRY_NATIVE=0``: no kernels compiled from C; the CPU target uses torch's operators only."""
    return os.environ.get("TAPESTRY_NATIVE", "1") != "0"


def c_compiler() -> str:
    """``CC``: the command of the C compiler, with its first arguments."""
    return os.environ.get("CC") or "cc"


def check_messages() -> bool:
    """``TAPESTRY_CHECK_MESSAGES=1``: what ranks send each other goes with headers, which are checked."""
    return os.environ.get("TAPESTRY_CHECK_MESSAGES", "0") != "0"


def before_torch() -> None:
    """What torch reads when it is imported, unless the user said otherwise.

    Idle OpenMP threads sleep: spinning ones on busy cores make small operators up to sixteen times slower. torch's network code
    does not warn of peers that are gone: we say who and why, once.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def torchrun() -> dict[str, int]:
    """Rank, number on its host, world size and restart count that torchrun gives to a process; a world of one without it."""
    names = {"rank": "RANK", "local": "LOCAL_RANK", "world": "WORLD_SIZE", "restart": "TORCHELASTIC_RESTART_COUNT"}
    if "WORLD_SIZE" not in os.environ:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            os.environ.setdefault(name, value)
    return {key: int(os.environ.get(name, "0")) for key, name in names.items()}


def cache_folder() -> Path:
    """Where what was measured on this machine is kept: ``TAPESTRY_CACHE``, else ``tapestry`` in the user's cache folder."""
    own = os.environ.get("TAPESTRY_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tapestry"


def interpreted() -> dict[str, str]:
    """The environment of a process in which Triton interprets kernels on the CPU (it decides when it is imported)."""
    return {**os.environ, "TRITON_INTERPRET": "1"}


def interprets() -> bool:
    """Whether Triton interprets kernels in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"
