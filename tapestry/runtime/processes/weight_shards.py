"""Weights cut as the plan cuts them: a safetensors file per device, of which a rank reads its own slices and nothing else.

``index.json`` says which file holds which slice, the SHA-256 of each slice, of the build, and of itself. Equal slices of
several devices are stored once, with the first of them. Files are `safetensors
<https://github.com/huggingface/safetensors>`_: the length of a JSON header in 8 bytes, the header, the
data. Types that they have no name for are bytes there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tapestry.build import store
from tapestry.build.atomic import new_folder
from tapestry.build.store import Build
from tapestry.errors import BuildError
from tapestry.ir.kernel import Box, shape
from tapestry.ir.program import Load
from tapestry.ir.types import itemsize, numpy_dtype

DTYPES = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "i64": "I64", "i32": "I32", "i16": "I16", "i8": "I8",
    "u64": "U64", "u32": "U32", "u16": "U16", "u8": "U8", "bool": "BOOL",
    "c64": "C64",
}  # fmt: skip
Array = np.ndarray[Any, Any]


class _Slice(msgspec.Struct, forbid_unknown_fields=True):
    file: str
    offset: int
    length: int
    sha256: str


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    build: str
    slices: dict[str, _Slice]
    sha256: str


def slices(build: Build) -> Iterator[tuple[str, Box, int]]:
    """(tensor, box, first device) of every distinct slice of a weight in the model's files."""
    weights, seen = build.plan.graph.weights, set[tuple[str, Box]]()
    for s in build.program.steps:
        b = build.program.buffers[s.buffer] if isinstance(s, Load) else None
        if b is not None and b.tensor in weights and weights[b.tensor].file:
            for d, box in enumerate(b.boxes):
                if box is not None and (b.tensor, box) not in seen:
                    seen.add((b.tensor, box))
                    yield b.tensor, box, d


def write(folder: Path, build: Build, identity: str, read: Callable[[str, Box], Array]) -> dict[str, Any]:
    """Write a shard set in one step; returns ``{files, slices, bytes}``, bytes by device.

    Raises:
        BuildError: the place holds something else.
    """
    mine: dict[int, list[tuple[str, Box]]] = {}
    for tensor, box, device in slices(build):
        mine.setdefault(device, []).append((tensor, box))
    index: dict[str, dict[str, Any]] = {}
    with new_folder(folder, "index.json") as temporary:
        for device, held in mine.items():
            index |= _write_file(temporary / f"device-{device}.safetensors", held, build, read)
        body = {"build": identity, "slices": index}
        (temporary / "index.json").write_text(json.dumps({**body, "sha256": store.body_hash(body)}, indent=1))
    total = {d: sum(index[_key(*k)]["length"] for k in held) for d, held in mine.items()}
    return {"files": len(mine), "slices": len(index), "bytes": [total.get(d, 0) for d in range(build.program.devices)]}


def _write_file(
    path: Path, held: list[tuple[str, Box]], build: Build, read: Callable[[str, Box], Array]
) -> dict[str, dict[str, Any]]:
    tensors = build.plan.graph.tensors
    header: dict[str, Any] = {}
    at = 0
    for tensor, box in held:
        dtype = tensors[tensor].dtype
        n = int(np.prod(shape(box), dtype=np.int64)) * itemsize(dtype)
        kind, extents = (DTYPES[dtype], shape(box)) if dtype in DTYPES else ("U8", (*shape(box), itemsize(dtype)))
        header[_key(tensor, box)] = {"dtype": kind, "shape": extents, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    entries: dict[str, dict[str, Any]] = {}
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor, box in held:
            data = np.ascontiguousarray(read(tensor, box)).tobytes()
            place = {"file": path.name, "offset": f.tell(), "length": len(data)}
            entries[_key(tensor, box)] = {**place, "sha256": hashlib.sha256(data).hexdigest()}
            f.write(data)
    return entries


def reader(folder: Path, build: Build, identity: str) -> Callable[[str, Box], Array]:
    """A function that reads slices of a shard set, each checked against its hash.

    Raises:
        BuildError: it is no shard set, or that of another build; later, that a slice is missing or damaged.
    """
    try:
        raw = (folder / "index.json").read_bytes()
        index = msgspec.json.decode(raw, type=_Index)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise BuildError(f"not a set of shards: {e}", where=str(folder), hint="tapestry shard-weights BUILD -o DIR") from None
    if index.sha256 != store.body_hash({"build": index.build, "slices": msgspec.to_builtins(index.slices)}):
        raise BuildError("index.json is not what its own hash says", where=str(folder))
    if index.build != identity:
        raise BuildError("shards of another build", where=str(folder), hint="tapestry shard-weights BUILD -o DIR again")

    def read(tensor: str, box: Box) -> Array:
        entry, t = index.slices.get(_key(tensor, box)), build.plan.graph.tensors[tensor]
        if entry is None or Path(entry.file).name != entry.file:
            raise BuildError(f"the shards have no slice {box} of '{tensor}'", where=str(folder))
        path = folder / entry.file
        try:
            data = np.memmap(path, np.uint8, "r", entry.offset, (entry.length,)) if entry.length else np.empty(0, np.uint8)
        except (OSError, ValueError) as e:
            raise BuildError(f"a slice of '{tensor}' does not read: {e}", where=str(path)) from None
        right = entry.length == int(np.prod(shape(box), dtype=np.int64)) * itemsize(t.dtype)
        if not right or hashlib.sha256(data.data).hexdigest() != entry.sha256:
            raise BuildError(f"a slice of '{tensor}' is not what its hash says", where=str(path))
        return np.array(data).view(numpy_dtype(t.dtype)).reshape(shape(box))

    return read


def _key(tensor: str, box: Box) -> str:
    return f"{tensor} {','.join(f'{lo}:{hi}' for lo, hi in box)}"
