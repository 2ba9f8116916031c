"""``tapestry prove``: every rank's program and the model as values of one table, collectives among them, and then compared."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.types import FLOATS, Array
from tapestry.lift.file.structure import Given, load
from tapestry.runtime.feeds import random_feeds
from tapestry.tools.prove.collectives import Collective, results
from tapestry.tools.prove.lifted_values import block_values, opaque_values
from tapestry.tools.prove.rank_programs import Leaves, OneFile, Program, here, read_file, read_program
from tapestry.tools.prove.reductions import alike
from tapestry.tools.prove.values import Miss, Ref, Table, Value, extents
from tapestry.verify import interp

Values = dict[str, Value]


@dataclass(slots=True)
class Stuck(Exception):
    """Ranks that wait for each other for ever, or that meet in different collectives."""

    rank: int
    tensor: str
    text: str


@dataclass(slots=True)
class Comparison:
    """What came of writing a program in terms of a model.

    Attributes:
        outputs: per output of the model its state: ``proved``, or what is not.
        placed: per output, where each rank's part of it begins (None where the rank has none).
        wrong: the first output that is not the model's: what the rank calls it, and the rank.
        meetings: the collectives in the order in which ranks met in them, one of each member of the group.
        unread: tensors of ranks that are no values, because they stay on the host or depend on one that does.
    """

    table: Table
    leaves: Leaves
    model: Values
    ranks: list[Values]
    outputs: dict[str, str] = field(default_factory=dict[str, str])
    placed: dict[str, list[tuple[int, ...] | None]] = field(default_factory=dict[str, list[tuple[int, ...] | None]])
    wrong: tuple[str, int] | None = None
    stuck: Stuck | None = None
    unread: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    meetings: list[list[Collective]] = field(default_factory=list[list[Collective]])

    @property
    def proved(self) -> bool:
        """Whether every output is the model's."""
        return self.stuck is None and all(o == "proved" for o in self.outputs.values())

    def used(self, rank: int) -> set[int]:
        """The nodes that a rank's wrong output is made of, and that the model does not have."""
        begin = self.ranks[rank].get(self.wrong[0]) if self.wrong else None
        todo, out = [begin.node] if isinstance(begin, Ref) else [], set[int]()
        while todo:
            at = todo.pop()
            node = self.table.nodes[at]
            if at not in out and not node.model:
                out.add(at)
                todo += [a.node for a in node.args if isinstance(a, Ref)]
        return out

    def missed(self, rank: int) -> Miss | None:
        """Where a rank first is not what the model is and never was mended; where another rank is, if this one is nowhere."""
        live: list[Miss] = []
        for m in self.table.misses:
            v = self.ranks[m.rank].get(m.tensor) if 0 <= m.rank < len(self.ranks) else None
            if v is None or (isinstance(v, Ref) and not self.table.nodes[v.node].model):
                live.append(m)
        return min(live, key=lambda m: m.rank != rank, default=None)


def compare(model: OneFile, program: Program, order: int = 0) -> Comparison:
    """Write a program's values in terms of a model's.

    Args:
        order: of parts of inputs over the ranks, where shapes leave two.
    """
    table = Table()
    leaves = Leaves(table, model, program, order=order)
    whole = leaves.values = _model_values(table, leaves, model.graph)
    table.building = False
    out = Comparison(table, leaves, whole, [{} for _ in program.ranks])
    try:
        _Ranks(out, program).run()
    except Stuck as e:
        out.stuck = e
    _compare_outputs(out, model, program)
    return out


def _model_values(table: Table, leaves: Leaves, graph: Graph) -> Values:
    values: Values = {t: leaves.of_model(t) for t in (*graph.inputs, *graph.weights) if not graph.tensors[t].on_host}
    for op in graph.ops:
        table.tensor = op.outs[0]
        _add(table, op, graph, values)
        for t in op.outs:
            if isinstance(v := values.get(t), Ref):
                table.axes.setdefault(v.node, tuple(map(str, v.index)))
    return values


def _add(table: Table, op: Op, graph: Graph, values: Values) -> None:
    """The results of an operation, each a value; what stays on the host is no value."""
    if any(t not in values for t in op.inputs):
        return
    if isinstance(op, Block):
        found = block_values(table, op, values.__getitem__, graph.tensors)
    else:
        found = opaque_values(table, op, values.__getitem__, graph.tensors)
    if found is None:  # nothing is known of it but that it is there
        outs = [graph.tensors[t] for t in op.outs]
        if any(t.on_host for t in outs):
            return
        found = [Ref(table.leaf(f"{t.name} of rank {table.rank}", len(t.shape), t.dtype), tuple(here(t.shape))) for t in outs]
    values.update(zip(op.outs, found, strict=True))


class _Ranks:
    """All ranks, run operation by operation as soon as what they read is there, and collectives when all have come to them.

    Attributes:
        next: of each rank the collective that it comes to.
        waiting: of each rank the operations that wait, by the first tensor that is not there.
    """

    def __init__(self, out: Comparison, program: Program) -> None:
        self.out, self.program = out, program
        self.next = [0] * len(program.ranks)
        self.waiting: list[dict[str, list[int]]] = [{} for _ in program.ranks]

    def run(self) -> None:
        """Give every tensor of every rank its value."""
        for rank, file in enumerate(self.program.ranks):
            self._begin(rank, file)
            self._advance(rank, [*range(len(file.graph.ops))])
        while any(self.next[r] < len(f.collectives) for r, f in enumerate(self.program.ranks)):
            done = {self._meet(r) for r in range(len(self.program.ranks))}
            if done == {False}:
                self._stuck()

    def _begin(self, rank: int, file: OneFile) -> None:
        graph, table = file.graph, self.out.table
        targets = {c.target for c in file.collectives}
        for t in (*graph.inputs, *graph.weights):
            if t not in targets and not graph.tensors[t].on_host:
                table.rank, table.tensor = rank, t
                self.out.ranks[rank][t] = self.out.leaves.of_rank(rank, t)

    def _advance(self, rank: int, todo: list[int]) -> None:
        """Do operations, the first of the graph first, and all that wait for their results alone."""
        graph, table, values = self.program.ranks[rank].graph, self.out.table, self.out.ranks[rank]
        while todo:
            at = heapq.heappop(todo)
            op = graph.ops[at]
            absent = next((t for t in op.inputs if t not in values), None)
            if absent is not None:
                self.waiting[rank].setdefault(absent, []).append(at)
                continue
            table.rank, table.tensor = rank, op.outs[0]
            _add(table, op, graph, values)
            for t in op.outs:
                if t not in values:
                    self.out.unread.append((rank, t))
                    continue
                values[t] = self._named(rank, t, values[t])
                for k in self.waiting[rank].pop(t, ()):
                    heapq.heappush(todo, k)

    def _named(self, rank: int, name: str, v: Value) -> Value:
        """A value as a part of the model's of the same name, if it is one: a rank may have no cell of what the model joins."""
        table, whole = self.out.table, self.out.model.get(name)
        if not isinstance(whole, Ref) or not isinstance(v, Ref) or table.nodes[v.node].model:
            return v
        shape, extents = (g.tensors[name].shape for g in (self.program.ranks[rank].graph, self.out.leaves.model.graph))
        if len(shape) == len(extents) and all(0 < n <= w for n, w in zip(shape, extents, strict=True)):
            parts = [[k * w // p for p in (round(w / n),) for k in range(p)] for n, w in zip(shape, extents, strict=True)]
            for at in product(*parts):
                if (found := _as_part(table, whole, v, shape, at)) is not None:
                    return found
        return v

    def _at(self, rank: int) -> Collective | None:
        found = self.program.ranks[rank].collectives
        return found[self.next[rank]] if self.next[rank] < len(found) else None

    def _meet(self, rank: int) -> bool:
        """Do a rank's next collective, if all of its group have come to it."""
        mine = self._at(rank)
        if mine is None:
            return False
        each: list[Collective] = []
        for r in mine.group:
            c = self._at(r)
            if c is None or c.group != mine.group or (c.source and c.source not in self.out.ranks[r]):
                return False
            each.append(c)
        for r, c in zip(mine.group, each, strict=True):
            if (c.kind, c.op, c.root) != (mine.kind, mine.op, mine.root):
                raise Stuck(r, c.name, f"it does {c.kind} {c.op} where rank {rank} does {mine.kind} {mine.op} ('{mine.name}')")
        self._do(each)
        self.out.meetings.append(each)
        return True

    def _do(self, each: list[Collective]) -> None:
        first, table = each[0], self.out.table
        graphs = [self.program.ranks[r].graph for r in first.group]
        sent = [g.tensors[c.source].shape if c.source else None for g, c in zip(graphs, each, strict=True)]
        of_root = first.kind in ("BROADCAST", "SCATTER")
        shape = sent[first.group.index(first.root)] if of_root else sent[0]
        for r, c, mine in zip(first.group, each, sent, strict=True):
            if not of_root and mine != shape:
                text = f"it sends {list(mine or ())} where rank {first.group[0]} sends {list(shape or ())}"
                raise Stuck(r, c.name, text)
        if shape is None:
            raise Stuck(first.root, first.name, "the root sends nothing")
        if first.kind in ("REDUCE_SCATTER", "SCATTER", "ALL_TO_ALL") and (not shape or shape[0] % len(first.group)):
            raise Stuck(first.group[0], first.name, f"{list(shape)} does not divide among {len(first.group)} ranks")
        table.rank, table.tensor = first.group[0], first.target or first.name
        values = [self.out.ranks[r].get(c.source) for r, c in zip(first.group, each, strict=True)]
        found = results(table, first, values, shape)
        for r, c, v in zip(first.group, each, found, strict=True):
            self.next[r] += 1
            if c.target and v is not None:
                self._same_shape(r, c, shape)
                self.out.ranks[r][c.target] = v
        for r, c in zip(first.group, each, strict=True):
            self._advance(r, self.waiting[r].pop(c.target, []))

    def _same_shape(self, rank: int, c: Collective, shape: Sequence[int]) -> None:
        times = len(c.group) if c.kind in ("ALL_GATHER", "GATHER") else 1
        parts = len(c.group) if c.kind in ("REDUCE_SCATTER", "SCATTER") else 1
        want = (shape[0] * times // parts, *shape[1:]) if shape else ()
        have = self.program.ranks[rank].graph.tensors[c.target].shape
        if have != want:
            why = f"{list(have)}, not {list(want)}"
            raise TapestryError("a collective's result has another shape", where=f"'{c.target}'", why=why)

    def _stuck(self) -> None:
        waits = [(r, c) for r in range(len(self.program.ranks)) if (c := self._at(r)) is not None]
        text = "; ".join(f"rank {r} waits in {c.kind} '{c.name}' for ranks {list(c.group)}" for r, c in waits[:4])
        raise Stuck(waits[0][0], waits[0][1].name, text)


def _compare_outputs(out: Comparison, model: OneFile, program: Program) -> None:
    """Every output of the model: which part of it each rank has, whether it is that, and whether they are all of it."""
    names = {theirs: mine for mine, theirs in program.names.items()}
    for name in model.outputs:
        held = [names.get(name, name) if names.get(name, name) in f.outputs else "" for f in program.ranks]
        if not any(held):
            out.outputs[name], out.wrong = "no rank has it", out.wrong or (name, 0)
            continue
        tries = [_output(out, model, program, name, held, k) for k in range(2)]
        state, rank, placed = next((t for t in tries if t[0] == "proved"), tries[0])
        out.outputs[name], out.placed[name] = state, placed
        if state != "proved" and out.wrong is None:
            out.wrong = (held[rank], rank)


def _output(
    out: Comparison, model: OneFile, program: Program, name: str, held: Sequence[str], order: int
) -> tuple[str, int, list[tuple[int, ...] | None]]:
    """State, the rank where it is not the model's, and where each rank's part begins."""
    whole = model.graph.tensors[name].shape
    placed: list[tuple[int, ...] | None] = []
    sizes: set[tuple[int, ...]] = set()
    wrong: tuple[str, int] | None = None
    for rank, mine in enumerate(held):
        if not mine:
            placed.append(None)
            continue
        shape = program.ranks[rank].graph.tensors[mine].shape if mine in program.ranks[rank].graph.tensors else ()
        starts = program.starts(rank, name, shape, whole)
        if not starts or any(s % n if n else w for s, n, w in zip(starts[0], shape, whole, strict=True)):
            return f"rank {rank} has {list(shape)} of {list(whole)}", rank, placed
        if len(starts) > 1:
            out.leaves.open.add(name)
        start = starts[min(order, len(starts) - 1)]
        placed.append(start)
        sizes.add(shape)
        theirs, value = out.model.get(name), out.ranks[rank].get(mine)
        if wrong is None and (theirs is None or value is None or _as_part(out.table, theirs, value, shape, start) is None):
            wrong = (f"not proved of rank {rank}", rank)
    if wrong is not None:
        return *wrong, placed
    if len(sizes) != 1 or len({p for p in placed if p is not None}) * prod(next(iter(sizes))) != prod(whole):
        return "the ranks do not have all of it", 0, placed
    return "proved", 0, placed


def _as_part(table: Table, whole: Value, v: Value, shape: Sequence[int], start: Sequence[int]) -> Value | None:
    """The box of a tensor of the model that begins at a place, if a value is that."""
    ranges = extents(shape)
    want = table.read(whole, {f"y{k}": e + s for k, (e, s) in enumerate(zip(here(shape), start, strict=True))}, ranges)
    return want if alike(table, want, v, ranges) else None


# Where a program and a model differ, by running both: every rank's operations and collectives, on random input.
#
# Both are run in float64, where the order of sums makes no difference. An index that is computed from a logarithm can be
# another one there than in the model's own types; so what differs is run again in those, and only what differs in both is a
# witness.

APART = 1e-9  # of the largest value; float64 sums in another order differ by 1e-13 or so
Run = tuple[Mapping[str, Array], Sequence[Mapping[str, Array]]]  # every value of the model, and of each rank
ROUNDED = 2.0**-6  # of the largest value: more than bfloat16 is off by itself
MOST_POINTS = 1 << 28  # of all operations and ranks together; beyond it nothing is run


@dataclass(frozen=True, slots=True)
class Difference:
    """An output of a rank that is another value than the model's, at a cell of each."""

    output: str
    rank: int
    cell: tuple[int, ...]
    model_cell: tuple[int, ...]
    value: float
    expected: float
    seed: int


def difference(model: OneFile, program: Program, found: Comparison, seed: int = 0) -> Difference | str:
    """The first cell where a rank's output is not the model's, in float64 and in the model's own types; in words why there is
    none."""
    points = sum(prod(d.size for d in op.space) for f in (model, *program.ranks) for op in f.graph.ops if op.space)
    if points > MOST_POINTS:
        return f"running both would take {points:.3g} points, so that no difference was looked for"
    weights = _weights(model, program, found, seed)
    if weights is None:
        return "weights that are no part of the model's have no data, so that no difference was looked for"
    mine = {**random_feeds(model.graph, seed), **weights}
    every = replace(model.graph, outputs=(*model.outputs, *(t for op in model.graph.ops for t in op.outs)))

    def both(wide: bool) -> Run:
        return interp.run(every, mine, wide=wide), _run_ranks(program, found, mine, wide)

    try:
        first = _first(program, found, seed, wide := both(True))
        if first is None:
            return "both were run on random input and agree"
        return _first(program, found, seed, wide, own := both(False)) or _rounding_step(model, first, wide[0], own[0])
    except (ArithmeticError, KeyError, ValueError, IndexError, TypeError) as e:
        return f"one of them does not run ({type(e).__name__} {e}), so that no difference was found"


def _weights(model: OneFile, program: Program, found: Comparison, seed: int) -> dict[str, Array] | None:
    """Weights of the model: random ones where every rank's are parts of them, so that no zero hides a fault; else its own."""
    rng, out = np.random.default_rng(seed), dict[str, Array]()
    for name in model.graph.weights:
        t = model.graph.tensors[name]
        if name in model.lifted.constants or found.leaves.own or t.dtype not in FLOATS:
            data = model.data(name)
            if data is None:
                return None
        else:
            fan = max(1, t.shape[-2] if len(t.shape) > 1 else 1)
            data = rng.uniform(0.2, 1.0, t.shape) * rng.choice([1.0, -1.0] if len(t.shape) > 1 else [1.0], t.shape) / fan**0.5
        out[name] = np.asarray(data)
    return out


def _run_ranks(program: Program, found: Comparison, model: Mapping[str, Array], wide: bool) -> list[dict[str, Array]]:
    """Every value of every rank, collectives among them."""
    values: list[dict[str, Array]] = []
    for rank, file in enumerate(program.ranks):
        targets = {c.target for c in file.collectives}
        given = (t for t in (*file.graph.inputs, *file.graph.weights) if t not in targets)
        values.append({t: _given(found, file, rank, t, model) for t in given})
    for meeting in found.meetings:
        group = meeting[0].group
        for r in group:
            _advance(program.ranks[r], values[r], wide)
        results = collective(meeting[0], [values[r].get(c.source) for r, c in zip(group, meeting, strict=True)])
        for r, c, a in zip(group, meeting, results, strict=True):
            if c.target and a is not None:
                values[r][c.target] = a
    for rank, file in enumerate(program.ranks):
        _advance(file, values[rank], wide)
    return values


def _given(found: Comparison, file: OneFile, rank: int, name: str, model: Mapping[str, Array]) -> Array:
    """A rank's input or weight: its part of the model's."""
    placed = found.leaves.placed.get((rank, name))
    if placed is not None:
        return placed.of(np.asarray(model[placed.tensor]), file.graph.tensors[name].shape)
    data = file.data(name)
    if data is None:
        raise KeyError(name)
    return data


def _advance(file: OneFile, values: dict[str, Array], wide: bool) -> None:
    """Run the operations whose inputs are there."""
    ready, have = list[Op](), set(values)
    for op in file.graph.ops:
        if op.outs[0] not in values and have.issuperset(op.inputs):
            ready.append(op)
            have.update(op.outs)
    if not ready:
        return
    used = {t for op in ready for t in op.inputs} & values.keys()
    outs = tuple(t for op in ready for t in op.outs)
    part = replace(file.graph, ops=tuple(ready), inputs=tuple(used), outputs=outs)
    values.update(interp.run(part, {t: values[t] for t in used}, wide=wide))


def collective(c: Collective, arrays: Sequence[Array | None]) -> list[Array | None]:
    """What each member has after a collective, from its definition."""
    n = len(c.group)
    root = c.group.index(c.root) if c.root in c.group else 0
    given = [a for a in arrays if a is not None]
    if c.kind == "BROADCAST":
        return [arrays[root]] * n
    if c.kind == "SCATTER":
        sent = arrays[root]
        assert sent is not None
        return list(np.split(sent, n))
    if c.kind in ("ALL_GATHER", "GATHER"):
        whole = np.concatenate(given)
        return [whole if c.kind == "ALL_GATHER" or k == root else None for k in range(n)]
    if c.kind == "ALL_TO_ALL":
        pieces = [np.split(a, n) for a in given]
        return [np.concatenate([p[k] for p in pieces]) for k in range(n)]
    fold = {"SUM": np.add, "AVG": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}[c.op]
    total = fold.reduce(np.stack(given))
    if c.op == "AVG":
        total = total / n
    if c.kind == "REDUCE_SCATTER":
        return list(np.split(total, n))
    return [total if c.kind == "ALL_REDUCE" or k == root else None for k in range(n)]


def _first(program: Program, found: Comparison, seed: int, wide: Run, own: Run | None = None) -> Difference | None:
    """The first cell that differs in float64; with ``own``, by about as much as it does there."""
    names = {theirs: mine for mine, theirs in program.names.items()}
    for name, starts in found.placed.items():
        for rank, start in enumerate(starts):
            mine = names.get(name, name)
            if start is None or mine not in wide[1][rank]:
                continue
            a, box, apart, most = _box(wide, name, mine, rank, start)
            wrong = ~(np.abs(apart) <= APART * max(most, 1e-30))
            if own is not None:
                with np.errstate(invalid="ignore"):
                    there = _box(own, name, mine, rank, start)[2]
                    wrong &= np.where(np.isfinite(apart), np.abs(there - apart) <= np.abs(apart) / 2, there != 0)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                model_cell = tuple(i + s for i, s in zip(at, start, strict=True))
                return Difference(name, rank, at, model_cell, float(a[at]), float(box[at]), seed)
    return None


def _box(run: Run, name: str, mine: str, rank: int, start: Sequence[int]) -> tuple[Array, Array, Array, float]:
    """A rank's output, its box of the model's, how far they are apart (0 where they are equal, NaN too), the largest cell."""
    a, whole = (np.asarray(x).astype(np.float64) for x in (run[1][rank][mine], run[0][name]))
    box = whole[tuple(slice(s, s + n) for s, n in zip(start, a.shape, strict=True))]
    with np.errstate(invalid="ignore"):
        apart = np.where((a == box) | ((a != a) & (box != box)), 0.0, a - box)
    return a, box, apart, float(np.max(np.abs(whole), initial=0.0, where=np.isfinite(whole)))


def _rounding_step(model: OneFile, first: Difference, wide: Mapping[str, Array], own: Mapping[str, Array]) -> str:
    """Which of the model's operations makes of a rounded value another one than of the value itself."""
    text = f"they differ in float64 alone, at {first.output}{list(first.cell)} of rank {first.rank}"
    tensors = model.graph.tensors

    def close(name: str) -> bool:
        x, y = (np.asarray(v[name]).astype(np.float64) for v in (wide, own))
        with np.errstate(invalid="ignore"):
            near = np.abs(x - y) <= ROUNDED * np.max(np.abs(x), initial=0.0, where=np.isfinite(x))
        return bool(np.all(near | (x == y) | ((x != x) & (y != y))))

    for op in model.graph.ops:
        ins = [t for t in op.inputs if t in wide and not tensors[t].on_host and tensors[t].dtype in FLOATS]
        if ins and all(map(close, ins)) and not all(close(t) for t in op.outs if not tensors[t].on_host):
            kind = next((n.op_type for n in load(model.path).graph.node if op.outs[0] in n.output), op.outs[0])
            return f"{text}: '{ins[0]}' is computed in {tensors[ins[0]].dtype}, near a step of {kind}"
    return f"{text}: rounding hides it in the model's own types"


# What ``tapestry prove`` says: proved, refuted with a cell, or not decided; and what that rests on.

PROVED, REFUTED, UNDECIDED = "proved", "refuted", "undecided"
TRIES = 2  # random inputs for a witness


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer.

    Attributes:
        status: ``proved``, ``refuted`` or ``undecided``.
        witness: of what is refuted: a rank, a tensor and a cell, what is there and what should be.
        reason: why it is not decided.
        document: all of it, for ``--json``.
    """

    status: str
    witness: dict[str, Any] | None = None
    reason: str = ""
    document: dict[str, Any] = field(default_factory=dict[str, Any])

    def text(self) -> str:
        """As a person reads it."""
        d = self.document
        lines = [f"{self.status}: {d['ranks']} ranks, {d['operations']} operations, {d['collectives']} collectives"]
        if self.witness:
            lines.append("  " + self.witness["text"])
        if self.reason:
            lines.append(f"  {self.reason}")
        lines += [f"  {o['output']}: {o['state']}" for o in d["outputs"]]
        lines += [f"  taken as given: {a}" for a in d["assumed"]]
        return "\n".join([*lines, f"  evidence: {d['evidence']['what']}"])


def prove(model: Path, program: Sequence[Path], shapes: Given = {}) -> Verdict:  # noqa: B006
    """Whether a parallel program computes a model.

    Args:
        program: a folder with a file per rank, or the files; ``program.json`` says what shapes and data leave open. Or a
            JSON file alone with a ``tp_plan`` as transformers has it, which is applied to the model.
        shapes: sizes of symbols.

    Raises:
        TapestryError: a file cannot be read.
    """
    whole, ranks = read_file(model, shapes), read_program(program, shapes, model)
    found = compare(whole, ranks)
    if not found.proved and found.stuck is None:
        other = compare(whole, ranks, 1)
        found = other if other.proved else found
    document = _document(model, whole, ranks, found)
    if found.proved:
        return _verdict(document, PROVED)
    if found.stuck is not None and found.unread:
        rank, tensor = found.unread[0]
        why = "it stays on the host, or its size depends on the data"
        return _verdict(document, UNDECIDED, None, f"rank {rank}: '{tensor}' cannot be followed: {why}")
    if (stuck := found.stuck) is not None:
        text = f"rank {stuck.rank}, '{stuck.tensor}': {stuck.text}"
        return _verdict(document, REFUTED, {"rank": stuck.rank, "tensor": stuck.tensor, "cell": None, "text": text})
    missing = next((n for n, s in found.outputs.items() if s in ("no rank has it", "the ranks do not have all of it")), None)
    if missing is not None:
        text = f"output '{missing}': {found.outputs[missing]}"
        return _verdict(document, REFUTED, {"rank": 0, "tensor": missing, "cell": None, "text": text})
    apart: Difference | str = ""
    for seed in range(TRIES):
        apart = difference(whole, ranks, found, seed)
        if isinstance(apart, Difference) and found.leaves.open:
            why = f"parts of {', '.join(sorted(found.leaves.open))} can lie on the ranks in several orders: program.json says"
            return _verdict(document, UNDECIDED, None, why)
        if isinstance(apart, Difference):
            wrong = next(o for o in document["outputs"] if o["output"] == apart.output)
            wrong["state"] = f"rank {apart.rank} has another value"
            return _verdict(document, REFUTED, _witness(found, ranks, apart))
    return _verdict(document, UNDECIDED, None, f"no proof was found: {_where(found, ranks)}; {apart}")


def _verdict(document: dict[str, Any], status: str, witness: dict[str, Any] | None = None, reason: str = "") -> Verdict:
    document |= {"status": status, "proved": status == PROVED, "witness": witness, "reason": reason}
    kinds = {
        PROVED: ("normal form", "every output cell of every rank is the model's function of the model's inputs and weights, "
                 "over the real numbers: up to rounding and the order of merges, for finite values"),
        REFUTED: ("exact arithmetic on instances",
                  "both were run on random input, in float64 and in the model's own types, or the ranks cannot go on"),
        UNDECIDED: ("none", "nothing was shown"),
    }  # fmt: skip
    document["evidence"] = {"kind": kinds[status][0], "what": kinds[status][1]} | document.pop("counts")
    return Verdict(status=status, witness=witness, reason=reason, document=document)


def _document(model: Path, whole: OneFile, program: Program, found: Comparison) -> dict[str, Any]:
    placed = [
        {"rank": r, "tensor": n, "of": p.tensor, "start": list(p.start), "known_by": p.source}
        | ({"axis": p.axis, "runs": [[k.here, k.there, k.size] for k in p.runs]} if p.runs else {})
        for (r, n), p in sorted(found.leaves.placed.items()) if any(p.start) or p.source != "shape"
    ]  # fmt: skip
    assumed = sorted({f"'{p['of']}' is cut in the order of the ranks" for p in placed if p["known_by"] == "order of ranks"})
    assumed += [f"'{n}' holds the model's data (there is none to compare)" for n in sorted(found.leaves.unchecked)][:20]
    assumed += [f"the plan's '{p}' is of nothing in the model" for p in program.unused]
    return {
        "model": str(model), "ranks": len(program.ranks), "mesh": dict(program.mesh),
        "operations": sum(len(f.graph.ops) for f in program.ranks),
        "collectives": sum(len(f.collectives) for f in program.ranks),
        "outputs": [
            {"output": n, "state": s, "starts": [None if p is None else list(p) for p in found.placed.get(n, [])]}
            for n, s in found.outputs.items()
        ],
        "placed": placed, "assumed": assumed,
        "counts": {"values": len(found.table.nodes), "model_values": sum(n.model for n in found.table.nodes)},
    }  # fmt: skip


def _witness(found: Comparison, program: Program, d: Difference) -> dict[str, Any]:
    first = found.missed(d.rank)
    cell, there = list(d.cell), list(d.model_cell)
    text = (
        f"rank {d.rank}: {d.output}{cell} is {d.value:.6g}, the model's {d.output}{there} is {d.expected:.6g} (seed {d.seed})"
    )
    out: dict[str, Any] = {
        "rank": d.rank, "tensor": d.output, "cell": cell, "model_cell": there, "value": d.value, "expected": d.expected,
        "seed": d.seed,
    }  # fmt: skip
    if first is not None:
        out["first"] = {"rank": first.rank, "tensor": first.tensor, "model_tensor": first.origin, "text": first.text}
        text += f"; rank {first.rank}, '{first.tensor}' (the model's '{first.origin}'): {first.text}"
    else:
        text += f"; {_where(found, program)}"
    return out | {"text": text}


def _where(found: Comparison, program: Program) -> str:
    """The first value that the wrong output is made of, and that is none of the model's."""
    rank = found.wrong[1] if found.wrong else 0
    first = found.missed(rank)
    if first is not None:
        return f"rank {first.rank}, '{first.tensor}' (the model's '{first.origin}'): {first.text}"
    table, used = found.table, found.used(rank)
    file = program.ranks[rank]
    sums = [found.ranks[rank].get(c.source) for c in file.collectives]  # partial states are on their way to a collective
    for op in file.graph.ops:
        v = found.ranks[rank].get(op.outs[0])
        if isinstance(v, Ref) and v.node in used and table.nodes[v.node].kind != "part" and v not in sums:
            first = f"'{op.outs[0]}' of rank {rank} is the first value that is not known as the model's"
            part = _part(table, v.node)
            return first if part is None else f"{first}, of '{part[0]}' merged over {part[1]} alone"
    return f"rank {rank} returns another of the model's values"


def _part(table: Table, at: int) -> tuple[str, str] | None:
    """The partial reduction that a node is made of: its name in the model, and which of its points."""
    node = table.nodes[at]
    if node.kind == "part":
        base, domain = table.parted(at)
        sizes = " x ".join(map(str, table.nodes[base].bound))
        return node.origin, f"points {domain.text()} of {sizes}"
    inside = (_part(table, a.node) for a in node.args if isinstance(a, Ref) and not table.nodes[a.node].model)
    return next((p for p in inside if p is not None), None)
