"""`slice_strided`: a strided convolution as a sum of dense ones, one per phase of the window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tapestry.ir.expr import Arg, Expr
from tapestry.ir.graph import Block, Graph, Read, names_of, replace_op
from tapestry.ir.monoid import MONOIDS
from tapestry.rewrites.core.edit import accept, block_at, finish, plain_index, prune, results, splits_in, state_names
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register
from tapestry.rewrites.splitting.phases import Phases, Window, sliding, too_many, windows


@dataclass(frozen=True, slots=True)
class Sliced:
    """The dimension that is cut, the phases of the tensors read, and the operation once per phase of the dimension."""

    name: str
    phases: Phases
    parts: tuple[Block, ...]


def sliced(graph: Graph, op: Block, name: str, step: int, outs: Sequence[tuple[str, ...]]) -> Sliced | None:
    """An operation over each of the first residue classes of a dimension, writing ``outs``; ``None`` when a phase is empty."""
    phases = Phases(graph)
    parts: list[Block] = []
    for q, names in enumerate(outs):
        part = phases.take(op, name, step, q)
        if part is None:
            return None
        parts.append(replace(part, outs=names, splits=splits_in(op, part.space)))
    return Sliced(name, phases, tuple(parts))


class Slicing(Rule):
    """What the two slicing rules share: find and apply follow from `plan` and `rest`."""

    phase = "search"

    def plan(self, graph: Graph, op: Block, name: str) -> Sliced | Refusal:
        """The operation in phases along a map dimension, or why not."""
        raise NotImplementedError

    def rest(self, graph: Graph, op: Block, plan: Sliced) -> list[Block]:
        """The operations that make one of the parts; the last of them writes what the operation wrote."""
        raise NotImplementedError

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """For every map dimension along which a window slides."""
        for op, name in sliding(graph):
            yield self.offered(Move(self.name, op.outs[0], (("dim", name),)), self.plan(graph, op, name))

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with phases in place of the operation."""
        at, op = block_at(graph, move)
        plan = accept(self.plan(graph, op, move.text("dim")), move)
        rest = self.rest(graph, op, plan)
        new = (*plan.phases.tensors.values(), *results(*plan.parts, *rest[:-1]))
        return replace_op(graph, at, (*plan.phases.ops, *plan.parts, *rest), new)


@register
class SliceStrided(Slicing):
    """Cut a window that moves in steps of s into s dense windows: ``y = Σ_q conv(X[q::s], F[q::s])``.

    With ``r = s*r' + q`` the window ``x[s*h + r - p]`` reads phase ``(q - p) mod s`` of x at ``h + r' + …``: dense, so that
    neighbouring outputs share cells again. The phases are merged by the operation's own monoid (a strided max pooling is
    a maximum of dense ones).

    before:
        graph strided
        input x: f32[7]
        input k: f32[3]
        input b: f32[1]
        y: f32[4] = op [h: 4 | r: 3 sum]
          reads x[2*h + r - 1] else 0.0, k[r], b[0]
          body x * k
          then acc0 + b
        output y

    move: slice_strided@y{dim=h}

    after:
        graph strided
        input x: f32[7]
        input k: f32[3]
        input b: f32[1]
        x.x0.s1: f32[3] = op [x0: 3]
          reads x[2*x0 + 1]
          body x
        k.x0.s0: f32[2] = op [x0: 2]
          reads k[2*x0]
          body k
        x.x0.s0: f32[4] = op [x0: 4]
          reads x[2*x0]
          body x
        k.x0.s1: f32[1] = op [x0: 1]
          reads k[2*x0 + 1]
          body k
        y.r0.value: f32[4] = op [h: 4 | r: 2 sum]
          reads a0 = x.x0.s1[h + r - 1] else 0.0, a1 = k.x0.s0[r]
          body a0 * a1
        y.r1.value: f32[4] = op [h: 4 | r: 1 sum]
          reads a0 = x.x0.s0[h + r] else 0.0, a1 = k.x0.s1[r]
          body a0 * a1
        y: f32[4] = op [h: 4]
          reads a0 = y.r0.value[h], a1 = y.r1.value[h], b[0]
          body (a0 + a1) + b
        output y

    legal when:
        some read walks an axis by ``s*h + Σ coef*other + const`` with s above 1 and all coefficients but that of one
        reduced dimension r multiples of s; the monoid commutes; every phase of x has a cell, and there are
        at most 64; r is not split already.
    """

    name = "slice_strided"

    def plan(self, graph: Graph, op: Block, name: str) -> Sliced | Refusal:
        """The operation once per phase of its window, or why not."""
        if all(d.name != name for d in op.dims):
            return refuse(
                f"'{name}' is not a map dimension", "the map dimensions are " + ", ".join(f"'{d.name}'" for d in op.dims)
            )
        found = windows(op, name)
        if not found:
            return refuse(f"no window slides along '{name}'", f"no read is at {name} + (a reduced dimension)")
        strided = next((w for w in found if w.step > 1), None)
        if strided is None:
            return refuse(
                f"the window does not stride along '{name}'", f"'{name}' 0 and 1 read '{found[0].tensor}' 1 cell apart"
            )
        if many := too_many(strided.step):
            return many
        inner = _phase_dim(op, strided)
        if isinstance(inner, tuple):
            return refuse(*inner)
        if op.monoid is None or not MONOIDS[op.monoid].commutative:
            return refuse(f"'{op.monoid}' does not commute", f"'{inner}' {strided.step} would be merged before 1")
        if any(s.dim == inner for s in op.splits):
            return refuse(f"'{inner}' is split already")
        outs = [state_names(graph, op, f"{inner}{q}") for q in range(min(strided.step, op.ranges[inner]))]
        return sliced(graph, prune(replace(op, then=())), inner, strided.step, outs) or refuse(
            f"'{strided.tensor}' has fewer than {strided.step} cells along axis {strided.axis}", "a phase of it is empty"
        )

    def rest(self, graph: Graph, op: Block, plan: Sliced) -> list[Block]:
        """The phases' states merged one after another; the last merge also does what the operation did after reducing."""
        assert op.monoid
        dtypes = op.dtypes
        merge = MONOIDS[op.monoid].combiner(dtypes)
        held, ops = plan.parts[0].outs, list[Block]()
        for q, part in enumerate(plan.parts[1:-1], 1):
            outs = state_names(graph, op, f"{plan.name}0_{q}")
            reads = tuple(Read(tensor=t, index=plain_index(op.dims)) for t in (*held, *part.outs))
            ops.append(Block(outs=outs, dims=op.dims, reads=reads, body=merge, source=op.source, splits=splits_in(op, op.dims)))
            held = outs
        states = held + (plan.parts[-1].outs if len(plan.parts) > 1 else ())
        final: tuple[Expr, ...] = merge if len(plan.parts) > 1 else tuple(Arg(i, d) for i, d in enumerate(dtypes))
        return [*ops, replace(finish(op, states, final), splits=splits_in(op, op.dims))]


def _phase_dim(op: Block, window: Window) -> str | tuple[str, str]:
    """The reduced dimension whose residue decides the phase, or the reason and witness why there is not just one."""
    odd = [(n, c) for n, c in window.others if c % window.step]
    reduced = names_of(op.reduce)
    if len(odd) == 1 and odd[0][0] in reduced:
        return odd[0][0]
    walks = ", ".join(f"'{n}' by {c}" for n, c in window.others)
    if not odd:
        return f"the window reads one phase of '{window.tensor}' alone", f"step {window.step}, {walks}"
    return f"more than one reduced dimension walks '{window.tensor}'", walks
