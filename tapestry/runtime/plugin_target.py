"""Targets of other packages, held to what `runtime.target_protocol.Target` says of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, shape
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.plugins import entry_points as plugins
from tapestry.runtime.arrays import torch_dtype
from tapestry.runtime.target_protocol import Array, Run, Target

if TYPE_CHECKING:
    from tapestry.ir.graph import Graph
    from tapestry.ir.kernel import Kernel


KIND = "targets"
MEMBERS = ("device", "kernel", "merge", "from_numpy", "to_numpy")


class PluginTarget:
    """Implements `Target` by a target of another package: what goes wrong inside is said to be that package's, and arrays of
    another shape or type than was asked for are refused.

    Raises:
        PluginError: there is no such plug-in, or it makes no target.
    """

    def __init__(self, name: str) -> None:
        self.name, make = name, plugins.get(KIND, name)
        if not callable(make):
            raise plugins.refused(KIND, name, "it is nothing that can be called to make a target")
        with plugins.blamed(KIND, name):
            made: Any = make()
        absent = [m for m in MEMBERS if not hasattr(made, m)]
        if absent:
            raise plugins.refused(KIND, name, f"what it makes has no {', '.join(absent)}")
        self.target: Target = made

    @property
    def device(self) -> torch.device:
        """Where arrays live."""
        return self.target.device

    def kernel(self, graph: Graph, kernel: Kernel) -> Run:
        """A function that computes one block; its results are looked at whenever it runs."""
        with plugins.blamed(KIND, self.name):
            run = self.target.kernel(graph, kernel)
        op = graph.ops[kernel.op]
        if kernel.mode == "partial" and isinstance(op, Block):
            dtypes = [e.dtype for e in op.body]
        else:
            dtypes = [graph.tensors[t].dtype for t in op.outs]
        wanted = [(shape(box), torch_dtype(d)) for box, d in zip(kernel.outs, dtypes, strict=False)]

        def held(ins: Sequence[Array | None], states: Sequence[Array]) -> list[Array]:
            with plugins.blamed(KIND, self.name):
                outs = run(ins, states)
            self._check(outs, wanted, f"the kernel of '{op.outs[0]}'")
            return outs

        return held

    def merge(self, monoid: str, states: Sequence[Sequence[Array]]) -> list[Array]:
        """Merge the states of several devices, in their order."""
        with plugins.blamed(KIND, self.name):
            outs = self.target.merge(monoid, states)
        self._check(outs, [(tuple(a.shape), a.dtype) for a in states[0]], f"the merge of '{monoid}'")
        return outs

    def from_numpy(self, array: Any) -> Array:
        """An array on the device."""
        with plugins.blamed(KIND, self.name):
            return self.target.from_numpy(array)

    def to_numpy(self, array: Array, dtype: str) -> Any:
        """The other way."""
        with plugins.blamed(KIND, self.name):
            return self.target.to_numpy(array, dtype)

    def _check(self, outs: Sequence[Array], wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], what: str) -> None:
        if len(outs) != len(wanted):
            raise plugins.refused(KIND, self.name, f"{what} gives {len(outs)} arrays, not {len(wanted)}")
        for a, (extents, dtype) in zip(outs, wanted, strict=True):
            if isinstance(a, HostValue):
                continue
            if tuple(a.shape) != extents or a.dtype != dtype or not a.is_contiguous():
                got = f"{a.dtype}{list(a.shape)}{'' if a.is_contiguous() else ', not contiguous'}"
                raise plugins.refused(KIND, self.name, f"{what} gives {got}, not {dtype}{list(extents)}")
