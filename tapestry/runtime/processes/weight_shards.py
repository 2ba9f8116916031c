"""Weights cut as a plan cuts them, in `safetensors <https://github.com/huggingface/safetensors>`_ files by device, of which a
rank reads its own slices and nothing else.

``index.json`` says which file holds which slice, the SHA-256 of each slice and of itself, and of which weights they are, by the
hashes that a build of the model knows them by: any build of that model reads what is there, whole slices or parts of them.
Equal slices of several devices are stored once, with the first of them. Types that safetensors has no name for are bytes there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from tapestry.build import store
from tapestry.build.atomic import new_folder
from tapestry.build.store import Build
from tapestry.errors import BuildError
from tapestry.ir.kernel import Box, shape
from tapestry.ir.program import Load
from tapestry.ir.types import itemsize, numpy_dtype

NAMED = frozenset(
    ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool", "c64")
)  # dtypes of the IR that safetensors has
FILE = 1 << 30  # bytes of a file, unless a slice has more: what is in memory while it is written
Array = np.ndarray[Any, Any]


class _Slice(msgspec.Struct, forbid_unknown_fields=True):
    """A slice: the weight, its box, the file and the name that it has there."""

    tensor: str
    box: tuple[tuple[int, int], ...]
    file: str
    name: str
    sha256: str


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    weights: dict[str, str]
    slices: list[_Slice]
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


def write(folder: Path, build: Build, read: Callable[[str, Box], Array]) -> dict[str, Any]:
    """Write a shard set in one step; returns ``{files, slices, bytes}``, bytes by device.

    Raises:
        BuildError: the place holds something else.
    """
    graph, total = build.plan.graph, [0] * build.program.devices
    files: list[tuple[int, list[tuple[str, Box]]]] = []
    room = dict.fromkeys(range(build.program.devices), 0)
    for tensor, box, device in sorted(slices(build), key=lambda s: s[2]):
        n = _nbytes(build, tensor, box)
        if not files or files[-1][0] != device or room[device] < n:
            files.append((device, []))
            room[device] = FILE
        files[-1][1].append((tensor, box))
        room[device], total[device] = room[device] - n, total[device] + n
    found: list[_Slice] = []
    with new_folder(folder, "index.json") as temporary:
        for k, (device, held) in enumerate(files):
            part = sum(d == device for d, _ in files[:k])
            name = f"device-{device}{f'-{part}' if part else ''}.safetensors"
            found += _write_file(temporary / name, held, build, read)
        weights = {t: graph.weights[t].sha256 for t in dict.fromkeys(s.tensor for s in found)}
        body = {"weights": weights, "slices": msgspec.to_builtins(found)}
        (temporary / "index.json").write_text(json.dumps({**body, "sha256": store.body_hash(body)}, indent=1))
    return {"files": len(files), "slices": len(found), "bytes": total}


def _nbytes(build: Build, tensor: str, box: Box) -> int:
    return prod(shape(box)) * itemsize(build.plan.graph.tensors[tensor].dtype)


def _write_file(path: Path, held: list[tuple[str, Box]], build: Build, read: Callable[[str, Box], Array]) -> list[_Slice]:
    arrays: dict[str, Array] = {}
    out: list[_Slice] = []
    for tensor, box in held:
        a = np.ascontiguousarray(read(tensor, box)).reshape(shape(box))
        name = f"{tensor} {','.join(f'{lo}:{hi}' for lo, hi in box)}"
        named = build.plan.graph.tensors[tensor].dtype in NAMED
        arrays[name] = a if named else a.reshape(-1).view(np.uint8).reshape(*a.shape, a.itemsize)
        data = a.reshape(-1).view(np.uint8).data
        out.append(_Slice(tensor, box, path.name, name, hashlib.sha256(data).hexdigest()))
    specs = {
        name: TensorSpec(dtype=a.dtype.name, shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
        for name, a in arrays.items()
    }
    try:
        serialize_file(specs, str(path))
    except SafetensorError as e:
        raise OSError(str(e)) from None
    return out


def reader(folder: Path, build: Build) -> Callable[[str, Box], Array]:
    """A function that reads slices of a shard set, each checked against its hash.

    Raises:
        BuildError: it is no shard set, or that of another model; later, that a slice is missing or damaged.
    """
    try:
        index = msgspec.json.decode((folder / "index.json").read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise BuildError(f"not a set of shards: {e}", where=str(folder), hint="tapestry shard-weights BUILD -o DIR") from None
    if index.sha256 != store.body_hash({"weights": index.weights, "slices": msgspec.to_builtins(index.slices)}):
        raise BuildError("index.json is not what its own hash says", where=str(folder))
    weights = build.plan.graph.weights
    other = next((t for t, digest in index.weights.items() if t in weights and weights[t].sha256 != digest), None)
    absent = next((t for t, _, _ in slices(build) if t not in index.weights), None)
    if other is not None or absent is not None:
        what = f"it has no weight '{absent}'" if other is None else f"weight '{other}' is another one there"
        raise BuildError(
            "shards of another model", where=str(folder), why=what, hint="tapestry shard-weights BUILD -o DIR again"
        )
    held: dict[str, list[_Slice]] = {}
    for s in index.slices:
        held.setdefault(s.tensor, []).append(s)

    def read(tensor: str, box: Box) -> Array:
        around = [s for s in held.get(tensor, ()) if _inside(box, s.box)]
        entry = min(around, key=lambda s: prod(shape(s.box)), default=None)
        if entry is None:
            raise BuildError(f"the shards have no slice {box} of '{tensor}'", where=str(folder))
        whole = _checked(folder, entry, build.plan.graph.tensors[tensor].dtype)
        part = tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(box, entry.box, strict=True))
        return whole if entry.box == box else np.array(whole[part])

    return read


def _inside(box: Box, other: Box) -> bool:
    return len(box) == len(other) and all(a <= lo and hi <= b for (lo, hi), (a, b) in zip(box, other, strict=True))


def _checked(folder: Path, entry: _Slice, dtype: str) -> Array:
    """A slice as it was written, or a BuildError that names it and its file."""
    import torch

    path = folder / entry.file
    if path.name != entry.file:
        raise BuildError(f"index.json names a file elsewhere: '{entry.file}'", where=str(folder))
    try:
        opened: Any = safe_open(path, framework="pt", backend="pread")  # a mapping would count as this process's memory
        with opened as f:
            data: Array = f.get_tensor(entry.name).reshape(-1).view(torch.uint8).numpy()
    except (OSError, SafetensorError) as e:
        raise BuildError(f"a slice of '{entry.tensor}' does not read: {e}", where=str(path)) from None
    right = data.nbytes == prod(shape(entry.box)) * itemsize(dtype)
    if not right or hashlib.sha256(data.data).hexdigest() != entry.sha256:
        raise BuildError(f"a slice of '{entry.tensor}' is not what its hash says", where=str(path))
    return data.view(numpy_dtype(dtype)).reshape(shape(entry.box))
