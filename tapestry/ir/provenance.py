"""Operations, weights and dimensions of a graph by the names that the model's author gave them.

`Graph.names` says of which part of the model each ONNX node is (``model.layers.3.self_attn.q_proj``) and how the file calls
the axes of its tensors. Rewriting fuses nodes of several parts, so names are worked out of the graph as it is: an operation
belongs to the part whose weight it reads, else to the one that most of its nodes come from. Names are unique and depend on
nothing but the graph.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from tapestry.ir.graph import Block, Graph, Op, names_of
from tapestry.ir.index import Aff, dim, dims_of
from tapestry.ir.recognition.attention_roles import attention
from tapestry.ir.recognition.contraction import only_sums

PARAMETER = re.compile(r"(.+)\.[A-Za-z_]\w*")
PRODUCTS = frozenset({"matmul", "gemm", "linear", "addmm", "conv", "conv1d", "conv2d", "conv3d", "convolution"})
COUNT = re.compile(r"_\d+$")


def operation_names(graph: Graph) -> tuple[str, ...]:
    """A name for each operation, all different.

    A part's one operation, or the one with its largest weight, is called like the part; others add what they do
    (``layers.3.self_attn.softmax``). Where the file names no part, an operation is called as its node is.
    """
    found = _parts(graph)
    heads = _heads(graph, [part for part, _ in found])
    taken = {part for part in heads if part}
    counts = Counter[str]()
    out: list[str] = []
    for i, (part, what) in enumerate(found):
        if part and heads[part] == i:
            out.append(part)
            continue
        base = f"{part}.{COUNT.sub('', what)}" if part else what
        name = base
        while name in taken:
            counts[base] += 1
            name = f"{base}_{counts[base]}"
        taken.add(name)
        out.append(name)
    return tuple(out)


def parts(graph: Graph) -> tuple[str, ...]:
    """The part of the model that each operation belongs to; "" where the file says none."""
    return tuple(part for part, _ in _parts(graph))


def _parts(graph: Graph) -> list[tuple[str, str]]:
    readers = Counter(t for op in graph.ops for t in op.inputs)
    return [_model_part(op, graph, readers) for op in graph.ops]


def _model_part(op: Op, graph: Graph, readers: Mapping[str, int]) -> tuple[str, str]:
    """The part of the model that an operation belongs to ("" if the file says none), and what it does there.

    A weight with several readers says nothing alone: exporters merge equal ones of different layers.
    """
    scopes = graph.names.scopes
    known = [scopes[s] for s in op.source if s in scopes]
    weights = sorted(
        (t for t in op.inputs if t in graph.weights and graph.weights[t].file), key=lambda t: -graph.tensors[t].size
    )
    by_weight = [(t, m.group(1)) for t in weights if (m := PARAMETER.fullmatch(t))]
    owners = [o for t, o in by_weight if (_owned(o, known) if known else readers[t] == 1)]
    named = [part for part, _ in known if part]
    what = known[-1][1] if known else ""
    if owners:
        return owners[0], what or _operator_word(op)
    products = [(p, w) for p, w in known if p and w in PRODUCTS]
    if products and any(len(graph.tensors[t].shape) > 1 for t in weights):
        return products[0]
    if named:
        most = Counter(named).most_common(1)[0][1]
        part = next(p for p in reversed(named) if named.count(p) == most)
        return part, next(w for p, w in reversed(known) if p == part)
    return "", (op.source[-1] if op.source else op.outs[0])


def _owned(owner: str, known: list[tuple[str, str]]) -> bool:
    """Whether a weight's owner is one of the parts that the operation comes from (some exports shorten one of the two)."""
    return any(p == owner or p.endswith(f".{owner}") or (p and owner.endswith(f".{p}")) for p, _ in known)


def _operator_word(op: Op) -> str:
    return (op.monoid or "map") if isinstance(op, Block) else op.kind.lower()


def _heads(graph: Graph, found: list[str]) -> dict[str, int]:
    """For each part the operation that is called like it: that with the most weights in bytes, or its only one."""
    by_part: dict[str, list[int]] = {}
    for i, part in enumerate(found):
        by_part.setdefault(part, []).append(i)

    def held(i: int) -> int:
        return sum(graph.tensors[t].nbytes for t in graph.ops[i].inputs if t in graph.weights and PARAMETER.fullmatch(t))

    out: dict[str, int] = {}
    for part, ops in by_part.items():
        best = max(ops, key=lambda i: (held(i), -i))
        out[part] = best if part and (len(ops) == 1 or held(best)) else -1
    return out


def weight_names(graph: Graph) -> dict[str, str]:
    """Weights whose own name says nothing, as those of a folded or transposed parameter, by the name that they had.

    Only where there is no doubt: such a weight of two axes or more is read by one operation, and is that part's only one.
    """
    out: dict[str, str] = {}
    readers = graph.consumers()
    for i, (op, part) in enumerate(zip(graph.ops, parts(graph), strict=True)):
        own = [t for t in op.inputs if t in graph.weights and not PARAMETER.fullmatch(t) and readers[t] == [i]]
        matrices = [t for t in own if len(graph.tensors[t].shape) > 1]
        if part and len(matrices) == 1 and f"{part}.weight" not in graph.weights:
            out.setdefault(matrices[0], f"{part}.weight")
    seen = Counter(out.values())
    return {t: n for t, n in out.items() if seen[n] == 1}


def tensor_names(graph: Graph) -> dict[str, str]:
    """A name for each tensor: that of the operation that writes it, the parameter's, or its own."""
    out = {t: t for t in graph.tensors} | weight_names(graph)
    for op, name in zip(graph.ops, operation_names(graph), strict=True):
        out |= {t: name if k == 0 else f"{name}.{k}" for k, t in enumerate(op.outs)}
    return out


def dim_names(op: Op, graph: Graph) -> dict[str, str]:
    """Dimensions of an operation that have a better name than their own: the file's for the axis, or the field's.

    A linear layer has ``out`` and ``in``; attention ``heads``, ``query``, ``key`` and ``head_dim``.
    """
    out: dict[str, str] = {}
    for own, name in (*_symbolic(op, graph), *_conventional(op, graph)):
        if own not in out and name not in out.values() and name not in op.ranges:
            out[own] = name
    return out


def _symbolic(op: Op, graph: Graph) -> Iterator[tuple[str, str]]:
    """Dimensions that run along an axis which the file names."""
    axes = graph.names.axes
    for t in op.outs:
        for d, name in zip(op.dims, axes.get(t, ()), strict=False):
            if name:
                yield d.name, name
    for r in op.reads if isinstance(op, Block) else ():
        for index, name in zip(r.index, axes.get(r.tensor, ()), strict=False):
            if name and (d := _alone(index)):
                yield d, name


def _conventional(op: Op, graph: Graph) -> Iterator[tuple[str, str]]:
    """What the field calls the dimensions of attention and of a linear layer."""
    if not isinstance(op, Block):
        return
    roles = attention(op)
    if roles is not None:
        if roles.batch:
            yield roles.batch[-1].name, "heads"
        if len(roles.rows) == 1:
            yield roles.rows[0].name, "query"
        yield roles.key.name, "key"
        if len(roles.columns) == 1:
            yield roles.columns[0].name, "head_dim"
        return
    weights = [r for r in op.reads if r.tensor in graph.weights and len(r.index) == 2]
    if not only_sums(op.monoid) or len(op.reduce) != 1 or not weights:
        return
    own = names_of(op.dims)
    for read in weights:
        names = [_outermost(i) for i in read.index]
        if all(names) and op.reduce[0].name in names:
            other = next(n for n in names if n != op.reduce[0].name)
            if other in own:
                yield other, "out"
                yield op.reduce[0].name, "vocab" if op.reduce[0].name == "v" else "in"


def _alone(index: Aff) -> str:
    """The dimension that an index is, and nothing else; "" if it is more."""
    names = dims_of(index)
    name = next(iter(names), "")
    return name if len(names) == 1 and index == dim(name) else ""


def _outermost(index: Aff) -> str:
    """The dimension that an index goes along, or the outermost of several (of heads and head_dim the heads); "" if none."""
    return max(((n, a) for a, n in index.terms if isinstance(a, str)), default=(0, ""))[1]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names something: ``*`` stands for one part of a dotted name, ``**`` for any number of them; parts in
    front of it may be left out."""
    expression = "".join({"**": ".*", "*": "[^.]*"}.get(p, re.escape(p)) for p in re.split(r"(\*\*|\*)", pattern))
    return re.fullmatch(rf"(?:.*\.)?{expression}", name) is not None


def shown(text: str, names: Mapping[str, str]) -> str:
    """A text of dimension names with the better ones in their place."""
    return re.sub(r"\w+", lambda m: names.get(m.group(), m.group()), text) if names else text
