"""Bugs to seed, one at a time: each swaps a real function of the compiler for a wrong one while its context is open.

None changes the verifier or the fuzzer: they are what must find the bugs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tapestry.codegen.torch_cpu.base import state_merges
from tapestry.ir import monoid as monoids
from tapestry.ir.expr import call
from tapestry.ir.graph import Block, Opaque
from tapestry.ir.index import dim
from tapestry.ir.program import Free
from tapestry.lift.operators import elementwise, gather
from tapestry.lift.operators import shape as shapes
from tapestry.lift.operators.windows import window
from tapestry.lift.registry import LIFTERS
from tapestry.plan import lower, strategy
from tapestry.rewrites import cleanup, compose_views
from tapestry.rewrites.core import edit
from tapestry.rewrites.splitting import phases, slice_strided, tiled_region


@dataclass(slots=True)
class Swaps:
    """Replacements, taken back in reverse order."""

    undo: list[Callable[[], None]] = field(default_factory=list)

    def function(self, old: Any, new: Any) -> None:
        """Wherever a module of Tapestry holds ``old``, it holds ``new``."""
        for name, module in list(sys.modules.items()):
            if name.startswith("tapestry") and not name.startswith("tapestry.verify"):
                for key, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, key, new)
                        self.undo.append(lambda m=module, k=key: setattr(m, k, old))

    def method(self, cls: type, name: str, new: Any) -> None:
        """A method of a class."""
        old = cls.__dict__[name]
        setattr(cls, name, new)
        self.undo.append(lambda: setattr(cls, name, old))

    def item(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """An entry of a table."""
        old = table[key]
        table[key] = value
        self.undo.append(lambda: table.__setitem__(key, old))

    def reducer(self, monoid: str, new: state_merges.Reducer) -> None:
        """How the CPU target merges the states of a monoid."""
        old = state_merges.dense
        self.function(old, lambda name: new if name == monoid else old(name))

    def lifter(self, op: str, new: Callable[[Any], Any]) -> None:
        """What lifts an operator, in every version."""
        self.item(LIFTERS, ("", op), [replace(e, lifter=new) for e in LIFTERS["", op]])

    def monoid(self, name: str, **changes: Any) -> None:
        """Some attributes of a monoid."""
        self.item(monoids.MONOIDS, name, replace(monoids.MONOIDS[name], **changes))


BUGS: dict[str, Callable[[Swaps], None]] = {}


def bug(f: Callable[[Swaps], None]) -> Callable[[Swaps], None]:
    """Register a bug; its docstring says what is wrong."""
    BUGS[f.__name__] = f
    return f


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """The compiler with one bug in it."""
    swaps = Swaps()
    BUGS[name](swaps)
    try:
        yield
    finally:
        for back in reversed(swaps.undo):
            back()


# lifting


@bug
def padded_window_starts_late(s: Swaps) -> None:
    """A projection off by one: a padded window begins a cell late."""
    old = window.Window.start
    s.method(window.Window, "start", lambda w, a: old(w, a) + (1 if w.before[a] else 0))


@bug
def transposed_the_wrong_way(s: Swaps) -> None:
    """Wrong axis after a transpose: the permutation is inverted."""

    def wrong(n: Any) -> None:
        perm = [int(p) for p in n.attr("perm", list(reversed(range(len(n.shape(0))))))]
        n.view(n.out(), n.ins[0], n.out_dims(), [dim(f"x{p}") for p in perm])

    s.lifter("Transpose", wrong)


@bug
def operands_swapped(s: Swaps) -> None:
    """Swapped operands: y - x, y / x, y < x."""
    old = elementwise._primitive
    s.function(old, lambda fn: lambda *xs: call(fn, *reversed(xs)))


@bug
def mask_lost(s: Swaps) -> None:
    """A lost mask: Where always takes its second input."""
    s.lifter("Where", lambda n: elementwise.emit_map(n, lambda c, x, y: call("where", call("or", c, call("not", c)), x, y)))


@bug
def negative_indices_not_wrapped(s: Swaps) -> None:
    """A gather by data does not count negative positions from the end."""
    old = gather.select

    def wrong(n: Any, *args: Any) -> str:
        made = old(n, *args)
        op = n.b.ops[-1]
        hit, picked, zero = op.body[0].args
        inside = hit.args[0].args[-1]
        n.b.ops[-1] = replace(op, body=(call("where", call("eq", inside, hit.args[1]), picked, zero),))
        return made

    s.function(old, wrong)


@bug
def split_pieces_start_alike(s: Swaps) -> None:
    """Every piece of a Split after the first starts a cell early."""

    def wrong(n: Any) -> None:
        axis, start = n.axis(0, len(n.shape(0))), 0
        for k in range(len(n.outs)):
            dims = n.out_dims(k)
            n.view(
                n.out(k), n.ins[0], dims, [dim(d.name) + (max(start - 1, 0) if a == axis else 0) for a, d in enumerate(dims)]
            )
            start += n.out(k).shape[axis]

    s.lifter("Split", wrong)


@bug
def joined_one_cell_late(s: Swaps) -> None:
    """Concat begins every part after the first a cell late."""
    old = shapes.choose
    s.function(old, lambda place, starts, values: old(place, [v + (v > 0) for v in starts], values))


@bug
def broadcast_from_the_front(s: Swaps) -> None:
    """An operand of lower rank is aligned from the front where that fits as well."""
    old = elementwise.Node.operand

    def wrong(n: Any, k: int, dims: Any, reads: Any) -> Any:
        before, shape = len(reads), n.shape(k)
        e = old(n, k, dims, reads)
        if len(reads) > before and len(shape) < len(dims) and tuple(d.size for d in dims[: len(shape)]) == tuple(shape):
            reads[-1] = n.read(n.ins[k], [dim(d.name) for d in dims[: len(shape)]])
        return e

    s.method(elementwise.Node, "operand", wrong)


# monoids


@bug
def wrong_identity_of_sum(s: Swaps) -> None:
    """A wrong monoid identity: one for sum."""
    s.monoid("sum", zero=lambda d: (monoids.number(1, d[0]),))


@bug
def wrong_identity_of_max(s: Swaps) -> None:
    """The least float is taken to be 0 (the padding of a max-pool, the masked rows of a softmax)."""
    old = monoids.lowest
    s.function(old, lambda d: monoids.number(0, d))


@bug
def logsumexp_not_rescaled(s: Swaps) -> None:
    """States of a softmax are added without bringing them to one maximum."""
    s.monoid("logsumexp", combine=lambda a, b: (call("max", a[0], b[0]), call("add", a[1], b[1])))
    s.reducer("logsumexp", lambda f, dims: [torch.amax(f[0], dim=dims), torch.sum(f[1], dim=dims)])


@bug
def spread_between_parts_lost(s: Swaps) -> None:
    """Merging variances forgets how far the parts' means are apart."""
    old = monoids.MONOIDS["moments"].combine
    s.monoid("moments", combine=lambda a, b: (*old(a, b)[:2], call("add", a[2], b[2])))
    dense = state_merges.dense("moments")
    assert dense is not None
    s.reducer("moments", lambda f, dims: [*dense(f, dims)[:2], torch.sum(f[2], dim=dims)])


@bug
def last_of_a_tie(s: Swaps) -> None:
    """Merging arg-maxima of parts takes the last of a tie."""

    def wrong(fields: list[torch.Tensor], dims: tuple[int, ...]) -> list[torch.Tensor]:
        v, i = fields
        top = torch.amax(v, dim=dims, keepdim=True)
        low = torch.iinfo(i.dtype).min
        return [
            top.flatten(dims[0])[..., 0],
            torch.amax(torch.where(v == top, i, torch.full((), low, dtype=i.dtype)), dim=dims),
        ]

    s.reducer("argmax", wrong)


# rewrites


@bug
def view_composed_backwards(s: Swaps) -> None:
    """A view's dimensions are matched with the read's axes in reverse where both are equally long."""
    old = compose_views.compose

    def wrong(read: Any, view: Block, tensors: Any, ranges: Any) -> Any:
        sizes = [d.size for d in view.dims]
        index = read.index[::-1] if len(sizes) > 1 and sizes == sizes[::-1] else read.index
        return old(replace(read, index=index), view, tensors, ranges)

    s.function(old, wrong)


@bug
def bounds_of_a_view_lost(s: Swaps) -> None:
    """Reading through a view forgets where the view ends and padding begins."""
    s.function(compose_views._bounds, lambda *_: [])


@bug
def guards_lost(s: Swaps) -> None:
    """Substituting dimensions in a read drops its guards."""
    old = edit.substitute_read
    s.function(old, lambda read, env, ranges: replace(old(read, env, ranges), when=()))


@bug
def positions_not_substituted(s: Swaps) -> None:
    """A body that asks for its position keeps the old dimension when it is moved."""
    old = edit.substitute_expr
    s.function(old, lambda e, env, ranges, leaf=lambda x: x: old(e, {}, ranges, leaf))


@bug
def stale_key_of_equal_operations(s: Swaps) -> None:
    """A stale cache key: operations are taken to be equal whatever their bodies say."""
    old = cleanup._key

    def wrong(op: Any, tensors: Any) -> str:
        types = [tensors[t].dtype for t in op.outs]
        return f"{types} {op.reads} {op.space} {op.monoid}" if isinstance(op, Block) else old(op, tensors)

    s.function(old, wrong)


@bug
def phase_lost(s: Swaps) -> None:
    """A strided or dilated window cut into phases leaves the last phase out."""
    old = slice_strided.sliced

    def wrong(*args: Any) -> Any:
        plan = old(*args)
        return plan if plan is None or len(plan.parts) < 2 else replace(plan, parts=plan.parts[:-1])

    s.function(old, wrong)


@bug
def phases_shifted(s: Swaps) -> None:
    """Phases of a tensor begin one cell late where there is room."""
    old = phases.Phases._phase

    def wrong(p: Any, tensor: str, axis: int, step: int, phase: int) -> Any:
        whole = p.tensors.get(tensor) or p.graph.tensors[tensor]
        return old(p, tensor, axis, step, phase + 1 if phase + 1 < step <= whole.shape[axis] else phase)

    s.method(phases.Phases, "_phase", wrong)


@bug
def parts_of_time_overlap(s: Swaps) -> None:
    """Put together again, every part of a region run in time begins a cell late."""
    old = tiled_region.choose
    s.function(old, lambda place, starts, values: old(place, [v + (v > 0) for v in starts], values))


@bug
def states_of_a_part_dropped(s: Swaps) -> None:
    """Accumulation over time merges each part into the first alone."""
    old = tiled_region._Cloning.partial

    def wrong(c: Any, i: int, moved: Any, k: int) -> None:
        first = c.states.get(i)
        old(c, i, moved, k)
        if first is not None:
            c.states[i] = first

    s.method(tiled_region._Cloning, "partial", wrong)


# planning and lowering


@bug
def halo_row_dropped(s: Swaps) -> None:
    """A dropped halo row: the last message of a transfer is a row short."""
    old = lower.exchange

    def wrong(*args: Any) -> Any:
        found = old(*args)
        if not found or not found[-1].box or found[-1].box[0][1] - found[-1].box[0][0] < 1:
            return found
        last = found[-1]
        (lo, hi), *rest = last.box
        return type(found)((*found[:-1], replace(last, box=((lo, hi - 1), *rest))))

    s.function(old, wrong)


@bug
def footprint_too_small(s: Swaps) -> None:
    """What a device reads is taken to end a cell early along the first axis, where it is cut."""
    old = strategy.hull

    def wrong(read: Any, box: Any, shape: Any, n: int) -> Any:
        out = old(read, box, shape, n).copy()
        if shape:
            cut = out[:, 0, 1] < shape[0]
            out[:, 0, 1] = np.where(cut, np.maximum(out[:, 0, 1] - 1, out[:, 0, 0]), out[:, 0, 1])
        return out

    s.function(old, wrong)


@bug
def wrong_sender(s: Swaps) -> None:
    """Messages come from the neighbour of the device that has the cells."""
    old = lower._senders
    s.function(old, lambda layout, mesh: np.roll(old(layout, mesh), 1, axis=0))


@bug
def freed_early(s: Swaps) -> None:
    """A buffer with two readers or more is freed after the first of them."""
    old = lower.with_frees

    def wrong(steps: Any, kept: Any) -> Any:
        out = list(old(steps, kept))
        at = next((i for i, x in enumerate(out) if isinstance(x, Free) and i > 2), None)
        if at is not None:
            free = out.pop(at)
            out.insert(at - 1, free)
        return out

    s.function(old, wrong)


@bug
def groups_halved(s: Swaps) -> None:
    """An all-reduce merges half of each group."""
    old = lower._groups
    s.function(old, lambda mesh, axes: tuple(h for g in old(mesh, axes) for h in (g[: len(g) // 2], g[len(g) // 2 :]) if h))


@bug
def uneven_parts_forgotten(s: Swaps) -> None:
    """The last part of a dimension that does not divide evenly loses what is left over."""
    old = strategy._cut_boxes

    def wrong(extents: Any, axes: Any, mesh: Any) -> Any:
        out = old(extents, axes, mesh).copy()
        for i, n in enumerate(extents):
            width = out[:, i, 1] - out[:, i, 0]
            if len(set(width.tolist())) > 1:
                out[:, i, 1] = np.where(out[:, i, 1] == n, np.maximum(n - 1, out[:, i, 0]), out[:, i, 1])
        return out

    s.function(old, wrong)


@bug
def stale_key_of_footprints(s: Swaps) -> None:
    """A stale cache key: what an operation needs is remembered without its strategy."""

    def wrong(state: Any) -> Any:
        known: dict[str, Any] = {}
        out = []
        for op, chosen in zip(state.plan.graph.ops, state.plan.strategies, strict=True):
            key = str(op.space)
            if key not in known or known[key][0] != len(op.inputs):
                needs = [(k, boxes) for k, _, boxes in lower.footprints(op, state.plan.graph, chosen, state.plan.mesh)]
                known[key] = (len(op.inputs), needs)
            names = [r.tensor for r in op.reads] if isinstance(op, Block) else op.ins
            out.append([(k, names[k], boxes) for k, boxes in known[key][1] if k < len(names)])
        return out

    s.method(lower._Lowering, "footprints", wrong)


@bug
def stale_key_of_messages(s: Swaps) -> None:
    """A stale cache key: messages are remembered by what is wanted, not by what is held."""
    old = lower.exchange
    known: dict[Any, Any] = {}
    s.function(
        old, lambda held, wanted, layout, mesh: known.setdefault((wanted.tobytes(), mesh), old(held, wanted, layout, mesh))
    )


@bug
def counts_off_by_one(s: Swaps) -> None:
    """The counts that are not sent are those of one point more."""
    old = lower._counts
    s.function(old, lambda op, block: tuple(tuple(v + 1 for v in f) for f in old(op, block)))


@bug
def opaque_axes_mixed_up(s: Swaps) -> None:
    """A batch dimension of an opaque operation is laid out along the output's last axis."""
    old = strategy.out_layout

    def wrong(op: Any, layout: Any, output: int) -> Any:
        found = old(op, layout, output)
        return (
            tuple(None if a is None else max(x for x in op.out_axes[output] if x is not None) for a in found)
            if isinstance(op, Opaque)
            else found
        )

    s.function(old, wrong)
