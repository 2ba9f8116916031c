"""Model files that must be refused: each with one ModelError that says where, why and what to try."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tapestry.errors import ModelError
from tapestry.lift import lift, read_weight
from tests.support.small_models import net

F = TensorProto.FLOAT


def make(nodes, inputs, outputs, inits=(), *, opset=18, values=(), functions=(), domains=()) -> onnx.ModelProto:
    info = [helper.make_tensor_value_info(n, t, s) for n, t, s in inputs]
    outs = [helper.make_tensor_value_info(n, t, s) for n, t, s in outputs]
    more = [helper.make_tensor_value_info(n, t, s) for n, t, s in values]
    graph = helper.make_graph(nodes, "g", info, outs, list(inits), value_info=more)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))


def save(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def refused(path: Path, *says: str, **options) -> ModelError:
    with pytest.raises(ModelError) as caught:
        lift(path, **options)
    message = caught.value.text()
    for text in says:
        assert text in message, message
    assert "Traceback" not in message
    return caught.value


ADD = helper.make_node("Add", ["x", "w"], ["y"], name="the_add")
X, Y = ("x", F, [2, 3]), ("y", F, [2, 3])


def external(**fields: str) -> TensorProto:
    t = TensorProto(name="w", data_type=F, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in fields.items():
        t.external_data.add(key=key.rstrip("_"), value=value)
    return t


# --- the file itself


def test_missing_file(tmp_path):
    refused(tmp_path / "none.onnx", "cannot read the model", "none.onnx")


@pytest.mark.parametrize("data", [b"", b"hello, world, this is not a protobuf", b"\x00" * 100, bytes(range(7, 255, 4))])
def test_not_a_protobuf(tmp_path, data):
    (tmp_path / "m.onnx").write_bytes(data)
    refused(tmp_path / "m.onnx", "m.onnx")


def test_truncated_file(tmp_path):
    whole = make([ADD], [X], [Y], [numpy_helper.from_array(np.ones((2, 3), np.float32), "w")]).SerializeToString()
    for size in range(1, len(whole), 7):
        (tmp_path / "m.onnx").write_bytes(whole[:size])
        refused(tmp_path / "m.onnx")


def test_flipped_bytes_never_crash(tmp_path):
    """Any mutation is either refused with a ModelError or lifts; nothing else ever happens."""
    whole = make([ADD], [X], [Y], [numpy_helper.from_array(np.ones((2, 3), np.float32), "w")]).SerializeToString()
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        (tmp_path / "m.onnx").write_bytes(bytes(data))
        with contextlib.suppress(ModelError):
            lift(tmp_path / "m.onnx")


def test_no_outputs(tmp_path):
    refused(save(make([ADD], [X, ("w", F, [2, 3])], []), tmp_path), "no graph")


# --- structure


def test_cycle(tmp_path):
    nodes = [helper.make_node("Add", ["x", "b"], ["a"], name="first"), helper.make_node("Relu", ["a"], ["b"], name="second")]
    refused(save(make(nodes, [X], [("b", F, [2, 3])]), tmp_path), "cycle", "first", "second", "->")


def test_duplicate_value_name(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="one"), helper.make_node("Abs", ["x"], ["y"], name="two")]
    refused(save(make(nodes, [X], [Y]), tmp_path), "duplicate value name", "'two'", "'one'", "'y'")


def test_duplicate_with_input(tmp_path):
    refused(save(make([helper.make_node("Relu", ["x"], ["x"])], [X], [X]), tmp_path), "duplicate value name", "'x'")


def test_undefined_name(tmp_path):
    refused(save(make([ADD], [X], [Y]), tmp_path), "undefined value name", "the_add", "'w'")


def test_undefined_output(tmp_path):
    refused(save(make([helper.make_node("Relu", ["x"], ["z"])], [X], [Y]), tmp_path), "undefined value name", "'y'")


def test_unknown_domain(tmp_path):
    node = helper.make_node("GroupNorm", ["x", "x"], ["y"], domain="com.microsoft", name="fused")
    refused(
        save(make([node], [X], [Y], domains=["com.microsoft"]), tmp_path), "unknown operator domain", "fused", "com.microsoft"
    )


def test_unknown_operator(tmp_path):
    refused(
        save(make([helper.make_node("Frobnicate", ["x"], ["y"])], [X], [Y]), tmp_path), "unknown operator", "Frobnicate", "'y'"
    )


def test_unknown_opset(tmp_path):
    refused(save(make([helper.make_node("Relu", ["x"], ["y"])], [X], [Y], opset=999), tmp_path), "opset", "999")


def test_recursive_function(tmp_path):
    body = [helper.make_node("F", ["a"], ["b"], domain="own")]
    f = helper.make_function("own", "F", ["a"], ["b"], body, [helper.make_opsetid("own", 1)])
    model = make([helper.make_node("F", ["x"], ["y"], domain="own")], [X], [Y], functions=[f], domains=["own"])
    refused(save(model, tmp_path), "calls itself", "F")


def test_unsorted_nodes_are_sorted(tmp_path):
    nodes = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Abs", ["x"], ["a"])]
    graph = lift(save(make(nodes, [X], [Y]), tmp_path)).graph
    assert [op.outs for op in graph.ops] == [("a",), ("y",)]


# --- dtypes and shapes


def test_shape_contradiction(tmp_path):
    refused(save(make([ADD], [X, ("w", F, [2, 4])], [Y]), tmp_path), "contradict", "the_add")


def test_a_size_that_the_model_cannot_have_is_named_with_its_symbol(tmp_path):
    """77 positions in the file, 128 tokens asked for."""
    nodes = [
        helper.make_node("Shape", ["ids"], ["n"], start=1, end=2),
        helper.make_node("Slice", ["table", "zero", "n"], ["positions"]),
        helper.make_node("Gather", ["words", "ids"], ["embedded"]),
        helper.make_node("Add", ["embedded", "positions"], ["y"], name="the_add"),
    ]
    weights = {"table": np.ones((77, 4), np.float32), "words": np.ones((9, 4), np.float32), "zero": np.zeros(1, np.int64)}
    stored = [numpy_helper.from_array(a, n) for n, a in weights.items()]
    path = save(make(nodes, [("ids", TensorProto.INT64, ["batch", "sequence"])], [("y", F, None)], stored), tmp_path)
    for shapes in ({"ids": "2x128"}, {"batch": 2, "sequence": 128}):
        with pytest.raises(ModelError) as e:
            lift(path, shapes)
        assert "the_add" in e.value.where and "sequence is 128" in e.value.why and "'positions' has 77" in e.value.why
        assert e.value.hint == "--shape sequence=77 or less: the file holds no more"
    assert lift(path, {"ids": "2x77"}).shapes["sequence"] == 77


def test_dtype_contradiction(tmp_path):
    refused(save(make([ADD], [X, ("w", TensorProto.INT64, [2, 3])], [Y]), tmp_path), "contradict", "the_add")


def test_sizes_of_the_example_that_was_exported(tmp_path, caplog):
    """What the file declares may be stale."""
    nodes = [helper.make_node("Relu", ["x"], ["h"], name="the_relu"), helper.make_node("Abs", ["h"], ["y"])]
    model = make(nodes, [("x", F, ["n", 3])], [("y", F, [5, 3])], values=[("h", F, [5, 3])])
    graph = lift(save(model, tmp_path), {"n": 7}).graph
    assert graph.tensors["y"].shape == (7, 3) and "'h' is declared [5, 3], computed [7, 3]" in caplog.text


@pytest.mark.parametrize("version", [0, -1, 1 << 62, -(1 << 63)])
def test_an_opset_that_is_none(version, tmp_path):
    model = make([helper.make_node("Relu", ["x"], ["y"])], [X], [Y])
    model.opset_import[0].version = version
    refused(save(model, tmp_path), "unknown opset", str(version))


def test_declared_dtype_contradiction(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["h"], name="the_relu"), helper.make_node("Abs", ["h"], ["y"])]
    model = make(nodes, [X], [Y], values=[("h", TensorProto.INT32, [2, 3])])
    refused(save(model, tmp_path), "dtypes contradict", "the_relu", "INT32", "FLOAT")


def test_channels_of_a_convolution(tmp_path):
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv")
    model = make([node], [("x", F, [1, 3, 8, 8]), ("w", F, [4, 2, 3, 3])], [("y", F, None)])
    refused(save(model, tmp_path), "conv")


def test_a_window_larger_than_what_it_slides_over(tmp_path):
    """Its size would be negative, and onnx's inference ends the process where a Slice reads that."""
    node = helper.make_node("MaxPool", ["x"], ["p"], name="pool", kernel_shape=[9, 1])
    after = helper.make_node("Slice", ["p", "from", "to", "axes"], ["y"])
    inits = [numpy_helper.from_array(np.array([k]), n) for n, k in (("from", 0), ("to", 9), ("axes", 2))]
    for nodes in ([node], [node, after]):
        model = make(nodes, [("x", F, [1, 3, 4, 8])], [(nodes[-1].output[0], F, None)], inits[: 3 * (len(nodes) - 1)])
        refused(save(model, tmp_path), "pool", "[1, 3, -4, 8]")


@pytest.mark.parametrize("dtype", [99, TensorProto.UNDEFINED])
def test_unknown_dtype(tmp_path, dtype):
    model = make([helper.make_node("Identity", ["x"], ["y"])], [("x", F, [2])], [("y", F, [2])], opset=21)
    model.graph.input[0].type.tensor_type.elem_type = dtype
    refused(save(model, tmp_path), "", "x")


def test_map_input(tmp_path):
    model = make([helper.make_node("Identity", ["x"], ["y"])], [("x", F, [2])], [("y", F, [2])])
    model.graph.input[0].type.map_type.key_type = TensorProto.STRING
    model.graph.input[0].type.map_type.value_type.tensor_type.elem_type = F
    refused(save(model, tmp_path), "map", "'x'")


# --- symbols


def symbolic(tmp_path) -> Path:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    return save(make(nodes, [("x", F, ["batch", 3, "len"])], [("y", F, ["batch", 3, "len"])]), tmp_path)


def test_unbound_symbol(tmp_path):
    refused(symbolic(tmp_path), "batch", "len", "x[0]", "x[2]", "--shape batch=8")


def test_unknown_symbol(tmp_path):
    refused(symbolic(tmp_path), "unknown name", "'bach'", "batch", shapes={"bach": 2})


def test_contradicting_sizes(tmp_path):
    refused(symbolic(tmp_path), "contradict", "x", shapes={"batch": 2, "x": "3x3x5"})
    refused(symbolic(tmp_path), "contradict", shapes={"x": "2x4x5"})
    refused(symbolic(tmp_path), "rank", shapes={"x": [2, 3]})


@pytest.mark.parametrize("size", [-1, "many", "2x", ""])
def test_sizes_are_not_negative(tmp_path, size):
    refused(symbolic(tmp_path), "at least 0", shapes={"batch": size, "len": 4})


# --- external data


@pytest.mark.parametrize(
    "fields",
    [
        {"location": "../w.bin"},
        {"location": "sub/../../w.bin"},
        {"location": "sub/../w.bin"},
        {"location": "/dev/zero"},
        {"location": ""},
        {"location": "."},
        {"location": "w.bin/"},
        {"location": "a//w.bin"},
        {"location": "*/_ORT_MEM_ADDR_/*"},
        {"location": "w.bin\0x"},
        {"location": "none.bin"},
        {"location": "w.bin", "offset": "100"},
        {"location": "w.bin", "offset": "-1"},
        {"location": "w.bin", "offset": str(2**64 - 8), "length": "24"},
        {"location": "w.bin", "length": "16"},
        {"location": "w.bin", "length": str(2**33)},
        {"location": "w.bin", "offset": "8", "length": "24"},
        {"location": "w.bin", "basepath": "/"},
        {"location": "w.bin", "__class__": "x"},
        {"location": "w.bin", "checksum": "0" * 40},
        {"location": "link.bin"},
        {"location": "outside.bin"},
        {"location": "linked/w.bin"},
        {"location": "hard.bin"},
        {"location": "fifo"},
        {"location": "sub"},
        {"location": "..\\w.bin"},
        {"location": "w.bin", "offset": "١"},
    ],
    ids=str,
)
def test_attack_matrix(tmp_path, fields):
    """Every row of the matrix in notes/runtime_and_safety.md is refused."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "w.bin", folder / "w.bin", folder / "sub" / "w.bin", folder / "other.bin"):
        place.write_bytes(np.ones((2, 3), np.float32).tobytes())
    (folder / "link.bin").symlink_to(folder / "w.bin")
    (folder / "outside.bin").symlink_to(tmp_path / "w.bin")
    (folder / "linked").symlink_to(folder / "sub")
    os.link(folder / "other.bin", folder / "hard.bin")
    os.mkfifo(folder / "fifo")
    refused(save(make([ADD], [X], [Y], [external(**fields)]), folder), "'w'")


@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "", "a/../../w.bin"])
def test_unsafe_paths_without_weights(tmp_path, location):
    refused(save(make([ADD], [X], [Y], [external(location=location)]), tmp_path), "cannot read external data", weights=False)


def test_absent_data_without_weights(tmp_path):
    path = save(make([ADD], [X], [Y], [external(location="absent.bin")]), tmp_path)
    refused(path, "does not exist", "--no-weights")
    weight = lift(path, weights=False).graph.weights["w"]
    assert (weight.file, weight.length, weight.sha256) == ("absent.bin", 24, "")


def test_good_external_data(tmp_path):
    data = np.arange(8, dtype=np.float32)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "w.bin").write_bytes(data.tobytes())
    digest = hashlib.sha1(data[2:].tobytes()).hexdigest()
    lifted = lift(
        save(make([ADD], [X], [Y], [external(location="d/w.bin", offset="8", length="24", checksum=digest)]), tmp_path)
    )
    weight, tensor = lifted.graph.weights["w"], lifted.graph.tensors["w"]
    assert weight.sha256 == hashlib.sha256(data[2:].tobytes()).hexdigest()
    assert np.array_equal(read_weight(lifted.model, weight, tensor), data[2:].reshape(2, 3))
    assert np.array_equal(read_weight(lifted.model, weight, tensor, ((1, 2), (0, 2))), [[5, 6]])


def test_misaligned_offset_is_copied(tmp_path):
    data = b"abc" + np.arange(6, dtype=np.float32).tobytes()
    (tmp_path / "w.bin").write_bytes(data)
    lifted = lift(save(make([ADD], [X], [Y], [external(location="w.bin", offset="3")]), tmp_path))
    found = read_weight(lifted.model, lifted.graph.weights["w"], lifted.graph.tensors["w"])
    assert found.flags.aligned and np.array_equal(found.reshape(-1), np.arange(6))


# --- data inside the protobuf


def broken(change: Callable[[TensorProto], object]) -> TensorProto:
    t = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    change(t)
    return t


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.float_data.append(1.0),
        lambda t: setattr(t, "raw_data", t.raw_data[:-4]),
        lambda t: t.dims.append(2**40),
        lambda t: t.dims.__setitem__(0, -2),
        lambda t: setattr(t, "data_type", 99),
        lambda t: t.dims.extend([2**31, 2**31]),
        lambda t: setattr(t, "data_type", 0),
        lambda t: t.external_data.add(key="location", value="w.bin"),
    ],
)
def test_bad_inline_data(tmp_path, change):
    refused(save(make([ADD], [X], [Y], [broken(change)]), tmp_path), "'w'")


def test_external_and_raw_data(tmp_path):
    t = external(location="w.bin")
    t.raw_data = b"1234"
    (tmp_path / "w.bin").write_bytes(bytes(24))
    refused(save(make([ADD], [X], [Y], [t]), tmp_path), "'w'")


# --- bombs


def scalar(name: str, value: int) -> TensorProto:
    return numpy_helper.from_array(np.array(value, np.int64), name)


def test_range_bomb(tmp_path):
    """A few bytes that ask for 10^12 elements: lifting neither computes them nor takes memory for them."""
    nodes = [helper.make_node("Range", ["a", "b", "c"], ["r"]), helper.make_node("ReduceSum", ["r"], ["y"], keepdims=0)]
    model = make(nodes, [], [("y", TensorProto.INT64, [])], [scalar("a", 0), scalar("b", 10**12), scalar("c", 1)])
    lifted = lift(save(model, tmp_path))
    assert sum(a.nbytes for a in lifted.constants.values()) < 1 << 20


def test_concat_bomb(tmp_path):
    """Sixty doublings: 2^60 elements, as nobody's constant."""
    nodes, name = [], "a"
    for k in range(60):
        nodes.append(helper.make_node("Concat", [name, name], [f"c{k}"], axis=0))
        name = f"c{k}"
    nodes.append(helper.make_node("ReduceSum", [name], ["y"], keepdims=0))
    model = make(nodes, [], [("y", TensorProto.INT64, [])], [numpy_helper.from_array(np.ones(1, np.int64), "a")])
    lifted = lift(save(model, tmp_path))
    assert sum(a.nbytes for a in lifted.constants.values()) <= 1 << 21


@pytest.mark.parametrize("op", ["ConstantOfShape", "Expand", "Tile"])
def test_shape_bombs(tmp_path, op):
    shape = numpy_helper.from_array(np.array([10**6, 10**6], np.int64), "shape")
    one = numpy_helper.from_array(np.ones((1, 1), np.float32), "one")
    node = helper.make_node(op, ["shape"] if op == "ConstantOfShape" else ["one", "shape"], ["h"])
    model = make([node, helper.make_node("ReduceMax", ["h"], ["y"], keepdims=0)], [], [("y", F, [])], [shape, one])
    assert not any(a.nbytes > 1 << 20 for a in lift(save(model, tmp_path)).constants.values())


def test_rotary_cache_of_batch_one(tmp_path):
    """An exporter's rewrite gives a (1, S, d/2) cache where the specification wants (B, S, d/2)."""
    node = helper.make_node("RotaryEmbedding", ["x", "c", "s"], ["y"], name="rope")
    shapes = [("x", F, [2, 4, 5, 8]), ("c", F, [1, 5, 4]), ("s", F, [1, 5, 4])]
    error = refused(save(make([node], shapes, [("y", F, [2, 4, 5, 8])], opset=23), tmp_path), "cos/sin cache", "rope")
    assert "batch 1" in error.hint


@pytest.mark.parametrize(
    ("op", "at"), [("Gather", [0, 3]), ("Gather", [-4]), ("Gather", [1, 2, 3]), ("GatherElements", [[0], [3]])]
)
def test_a_known_index_outside_is_refused(op, at, tmp_path):
    model = net(
        [helper.make_node(op, ["x", "at"], ["y"], name="pick")],
        {"x": (TensorProto.FLOAT, [3, 2])},
        {"y": TensorProto.FLOAT},
        {"at": np.array(at)},
    )
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"'pick'.*an index outside of what it indexes\n.*-?[34] where there are 3 elements"):
        lift(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "said", [{"low": 2.0, "high": 1.0}, {"high": np.inf}, {"low": np.nan}, {"scale": 0.0}, {"scale": -1.0}, {"mean": np.nan}]
)
def test_random_numbers_of_no_distribution(tmp_path, said):
    """onnxruntime aborts the process on some of these, in branches too."""
    op = "RandomUniform" if {"low", "high"} & set(said) else "RandomNormal"
    draw = helper.make_node(op, [], ["y"], name="the_draw", shape=[2, 3], **said)
    branches = [
        helper.make_graph([n], "b", [], [helper.make_tensor_value_info("y", F, [2, 3])])
        for n in (draw, helper.make_node(op, [], ["y"], shape=[2, 3]))
    ]
    either = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    for node, given in ((draw, []), (either, [("c", TensorProto.BOOL, [])])):
        refused(save(make([node], given, [Y]), tmp_path), f"'the_draw' ({op})", "no distribution", "finite numbers")
