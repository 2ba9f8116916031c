"""Safety of the data a model refers to: nothing outside the model's folder is opened, and every size is checked first.

Each path component is opened with ``O_NOFOLLOW`` relative to its parent's descriptor, so that a symbolic link anywhere
in the path is refused and the check and the use are of one and the same file (no window between them).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto

from tapestry.errors import ModelError

KEYS = frozenset({"location", "offset", "length", "checksum"})
TYPED_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
PACKED_BITS: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}
LIMIT = 1 << 62  # bytes; a product of dims beyond it is a lie about some file, never a tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes are, relative to the model's folder."""

    file: str
    offset: int
    length: int
    checksum: str


def _refuse(tensor: str, why: str, hint: str = "export again, with the data file in the model's own folder") -> ModelError:
    return ModelError("cannot read external data", where=f"initializer '{tensor}'", why=why, hint=hint)


def tensor_bytes(t: TensorProto) -> int:
    """Bytes that the tensor's dims and element type call for.

    Raises:
        ModelError: negative or absurd dims, unknown element type.
    """
    if any(d < 0 for d in t.dims):
        raise ModelError("negative dimension", where=f"initializer '{t.name}'", why=f"dims are {list(t.dims)}")
    count = math.prod(t.dims)
    try:
        item = onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
    except (KeyError, TypeError, ValueError):
        raise ModelError("unknown element type", where=f"initializer '{t.name}'", why=f"data_type is {t.data_type}") from None
    if count * item > LIMIT:
        raise ModelError("tensor too large", where=f"initializer '{t.name}'", why=f"dims are {list(t.dims)}")
    return -(-count * PACKED_BITS[t.data_type] // 8) if t.data_type in PACKED_BITS else count * item


def dtype_name(data_type: int) -> str:
    """ONNX's name of an element type; its number where it has none (a damaged file)."""
    return TensorProto.DataType.Name(data_type) if data_type in TensorProto.DataType.values() else f"dtype {data_type}"


def parse_place(t: TensorProto) -> Place:
    """The external-data fields of a tensor, checked as far as is possible without the file.

    Raises:
        ModelError: unknown or repeated keys, unsafe path, negative or non-numeric range, length not dims times itemsize.
    """
    fields: dict[str, str] = {}
    for entry in t.external_data:
        if entry.key not in KEYS or entry.key in fields:
            raise _refuse(t.name, f"key {entry.key!r} is {'repeated' if entry.key in fields else 'unknown'}")
        fields[entry.key] = entry.value
    location = safe_location(t.name, fields.get("location", ""))
    if t.raw_data or any(len(getattr(t, f)) for f in TYPED_FIELDS):
        raise _refuse(t.name, "the tensor has data of its own as well")
    if t.data_type == TensorProto.STRING:
        raise _refuse(t.name, "strings have no bytes of a fixed length", "keep strings inside the model")
    need = tensor_bytes(t)
    offset = _natural(t.name, "offset", fields.get("offset", "0"))
    length = _natural(t.name, "length", fields["length"]) if "length" in fields else need
    if length != need:
        raise _refuse(t.name, f"length is {length} bytes, dims {list(t.dims)} need {need}")
    return Place(location, offset, length, fields.get("checksum", ""))


def _natural(tensor: str, key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise _refuse(tensor, f"{key} is {text!r}, not a non-negative integer")
    return int(text)


def safe_location(tensor: str, location: str) -> str:
    if not location:
        raise _refuse(tensor, "the location is empty")
    if "\0" in location or "\\" in location:
        raise _refuse(tensor, f"the location {location!r} has a NUL or a backslash")
    if location.startswith("/") or "_ORT_MEM_ADDR_" in location:
        raise _refuse(tensor, f"the location {location!r} is not relative to the model's folder")
    parts = [p for i, p in enumerate(location.split("/")) if not (p == "." and i == 0)]
    if not parts or any(p in ("", ".", "..") for p in parts):
        raise _refuse(tensor, f"the location {location!r} does not name a file inside the model's folder")
    return "/".join(parts)


def open_inside(folder: Path, location: str, tensor: str) -> int:
    """Descriptor of a regular, singly linked file under the folder, opened without following any link.

    Raises:
        ModelError: missing, a link, not a regular file.
    """
    parts = safe_location(tensor, location).split("/")
    hint = "the data file beside the model; --no-weights goes without it (compile, doctor); run: a moved model by --model FILE"
    try:
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _refuse(tensor, f"'{location}' does not exist in {folder}", hint) from None
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = inner
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    except FileNotFoundError:
        raise _refuse(tensor, f"'{location}' does not exist in {folder}", hint) from None
    except OSError as e:
        raise _refuse(tensor, f"'{location}' cannot be opened without following links ({e.strerror})") from None
    finally:
        os.close(here)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(fd)
        kind = "has several hard links" if stat.S_ISREG(status.st_mode) else "is not a regular file"
        raise _refuse(tensor, f"'{location}' {kind}")
    return fd


def check_file(folder: Path, place: Place, tensor: str) -> None:
    """Check that a tensor's range is inside its file, and its checksum where it has one.

    Raises:
        ModelError: the file is missing or unsafe, too short, or not what its checksum says.
    """
    fd = open_inside(folder, place.file, tensor)
    with os.fdopen(fd, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        if place.offset > size or place.length > size - place.offset:
            raise _refuse(
                tensor, f"bytes {place.offset}..{place.offset + place.length} are asked for, '{place.file}' has {size}"
            )
        if not place.checksum:
            return
        whole = hashlib.file_digest(f, "sha1").hexdigest()
        f.seek(place.offset)
        part = hashlib.sha1(f.read(place.length), usedforsecurity=False).hexdigest()
    if place.checksum.lower() not in (whole, part):  # the specification says of the file, some writers say of the tensor
        raise _refuse(tensor, f"the checksum is {place.checksum}, the data's sha1 is {part}")


def check_overlaps(stored: Iterable[TensorProto]) -> None:
    """Check that tensors outside the model are the same bytes or have none in common.

    Raises:
        ModelError: two ranges of one file overlap in part.
    """
    places = [(parse_place(t), t.name) for t in stored if t.data_location == TensorProto.EXTERNAL]
    ranges = sorted((p.file, p.offset, p.offset + p.length, name) for p, name in places if p.length)
    for (file, lo, hi, name), (other, low, high, second) in itertools.pairwise(ranges):
        if file == other and low < hi and (lo, hi) != (low, high):
            raise _refuse(second, f"its bytes {low}..{high} of '{file}' overlap '{name}' at {lo}..{hi}")


def check_inline(t: TensorProto) -> None:
    """Check that a tensor kept in the protobuf has exactly the bytes that its dims need, in one field.

    Raises:
        ModelError: too few or too many values, or two fields filled.
    """
    need, count = tensor_bytes(t), math.prod(t.dims)
    filled = [f for f in TYPED_FIELDS if len(getattr(t, f))]
    where, raw = f"initializer '{t.name}'", len(t.raw_data)
    if len(filled) + bool(raw) > 1:
        raise ModelError("tensor data given twice", where=where, why=f"raw_data and {', '.join(filled)} are both filled")
    if t.external_data:
        raise ModelError("tensor data given twice", where=where, why="external_data is filled, data_location is not EXTERNAL")
    if filled and t.data_type in PACKED_BITS:
        have, count = len(t.int32_data), need  # one byte of packed elements in each
        if have != count:
            why = f"dims {list(t.dims)} need {need} packed bytes, data has {have}"
            raise ModelError("tensor data of the wrong size", where=where, why=why)
    elif filled:
        have = len(getattr(t, filled[0])) // (2 if t.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1)
        if have != count:
            why = f"dims {list(t.dims)} hold {count}, data has {have}"
            raise ModelError("tensor data of the wrong size", where=where, why=why)
    elif t.data_type != TensorProto.STRING and raw != need:
        why = f"dims {list(t.dims)} need {need} bytes, data has {raw}"
        raise ModelError("tensor data of the wrong size", where=where, why=why)
