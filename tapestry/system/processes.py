"""Processes that end with this one, however it ends, and whatever either of them does just then."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import weakref
from collections.abc import Sequence
from typing import Any

_held: set[int] = set()  # the ends of pipes that keep processes alive


def started(command: Sequence[str], pass_fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[Any]:
    """``subprocess.Popen``, of a process that has no life of its own.

    The parent's death signal would not do: it is sent when the thread is gone that started the process.
    """
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(command, pass_fds=(*pass_fds, theirs), **options)  # noqa: S603 (our own words)
        _held.add(ours)
        weakref.finalize(process, _release, ours)
        _end_with_writer(theirs, process.pid)
    except BaseException:
        if ours not in _held:
            os.close(ours)
        raise
    finally:
        os.close(theirs)
    return process


def end_with_parent() -> None:
    """In a process that multiprocessing has spawned."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    _end_with_writer(parent.sentinel, os.getpid())


def _end_with_writer(pipe: int, process: int) -> None:
    """Have the kernel kill a process that holds the reading end of a pipe when nobody has the other one any more."""
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere it ends when it next reads what it is asked
        fcntl.fcntl(pipe, fcntl.F_SETOWN, process)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _release(end: int) -> None:
    if end in _held:
        _held.remove(end)
        os.close(end)


def _forget() -> None:
    """In a fork: the processes are its parent's."""
    for end in tuple(_held):
        _release(end)


os.register_at_fork(after_in_child=_forget)
