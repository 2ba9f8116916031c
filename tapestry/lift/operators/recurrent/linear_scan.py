"""Scan whose states are linear recurrences: the body's work over all steps at once, and one running state for each.

What is free of a state becomes ordinary operations with a dimension more, the time; ``h[t] = a[t] * h[t-1] + b[t]`` is a scan
of the monoid of affine maps, with the state's first value in ``b[0]``; what reads a state is over all steps at once again. So
time is a dimension like others: cut, one state per block travels.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, call, cast, rewrite, walk
from tapestry.ir.graph import Block, Dim, Read, shape_of
from tapestry.ir.index import Aff, const, dim, dims_of, span, substitute
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognition.running_state import running
from tapestry.ir.types import Tensor
from tapestry.lift.affine_values import index_value
from tapestry.lift.builder import Node, accumulator, axes, here
from tapestry.lift.operators.recurrent.linear_state import NotLinear, Recurrence
from tapestry.lift.operators.recurrent.loop_body import LoopBody, linear_body
from tapestry.lift.registry import Declined, lifts


@lifts("Scan")
def lift_scan(n: Node) -> None:
    """As running states where every state is a linear recurrence; else the node stays whole."""
    if not n.b.steps:
        raise Declined
    try:
        body = linear_body(n.proto, n.b.types, n.b.known, n.b.opsets)
    except NotLinear:
        raise Declined from None
    _Steps(n, body).write()


@dataclass(slots=True)
class _Steps:
    """A body over all of its steps.

    Attributes:
        time, over: the dimension of steps, and the one that running states merge along with it.
        names: tensor of a step → tensor of the graph; ``timed`` are those with an axis of steps in front there.
        history: the states after every step.
    """

    n: Node
    body: LoopBody
    time: Dim = field(init=False)
    over: Dim = field(init=False)
    names: dict[str, str] = field(default_factory=dict[str, str])
    timed: set[str] = field(default_factory=set[str])
    history: dict[int, str] = field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        taken = {d.name for op in self.body.b.ops for d in op.space}
        taken |= {d.name for r in self.body.recurrences.values() for d in r.dims}
        t, u = (next(x for x in (base, *(f"{base}{k}" for k in range(len(taken)))) if x not in taken) for base in ("t", "u"))
        self.time, self.over = Dim(t, self.body.node.steps), Dim(u, self.body.node.steps)

    def write(self) -> None:
        """Emit everything the node's outputs need."""
        n, scan, count = self.n, self.body.node, len(self.body.states)
        for name, outer, axis, back in zip(self.body.slices, scan.over, scan.axes, scan.back, strict=True):
            self.slices(name, outer, axis, back)
        for k, recurrence in self.body.recurrences.items():
            self.state(k, recurrence)
        for k in range(count):
            if n.wants(k):
                self.last(k)
        for j, name in enumerate(self.body.seen):
            if n.wants(count + j):
                self.seen(j, name)

    def slices(self, name: str, outer: str, axis: int, back: bool) -> None:
        """What is scanned, its axis of steps in front and in their order."""
        scan, t = self.body.node, dim(self.time.name)
        self.names[name] = outer
        self.timed.add(name)
        if axis or back:
            dims = (self.time, *axes(self.n.b.tensor(outer).shape[:axis] + self.n.b.tensor(outer).shape[axis + 1 :]))
            spots, place = here(dims[1:]), const(scan.steps - 1) - t if back else t
            self.names[name] = self.n.view(self.fresh(name), outer, dims, [*spots[:axis], place, *spots[axis:]])

    def state(self, k: int, recurrence: Recurrence) -> None:
        """The states after every step."""
        name, after = self.body.states[k], self.body.after[k]
        if recurrence.unchanged:
            self.names[name] = self.body.node.first[k]
            return
        self.emit({r.tensor for r in recurrence.reads})
        if recurrence.scale is None:
            assert recurrence.shift is not None
            self.history[k] = self.map(recurrence, recurrence.shift, "next", whole=True)[0]
        else:
            self.history[k] = self.run(k, recurrence, recurrence.scale)
        if after in self.body.makers:  # who reads the next state in a step reads it here
            self.names[after] = self.history[k]
            self.timed.add(after)

    def run(self, k: int, recurrence: Recurrence, scale: Expr) -> str:
        """A scan of ``h = scale * h + shift``, a running sum where the scale is 1."""
        parts = [self.shift(k, recurrence, scale)]
        if not (isinstance(scale, Const) and scale.value == 1):
            parts.insert(0, self.map(recurrence, scale, "scale", whole=False))
        monoid = "affine" if len(parts) > 1 else "sum"
        t, u = dim(self.time.name), dim(self.over.name)
        wide = accumulator(scale.dtype)
        zeros = MONOIDS[monoid].zero((wide,) * len(parts))
        reads = [
            self.n.read(x, [substitute(e, {self.time.name: u}) for e in at], z.value, (running(t, self.over.name),))
            for (x, at), z in zip(parts, zeros, strict=True)
        ]
        body = [cast(Arg(i, scale.dtype), wide) for i in range(len(parts))]
        then = [cast(Acc(len(parts) - 1, wide), scale.dtype)]
        out = self.fresh(self.body.after[k])
        self.n.reduce([out], (self.time, *recurrence.dims), [self.over], monoid, reads, body, then)
        return out

    def shift(self, k: int, recurrence: Recurrence, scale: Expr) -> tuple[str, list[Aff]]:
        """What each step adds. The state's first value is in the first step's: the product of all factors may overflow."""
        own: Expr = Arg(len(recurrence.reads), scale.dtype)
        begun = own if isinstance(scale, Const) and scale.value == 1 else scale * own
        begun = begun if recurrence.shift is None else begun + recurrence.shift
        first = call("eq", Index(dim(self.time.name)), 0)
        body = call("where", first, begun, recurrence.shift or 0)
        start = Read(tensor=self.body.node.first[k], index=tuple(here(recurrence.dims)))
        return self.map(recurrence, body, "shift", whole=True, more=(start,))

    def map(
        self, recurrence: Recurrence, e: Expr, what: str, *, whole: bool, more: tuple[Read, ...] = ()
    ) -> tuple[str, list[Aff]]:
        """Emit an expression of a state's step, over the steps and the state's dimensions: all, or those it differs along."""
        used = sorted({x.pos for x in walk(e) if isinstance(x, Arg)})
        all_reads = (*(self.outer(r) for r in recurrence.reads), *more)
        reads = [(all_reads[p], self.n.b.tensor(all_reads[p].tensor)) for p in used]

        def leaf(x: Expr) -> Expr:
            return Arg(used.index(x.pos), x.dtype) if isinstance(x, Arg) else x

        affs = [a for r, _ in reads for a in (*r.index, *(g.aff for g in r.when))]
        affs += [x.aff for x in walk(e) if isinstance(x, Index)]
        along = {d for a in affs for d in dims_of(a)}
        dims = tuple(d for d in (self.time, *recurrence.dims) if whole or d.name in along)
        return self.n.block(self.fresh(what), dims, reads, rewrite(e, leaf)), here(dims)

    def before(self, k: int) -> str:
        """The states before every step: what the body reads."""
        name, first = self.body.states[k], self.body.node.first[k]
        own = axes(self.n.b.tensor(first).shape, "s")
        t = dim(self.time.name)
        reads = [self.n.read(first, own), self.n.read(self.history[k], [t - 1, *here(own)], 0)]
        at = call("eq", Index(t), 0)
        return self.n.block(self.fresh(f"{name}.before"), (self.time, *own), reads, lambda a, b: call("where", at, a, b))

    def emit(self, wanted: set[str]) -> None:
        """Emit what tensors of a step need that is not there yet, over all steps where it differs from step to step."""
        need = wanted - self.names.keys()
        ops: list[Block] = []
        for op in reversed(self.body.b.ops):
            if need.intersection(op.outs) and isinstance(op, Block):
                ops.append(op)
                need |= set(op.inputs) - self.names.keys()
        for name in sorted(need - self.body.makers.keys()):
            self.leaf(name)
        for op in reversed(ops):
            self.copy(op)

    def leaf(self, name: str) -> None:
        """A value that no operation of the body makes: a state, one of the graph around it, or a constant."""
        b = self.n.b
        if name in self.body.states:
            self.names[name] = self.before(self.body.states.index(name))
            self.timed.add(name)
        elif name in self.body.captured:
            self.names[name] = name
        else:
            value = self.body.b.value(name)
            assert value is not None, f"'{name}' comes from nowhere"
            self.names[name] = b.constant(self.fresh(name), value, self.body.b.tensor(name).dtype)

    def copy(self, op: Block) -> None:
        """An operation over all steps."""
        timed = any(r.tensor in self.timed for r in op.reads)
        outs = tuple(self.fresh(o) for o in op.outs)
        dims = (self.time, *op.dims) if timed else op.dims
        new = replace(op, outs=outs, dims=dims, reads=tuple(map(self.outer, op.reads)), source=(self.n.source,))
        shape = shape_of(dims)
        dtypes = [self.body.b.tensor(o).dtype for o in op.outs]
        tensors = [Tensor(name=o, dtype=d, shape=shape) for o, d in zip(outs, dtypes, strict=True)]
        self.n.b.emit(self.picked(new), tensors)
        for name, o in zip(op.outs, outs, strict=True):
            if name not in self.names:
                self.names[name] = o
                self.timed |= {name} if timed else set()

    def picked(self, op: Block) -> Block:
        """An operation as it is, unless it picks one element along an axis at a place that is known by now: then that element.

        ``sum_v where(place = v, x[v], 0)`` with a place that is an index expression of the step.
        """
        if op.monoid not in ("sum", "any") or len(op.reduce) != 1 or op.lowers or op.inner or len(op.body) != 1:
            return op
        e, v = op.body[0], op.reduce[0]
        if not (isinstance(e, Call) and e.fn == "where" and isinstance(e.args[1], Arg) and isinstance(e.args[2], Const)):
            return op
        test, x, zero = e.args[0], e.args[1], e.args[2]
        if not (isinstance(test, Call) and test.fn == "eq" and test.args[1] == Index(dim(v.name)) and not zero.value):
            return op
        place = index_value(self.n.b, op, test.args[0])
        if place is None or v.name in dims_of(place):
            return op
        lo, hi = span(place, op.ranges)
        if lo < 0 or hi >= v.size or op.reads[x.pos].when:
            return op
        read = op.reads[x.pos]
        read = replace(read, index=tuple(substitute(i, {v.name: place}, op.ranges) for i in read.index))
        return replace(op, reads=(read,), body=(Arg(0, x.dtype),), reduce=(), monoid=None, then=())

    def outer(self, r: Read) -> Read:
        """A read of a step's tensor as one of the graph's."""
        index = (dim(self.time.name), *r.index) if r.tensor in self.timed else r.index
        return replace(r, tensor=self.names[r.tensor], index=index)

    def last(self, k: int) -> None:
        """A state at the end."""
        dims, first = self.n.out_dims(k), self.body.node.first[k]
        at = [const(self.time.size - 1)] if k in self.history else []
        self.n.view(self.n.out(k), self.history.get(k, first), dims, [*at, *here(dims)])

    def seen(self, j: int, name: str) -> None:
        """What is kept of every step, its axis of steps where the node wants it."""
        scan, k = self.body.node, len(self.body.states) + j
        self.emit({name})
        dims = self.n.out_dims(k)
        axis = scan.out_axes[j] % len(dims)
        t = dim(dims[axis].name)
        t = const(scan.steps - 1) - t if scan.out_back[j] else t
        rest = here((*dims[:axis], *dims[axis + 1 :]))
        self.n.view(self.n.out(k), self.names[name], dims, [t, *rest] if name in self.timed else rest)

    def fresh(self, name: str) -> str:
        return self.n.b.fresh(f"{next(o for o in self.n.outs if o)}.{name.rstrip(chr(126))}")
