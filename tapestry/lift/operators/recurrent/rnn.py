"""LSTM, GRU and RNN: the steps of a short sequence one after another, each a contraction over the hidden state and its gates.

What the input contributes is one contraction over all steps. A step then adds ``h[t-1] · R`` and applies the gates, cell by
cell, so that batch and hidden dimensions are ordinary ones: where the hidden one is cut, every device has the rows of the
gates' weights that it needs, and gathers the state of the step before. Beyond `STEPS` steps, or with a clip or an unusual
activation, the node stays opaque, splittable along its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tapestry.ir.expr import Arg, Expr, call, cast, literal
from tapestry.ir.graph import Dim
from tapestry.ir.index import const, dim
from tapestry.ir.types import Tensor
from tapestry.lift.builder import Body, Node, Operand
from tapestry.lift.normalize.unroll import STEPS
from tapestry.lift.opaque import emit_opaque
from tapestry.lift.operators.linear import contract
from tapestry.lift.operators.shape import concat
from tapestry.lift.registry import lifts

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {
    "sigmoid": lambda x: call("sigmoid", x),
    "tanh": lambda x: call("tanh", x),
    "relu": lambda x: call("max", x, 0),
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
        return self.n.read(name, self.rows)

    def map(self, what: str, reads: Sequence[Operand], body: Body) -> str:
        return self.n.block(self.name(what), self.rows, reads, body)

    def lasts(self, t: int, new: str, old: str | None) -> str:
        """The state where a sequence has step t, the old one (or 0) where it has ended before."""
        n = self.n
        if not _ragged(n):
            return new
        inside = n.read(n.ins[4], [dim("b")])

        def body(end: Expr, x: Expr, *kept: Expr) -> Expr:
            still = call("lt", t, cast(end, "i64"))
            return call("where", still, x, kept[0] if kept else 0)

        reads = [inside, self.cell(new), *([self.cell(old)] if old is not None else [])]
        return self.map("held" if old is not None else "shown", reads, body)

    def ended(self, state: str) -> str:
        """The last state; 0 for a sequence without a step, of which ONNX says nothing, as onnxruntime has it."""
        n = self.n
        lengths = n.const(4) if n.has(4) else None
        if not _ragged(n) or (lengths is not None and bool((lengths > 0).all())):
            return state

        def body(end: Expr, x: Expr) -> Expr:
            return call("where", call("lt", 0, cast(end, "i64")), x, 0)

        return self.map("ended", [n.read(n.ins[4], [dim("b")]), self.cell(state)], body)


def _contract(n: Node, out: str, dims: Sequence[Dim], over: Dim, a: Operand, b: Operand, more: Sequence[Operand]) -> str:
    """``sum a * b`` and then, in order, what is to be added."""

    def after(total: Expr) -> Expr:
        for k, (_, t) in enumerate(more):
            total += cast(Arg(2 + k, t.dtype), total.dtype)
        return total

    return contract(n, out, dims, [over], a, b, more=more, after=after)


def _lstm(c: _Cell) -> Callable[[int, str, str | None], tuple[str, str | None]]:
    """Gates i, o, f, c: ``C = f * C + i * c`` and ``H = o * tanh(C)``; peepholes P look at C (o at the new one)."""
    n, x = c.n, c.from_input(both=True)
    f, g, last = c.acts
    coupled = bool(n.attr("input_forget", 0))

    def peep(k: int) -> list[Operand]:
        return [n.read(n.ins[7], [const(c.way), dim("h") + k * c.hidden])] if n.has(7) else []

    def pre(gate: Expr, cell: Expr, holes: Sequence[Expr]) -> Expr:
        return f(gate + holes[0] * cell if holes else gate)

    def next_cell(i: Expr, forget: Expr, new: Expr, old: Expr, *holes: Expr) -> Expr:
        enter = pre(i, old, holes[:1])
        keep = 1 - enter if coupled else pre(forget, old, holes[1:])
        return keep * old + enter * g(new)

    def output(o: Expr, cell: Expr, *holes: Expr) -> Expr:
        return pre(o, cell, holes) * last(cell)

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

    def mix(z: Expr, new: Expr, old: Expr) -> Expr:
        return (1 - z) * new + z * old

    def before(t: int, h: str, _: str | None) -> tuple[str, None]:
        gates = c.recur(h, range(2), [c.of_input(x, t, None)])
        reset = c.map("reset", [c.gate(gates, 1), c.cell(h)], lambda r, old: f(r) * old)
        new = c.recur(reset, [2], [c.of_input(x, t, 2)])
        return c.map("hidden", [c.gate(gates, 0), c.gate(new, 0), c.cell(h)], lambda z, v, old: mix(f(z), g(v), old)), None

    def behind(t: int, h: str, _: str | None) -> tuple[str, None]:
        gates = c.recur(h, range(3), [c.bias(None, recurrent=True)] if n.has(3) else [])

        def body(*v: Expr) -> Expr:
            z, r = f(v[0] + v[3]), f(v[1] + v[4])
            return mix(z, g(v[2] + r * v[5]), v[6])

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
        sizes = {d.name: d for d in _batch_and_width(n, name)}
        dims = [sizes.get(a, Dim(a, 1)) for a in shape]
        pieces.append(n.view(n.b.fresh(f"{name}.at"), name, dims, [dim("b"), dim("h")]))
    return concat(n, out, pieces, axis)


def _batch_and_width(n: Node, name: str) -> tuple[Dim, Dim]:
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
