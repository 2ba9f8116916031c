"""Outputs as ``.npy`` files, each written whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write(folder: Path, outputs: Mapping[str, np.ndarray[Any, Any]]) -> list[Path]:
    """One file per output; characters that a file name may not have become underscores."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, array in outputs.items():
        path, k = folder / f"{file_name(name)}.npy", 1
        while path in paths:
            path, k = folder / f"{file_name(name)}_{k}.npy", k + 1
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as f:
            np.save(f, array, allow_pickle=False)
        os.replace(f.name, path)
        paths.append(path)
    return paths


def file_name(tensor: str) -> str:
    """A tensor's name as a file name inside the folder."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", tensor).lstrip(".") or "_"
