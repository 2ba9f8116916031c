"""What a session, the process that starts its ranks, and the ranks say to each other."""

from __future__ import annotations

import msgspec


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What the launcher is to start; descriptors by number."""

    folder: str
    processes: int
    threads: int | None
    timeout: float
    sockets: list[int]
    memory: int
    report: int


class Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One step, or the end; values of the host are in it, arrays in the shared memory.

    ``sizes`` says what symbols with several are.
    """

    end: bool = False
    sizes: tuple[int, ...] = ()
    wanted: list[str] = []
    hosted: dict[str, str] = {}


class Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A rank has done its part; rank 0 has the values of the host."""

    hosted: dict[str, str] = {}
