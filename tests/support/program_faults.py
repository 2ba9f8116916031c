"""Faults of parallel programs: each kind changes the ranks' files at a place that it draws, or says that there is none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

Ranks = list[ModelProto]
Fault = Callable[[Ranks, random.Random], str | None]
KINDS: dict[str, Fault] = {}


def kind(f: Fault) -> Fault:
    """Register a kind of fault by its function's name; where the ranks' files are too different for it, it has no place."""

    def tried(ranks: Ranks, rng: random.Random) -> str | None:
        try:
            return f(ranks, rng)
        except (StopIteration, LookupError):
            return None

    KINDS[f.__name__] = tried
    return tried


def _nodes(m: ModelProto, *ops: str) -> list[NodeProto]:
    return [n for n in m.graph.node if n.op_type in ops]


def _text(n: NodeProto, name: str) -> str:
    return next((helper.get_attribute_value(a).decode() for a in n.attribute if a.name == name), "")


def _set(n: NodeProto, name: str, value: object) -> None:
    kept = [a for a in n.attribute if a.name != name]
    del n.attribute[:]
    n.attribute.extend(kept)
    n.attribute.append(helper.make_attribute(name, value))


def _collectives(m: ModelProto, *kinds: str) -> list[NodeProto]:
    return [n for n in _nodes(m, "DistCollective") if not kinds or _text(n, "collective_operation") in kinds]


def _same_node(ranks: Ranks, name: str) -> list[NodeProto]:
    return [n for m in ranks for n in m.graph.node if n.name == name]


def _readers(m: ModelProto, name: str) -> list[NodeProto]:
    return [n for n in m.graph.node if name in n.input]


def _replace_reads(m: ModelProto, old: str, new: str, but: str) -> None:
    for n in m.graph.node:
        if n.name != but:
            for k, t in enumerate(n.input):
                if t == old:
                    n.input[k] = new


def _to_identity(n: NodeProto) -> None:
    n.CopyFrom(helper.make_node("Identity", n.input[:1], n.output[:1], name=n.name))


def _weights(m: ModelProto, rank: int = 2) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in m.graph.initializer if len(t.dims) >= rank and t.data_type == 1}


def _put(m: ModelProto, name: str, a: np.ndarray) -> None:
    t = next(t for t in m.graph.initializer if t.name == name)
    t.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(a.astype(np.float32)), name))


def _cut(ranks: Ranks) -> list[str]:
    """Weights that are not the same on all ranks."""
    first = _weights(ranks[0], 1)
    others = _weights(ranks[1], 1)
    return [n for n, a in first.items() if n in others and not np.array_equal(a, others[n])]


def _between(ranks: Ranks, name: str, make: Callable[[str, str], list[NodeProto]]) -> None:
    """Put nodes behind a tensor on every rank, for all of its readers."""
    for m in ranks:
        at = next((k for k, n in enumerate(m.graph.node) if name in n.output), -1)
        _replace_reads(m, name, f"{name}.new", "")
        nodes = list(m.graph.node)
        nodes[at + 1 : at + 1] = make(name, f"{name}.new")
        copied = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del m.graph.node[:]
        m.graph.node.extend(copied)


@kind
def collective_left_out(ranks: Ranks, rng: random.Random) -> str | None:
    """Partial sums are used as they are."""
    found = _collectives(ranks[0], "ALL_REDUCE")
    if not found:
        return None
    name = rng.choice(found).name
    for n in _same_node(ranks, name):
        _to_identity(n)
    return name


@kind
def collective_left_out_on_one_rank(ranks: Ranks, rng: random.Random) -> str | None:
    """The others wait for ever."""
    found = _collectives(ranks[-1], "ALL_REDUCE")
    if not found:
        return None
    n = rng.choice(found)
    _to_identity(n)
    return n.name


@kind
def greatest_instead_of_sum(ranks: Ranks, rng: random.Random) -> str | None:
    """Another reduction."""
    found = [n for n in _collectives(ranks[0], "ALL_REDUCE", "REDUCE_SCATTER") if _text(n, "reduce_op") == "SUM"]
    if not found:
        return None
    name = rng.choice(found).name
    for n in _same_node(ranks, name):
        _set(n, "reduce_op", "MAX")
    return name


@kind
def mean_instead_of_sum(ranks: Ranks, rng: random.Random) -> str | None:
    """Each result too small by the number of ranks."""
    found = [n for n in _collectives(ranks[0], "ALL_REDUCE", "REDUCE_SCATTER") if _text(n, "reduce_op") == "SUM"]
    if not found:
        return None
    name = rng.choice(found).name
    for n in _same_node(ranks, name):
        _set(n, "reduce_op", "AVG")
    return name


@kind
def group_too_small(ranks: Ranks, rng: random.Random) -> str | None:
    """Half of the ranks reduce, and the other half."""
    found = [
        n for n in _collectives(ranks[0], "ALL_REDUCE") if len(next(a.ints for a in n.attribute if a.name == "groups")) >= 4
    ]
    if not found:
        return None
    name = rng.choice(found).name
    for rank, m in enumerate(ranks):
        n = next(n for n in m.graph.node if n.name == name)
        group = list(next(a.ints for a in n.attribute if a.name == "groups"))
        half = group[: len(group) // 2] if rank in group[: len(group) // 2] else group[len(group) // 2 :]
        for key, value in (("groups", half), ("group_size", len(half)), ("nb_rank", len(half))):
            _set(n, key, value)
    return name


@kind
def gathered_in_another_order(ranks: Ranks, rng: random.Random) -> str | None:
    """A communicator whose ranks are counted from the other end."""
    found = _collectives(ranks[0], "ALL_GATHER", "REDUCE_SCATTER")
    if not found:
        return None
    name = rng.choice(found).name
    for n in _same_node(ranks, name):
        _set(n, "groups", list(next(a.ints for a in n.attribute if a.name == "groups"))[::-1])
    return name


@kind
def reduced_twice(ranks: Ranks, rng: random.Random) -> str | None:
    """A sum of what is a sum already (a mean of a mean would be the same)."""
    found = [n for n in _collectives(ranks[0], "ALL_REDUCE") if _text(n, "reduce_op") == "SUM"]
    if not found:
        return None
    name = rng.choice(found).output[0]

    def again(a: str, b: str) -> list[NodeProto]:
        n = NodeProto.FromString(next(n for n in ranks[0].graph.node if a in n.output).SerializeToString())
        n.input[0], n.output[0], n.name = a, b, b
        return [n]

    for m in ranks:
        own = next(n for n in m.graph.node if name in n.output)
        groups = list(next(a.ints for a in own.attribute if a.name == "groups"))
        _between([m], name, again)
        _set(next(n for n in m.graph.node if n.name == f"{name}.new"), "groups", groups)
    return name


@kind
def weight_shifted(ranks: Ranks, rng: random.Random) -> str | None:
    """A rank's part of a weight begins a row too late."""
    names = _cut(ranks)
    if not names:
        return None
    name, at = rng.choice(names), rng.randrange(len(ranks))
    a = _weights(ranks[at], 1)[name]
    axis = rng.choice([k for k in range(a.ndim) if a.shape[k] > 1])
    _put(ranks[at], name, np.roll(a, 1, axis))
    return f"{name} of rank {at}"


@kind
def parts_exchanged(ranks: Ranks, rng: random.Random) -> str | None:
    """Two ranks have each other's part of one weight."""
    names = _cut(ranks)
    if not names:
        return None
    name = rng.choice(names)
    a, b = _weights(ranks[0], 1)[name], _weights(ranks[1], 1)[name]
    _put(ranks[0], name, b)
    _put(ranks[1], name, a)
    return name


@kind
def weights_exchanged(ranks: Ranks, rng: random.Random) -> str | None:
    """Two weights of one shape in each other's place, on every rank."""
    first = _weights(ranks[0])
    pairs = [(a, b) for a in first for b in first if a < b and first[a].shape == first[b].shape]
    pairs = [(a, b) for a, b in pairs if all(a in _weights(m) and b in _weights(m) for m in ranks)]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    for m in ranks:
        w = _weights(m)
        _put(m, a, w[b])
        _put(m, b, w[a])
    return f"{a}, {b}"


@kind
def one_cell_changed(ranks: Ranks, rng: random.Random) -> str | None:
    """A weight that differs in one number, on one rank."""
    at = rng.randrange(len(ranks))
    name = rng.choice(sorted(_weights(ranks[at], 1)))
    a = _weights(ranks[at], 1)[name].copy()
    if a.size < 2:
        return None
    a.reshape(-1)[rng.randrange(a.size)] += 0.5
    _put(ranks[at], name, a)
    return f"{name} of rank {at}"


@kind
def added_before_reducing(ranks: Ranks, rng: random.Random) -> str | None:
    """A bias or a residual is added on every rank, and then summed."""
    pairs = [
        (c, r) for c in _collectives(ranks[0], "ALL_REDUCE") for r in _readers(ranks[0], c.output[0]) if r.op_type == "Add"
    ]
    if not pairs:
        return None
    c, add = rng.choice(pairs)
    for m in ranks:
        a, b = [next(n for n in m.graph.node if n.name == x) for x in (c.name, add.name)]
        other = next(t for t in b.input if t != a.output[0])
        partial, summed, done = a.input[0], f"{b.output[0]}.early", b.output[0]
        order = [n.name for n in m.graph.node]
        made = next((k for k, n in enumerate(m.graph.node) if other in n.output), -1)
        if made > order.index(a.name):
            return None
        nodes = [NodeProto.FromString(n.SerializeToString()) for n in m.graph.node]
        ca, cb = nodes[order.index(a.name)], nodes[order.index(b.name)]
        early = helper.make_node("Add", [partial, other], [summed], name=f"{cb.name}.early")
        ca.input[0], ca.output[0] = summed, done
        nodes = [x for n in nodes if n.name != cb.name for x in ((early, n) if n.name == a.name else (n,))]
        del m.graph.node[:]
        m.graph.node.extend(nodes)
    return add.name


@kind
def earlier_value_read(ranks: Ranks, rng: random.Random) -> str | None:
    """A residual is read from before its last change."""
    adds = [n for n in _nodes(ranks[0], "Add") if any(n.output[0] in r.input for r in ranks[0].graph.node)]
    rng.shuffle(adds)
    for n in adds:
        before = next((t for t in n.input if any(t in x.output for x in _nodes(ranks[0], "Add", "LayerNormalization"))), None)
        readers = _readers(ranks[0], n.output[0])
        if before is None or not readers:
            continue
        name = rng.choice(readers).name
        for r in _same_node(ranks, name):
            for k, t in enumerate(r.input):
                if t == n.output[0]:
                    r.input[k] = before
        return name
    return None


@kind
def number_changed(ranks: Ranks, rng: random.Random) -> str | None:
    """A scale, an epsilon: a literal is another number."""
    names = [t.name for t in ranks[0].graph.initializer if t.data_type == 1 and int(np.prod(t.dims)) == 1]
    if not names:
        return None
    name = rng.choice(names)
    for m in ranks:
        t = next(t for t in m.graph.initializer if t.name == name)
        t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t) * np.float32(1.25), name))
    return name


@kind
def another_function(ranks: Ranks, rng: random.Random) -> str | None:
    """Another activation or operator of the same shapes."""
    other = {
        "Sigmoid": "Tanh",
        "Erf": "Tanh",
        "Relu": "Abs",
        "Tanh": "Sigmoid",
        "Div": "Mul",
        "Sqrt": "Exp",
        "Neg": "Abs",
        "Sub": "Add",
    }
    found = _nodes(ranks[0], *other)
    if not found:
        return None
    name = rng.choice(found).name
    for n in _same_node(ranks, name):
        n.op_type = other[n.op_type]
    return name


@kind
def softmax_along_another_axis(ranks: Ranks, rng: random.Random) -> str | None:
    """Weights of keys that are normalised over queries."""
    found = _nodes(ranks[0], "Softmax")
    if not found:
        return None
    name = rng.choice(found).name
    for n in _same_node(ranks, name):
        _set(n, "axis", -2)
    return name


@kind
def files_exchanged(ranks: Ranks, rng: random.Random) -> str | None:
    """Two ranks run each other's file."""
    a, b = rng.sample(range(len(ranks)), 2)
    if ranks[a].SerializeToString() == ranks[b].SerializeToString():
        return None
    groups = [[list(next(x.ints for x in n.attribute if x.name == "groups")) for n in _collectives(ranks[k])] for k in (a, b)]
    if groups[0] != groups[1] or not _cut([ranks[a], ranks[b]]):
        return None
    name = rng.choice(_cut([ranks[a], ranks[b]]))
    x, y = _weights(ranks[a], 1)[name], _weights(ranks[b], 1)[name]
    ranks[a], ranks[b] = ranks[b], ranks[a]
    _put(ranks[a], name, x)  # all but one weight: with all of them it would be the same program, counted otherwise
    _put(ranks[b], name, y)
    return f"ranks {a}, {b}"


@kind
def weight_transposed(ranks: Ranks, rng: random.Random) -> str | None:
    """A square weight the other way round."""
    at = rng.randrange(len(ranks))
    names = [n for n, a in _weights(ranks[at]).items() if a.ndim == 2 and a.shape[0] == a.shape[1]]
    if not names:
        return None
    name = rng.choice(names)
    _put(ranks[at], name, _weights(ranks[at])[name].T)
    return f"{name} of rank {at}"


@kind
def order_of_collectives(ranks: Ranks, rng: random.Random) -> str | None:
    """One rank does two collectives the other way round."""
    m = ranks[-1]
    found = [k for k, n in enumerate(m.graph.node) if n.op_type == "DistCollective"]
    made = {t: k for k, n in enumerate(m.graph.node) for t in n.output}

    def needs(k: int, before: int) -> bool:
        return any(t in made and (made[t] == before or needs(made[t], before)) for t in m.graph.node[k].input)

    def apart(a: int, b: int) -> bool:
        x, y = m.graph.node[a], m.graph.node[b]
        return not needs(b, a) and x.SerializeToString() != y.SerializeToString()

    pairs = [(a, b) for a, b in itertools.pairwise(found) if apart(a, b)]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    nodes = [NodeProto.FromString(n.SerializeToString()) for n in m.graph.node]
    nodes.insert(b + 1, nodes.pop(a))
    need = list(nodes)
    done: set[str] = {i.name for i in m.graph.input} | {t.name for t in m.graph.initializer}
    ordered: list[NodeProto] = []
    while need:
        n = next(n for n in need if all(t in done or not t for t in n.input))
        need.remove(n)
        ordered.append(n)
        done.update(n.output)
    names = [n.name for n in ordered if n.op_type == "DistCollective"]
    if names == [m.graph.node[k].name for k in found]:
        return None
    del m.graph.node[:]
    m.graph.node.extend(ordered)
    return f"{names[0]} …"


@kind
def rolled(ranks: Ranks, rng: random.Random) -> str | None:
    """Positions one off: a value is turned round by one along its last axis (channels, of images), on every rank."""
    found = [n for n in _nodes(ranks[0], "MatMul", "Mul", "Conv", "Tanh") if _readers(ranks[0], n.output[0])]
    if not found:
        return None
    node = rng.choice(found)
    name, axis = node.output[0], 1 if node.op_type == "Conv" else -1

    def roll(a: str, b: str) -> list[NodeProto]:
        ends = [("at.first", [0]), ("at.second", [1]), ("at.last", [1 << 30]), ("at.axis", [axis])]
        consts = [helper.make_node("Constant", [], [f"{b}.{n}"], name=f"{b}.{n}", value_ints=v) for n, v in ends]
        cut = [
            helper.make_node("Slice", [a, f"{b}.{lo}", f"{b}.{hi}", f"{b}.at.axis"], [f"{b}.{k}"], name=f"{b}.{k}")
            for k, lo, hi in (("tail", "at.second", "at.last"), ("head", "at.first", "at.second"))
        ]
        return [*consts, *cut, helper.make_node("Concat", [f"{b}.tail", f"{b}.head"], [b], name=b, axis=axis)]

    _between(ranks, name, roll)
    return name


@kind
def heads_interleaved(ranks: Ranks, rng: random.Random) -> str | None:
    """Heads taken from every so-manyth column in place of neighbouring ones."""
    found = [n for n in _nodes(ranks[0], "Transpose") if list(n.attribute[0].ints) == [0, 2, 1, 3]]
    made = {n.output[0]: n for n in ranks[0].graph.node}
    found = [n for n in found if n.input[0] in made and made[n.input[0]].op_type == "Reshape"]
    if not found:
        return None
    name = rng.choice(found).name
    for m in ranks:
        n = next(n for n in m.graph.node if n.name == name)
        shape_of = next(x for x in m.graph.node if n.input[0] in x.output)
        t = next(t for t in m.graph.initializer if t.name == shape_of.input[1])
        b, s, h, d = (int(x) for x in numpy_helper.to_array(t))
        if h == 1:
            return None
        m.graph.initializer.append(numpy_helper.from_array(np.array([b, s, d, h], np.int64), f"{name}.shape"))
        shape_of.input[1] = f"{name}.shape"
        _set(n, "perm", [0, 3, 1, 2])
    readers = _readers(ranks[0], next(n for n in ranks[0].graph.node if n.name == name).input[0])
    return name if len(readers) == 1 else None


@kind
def wrong_root(ranks: Ranks, rng: random.Random) -> str | None:
    """A stage's result is sent by a rank that does not have it."""
    found = _collectives(ranks[0], "BROADCAST")
    if not found:
        return None
    name = rng.choice(found).name
    for n in _same_node(ranks, name):
        group = list(next(a.ints for a in n.attribute if a.name == "groups"))
        root = next(a.i for a in n.attribute if a.name == "root")
        _set(n, "root", group[(group.index(root) + 1) % len(group)])
    return name


@kind
def part_of_another_rank(ranks: Ranks, rng: random.Random) -> str | None:
    """A rank has the part of a weight that its neighbour has as well."""
    names = _cut(ranks)
    if not names:
        return None
    name = rng.choice(names)
    _put(ranks[1], name, _weights(ranks[0], 1)[name])
    return name


@kind
def result_exchanged(ranks: Ranks, rng: random.Random) -> str | None:
    """A value is put together with the halves of its last axis the wrong way round."""
    found = [n for n in _collectives(ranks[0], "ALL_GATHER", "ALL_REDUCE") if _readers(ranks[0], n.output[0])]
    if not found:
        return None
    name = rng.choice(found).output[0]

    def swap(a: str, b: str) -> list[NodeProto]:
        halves = helper.make_node("Split", [a], [f"{b}.0", f"{b}.1"], name=f"{b}.split", axis=-1, num_outputs=2)
        return [halves, helper.make_node("Concat", [f"{b}.1", f"{b}.0"], [b], name=b, axis=-1)]

    _between(ranks, name, swap)
    return name
