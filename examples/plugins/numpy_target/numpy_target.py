"""A target that computes plain matrix products by numpy, and leaves all else to the CPU target."""

from __future__ import annotations

import numpy as np
import torch

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.ir.graph import Block
from tapestry.ir.index import dim
from tapestry.ir.recognition.contraction import products


def is_product(op):
    """Whether an operation is y[…, i, n] = sum over m of x[…, i, m] * w[m, n] with nothing behind the sum."""
    if not isinstance(op, Block) or products(op) is None or len(op.reads) != 2 or len(op.reduce) != 1:
        return False
    *rows, column, inner = [d.name for d in op.space]
    wanted = ((*map(dim, rows), dim(inner)), (dim(inner), dim(column)))
    return tuple(r.index for r in op.reads) == wanted and not op.lowers


class NumpyTarget:
    """The five members of `tapestry.runtime.target_protocol.Target`."""

    device = torch.device("cpu")

    def __init__(self):
        self.rest = TorchCpu()

    def kernel(self, graph, kernel):
        if kernel.mode == "finish" or not is_product(graph.ops[kernel.op]):
            run = self.rest.kernel(graph, kernel)
            return lambda ins, states: run(ins, states)
        return lambda ins, states: [torch.from_numpy(np.matmul(ins[0].numpy(), ins[1].numpy()))]

    def merge(self, monoid, states):
        return self.rest.merge(monoid, states)

    def from_numpy(self, array):
        return self.rest.from_numpy(array)

    def to_numpy(self, array, dtype):
        return self.rest.to_numpy(array, dtype)
