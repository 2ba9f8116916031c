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
from tapestry.errors import ModelError, TapestryError
from tapestry.onnx_eval.value_kinds import is_map, is_sequence

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
            path.write_bytes(_sized(self.model, sizes).SerializeToString())
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
        feeds = {n: _value(v) for n, v in self._named(inputs).items()}
        outputs = self.compiled(feeds).run(feeds)
        return tuple(outputs[o] for o in self.outputs)

    def _named(self, inputs: Any) -> Mapping[str, Any]:
        """Inputs by name.

        Raises:
            TapestryError: there are more than the model's inputs (of which initializers are none: they are part of the plan).
        """
        if is_map(inputs):
            return inputs
        values = list(inputs) if is_sequence(inputs) else [inputs]
        names = [i.name for i in self.inputs]
        if len(values) > len(names):
            why = f"they are {', '.join(names)}" if names else "it has none"
            hint = "an initializer that is an input too keeps its value: take it out of the initializers to feed it"
            raise TapestryError(f"{len(values)} values for {len(names)} inputs", where="the model", why=why, hint=hint)
        return dict(zip(names, values, strict=False))


class TapestryBackend(Backend):
    """onnx's interface to a runtime; ``prepare`` takes the keyword arguments of `tapestry.compile` (``devices=4``)."""

    OPTIONS = frozenset({"devices", "mesh", "topology", "memory", "target", "pins", "layouts", "seed", "time_limit", "stages"})

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        """Compile a model.

        Raises:
            unittest.SkipTest: the model is not supported; says which node, why and what to do.
        """
        if not cls.supports_device(device):
            raise unittest.SkipTest(f"there is no device {device}: plans run on the CPU's logical devices")
        return Prepared(model, {"topology": "cpu"} | {k: v for k, v in kwargs.items() if k in cls.OPTIONS})

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Compile and run once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Any, device: str = "CPU", outputs_info: Sequence[Any] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run one node on given inputs (the newest opset when ``opset_version`` is not given)."""
        node, values = _fed(node, inputs)
        ins = [onnx.helper.make_value_info(n, _type_of(v)) for n, v in values.items()]
        outs = [onnx.helper.make_value_info(o, onnx.TypeProto()) for o in node.output if o]
        graph = onnx.helper.make_graph([node], "node", ins, outs)
        version = int(kwargs.pop("opset_version", onnx.defs.onnx_opset_version()))
        opsets = [onnx.helper.make_opsetid("", version)]
        if node.domain not in ("", "ai.onnx"):
            newest = max((s.since_version for s in _schemas(node.domain)), default=1)
            opsets.append(onnx.helper.make_opsetid(node.domain, newest))
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
    if v is None or is_sequence(v):
        return v
    array = np.asarray(v)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _fed(node: NodeProto, inputs: Any) -> tuple[NodeProto, dict[str, Any]]:
    """The node without the optional inputs for which None is given, and the values of the others by name.

    Raises:
        TapestryError: their number is neither that of the node's inputs nor that of those which have a name.
    """
    named = [i for i in node.input if i]
    if is_map(inputs):
        given = [inputs.get(i) for i in node.input]
    else:
        given = list(inputs) if is_sequence(inputs) else [inputs]
        if len(given) == len(named):
            left = iter(given)
            given = [next(left) if i else None for i in node.input]
        elif len(given) == len(dict.fromkeys(named)):  # a name that is read twice is given once
            once = dict(zip(dict.fromkeys(named), given, strict=True))
            given = [once.get(i) for i in node.input]
    if len(given) != len(node.input):
        where, why = f"node '{node.name}' ({node.op_type})", f"its inputs are {', '.join(node.input)}"
        raise TapestryError(f"{len(given)} values for {len(named)} inputs", where=where, why=why, hint="one each, in order")
    values = {i: _value(v) for i, v in zip(node.input, given, strict=True) if i and v is not None}
    out = NodeProto()
    out.CopyFrom(node)
    out.input[:] = [i if i in values else "" for i in node.input]
    while out.input and not out.input[-1]:
        del out.input[-1]
    return out, values


def _type_of(value: Any) -> onnx.TypeProto:
    """The ONNX type of a value: a tensor, or a sequence of tensors (floats, where it is empty)."""
    if is_sequence(value):
        parts: list[np.ndarray[Any, Any]] = [np.asarray(v) for v in value]
        shape = [None] * parts[0].ndim if parts and len({p.ndim for p in parts}) == 1 else None
        dtype = onnx.helper.np_dtype_to_tensor_dtype(parts[0].dtype) if parts else onnx.TensorProto.FLOAT
        return onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(dtype, shape))
    return onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
