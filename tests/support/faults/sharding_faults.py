"""A rightly annotated model, and everything that can be done to its annotations: (what, code of the finding, change)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

N = helper.make_node
Groups = Mapping[int, list[int]]


def model() -> onnx.ModelProto:
    """An MLP with a residual, an outer sum, a convolution with normalisation and pooling, a ranking; all on 4 devices."""
    rng = np.random.default_rng(3)
    f = lambda *s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    nodes = [
        N("MatMul", ["x", "w1"], ["h"], "up"), N("Relu", ["h"], ["r"], "act"), N("MatMul", ["r", "w2"], ["d"], "down"), N("Add", ["d", "x"], ["y"], "skip"),
        N("Add", ["col", "row"], ["o"], "outer"), N("Conv", ["img", "k", "kb"], ["c"], "conv", pads=[1, 1, 1, 1]), N("LayerNormalization", ["c", "g"], ["n"], "norm"),
        N("MaxPool", ["n"], ["p"], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]), N("TopK", ["z", "k8"], ["q", "qi"], "ranking", axis=1),
        N("ReduceSum", ["z", "one"], ["t"], "total", keepdims=0),
    ]  # fmt: skip
    ins = {"x": ["batch", 16], "col": [8, 1], "row": [1, 8], "img": [2, 4, 8, 8], "z": [4, 8]}
    outs = {"y": ["batch", 16], "o": [8, 8], "p": [2, 4, 4, 4], "q": [4, 8], "t": [4]}
    weights = {
        "w1": f(16, 32),
        "w2": f(32, 16),
        "k": f(4, 4, 3, 3),
        "kb": f(4),
        "g": f(8),
        "one": np.array([1], np.int64),
        "k8": np.array([8], np.int64),
    }
    info = lambda d: [helper.make_tensor_value_info(n, T.FLOAT, s) for n, s in d.items()]  # noqa: E731
    graph = helper.make_graph(nodes, "g", info(ins), info(outs), [numpy_helper.from_array(a, n) for n, a in weights.items()])
    m = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=11)
    m.configuration.add(name="four", num_devices=4, device=[f"cpu:{i}" for i in range(4)])
    halves = {-1: [0, 1], -2: [2, 3]}
    put(m, "up", "x", {}, [-1], {-1: [0, 1, 2, 3]})
    put(m, "up", "w1", {1: 4})
    put(m, "up", "h", {1: 4})
    put(m, "act", "r", {1: 4})
    put(m, "down", "r", {1: 4})
    put(m, "down", "w2", {0: 4})
    put(m, "down", "d", {0: 4})
    put(m, "skip", "x", {0: 4})
    put(m, "skip", "d", {0: 4})
    put(m, "outer", "col", {0: 2}, [-1, -2], halves)
    put(m, "outer", "row", {1: 2}, [-1, -2], {-1: [0, 2], -2: [1, 3]})
    put(m, "outer", "o", {0: 2, 1: 2})
    put(m, "conv", "img", {2: 2}, [-1, -2], halves)
    put(m, "conv", "c", {2: 2}, [-1, -2], halves)
    put(m, "norm", "c", {2: 2}, [-1, -2], halves)
    put(m, "ranking", "z", {0: 4})
    put(m, "total", "z", {1: 4})
    put(m, "total", "t", {}, [-1], {-1: [0, 1, 2, 3]})
    for name, stage in {"up": 0, "act": 0, "down": 1, "skip": 2}.items():
        node(m, name).device_configurations[0].pipeline_stage = stage
    return m


def node(m: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in m.graph.node if n.name == name)


def spec(m: onnx.ModelProto, name: str, tensor: str) -> onnx.ShardingSpecProto:
    return next(s for s in node(m, name).device_configurations[0].sharding_spec if s.tensor_name == tensor)


def put(
    m: onnx.ModelProto,
    name: str,
    tensor: str,
    cuts: Mapping[int, int],
    devices: list[int] | None = None,
    groups: Groups | None = None,
) -> None:
    """Add a spec, or replace the one of that tensor."""
    n = node(m, name)
    c = n.device_configurations[0] if n.device_configurations else n.device_configurations.add(configuration_id="four")
    s = next((s for s in c.sharding_spec if s.tensor_name == tensor), None) or c.sharding_spec.add()
    s.Clear()
    s.tensor_name = tensor
    s.device.extend(range(int(np.prod(list(cuts.values())))) if devices is None else devices)
    for key, value in (groups or {}).items():
        s.index_to_device_group_map.add(key=key, value=value)
    for axis, parts in cuts.items():
        s.sharded_dim.add(axis=axis).simple_sharding.add(num_shards=parts)


def first(m: onnx.ModelProto, name: str = "up", tensor: str = "w1"):
    return spec(m, name, tensor).sharded_dim[0].simple_sharding[0]


Change = Callable[[onnx.ModelProto], object]
FAULTS: list[tuple[str, str, Change]] = [
    # the model
    ("IR version 10", "ir-version", lambda m: setattr(m, "ir_version", 10)),
    ("configuration without a name", "configuration-unnamed", lambda m: m.configuration[0].ClearField("name")),
    ("two configurations of one name", "configuration-duplicate", lambda m: m.configuration.add(name="four", num_devices=4)),
    ("num_devices not set", "num-devices-unset", lambda m: m.configuration[0].ClearField("num_devices")),
    ("no devices at all", "num-devices-bad", lambda m: setattr(m.configuration[0], "num_devices", 0)),
    ("3 names of 4 devices", "device-names", lambda m: m.configuration[0].device.pop()),
    ("mesh of 6 devices in our metadata", "mesh", lambda m: m.metadata_props.add(key="tapestry.mesh", value="d0=2,d1=3")),
    # nodes
    ("configuration_id not set", "configuration-id-unset", lambda m: node(m, "up").device_configurations[0].ClearField("configuration_id")),
    ("unknown configuration_id", "configuration-unknown", lambda m: setattr(node(m, "up").device_configurations[0], "configuration_id", "eight")),
    ("two annotations for one configuration", "configuration-id-twice", lambda m: node(m, "up").device_configurations.add(configuration_id="four")),
    ("stage -2", "stage-negative", lambda m: setattr(node(m, "up").device_configurations[0], "pipeline_stage", -2)),
    ("stage decreases along an edge", "stage-back", lambda m: setattr(node(m, "skip").device_configurations[0], "pipeline_stage", 0)),
    # tensors
    ("spec without a tensor", "tensor-unset", lambda m: spec(m, "up", "w1").ClearField("tensor_name")),
    ("tensor that does not exist", "tensor-foreign", lambda m: setattr(spec(m, "up", "w1"), "tensor_name", "nothing")),
    ("tensor of another node", "tensor-foreign", lambda m: setattr(spec(m, "up", "w1"), "tensor_name", "w2")),
    ("two specs for one tensor", "tensor-twice", lambda m: node(m, "up").device_configurations[0].sharding_spec.add().CopyFrom(spec(m, "up", "w1"))),
    # devices
    ("empty list of devices", "devices-empty", lambda m: spec(m, "up", "w1").ClearField("device")),
    ("device 99 of 4", "device-range", lambda m: spec(m, "up", "w1").device.__setitem__(2, 99)),
    ("3 devices for 4 parts", "devices-count", lambda m: spec(m, "up", "w1").device.pop()),
    ("a device with two parts", "device-two-parts", lambda m: spec(m, "up", "w1").device.__setitem__(2, 0)),
    ("unknown group key", "group-unknown", lambda m: spec(m, "up", "x").device.__setitem__(0, -7)),
    ("group without a key", "group-key-unset", lambda m: spec(m, "up", "x").index_to_device_group_map[0].ClearField("key")),
    ("group key twice", "group-key-twice", lambda m: spec(m, "up", "x").index_to_device_group_map.add(key=-1, value=[1])),
    ("empty group", "group-empty", lambda m: spec(m, "up", "x").index_to_device_group_map[0].ClearField("value")),
    ("device twice in a group", "group-device-twice", lambda m: spec(m, "up", "x").index_to_device_group_map[0].value.append(3)),
    ("device 4 of 4 in a group", "group-device-range", lambda m: spec(m, "up", "x").index_to_device_group_map[0].value.append(4)),
    # axes
    ("axis not set", "axis-unset", lambda m: spec(m, "up", "w1").sharded_dim[0].ClearField("axis")),
    ("axis 7 of rank 2", "axis-range", lambda m: setattr(spec(m, "up", "w1").sharded_dim[0], "axis", 7)),
    ("axis -3 of rank 2", "axis-range", lambda m: setattr(spec(m, "up", "w1").sharded_dim[0], "axis", -3)),
    ("an axis twice, once from the back", "axis-twice", lambda m: spec(m, "up", "w1").sharded_dim.add(axis=-1).simple_sharding.add(num_shards=1)),
    ("sharded_dim without sharding", "sharding-empty", lambda m: spec(m, "up", "w1").sharded_dim[0].ClearField("simple_sharding")),
    ("num_shards not set", "shards-unset", lambda m: first(m).ClearField("num_shards")),
    ("num_shards 0", "shards-bad", lambda m: setattr(first(m), "num_shards", 0)),
    ("dim_value 31 of 32", "dim-value", lambda m: setattr(first(m), "dim_value", 31)),
    ("dim_value -1", "dim-value-bad", lambda m: setattr(first(m), "dim_value", -1)),
    ("unknown dim_param", "dim-param-unknown", lambda m: setattr(first(m, "skip", "x"), "dim_param", "sequence")),
    ("16 parts of 8 cells", "too-many-parts", lambda m: (m.configuration[0].ClearField("device"), setattr(m.configuration[0], "num_devices", 16), put(m, "outer", "o", {0: 16}))),
    ("fused axes of unknown size", "fused-dims", lambda m: spec(m, "up", "w1").sharded_dim[0].simple_sharding.add(num_shards=1)),
    ("fused axes 4 × 9 of 32", "fused-dims", lambda m: (setattr(first(m), "dim_value", 4), spec(m, "up", "w1").sharded_dim[0].simple_sharding.add(num_shards=1, dim_value=9))),
    # meaning
    ("a sum of rows and columns", "agreement", lambda m: put(m, "skip", "d", {1: 4})),
    ("a sum of halves and quarters", "agreement", lambda m: put(m, "skip", "d", {0: 2})),
    ("a sum in another order of devices", "agreement", lambda m: put(m, "skip", "d", {0: 4}, [1, 0, 3, 2])),
    ("an outer sum whose device sets do not meet", "agreement", lambda m: put(m, "outer", "row", {1: 2}, [-1, -2], {-1: [0, 1], -2: [2, 3]})),
    ("a broadcast operand on one device only", "agreement", lambda m: put(m, "outer", "row", {}, [0])),
    ("contracted axes in another order", "contraction", lambda m: put(m, "down", "w2", {0: 4}, [3, 2, 1, 0])),
    ("contracted axes cut 4 and 2 ways", "contraction", lambda m: put(m, "down", "w2", {0: 2})),
    ("channels of image and filter in another order", "contraction", lambda m: (put(m, "conv", "img", {1: 4}), put(m, "conv", "k", {1: 4}, [1, 2, 3, 0]))),
    ("a filter on devices without image", "contraction", lambda m: put(m, "conv", "k", {}, [0])),
    ("scale of a normalisation in another order", "agreement", lambda m: (put(m, "norm", "c", {3: 2}, [0, 1]), put(m, "norm", "g", {0: 2}, [1, 0]))),
    ("a ranking along the cut axis", "not-splittable", lambda m: put(m, "ranking", "z", {1: 4})),
]  # fmt: skip
