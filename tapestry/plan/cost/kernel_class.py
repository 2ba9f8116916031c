"""Classes of kernels, each with rates of its own where they were measured (`plan.topology`).

- ``contraction``: sums of products, those of rows with the matrix that each picks too.
- ``convolution``: a sum of products whose windows slide over an image.
- ``unfolded``: a sum of products of windows that is no convolution, such as one over an image's overlapping strips: the
  windows are written out before they are multiplied.
- ``attention``: sums of products inside another reduction (attention, a norm of a product's rows), and sums by weights of
  rows.
- ``scored``: attention whose scores are more than a product and what is added to it: masked by comparing places, chosen by
  another tensor, capped. They are computed score by score.
- ``decoding``: attention of a few rows, such as one new token's, which take as long as keys and values take to be read.
- ``computed``: those inside another reduction, of factors that are computed from several values, such as attention
  that rotates its queries: they are written out before they are multiplied.
- ``gather``: picks elements by index, as an embedding lookup does.
- ``softmax``: sums with exponential weights: softmax, log-sum-exp, cross-entropy.
- ``row``: any other reduction or scan: sums, norms, argmax, recurrences.
- ``map``: no reduction: element-wise work, copies, transpositions.
- ``opaque``: a node of ONNX that is run as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from tapestry.ir.expr import Call, arg_positions, walk
from tapestry.ir.graph import Block, Op
from tapestry.ir.index import Aff, bounds, dims_of
from tapestry.ir.recognition.attention_roles import attention
from tapestry.ir.recognition.contraction import dims_varied, inner_product, products
from tapestry.ir.recognition.convolution import convolution
from tapestry.ir.recognition.exponential import exponential
from tapestry.ir.recognition.selection_sum import routed, selection

CONTRACTION, CONVOLUTION, UNFOLDED = "contraction", "convolution", "unfolded"
ATTENTION, SCORED, DECODING, COMPUTED = "attention", "scored", "decoding", "computed"
FEW = 8  # rows
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "cast"})
ROW, SOFTMAX, MAP, GATHER, OPAQUE = "row", "softmax", "map", "gather", "opaque"


@lru_cache(maxsize=1 << 12)
def kernel_class(op: Op) -> str:
    """The class of an operation's kernel."""
    if not isinstance(op, Block):
        return OPAQUE
    if products(op):
        return CONVOLUTION if convolution(op) else UNFOLDED if _windows(op) else CONTRACTION
    if routed(op):
        return CONTRACTION
    if (inner := inner_product(op)) is not None:
        if any(len(arg_positions((f,))) > 1 for f in inner.args):
            return COMPUTED
        roles = attention(op)
        few = roles is not None and prod(d.size for d in roles.rows) <= FEW
        return DECODING if few else SCORED if _scored(op) else ATTENTION
    if _weighs(op):
        return ATTENTION
    if selection(op):
        return GATHER
    if exponential(op.monoid):
        return SOFTMAX
    return ROW if op.monoid or op.inner else MAP


def _scored(op: Block) -> bool:
    """Whether the exponents of its weights are computed otherwise than by arithmetic of products, tensors and numbers."""
    calls = (x.fn for x in walk(op.body[0]) if isinstance(x, Call))
    return exponential(op.monoid, sums=2) is not None and not ARITHMETIC.issuperset(calls)


def _windows(op: Block) -> bool:
    """Whether cells of a factor are read several times along an axis: two dimensions that overlap there, one of them reduced.
    Those of a transposed convolution, which every so many places reads anew, are not written out."""
    reduced = {d.name for d in op.reduce if d.size > 1}
    reads = [op.reads[k] for k in sorted(arg_positions(tuple(e for pair in products(op) or () for e in pair)))]
    sliding = (r for r in reads if not any(g.op == "eq" for g in r.when))
    return any(dims_of(e) & reduced and _overlap(e, op.ranges) for r in sliding for e in r.index)


def _overlap(e: Aff, ranges: Mapping[str, int]) -> bool:
    """Whether several points have one value, by the sizes of the terms."""
    box = {n: (0, size - 1) for n, size in ranges.items()}
    reach = 0
    for coef, (lo, hi) in sorted((abs(c), bounds(Aff(((atom, 1),)), box)) for atom, c in e.terms):
        if hi > lo and coef <= reach:
            return True
        reach += coef * int(hi - lo)
    return False


def _weighs(op: Block) -> bool:
    """Whether it sums columns by weights of rows, such as a softmax that multiplies values."""
    return exponential(op.monoid, sums=2) is not None and bool(dims_varied(op, op.body[-1]) - dims_varied(op, op.body[0]))
