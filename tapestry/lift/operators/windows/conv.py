"""Conv and ConvTranspose: sums of products whose projections are the sliding window; ``b, o, h, w | c, r, s``."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.errors import ModelError
from tapestry.ir.expr import Arg, number
from tapestry.ir.graph import Dim, Guard, ranges_of
from tapestry.ir.index import Aff, const, dim, floordiv, modulo
from tapestry.lift.builder import Node, Operand
from tapestry.lift.file.protos import AFTER
from tapestry.lift.operators.linear import contract
from tapestry.lift.operators.windows.window import KERNEL, SPATIAL, Window, pads_of
from tapestry.lift.registry import Declined, lifts


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
    pads = pads_of(n, size, kernel, stride, dilation)
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
    n.block(n.out(), dims, [bias] if bias else [], zero + Arg(0, bias[1].dtype) if bias else zero)


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
    ranges = ranges_of((*places, *taps))
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
