"""``onnx-ranks``: one ONNX file per rank, with collectives as ``DistCollective`` nodes as TensorRT 11 and polygraphy have them.

Attributes: ``collective_operation``, ``reduce_op``, ``root``, ``nb_rank``, ``group_size`` and ``groups``, the ranks of one
group. Beside ``rank0.onnx``, … lie the weights, every part of each once, and ``program.json``: the mesh, and where inputs and
outputs lie. `tapestry prove MODEL FOLDER` decides whether the files compute the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto

from tapestry.build.atomic import check_place, new_folder
from tapestry.build.store import Build
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, shape, size, whole
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Monoid, Product
from tapestry.ir.plan import Mesh
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Transfer, moved_bytes
from tapestry.ir.provenance import operation_names
from tapestry.ir.types import itemsize
from tapestry.plan.layout_constraints import Sayable
from tapestry.tools.exports.layouts import as_partition_spec, layout_of
from tapestry.tools.exports.nodes.blocks import launch, opset_of
from tapestry.tools.exports.nodes.onnx_nodes import COLLECTIVE, Nodes, NotExpressible, Value, relative
from tapestry.tools.exports.onnx_files import DataFile, checked, model_of, refused, stored, weights_of
from tapestry.tools.exports.rank_collectives import Exchange, Places, assembled, broadcast, moved, reduced

MARK, DATA = "program.json", "weights.data"


def language(graph: Graph, mesh: Mesh) -> list[Sayable]:
    """What collectives of ONNX can say: equal parts, no merge in order, and only plain sums and extremes scattered."""
    del mesh
    out = list[Sayable]()
    for op in graph.ops:
        monoid = MONOIDS[op.monoid] if isinstance(op, Block) and op.monoid is not None else None
        maps = frozenset(d.name for d in op.dims) if monoid and not monoid.commutative else None
        out.append(Sayable(dims=maps, scatters=monoid is None or _is_plain(monoid)))
    return out


def _is_plain(monoid: Monoid) -> bool:
    """Whether each field is merged by itself, by an operation that a collective has."""
    s = monoid.structure
    return isinstance(s, ByPrimitive) or (isinstance(s, Product) and all(map(_is_plain, s.parts)))


def export_ranks(build: Build, constants: bytes, target: Path, *, nearest: bool) -> dict[str, Any]:
    """Write a folder of rank files; returns what was written, with the bytes that the files move beyond the plan's.

    Args:
        nearest: whether collectives may move more than the plan does, where ``DistCollective`` cannot say what it does.

    Raises:
        NotExpressible: an operation has no form in ONNX, or a step no collective.
    """
    check_place(target, MARK)
    ranks = [RankFile(build, rank, nearest) for rank in range(build.program.devices)]
    for rank in ranks:
        rank.walk()
    with new_folder(target, MARK) as folder:
        with open(folder / DATA, "wb") as file:
            store = DataFile(DATA, file, weights_of(build, constants))
            for rank in ranks:
                (folder / f"rank{rank.rank}.onnx").write_bytes(rank.model(store).SerializeToString())
        (folder / MARK).write_text(json.dumps(program_document(build, ranks), indent=2) + "\n")
        checked_ranks(folder, len(ranks))
    extra = {
        k: round(sum(r.exchange.extra.get(k, 0) for r in ranks)) for k in sorted({k for r in ranks for k in r.exchange.extra})
    }
    planned = moved_bytes(build.program)
    return {
        "folder": str(target),
        "ranks": len(ranks),
        "nodes": [r.size for r in ranks],
        "collectives": sum(ranks[0].exchange.counts.values()),
        "by_kind": dict(sorted(ranks[0].exchange.counts.items())),
        "bytes": round(sum(r.exchange.sent for r in ranks)),
        "plan_bytes": planned,
        "extra_bytes": sum(extra.values()),
        "extra": extra,
        "whole_inputs": sorted(ranks[0].split),
    }


@dataclass(slots=True)
class RankFile:
    """One rank's program, step by step.

    Attributes:
        values: buffers that the rank has.
        split: inputs of which every rank is given all, because its part is none that ``program.json`` can say.
    """

    build: Build
    rank: int
    nearest: bool
    nodes: Nodes = field(init=False)
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    weights: dict[str, tuple[str, Box]] = field(default_factory=dict[str, tuple[str, Box]])
    inputs: dict[str, Value] = field(default_factory=dict[str, Value])
    split: set[str] = field(default_factory=set[str])
    named: set[str] = field(default_factory=set[str])
    exchange: Exchange = field(init=False)
    places: dict[str, Places] = field(init=False)
    size: int = 0

    def __post_init__(self) -> None:
        program = self.build.program
        self.nodes = Nodes.of(self.graph, program.buffers)
        own = {t for t, b in program.outputs.items() if t == b and output_spec(self.build, t) is not None}
        self.named |= (set(program.outputs) | set(self.graph.inputs)) - own  # names that are for what comes last, or first
        self.exchange = Exchange(self.nodes, program, self.rank, self.nearest)
        self.places = input_places(self.build)

    @property
    def graph(self) -> Graph:
        """What is computed."""
        return self.build.plan.graph

    @property
    def program(self) -> Program:
        """What every device does."""
        return self.build.program

    def walk(self) -> None:
        """Nodes of every step."""
        names = operation_names(self.graph)
        for step in self.program.steps:
            match step:
                case Load(buffer=name):
                    self._load(name, self.places)
                case Launch():
                    self.nodes.begin(names[step.op])
                    try:
                        self._launch(step)
                    except NotExpressible as e:
                        raise refused(self.graph.ops[step.op], names[step.op], e) from None
                case Transfer():
                    self.nodes.begin(step.dst)
                    found = moved(self.exchange, step, self.values.get(step.src))
                    if found is not None:
                        self._have([step.dst], [found])
                case Reduce():
                    self.nodes.begin(names[step.op])
                    self._reduce(step)
                case Free():
                    for b in step.buffers:
                        self.values.pop(b, None)
        for t, name in self.program.outputs.items():
            if output_spec(self.build, t) is None:
                self.nodes.begin(t)
                self._bring(t, name)

    def _load(self, name: str, placed: Mapping[str, Places]) -> None:
        """A part of a weight, or of an input: as it is given, or cut out of all of it."""
        buffer = self.program.buffers[name]
        box = buffer.boxes[self.rank]
        if box is None:
            return
        if buffer.tensor in self.graph.weights:
            self.weights[name] = buffer.tensor, box
            self.values[name] = Value(name, shape(box), buffer.dtype)
            return
        given = placed[buffer.tensor].boxes[self.rank]
        assert given is not None
        mine = self.inputs.setdefault(buffer.tensor, Value(buffer.tensor, shape(given), buffer.dtype))
        if not placed[buffer.tensor].said:
            self.split.add(buffer.tensor)
        self.nodes.begin(buffer.tensor)
        self.values[name] = self.nodes.slice(mine, relative(box, given))

    def _launch(self, step: Launch) -> None:
        block = step.blocks[self.rank]
        if block is None:
            return
        buffers, rank = self.program.buffers, self.rank
        ins = tuple(buffers[b].boxes[rank] if b else None for b in step.ins)
        outs = tuple(box for b in step.outs if (box := buffers[b].boxes[rank]) is not None)
        kernel = Kernel(op=step.op, mode=step.mode, block=block, ins=ins, outs=outs)
        held = [self.values[b] if b else None for b in step.ins]
        found = launch(self.nodes, self.graph, kernel, held, [self.values[b] for b in step.states])
        self._have(step.outs, found)

    def _have(self, names: Sequence[str], values: Sequence[Value]) -> None:
        """Buffers under their own names, the first time that there are such."""
        for name, v in zip(names, values, strict=True):
            self.values[name] = v if name in self.named else self.nodes.result(v, name)
            self.named.add(name)

    def _reduce(self, step: Reduce) -> None:
        op = self.graph.ops[step.op]
        monoid = getattr(op, "monoid", None)
        assert monoid is not None
        for group in step.groups:
            if self.rank in group:
                found = reduced(self.exchange, step, group, monoid, [self.values.get(b) for b in step.srcs])
                self._have(step.dsts, found)

    def _bring(self, output: str, name: str) -> None:
        """All of an output that ends in parts which cannot be said, from its holders to every rank."""
        buffer, n = self.program.buffers[name], self.program.devices
        everything, pieces = whole(self.graph.tensors[output].shape), dict[Box, Value]()
        for box, holder in {b: d for d, b in reversed(list(enumerate(buffer.boxes))) if b is not None}.items():
            given = self.values.get(name) if self.rank == holder else None
            members = (holder, *(d for d in range(n) if d != holder))
            pieces[box] = broadcast(self.exchange, given, box, box, members, buffer.dtype)
            nbytes = (n - 1) * size(box) * itemsize(buffer.dtype) / n
            self.exchange.costs("an output in unequal parts, brought to every rank", nbytes, output)
        self.values[name] = assembled(self.nodes, everything, pieces, output)

    def model(self, store: DataFile) -> Any:
        """The file, with its weights in a store."""
        outputs = [(t, self.values[b]) for t, b in self.program.outputs.items() if b in self.values]
        self.nodes.begin("")
        named = [v if v.name == t else self.nodes.result(v, t) for t, v in outputs]
        weights = [
            stored(store, name, tensor, box, self.graph.tensors[tensor].dtype) for name, (tensor, box) in self.weights.items()
        ]
        model = model_of(
            self.nodes,
            f"rank{self.rank}",
            list(self.inputs.values()),
            named,
            weights,
            opset_of(self.graph),
            described=[*self.exchange.described, *self.inputs.values()],
        )
        self.size = len(model.graph.node)
        return model


def input_places(build: Build) -> dict[str, Places]:
    """The box of each input that every rank is given: the one that it loads, if that is one and can be said; else all of it."""
    program, graph = build.program, build.plan.graph
    out: dict[str, Places] = {}
    for t in graph.inputs:
        found = {b.boxes for s in program.steps if isinstance(s, Load) and (b := program.buffers[s.buffer]).tensor == t}
        everything = whole(graph.tensors[t].shape)
        boxes = next(iter(found)) if len(found) == 1 else tuple(everything for _ in range(program.devices))
        spec = said_boxes(build, boxes, graph.tensors[t].shape)
        if spec is None:
            out[t] = Places(tuple(everything for _ in range(program.devices)), [None] * len(everything), said=False)
        else:
            out[t] = Places(boxes, spec, said=True)
    return out


def said_boxes(build: Build, boxes: tuple[Box | None, ...], extents: tuple[int, ...]) -> list[Any] | None:
    """Boxes as mesh axes that cut each axis into equal parts; None where they are none."""
    mesh = build.plan.mesh
    layout = None if any(a.weights or a.order for a in mesh) else layout_of(boxes, extents, mesh)
    if layout is None or len({shape(b) for b in boxes if b is not None}) > 1:
        return None
    return as_partition_spec(layout, len(extents), mesh)


def program_document(build: Build, ranks: list[RankFile]) -> dict[str, Any]:
    """``program.json``: the mesh, and which mesh axes cut each axis of inputs and outputs."""
    places = {t: p.spec for t, p in input_places(build).items() if t in ranks[0].inputs}
    for t in build.program.outputs:
        places[t] = output_spec(build, t) or [None] * len(build.plan.graph.tensors[t].shape)
    return {"mesh": {a.name: a.size for a in build.plan.mesh}, "placement": places}


def output_spec(build: Build, output: str) -> list[Any] | None:
    """Where an output ends, as `said_boxes` says it; None where that cannot be said."""
    boxes, extents = build.program.buffers[build.program.outputs[output]].boxes, build.plan.graph.tensors[output].shape
    everything = {b for b in boxes if b is not None} == {whole(extents)}
    return [None] * len(extents) if everything else said_boxes(build, boxes, extents)


def checked_ranks(folder: Path, ranks: int) -> None:
    """Let onnx check each file, with a plain node in the place of each collective, which it does not know.

    Raises:
        TapestryError: it refuses one.
    """
    for rank in range(ranks):
        model = ModelProto.FromString((folder / f"rank{rank}.onnx").read_bytes())
        for node in model.graph.node:
            if node.op_type == COLLECTIVE:
                node.op_type = "Identity"
                del node.attribute[:]
        trial = folder / "trial.onnx"
        trial.write_bytes(model.SerializeToString())
        try:
            checked(trial)
        finally:
            trial.unlink()
