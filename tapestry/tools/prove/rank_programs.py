"""A parallel program as ONNX files: one per rank (or one for all), with collectives as ``DistCollective`` nodes.

The attributes are those of TensorRT 11 and polygraphy: ``collective_operation``, ``reduce_op``, ``root``, ``nb_rank``, and
``groups``, the ranks of one group (all, when it is empty), ``group_size`` of them. A file is cut at its collectives: what one
gives becomes an input, what it takes an output. What is left is lifted as any model is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tapestry.errors import ModelError, TapestryError, refusing
from tapestry.ir.graph import Graph
from tapestry.lift.file.external_data import open_inside, parse_place
from tapestry.lift.file.protos import attributes, nested, replace_nodes, standard_opset, static_shape, subgraphs
from tapestry.lift.file.structure import load
from tapestry.lift.file.symbols import Given, rewrite_file
from tapestry.lift.file.weight_data import stored_tensors
from tapestry.lift.onnx_to_graph import Lifted, lift
from tapestry.tools.prove.collectives import REDUCING, Collective
from tapestry.tools.prove.plan_ranks import inferred, rank_models
from tapestry.tools.prove.rank_parts import said, starts_in_order

NODE = "DistCollective"
KINDS = ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL", "BROADCAST", "REDUCE", "GATHER", "SCATTER")
SIZES = ("Resize", "Upsample", "Pad", "Range", "Clip", "Reshape", "Tile", "Expand", "Slice")  # whose inputs shapes depend on
FLOATING = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFile:
    """A model file, lifted; its weights are names, and their data stays where it is.

    Attributes:
        stored: weights by name, as the file has them.
        outputs: names of the file's outputs.
        collectives: in the order of the file.
    """

    path: Path
    lifted: Lifted
    stored: Mapping[str, TensorProto]
    outputs: tuple[str, ...]
    collectives: tuple[Collective, ...] = ()

    @property
    def graph(self) -> Graph:
        """The operations between collectives."""
        return self.lifted.graph

    def data(self, name: str) -> np.ndarray | None:
        """The data of a weight or a derived constant; None where the file with it is not there."""
        if name in self.lifted.constants:
            return self.lifted.constants[name]
        t = self.stored.get(name)
        if t is None:
            return None
        if t.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(t)
        place = parse_place(t)
        if not (self.path.parent / place.file).is_file():
            return None
        whole = TensorProto(data_type=t.data_type, dims=t.dims)
        with open(open_inside(self.path.parent, place.file, name), "rb") as f:
            f.seek(place.offset)
            whole.raw_data = f.read(place.length)
        with refusing(ModelError, "the weight's data cannot be read", f"{self.path}, '{name}'", "export the file again"):
            return numpy_helper.to_array(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A parallel program: a file per rank, and what ``program.json`` says of it.

    Attributes:
        mesh: names of the axes along which ranks are counted, row-major, and their sizes.
        placement: for tensors of the model by name, the mesh axes that cut each of their axes.
        names: tensors of the ranks that the model calls otherwise.
        unused: patterns of a plan that are of nothing in the model.
    """

    ranks: tuple[OneFile, ...]
    mesh: Mapping[str, int]
    placement: Mapping[str, Any] = field(default_factory=dict[str, Any])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    unused: tuple[str, ...] = ()

    def starts(self, rank: int, name: str, shape: Sequence[int], whole: Sequence[int]) -> list[tuple[int, ...]]:
        """Where a rank's box of a tensor of the model may begin: where ``placement`` says, else in the order of the ranks."""
        if name not in self.placement:
            return starts_in_order(rank, len(self.ranks), shape, whole)
        start = said(self.placement[name], name, rank, self.mesh, whole)
        inside = len(shape) == len(whole) and all(s + n <= w for s, n, w in zip(start, shape, whole, strict=True))
        return [start] if inside else []


def read_file(path: Path, shapes: Given, rank: int = 0, world: int = 1, known: dict[str, Lifted] | None = None) -> OneFile:
    """One file, cut at its collectives and lifted.

    Args:
        known: what was lifted before, by contents; ranks often differ in their weights alone.
    """
    return _lifted(load(path), path, shapes, rank, world, {} if known is None else known)


def _lifted(proto: ModelProto, path: Path, shapes: Given, rank: int, world: int, known: dict[str, Lifted]) -> OneFile:
    stored, outputs = _without_data(proto), tuple(o.name for o in proto.graph.output)
    found = [n for n in proto.graph.node if n.op_type == NODE]
    around = next((n for n in proto.graph.node for g in subgraphs(n) for m in nested(g.node) if m.op_type == NODE), None)
    if around is not None:
        raise ModelError("collectives inside loops and branches are not read", where=f"node '{around.name}'")
    collectives = tuple(_collective(n, k, rank, world) for k, n in enumerate(found))
    if found:
        if shapes and all(isinstance(v, int) or str(v).isdigit() for v in shapes.values()):
            rewrite_file(proto, {k: int(cast("Any", v)) for k, v in shapes.items()})
        _at_collectives(proto, collectives, found)
    names = {d.dim_param for i in proto.graph.input for d in i.type.tensor_type.shape.dim} | {i.name for i in proto.graph.input}
    given = {k: v for k, v in shapes.items() if k in names}
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True) + repr(sorted(given.items())).encode()).hexdigest()
    if digest not in known:
        known[digest] = lift(path, given, weights=False, model=proto)
    return OneFile(path=path, lifted=known[digest], stored=stored, outputs=outputs, collectives=collectives)


def read_program(paths: Sequence[Path], shapes: Given, model: Path | None = None) -> Program:
    """A folder of rank files (with ``program.json``), or the files themselves; one file is what all ranks run.

    Args:
        model: what a tensor-parallel plan, in a JSON file alone, is applied to.

    Raises:
        TapestryError: there is nothing to read, or it contradicts itself.
    """
    files, document = _found(paths)
    if "tp_plan" in document and not files and model is not None:
        return _planned(model, document, shapes)
    counts = {attributes(n).get("nb_rank", 1) for f in files[:1] for n in load(f).graph.node if n.op_type == NODE}
    mesh = {str(k): int(v) for k, v in document.get("mesh", {}).items()}
    world = prod(mesh.values()) if mesh else len(files) if len(files) > 1 else max(counts, default=1)
    if len(files) not in (1, world):
        raise TapestryError("not one file per rank", where=str(paths[0]), why=f"{len(files)} files for {world} ranks")
    known: dict[str, Lifted] = {}
    ranks = tuple(read_file(files[r if len(files) > 1 else 0], shapes, r, world, known) for r in range(world))
    return Program(
        ranks=ranks, mesh=mesh or {"rank": world}, placement=document.get("placement", {}), names=document.get("names", {})
    )


def _planned(model: Path, document: Mapping[str, Any], shapes: Given) -> Program:
    """The program that a tensor-parallel plan makes of a model."""
    proto, mesh = load(model), {str(k): int(v) for k, v in document.get("mesh", {"tp": 2}).items()}
    if len(mesh) != 1 or min(mesh.values()) < 1:
        raise TapestryError("a plan has one axis", where="mesh", why=f"it is {mesh}", hint='"mesh": {"tp": 4}')
    if shapes:
        rewrite_file(proto, {k: int(cast("Any", v)) for k, v in shapes.items()})
    (world,) = mesh.values()
    known: dict[str, Lifted] = {}
    made, unused = rank_models(proto, model.parent, document["tp_plan"], world)
    ranks = tuple(_lifted(p, model, {}, r, world, known) for r, p in enumerate(made))
    whole = {v.name: [None] * len(v.type.tensor_type.shape.dim) for v in (*proto.graph.input, *proto.graph.output)}
    return Program(ranks=ranks, mesh=mesh, placement={**whole, **document.get("placement", {})}, unused=tuple(unused))


def _found(paths: Sequence[Path]) -> tuple[list[Path], dict[str, Any]]:
    """Files in the order of their ranks, and the document beside them."""
    files = [p for p in paths if p.suffix != ".json" and not p.is_dir()]
    documents = [p for p in paths if p.suffix == ".json"]
    for folder in (p for p in paths if p.is_dir()):
        files += sorted(folder.glob("*.onnx"), key=_number)
        documents += [p for p in [folder / "program.json"] if p.is_file()]
    try:
        document: Any = json.loads(documents[0].read_text()) if documents else {}
    except ValueError as e:
        raise TapestryError("not JSON", where=str(documents[0]), why=str(e)) from None
    known = cast("dict[str, Any]", document if isinstance(document, dict) else {"(no object)": None})
    if not files and "tp_plan" not in known and known and all(isinstance(v, str) for v in known.values()):
        known = {"tp_plan": known}  # as transformers has it
    unknown = set(known) - {"mesh", "placement", "names", "tp_plan"}
    if unknown:
        what = f"unknown keys {sorted(unknown)}"
        raise TapestryError(what, where=str(documents[0]), hint="mesh, placement, names, tp_plan")
    if not files and "tp_plan" not in known:
        raise TapestryError("there is no program", where=str(paths[0]), hint="a folder with rank0.onnx, rank1.onnx, …")
    return files, known


def _number(path: Path) -> tuple[int, str]:
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else -1, path.name


def _without_data(proto: ModelProto) -> dict[str, TensorProto]:
    """Take the data out of every floating weight, so that none is folded; returns all weights as the file has them."""
    sizes = {i for n in proto.graph.node if n.op_type in SIZES for i in n.input[1:]}
    stored = {name: TensorProto.FromString(t.SerializeToString()) for name, t in stored_tensors(proto).items()}
    large = {n for n, t in stored.items() if t.data_type in FLOATING and prod(t.dims) > 1 and n not in sizes}
    nodes = [n for n in proto.graph.node if n.op_type == "Constant" and n.output[0] in large]
    for node in nodes:
        proto.graph.initializer.add(name=node.output[0])
    if nodes:
        replace_nodes(proto.graph, [n for n in proto.graph.node if n.op_type != "Constant" or n.output[0] not in large])
    for t in (t for t in proto.graph.initializer if t.name in large):
        kind, dims = stored[t.name].data_type, stored[t.name].dims
        bare = TensorProto(name=t.name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
        length = prod(dims) * helper.tensor_dtype_to_np_dtype(kind).itemsize
        for key, value in (("location", "weights"), ("offset", "0"), ("length", str(length))):
            bare.external_data.add(key=key, value=value)
        t.CopyFrom(bare)
    return stored


def _collective(node: NodeProto, number: int, rank: int, world: int) -> Collective:
    """A node's attributes, checked."""
    a = attributes(node)
    where = f"node '{node.name or number}'"
    kind, op = (bytes(a.get(n, b)).decode().upper() for n, b in (("collective_operation", b""), ("reduce_op", b"NONE")))
    kind = kind.removeprefix("K")
    group = tuple(int(r) for r in cast("Sequence[int]", a.get("groups", ()))) or tuple(range(world))
    if kind not in KINDS or (kind in ("ALL_REDUCE", "REDUCE", "REDUCE_SCATTER")) != (op in REDUCING):
        raise ModelError("not a collective", where=where, why=f"collective_operation is '{kind}', reduce_op '{op}'")
    if rank not in group or len(set(group)) < len(group) or not all(0 <= r < world for r in group):
        raise ModelError("not a group of this rank", where=where, why=f"groups is {list(group)}, the rank {rank} of {world}")
    root, parts = int(a.get("root", -1)), int(a.get("nb_rank", len(group)))
    if kind in ("BROADCAST", "REDUCE", "GATHER", "SCATTER") and root not in group:
        raise ModelError("the root is not in the group", where=where, why=f"root is {root}, groups {list(group)}")
    if parts not in (len(group), world):
        raise ModelError("nb_rank is not the number of ranks", where=where, why=f"it is {parts}, for {len(group)} of {world}")
    source = node.input[0] if node.input else ""
    target = node.output[0] if node.output else ""
    if kind in ("REDUCE", "GATHER") and rank != root:
        target = ""
    return Collective(node.name or target or f"{kind}_{number}", kind, op, root, group, source, target)


def _at_collectives(proto: ModelProto, collectives: Sequence[Collective], nodes: Sequence[NodeProto]) -> None:
    """Make what collectives give inputs, and what they take outputs."""
    types = _types(proto, collectives)
    names = {n.output[0] for n in nodes if n.output}
    replace_nodes(proto.graph, [n for n in proto.graph.node if n.op_type != NODE])
    outputs = [onnx.ValueInfoProto.FromString(o.SerializeToString()) for o in proto.graph.output if o.name not in names]
    have = {o.name for o in outputs}
    stored = {t.name for t in proto.graph.initializer}
    for c in collectives:
        if c.target:
            proto.graph.input.append(helper.make_value_info(c.target, types[c.target].type))
        if c.source and c.source not in have | names | stored:
            have.add(c.source)
            outputs.append(helper.make_value_info(c.source, types[c.source].type))
    if not outputs:  # a program that ends in a collective of an input: any value will do
        c = next(c for c in collectives if c.target)
        outputs.append(helper.make_value_info(c.target, types[c.target].type))
    del proto.graph.output[:]
    proto.graph.output.extend(outputs)


def _types(proto: ModelProto, collectives: Sequence[Collective]) -> dict[str, onnx.ValueInfoProto]:
    """Types of all values: by inference, with operators of the same shapes in place of collectives."""
    trial = ModelProto()
    trial.CopyFrom(proto)
    for node, c in zip((n for n in trial.graph.node if n.op_type == NODE), collectives, strict=True):
        if not c.source or not c.target:
            node.CopyFrom(helper.make_node("Identity", [trial.graph.input[0].name], [f"{node.name}.none"]))
            continue
        n = len(c.group)
        if c.kind in ("ALL_GATHER", "GATHER"):
            node.CopyFrom(helper.make_node("Concat", [c.source] * n, [c.target], axis=0))
        elif c.kind in ("REDUCE_SCATTER", "SCATTER"):
            rest = [f"{c.target}.{k}" for k in range(1, n)]
            node.CopyFrom(helper.make_node("Split", [c.source], [c.target, *rest], axis=0))
            if standard_opset(trial) >= 18:
                node.attribute.append(helper.make_attribute("num_outputs", n))
        else:
            node.CopyFrom(helper.make_node("Identity", [c.source], [c.target]))
    del trial.graph.output[1:]
    graph = inferred(trial).graph
    out = {v.name: v for group in (graph.input, graph.value_info, graph.output, proto.graph.value_info) for v in group}
    for t in graph.initializer:
        out[t.name] = helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
    for c in collectives:
        for name in (c.source, c.target):
            if name and (name not in out or static_shape(out[name].type) is None):
                raise ModelError("the size of what a collective moves is not known", where=f"'{name}'", hint="give --shape")
    return out
