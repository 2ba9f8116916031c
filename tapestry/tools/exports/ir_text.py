"""The plan's graph, as a JSON document or as IR text that compiles again: derived constants are written beside the text, and
the files with the model's own weights must be within reach of it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import numpy_helper

from tapestry.build.atomic import equal_sizes, new_file, write_json, write_text
from tapestry.build.store import Build
from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.syntax import ir_document
from tapestry.ir.syntax.printer import to_text
from tapestry.ir.types import PACKED, Weight, numpy_dtype
from tapestry.lift.file.external_data import open_inside, safe_location
from tapestry.lift.file.structure import TEXT


def export_ir(build: Build, constants: bytes, target: Path, *, copy: bool) -> dict[str, Any]:
    """Write the graph; returns what was written, as data.

    Args:
        copy: whether files with weights that are out of the text's reach are copied beside it.

    Raises:
        TapestryError: the place of a file that goes beside it is taken.
    """
    graph = build.plan.graph
    if target.suffix != TEXT:
        write_json(target, ir_document.to_document(graph))
        return {"file": str(target), "operations": len(graph.ops), "beside": [], "absent": []}
    files = _files(build, target)
    beside, data = f"{target.stem}.constants.bin", bytearray()
    refs = dict[str, Weight]()
    for name, w in graph.weights.items():
        if w.file:
            refs[name] = replace(w, file=files[_of(build, w)])
            continue
        stored = _stored(build, constants, graph, name)
        refs[name] = replace(w, file=beside, offset=len(data), length=len(stored))
        data += stored
    if beside in files.values():
        raise TapestryError("the place of the constants is taken", where=str(target.parent / beside), hint="another -o")
    absent = _bring(build, files, target.parent, copy=copy)
    if data:
        with new_file(target.parent / beside) as path:
            path.write_bytes(data)
    write_text(target, to_text(replace(graph, weights=refs)))
    needed = sorted(set(files.values())) + ([beside] if data else [])
    return {"file": str(target), "operations": len(graph.ops), "beside": needed, "absent": absent}


def _of(build: Build, w: Weight) -> str:
    """The file of a weight, relative to the model's folder; the model itself, which may have another name than it had."""
    return Path(build.model).name if w.name and Path(build.model).suffix != TEXT else w.file


def _files(build: Build, target: Path) -> dict[str, str]:
    """The model's files with weights, relative to its folder, and what the text calls them: relative to the text's own folder
    where they are inside of it, else as if they lay there. A build is not trusted: no name leads out of a folder."""
    here, there = Path(build.model).resolve().parent, target.resolve().parent
    inner = here.relative_to(there) if here.is_relative_to(there) else Path()
    found = {_of(build, w): t for t, w in build.plan.graph.weights.items() if w.file}
    return {safe_location(t, file): (inner / file).as_posix() for file, t in sorted(found.items())}


def _bring(build: Build, files: dict[str, str], folder: Path, *, copy: bool) -> list[str]:
    """The files that are not where the text looks for them; none once they have been copied.

    One of the same size is taken for it: what is inside is held to its hash when the text is compiled.
    """
    here = Path(build.model).parent
    absent = {file: name for file, name in files.items() if not equal_sizes(folder / name, here / file)}
    if not copy:
        return [*absent.values()]
    if taken := next((name for name in absent.values() if (folder / name).exists()), None):
        raise TapestryError("a weight file's place is taken", where=str(folder / taken), hint="an empty folder for -o")
    for file, name in absent.items():
        with os.fdopen(open_inside(here, file, name), "rb") as source:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with new_file(folder / name) as path, path.open("wb") as copied:
                shutil.copyfileobj(source, copied)
    return []


def _stored(build: Build, constants: bytes, graph: Graph, name: str) -> bytes:
    """A derived constant as a data file of ONNX has it: types of less than a byte are packed."""
    t, (offset, length) = graph.tensors[name], build.constants[name]
    data = constants[offset : offset + length]
    if t.dtype not in PACKED:
        return data
    return numpy_helper.from_array(np.frombuffer(data, numpy_dtype(t.dtype)).reshape(t.shape)).raw_data
