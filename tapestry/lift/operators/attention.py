"""ONNX's Attention and RotaryEmbedding: batch ``b0``, head ``b1``, query position ``i``, key position ``n``.

Attention becomes a contraction with scale, softcap and masks in ``then``, a softmax, and a second contraction: what the
rewrites fuse into flash attention. Keys and values of grouped heads are read by ``floor(b1 / group)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from tapestry.errors import ModelError
from tapestry.ir.expr import Arg, Expr, Index, call, cast
from tapestry.ir.graph import Dim, ranges_of
from tapestry.ir.index import Aff, dim, floordiv, modulo
from tapestry.ir.monoid import lowest
from tapestry.ir.types import Tensor
from tapestry.lift.affine_values import affine_value
from tapestry.lift.builder import Node, Operand, axes, broadcast, every, here
from tapestry.lift.operators.gather import select, wrap
from tapestry.lift.operators.linear import contract
from tapestry.lift.operators.reduce import softmax
from tapestry.lift.operators.shape import concat
from tapestry.lift.registry import lifts


@dataclass(frozen=True, slots=True)
class Heads:
    """A tensor of heads: 4-D (batch, head, position, feature), or 3-D with the heads inside the features."""

    tensor: Tensor
    count: int

    @property
    def positions(self) -> int:
        """Sequence length."""
        return self.tensor.shape[-2]

    @property
    def width(self) -> int:
        """Features of one head."""
        return self.tensor.shape[-1] if len(self.tensor.shape) == 4 else self.tensor.shape[-1] // self.count

    def index(self, head: Aff, position: Aff, feature: Aff) -> list[Aff]:
        """Projection for a batch ``b0``."""
        if len(self.tensor.shape) == 4:
            return [dim("b0"), head, position, feature]
        return [dim("b0"), position, head * self.width + feature]


def _heads(n: Node, k: int, attr: str) -> Heads:
    t = n.tensor(k)
    count = t.shape[1] if len(t.shape) == 4 else int(n.attr(attr, 0))
    if len(t.shape) not in (3, 4) or count < 1 or (t.shape[-1] % count and len(t.shape) == 3):
        raise ModelError("heads do not fit", where=n.where, why=f"input {k} has shape {t.shape}, {attr} is {n.attr(attr)}")
    return Heads(t, count)


def _with_past(n: Node, new: Heads, past: int, present: int) -> Heads:
    """Keys or values with the cache in front; also writes the ``present`` output where it is asked for."""
    if not n.has(past) and not n.wants(present):
        return new
    flat = new.tensor.name
    if len(new.tensor.shape) == 3:
        shape = (new.tensor.shape[0], new.count, new.positions, new.width)
        dims = [Dim("b0", shape[0]), Dim("b1", shape[1]), Dim("n", shape[2]), Dim("m", shape[3])]
        out = n.outs[present] if n.wants(present) and not n.has(past) else n.temp(f"heads{past}")
        flat = n.view(out, flat, dims, new.index(dim("b1"), dim("n"), dim("m")))
        if not n.has(past):
            return Heads(n.b.tensor(flat), new.count)
    name = n.outs[present] if n.wants(present) else n.temp(f"present{past}")
    names = [n.ins[past], flat] if n.has(past) else [flat]
    return Heads(n.b.tensor(concat(n, name, names, 2)), new.count)


def _mask_rules(n: Node, dims: Sequence[Dim], offset: int, first: int) -> tuple[list[Operand], Callable[[Expr], Expr], bool]:
    """Reads and expression that turn a score into a masked score, and whether a row may be masked wholly.

    Args:
        offset: keys before the first query (the length of the cache).
        first: position of the first of the reads.
    """
    reads: list[Operand] = []
    total = dims[3].size
    length: Expr | None = None
    if n.has(6):
        reads.append(n.read(n.ins[6], [dim("b0")]))
        length = cast(Arg(first, n.dtype(6)), "i64")
    bias: Arg | None = None
    if n.has(3):
        mask = n.tensor(3)
        index = broadcast(mask.shape, dims)
        short = mask.shape[-1] < total and (mask.shape[-1] > 1 or total > 1)
        if short:
            index[-1] = dim("n")
        other = None if not short else False if mask.dtype == "bool" else float("-inf")
        bias = Arg(first + len(reads), mask.dtype)
        reads.append(n.read(mask.name, index, other))
    band = _band(n, offset, length, dims[2].size) if _banded(n) else None

    def apply(score: Expr) -> Expr:
        out = lowest(score.dtype)
        if bias is not None:
            score = call("where", bias, score, out) if bias.dtype == "bool" else score + cast(bias, score.dtype)
        if band is not None:
            score = call("where", band, score, out)
        if length is not None:
            score = call("where", call("lt", Index(dim("n")), length), score, out)
        return score

    return reads, apply, bool(reads) or band is not None


def _banded(n: Node) -> bool:
    return bool(n.attr("is_causal", 0)) or n.attr("left_window_size", -1) >= 0 or n.attr("right_window_size", -1) >= 0


def _band(n: Node, offset: int, length: Expr | None, queries: int) -> Expr:
    """Whether query i may see key n: causality and sliding windows, from the query's absolute position."""
    gap: Expr = Index(dim("i") - dim("n") + offset)
    if length is not None:
        gap = Index(dim("i") - dim("n") - queries) + length
    left, right = int(n.attr("left_window_size", -1)), int(n.attr("right_window_size", -1))
    bounds = (("ge", 0, n.attr("is_causal", 0)), ("le", left, left >= 0), ("ge", -right, right >= 0))
    return every(call(fn, gap, limit) for fn, limit, given in bounds if given)


@lifts("Attention", since=23)
def lift_attention(n: Node) -> None:
    """softmax(q k' * scale, softcapped, masked) v."""
    q, k, v = _heads(n, 0, "q_num_heads"), _heads(n, 1, "kv_num_heads"), _heads(n, 2, "kv_num_heads")
    if n.has(4) != n.has(5) or q.count % k.count or q.width != k.width or k.tensor.shape[0] != q.tensor.shape[0]:
        why = f"q {q.tensor.shape}, k {k.tensor.shape}, v {v.tensor.shape}"
        raise ModelError("queries, keys and values do not match", where=n.where, why=why)
    offset = n.shape(4)[2] if n.has(4) else 0
    k, v = _with_past(n, k, 4, 1), _with_past(n, v, 5, 2)
    dims = [Dim("b0", q.tensor.shape[0]), Dim("b1", q.count), Dim("i", q.positions), Dim("n", k.positions)]
    group = floordiv(dim("b1"), q.count // k.count, {"b1": q.count})
    query = n.read(q.tensor.name, q.index(dim("b1"), dim("i"), dim("m")))
    key = n.read(k.tensor.name, k.index(group, dim("n"), dim("m")))
    scores, masked = _scores(n, dims, Dim("m", q.width), (query, key), offset)
    mode = int(n.attr("qk_matmul_output_mode", 0))
    shown = n.wants(3) and mode == 3
    same = n.b.tensors[scores].dtype == n.dtype(0)
    weights = softmax(n, n.outs[3] if shown and same else n.temp("p"), scores, dims, [3], masked=masked)
    if shown and not same:
        n.block(n.out(3), dims, [n.read(weights, dims)], lambda p: cast(p, n.dtype(0)))
    p = n.read(weights, [dim("b0"), dim("b1"), dim("i"), dim("m")])
    value = n.read(v.tensor.name, v.index(group, dim("m"), dim("n")))
    out_dims = [*dims[:3], Dim("n", v.width)]
    flat = len(n.out().shape) == 3
    y = contract(n, n.temp("heads") if flat else n.out(), out_dims, [Dim("m", k.positions)], p, value, dtype=n.out().dtype)
    if flat:
        merged = axes(n.out().shape)
        ranges = ranges_of(merged)
        head, feature = floordiv(dim("x2"), v.width, ranges), modulo(dim("x2"), v.width, ranges)
        n.view(n.out(), y, merged, [dim("x0"), head, dim("x1"), feature])


def _scores(n: Node, dims: Sequence[Dim], m: Dim, reads: tuple[Operand, Operand], offset: int) -> tuple[str, bool]:
    """Emit masked scores (and the raw or softcapped ones where the fourth output asks for them)."""
    scale = n.attr("scale")
    scale = float(scale) if scale is not None else m.size**-0.5
    cap, mode = float(n.attr("softcap", 0.0)), int(n.attr("qk_matmul_output_mode", 0))
    precise = int(n.attr("softmax_precision", 0)) == TensorProto.DOUBLE
    dtype = "f64" if precise else n.dtype(0)

    def soften(s: Expr) -> Expr:
        if cap == 0.0:
            return s
        return cap * call("tanh", s / cap)

    if not n.wants(3) or mode == 3:
        more, mask, masked = _mask_rules(n, dims, offset, 2)
        name = contract(n, n.temp("s"), dims, [m], *reads, scale=scale, more=more, after=lambda s: mask(soften(s)), dtype=dtype)
        return name, masked
    first, second = (n.outs[3], n.temp("s")) if mode < 2 else (n.temp("qk"), n.outs[3])
    raw = contract(n, first, dims, [m], *reads, scale=scale, after=soften if mode == 1 else None, dtype=n.dtype(0))
    more, mask, masked = _mask_rules(n, dims, offset, 1)
    score = Arg(0, n.dtype(0)) if mode == 1 else soften(Arg(0, n.dtype(0)))
    return n.block(second, dims, [n.read(raw, dims), *more], cast(mask(score), n.dtype(0))), masked


@lifts("RotaryEmbedding", since=23)
def lift_rotary(n: Node) -> None:
    """Rotation of feature pairs (x1, x2): ``x1 cos - x2 sin`` and ``x2 cos + x1 sin``."""
    x = n.tensor(0)
    dims = axes(x.shape)
    ranges = ranges_of(dims)
    four = len(x.shape) == 4
    heads = x.shape[1] if four else int(n.attr("num_heads", 0))
    if len(x.shape) not in (3, 4) or heads < 1 or (not four and x.shape[2] % heads):
        why = f"the input has shape {x.shape}, num_heads is {n.attr('num_heads')}"
        raise ModelError("heads do not fit", where=n.where, why=why)
    width = x.shape[-1] if four else x.shape[-1] // heads
    rotated = int(n.attr("rotary_embedding_dim", 0)) or width
    half = rotated // 2
    last = dim(dims[-1].name)
    feature = modulo(last, width, ranges)
    base = floordiv(last, width, ranges) * width
    first: Expr
    if n.attr("interleaved", 0):
        odd = modulo(feature, 2, ranges)
        pair = floordiv(feature, 2, ranges)  # written so that the interval of the sum is the head, not more
        partner, angle = pair * 2 + modulo(feature + 1, 2, ranges), modulo(pair, half, ranges)
        partner = modulo(partner, width, ranges) if width % 2 else partner  # the last one stays as it is
        first = call("eq", Index(odd), 0)
    else:
        partner, angle = modulo(feature + half, rotated, ranges), modulo(feature, half, ranges)
        first = call("lt", Index(feature), half)
    spots = here(dims)
    position = spots[2 if four else 1]
    tables = [_table(n, k, position, angle, (x.shape[0], x.shape[2 if four else 1]), half) for k in (1, 2)]
    reads = [n.read(x.name, spots), n.read(x.name, [*spots[:-1], base + partner]), *tables]

    def body(a: Expr, b: Expr, cos: Expr, sin: Expr) -> Expr:
        turned = a * cos, b * sin
        y = call("where", first, call("sub", *turned), call("add", *turned))
        return y if rotated == width else call("where", call("lt", Index(feature), rotated), y, a)

    n.block(n.out(), dims, reads, body)


def _table(n: Node, k: int, position: Aff, angle: Aff, want: tuple[int, int], half: int) -> Operand:
    """Read of the cos or sin table, by position or through ``position_ids``."""
    table = n.tensor(k)
    if not n.has(3):
        if table.shape != (*want, half):
            raise ModelError(
                "the cos/sin cache does not fit the input",
                where=n.where,
                why=f"{table.name} is {list(table.shape)}, ONNX wants (batch, sequence, width/2) = {[*want, half]}",
                hint="an exporter's rewrite emits a cache for batch 1 only: use --shape with batch 1, or export at opset 18",
            )
        return n.read(table.name, [dim("x0"), position, angle])
    dims = [Dim("x0", want[0]), Dim("x1", want[1]), Dim("x2", half)]
    ranges = ranges_of(dims)
    row = affine_value(n.b, n.ins[3], (dim("x0"), dim("x1")), ranges)
    row = None if row is None else wrap(row, table.shape[0], ranges)
    if row is not None:
        name = n.view(n.temp(f"rows{k}"), table.name, dims, [row, dim("x2")])
    else:
        name = select(n, n.temp(f"rows{k}"), table.name, n.ins[3], dims, 0, 2)
    return n.read(name, [dim("x0"), position, angle])
