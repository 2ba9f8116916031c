"""Reductions over axes, running ones, softmax, and ArgMax: dimensions ``x0, x1, …`` by axis of the input."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.errors import ModelError
from tapestry.ir.expr import Acc, Arg, Expr, Index, call, cast, number
from tapestry.ir.graph import Dim, points
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.monoid import MONOIDS, highest, lowest
from tapestry.ir.recognition.running_state import running
from tapestry.ir.types import Tensor
from tapestry.lift.builder import Node, accumulator, axes, here
from tapestry.lift.registry import Declined, lifts


def keep_dims(n: Node, out: str | Tensor, src: str, axes_reduced: Sequence[int], shape: Sequence[int]) -> str:
    """View of a reduced tensor with axes of size 1 where it was reduced; ``shape`` is the input's."""
    kept = [Dim(f"x{k}", 1 if k in axes_reduced else s) for k, s in enumerate(shape)]
    return n.view(out, src, kept, [dim(f"x{k}") for k in range(len(shape)) if k not in axes_reduced])


def split_dims(shape: Sequence[int], reduced: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """Kept and reduced dimensions, named by axis."""
    every = axes(shape)
    return [d for k, d in enumerate(every) if k not in reduced], [every[k] for k in sorted(reduced)]


def _reduced_axes(n: Node) -> list[int] | None:
    """Axes reduced: from the attribute or the second input; all (or none, on request) when absent. None when unknown."""
    rank = len(n.shape(0))
    given = n.ints(1, "axes")
    if given is None and n.has(1):
        return None
    if not given:
        return [] if n.attr("noop_with_empty_axes", 0) else list(range(rank))
    return sorted({a % max(rank, 1) for a in given})


def _plan(kind: str, x: Expr, count: int) -> tuple[str, Expr, Expr | None]:
    """Monoid, body and then of a reduction of x over ``count`` elements."""
    acc = Acc(0, x.dtype)
    if kind in ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum"):
        return kind[6:].lower(), x, None
    if kind == "ReduceMean":
        return "sum", x, acc / count
    if kind == "ReduceL1":
        return "sum", call("abs", x), None
    if kind == "ReduceL2":
        return "sum", x * x, call("sqrt", acc)
    if kind == "ReduceSumSquare":
        return "sum", x * x, None
    if kind == "ReduceLogSum":
        return "sum", x, call("log", acc)
    return "logsumexp", x, acc + call("log", Acc(1, x.dtype))


@lifts(
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceLogSum",
    "ReduceLogSumExp",
)
def lift_reduce(n: Node) -> None:
    """One reduction into the reduced shape, then (with keepdims) a view."""
    reduced, x = _reduced_axes(n), n.tensor(0)
    real = x.dtype in ("f16", "bf16", "f32", "f64")
    if reduced is None or (not real and n.kind in ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")):
        raise Declined
    if not reduced and n.attr("noop_with_empty_axes", 0):
        if n.kind not in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
            raise Declined
        n.view(n.out(), x.name, axes(x.shape), axes(x.shape))
        return
    kept, gone = split_dims(x.shape, reduced)
    exact = n.kind in ("ReduceMax", "ReduceMin")
    value = Arg(0, x.dtype) if exact else cast(Arg(0, x.dtype), accumulator(x.dtype))
    monoid, body, then = _plan(n.kind, value, points(gone))
    if x.dtype == "bool":
        monoid = {"max": "any", "min": "all"}[monoid]
    state = [body, number(1, body.dtype)] if monoid == "logsumexp" else [body]
    if then is None and value.dtype != x.dtype:
        then = Acc(0, value.dtype)
    keep = n.attr("keepdims", 1) == 1 and bool(gone)
    lowered = [] if then is None else [cast(then, x.dtype)]
    if not gone:  # a scalar: nothing to reduce
        gone = [Dim("x", 1)]
    name = n.temp("r") if keep else n.outs[0]
    n.reduce([name], kept, gone, monoid, [n.read(x.name, axes(x.shape))], state, lowered)
    if keep:
        keep_dims(n, n.out(), name, reduced, x.shape)


@lifts("ArgMax", "ArgMin")
def lift_arg(n: Node) -> None:
    """Position of the extreme value, the first (or last) of several."""
    x = n.tensor(0)
    if not x.shape:
        raise Declined
    axis = n.axis(0, len(x.shape))
    kept, gone = split_dims(x.shape, [axis])
    last = bool(n.attr("select_last_index", 0))
    place = Index(dim(f"x{axis}"))
    state = [Arg(0, x.dtype), -place if last else place]
    lowered: Expr = -Acc(1, "i64") if last else Acc(1, "i64")
    keep = n.attr("keepdims", 1) == 1
    name = n.temp("r") if keep else n.outs[0]
    n.reduce([name], kept, gone, n.kind.lower(), [n.read(x.name, axes(x.shape))], state, [lowered])
    if keep:
        keep_dims(n, n.out(), name, [axis], x.shape)


@lifts("Hardmax")
def lift_hardmax(n: Node) -> None:
    """1 at the first greatest value along an axis (before opset 13 along all from it on), else 0."""
    x, rank = n.tensor(0), len(n.shape(0))
    axis = n.axis(1 if n.version < 13 else -1, rank)
    gone = list(range(axis, rank)) if n.version < 13 else [axis]
    if not rank or x.size == 0:
        raise Declined
    dims = axes(x.shape)
    flat: Aff = const(0)
    for a in gone:
        flat = flat * x.shape[a] + dim(f"x{a}")
    kept, over = split_dims(x.shape, gone)
    state = [Arg(0, x.dtype), Index(flat)]
    (first,) = n.reduce([n.temp("first")], kept, over, "argmax", [n.read(x.name, dims)], state, [Acc(1, "i64")])
    chosen = call("eq", Arg(0, "i64"), Index(flat))
    n.block(n.out(), dims, [n.read(first, kept)], call("where", chosen, number(1, x.dtype), number(0, x.dtype)))


@lifts("CumSum", "CumProd")
def lift_scan(n: Node) -> None:
    """A running sum or product, as the scan that `running_state` recognises; an axis that is not known leaves it opaque."""
    x, at = n.tensor(0), n.const(1)
    if at is None or not x.shape or x.size == 0:
        raise Declined
    axis = int(at.reshape(-1)[0])
    if not -len(x.shape) <= axis < len(x.shape):
        raise ModelError("axis out of range", where=n.where, why=f"axis is {axis}, the rank {len(x.shape)}")
    axis %= len(x.shape)
    dims = axes(x.shape)
    over = Dim("j", dims[axis].size)
    spots = here(dims)
    when = running(spots[axis], "j", reverse=bool(n.attr("reverse", 0)), exclusive=bool(n.attr("exclusive", 0)))
    monoid = n.kind[3:].lower()
    wide = accumulator(x.dtype)
    zero = MONOIDS[monoid].zero((wide,))[0].value
    read = n.read(x.name, [*spots[:axis], dim("j"), *spots[axis + 1 :]], zero, (when,))
    then = [] if wide == x.dtype else [cast(Acc(0, wide), x.dtype)]
    n.reduce([n.outs[0]], dims, [over], monoid, [read], [cast(Arg(0, x.dtype), wide)], then)


def centre(top: Expr) -> Expr:
    """What a softmax subtracts from a row whose maximum is ``top``: NaN for plus infinity, which is not to be told from others.

    ``inf - inf`` is a NaN in the cell that holds it, so the sum is one too, and with it every cell of the row; a finite cell
    alone would give ``exp(x - inf) = 0``.
    """
    return call("where", call("eq", top, highest(top.dtype)), top - top, top)


def softmax(
    n: Node, out: str | Tensor, x: str, dims: Sequence[Dim], reduced: Sequence[int], *, log: bool = False, masked: bool = False
) -> str:
    """Emit softmax of ``x`` over some of its axes: a logsumexp into (m, l), then ``exp(x - m) / l``.

    A row that holds plus infinity gives NaN. With ``masked``, rows that are wholly minus infinity give 0, not NaN: their m is
    taken to be 0.
    """
    source = n.b.tensor(x)
    wide = accumulator(source.dtype)
    kept = [d for k, d in enumerate(dims) if k not in reduced]
    gone = [dims[k] for k in reduced]
    base = out.name if isinstance(out, Tensor) else out
    spots: list[Aff] = here(dims)
    value = cast(Arg(0, source.dtype), wide)
    names = (n.b.fresh(f"{base}.m"), n.b.fresh(f"{base}.l"))
    top = centre(Acc(0, wide))
    if masked:
        top = call("where", call("eq", Acc(0, wide), lowest(wide)), 0, top)
    m, total = n.reduce(names, kept, gone, "logsumexp", [n.read(x, spots)], [value, number(1, wide)], [top, Acc(1, wide)])

    def body(v: Expr, top: Expr, weight: Expr) -> Expr:
        shifted = cast(v, wide) - top
        whole = shifted - call("log", weight) if log else call("exp", shifted) / weight
        return cast(whole, source.dtype)

    reads = [n.read(x, spots), n.read(m, kept), n.read(total, kept)]
    return n.block(out, dims, reads, body)


@lifts("Softmax", "LogSoftmax")
def lift_softmax(n: Node) -> None:
    """Over one axis; before opset 13 over all axes from the given one on."""
    x = n.tensor(0)
    if not x.shape:
        raise Declined
    axis = n.axis(1 if n.version < 13 else -1, len(x.shape))
    reduced = list(range(axis, len(x.shape))) if n.version < 13 else [axis]
    softmax(n, n.out(), x.name, axes(x.shape), reduced, log=n.kind == "LogSoftmax")
