"""Pooling: the window of a convolution under max or sum."""

from __future__ import annotations

from math import prod

from tapestry.ir.expr import Acc, Arg, Expr, Index, call, cast, number
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, dim
from tapestry.ir.monoid import highest, lowest
from tapestry.lift.builder import Node, accumulator, every, tests_inside
from tapestry.lift.opaque import emit_opaque
from tapestry.lift.operators.windows.conv import window
from tapestry.lift.operators.windows.window import KERNEL, SPATIAL, Window
from tapestry.lift.registry import Declined, lifts


def _window(n: Node) -> Window:
    """The node's window over an image of one to three dimensions."""
    _check_image(n)
    return window(n, n.shape(0)[2:], [int(k) for k in n.attr("kernel_shape")])


def _dims(n: Node, win: Window) -> tuple[Dim, ...]:
    b, c = n.shape(0)[:2]
    return (Dim("b", b), Dim("c", c), *win.places)


def _check_image(n: Node) -> None:
    if not 3 <= len(n.shape(0)) <= 5:
        raise Declined


@lifts("MaxPool")
def lift_max_pool(n: Node) -> None:
    """The greatest value of each window, and with Indices its row-major position in the whole tensor, the first of several."""
    win = _window(n)
    other = lowest(n.dtype(0)).value if win.leaves else None
    x = n.read(n.ins[0], [dim("b"), dim("c"), *win.index()], other)
    if n.wants(1):
        if n.attr("storage_order", 0):
            emit_opaque(n, "its Indices output counts positions in the whole tensor, column by column")
            return
        state, then = [Arg(0, x[1].dtype), _position(n, win)], [Acc(0, x[1].dtype), Acc(1, "i64")]
        n.reduce(n.outs[:2], _dims(n, win), win.taps, "argmax", [x], state, then)
        return
    n.reduce([n.outs[0]], _dims(n, win), win.taps, "max", [x], [Arg(0, x[1].dtype)])


def _position(n: Node, win: Window) -> Expr:
    """Row-major position of a window's cell; behind all others where it lies in the padding, which never counts."""
    flat: Aff = dim("b") * n.shape(0)[1] + dim("c")
    within: Expr = number(1, "bool")
    for e, size in zip(win.index(), n.shape(0)[2:], strict=True):
        flat = flat * size + e
        within &= every(tests_inside(Index(e), size))
    return call("where", within, Index(flat), highest("i64")) if win.leaves else Index(flat)


@lifts("AveragePool")
def lift_average_pool(n: Node) -> None:
    """Sum over each window divided by the number of taps inside the input, or inside the padded input."""
    win = _window(n)
    x = n.read(n.ins[0], [dim("b"), dim("c"), *win.index()], 0 if win.leaves else None)
    wide = accumulator(n.dtype(0))
    count = cast(win.count(bool(n.attr("count_include_pad", 0))), wide)
    then = cast(Acc(0, wide) / count, n.dtype(0))
    n.reduce([n.outs[0]], _dims(n, win), win.taps, "sum", [x], [cast(Arg(0, n.dtype(0)), wide)], [then])


@lifts("GlobalAveragePool", "GlobalMaxPool")
def lift_global_pool(n: Node) -> None:
    """One window as large as the input; spatial output axes of size 1 are kept, as a view."""
    _check_image(n)
    x, rank = n.tensor(0), len(n.shape(0)) - 2
    taps = tuple(Dim(k, s) for k, s in zip(KERNEL[rank], x.shape[2:], strict=True))
    dims = (Dim("b", x.shape[0]), Dim("c", x.shape[1]))
    read = n.read(x.name, [dim("b"), dim("c"), *(dim(t.name) for t in taps)])
    wide, then = accumulator(x.dtype), None
    body: Expr = cast(Arg(0, x.dtype), wide)
    if n.kind == "GlobalMaxPool":
        body = Arg(0, x.dtype)
    else:
        then = Acc(0, wide) / prod(t.size for t in taps)
    monoid = "max" if n.kind == "GlobalMaxPool" else "sum"
    inner = n.reduce([n.temp("r")], dims, taps, monoid, [read], [body], [cast(then, x.dtype)] if then else [])[0]
    places = [Dim(k, 1) for k in SPATIAL[rank]]
    n.view(n.out(), inner, (*dims, *places), [dim("b"), dim("c")])
