"""The laws of a Graph, one named function per law, each failure with a witness point.

Laws 5 (a Move leaves every access relation unchanged) and 6 (a Program reads only what was written, loaded or received)
compare two things or need a Program: `dependences` gives the relations that `verify.rewriting` compares for law 5, and
`verify.certificate` holds law 6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from tapestry.errors import LawError
from tapestry.ir import space
from tapestry.ir.expr import Acc, Call, Index, Let, distinct
from tapestry.ir.graph import Block, Dim, Graph, Op, names_of, shape_of
from tapestry.ir.index import dims_of, span
from tapestry.ir.kernel import whole
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognition.contraction import dims_read
from tapestry.ir.recognition.state import reads_behind
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import FLOAT8, FLOATS, STORED

Law = Callable[[Graph], int]


def ssa(graph: Graph) -> int:
    """Law 1a: every tensor is written once, before it is read; nothing that is read or returned is missing."""
    known = set(graph.inputs) | set(graph.weights)
    for op in graph.ops:
        for t in op.inputs:
            if t not in known:
                raise LawError("ssa", f"'{t}' is read before it is written", where=where(op))
        for t in op.outs:
            if t in known:
                raise LawError("ssa", f"'{t}' is written twice", where=where(op))
            known.add(t)
    for t in graph.outputs:
        if t not in known:
            raise LawError("ssa", f"output '{t}' is never written")
    return len(graph.ops)


def agreement(graph: Graph) -> int:
    """Law 1b: dtypes and ranks agree with projections, expressions with the operation's dimensions."""
    for op in graph.ops:
        if not isinstance(op, Block):
            continue
        names = names_of(op.space)
        if len(names) != len(op.space):
            raise LawError("agreement", "a dimension is named twice", where=where(op))
        for r in op.reads:
            rank = len(graph.tensors[r.tensor].shape)
            if len(r.index) != rank:
                raise LawError("agreement", f"'{r.tensor}' has {rank} axes, read with {len(r.index)}", where=where(op))
        loose = {n for r in op.reads for e in (*r.index, *(g.aff for g in r.when)) for n in dims_of(e)} - names
        if loose:
            raise LawError("agreement", f"unknown dimensions {sorted(loose)}", where=where(op))
        _expressions(op, graph, names)
    return len(graph.ops)


def _expressions(op: Block, graph: Graph, names: set[str]) -> None:
    results = op.then if op.monoid else op.body
    if len(results) != len(op.outs):
        raise LawError("agreement", f"{len(results)} results for {len(op.outs)} outputs", where=where(op))
    for t, e in zip(op.outs, results, strict=True):
        if graph.tensors[t].dtype != e.dtype:
            raise LawError("agreement", f"'{t}' is {graph.tensors[t].dtype}, its expression {e.dtype}", where=where(op))
    if op.monoid and len(op.body) != len(MONOIDS[op.monoid].fields):
        raise LawError("agreement", f"monoid {op.monoid} has other fields than the body", where=where(op))
    _inner(op)
    reduced = names_of((*op.reduce, *op.inner_dims))
    for k in op.then_reads():
        if any(dims_of(e) & reduced for e in op.reads[k].index):
            raise LawError("agreement", "'then' reads by a reduced dimension", where=where(op))
    for e in (*op.point, *op.then):
        for x in distinct((e,)):
            if isinstance(x, Index) and dims_of(x.aff) - names:
                raise LawError("agreement", f"unknown dimension in index({x.aff})", where=where(op))
            if isinstance(x, Acc) and e not in op.then:
                raise LawError("agreement", "the body uses a reduced state", where=where(op))


def _inner(op: Block) -> None:
    """Inner reductions: of one field, each over dimensions that nothing else in the operation depends on."""
    inner = names_of(op.inner_dims)
    if inner and not op.monoid:
        raise LawError("agreement", "an inner reduction without a reduction around it", where=where(op))
    for k, s in enumerate(op.inner):
        if s.monoid not in MONOIDS or len(MONOIDS[s.monoid].fields) != 1:
            raise LawError("agreement", f"inner reduction {k} needs a monoid of one field", where=where(op))
        if any(isinstance(x, Let) for x in distinct((s.body,))):
            raise LawError("agreement", "an inner reduction uses another one", where=where(op))
        others = inner - names_of(s.dims)
        if dims_read(op, s.body) & others:
            raise LawError("agreement", f"inner reduction {k} depends on dimensions of another", where=where(op))
    for e in op.body:
        if any(
            isinstance(x, Let) and not (x.pos < len(op.inner) and op.inner[x.pos].body.dtype == x.dtype) for x in distinct((e,))
        ):
            raise LawError("agreement", "the body uses an inner reduction that is not there", where=where(op))
        if dims_read(op, e) & inner:
            raise LawError("agreement", "the body depends on a dimension of an inner reduction", where=where(op))
    if any(isinstance(x, Let) for x in distinct(op.then)):
        raise LawError("agreement", "'then' uses an inner reduction", where=where(op))
    if any(s.dim in inner for s in op.splits):
        raise LawError("split_partition", "a dimension of an inner reduction is cut", where=where(op))


def reads_inside(graph: Graph) -> int:
    """Law 2: every unguarded read lands inside its tensor; a guarded one says what it reads outside."""
    count = 0
    for op in graph.ops:
        if not isinstance(op, Block):
            continue
        for r in op.reads:
            shape = graph.tensors[r.tensor].shape
            count += 1
            if r.when and r.other is None:
                raise LawError("reads_inside", "a guarded read does not say what it reads outside", where=where(op))
            if r.other is not None or _surely_inside(op, r.index, shape):
                continue
            found = space.access(op, r, shape).leaves(whole(shape))
            if found:
                point = dict(zip([d.name for d in op.space], found[0], strict=True))
                raise LawError("reads_inside", f"reads '{r.tensor}' at {found[1]}", where=where(op), why=f"at {point}")
    return count


def _surely_inside(op: Block, index: tuple[space.Aff, ...], shape: tuple[int, ...]) -> bool:
    spans = [span(e, op.ranges) for e in index]
    return all(lo >= 0 and hi < n for (lo, hi), n in zip(spans, shape, strict=True))


def written_once(graph: Graph) -> int:
    """Law 3: every output cell is written exactly once, or merged through a named monoid.

    The output projection is the identity on the map dimensions, so it is enough that they are the tensor's axes.
    """
    for op in graph.ops:
        if isinstance(op, Block):
            extents = shape_of(op.dims)
            for t in op.outs:
                shape = graph.tensors[t].shape
                if extents != shape:
                    raise LawError("written_once", f"'{t}' has shape {shape}, the map dimensions {extents}", where=where(op))
            if bool(op.reduce) != bool(op.monoid) and op.reduce:
                raise LawError("written_once", "reduced dimensions without a monoid", where=where(op))
        for i, axes in enumerate(() if isinstance(op, Block) else op.out_axes):
            if any(a is None for a in axes):
                raise LawError("written_once", f"a dimension does not index '{op.outs[i]}'", where=where(op))
    return sum(len(op.outs) for op in graph.ops)


def split_partition(graph: Graph) -> int:
    """Law 4: a split's parts are disjoint and their union is the dimension."""
    count = 0
    for op in graph.ops:
        for s in op.splits:
            size = op.ranges.get(s.dim)
            if size is None:
                raise LawError("split_partition", f"no dimension '{s.dim}'", where=where(op))
            if not 1 <= s.parts <= size:
                raise LawError("split_partition", f"{size} points in {s.parts} parts leave one empty", where=where(op))
            count += 1
        if op.splits:
            _partition(op)
    return count


def _partition(op: Op) -> None:
    cuts: dict[str, int] = {}
    for s in op.splits:
        cuts[s.dim] = cuts.get(s.dim, 1) * s.parts
    what, witness = _gap_or_overlap(op.space, tuple(cuts.items()))
    if what:
        raise LawError("split_partition", what, where=where(op), why=witness)


@lru_cache(maxsize=4096)
def _gap_or_overlap(dims: tuple[Dim, ...], cuts: tuple[tuple[str, int], ...]) -> tuple[str, str]:
    """What is wrong with the blocks of an index space, and a point that shows it; empty when they are a partition."""
    relation = space.blocks(dims, dict(cuts))
    gap = space.covers(relation, dims)
    if gap is not None:
        return "a point is in no block", str(gap)
    return ("", "") if relation.injective() else ("a point is in two blocks", str(relation.collision()))


def host_values(graph: Graph) -> int:
    """Law 7: a value of the host is touched by whole, unsplit ONNX nodes alone; a stored type is moved, not computed with."""
    count = 0
    for op in graph.ops:
        tensors = [graph.tensors[t] for t in (*op.inputs, *op.outs)]
        mine = next((t for t in tensors if t.on_host), None)
        count += len(tensors)
        if mine is not None and mine.shape:
            raise LawError("host_values", f"'{mine.name}' stays on the host but has axes", where=where(op))
        if mine is not None and (isinstance(op, Block) or op.dims):
            raise LawError("host_values", f"'{mine.name}' stays on the host and cannot be split", where=where(op))
        for x in distinct((*op.body, *op.then) if isinstance(op, Block) else ()):
            if isinstance(x, Call) and x.fn == "cast" and x.args[0].dtype in FLOAT8 and x.dtype in FLOATS:
                continue  # widened, as a load does it
            if isinstance(x, Call) and x.fn != "where" and any(y.dtype in STORED for y in (x, *x.args)):
                raise LawError("host_values", f"'{x.fn}' computes with a type that is only stored", where=where(op))
    for name, t in graph.tensors.items():
        if t.on_host and name in graph.weights:
            raise LawError("host_values", f"weight '{name}' has no bytes")
    return count


_LAWS: tuple[Law, ...] = (ssa, agreement, reads_inside, written_once, split_partition, host_values)
GRAPH_LAWS: dict[str, Law] = {law.__name__: law for law in _LAWS}


def check(graph: Graph) -> dict[str, int]:
    """Check every law of a Graph; returns how many things each law looked at.

    Raises:
        LawError: naming the law, the operation and a witness.
    """
    return {name: law(graph) for name, law in GRAPH_LAWS.items()}


def where(op: Op) -> str:
    """How an error names an operation: its ONNX nodes and its output."""
    nodes = ", ".join(op.source[:3])
    return f"operation '{op.outs[0]}'" + (f" (from {nodes})" if nodes else "")


def dependences(graph: Graph, output: str) -> dict[str, space.Relation]:
    """For law 5: which cells of every graph input (or weight) each cell of an output depends on.

    Opaque operations relate every cell to every cell of what they read along the axes they do not commute with.
    """
    producers = graph.producers()
    table: dict[str, dict[str, space.Relation]] = {}

    def of(tensor: str) -> dict[str, space.Relation]:
        if tensor not in table:
            table[tensor] = _direct(tensor)
        return table[tensor]

    def _direct(tensor: str) -> dict[str, space.Relation]:
        if tensor not in producers:
            return {tensor: space.identity(graph.tensors[tensor].shape)}
        op = graph.ops[producers[tensor]]
        assert isinstance(op, Block), "dependences through an opaque operation are not affine"
        out: dict[str, space.Relation] = {}
        used = reads_behind(op, op.outs.index(tensor))
        for r in (r for k, r in enumerate(op.reads) if k in used):
            step = space.reads_of_outputs(op, r, graph.tensors[r.tensor].shape)
            for source, relation in of(r.tensor).items():
                whole_path = step.then(relation)
                out[source] = out[source].union(whole_path) if source in out else whole_path
        return out

    return of(output)


def signatures(graph: Graph) -> dict[str, list[int]]:
    """Operations grouped by signature: everything about them but their names."""
    out: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        out.setdefault(signature(op, graph), []).append(i)
    return out
