"""Outputs as ``.npy`` files, each written whole or not at all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tapestry.build.atomic import new_file
from tapestry.onnx_eval.value_kinds import is_map, is_sequence

LONGEST = 200  # characters of a file's name, with room for endings


def write_outputs(folder: Path, outputs: Mapping[str, Any]) -> list[Path]:
    """One file per output; characters that a file name may not have become underscores.

    Text is written as numpy's unicode strings, a sequence as one file per element (``name.0.npy``, …), a map as two:
    ``name.keys.npy`` and ``name.values.npy``, in the same order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    placed = places(folder, outputs)
    for path, array in placed.values():
        with new_file(path) as temporary:
            np.save(temporary, array, allow_pickle=False)
    return [path for path, _ in placed.values()]


def places(folder: Path, outputs: Mapping[str, Any]) -> dict[str, tuple[Path, np.ndarray[Any, Any]]]:
    """Where `write` puts each array, by its name; a sequence has several."""
    arrays = dict(_arrays(outputs))
    return {n: (path, arrays[n]) for n, path in zip(arrays, paths(folder, arrays), strict=True)}


def paths(folder: Path, names: Iterable[str]) -> list[Path]:
    """One file per name, in the same order."""
    taken: list[Path] = []
    for name in names:
        path, k = folder / f"{file_name(name)}.npy", 1
        while path in taken:
            path, k = folder / f"{file_name(name)}_{k}.npy", k + 1
        taken.append(path)
    return taken


def _arrays(outputs: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for name, value in outputs.items():
        if is_sequence(value):
            yield from _arrays({f"{name}.{k}": v for k, v in enumerate(value)})
        elif is_map(value):
            yield f"{name}.keys", np.array(list(value))
            yield from _arrays({f"{name}.values": np.stack([np.asarray(v) for v in value.values()])} if value else {})
        elif value is not None:
            a = np.asarray(value)
            yield name, a.astype(str) if a.dtype == object else a


def file_name(tensor: str) -> str:
    """A tensor's name as a file name inside the folder; of one that is too long, its beginning and its hash."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", tensor).lstrip(".") or "_"
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{hashlib.sha256(tensor.encode()).hexdigest()[:16]}"
