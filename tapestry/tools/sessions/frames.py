"""Frames on a stream socket: ``u32`` length of the header, little-endian; the header, in JSON.

Nothing that is read is executed, and nothing is allocated before its size is known to be right.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from tapestry.errors import RunError, TapestryError

T = TypeVar("T", bound=msgspec.Struct)
LENGTH = struct.Struct("<I")
MAX_HEADER = 1 << 20  # bytes


class Closed(TapestryError):
    """The other side has gone, or what it sends is no frame."""


class Fault(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What went wrong, as a `TapestryError` says it."""

    what: str
    where: str = ""
    why: str = ""
    hint: str = ""

    @property
    def error(self) -> RunError:
        """The same as an error."""
        return RunError(self.what, where=self.where, why=self.why, hint=self.hint)


def send(to: socket.socket, header: msgspec.Struct) -> None:
    """Send a frame.

    Raises:
        Closed: nobody is there.
    """
    text = msgspec.json.encode(header)
    if len(text) > MAX_HEADER:
        raise TapestryError(f"a header of {len(text):,} bytes, where {MAX_HEADER:,} are allowed")
    try:
        to.sendall(LENGTH.pack(len(text)) + text)
    except OSError as e:
        raise Closed(f"the other side has gone: {e.strerror or e}") from None


def receive(at: socket.socket, kind: type[T]) -> T | None:
    """The next header; ``None`` where the other side has closed between two frames.

    Raises:
        Closed: it is not such a header, or ends in the middle.
    """
    length = bytearray(LENGTH.size)
    if not fill(at, memoryview(length), may_end=True):
        return None
    (count,) = LENGTH.unpack(length)
    if not 0 < count <= MAX_HEADER:
        raise Closed(f"a header of {count:,} bytes, where {MAX_HEADER:,} are allowed")
    text = bytearray(count)
    fill(at, memoryview(text))
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as e:
        raise Closed(f"not a header of this protocol: {e}") from None


def fill(at: socket.socket, there: memoryview, may_end: bool = False) -> bool:
    """Receive exactly so many bytes; False where there is none, and none need be.

    Raises:
        Closed: there are fewer.
    """
    done = 0
    while done < len(there):
        try:
            count = at.recv_into(there[done:])
        except OSError as e:
            raise Closed(f"the other side has gone: {e.strerror or e}") from None
        if not count:
            if may_end and not done:
                return False
            raise Closed("the other side has closed in the middle of a frame")
        done += count
    return True
