"""The onnx package's light models with weights that matter.

They ship with every parameter a ConstantOfShape of 0.02, so that a result with values swapped is still "right". Here
weights are He-scaled by their fan-in (He et al. 2015), biases and means small, scales and variances about 1, and a
Softmax at the end goes, since it saturates on random logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = tuple(sorted(p.stem.removeprefix("light_") for p in FOLDER.glob("light_*.onnx")))
_ROLES = {
    "BatchNormalization": (None, "scale", "shift", "shift", "scale"),  # x, scale, bias, mean, variance
    "Conv": (None, "weight", "shift"),
    "Gemm": (None, "weight", "shift"),
    "Mul": ("scale", "scale"),
    "Add": ("shift", "shift"),
}


def write(name: str, folder: Path, seed: int = 0) -> Path:
    """Write light model ``name`` (as in `NAMES`) with random parameters and return the file's path."""
    model = onnx.load(FOLDER / f"light_{name}.onnx")
    randomize(model, np.random.default_rng(seed))
    end_at_logits(model)
    model.ir_version = max(model.ir_version, 4)  # from IR 4 on, a weight need not be an input as well
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / f"light_{name}.onnx")
    return folder / f"light_{name}.onnx"


def randomize(model: ModelProto, rng: np.random.Generator) -> None:
    """Replace every ConstantOfShape by an initializer of random values that suit its use."""
    graph = model.graph
    shapes = {t.name: t for t in graph.initializer}
    made = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "ConstantOfShape" and n.input[0] in shapes}
    roles = _roles(list(graph.node))
    kept = [n for n in graph.node if n.output[0] not in made]
    read = {i for n in kept for i in n.input}
    tensors = [t for t in graph.initializer if t.name in read]
    for name in (t for t in made if t in read):
        shape = tuple(int(n) for n in numpy_helper.to_array(shapes[made[name]]))
        tensors.append(numpy_helper.from_array(_values(roles.get(name, ""), shape, rng), name))
    inputs = [i for i in graph.input if i.name not in shapes]
    for field, items in ((graph.node, kept), (graph.initializer, tensors), (graph.input, inputs)):
        del field[:]
        field.extend(items)


def _roles(nodes: list[NodeProto]) -> dict[str, str]:
    """What each tensor is to the operation that reads it, looking through Unsqueeze."""
    out: dict[str, str] = {}
    for n in reversed(nodes):
        if n.op_type == "Unsqueeze" and n.output[0] in out:
            out[n.input[0]] = out[n.output[0]]
        for tensor, role in zip(n.input, _ROLES.get(n.op_type, ())):
            if role:
                out[tensor] = role
    return out


def _values(role: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if role == "weight":
        x = rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
    elif role == "shift":
        x = rng.standard_normal(shape) * 0.1
    else:
        x = rng.uniform(0.5, 1.5, shape)
    return x.astype(np.float32)


def end_at_logits(model: ModelProto) -> None:
    """Drop a final Softmax."""
    graph = model.graph
    if graph.node[-1].op_type == "Softmax":
        logits = graph.node[-1].input[0]
        del graph.node[-1]
        graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info(logits, onnx.TensorProto.FLOAT, None))
