"""Conv and ConvTranspose: sums of products whose projections are the sliding window; ``b, o, h, w | c, r, s``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np

from tapestry.errors import ModelError
from tapestry.ir.expr import Acc, Arg, Expr, Index, call, cast
from tapestry.ir.graph import Dim, Guard
from tapestry.ir.index import Aff, const, dim, floordiv, modulo, span
from tapestry.ir.monoid import highest, lowest, number
from tapestry.lift.builder import (
    Declined,
    Node,
    Operand,
    accumulator,
    axes,
    broadcast,
    emit_opaque,
    every,
    lifts,
    literal,
    tests_inside,
)
from tapestry.lift.file.protos import AFTER
from tapestry.lift.operators.linear import REAL, contract, saturated
from tapestry.lift.operators.opaque_operators import opaque_integer_conv

# Sliding windows: what convolution and pooling share (names, padding, projections, how much of a window is inside).


SPATIAL = {1: ("w",), 2: ("h", "w"), 3: ("t", "h", "w")}
KERNEL = {1: ("s",), 2: ("r", "s"), 3: ("q", "r", "s")}


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window, axis by axis: sizes of the input, kernel and output, and how positions relate.

    Position ``o`` of the output and ``k`` of the kernel read ``stride * o + dilation * k - before`` of the input.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def places(self) -> tuple[Dim, ...]:
        """The output's spatial dimensions."""
        return tuple(Dim(n, s) for n, s in zip(SPATIAL[len(self.out)], self.out, strict=True))

    @property
    def taps(self) -> tuple[Dim, ...]:
        """The kernel's dimensions."""
        return tuple(Dim(n, s) for n, s in zip(KERNEL[len(self.kernel)], self.kernel, strict=True))

    def start(self, axis: int) -> Aff:
        """First input position of a window."""
        return dim(SPATIAL[len(self.out)][axis]) * self.stride[axis] - self.before[axis]

    def index(self) -> list[Aff]:
        """Input position per spatial axis."""
        taps = KERNEL[len(self.kernel)]
        return [self.start(a) + dim(taps[a]) * self.dilation[a] for a in range(len(self.size))]

    @property
    def leaves(self) -> bool:
        """Whether some position is outside the input."""
        ranges = {d.name: d.size for d in (*self.places, *self.taps)}
        spans = [span(e, ranges) for e in self.index()]
        return any(lo < 0 or hi >= s for (lo, hi), s in zip(spans, self.size, strict=True))

    def count(self, padded: bool) -> Expr:
        """How many taps of a window are inside the input (or inside the padded input), as an i64 expression."""
        return reduce(lambda a, b: call("mul", a, b), [self._inside(a, padded) for a in range(len(self.size))])

    def _inside(self, a: int, padded: bool) -> Expr:
        k, d, end = self.kernel[a], self.dilation[a], self.size[a] + (self.after[a] if padded else 0)
        ranges = {SPATIAL[len(self.out)][a]: self.out[a]}
        first = self.start(a)
        stop = floordiv(const(end - 1) - first, d, ranges) + 1  # taps below it are before the end
        skip = floordiv(const(d - 1) - first, d, ranges)  # taps from it on are after the beginning
        whole, zero = number(k, "i64"), number(0, "i64")
        high: Expr = whole if span(stop, ranges)[0] >= k else call("min", whole, Index(stop))
        if padded or span(skip, ranges)[1] <= 0:
            return high
        return call("sub", high, call("max", zero, Index(skip)))


def _pads(n: Node, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    rank = len(size)
    mode = n.attr("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return [int(p) for p in n.attr("pads", [0] * 2 * rank)]
    if mode == "VALID":
        return [0] * 2 * rank
    before: list[int] = []
    after: list[int] = []
    for s, k, st, d in zip(size, kernel, stride, dilation, strict=True):
        need = max((-(-s // st) - 1) * st + d * (k - 1) + 1 - s, 0)
        small = need // 2
        before.append(small if mode == "SAME_UPPER" else need - small)
        after.append(need - before[-1])
    return before + after


def window(n: Node, size: Sequence[int], kernel: Sequence[int]) -> Window:
    """The window of a Conv or pooling node over an input of the given spatial sizes.

    Raises:
        ModelError: more than three spatial axes, or lists of the wrong length.
    """
    rank = len(size)
    stride = [int(v) for v in n.attr("strides", [1] * rank)]
    dilation = [int(v) for v in n.attr("dilations", [1] * rank)]
    if not 1 <= rank <= 3 or {len(kernel), len(stride), len(dilation)} != {rank}:
        why = f"{rank} spatial axes, strides {stride}, kernel {list(kernel)}"
        raise ModelError("unsupported window", where=n.where, why=why)
    pads = _pads(n, size, kernel, stride, dilation)
    before, after = pads[:rank], n.attr(AFTER, pads[rank:])
    return Window(tuple(size), tuple(kernel), n.out().shape[2:], tuple(stride), tuple(dilation), tuple(before), tuple(after))


def channel(outs: int, ins: int, groups: int) -> Aff:
    """Input channel of output channel ``o`` and reduced channel ``c``: the group's first one plus c."""
    ranges = {"o": outs, "c": ins // groups}
    group = floordiv(dim("o"), outs // groups, ranges)
    return group * (ins // groups) + (dim("c") if ins // groups > 1 or groups == 1 else const(0))


@lifts("Conv")
def lift_conv(n: Node) -> None:
    """Convolution, grouped or not, 1-D to 3-D; padding is the value of reads that leave the input."""
    x, w = n.tensor(0), n.tensor(1)
    if not 3 <= len(x.shape) <= 5:
        raise Declined
    groups, outs = int(n.attr("group", 1)), w.shape[0]
    if x.shape[1] != w.shape[1] * groups or outs % groups:
        raise ModelError("channels do not match", where=n.where, why=f"x {x.shape}, w {w.shape}, group {groups}")
    win = window(n, x.shape[2:], w.shape[2:])
    dims = (Dim("b", x.shape[0]), Dim("o", outs), *win.places)
    bias = n.read(n.ins[2], [dim("o")]) if n.has(2) else None
    if not w.size:
        return _of_nothing(n, dims, bias)
    a = n.read(x.name, [dim("b"), channel(outs, x.shape[1], groups), *win.index()], 0 if win.leaves else None)
    b = n.read(w.name, [dim("o"), dim("c"), *(dim(d.name) for d in win.taps)])
    contract(n, n.out(), dims, (Dim("c", w.shape[1]), *win.taps), a, b, bias=bias)


def _of_nothing(n: Node, dims: tuple[Dim, ...], bias: Operand | None) -> None:
    """Emit sums over no channels, or for no filters."""
    zero = number(0, n.out().dtype)
    n.block(n.out(), dims, [bias] if bias else [], call("add", zero, Arg(0, bias[1].dtype)) if bias else zero)


@lifts("ConvTranspose")
def lift_conv_transpose(n: Node) -> None:
    """The adjoint of a convolution: position h reads input (h + pad - d*r) / stride where that is whole and inside."""
    x, w = n.tensor(0), n.tensor(1)
    rank = len(x.shape) - 2
    if not 1 <= rank <= 3:
        raise Declined
    groups = int(n.attr("group", 1))
    per_group, outs = w.shape[1], w.shape[1] * groups
    stride = [int(v) for v in n.attr("strides", [1] * rank)]
    dilation = [int(v) for v in n.attr("dilations", [1] * rank)]
    mode = n.attr("auto_pad", "NOTSET")
    if mode not in ("NOTSET", "", "VALID") or n.attr("output_shape") is not None:
        raise Declined  # `inference_fixes` has written the padding out wherever sizes are known
    before = [0] * rank if mode == "VALID" else [int(p) for p in n.attr("pads", [0] * rank)]
    places = tuple(Dim(name, s) for name, s in zip(SPATIAL[rank], n.out().shape[2:], strict=True))
    taps = tuple(Dim(name, s) for name, s in zip(KERNEL[rank], w.shape[2:], strict=True))
    ranges = {d.name: d.size for d in (*places, *taps)}
    index: list[Aff] = []
    guards: list[Guard] = []
    for a in range(rank):
        reach = dim(places[a].name) + before[a] - dim(taps[a].name) * dilation[a]
        index.append(floordiv(reach, stride[a], ranges))
        if stride[a] > 1:
            guards.append(Guard(modulo(reach, stride[a], ranges), "eq"))
    bias = n.read(n.ins[2], [dim("o")]) if n.has(2) else None
    dims = (Dim("b", x.shape[0]), Dim("o", outs), *places)
    if not w.size:
        return _of_nothing(n, dims, bias)
    taken = channel(outs, x.shape[1], groups)
    a_read = n.read(x.name, [dim("b"), taken, *index], 0, tuple(guards))
    inner = modulo(dim("o"), per_group, {"o": outs})
    b_read = n.read(w.name, [taken, inner, *(dim(d.name) for d in taps)])
    contract(n, n.out(), dims, (Dim("c", x.shape[1] // groups), *taps), a_read, b_read, bias=bias)


# Pooling: the window of a convolution under max or sum.


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
        within = call("and", within, every(tests_inside(Index(e), size)))
    return call("where", within, Index(flat), highest("i64")) if win.leaves else Index(flat)


@lifts("AveragePool")
def lift_average_pool(n: Node) -> None:
    """Sum over each window divided by the number of taps inside the input, or inside the padded input."""
    win = _window(n)
    x = n.read(n.ins[0], [dim("b"), dim("c"), *win.index()], 0 if win.leaves else None)
    wide = accumulator(n.dtype(0))
    count = cast(win.count(bool(n.attr("count_include_pad", 0))), wide)
    then = cast(call("div", Acc(0, wide), count), n.dtype(0))
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
        then = call("div", Acc(0, wide), literal(prod(t.size for t in taps), wide))
    monoid = "max" if n.kind == "GlobalMaxPool" else "sum"
    inner = n.reduce([n.temp("r")], dims, taps, monoid, [read], [body], [cast(then, x.dtype)] if then else [])[0]
    places = [Dim(k, 1) for k in SPATIAL[rank]]
    n.view(n.out(), inner, (*dims, *places), [dim("b"), dim("c")])


# MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv: exact sums of products of integers of 8 bits, in i32.
#
# Zero points known at compile time become literals, and none where they are 0; others are read. What a QLinear operator does
# with the sum follows it: a multiplication by the scales in f32, rounding half to even, saturation.


BYTES = ("i8", "u8")


@lifts("MatMulInteger", "QLinearMatMul")
def lift_integer_matmul(n: Node) -> None:
    """Zero points and scales of the whole, of a's rows or of b's columns; all others leave the node to ONNX."""
    second = 3 if n.kind == "QLinearMatMul" else 1
    a, b, y = n.tensor(0), n.tensor(second), n.out()
    if min(len(a.shape), len(b.shape)) < 2 or not _supported(n, second):
        raise Declined
    batch = axes(y.shape[:-2], "b")
    dims = (*batch, Dim("i", a.shape[-2]), Dim("n", b.shape[-1]))
    m = Dim("m", a.shape[-1])
    reads = [
        n.read(a.name, [*broadcast(a.shape[:-2], batch), dim("i"), dim("m")]),
        n.read(b.name, [*broadcast(b.shape[:-2], batch), dim("m"), dim("n")]),
    ]
    own = {**dict.fromkeys(_about(n, 0), "i"), **dict.fromkeys(_about(n, second), "n")}
    if not _emit(n, second, dims, (m,), reads, own):
        raise Declined


@lifts("ConvInteger", "QLinearConv")
def lift_integer_conv(n: Node) -> None:
    """As Conv; zero points and scales of the whole or, for the weight, of each filter. Padding is x's zero point."""
    second = 3 if n.kind == "QLinearConv" else 1
    x, w = n.tensor(0), n.tensor(second)
    groups, outs = int(n.attr("group", 1)), w.shape[0]
    fits = 3 <= len(x.shape) <= 5 and x.shape[1] == w.shape[1] * groups and outs % groups == 0 and w.size
    if not fits or not _supported(n, second):
        return opaque_integer_conv(n)
    win = window(n, x.shape[2:], w.shape[2:])
    dims = (Dim("b", x.shape[0]), Dim("o", outs), *win.places)
    zero = _zero_point(n, _about(n, 0)[-1])
    if win.leaves and (zero is None or zero.size != 1):
        return opaque_integer_conv(n)  # what is outside is only known when it runs
    outside = int(zero.reshape(-1)[0]) if win.leaves and zero is not None else None
    reads = [
        n.read(x.name, [dim("b"), channel(outs, x.shape[1], groups), *win.index()], outside),
        n.read(w.name, [dim("o"), dim("c"), *(dim(d.name) for d in win.taps)]),
    ]
    own = dict.fromkeys(_about(n, second), "o")
    if not _emit(n, second, dims, (Dim("c", w.shape[1]), *win.taps), reads, own):
        opaque_integer_conv(n)


def _about(n: Node, k: int) -> list[int]:
    """Inputs with the scale and the zero point of input k (the zero point alone in operators without scales)."""
    return [k + 1, k + 2] if n.kind.startswith("QLinear") else [2 if k == 0 else 3]


def _supported(n: Node, second: int) -> bool:
    if n.dtype(0) not in BYTES or n.dtype(second) not in BYTES:
        return False
    return not n.kind.startswith("QLinear") or (
        n.out().dtype in BYTES and all(n.dtype(k) in REAL for k in (1, second + 1, 6)) and n.tensor(6).size == 1
    )


def _zero_point(n: Node, k: int) -> np.ndarray | None:
    """A zero point known at compile time, once where all are equal: 0 where there is none."""
    value = n.const(k) if n.has(k) else np.zeros((), np.int8)
    return value.reshape(-1)[:1] if value is not None and value.size and np.all(value == value.reshape(-1)[0]) else value


def _scale_place(n: Node, k: int, own: str) -> list[Aff] | None:
    """Where a scale or zero point is read: the only one, or one for each place of its own dimension."""
    shape = n.shape(k)
    if n.tensor(k).size == 1:
        return [const(0)] * len(shape)
    return [dim(own)] if len(shape) == 1 and own else None


def _emit(
    n: Node, second: int, dims: tuple[Dim, ...], reduced: tuple[Dim, ...], reads: list[Operand], own: dict[int, str]
) -> bool:  # fmt: skip
    """The sum and, for QLinear operators, what follows it; ``False`` where a scale or zero point is of another shape.

    Args:
        reads: the two factors.
        own: for inputs that may have one value for each of its places, the dimension.
    """
    sizes = {d.name: d.size for d in dims}
    factors: list[Expr] = []
    for at, k in enumerate((0, second)):
        z, wide = _about(n, k)[-1], cast(Arg(at, reads[at][1].dtype), "i32")
        zero = _zero_point(n, z)
        if zero is not None and zero.size == 1:
            if n.has(z) and _one(n, z, own.get(z, ""), sizes) is None:
                return False
            value = int(zero.reshape(-1)[0])
            factors.append(call("sub", wide, literal(value, "i32")) if value else wide)
        elif (read := _one(n, z, own.get(z, ""), sizes)) is None:
            return False
        else:
            factors.append(call("sub", wide, cast(Arg(len(reads), read[1].dtype), "i32")))
            reads.append(read)
    body = call("mul", factors[0], factors[1])
    if not n.kind.startswith("QLinear"):
        n.reduce([n.outs[0]], dims, reduced, "sum", reads, [body])
        return True
    then = _requantised(n, second, reads, own, sizes)
    if then is None:
        return False
    n.reduce([n.outs[0]], dims, reduced, "sum", reads, [body], [then])
    return True


def _one(n: Node, k: int, own: str, sizes: dict[str, int]) -> Operand | None:
    spot = _scale_place(n, k, own)
    if spot is None or (n.tensor(k).size > 1 and n.shape(k)[0] != sizes[own]):
        return None
    return n.read(n.ins[k], spot)


def _requantised(n: Node, second: int, reads: list[Operand], own: dict[int, str], sizes: dict[str, int]) -> Expr | None:
    """The sum, with a bias, by the scales and rounded; its reads are added."""
    values: dict[int, Expr] = {}
    last = 8 if n.kind == "QLinearConv" else -1
    for k in (1, second + 1, 6, 7, last):
        if k < 0 or not n.has(k):
            continue
        read = _one(n, k, "o" if k == last else own.get(k, ""), sizes)
        if read is None:
            return None
        values[k] = Arg(len(reads), read[1].dtype)
        reads.append(read)
    total: Expr = Acc(0, "i32")
    if last in values:
        total = call("add", total, values[last])
    first, last_factor, result = (cast(values[k], "f32") for k in (1, second + 1, 6))
    by = call("div", call("mul", first, last_factor), result)
    return saturated(call("round", call("mul", cast(total, "f32"), by)), values.get(7), n.out().dtype)
