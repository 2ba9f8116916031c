"""Build directories: plans as data on disk, written atomically, read strictly, held together by hashes.

``plan.json`` holds the graph's text, the topology, the strategies and the program; ``constants.bin`` the small derived
constants; ``weight_tiles.bin`` the hashes of the parts of large weights; ``rewrites.tap.gz`` the rewrites behind the graph
(docs/reference/rewrites.md); ``kernels/`` Triton source. ``certificate.json`` lists the SHA-256 of every other file and of
itself: a strict schema alone would accept one single-bit flip in eight. Nothing in a build directory is ever executed as it
stands.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tapestry.build import weight_tiles
from tapestry.build.atomic import check_place, new_folder
from tapestry.build.packed_program import Packed, pack, unpack
from tapestry.errors import BuildError, TextError, damaged, pointer_of
from tapestry.ir.graph import Names
from tapestry.ir.plan import Arrival, MeshAxis, Plan, Stage, Strategy, stages_refused
from tapestry.ir.program import Program
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.ir.types import numpy_dtype
from tapestry.plugins import entry_points as plugins

VERSION = 2  # 1 wrote the boxes and messages of every buffer and step in full
TILES = "weight_tiles.bin"
REWRITES = "rewrites.tap.gz"
SIZED = ("sizes.json", "regions")  # what a build for several sizes has beside it (`build.sized_builds`)
MODEL = "model"  # the folder of a build that brings its model along
MAX_PLAN_BYTES = 1 << 30
MAX_CERTIFICATE_BYTES = 1 << 26  # a line per kernel
MAX_TENSOR = 1 << 50  # bytes: what can be counted in 64 bits, with room
MAX_WEIGHT = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What a build directory says.

    Attributes:
        model: path of the ONNX file, and ``model_sha256`` its hash.
        topology: the topology as data (for people and for another search).
        target: the target to run on.
        report: the document that ``compile`` printed.
        moves: the structural rewrites that were chosen, in order.
        constants: byte ranges (offset, length) of derived constants in ``constants.bin``.
        precision: of products of f32 in generated kernels: ``ieee``, ``tf32x3`` or ``tf32``.
        knobs: those of generated kernels that were measured where the plan was made, by the kernel's key.
    """

    model: str
    model_sha256: str
    plan: Plan
    program: Program
    topology: Mapping[str, Any]
    target: str
    memory: int
    peak_bytes: tuple[int, ...]
    report: Mapping[str, Any]
    moves: tuple[str, ...]
    constants: Mapping[str, tuple[int, int]]
    precision: str = "ieee"
    knobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


def write(
    folder: Path,
    build: Build,
    constants: Mapping[str, bytes],
    kernels: Mapping[str, str],
    laws: Mapping[str, int],
    rewrites: bytes = b"",
    evidence: Sequence[Mapping[str, Any]] = (),
    bundle: Sequence[str] = (),
    more: Mapping[str, bytes] = {},
) -> None:
    """Write a build directory in one step: it appears whole, or not at all.

    Args:
        bundle: files of the model, relative to its folder, to be copied into the build, which then needs no other place.
        more: files beside those of the plan (`build.sized_builds`).

    Raises:
        BuildError: the place holds something that is not a build directory.
    """
    source = Path(build.model)
    build = replace(build, model=f"{MODEL}/{source.name}") if bundle else build
    files = files_of(build, constants, kernels, laws, rewrites, evidence, more)
    check_output(folder)
    write_files(folder, files, "plan.json", {f"{MODEL}/{name}": source.parent / name for name in bundle})


def files_of(
    build: Build,
    constants: Mapping[str, bytes],
    kernels: Mapping[str, str],
    laws: Mapping[str, int],
    rewrites: bytes = b"",
    evidence: Sequence[Mapping[str, Any]] = (),
    more: Mapping[str, bytes] = {},
) -> dict[str, bytes]:
    """The files of a build directory, its certificate among them."""
    files = {"plan.json": encode(build), "constants.bin": b"".join(constants.values()), **more}
    files |= {f"kernels/{name}": source.encode() for name, source in kernels.items()}
    files |= {REWRITES: rewrites} if rewrites else {}
    files |= {TILES: tiles} if (tiles := weight_tiles.stored(build.plan.graph)) else {}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    body = {"version": VERSION, "passed": True, "laws": dict(laws), "evidence": list(evidence), "files": hashes}
    files["certificate.json"] = _certificate(body, body_hash(body))
    return files


def check_output(folder: Path) -> None:
    """Refuse a place that no build may take, which is worth doing before the search.

    Raises:
        BuildError: it holds something that is no build, or more than a build.
    """
    check_place(folder, "plan.json")
    own = {"plan.json", "constants.bin", "certificate.json", "kernels", TILES, REWRITES, MODEL, *SIZED}
    foreign = sorted({p.name for p in folder.iterdir()} - own) if (folder / "plan.json").is_file() else []
    if foreign:
        what = f"the output has something that no build has: '{foreign[0]}'"
        raise BuildError(what, where=str(folder), hint="another -o; everything in it would be lost")


def check_beside(folder: Path, output: Path | None) -> None:
    """Refuse to write inside of a build, which would then not be what its certificate says.

    Raises:
        BuildError: ``output`` is in ``folder``, or is it.
    """
    if output is not None and Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder)):
        why = "a build has what its certificate says, and nothing else"
        raise BuildError("outputs do not go into a build", where=str(output), why=why, hint="a folder beside it")


def contents(file: Path) -> bytes:
    """What a file of a build holds; nothing where the build has none."""
    return file.read_bytes() if file.is_file() else b""


def write_files(folder: Path, files: Mapping[str, bytes], mark: str, copies: Mapping[str, Path] = {}) -> None:
    """Make a folder of exactly these files in one step; a folder in its place must hold the file ``mark``, or nothing.

    Raises:
        BuildError: the place holds something else.
    """
    with new_folder(folder, mark) as temporary:
        for name, data in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(data)
        for name, source in copies.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, temporary / name)


def _certificate(body: Mapping[str, Any], digest: str) -> bytes:
    """The one way of writing a certificate: another space in it makes another file, which is refused."""
    return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True).encode()


def body_hash(body: Mapping[str, Any]) -> str:
    """The hash of a document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def encode(build: Build) -> bytes:
    """``plan.json``."""
    p = build.plan
    document: dict[str, Any] = {
        "version": VERSION, "model": build.model, "model_sha256": build.model_sha256, "target": build.target,
        "memory": build.memory, "peak_bytes": build.peak_bytes, "topology": build.topology, "moves": build.moves,
        "graph": to_text(p.graph), "mesh": [(a.name, a.size) for a in p.mesh],
        "strategies": [(s.dims, s.out) for s in p.strategies], "inputs": p.inputs, "outputs": p.outputs,
        "rings": {i: s.ring for i, s in enumerate(p.strategies) if s.ring}, "streamed": sorted(p.streamed),
        "native_sums": p.native_sums,
        "stages": [(s.first, [(a.name, a.size) for a in s.mesh]) for s in p.stages], "stage_of": p.stage_of,
        "arrivals": [(a.tensor, a.stage, a.layout) for a in p.arrivals],
        "program": pack(build.program),
        "constants": build.constants, "report": build.report,
        "precision": build.precision, "knobs": build.knobs,
    }  # fmt: skip
    used = {s for op in p.graph.ops for s in op.source}
    document["names"] = {
        "scopes": {s: n for s, n in p.graph.names.scopes.items() if s in used},
        "axes": {t: n for t, n in p.graph.names.axes.items() if t in p.graph.tensors},
    }
    if any(a.weights for a in p.mesh):
        document["weights"] = [a.weights for a in p.mesh]
    if any(a.order for a in p.mesh):
        document["order"] = [a.order for a in p.mesh]
    return msgspec.json.encode(document)


class _Version(msgspec.Struct):
    version: int


class NamesData(msgspec.Struct, forbid_unknown_fields=True):
    """What the model's author calls things (`ir.graph.Names`)."""

    scopes: dict[str, tuple[str, str]] = {}
    axes: dict[str, tuple[str, ...]] = {}


class PlanData(msgspec.Struct, forbid_unknown_fields=True):
    """What ``plan.json`` holds; docs/reference/plan.schema.json is made of it."""

    version: int
    model: str
    model_sha256: str
    target: str
    memory: int
    peak_bytes: tuple[int, ...]
    topology: dict[str, Any]
    moves: tuple[str, ...]
    graph: str
    mesh: list[tuple[str, int]]
    strategies: list[tuple[tuple[str | None, ...], tuple[int | None, ...]]]
    inputs: dict[str, tuple[int | None, ...]]
    outputs: dict[str, tuple[int | None, ...]]
    streamed: frozenset[str]
    program: Packed
    constants: dict[str, tuple[int, int]]
    report: dict[str, Any]
    weights: list[tuple[int, ...]] = []
    order: list[tuple[int, ...]] = []
    stages: list[tuple[int, list[tuple[str, int]]]] = []
    stage_of: tuple[int, ...] = ()
    arrivals: list[tuple[str, int, tuple[int | None, ...]]] = []
    native_sums: bool = False
    precision: str = "ieee"
    knobs: dict[str, dict[str, Any]] = {}
    rings: dict[int, tuple[str | None, ...]] = {}
    names: NamesData = msgspec.field(default_factory=NamesData)


def decode(data: bytes, where: str = "plan.json") -> Build:
    """Read ``plan.json``.

    Raises:
        BuildError: it is not a plan of this version.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise damaged(f"a plan of version {version}, not {VERSION}", where)
        d = msgspec.json.decode(data, type=PlanData)
        plugins.require(d.report.get("plugins"), ("targets", "monoids"), where)
        program = unpack(d.program)
        graph = replace(parse(d.graph), names=Names(scopes=d.names.scopes, axes=d.names.axes))
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError, TextError, ValueError, TypeError) as e:
        error = damaged(f"not a plan: {e}", where)
        error.pointer = "/graph" if isinstance(e, TextError) else pointer_of(str(e))
        raise error from None
    odd = next((t for t in graph.tensors.values() if min(t.shape, default=0) < 0 or t.nbytes > MAX_TENSOR), None)
    if odd is not None:
        raise damaged(f"not a plan: '{odd.name}' has shape {list(odd.shape)}", where)
    mesh = _mesh(d, where)
    plan = Plan(
        graph=graph,
        mesh=mesh,
        inputs=d.inputs,
        outputs=d.outputs,
        strategies=tuple(Strategy(dims, out, d.rings.get(i, ())) for i, (dims, out) in enumerate(d.strategies)),
        streamed=d.streamed,
        native_sums=d.native_sums,
        stages=tuple(Stage(first, tuple(MeshAxis(n, s) for n, s in mesh)) for first, mesh in d.stages),
        stage_of=d.stage_of,
        arrivals=tuple(Arrival(*a) for a in d.arrivals),
    )
    consistent = len(plan.strategies) == len(graph.ops) and program.devices == plan.devices and not stages_refused(plan)
    consistent = consistent and all(
        len(s.dims) == len(s.out) == len(at.mesh) and len(s.ring) in (0, len(at.mesh))
        for s, at in zip(plan.strategies, plan.places, strict=True)
    )
    if not consistent or len(d.peak_bytes) != program.devices:
        raise damaged("not a plan: mesh, strategies and program disagree", where)
    return Build(
        model=d.model,
        model_sha256=d.model_sha256,
        plan=plan,
        program=program,
        topology=d.topology,
        target=d.target,
        memory=d.memory,
        peak_bytes=d.peak_bytes,
        report=d.report,
        moves=d.moves,
        constants=d.constants,
        precision=d.precision,
        knobs=d.knobs,
    )


def _mesh(d: PlanData, where: str) -> tuple[MeshAxis, ...]:
    """The mesh, with its shares and orders.

    Raises:
        BuildError: they do not fit its axes.
    """
    weights, order = d.weights or [()] * len(d.mesh), d.order or [()] * len(d.mesh)
    shared = len(weights) == len(d.mesh) and all(
        not w or (len(w) == n and min(w) > 0 and max(w) <= MAX_WEIGHT) for (_, n), w in zip(d.mesh, weights, strict=True)
    )
    ordered = len(order) == len(d.mesh) and all(
        not o or sorted(o) == list(range(n)) for (_, n), o in zip(d.mesh, order, strict=True)
    )
    if not shared or not ordered or (d.order and d.stages):
        what = f"not a plan: the {'order' if shared else 'shares'} of a mesh axis"
        raise damaged(what, where)
    return tuple(MeshAxis(n, s, w, o) for (n, s), w, o in zip(d.mesh, weights, order, strict=True))


def read(folder: Path, model: Path | None = None) -> tuple[Build, dict[str, int]]:
    """A build directory, with the counts of its certificate, after checking every file against its hash.

    Args:
        model: where the model is, if not where it was; its weights are held to the plan's hashes wherever they are read.

    Raises:
        BuildError: a file is missing, extra, too large, of another kind, or not what its hash says.
    """
    laws, files = _read_certificate(folder)
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()}
    present = {p for p in present if Path(p).parts[0] != MODEL}  # (it is held to hashes of its own, where it is read)
    for name in sorted(present ^ (set(files) | {"certificate.json"})):
        raise BuildError(f"'{name}' is {'not in the certificate' if name in present else 'missing'}", where=str(folder))
    for name, digest in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_PLAN_BYTES:
            raise BuildError(f"'{name}' is not a plain file of a sane size", where=str(folder))
        if _sha256(path) != digest:
            raise damaged(f"'{name}' is not what the certificate's hash says", folder)
    build = decode((folder / "plan.json").read_bytes(), str(folder / "plan.json"))
    graph, tiles = build.plan.graph, (folder / TILES).read_bytes() if TILES in files else b""
    hashes = weight_tiles.restored(graph, tiles, str(folder))
    _check_constants(build, (folder / "constants.bin").read_bytes() if "constants.bin" in files else b"", str(folder))
    weights = {t: replace(w, tiles=hashes[t]) for t, w in graph.weights.items()}
    plan = replace(build.plan, graph=replace(graph, weights=weights))
    return replace(build, model=_model_path(build.model, folder) if model is None else str(model.absolute()), plan=plan), laws


def _model_path(path: str, folder: Path) -> str:
    """Where a build's model is: a path that is not absolute is in the build itself; a model that moved with its build is looked
    for beside it.

    Raises:
        BuildError: it leads out of it.
    """
    if Path(path).is_absolute():
        beside = folder.absolute().parent / Path(path).name
        return str(beside) if beside.is_file() and not Path(path).exists() else path
    if ".." in Path(path).parts:
        raise BuildError("the plan names a model outside the build", where=str(folder), why=path)
    return str(folder.absolute() / path)


def _check_constants(build: Build, data: bytes, where: str) -> None:
    """Every derived constant is what its own hash in the graph says.

    Raises:
        BuildError: naming one that is not.
    """
    graph = build.plan.graph
    wanted = {t for t, w in graph.weights.items() if not w.file}
    for name in sorted(wanted ^ set(build.constants)):
        raise BuildError(f"constant '{name}' is {'nowhere' if name in wanted else 'no constant'}", where=where)
    for name, (at, length) in build.constants.items():
        t = graph.tensors[name]
        part = np.frombuffer(data[at : at + length], np.uint8)
        if at < 0 or part.size != t.nbytes:
            raise BuildError(f"constant '{name}' has another size than its tensor", where=where)
        cells = part.view(numpy_dtype(t.dtype)).reshape(t.shape)
        if weight_tiles.root(weight_tiles.digests(cells)) != graph.weights[name].sha256:
            raise damaged(f"constant '{name}' is not what its hash says", where)


def identity(folder: Path) -> str:
    """The hash that holds a build together: two builds with the same one are the same, byte for byte.

    Raises:
        BuildError: it is not a build directory.
    """
    _read_certificate(folder)
    return str(msgspec.json.decode((folder / "certificate.json").read_bytes())["sha256"])


def _read_certificate(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    path = folder / "certificate.json"
    if not folder.is_dir() or not path.is_file() or path.is_symlink():
        why = "no certificate.json" if folder.exists() else "there is no such folder"
        raise BuildError(f"not a build directory: {why}", where=str(folder), hint="tapestry compile MODEL -o BUILD")
    if path.stat().st_size > MAX_CERTIFICATE_BYTES:
        raise damaged("certificate.json is not of a sane size", folder)
    try:
        data = path.read_bytes()
        body = msgspec.json.decode(data, type=dict[str, Any])
        stated = body.pop("sha256")
        laws = msgspec.convert(body["laws"], dict[str, int])
        files = msgspec.convert(body["files"], dict[str, str])
        honest = stated == body_hash(body) and body["passed"] is True and _certificate(body, stated) == data
    except (msgspec.MsgspecError, KeyError, ValueError, UnicodeDecodeError, RecursionError) as e:
        raise BuildError(f"certificate.json does not read: {e}", where=str(folder)) from None
    if not honest:
        raise damaged("certificate.json is not what its own hash says", folder)
    if "plan.json" not in files or any(Path(f).is_absolute() or ".." in Path(f).parts for f in files):
        raise BuildError("certificate.json names files outside the build", where=str(folder))
    return laws, files
