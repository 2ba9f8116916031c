"""``tapestry prove``: every rank's program and the model as values of one table, collectives among them, and then compared."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph, Op
from tapestry.tools.prove.collectives import Collective, results
from tapestry.tools.prove.lifted_values import block_values, opaque_values
from tapestry.tools.prove.rank_leaves import Leaves, here
from tapestry.tools.prove.rank_programs import OneFile, Program
from tapestry.tools.prove.reductions import alike
from tapestry.tools.prove.values import Miss, Ref, Table, Value, extents

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
