"""`tapestry prove` on what `export --format onnx-ranks` writes: every model of a folder, cut by batch, heads and sequence.

A cut is asked for by pins: each operation that has a dimension of the size is cut along it, in two. Models of images have
channels in place of heads and rows in place of a sequence. The answer must be `proved`, or `undecided` with what is in the way.

A model whose data is not there is planned and written without it: where its weights lie is taken from the order of the ranks.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

import tapestry
from bench.support import record
from tapestry.build.store import Build
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph, Split
from tapestry.ir.kernel import Box, shape
from tapestry.ir.types import numpy_dtype
from tapestry.lift.onnx_to_graph import lift
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.splitting.split import refusal
from tapestry.tools.exports import rank_onnx
from tapestry.tools.exports.onnx_files import DataFile, weights_of
from tapestry.tools.prove.verdict import prove

BATCH, SEQUENCE = 6, 20  # sizes that nothing else in a model has
WAYS = ("batch", "heads", "sequence")


def rows(folder: Path, names: Sequence[str], ways: Sequence[str] = WAYS) -> Iterator[record.Row]:
    """A row for each model and way."""
    for path in sorted(folder.glob("*.onnx"), key=lambda p: p.stat().st_size):
        for way in ways if not names or path.stem in names else ():
            row = {"part": "ranks", "name": path.stem, "way": way}
            with tempfile.TemporaryDirectory() as place:
                try:
                    yield row | _decided(path, way, Path(place))
                except TapestryError as e:  # a model that has no such plan is a row too
                    yield row | {"status": "not written", "reason": " ".join(str(e).split())[:300]}


def _decided(path: Path, way: str, place: Path) -> record.Row:
    """Compile, write the ranks, and prove them."""
    begin = time.perf_counter()
    try:
        shapes = sizes_of(path, BATCH)
        graph = simplify(lift(path, shapes, weights=False).graph)
    except TapestryError:  # an export that holds for one batch
        shapes = sizes_of(path, 1)
        graph = simplify(lift(path, shapes, weights=False).graph)
    asked = pins(graph, _size(graph, way))
    if not asked:
        raise TapestryError("no operation can be cut by that", why=f"none has a dimension of {_size(graph, way)}")
    there = all((path.parent / w.file).is_file() for w in graph.weights.values() if w.file)
    room = None if there else "1TiB"  # nothing is run
    c = tapestry.compile(path, mesh={"tp": 2}, topology="cpu", stages=1, shapes=shapes, pins=asked, weights=there, memory=room)
    if there:
        rank_onnx.export_ranks(c.build, b"".join(c.constants.values()), place / "ranks", nearest=True)
    else:
        _without_data(c.build, b"".join(c.constants.values()), place / "ranks")
    written = time.perf_counter()
    v = prove(path, [place / "ranks"], shapes)
    said = {"status": v.status, "reason": (v.witness or {}).get("text", v.reason)[:400], "pins": len(asked)}
    kept = {k: v.document[k] for k in ("operations", "collectives")}
    return said | kept | {"write_s": round(written - begin, 1), "seconds": round(time.perf_counter() - written, 1)}


class _NoData(DataFile):
    """Places of weights in a file that is not written."""

    def place(self, tensor: str, box: Box) -> tuple[int, int]:
        return 0, self.read(tensor, box).nbytes


def _without_data(build: Build, constants: bytes, folder: Path) -> None:
    """The ranks' files as `rank_onnx.export` writes them, without data of the model's weights."""
    graph, there = build.plan.graph, {t: w for t, w in build.plan.graph.weights.items() if w.sha256}
    read = weights_of(replace(build, plan=replace(build.plan, graph=replace(graph, weights=there))), constants)

    def data(tensor: str, box: Box) -> np.ndarray:
        nothing = np.zeros((), numpy_dtype(graph.tensors[tensor].dtype))
        return read(tensor, box) if tensor in there else np.broadcast_to(nothing, shape(box))

    store = _NoData(rank_onnx.DATA, io.BytesIO(), data)
    ranks = [rank_onnx.RankFile(build, rank, True) for rank in range(build.program.devices)]
    folder.mkdir()
    for rank in ranks:
        rank.walk()
        (folder / f"rank{rank.rank}.onnx").write_bytes(rank.model(store).SerializeToString())
    (folder / rank_onnx.MARK).write_text(json.dumps(rank_onnx.program_document(build, ranks)))


def sizes_of(path: Path, batch: int = BATCH) -> dict[str, int]:
    """A size for every symbol of the inputs: the first axis is the batch, others are sequences."""
    proto = onnx.load(path, load_external_data=False)
    axes = [(k, d.dim_param) for i in proto.graph.input for k, d in enumerate(i.type.tensor_type.shape.dim) if d.dim_param]
    return {name: SEQUENCE if any(k for k, n in axes if n == name) else batch for _, name in axes}


def _size(graph: Graph, way: str) -> int:
    """Of what is cut: the batch, or the commonest second (of heads) or last but one axis of values with four."""
    axis = {"batch": 0, "heads": 1, "sequence": 2}[way]
    shapes = [graph.tensors[t].shape for op in graph.ops for t in op.outs if len(graph.tensors[t].shape) == 4]
    return BATCH if way == "batch" else Counter(s[axis] for s in shapes if s[axis] % 2 == 0).most_common(1)[0][0]


def pins(graph: Graph, size: int) -> list[str]:
    """A pin for every operation that has a dimension of this size which can be cut."""
    out: list[str] = []
    for op in graph.ops:
        dims = op.dims if isinstance(op, Block) else ()
        found = next((d for d in dims if d.size == size and refusal(op, Split(d.name, 2, "mesh.tp")) is None), None)
        if found is not None:
            out.append(f"{op.outs[0]}:{found.name}=2@tp")
    return out


def line(row: record.Row) -> str:
    """A row as a line."""
    return f"{row['name']:20} {row['way']:9} {row['status']:11} {row.get('seconds', '')!s:6} {row['reason']}"
