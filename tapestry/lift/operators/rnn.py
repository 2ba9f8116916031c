"""LSTM, GRU and RNN: the steps of a short sequence one after another, each a contraction over the hidden state and its gates.

What the input contributes is one contraction over all steps. A step then adds ``h[t-1] · R`` and applies the gates, cell by
cell, so that batch and hidden dimensions are ordinary ones: where the hidden one is cut, every device has the rows of the
gates' weights that it needs, and gathers the state of the step before. Beyond `STEPS` steps, or with a clip or an unusual
activation, the node stays opaque, splittable along its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, helper

from tapestry.errors import ModelError
from tapestry.ir.expr import Arg, Call, Const, Expr, Index, call, cast
from tapestry.ir.graph import Block, Dim, Op, Opaque, Read
from tapestry.ir.index import Aff, bounds, const, dim, substitute
from tapestry.ir.monoid import number
from tapestry.ir.types import FLOATS, Tensor
from tapestry.lift.builder import Body, Builder, Node, Operand, axes, emit_opaque, here, lift_nodes, lifts, literal
from tapestry.lift.file.protos import captured, nested, static_shape
from tapestry.lift.normalize.prepare import prepare
from tapestry.lift.normalize.unroll import STEPS, ScanNode, is_movable, read_scan, size_of
from tapestry.lift.operators.linear import contract
from tapestry.lift.operators.shape import concat
from tapestry.onnx_eval.opaque_node import RANDOM

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {
    "sigmoid": lambda x: call("sigmoid", x),
    "tanh": lambda x: call("tanh", x),
    "relu": lambda x: call("max", x, literal(0, x.dtype)),
}


@dataclass(frozen=True, slots=True)
class _Cell:
    """One direction of a recurrent node: X [T, B, I] (B first with ``first``), weights W, R and biases at ``way``."""

    n: Node
    way: int
    acts: tuple[Callable[[Expr], Expr], ...]
    first: bool

    @property
    def steps(self) -> int:
        return self.n.shape(0)[1 if self.first else 0]

    @property
    def rows(self) -> tuple[Dim, Dim]:
        """Batch and hidden: the dimensions of a state."""
        return Dim("b", self.n.shape(0)[0 if self.first else 1]), Dim("h", self.n.shape(2)[2])

    @property
    def hidden(self) -> int:
        return self.n.shape(2)[2]

    def name(self, what: str) -> str:
        return self.n.temp(f"{what}{self.way}")

    def bias(self, gate: int | None, *, recurrent: bool) -> Operand:
        """Bias of a gate's row ``h`` (of row ``g, h`` where no gate is given), of the input's or the recurrent product."""
        at = dim("g") * self.hidden if gate is None else const(gate * self.hidden)
        shift = GATES[self.n.kind] * self.hidden if recurrent else 0
        return self.n.read(self.n.ins[3], [const(self.way), at + dim("h") + shift])

    def state(self, k: int) -> str:
        """The state before the first step: input k, or zeros."""
        n = self.n
        if not n.has(k):
            return n.block(self.name("zero"), self.rows, [], literal(0, n.dtype(0)))
        spot = [dim("b"), const(self.way)] if self.first else [const(self.way), dim("b")]
        return n.view(self.name("initial"), n.ins[k], self.rows, [*spot, dim("h")])

    def from_input(self, *, both: bool) -> str:
        """``[t, b, g, h | m]``: every gate's part of X and W with its bias, and the recurrent bias with ``both``."""
        n, (b, h) = self.n, self.rows
        dims = (Dim("t", self.steps), b, Dim("g", GATES[n.kind]), h)
        spot = [dim("b"), dim("t")] if self.first else [dim("t"), dim("b")]
        x = n.read(n.ins[0], [*spot, dim("m")])
        w = n.read(n.ins[1], [const(self.way), dim("g") * self.hidden + dim("h"), dim("m")])
        more = [self.bias(None, recurrent=False), *([self.bias(None, recurrent=True)] if both else [])] if n.has(3) else []
        return _contract(n, self.name("input"), dims, Dim("m", n.shape(0)[2]), x, w, more)

    def recur(self, state: str, gates: Sequence[int], more: Sequence[Operand]) -> str:
        """``[b, g, h | k]``: the state times R, for consecutive gates, and what is to be added."""
        n, (b, h) = self.n, self.rows
        dims = (b, Dim("g", len(gates)), h)
        r = n.read(n.ins[2], [const(self.way), dim("g") * self.hidden + dim("h") + gates[0] * self.hidden, dim("k")])
        return _contract(n, self.name("gates"), dims, Dim("k", self.hidden), n.read(state, [dim("b"), dim("k")]), r, more)

    def of_input(self, x: str, t: int, gate: int | None) -> Operand:
        return self.n.read(x, [const(t), dim("b"), dim("g") if gate is None else const(gate), dim("h")])

    def gate(self, gates: str, k: int) -> Operand:
        return self.n.read(gates, [dim("b"), const(k), dim("h")])

    def cell(self, name: str) -> Operand:
        return self.n.read(name, here(self.rows))

    def map(self, what: str, reads: Sequence[Operand], body: Body) -> str:
        return self.n.block(self.name(what), self.rows, reads, body)

    def lasts(self, t: int, new: str, old: str | None) -> str:
        """The state where a sequence has step t, the old one (or 0) where it has ended before."""
        n = self.n
        if not _ragged(n):
            return new
        inside = n.read(n.ins[4], [dim("b")])

        def body(end: Expr, x: Expr, *kept: Expr) -> Expr:
            still = call("lt", number(t, "i64"), cast(end, "i64"))
            return call("where", still, x, kept[0] if kept else literal(0, x.dtype))

        reads = [inside, self.cell(new), *([self.cell(old)] if old is not None else [])]
        return self.map("held" if old is not None else "shown", reads, body)

    def ended(self, state: str) -> str:
        """The last state; 0 for a sequence without a step, of which ONNX says nothing, as onnxruntime has it."""
        n = self.n
        lengths = n.const(4) if n.has(4) else None
        if not _ragged(n) or (lengths is not None and bool((lengths > 0).all())):
            return state

        def body(end: Expr, x: Expr) -> Expr:
            return call("where", call("lt", number(0, "i64"), cast(end, "i64")), x, literal(0, x.dtype))

        return self.map("ended", [n.read(n.ins[4], [dim("b")]), self.cell(state)], body)


def _contract(n: Node, out: str, dims: Sequence[Dim], over: Dim, a: Operand, b: Operand, more: Sequence[Operand]) -> str:
    """``sum a * b`` and then, in order, what is to be added."""

    def after(total: Expr) -> Expr:
        for k, (_, t) in enumerate(more):
            total = call("add", total, cast(Arg(2 + k, t.dtype), total.dtype))
        return total

    return contract(n, out, dims, [over], a, b, more=more, after=after)


def _lstm(c: _Cell) -> Callable[[int, str, str | None], tuple[str, str | None]]:
    """Gates i, o, f, c: ``C = f * C + i * c`` and ``H = o * tanh(C)``; peepholes P look at C (o at the new one)."""
    n, x = c.n, c.from_input(both=True)
    f, g, last = c.acts
    one = literal(1, n.dtype(0))
    coupled = bool(n.attr("input_forget", 0))

    def peep(k: int) -> list[Operand]:
        return [n.read(n.ins[7], [const(c.way), dim("h") + k * c.hidden])] if n.has(7) else []

    def pre(gate: Expr, cell: Expr, holes: Sequence[Expr]) -> Expr:
        return f(call("add", gate, call("mul", holes[0], cell)) if holes else gate)

    def next_cell(i: Expr, forget: Expr, new: Expr, old: Expr, *holes: Expr) -> Expr:
        enter = pre(i, old, holes[:1])
        keep = call("sub", one, enter) if coupled else pre(forget, old, holes[1:])
        return call("add", call("mul", keep, old), call("mul", enter, g(new)))

    def output(o: Expr, cell: Expr, *holes: Expr) -> Expr:
        return call("mul", pre(o, cell, holes), last(cell))

    def step(t: int, h: str, cell: str | None) -> tuple[str, str | None]:
        assert cell is not None
        gates = c.recur(h, range(4), [c.of_input(x, t, None)])
        reads = [c.gate(gates, 0), c.gate(gates, 2), c.gate(gates, 3), c.cell(cell), *peep(0), *peep(2)]
        new = c.map("cell", reads, next_cell)
        return c.map("hidden", [c.gate(gates, 1), c.cell(new), *peep(1)], output), new

    return step


def _gru(c: _Cell) -> Callable[[int, str, str | None], tuple[str, str | None]]:
    """Gates z, r, h: ``H = (1 - z) * h + z * H``; r acts on H before the product with R, or after it, by attribute."""
    n, after = c.n, bool(c.n.attr("linear_before_reset", 0))
    x = c.from_input(both=not after)
    f, g = c.acts
    one = literal(1, n.dtype(0))

    def mix(z: Expr, new: Expr, old: Expr) -> Expr:
        return call("add", call("mul", call("sub", one, z), new), call("mul", z, old))

    def before(t: int, h: str, _: str | None) -> tuple[str, None]:
        gates = c.recur(h, range(2), [c.of_input(x, t, None)])
        reset = c.map("reset", [c.gate(gates, 1), c.cell(h)], lambda r, old: call("mul", f(r), old))
        new = c.recur(reset, [2], [c.of_input(x, t, 2)])
        return c.map("hidden", [c.gate(gates, 0), c.gate(new, 0), c.cell(h)], lambda z, v, old: mix(f(z), g(v), old)), None

    def behind(t: int, h: str, _: str | None) -> tuple[str, None]:
        gates = c.recur(h, range(3), [c.bias(None, recurrent=True)] if n.has(3) else [])

        def body(*v: Expr) -> Expr:
            z, r = f(call("add", v[0], v[3])), f(call("add", v[1], v[4]))
            return mix(z, g(call("add", v[2], call("mul", r, v[5]))), v[6])

        reads = [*(c.of_input(x, t, k) for k in range(3)), *(c.gate(gates, k) for k in range(3)), c.cell(h)]
        return c.map("hidden", reads, body), None

    return behind if after else before


def _rnn(c: _Cell) -> Callable[[int, str, str | None], tuple[str, str | None]]:
    x = c.from_input(both=True)

    def step(t: int, h: str, _: str | None) -> tuple[str, None]:
        gates = c.recur(h, [0], [c.of_input(x, t, None)])
        return c.map("hidden", [c.gate(gates, 0)], c.acts[0]), None

    return step


STEP = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}


def _run(c: _Cell, reverse: bool) -> tuple[list[str], str, str | None]:
    """All steps of a direction: what Y shows of each, by time, and the last states."""
    n = c.n
    step, shown = STEP[n.kind](c), [""] * c.steps
    h, cell = c.state(5), c.state(6) if n.kind == "LSTM" else None
    for t in reversed(range(c.steps)) if reverse else range(c.steps):
        new, inside = step(t, h, cell)
        shown[t] = c.lasts(t, new, None) if n.wants(0) else ""
        cell = None if inside is None or cell is None else c.lasts(t, inside, cell)
        h = c.lasts(t, new, h)
    return shown, c.ended(h) if n.wants(1) else h, c.ended(cell) if cell is not None and n.wants(2) else cell


def _ragged(n: Node) -> bool:
    """Whether some sequence may end before the others."""
    lengths = n.const(4) if n.has(4) else None
    return n.has(4) and (lengths is None or bool((lengths != n.shape(0)[1 if n.attr("layout", 0) else 0]).any()))


def _activations(n: Node) -> list[tuple[Callable[[Expr], Expr], ...]] | None:
    """For each direction; None where there is one that has parameters."""
    ways, default = n.shape(1)[0], DEFAULTS[n.kind]
    given = [str(v.decode() if isinstance(v, bytes) else v).lower() for v in n.attr("activations", [])]
    names = given or list(default) * ways
    if len(names) != len(default) * ways or any(a not in ACTIVATIONS for a in names):
        return None
    acts = [ACTIVATIONS[a] for a in names]
    return [tuple(acts[k * len(default) : (k + 1) * len(default)]) for k in range(ways)]


def _beyond(n: Node) -> str:
    """Why the steps are not written out; "" when they are."""
    first = n.attr("layout", 0) == 1
    steps, ways = n.shape(0)[1 if first else 0], n.shape(1)[0]
    if n.dtype(0) not in ("f16", "bf16", "f32", "f64") or 0 in (*n.shape(0), *n.shape(2)):
        return "a recurrence over nothing"
    if not n.b.steps:
        return "a recurrence, run whole on one device"
    if steps * ways > STEPS:
        return f"a recurrence over {steps * ways} steps, of which at most {STEPS} are written out"
    if n.attr("clip") is not None:
        return "a recurrence with clipped gates"
    if _activations(n) is None:
        return "a recurrence with an activation that has parameters"
    lengths = n.const(4) if n.has(4) else None
    outside = lengths is not None and bool(((lengths < 0) | (lengths > steps)).any())
    return "a recurrence with lengths beyond the sequence" if outside else ""


def _as_opaque(n: Node, why: str) -> None:
    """Opaque, batch by batch. Layout 0: X [seq, batch, in], Y [seq, dirs, batch, hidden]; 1: batch first."""
    first = n.attr("layout", 0) == 1
    batch = n.shape(0)[0 if first else 1]
    ins: dict[int, list[int | None]] = {0: [0 if first else 1]}
    for k, axis in ((4, 0), (5, 0 if first else 1), (6, 0 if first else 1)):
        if n.has(k):
            ins[k] = [axis]
    out: dict[int, list[int | None]] = {0: [0 if first else 2], 1: [0 if first else 1], 2: [0 if first else 1]}
    emit_opaque(n, why, [Dim("b", batch)], ins, out)


def _join(n: Node, out: str | Tensor, parts: Sequence[str], shape: tuple[str, ...], axis: int) -> str:
    """States [b, h] as tensors whose axes are of one cell but for ``b`` and ``h``, joined along one of them."""
    pieces: list[str] = []
    for name in parts:
        sizes = {d.name: d for d in _sizes(n, name)}
        dims = [sizes.get(a, Dim(a, 1)) for a in shape]
        pieces.append(n.view(n.b.fresh(f"{name}.at"), name, dims, [dim("b"), dim("h")]))
    return concat(n, out, pieces, axis)


def _sizes(n: Node, name: str) -> tuple[Dim, Dim]:
    b, h = n.b.tensor(name).shape
    return Dim("b", b), Dim("h", h)


@lifts("LSTM", "GRU", "RNN")
def lift_recurrent(n: Node) -> None:
    """Directions one after the other; Y [T, D, B, H], Y_h and Y_c [D, B, H], or with layout 1 B first (and D third in Y)."""
    why, acts = _beyond(n), _activations(n)
    if why or acts is None:
        _as_opaque(n, why)
        return
    first = n.attr("layout", 0) == 1
    ways = ("reverse",) if n.attr("direction", "forward") == "reverse" else ("forward", "reverse")[: len(acts)]
    runs = [_run(_Cell(n, k, acts[k], first), way == "reverse") for k, way in enumerate(ways)]
    if n.wants(0):
        shape = ("b", "t", "d", "h") if first else ("t", "d", "b", "h")
        names = [n.outs[0]] if len(runs) == 1 else [n.temp(f"way{k}") for k in range(len(runs))]
        for name, (shown, _, _) in zip(names, runs, strict=True):
            _join(n, name, shown, shape, shape.index("t"))
        if len(runs) > 1:
            concat(n, n.out(), names, shape.index("d"))
    for k in (1, 2):
        if n.wants(k):
            shape = ("b", "d", "h") if first else ("d", "b", "h")
            _join(n, n.out(k), [str(r[k]) for r in runs], shape, shape.index("d"))


# What a loop's body does to a state: ``h' = a * h + b``, element by element, with ``a`` and ``b`` free of ``h``; or why not.
#
# The next state is followed back through the maps that made it, at symbolic coordinates. Along the way every value is kept as a
# coefficient and a constant term, and only what is linear on the expression itself is taken: sums, products and quotients with
# factors free of the state, choices on conditions free of it. Nothing is known about operators.


MOST = 512  # calls in the expressions of one state


class NotLinear(Exception):
    """Why a state is not a linear recurrence."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``scale * h + shift``; ``None`` where a term is absent."""

    scale: Expr | None
    shift: Expr | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The next state over the state's dimensions ``dims``; expressions are over ``reads``, none of which is of the state."""

    dims: tuple[Dim, ...]
    reads: tuple[Read, ...]
    scale: Expr | None
    shift: Expr | None

    @property
    def unchanged(self) -> bool:
        """Whether the state keeps its first value."""
        return self.shift is None and isinstance(self.scale, Const) and self.scale.value == 1


def recurrence(
    state: str, after: str, makers: Mapping[str, Op], tensors: Mapping[str, Tensor], depends: frozenset[str]
) -> Recurrence:  # fmt: skip
    """How a state's next value comes from it.

    Args:
        state, after: the state's tensor in a step, and the one that is its next value, of the same shape and dtype.
        makers: tensor to the operation that writes it, in one step.
        depends: tensors that are computed from the state.

    Raises:
        NotLinear: not ``a * h + b``, or not element by element.
    """
    walk = _Walk(state, makers, tensors, depends, axes(tensors[state].shape, "s"))
    step = walk.tensor(after, tuple(dim(d.name) for d in walk.dims))
    return Recurrence(dims=walk.dims, reads=tuple(walk.reads), scale=step.scale, shift=step.shift)


@dataclass(slots=True)
class _Walk:
    state: str
    makers: Mapping[str, Op]
    tensors: Mapping[str, Tensor]
    depends: frozenset[str]
    dims: tuple[Dim, ...]
    reads: list[Read] = field(default_factory=list[Read])
    calls: int = 0

    def tensor(self, name: str, at: tuple[Aff, ...]) -> Linear:
        """A tensor's value at a place."""
        if name == self.state:
            if not all(e == dim(d.name) or d.size == 1 for e, d in zip(at, self.dims, strict=True)):
                raise NotLinear("an element of it depends on another one")
            return Linear(number(1, self.tensors[name].dtype), None)
        if name not in self.depends:
            return Linear(None, self.free(Read(tensor=name, index=at)))
        op = self.makers[name]
        if not isinstance(op, Block):
            raise NotLinear(f"{op.kind} is applied to it")
        if op.monoid or op.inner:
            raise NotLinear("an element of it depends on several ones")
        env = {d.name: e for d, e in zip(op.dims, at, strict=True)}
        return self.expr(op.body[op.outs.index(name)], op, env)

    def free(self, read: Read) -> Expr:
        """A read of what the state has no part in."""
        if read not in self.reads:
            self.reads.append(read)
        return Arg(self.reads.index(read), self.tensors[read.tensor].dtype)

    def expr(self, e: Expr, op: Block, env: Mapping[str, Aff]) -> Linear:
        ranges = {d.name: d.size for d in self.dims}
        if isinstance(e, Const):
            return Linear(None, e)
        if isinstance(e, Index):
            return Linear(None, replace(e, aff=substitute(e.aff, env, ranges)))
        if isinstance(e, Arg):
            return self.read(op.reads[e.pos], env, ranges)
        assert isinstance(e, Call)
        self.calls += 1
        if self.calls > MOST:
            raise NotLinear("its expression is too long")
        args = [self.expr(a, op, env) for a in e.args]
        if all(a.scale is None for a in args):
            return Linear(None, Call(e.fn, tuple(_shift(a) for a in args), e.dtype))
        return _combine(e.fn, args)

    def read(self, r: Read, env: Mapping[str, Aff], ranges: dict[str, int]) -> Linear:
        at = tuple(substitute(e, env, ranges) for e in r.index)
        if r.tensor not in self.depends and r.tensor != self.state:
            when = tuple(replace(g, aff=substitute(g.aff, env, ranges)) for g in r.when)
            return Linear(None, self.free(replace(r, index=at, when=when)))
        if r.other is not None and not (not r.when and self._inside(r.tensor, at)):
            raise NotLinear("it is read beyond its ends, or under conditions")
        return self.tensor(r.tensor, at)

    def _inside(self, name: str, at: tuple[Aff, ...]) -> bool:
        box = {d.name: (0, d.size - 1) for d in self.dims}
        spans = (bounds(e, box) for e in at)
        return all(lo >= 0 and hi < n for (lo, hi), n in zip(spans, self.tensors[name].shape, strict=True))


def _shift(x: Linear) -> Expr:
    assert x.shift is not None
    return x.shift


def _combine(fn: str, args: list[Linear]) -> Linear:
    """A primitive of which at least one argument has the state in it."""
    if fn == "neg":
        return _each(lambda x: call("neg", x), args[0])
    if fn in ("add", "sub"):
        a, b = args
        return Linear(_sum(fn, a.scale, b.scale), _sum(fn, a.shift, b.shift))
    if fn in ("mul", "div"):
        a, b = args
        if b.scale is None:
            by = _shift(b)
            if fn == "div" and by.dtype not in FLOATS:
                raise NotLinear("a quotient of integers is rounded")
            return _each(lambda x: _times(fn, x, by), a)
        if fn == "mul" and a.scale is None:
            by = _shift(a)
            return _each(lambda x: _times(fn, x, by), b)
        raise NotLinear("it is multiplied by itself" if fn == "mul" else "something is divided by it")
    if fn == "where" and args[0].scale is None:
        test = _shift(args[0])
        return Linear(_choice(test, args[1].scale, args[2].scale), _choice(test, args[1].shift, args[2].shift))
    raise NotLinear("it decides which value is taken" if fn == "where" else f"'{fn}' of it is not linear in it")


def _each(put: Callable[[Expr], Expr], x: Linear) -> Linear:
    return Linear(None if x.scale is None else put(x.scale), None if x.shift is None else put(x.shift))


def _times(fn: str, x: Expr, by: Expr) -> Expr:
    return by if fn == "mul" and isinstance(x, Const) and x.value == 1 else call(fn, x, by)


def _sum(fn: str, a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return a if b is None else b if fn == "add" else call("neg", b)
    return call(fn, a, b)


def _choice(test: Expr, a: Expr | None, b: Expr | None) -> Expr | None:
    some = a or b
    if some is None:
        return None
    zero = number(0, some.dtype)
    return call("where", test, a or zero, b or zero)


# The body of a Scan as operations of one step, and which of its states are linear recurrences, one after another.
#
# A state whose coefficients need other states is solved after those: over all steps they are then tensors like any others.


NODES = 512  # of a body that is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBody:
    """A body whose every state is a recurrence.

    Attributes:
        states, slices: the body's inputs; ``after`` the states' next values, ``seen`` what is kept of every step.
        recurrences: by position of the state, in the order in which they can be computed.
        captured: names of the graph around it.
        makers: tensor to the operation of one step that writes it.
        results: ONNX types of ``after`` and ``seen``.
    """

    node: ScanNode
    b: Builder
    states: tuple[str, ...]
    slices: tuple[str, ...]
    after: tuple[str, ...]
    seen: tuple[str, ...]
    recurrences: Mapping[int, Recurrence]
    captured: frozenset[str]
    makers: Mapping[str, Op]
    results: tuple[TypeProto, ...]

    def closure(self, names: set[str]) -> list[Op]:
        """The operations of one step that these tensors need, in order."""
        need, found = set(names), list[Op]()
        for op in reversed(self.b.ops):
            if need & set(op.outs):
                found.append(op)
                need |= set(op.inputs)
        return found[::-1]


def linear_body(
    node: NodeProto, types: Mapping[str, TypeProto], known: Mapping[str, TensorProto], opsets: Mapping[str, int]
) -> LoopBody:
    """The body of a Scan over whose steps every state is a linear recurrence, element by element.

    Args:
        types: of every value around it; ``known`` are those known at compile time.

    Raises:
        NotLinear: with the reason.
    """
    scan = read_scan(node, types, opsets.get("", 1))
    if isinstance(scan, str):
        raise NotLinear(scan)
    if not is_movable(scan.body) or size_of(scan.body) > NODES:
        raise NotLinear("its body is long, or has weights of its own")
    if any(n.op_type in RANDOM for n in nested(scan.body.node)):
        raise NotLinear("its body draws random numbers")
    outer = captured(node)
    b = _lift(scan, types, known, opsets, outer)
    count = len(scan.first)
    ins = [i.name for i in scan.body.input]
    after = tuple(_source(b, f"out{k}~", set(ins)) for k in range(len(scan.body.output)))
    body = LoopBody(
        node=scan, b=b, states=tuple(ins[:count]), slices=tuple(ins[count:]), after=after[:count], seen=after[count:],
        recurrences={}, captured=frozenset(outer), makers={t: op for op in b.ops for t in op.outs},
        results=tuple(b.types[f"out{k}~"] for k in range(len(scan.body.output))),
    )  # fmt: skip
    _checked(body)
    return replace(body, recurrences=_solve(body))


def step_types(
    node: NodeProto, types: Mapping[str, TypeProto], known: Mapping[str, TensorProto], opsets: Mapping[str, int]
) -> Sequence[TypeProto] | str:
    """The types of what a step of a Scan gives, if its states are linear recurrences; else why they are not."""
    try:
        return linear_body(node, types, known, opsets).results
    except NotLinear as e:
        return str(e)


def _lift(
    scan: ScanNode, types: Mapping[str, TypeProto], known: Mapping[str, TensorProto], opsets: Mapping[str, int],
    outer: list[str],
) -> Builder:  # fmt: skip
    """One step as operations; its results are ``out0~``, …"""
    graph = GraphProto(name="body")
    graph.node.extend(scan.body.node)
    graph.initializer.extend(scan.body.initializer)
    for name, outside, axis in zip((i.name for i in scan.body.input), (*scan.first, *scan.over), _cut(scan), strict=True):
        graph.input.append(helper.make_value_info(name, _type(types, outside, axis)))
    for name in outer:
        if name in known:
            stored = graph.initializer.add()
            stored.CopyFrom(known[name])
            stored.name = name
        else:
            graph.input.append(helper.make_value_info(name, _type(types, name, None)))
    for k, o in enumerate(scan.body.output):
        graph.node.append(helper.make_node("Identity", [o.name], [f"out{k}~"]))
        graph.output.append(onnx.ValueInfoProto(name=f"out{k}~"))
    imports = [helper.make_opsetid(d, v) for d, v in opsets.items() if d != "tapestry.expanded"]
    model = helper.make_model(graph, ir_version=10, opset_imports=imports)
    try:
        return lift_nodes(prepare(model, step_types), 0, True)
    except ModelError as e:
        raise NotLinear(f"its body cannot be lifted alone: {e.what}") from None


def _cut(scan: ScanNode) -> tuple[int | None, ...]:
    return (None,) * len(scan.first) + scan.axes


def _type(types: Mapping[str, TypeProto], name: str, axis: int | None) -> TypeProto:
    """The type of a value around the loop, without an axis."""
    shape = static_shape(types.get(name))
    if shape is None:
        raise NotLinear(f"the shape of '{name}' is not known")
    kept = [n for a, n in enumerate(shape) if a != axis]
    return helper.make_tensor_type_proto(types[name].tensor_type.elem_type, kept)


def _source(b: Builder, name: str, ins: set[str]) -> str:
    """What a result is another name of: back through maps that change nothing."""
    while (op := b.maker.get(name)) is not None:
        same = len(op.reads) == 1 and op.monoid is None and not op.inner and op.body == (Arg(0, b.tensors[name].dtype),)
        read = op.reads[0] if same else None
        if read is None or read.other is not None or read.index != tuple(dim(d.name) for d in op.dims):
            return name
        if b.tensor(read.tensor).shape != b.tensor(name).shape:
            return name
        name = read.tensor
        if name in ins:
            return name
    return name


def _checked(body: LoopBody) -> None:
    """Results of known sizes, states that keep theirs, and nothing opaque.

    Raises:
        NotLinear: with the reason.
    """
    for name, after in zip(body.states, body.after, strict=True):
        a, z = body.b.tensor(name), body.b.tensor(after)
        if (a.dtype, a.shape) != (z.dtype, z.shape):
            raise NotLinear(f"the state '{name}' changes its shape or type")
    for name in body.seen:
        if body.b.tensor(name).on_host:
            raise NotLinear("a result has no known shape")
    for op in body.closure({*body.after, *body.seen}):
        if isinstance(op, Opaque):
            raise NotLinear(f"{op.kind} in its body has no affine form")


def _solve(body: LoopBody) -> dict[int, Recurrence]:
    """The states' recurrences, each after those that it needs.

    Raises:
        NotLinear: of the first state that is none.
    """
    solved: dict[int, Recurrence] = {}
    while len(solved) < len(body.states):
        why, before = "", len(solved)
        for k in range(len(body.states)):
            if k not in solved:
                try:
                    solved[k] = _recurrence(body, k, solved)
                except NotLinear as e:
                    why = why or f"the state '{body.states[k]}' is no linear recurrence: {e}"
        if len(solved) == before:
            raise NotLinear(why)
    return solved


def _recurrence(body: LoopBody, k: int, solved: Mapping[int, Recurrence]) -> Recurrence:
    depends = depending(body, body.states[k])
    needs = {t for op in body.closure({body.after[k]}) for t in op.inputs} | {body.after[k]}
    for other, name in enumerate(body.states):
        if other != k and other not in solved and name in needs:
            raise NotLinear(f"it depends on '{name}', which is none either")
    return recurrence(body.states[k], body.after[k], body.makers, body.b.tensors, frozenset(depends))


def depending(body: LoopBody, *names: str) -> set[str]:
    """Tensors of a step that are computed from some."""
    found = set(names)
    for op in body.b.ops:
        if found.intersection(op.inputs):
            found.update(op.outs)
    return found.difference(names)
