"""Weights cut as a plan cuts them, in `safetensors <https://github.com/huggingface/safetensors>`_ files by device, of which a
rank reads its own slices and nothing else.

``index.json`` says which file holds which slice, the SHA-256 of each slice and of itself, and of which weights they are, by the
hashes that a build of the model knows them by: any build of that model reads what is there, whole slices or parts of them.
Equal slices of several devices are stored once, with the first of them. Types that safetensors has no name for are bytes there.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import msgspec
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from tapestry.build import store
from tapestry.build.store import Build, new_folder
from tapestry.errors import BuildError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, shape
from tapestry.ir.program import Load
from tapestry.ir.types import itemsize, numpy_dtype
from tapestry.runtime.executor import file_name, write_outputs
from tapestry.runtime.feeds import random_feeds

Array = np.ndarray[Any, Any]


NAMED = frozenset(
    ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool", "c64")
)  # dtypes of the IR that safetensors has
FILE = 1 << 30  # bytes of a file, unless a slice has more: what is in memory while it is written


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


def write_shards(folder: Path, build: Build, read: Callable[[str, Box], Array]) -> dict[str, Any]:
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


# Streams of requests: where each batch's inputs are, and which batches are done.
#
# A batch is a ``.npz`` file, or a folder of one ``.npy`` file per input. Its results appear in ``OUTPUT/NAME/`` all at once,
# when they are complete, so a folder that is there is a batch that is done, and a rerun goes on after it. ``OUTPUT/run.json``
# says of which build.


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One request: ``source`` is a .npz file or a folder, ``inputs`` single files by input; the rest is random by ``seed``.

    ``output`` is the folder for its results (``None``: nowhere); ``number`` counts from 0 over all batches, done or not.
    """

    number: int
    name: str
    output: Path | None
    source: Path | None = None
    inputs: tuple[tuple[str, Path], ...] = ()
    seed: int = 0

    @property
    def done(self) -> bool:
        """Whether its results are there."""
        return self.source is not None and self.output is not None and self.output.is_dir()

    def feeds(self, graph: Graph) -> dict[str, Array]:
        """The inputs, read from files (mapped where that can be).

        Raises:
            TapestryError: a file does not read.
        """
        if self.source is None:
            return random_feeds(graph, self.seed) | {name: load(path) for name, path in self.inputs}
        if self.source.is_dir():
            names = {file_name(t): t for t in graph.inputs}
            return {names.get(p.stem, p.stem): load(p) for p in sorted(self.source.glob("*.npy"))}
        try:
            with np.load(self.source, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, AttributeError, TypeError, BadZipFile, zlib.error) as e:
            raise TapestryError(f"no arrays: {e}", where=str(self.source), hint="a .npz file of numpy.savez") from None

    def keep(self, outputs: Mapping[str, Array]) -> None:
        """Write the results: a stream's batch appears whole; a single run writes each file whole."""
        if self.output is None:
            return
        if self.source is None:
            write_outputs(self.output, outputs)
            return
        with new_folder(self.output, "") as temporary:
            write_outputs(temporary, outputs)


def load(path: Path) -> Array:
    """A .npy file, mapped.

    Raises:
        TapestryError: it is none.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise TapestryError(f"not an array: {e}", where=str(path), hint="a .npy file written by numpy.save") from None


def stream(sources: Sequence[Path], output: Path | None, identity: str) -> list[Batch]:
    """The batches of ``--inputs``, in the order given and sorted within folders.

    Raises:
        TapestryError: a source is missing, two batches have one name, or the output belongs to another build.
    """
    given: list[Path] = []
    for p in sources:
        inside = (
            sorted(q for q in p.iterdir() if q.suffix == ".npz" or (q.is_dir() and any(q.glob("*.npy")))) if p.is_dir() else []
        )
        if not p.exists() or (p.is_dir() and not inside and not any(p.glob("*.npy"))):
            raise TapestryError("no batches", where=str(p), hint=".npz files, or folders of .npy files")
        given += inside or [p]
    names = [p.stem if p.is_file() else p.name for p in given]
    twice = next((n for n, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise TapestryError(f"two batches are called '{twice}'", where="--inputs")
    if output is not None:
        _claim(output, identity)
    places = [None if output is None else output / file_name(n) for n in names]
    rows = zip(names, places, given, strict=True)
    return [Batch(number=k, name=n, output=o, source=p) for k, (n, o, p) in enumerate(rows)]


def _claim(output: Path, identity: str) -> None:
    """Mark a folder as this build's; what a run that was killed left half-written goes."""
    mark = output / "run.json"
    if mark.is_file():
        try:
            build = json.loads(mark.read_text()).get("build")
        except (ValueError, AttributeError):
            build = None
        if build != identity:
            raise TapestryError("the outputs there are of another build", where=str(output), hint="another --output")
        for p in output.glob(".*"):
            if p.is_dir():
                shutil.rmtree(p, ignore_errors=True)
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise TapestryError("the folder has other things in it", where=str(output), hint="another --output")
    output.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps({"build": identity}) + "\n")


# What the kernel counts of this process's memory.


MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # malloc.h
STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def kernel_count(name: str) -> int:
    """Bytes under a name of ``/proc/self/status``: ``VmRSS`` (resident), ``VmHWM`` (the most that was), ``RssAnon`` (not shared
    with a file); 0 where there is none."""
    try:
        text = STATUS.read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:")), 0)


def before_loading() -> None:
    """Let glibc give a weight's memory back at once when the weight is dropped for its packed copy. Of its own it keeps such
    holes, once the first array of a size was freed (`mallopt(3)`, M_MMAP_THRESHOLD)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 17)


def after_loading() -> None:
    """Let glibc keep what steps of a run free, as it would have learned to; and let ``VmHWM`` begin again at what is resident
    now, where the kernel allows it (`proc(5)`, clear_refs)."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(TRIM_THRESHOLD, 1 << 26)
    try:
        REFS.write_text("5")
    except OSError:
        return
