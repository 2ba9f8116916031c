"""Building one-operator models, lifting them and evaluating what comes out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tapestry.ir import laws
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.lift import Lifted, lift, read_weight
from tapestry.onnx_eval.ort_session import ort_session
from tapestry.verify.interp import run
from tests.support import paths

SHARED = paths.SHARED / "models"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
EXPORTS = {
    "bert_base": {"s18": 2, "s41": 16},
    "convnext_tiny": {"s99": 2},
    "gpt2": {"s72": 2, "s70": 16, "s43": "s72", "s53": "s70"},
    "llama_tiny": {"s72": 2, "s53": 16},
    "llama_tiny_opset23": {"s72": 1, "s53": 16},
    "mobilenet_v2": {"s31": 2},
    "qwen3_tiny": {"s72": 2, "s53": 16},
    "resnet50": {"s31": 2},
    "t5_small": {"s11": 2, "s53": 16, "s28": 12},
    "unet": {"s77": 2},
    "vit_base": {"s99": 2},
    "whisper_encoder": {"s6": 2},
}
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not there")


def build(nodes, feeds, outputs, consts=None, *, opset=18, ir=8) -> onnx.ModelProto:
    """A model whose outputs' shapes are left to inference."""
    ins = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
    outs = [helper.make_tensor_value_info(o, TensorProto.UNDEFINED, None) for o in outputs]
    inits = [numpy_helper.from_array(np.asarray(a), n) for n, a in (consts or {}).items()]
    graph = helper.make_graph(nodes, "g", ins, outs, inits)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    inferred = onnx.shape_inference.infer_shapes(model)
    types = {v.name: v for v in (*inferred.graph.value_info, *inferred.graph.output)}
    for o in model.graph.output:
        o.type.tensor_type.elem_type = types[o.name].type.tensor_type.elem_type or TensorProto.FLOAT
    return model


def lift_model(model: onnx.ModelProto, folder: Path, shapes=None, **options) -> Lifted:
    """Lift, and check what holds of every Graph: the laws, and that its text reads back as itself."""
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    lifted = lift(path, shapes or {}, **options)
    laws.check(lifted.graph)
    assert parse(to_text(lifted.graph)) == lifted.graph
    return lifted


def evaluate(lifted: Lifted, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    graph = lifted.graph
    data = {n: read_weight(lifted.model, w, graph.tensors[n], constants=lifted.constants) for n, w in graph.weights.items()}
    return run(graph, {**{k: v for k, v in feeds.items() if k in graph.inputs}, **data})


def agree(nodes, feeds, outputs, consts=None, *, opset=18, folder, rtol=1e-4, native=True) -> Graph:
    """Lifted and run by the interpreter, a model gives what onnxruntime gives."""
    model = build(nodes if isinstance(nodes, list) else [nodes], feeds, outputs, consts, opset=opset)
    lifted = lift_model(model, folder)
    session = ort_session(model.SerializeToString())
    want = session.run(list(outputs), feeds)
    got = evaluate(lifted, feeds)
    for name, array in zip(outputs, want, strict=True):
        assert got[name].dtype == array.dtype
        np.testing.assert_allclose(got[name], array, rtol=rtol, atol=1e-5)
    assert not native or all(isinstance(op, Block) for op in lifted.graph.ops)
    return lifted.graph


def data(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def node(op: str, ins: str, outs: str = "y", **attributes) -> onnx.NodeProto:
    return helper.make_node(op, ["" if i == "_" else i for i in ins.split()], outs.split(), **attributes)


def space(op: object) -> str:
    assert isinstance(op, Block)
    return ", ".join(d.name for d in op.dims) + " | " + ", ".join(d.name for d in op.reduce)
