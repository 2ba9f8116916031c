"""Annotations of a model as constraints on its plan: what the specs say is kept, what they leave open is searched.

A spec of a result that simplification fuses away is carried to the result that it was fused into, by the projections in
between; where that says something else, the result is kept apart instead. A spec of a view is carried to what it is a view of,
and a result whose cells are interleaved (several cut axes fused into one) is computed with those axes apart. What cannot be
kept is listed, never dropped in silence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import Any, NoReturn, cast

import numpy as np

from tapestry.errors import PlanError, TapestryError
from tapestry.interop import onnx_annotations
from tapestry.interop.annotation_rules import Context, spec_rules
from tapestry.interop.onnx_annotations import read_json
from tapestry.interop.placement import Intervals, Placement, fused_sizes, held, layout_of, placement, spec_for
from tapestry.interop.sharding_specs import ShardedDim, ShardingSpec, SimpleShard, with_sizes
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Op, Read, shape_of
from tapestry.ir.index import Aff, dim, dims_of, evaluate, floordiv, modulo
from tapestry.ir.plan import Layout, Mesh
from tapestry.plan.layout_constraints import Dims, LayoutConstraints
from tapestry.rewrites.core.applied import apply_moves, swept
from tapestry.rewrites.core.driver import applied, disabled_by, simplify, without
from tapestry.rewrites.core.edit import is_view
from tapestry.rewrites.core.rule import Move, own_rules, parse_move
from tapestry.sharding.annotations import Annotations, shapes

# Where the cells of a view are, from where those of the tensor behind it are; and the other way round.
#
# A view (a reshape, a transpose, a slice) has no place of its own in a plan. A spec of one is a layout of what it is a view of,
# and the layout of that is a spec of the view: with several ``simple_sharding`` entries for an axis fused from several.


MAX_CELLS = 1 << 22  # of the axes that one index expression ties together


def view_at(graph: Graph, tensor: str) -> Block | None:
    """The view that writes a tensor, if one does and nothing is filled in by it."""
    at = graph.producers().get(tensor, -1)
    op = graph.ops[at] if at >= 0 else None
    if op is None or not is_view(op) or op.reads[0].when or op.reads[0].other is not None:
        return None
    return op


def fused_view(move: Move, lifted: Graph, plan: Graph) -> Block | None:
    """The view of what an ``unfuse`` move computes that its result became; ``None`` where the plan has no such tensor."""
    t, source = lifted.tensors.get(move.at), plan.tensors.get(f"{move.at}.{move.text('dim')}")
    if t is None or source is None or len(source.shape) != len(t.shape) + 1:
        return None
    k = next((k for k in range(len(t.shape)) if source.shape[k] * source.shape[k + 1] == t.shape[k] != source.shape[k]), 0)
    dims = tuple(Dim(f"x{j}", n) for j, n in enumerate(t.shape))
    index = [dim(d.name) for d in dims]
    place = (*index[:k], floordiv(index[k], source.shape[k + 1]), modulo(index[k], source.shape[k + 1]), *index[k + 1 :])
    return Block(outs=(move.at,), dims=dims, reads=(Read(tensor=source.name, index=place),), body=(Arg(0, t.dtype),))


def seen_through(view: Block, behind: Placement) -> Placement | None:
    """The placement of a view's result; ``None`` where a device has no product of intervals of it, or it is too large."""
    pieces: dict[int, tuple[Intervals, ...]] = {}
    known: dict[tuple[Intervals, ...], tuple[Intervals, ...] | None] = {}
    for device, piece in behind.pieces.items():
        if piece not in known:
            known[piece] = _through(view, piece)
        found = known[piece]
        if found is None:
            return None
        if all(found):
            pieces[device] = found
    return Placement(shape_of(view.dims), pieces)


def _through(view: Block, piece: tuple[Intervals, ...]) -> tuple[Intervals, ...] | None:
    """The cells of a view that read some cells: intervals per axis; an axis without any means that there are none."""
    index, out = view.reads[0].index, dict[str, Intervals]()
    for names in _tied(index, [d.name for d in view.dims]):
        sizes = [d.size for d in view.dims if d.name in names]
        if prod(sizes) > MAX_CELLS:
            return None
        grid = dict(zip([d.name for d in view.dims if d.name in names], np.indices(sizes, sparse=True), strict=True))
        mask = np.ones(sizes, bool)
        for e, cells in zip(index, piece, strict=True):
            if dims_of(e) & names:
                at = np.asarray(evaluate(e, grid))
                mask &= np.logical_or.reduce([(at >= lo) & (at < hi) for lo, hi in cells])
        rows = [np.any(np.asarray(mask), axis=tuple(j for j in range(len(sizes)) if j != k)) for k in range(len(sizes))]
        whole = (row.reshape([-1 if j == k else 1 for j in range(len(sizes))]) for k, row in enumerate(rows))
        if not np.array_equal(mask, reduce(np.logical_and, whole)):
            return None
        for name, row in zip([d.name for d in view.dims if d.name in names], rows, strict=True):
            out[name] = _runs(row)
    fixed = [(e, cells) for e, cells in zip(index, piece, strict=True) if not dims_of(e)]
    here = all(any(lo <= e.const < hi for lo, hi in cells) for e, cells in fixed)
    return tuple(out[d.name] if here else () for d in view.dims)


def _tied(index: Sequence[Aff], names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Dimensions in groups that no index expression ties together."""
    groups = [frozenset({n}) for n in names]
    for e in index:
        tied = [g for g in groups if g & dims_of(e)]
        groups = [g for g in groups if g not in tied] + ([frozenset[str]().union(*tied)] if tied else [])
    yield from groups


def _runs(row: np.ndarray) -> Intervals:
    ends = np.flatnonzero(np.diff(np.concatenate(([False], row, [False])).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in zip(ends[::2], ends[1::2], strict=True))


def layout_behind(views: Sequence[Block], wanted: Placement, shape: tuple[int, ...], mesh: Mesh) -> Layout | None:
    """The layout of a tensor of some shape that puts the cells of a view of it where they are wanted.

    Args:
        views: the view, what that is a view of, and so on to the tensor.
    """
    for layout in itertools.product([None, *range(len(shape))], repeat=len(mesh)):
        found: Placement | None = laid(layout, shape, mesh)
        for view in reversed(views):
            found = None if found is None else seen_through(view, found)
        if found is not None and found.pieces == wanted.pieces:
            return layout
    return None


def laid(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Placement:
    """A layout as a placement."""
    boxes = enumerate(held(layout, shape, mesh))
    return Placement(shape, {d: tuple((x,) for x in b) for d, b in boxes if all(lo < hi for lo, hi in b)})


def view_spec(tensor: str, view: Block, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> ShardingSpec | None:
    """The spec of a view of a tensor of some shape in a layout; ``None`` where sharding specs cannot say it."""
    place = seen_through(view, laid(layout, shape, mesh))
    if place is None:
        return None
    dims: list[ShardedDim] = []
    cutters: list[tuple[int, ...]] = []
    for k, d in enumerate(view.dims):
        walked = [j for j, e in enumerate(view.reads[0].index) if [*dims_of(e)] == [d.name] and shape[j] > 1]
        if not any(j in layout for j in walked):
            continue
        env = {d.name: np.arange(d.size)}
        steps = {j: int(np.argmax(np.asarray(evaluate(view.reads[0].index[j], env)) == 1)) for j in walked}
        walked.sort(key=lambda j: steps[j], reverse=True)
        by = [tuple(a for a, t in enumerate(layout) if t == j) for j in walked]
        counts = [prod(mesh[a].size for a in axes) for axes in by]
        entries = tuple(SimpleShard(n, shape[j]) for n, j in zip(counts, walked, strict=True))
        if len(walked) == 1 or (all(n == 1 for n in counts[1:]) and shape[walked[0]] % counts[0] == 0):
            entries, by = (SimpleShard(counts[0], d.size),), by[:1]
        dims.append(ShardedDim(k, entries))
        cutters += by
    spec = replace(spec_for(tensor, cutters, mesh), dims=tuple(dims))
    return (
        spec
        if prod(s.num_shards or 1 for d in dims for s in d.shards) == len(spec.devices) and _says_placement(spec, place)
        else None
    )


def _says_placement(spec: ShardingSpec, place: Placement) -> bool:
    return placement(spec, place.shape).pieces == place.pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a plan has to keep to, for a graph.

    Attributes:
        graph: the simplified graph, with results kept apart and the file's structural moves applied.
        fixed: what the search keeps to.
        inputs, outputs: layouts in which inputs start and outputs end.
        moves: the structural moves, in order.
        notes: what is not kept, and why.
        counts: how many specs were used how.
    """

    graph: Graph
    fixed: LayoutConstraints
    inputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    outputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    moves: tuple[Move, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict[str, int])


def constraints(a: Annotations, lifted: Graph, over: Mesh, stage_of: Mapping[str, int] | None = None) -> Given:
    """The annotations as constraints on the plan of a lifted (not yet simplified) graph.

    Args:
        stage_of: the stage of every tensor, where stages are given.

    Raises:
        PlanError: a spec cannot be said with the mesh's axes, or contradicts the tensor.
    """
    unplanned = f"pipeline stages are not planned ({a.stages} in the file: --stages {a.stages})"
    notes = [unplanned] * (a.stages > 1 and not stage_of)
    said = _Said(_resolved(a, lifted), lifted, over)
    wanted, fused = said.outs(notes)
    reads = {k: said.layout(s, f"node '{k[0]}'", read=True) for k, s in said.given.reads.items() if k[1] in lifted.tensors}
    values = {t: said.layout(s, f"tensor '{t}'") for t, s in said.given.values.items() if t in lifted.tensors}
    notes += [f"'{t}' is not computed any more (folded or dead)" for t in (*a.outs, *a.values) if t not in lifted.tensors]
    chosen = [parse_move(str(m)) for m in read_json(a.model, onnx_annotations.MOVES, list)]
    graph, outs, more = _kept(said, wanted, tuple(fused), disabled_by(chosen), stage_of or {})
    notes += more
    graph, moves = _moved(graph, chosen, notes)
    graph, unfused, of_parts = _unfused(said, graph, {t: s for t, s in fused.items() if not _moves_it(moves, t)})
    outs |= of_parts
    notes += [
        f"'{t}' is an output: it is computed with its axes apart, and then written in plain parts"
        for t in fused
        if t in graph.outputs
    ]
    inputs, outputs = _ends(a, lifted, reads, values)
    dims, inner = _dims(a, graph, outs, over)
    fixed = LayoutConstraints(outs={**outs, **inner}, reads=reads, dims=dims)
    counts = {"specs": len(a.outs) + len(a.reads) + len(a.values), "fixed": len(outs), "reads": len(reads), "dims": len(dims)}
    moves = (*moves, *unfused)
    return Given(graph=graph, fixed=fixed, inputs=inputs, outputs=outputs, moves=moves, notes=tuple(notes), counts=counts)


def _resolved(a: Annotations, lifted: Graph) -> Annotations:
    """The annotations with sizes in the place of symbols. Intervals of parts are of the sizes that they were made for, and
    dropped at others."""
    env = {s: lifted.tensors[t].shape[k] for s, (t, k) in a.symbols.items() if t in lifted.tensors}
    stated = {t: tuple(v) for t, v in shapes(a).items() if t in lifted.tensors}
    same = all(lifted.tensors[t].shape == v for t, v in stated.items())

    def put(s: ShardingSpec) -> ShardingSpec:
        s = with_sizes(s, env)
        return s if same else replace(s, dims=tuple(replace(d, parts=()) for d in s.dims))

    return replace(
        a,
        outs={k: put(s) for k, s in a.outs.items()},
        reads={k: put(s) for k, s in a.reads.items()},
        values={k: put(s) for k, s in a.values.items()},
    )


@dataclass(frozen=True, slots=True)
class _Said:
    """Annotations, the lifted graph that they are of, and the mesh over which they are to be said."""

    given: Annotations
    lifted: Graph
    over: Mesh

    def outs(self, notes: list[str]) -> tuple[dict[str, Layout], dict[str, ShardingSpec]]:
        """Layouts of results; and the specs of results whose cells are interleaved, which no layout of theirs can say."""
        out: dict[str, Layout] = {}
        fused: dict[str, ShardingSpec] = {}
        for t, s in self.given.outs.items():
            if t not in self.lifted.tensors:
                continue
            where = f"node '{self.given.writer[t]}'"
            layout = self.find(s, where)
            if layout is not None:
                out[t] = layout
            elif any(len(d.shards) > 1 for d in s.dims):
                behind = self.behind(t, placement(s, self.lifted.tensors[t].shape))
                if behind is None:
                    fused[t] = s
                elif out.setdefault(*behind) != behind[1]:
                    notes.append(f"'{t}' is a view of '{behind[0]}', which has another place")
            else:
                self.refuse(s, where)
        return out, fused

    def find(self, s: ShardingSpec, where: str) -> Layout | None:
        """The layout that a spec says, if the mesh's axes can say it.

        Raises:
            PlanError: the spec contradicts the tensor.
        """
        shape = self.lifted.tensors[s.tensor or ""].shape
        here = Context({s.tensor or "": shape}, {x.dim: None for d in s.dims for x in d.shards if isinstance(x.dim, str)})
        wrong = next((m for level, code, m in spec_rules(s, None, here) if level == "error" and code != "fused-dims"), None)
        if wrong:
            self.refuse(s, where, wrong)
        return layout_of(s, shape, self.over)

    def layout(self, s: ShardingSpec, where: str, *, read: bool = False) -> Layout:
        """The layout that a spec says; of what a node reads in other parts (as a halo) the equal cut's.

        Raises:
            PlanError: the spec contradicts the tensor, or the mesh's axes cannot say it.
        """
        found = self.find(s, where)
        if found is None and read:
            found = self.find(replace(s, dims=tuple(replace(d, parts=()) for d in s.dims)), where)
        return self.refuse(s, where) if found is None else found

    def refuse(self, s: ShardingSpec, where: str, why: str = "") -> NoReturn:
        """A spec that cannot be kept."""
        mesh_text = "x".join(str(x.size) for x in self.over)
        order = ", in one order of devices for all tensors," if any(x.order for x in self.over) or len(s.devices) > 1 else ""
        raise PlanError(
            f"the sharding given for '{s.tensor}' cannot be kept",
            where=where,
            why=why or f"no layout over the axes of mesh {mesh_text}{order} puts its parts on these devices: {list(s.devices)}",
            hint="another --mesh, another order of devices, or --ignore-sharding",
        )

    def behind(self, tensor: str, wanted: Placement) -> tuple[str, Layout] | None:
        """What a tensor is a view of (no input), and the layout of that which puts the view's cells where they are wanted."""
        found: tuple[str, Layout] | None = None
        while (view := view_at(self.lifted, tensor)) is not None:
            tensor = view.reads[0].tensor
            shape = self.lifted.tensors[tensor].shape
            layout = layout_behind([view], wanted, shape, self.over)
            if layout is None or tensor not in self.lifted.producers():
                return None
            found, wanted = (tensor, layout), laid(layout, shape, self.over)
        return found


def _moves_it(moves: Sequence[Move], tensor: str) -> bool:
    return any(m.rule == "unfuse" and m.at == tensor for m in moves)


def _unfused(said: _Said, graph: Graph, fused: Mapping[str, ShardingSpec]) -> tuple[Graph, list[Move], dict[str, Layout]]:
    """The graph that computes interleaved results with their axes apart, the moves, and the layouts of what is computed.

    Raises:
        PlanError: the operation cannot be computed so, or the mesh cannot say the layout.
    """
    moves: list[Move] = []
    layouts: dict[str, Layout] = {}
    for t, s in fused.items():
        at, views, shape = t, list[Block](), said.lifted.tensors[t].shape
        where = f"node '{said.given.writer[t]}'"
        steps = [((d.axis or 0) % len(shape), n) for d in s.dims for n in _inner_sizes(d, shape)]
        for k, size in sorted(steps, key=lambda step: -step[0]):  # (stable: of one axis the innermost first)
            op = graph.ops[graph.find(at)] if graph.find(at) >= 0 else None
            if not isinstance(op, Block):
                said.refuse(s, where, "its cells are interleaved, and it is no result that is computed cell by cell")
            moves.append(Move("unfuse", at, (("dim", op.dims[k].name), ("inner", size))))
            graph = apply_moves(graph, moves[-1:])
            views.append(cast(Block, graph.ops[graph.find(at)]))
            at = views[-1].reads[0].tensor
        layout = layout_behind(views, placement(s, shape), graph.tensors[at].shape, said.over)
        layouts[at] = said.refuse(s, where) if layout is None else layout
    return (_after(graph, "unfuse", frozenset()) if moves else graph), moves, layouts


def _inner_sizes(d: ShardedDim, shape: tuple[int, ...]) -> list[int]:
    """What each split of a fused axis leaves inside, the innermost axis first: then the axis itself stays where it is."""
    sizes = fused_sizes(d, shape[d.axis or 0])
    return sizes[:0:-1]


def _kept(
    said: _Said, wanted: Mapping[str, Layout], fused: tuple[str, ...], disabled: frozenset[str], stage_of: Mapping[str, int]
) -> tuple[Graph, dict[str, Layout], list[str]]:
    """The simplified graph, in which stages stay apart, the layouts that its tensors get, and what is lost."""
    lifted = said.lifted
    graph = with_apart(lifted, (), disabled, stage_of) if stage_of else simplify(lifted, disabled=disabled)
    outs = {t: layout for t, layout in wanted.items() if t in graph.producers()}
    apart: list[str] = [t for t in fused if t not in graph.producers()]
    wanted = dict(wanted)
    for t, layout in list(wanted.items()):
        if t in outs:
            continue
        carried = _carry(t, layout, lifted, graph)
        if carried is not None and outs.get(carried[0], wanted.get(carried[0], carried[1])) != carried[1]:
            carried = None
        if carried is None:
            carried = said.behind(t, laid(layout, lifted.tensors[t].shape, said.over))
            if carried is not None and wanted.setdefault(*carried) != carried[1]:
                carried = None
        if carried is None:
            apart.append(t)
        elif carried[0] not in graph.producers():
            apart.append(carried[0])
        else:
            outs[carried[0]] = carried[1]
    if apart:
        graph = with_apart(lifted, apart, disabled, stage_of)
        outs = {t: layout for t, layout in {**outs, **wanted}.items() if t in graph.producers()}
    lost = [t for t in apart if t not in outs and t not in fused]
    return graph, outs, [f"'{t}' is a view of another tensor, which has no place of its own" for t in lost]


def with_apart(lifted: Graph, apart: Sequence[str], disabled: frozenset[str], stage_of: Mapping[str, int]) -> Graph:
    """The simplified graph in which some results are not fused into their readers, and no operation is of two stages."""

    def of_one_stage(before: Sequence[Op], after: Sequence[Op]) -> bool:
        return all(len({stage_of[t] for t in op.outs if t in stage_of}) < 2 for op in after)

    held_back = tuple(dict.fromkeys((*lifted.outputs, *apart, *_crossing(lifted, stage_of))))
    accept = of_one_stage if stage_of else None
    graph = simplify(replace(lifted, outputs=held_back), disabled=disabled, accept=accept)
    graph = replace(graph, outputs=lifted.outputs)
    return swept(own_rules()["drop_dead"], graph)


def _crossing(lifted: Graph, stage_of: Mapping[str, int]) -> list[str]:
    """Results of one stage that a later one reads."""
    made = lifted.producers() if stage_of else {}
    return [t for op in lifted.ops for t in op.inputs if t in made and stage_of[t] != stage_of[op.outs[0]]]


def _carry(tensor: str, layout: Layout, lifted: Graph, graph: Graph) -> tuple[str, Layout] | None:
    """The tensor of the simplified graph that a result was fused into, and the same layout there.

    Follows single readers that compute each point from one cell. A cut is carried along when the reader walks the axis by
    one dimension of the same extent.
    """
    written, readers = graph.producers(), lifted.consumers()
    for _ in range(len(lifted.ops)):
        if tensor in written:
            return tensor, layout
        consumers = readers.get(tensor, [])
        op = lifted.ops[consumers[0]] if len(consumers) == 1 else None
        if not isinstance(op, Block) or op.monoid or len(op.outs) != 1:
            return None
        through = [r for r in op.reads if r.tensor == tensor]
        if len(through) != 1 or through[0].other is not None:
            return None
        moved = [_walk(op, through[0].index[k], lifted.tensors[tensor].shape[k]) if k is not None else None for k in layout]
        if any(k is not None and m is None for k, m in zip(layout, moved, strict=True)):
            return None
        tensor, layout = op.outs[0], tuple(moved)
    return None


def _walk(op: Block, index: Any, extent: int) -> int | None:
    """The output axis that walks a tensor's axis cell by cell, in the same order."""
    names = sorted(dims_of(index))
    if len(names) != 1:
        return None
    k = next((i for i, d in enumerate(op.dims) if d.name == names[0]), None)
    if k is None or op.dims[k].size != extent:
        return None
    return k if np.array_equal(np.asarray(evaluate(index, {names[0]: np.arange(extent)})), np.arange(extent)) else None


def _moved(graph: Graph, moves: Sequence[Move], notes: list[str]) -> tuple[Graph, tuple[Move, ...]]:
    """The structural rewrites that the file says were chosen."""
    new, disabled = graph, disabled_by(moves)
    try:
        for key, group in itertools.groupby(applied(moves), key=lambda m: (m.rule, m.params)):
            new = _after(apply_moves(new, list(group)), key[0], disabled)
    except TapestryError as e:
        notes.append(f"the file's rewrites do not apply: {e.what}")
        return graph, tuple(map(without, sorted(disabled)))
    return new, tuple(moves)


def _after(graph: Graph, rule: str, disabled: frozenset[str]) -> Graph:
    """The graph simplified after a move; a result with its axes apart would be put back into its view, and stays."""
    if rule != "unfuse":
        return simplify(graph, disabled=disabled)
    return swept(own_rules()["drop_dead"], swept(own_rules()["compose_views"], graph))


def _ends(
    a: Annotations, graph: Graph, reads: Mapping[tuple[str, str], Layout], values: Mapping[str, Layout]
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Layouts of inputs and outputs: as the file says; of inputs that it says nothing of, what all their readers give."""
    inputs = {t: values[t] for t in (*graph.inputs, *graph.weights) if t in values}
    outputs = {t: values[t] for t in graph.outputs if t in values}
    for t in graph.inputs if onnx_annotations.MESH not in a.model else ():
        given = [reads.get((s, t)) for i in graph.consumers().get(t, []) for s in graph.ops[i].source]
        if t not in inputs and given and given[0] is not None and all(g == given[0] for g in given):
            inputs[t] = given[0]
    return inputs, outputs


def _dims(a: Annotations, graph: Graph, outs: Mapping[str, Layout], over: Mesh) -> tuple[dict[str, Dims], dict[str, Layout]]:
    """What every mesh axis cuts, exactly, where the file's metadata completes its specs; and layouts inside nodes."""
    out: dict[str, Dims] = {}
    inner: dict[str, Layout] = {}
    if onnx_annotations.MESH not in a.model:
        return out, inner
    blocks = {op.outs[0] for op in graph.blocks}
    for props in a.nodes.values():
        for name, s in read_json(props, onnx_annotations.INTERNAL, dict).items():
            if _complete(s, len(over)):
                out[str(name)] = tuple(s["dims"])
                inner |= {str(name): tuple(s["out"])} if name in blocks else {}
    for op in graph.ops:
        layout = outs.get(op.outs[0])
        if not isinstance(op, Block) or layout is None or op.outs[0] in out:
            continue
        properties = a.nodes.get(a.writer.get(op.outs[0], ""), {})
        rows: list[Any] = read_json(properties, onnx_annotations.PARTIAL, list)
        partial: dict[str, dict[str, Any]] = {p["mesh_axis"]: p for p in rows if isinstance(p, dict) and "mesh_axis" in p}
        dims: list[str | None] = []
        for axis, k in zip(over, layout, strict=True):
            p = partial.get(axis.name)
            own = None if k is None else op.dims[k].name
            dims.append(str(p.get("dim")) if p is not None and p.get("along") == k else own)
        if all(d is None or d in op.ranges for d in dims):
            out[op.outs[0]] = tuple(dims)
    return out, inner


def _complete(s: Any, axes: int) -> bool:
    """Whether the metadata of an inner result says what every mesh axis cuts."""
    return isinstance(s, dict) and len(cast(Any, s).get("dims", ())) == len(cast(Any, s).get("out", ())) == axes
