"""Ctrl-C: whatever a command is at, it ends with status 130, says no more than that, and leaves nothing half-written.

A signal becomes a `KeyboardInterrupt`, so that temporary files go; build directories appear in one step. A watching thread ends
the process where that comes to nothing: in a long call of C++ code, or in code that takes exceptions of every kind for its own.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

STATUS, PATIENCE = 130, 1.5
MESSAGE = b"\ninterrupted: ending the search with the best plan so far (Ctrl-C again to abort)\n"
_raised: threading.Event | None = None  # in the process of a command: whether it has been interrupted
_asking = False  # the first signal only asks the search to end


def at_start() -> None:
    """Before anything else is imported: in the process of a command an interrupt ends it at once, as nothing is written yet."""
    words = getattr(sys, "argv", None) or [""]
    name = sys.orig_argv[-len(words)] if words[0] == "-m" else os.path.basename(words[0])
    main = threading.current_thread() is threading.main_thread()
    if name == "tapestry" and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def leave(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    """End the process as it is."""
    del number, frame
    os.write(2, b"interrupted\n")
    os._exit(STATUS)


def abort(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    """The first signal unwinds, a second one does not wait for that."""
    if _raised is not None:
        if _raised.is_set():
            leave(number, frame)
        _raised.set()
    raise KeyboardInterrupt


def ending(command: Callable[[], int]) -> int:
    """The status of a command that is all that the process does."""
    global _raised
    _raised, status = threading.Event(), 0
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ours,), daemon=True).start()
    sys.unraisablehook = _unraisable
    try:
        signal.signal(signal.SIGINT, abort)
        status = command()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has ended; Python's own end would print a traceback
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not _raised.is_set():
            raise
    if _raised.is_set():
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] (removes temporary folders)
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(STATUS)  # threads may be computing still
    return status


def _watch(signals: socket.socket) -> None:
    seen = 0
    while number := signals.recv(1):
        ours = getattr(signal.getsignal(signal.SIGINT), "__module__", "") == __name__
        if number[0] == signal.SIGINT and ours:
            seen += 1
            if seen > _asking:
                time.sleep(PATIENCE)
                leave()


def _unraisable(what: Any) -> None:
    if _raised is None or not _raised.is_set():
        sys.__unraisablehook__(what)


class Interrupts:
    """Tell it each stage as it begins; `asked` is set by the first Ctrl-C during the search, the second one aborts."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def stage(self, name: str) -> None:
        """A stage begins."""
        global _asking
        _asking = name == "search"

    @contextmanager
    def listening(self) -> Generator[Interrupts]:
        """Handle SIGINT until the end of the block (only the main thread can; elsewhere nothing changes)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            self.stage("")
            signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not _asking or self.asked.is_set():
            abort(number, frame)
        self.asked.set()
        os.write(2, MESSAGE)
