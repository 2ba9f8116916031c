"""Classes of kernels, each with rates of its own where they were measured (`plan.topology`).

- ``contraction``: sums of products, alone or inside another reduction (attention, a norm of a product's rows).
- ``convolution``: a sum of products whose windows slide over an image.
- ``gather``: picks elements by index, as an embedding lookup does.
- ``softmax``: sums with exponential weights: softmax, log-sum-exp, cross-entropy.
- ``row``: any other reduction or scan: sums, norms, argmax, recurrences.
- ``map``: no reduction: element-wise work, copies, transpositions.
- ``opaque``: a node of ONNX that is run as it is.
"""

from __future__ import annotations

from functools import lru_cache

from tapestry.ir.graph import Block, Op
from tapestry.ir.recognise.contraction import dims_varied, inner_product, products
from tapestry.ir.recognise.convolution import convolution
from tapestry.ir.recognise.exponential import exponential
from tapestry.ir.recognise.selection_sum import selection

CONTRACTION, CONVOLUTION, ROW, SOFTMAX = "contraction", "convolution", "row", "softmax"
MAP, GATHER, OPAQUE = "map", "gather", "opaque"


@lru_cache(maxsize=1 << 12)
def kernel_class(op: Op) -> str:
    """The class of an operation's kernel."""
    if not isinstance(op, Block):
        return OPAQUE
    if products(op):
        return CONVOLUTION if convolution(op) else CONTRACTION
    if inner_product(op) or _weighs(op):
        return CONTRACTION
    if selection(op):
        return GATHER
    if exponential(op.monoid):
        return SOFTMAX
    return ROW if op.monoid or op.inner else MAP


def _weighs(op: Block) -> bool:
    """Whether it sums columns by weights of rows, such as a softmax that multiplies values."""
    return exponential(op.monoid, sums=2) is not None and bool(dims_varied(op, op.body[-1]) - dims_varied(op, op.body[0]))
