"""Tapestry as an ``onnx.backend.base.Backend``: whole models or single nodes, planned for any number of logical devices.

What Tapestry refuses raises ``unittest.SkipTest``, as onnx's own test-suite wants it (its
``BackendIsNotSupposedToImplementIt`` would count as a pass).
"""

from __future__ import annotations

import shutil
import tempfile
import unittest
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto
from onnx.backend.base import Backend, BackendRep

from tapestry import api
from tapestry.errors import ModelError

NEWEST_IR = 13  # the newest that every evaluator reads


class Prepared(BackendRep):
    """A model, compiled when its inputs' sizes are known: at once, or on the first run when they are symbolic."""

    def __init__(self, model: ModelProto, options: Mapping[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tapestry-backend-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.model = model
        stored = {t.name for t in model.graph.initializer}
        self.inputs = [i for i in model.graph.input if i.name not in stored]
        self.outputs = [o.name for o in model.graph.output]
        self.options = dict(options)
        self._compiled: dict[tuple[tuple[int, ...], ...], api.Compiled] = {}
        if not any(_symbolic(i) for i in self.inputs):
            self.compiled({})

    def compiled(self, feeds: Mapping[str, Any]) -> api.Compiled:
        """The plan for these inputs' sizes."""
        sizes = {i.name: np.shape(feeds[i.name]) for i in self.inputs if _symbolic(i) and i.name in feeds}
        key = tuple(sizes.values())
        if key not in self._compiled:
            path = self._folder / f"model{len(self._compiled)}.onnx"
            onnx.save(_sized(self.model, sizes), path)
            try:
                self._compiled[key] = api.compile(path, **self.options)
            except ModelError as e:
                raise unittest.SkipTest(str(e)) from None
        return self._compiled[key]

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Outputs in the model's order.

        Args:
            inputs: values in the order of the model's inputs (those that are no initializers), or by name.
        """
        if not isinstance(inputs, Mapping):
            values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
            inputs = dict(zip((i.name for i in self.inputs), values, strict=False))
        feeds = {n: _value(v) for n, v in inputs.items()}
        found = self.compiled(feeds).run(feeds)
        return tuple(found[o] for o in self.outputs)


class TapestryBackend(Backend):
    """onnx's interface to a runtime; ``prepare`` takes the keyword arguments of `tapestry.compile` (``devices=4``)."""

    OPTIONS = frozenset(
        {"devices", "mesh", "topology", "memory", "target", "pins", "layouts", "seed", "time_limit", "exact", "stages"}
    )

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        """Compile a model.

        Raises:
            unittest.SkipTest: the model is not supported; says which node, why and what to do.
        """
        if not cls.supports_device(device):
            raise unittest.SkipTest(f"there is no device {device}: plans run on the CPU's logical devices")
        return Prepared(model, {k: v for k, v in kwargs.items() if k in cls.OPTIONS})

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Compile and run once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Any, device: str = "CPU", outputs_info: Sequence[Any] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run one node on given inputs (the newest opset when ``opset_version`` is not given)."""
        names = [i for i in node.input if i]
        values = dict(zip(names, (_value(v) for v in inputs), strict=True))
        ins = [_tensor_info(n, v) for n, v in values.items()]
        outs = [onnx.helper.make_value_info(o, onnx.TypeProto()) for o in node.output if o]
        graph = onnx.helper.make_graph([node], "node", ins, outs)
        version = int(kwargs.pop("opset_version", onnx.defs.onnx_opset_version()))
        opsets = [onnx.helper.make_opsetid("", version)]
        if node.domain not in ("", "ai.onnx"):
            opsets.append(onnx.helper.make_opsetid(node.domain, max(s.since_version for s in _schemas(node.domain))))
        model = onnx.helper.make_model(graph, ir_version=NEWEST_IR, opset_imports=opsets)
        return cls.run_model(model, values, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Only the CPU."""
        return device.split(":", maxsplit=1)[0] == "CPU"


def _schemas(domain: str) -> list[Any]:
    return [s for s in onnx.defs.get_all_schemas_with_history() if s.domain == domain]


def _sized(model: ModelProto, sizes: Mapping[str, Sequence[int]]) -> ModelProto:
    """The model with the sizes of its inputs written in (some may be 0, which ``--shape`` does not take)."""
    if not sizes:
        return model
    out = ModelProto()
    out.CopyFrom(model)
    for i in out.graph.input:
        for d, size in zip(i.type.tensor_type.shape.dim, sizes.get(i.name, ()), strict=False):
            d.dim_value = size
    return out


def _symbolic(value: onnx.ValueInfoProto) -> bool:
    t = value.type.tensor_type
    return value.type.HasField("tensor_type") and any(not d.HasField("dim_value") for d in t.shape.dim)


def _value(v: Any) -> Any:
    """A tensor as an array (scalars arrive as numpy scalars); sequences and absent optionals as they are."""
    return v if v is None or isinstance(v, list | tuple) else np.asarray(v)


def _tensor_info(name: str, value: Any) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


prepare = TapestryBackend.prepare
run_model = TapestryBackend.run_model
run_node = TapestryBackend.run_node
supports_device = TapestryBackend.supports_device
