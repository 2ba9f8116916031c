"""Rank files run by onnxruntime, piece by piece between their collectives, which are done here with numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, shape_inference

from tapestry.onnx_eval.ort_session import ort_session

NODE = "DistCollective"
APART = 1e-5  # of the largest value, in float32: more than sums in another order
MERGES = {"SUM": np.add, "AVG": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}


class Rank:
    """One rank's file, in pieces: each ends before a collective, or at the end."""

    def __init__(self, path: Path, feeds):
        self.model = onnx.load(path)
        self.values = dict(feeds)
        self.types = {v.name: v for v in [*self.model.graph.input, *self.model.graph.output, *self.model.graph.value_info]}
        self.types |= {v.name: v for v in shape_inference.infer_shapes(_plain(self.model)).graph.value_info}
        self.pieces, self.collectives = [[]], []
        for node in self.model.graph.node:
            if node.op_type == NODE:
                self.collectives.append(node)
                self.pieces.append([])
            else:
                self.pieces[-1].append(node)

    def run(self, k: int) -> None:
        """Everything before the collective number k."""
        nodes = self.pieces[k]
        if not nodes:
            return
        inits = {t.name: t for t in self.model.graph.initializer}
        made = {o for n in nodes for o in n.output if o}
        read = dict.fromkeys(i for n in nodes for i in n.input if i and i not in made)
        later = {i for p in self.pieces[k + 1 :] for n in p for i in n.input} | {c.input[0] for c in self.collectives[k:]}
        later |= {o.name for o in self.model.graph.output}
        given = [i for i in read if i not in inits]
        infos = [
            helper.make_tensor_value_info(i, helper.np_dtype_to_tensor_dtype(self.values[i].dtype), self.values[i].shape)
            for i in given
        ]
        outs = [self.types[o] for n in nodes for o in n.output if o in later]
        graph = helper.make_graph(nodes, "piece", infos, outs, [inits[i] for i in read if i in inits])
        piece = helper.make_model(graph, opset_imports=list(self.model.opset_import), ir_version=self.model.ir_version)
        session = ort_session(piece.SerializeToString())
        done = session.run(None, {i: self.values[i] for i in given})
        self.values |= dict(zip([o.name for o in session.get_outputs()], done, strict=True))

    def given(self, k: int):
        """What the rank gives to a collective."""
        name = self.collectives[k].input[0]
        stored = next((t for t in self.model.graph.initializer if t.name == name), None)
        return self.values[name] if stored is None else onnx.numpy_helper.to_array(stored)


def run(folder: Path, feeds) -> dict[str, np.ndarray]:
    """Whole outputs from whole inputs, as ``program.json`` says where their parts lie."""
    document = json.loads((folder / "program.json").read_text())
    return _joined(_walked(folder, document, feeds), document)


def differs(model: Path, folder: Path, seed: int = 0) -> bool:
    """Whether a program gives another value than its model at some cell of some rank, or stops on the way."""
    document, rng = json.loads((folder / "program.json").read_text()), np.random.default_rng(seed)
    inputs = onnx.load(model, load_external_data=False).graph.input
    feeds = {i.name: rng.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim], np.float32) for i in inputs}
    session = ort_session(model)
    expected = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    try:
        ranks = _walked(folder, document, feeds)
    except Exception:  # whatever it is that stops it
        return True
    for name, whole in expected.items():
        for r, rank in enumerate(ranks):
            theirs, mine = _part(whole, document["placement"][name], r, document["mesh"]), rank.values[name]
            if mine.shape != theirs.shape or not np.abs(mine - theirs).max() <= APART * np.abs(whole).max():
                return True
    return False


def _walked(folder: Path, document, feeds) -> list[Rank]:
    """All ranks at their ends."""
    mesh = document["mesh"]
    world = int(np.prod(list(mesh.values())))
    ranks = []
    for r in range(world):
        names = [i.name for i in onnx.load(folder / f"rank{r}.onnx", load_external_data=False).graph.input]
        ranks.append(Rank(folder / f"rank{r}.onnx", {n: _part(feeds[n], document["placement"][n], r, mesh) for n in names}))
    at = [0] * world
    for rank in ranks:
        rank.run(0)
    while any(at[r] < len(ranks[r].collectives) for r in range(world)):
        assert _meet(ranks, at), "the ranks wait for each other"
    return ranks


def _meet(ranks, at) -> bool:
    for r in range(len(ranks)):
        if at[r] == len(ranks[r].collectives):
            continue
        a = _attributes(ranks[r].collectives[at[r]])
        group = a["groups"]
        theirs = [_attributes(ranks[g].collectives[at[g]]) if at[g] < len(ranks[g].collectives) else None for g in group]
        if any(t is None or t["groups"] != group for t in theirs):
            continue
        assert all(t == a for t in theirs), (a, theirs)
        values = [ranks[g].given(at[g]) for g in group]
        for g, result in zip(group, _done(a, values), strict=True):
            ranks[g].values[ranks[g].collectives[at[g]].output[0]] = result
            at[g] += 1
            ranks[g].run(at[g])
        return True
    return False


def _done(a, values):
    kind, n = a["collective_operation"], len(values)
    alike = len({v.shape for v in values}) == len({v.dtype for v in values}) == 1
    assert a["nb_rank"] == a["group_size"] == n and alike, (a, [(v.shape, v.dtype) for v in values])
    if kind == "BROADCAST":
        return [values[a["groups"].index(a["root"])]] * n
    if kind == "ALL_GATHER":
        return [np.concatenate(values, 0)] * n
    merged = values[0]
    for v in values[1:]:
        merged = MERGES[a["reduce_op"]](merged, v)
    if a["reduce_op"] == "AVG":
        merged = merged / np.asarray(n, merged.dtype)
    if kind == "REDUCE":
        return [merged if g == a["root"] else np.full_like(merged, -7) for g in a["groups"]]
    return [merged] * n if kind == "ALL_REDUCE" else np.split(merged, n, 0)


def _attributes(node) -> dict:
    found = {x.name: helper.get_attribute_value(x) for x in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def _box(spec, extents, rank, mesh):
    place = dict(zip(mesh, np.unravel_index(rank, tuple(mesh.values())), strict=True))
    out = []
    for entry, n in zip(spec, extents, strict=True):
        axes = [] if entry is None else [entry] if isinstance(entry, str) else entry
        number, parts = 0, 1
        for axis in axes:
            number, parts = number * mesh[axis] + int(place[axis]), parts * mesh[axis]
        assert n % parts == 0
        out.append(slice(number * n // parts, (number + 1) * n // parts))
    return tuple(out)


def _part(value, spec, rank, mesh):
    return np.array(value[_box(spec, value.shape, rank, mesh)], order="C")


def _joined(ranks, document) -> dict[str, np.ndarray]:
    mesh, out = document["mesh"], {}
    for r, rank in enumerate(ranks):
        for o in rank.model.graph.output:
            part, spec = rank.values[o.name], document["placement"][o.name]
            cuts = [1 if e is None else int(np.prod([mesh[a] for a in ([e] if isinstance(e, str) else e)])) for e in spec]
            extents = [n * c for n, c in zip(part.shape, cuts, strict=True)]
            whole = out.setdefault(o.name, np.empty(extents, part.dtype))
            whole[_box(spec, extents, r, mesh)] = part
    return out


def _plain(model):
    """The model with nodes of the same shapes in place of collectives, for shape inference."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for node in copy.graph.node:
        if node.op_type == NODE:
            a = _attributes(node)
            n, kind = a["nb_rank"], a["collective_operation"]
            source, target = node.input[0], node.output[0]
            if kind == "ALL_GATHER":
                node.CopyFrom(helper.make_node("Concat", [source] * n, [target], axis=0))
            elif kind == "REDUCE_SCATTER":
                node.CopyFrom(
                    helper.make_node(
                        "Split", [source], [target, *(f"{target}.{k}" for k in range(1, n))], axis=0, num_outputs=n
                    )
                )
            else:
                node.CopyFrom(helper.make_node("Identity", [source], [target]))
    return copy
