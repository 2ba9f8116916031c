"""``tp-plan``: a plan in transformers' words, a style for each linear layer and table (``base_model_tp_plan``).

Between a ``colwise`` layer and the ``rowwise`` layer that takes its result, transformers runs a model's own code on parts of
tensors; everywhere else on whole ones. So the plan's cuts of weights say the styles, and every operation in between is held to
the parts that it would be given: each rank must read, of its own parts, what the first rank reads of its. Where that is not so,
the result of the layer before is gathered. All layers of one pattern (``layers.*.self_attn.q_proj``) have one style.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tapestry.build.atomic import write_json
from tapestry.build.store import Build
from tapestry.ir.expr import Index, distinct
from tapestry.ir.graph import Block, Graph, Op, Read, reduced_names
from tapestry.ir.index import Aff, dim, dims_of, evaluate, substitute
from tapestry.ir.plan import Mesh, MeshAxis, Strategy
from tapestry.ir.program import Launch, moved_bytes
from tapestry.ir.provenance import PARAMETER, operation_names, parts
from tapestry.ir.recognition.contraction import only_sums
from tapestry.ir.recognition.selection_sum import selection
from tapestry.plan.layout_constraints import Sayable
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.strategy import footprints, tensor_boxes
from tapestry.tools.exports.nodes.onnx_nodes import NotExpressible

X = TypeVar("X")
AXES = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
}
"""Styles, and the axis of the weight that each cuts."""
MOST = 1 << 20  # points at which two index expressions are compared one by one


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, or a table, that an operation computes: its pattern and its weight's dimensions."""

    pattern: str
    module: str
    weight: str
    out: str
    into: str
    table: bool = False


@dataclass(slots=True)
class Parts:
    """What transformers would do with each tensor, given styles.

    Attributes:
        cut: tensors of which each rank has a part, by the axis; ``origin``: the patterns whose results these are made of.
        dims: for each operation the dimension that it would be cut along, and whether its sum is all-reduced.
        moved: bytes of collectives, of all ranks together.
    """

    cut: dict[str, int] = field(default_factory=dict[str, int])
    origin: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    dims: list[str | None] = field(default_factory=list[str | None])
    styles: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    moved: int = 0


def export_tp_plan(build: Build, target: Path, *, nearest: bool) -> dict[str, Any]:
    """Write the dictionary as JSON; returns it with what it costs.

    Raises:
        NotExpressible: it has no styles, or not those that do what the plan does, and the nearest are not asked for.
    """
    maker = _Maker(build)
    parts = maker.parts()
    styles = {p: next(iter(s)) for p, s in sorted(parts.styles.items())}
    different = maker.differences(parts)
    planned = moved_bytes(build.program)
    if different and not nearest:
        name, why = different[0]
        hint = f"--nearest: {parts.moved:,} bytes are moved then, {planned:,} by the plan"
        raise NotExpressible("no tp_plan style does what the plan does", where=f"operation '{name}'", why=why, hint=hint)
    write_json(target, styles)
    return {
        "file": str(target),
        "ranks": maker.ranks,
        "axis": maker.axis.name,
        "styles": styles,
        "bytes": parts.moved,
        "plan_bytes": planned,
        "extra_bytes": parts.moved - planned,
        "different": [n for n, _ in different],
        "left_out": [a.name for a in build.plan.mesh if a != maker.axis and a.size > 1],
    }


def language(graph: Graph, mesh: Mesh) -> list[Sayable]:
    """What styles can cut: layers along their weights, and what is computed of a layer's features along these.

    More than that is left out only once a plan is there (`said`).

    Raises:
        NotExpressible: the mesh has several axes.
    """
    if sum(a.size > 1 for a in mesh) > 1:
        what = "a tp_plan has one axis"
        raise NotExpressible(what, where="--for tp-plan", why=f"the mesh has {len(mesh)}", hint="--mesh tp=N, or --devices N")
    features, out = dict[str, set[int]](), list[Sayable]()
    for op in graph.ops:
        reads = op.reads if isinstance(op, Block) else ()
        dims = {d for r in reads for k in features.get(r.tensor, ()) for d in dims_of(r.index[k])} & {d.name for d in op.dims}
        dims |= {d for x in _layers(op, graph) for d in (x.out, x.into)}
        for t in op.outs if isinstance(op, Block) else ():
            features[t] = {k for k, d in enumerate(op.dims) if d.name in dims}
        out.append(Sayable(dims=frozenset(dims), scatters=False, ends_whole=True))
    return out


def said(plan: PricedPlan) -> list[tuple[Strategy, ...]]:
    """What transformers does with the styles of a plan, and with fewer, without those whose results it gathers at once.

    Raises:
        NotExpressible: it cuts no layer; or its cuts are those of styles, and yet transformers runs some operation otherwise.
    """
    cuts = zip(plan.plan.graph.ops, plan.plan.strategies, strict=True)
    if not any(any(s.dims) for op, s in cuts if next(_layers(op, plan.plan.graph), None)):
        why = "of the plans that styles can say, the one that cuts no weight is the fastest"
        hint = "larger sizes, less --memory, or --pin 'layers.*.mlp.up_proj:out=tp'"
        raise NotExpressible("tensor parallelism does not pay", where="--for tp-plan", why=why, hint=hint)
    maker, out = _Maker(plan), list[tuple[Strategy, ...]]()
    parts = maker.parts()
    for found in (parts, maker.parts({p for p, s in parts.styles.items() if s == {"colwise_gather_output"}})):
        axes = [next((k for k, x in enumerate(op.dims) if x.name == d), None) for op, d in zip(maker.graph.ops, found.dims)]
        out.append(tuple(Strategy(maker.along(d), maker.along(k)) for d, k in zip(found.dims, axes, strict=True)))
        if out[-1] == plan.plan.strategies and (different := maker.differences(found)):
            where, why = different[0]
            raise NotExpressible("no tp_plan style does what the plan does", where=f"operation '{where}'", why=why)
    return out


class _Maker:
    """Styles of a build's plan."""

    def __init__(self, build: Build | PricedPlan) -> None:
        self.build, self.graph = build, build.plan.graph
        if build.plan.stages:
            raise NotExpressible("a tp_plan cannot say pipeline stages", hint="compile with --stages 1, or onnx-ranks")
        if any(a.order for a in build.plan.mesh):
            raise NotExpressible("a tp_plan cannot say an order of devices", hint="onnx, onnx-ranks or json")
        self.layers = _called_apart([list(_layers(op, self.graph)) for op in self.graph.ops], parts(self.graph))
        self.at = self._axis()
        self.axis = build.plan.mesh[self.at]
        self.ranks, self.mesh = self.axis.size, (MeshAxis(self.axis.name, self.axis.size),)
        self.called = operation_names(self.graph)
        modules = {x.module for found in self.layers for x in found}
        self.drop = _common(modules | {t.rpartition(".")[0] for t in self.graph.weights if PARAMETER.fullmatch(t)})
        self.gathered: set[str] = set()
        self.kept: set[str] = set()

    def _axis(self) -> int:
        """The mesh axis that cuts the weights of layers."""
        found = Counter[int]()
        for layers, s in zip(self.layers, self.build.plan.strategies, strict=True):
            for a, d in enumerate(s.dims):
                if layers and d in (layers[0].out, layers[0].into) and self.build.plan.mesh[a].size > 1:
                    found[a] += 1
        if not found:
            why = "no linear layer that the file names (layers.0.mlp.up_proj.weight) is cut along its weight"
            hint = "--pin 'layers.*.mlp.up_proj:out=tp', and an export that keeps parameters' names (optimize=False)"
            raise NotExpressible("there is nothing for a tp_plan to say", why=why, hint=hint)
        if len(found) > 1:
            names = ", ".join(self.build.plan.mesh[a].name for a in sorted(found))
            why = f"mesh axes {names} all cut weights"
            raise NotExpressible("a tp_plan has one axis", why=why, hint="a mesh with one such axis")
        return next(iter(found))

    def along(self, x: X) -> tuple[X | None, ...]:
        """Something for the mesh axis of the styles, nothing for the others."""
        return tuple(x if a == self.at else None for a in range(len(self.build.plan.mesh)))

    def parts(self, kept: Set[str] = frozenset()) -> Parts:
        """Parts under the plan's cuts. Where an operation cannot be run on them, a layer's result is gathered, and so on;
        layers of ``kept`` patterns are whole."""
        self.kept |= kept
        while True:
            known = len(self.gathered) + len(self.kept)
            found = self._walked()
            if found is not None:
                mixed = {p for p, s in found.styles.items() if len(s) > 1} | self._apart(found)
                if not mixed:
                    return found
                self.kept |= mixed
            assert len(self.gathered) + len(self.kept) > known, "the same layers are gathered again"

    def _apart(self, found: Parts) -> set[str]:
        """Modules that share a weight and do not all cut it along the same axis."""
        users: dict[str, set[str]] = {}
        for x in (x for layers in self.layers for x in layers):
            users.setdefault(x.weight, set()).add(self.pattern(x.module))
        axes = {p: {AXES[s] for s in styles} for p, styles in found.styles.items()}
        return {p for own in users.values() if len({frozenset(axes.get(p, ())) for p in own}) > 1 for p in own & axes.keys()}

    def _walked(self) -> Parts | None:
        """One walk over the operations; None where more is to be gathered."""
        parts = Parts()
        for k, op in enumerate(self.graph.ops):
            bad = self._layer(parts, k, op) if self.layers[k] else self._between(parts, op)
            if bad:
                (self.gathered if not bad <= self.gathered else self.kept).update(bad)
                return None
        ends = {p for t in self.graph.outputs if t in parts.cut for p in parts.origin[t]}
        self.gathered |= ends
        return None if ends else parts

    # operations

    def _between(self, parts: Parts, op: Op) -> set[str]:
        """An operation of the model's own code: on parts if it reads any; the patterns to gather where it cannot be."""
        cut = [t for t in op.inputs if t in parts.cut]
        if not cut:
            parts.dims.append(None)
            return set()
        for axis, d in enumerate(op.dims):
            if self._fits(parts, op, d.name, None):
                parts.dims.append(d.name)
                return self._cut(parts, op, axis, {p for t in cut for p in parts.origin[t]})
        return {p for t in cut for p in parts.origin[t]}

    def _cut(self, parts: Parts, op: Op, axis: int, origin: set[str]) -> set[str]:
        """Results in parts; the patterns to gather where a result has no such axis."""
        for n, t in enumerate(op.outs):
            own = axis if isinstance(op, Block) else op.out_axes[n][axis]
            if own is None:
                return origin
            parts.cut[t], parts.origin[t] = own, set(origin)
        return set()

    def _fits(self, parts: Parts, op: Op, d: str, skip: frozenset[str] | None) -> bool:
        """Whether an operation that is cut along a dimension is, on each rank, the model's own code on the rank's parts."""
        if op.ranges[d] % self.ranks or not isinstance(op, Block) or d in _counted(op):
            return False
        out = next((k for k, x in enumerate(op.dims) if x.name == d), None)
        for k, t, boxes in footprints(op, self.graph, Strategy((d,), (out,)), self.mesh):
            if skip is not None and t in skip:
                continue
            shape, axis = self.graph.tensors[t].shape, parts.cut.get(t)
            if t in self.graph.weights and self._owned(parts, t):
                axis = 0
            if axis is not None and shape[axis] % self.ranks:
                return False
            held = tensor_boxes(shape, (axis,), self.mesh)
            if (boxes[..., 0] < held[..., 0]).any() or (boxes[..., 1] > held[..., 1]).any():
                return False
            if not _is_moved(op.reads[k], d, op.ranges, self.ranks, {} if axis is None else {axis: shape[axis] // self.ranks}):
                return False
        return True

    def _owned(self, parts: Parts, t: str) -> bool:
        """Whether a parameter is the bias of a layer whose result is in parts."""
        module, _, own = t.rpartition(".")
        return own == "bias" and "colwise" in parts.styles.get(self.pattern(module), ())

    def _layer(self, parts: Parts, k: int, op: Op) -> set[str]:
        """Linear layers of one operation, or a table; the patterns to gather where what they read does not fit."""
        layers, strategy = self.layers[k], self.build.plan.strategies[k]
        cut = [t for t in op.inputs if t in parts.cut]
        origin = {p for t in cut for p in parts.origin[t]}
        patterns = {self.pattern(x.module) for x in layers}
        wanted = strategy.dims[self.at] if not patterns & self.kept else None
        out = next((i for i, d in enumerate(op.dims) if d.name == layers[0].out), 0)
        even = wanted is not None and op.ranges[wanted] % self.ranks == 0
        nbytes = sum(self.graph.tensors[t].nbytes for t in op.outs)
        if layers[0].table:
            words = {layers[0].into: "embedding_rowwise", layers[0].out: "embedding_colwise"}
            style = words.get(wanted or "") if even else None
            parts.dims.append(wanted if style else None)
            if style:
                parts.styles.setdefault(self.pattern(layers[0].module), set()).add(style)
                parts.moved += nbytes * (self.ranks - 1) * (2 if style == "embedding_rowwise" else 1)
            return origin
        own = frozenset({x.weight for x in layers} | {f"{x.module}.bias" for x in layers})
        if cut and not patterns & self.kept and self._fits(parts, op, layers[0].into, own):
            return self._styled(parts, op, layers, "rowwise", layers[0].into, nbytes)
        if cut:  # what is computed with the layer's result, in the same operation
            if patterns & (self.kept | self.gathered) or not self._fits(parts, op, layers[0].out, own):
                return origin
            self._styled(parts, op, layers, "colwise", layers[0].out, 0)
            return self._cut(parts, op, out, patterns | origin)
        if even and wanted == layers[0].out:
            if patterns & self.gathered or not self._fits(parts, op, layers[0].out, own):
                return self._styled(parts, op, layers, "colwise_gather_output", layers[0].out, nbytes)
            self._styled(parts, op, layers, "colwise", layers[0].out, 0)
            return self._cut(parts, op, out, patterns)
        if even and wanted == layers[0].into:
            return self._styled(parts, op, layers, "rowwise_split_input", layers[0].into, nbytes)
        parts.dims.append(None)
        return set()

    def _styled(self, parts: Parts, op: Op, layers: list[Layer], style: str, d: str, nbytes: int) -> set[str]:
        """Layers with a style, and the bytes that their results take."""
        parts.dims.append(d)
        parts.moved += nbytes * (self.ranks - 1) * (2 if "rowwise" in style else 1)
        for x in layers:
            parts.styles.setdefault(self.pattern(x.module), set()).add(style)
        return set()

    def pattern(self, module: str) -> str:
        """A module's name without what all have in front, with ``*`` for the number of a layer."""
        return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", ".".join(module.split(".")[self.drop :]))

    def differences(self, parts: Parts) -> list[tuple[str, str]]:
        """Operations that transformers would run otherwise than the plan does, each with how."""
        out: list[tuple[str, str]] = []
        rows = zip(self.graph.ops, self.build.plan.strategies, parts.dims, self.called, self.layers, strict=True)
        for op, s, d, name, layers in rows:
            patterns = {self.pattern(x.module) for x in layers}
            mine = s.dims[self.at]
            scattered = mine in reduced_names(op) and s.out[self.at] is not None
            if mine != d:
                out.append((name, f"the plan cuts {mine or 'nothing'}, transformers would cut {d or 'nothing'}"))
            elif scattered:
                out.append((name, "the plan scatters the sum, transformers reduces all of it"))
            elif any("colwise_gather_output" in parts.styles.get(p, ()) for p in patterns) and not self._is_gathered(op):
                out.append((name, "the plan keeps the result in parts, transformers would gather it"))
        return out

    def _is_gathered(self, op: Op) -> bool:
        """Whether every device has all of a result at the end, or whenever it is read."""
        program = self.build.program
        held = {*program.outputs.values(), *(b for s in program.steps if isinstance(s, Launch) for b in s.ins if b)}
        return all(len(set(program.buffers[b].boxes)) == 1 for b in held if program.buffers[b].tensor in op.outs)


def _called_apart(layers: list[list[Layer]], scopes: Sequence[str]) -> list[list[Layer]]:
    """Layers that share a weight by the modules that they are computed for; none of them where these are not known."""
    users: dict[str, list[str]] = {}
    for found, scope in zip(layers, scopes, strict=True):
        for x in found:
            users.setdefault(x.weight, []).append(scope if len(found) == 1 else "")
    tied = {w for w, own in users.items() if len(own) > 1 and len(set(own)) == len(own) and all(own)}
    unknown = {w for w, own in users.items() if len(set(own)) > 1} - tied
    return [
        [replace(x, module=scope) if x.weight in tied else x for x in found if x.weight not in unknown]
        for found, scope in zip(layers, scopes, strict=True)
    ]


def _counted(op: Block) -> set[str]:
    """Dimensions whose coordinates are values in the operation's expressions."""
    exprs = distinct((*op.body, *op.then, *(i.body for i in op.inner)))
    return {d for e in exprs if isinstance(e, Index) for d in dims_of(e.aff)}


def _is_moved(read: Read, d: str, ranges: Mapping[str, int], ranks: int, parts: Mapping[int, int]) -> bool:
    """Whether every rank reads of its own part what the first one reads of its, when a dimension is cut.

    Args:
        parts: cells of a part, by the axis of the tensor that is cut.
    """
    n = ranges[d] // ranks
    local = {**ranges, d: n}
    wanted = [(e, parts.get(k, 0)) for k, e in enumerate(read.index)] + [(g.aff, 0) for g in read.when]
    return all(
        _equal(substitute(e, {d: dim(d) + rank * n}, local), e + rank * part, local)
        for rank in range(1, ranks)
        for e, part in wanted
    )


def _equal(a: Aff, b: Aff, ranges: Mapping[str, int]) -> bool:
    """Whether two index expressions have the same values: as they are written, or counted out where there are few."""
    if a == b:
        return True
    names = sorted(dims_of(a) | dims_of(b))
    if prod(ranges[n] for n in names) > MOST:
        return False
    at = dict(zip(names, np.ix_(*(np.arange(ranges[n]) for n in names)), strict=True))
    return bool(np.all(evaluate(a, at) == evaluate(b, at)))


def _layers(op: Op, graph: Graph) -> Iterator[Layer]:
    """The linear layers that an operation computes by their weights' names, or the table that it looks up."""
    if not isinstance(op, Block) or op.monoid is None or not only_sums(op.monoid) or len(op.reduce) != 1 or op.inner:
        return
    reduced, maps, table = op.reduce[0].name, {d.name for d in op.dims}, selection(op) is not None
    for k in sorted(op.body_reads()):
        r = op.reads[k]
        if r.tensor not in graph.weights or not r.tensor.endswith(".weight") or len(r.index) != 2 or r.when:
            continue
        first, second = (str(e) if e.is_dim else "" for e in r.index)
        module = r.tensor.removesuffix(".weight")
        if table and first == reduced and second in maps:
            yield Layer(module, module, r.tensor, second, first, table=True)
        elif first in maps and second == reduced:
            yield Layer(module, module, r.tensor, first, second)


def _common(modules: Iterable[str]) -> int:
    """How many parts the names of all modules begin with alike, in front of what is a layer's number or the last part."""
    names = [m.split(".") for m in modules]
    k = 0
    while names and all(len(n) > k + 1 and n[k] == names[0][k] and not n[k + 1].isdecimal() for n in names):
        k += 1
    return k
