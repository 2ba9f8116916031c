"""Hostile inputs: files that claim to be models or build directories, each made by a function in a folder of its own.

``python -m tests.support.faults.hostile_cases FOLDER LEVEL`` tries the quick or the long ones in one process of limited memory, and prints a
JSON line each.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F = TensorProto.FLOAT
Make = Callable[[Path], Path]
MODELS: dict[str, Make] = {}
BUILDS: dict[str, Make] = {}
LONG = {"a_million_nodes", "resigned_graph_deep"}  # seconds each; the others take hundredths
MEMORY = 4 << 30  # bytes of address space; importing everything takes about 2
N = helper.make_node


def hostile(table: dict[str, Make]) -> Callable[[Make], Make]:
    """Register a case."""

    def put(f: Make) -> Make:
        table[f.__name__] = f
        return f

    return put


def model(
    nodes, inputs=(("x", F, [2, 3]),), outputs=(("y", F, None),), inits=(), functions=(), domains=(), opset=18
) -> onnx.ModelProto:
    ins = [helper.make_tensor_value_info(*i) for i in inputs]
    outs = [helper.make_tensor_value_info(*o) for o in outputs]
    graph = helper.make_graph(list(nodes), "g", ins, outs, list(inits))
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))


def save(m: onnx.ModelProto, folder: Path) -> Path:
    (folder / "m.onnx").write_bytes(m.SerializeToString())
    return folder / "m.onnx"


def ints(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def external(folder: Path, **fields: str) -> Path:
    """A model whose weight is outside, with a good file of 24 bytes and several bad ones beside it."""
    data = np.ones(6, np.float32).tobytes()
    for place in ("w.bin", "other.bin"):
        (folder / place).write_bytes(data)
    (folder.parent / "above.bin").write_bytes(data)
    t = TensorProto(name="w", data_type=F, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in fields.items():
        t.external_data.add(key=key, value=value)
    return save(model([N("Add", ["x", "w"], ["y"])], inits=[t]), folder)


# external data


for _name, _fields in {
    "absolute_path": {"location": "/etc/passwd"}, "parent_folder": {"location": "../above.bin"}, "hidden_parent": {"location": "sub/../../above.bin"},
    "device": {"location": "/dev/zero"}, "nul_byte": {"location": "w.bin\0.txt"}, "no_location": {"location": ""}, "folder_as_data": {"location": "."},
    "memory_marker": {"location": "*/_ORT_MEM_ADDR_/*"}, "length_too_long": {"location": "w.bin", "length": str(2**33)}, "length_too_short": {"location": "w.bin", "length": "16"},
    "offset_negative": {"location": "w.bin", "offset": "-4"}, "offset_wraps": {"location": "w.bin", "offset": str(2**64 - 8), "length": "24"},
    "offset_beyond": {"location": "w.bin", "offset": "1000"}, "offset_overlong_number": {"location": "w.bin", "offset": "9" * 5000},
    "length_not_a_number": {"location": "w.bin", "length": "0x18"}, "wrong_checksum": {"location": "w.bin", "checksum": "0" * 40}, "unknown_key": {"location": "w.bin", "__class__": "x"},
}.items():  # fmt: skip
    MODELS[f"external_{_name}"] = lambda folder, fields=_fields: external(folder, **fields)


@hostile(MODELS)
def external_symlink(folder: Path) -> Path:
    path = external(folder, location="link.bin")
    (folder / "link.bin").symlink_to(folder / "w.bin")
    return path


@hostile(MODELS)
def external_symlinked_folder(folder: Path) -> Path:
    path = external(folder, location="sub/w.bin")
    (folder / "sub").symlink_to(folder)
    return path


@hostile(MODELS)
def external_hard_link(folder: Path) -> Path:
    path = external(folder, location="hard.bin")
    os.link(folder / "other.bin", folder / "hard.bin")
    return path


@hostile(MODELS)
def external_fifo(folder: Path) -> Path:
    path = external(folder, location="fifo.bin")
    os.mkfifo(folder / "fifo.bin")
    return path


@hostile(MODELS)
def external_socket(folder: Path) -> Path:
    path = external(folder, location="socket.bin")
    os.mknod(folder / "socket.bin", 0o600 | stat.S_IFSOCK)
    return path


@hostile(MODELS)
def external_overlap(folder: Path) -> Path:
    """Two weights that share some of their bytes."""
    (folder / "w.bin").write_bytes(np.ones(12, np.float32).tobytes())
    found = [TensorProto(name=n, data_type=F, dims=[2, 3], data_location=TensorProto.EXTERNAL) for n in "vw"]
    for t, offset in zip(found, (0, 16), strict=True):
        for key, value in {"location": "w.bin", "offset": str(offset), "length": "24"}.items():
            t.external_data.add(key=key, value=value)
    return save(model([N("Add", ["x", "v"], ["z"]), N("Add", ["z", "w"], ["y"])], inits=found), folder)


@hostile(MODELS)
def data_in_segments(folder: Path) -> Path:
    t = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    t.segment.begin, t.segment.end = 0, 6
    return save(model([N("Add", ["x", "w"], ["y"])], inits=[t]), folder)


# the file itself


@hostile(MODELS)
def model_is_a_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "m.onnx")
    return folder / "m.onnx"


@hostile(MODELS)
def model_is_endless(folder: Path) -> Path:
    return Path("/dev/zero")


@hostile(MODELS)
def model_is_a_folder(folder: Path) -> Path:
    return folder


@hostile(MODELS)
def model_is_larger_than_memory(folder: Path) -> Path:
    path = folder / "m.onnx"
    with open(path, "wb") as f:
        f.truncate(1 << 40)  # no bytes on the disk
    return path


@hostile(MODELS)
def model_name_with_a_nul(folder: Path) -> Path:
    return Path(str(folder / "m\0.onnx"))


@hostile(MODELS)
def invalid_utf8(folder: Path) -> Path:
    raw = model([N("Relu", ["x"], ["yyyy"])], outputs=[("yyyy", F, [2, 3])]).SerializeToString()
    (folder / "m.onnx").write_bytes(raw.replace(b"yyyy", b"\xff\xfe\x80y"))
    return folder / "m.onnx"


# shapes


@hostile(MODELS)
def constant_of_shape_of_10_to_the_18(folder: Path) -> Path:
    return save(
        model([N("ConstantOfShape", ["s"], ["c"]), N("Add", ["c", "c"], ["y"])], inputs=[], inits=[ints("s", 10**9, 10**9)]),
        folder,
    )


@hostile(MODELS)
def huge_input(folder: Path) -> Path:
    return save(model([N("Relu", ["x"], ["y"])], inputs=[("x", F, [2**62, 2**62])]), folder)


@hostile(MODELS)
def negative_dims(folder: Path) -> Path:
    return save(model([N("Relu", ["x"], ["y"])], inputs=[("x", F, [-4, 3])]), folder)


@hostile(MODELS)
def reshape_overflow(folder: Path) -> Path:
    return save(model([N("Reshape", ["x", "s"], ["y"])], inits=[ints("s", 2**32, 2**32, 6)]), folder)


@hostile(MODELS)
def weight_of_huge_dims(folder: Path) -> Path:
    return save(
        model([N("Add", ["x", "w"], ["y"])], inits=[TensorProto(name="w", data_type=F, dims=[2**40, 2**40], raw_data=b"1234")]),
        folder,
    )


@hostile(MODELS)
def raw_and_float_data(folder: Path) -> Path:
    t = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    t.float_data.append(2.0)
    return save(model([N("Add", ["x", "w"], ["y"])], inits=[t]), folder)


@hostile(MODELS)
def tile_of_10_to_the_18(folder: Path) -> Path:
    return save(model([N("Tile", ["x", "n"], ["t"]), N("Exp", ["t"], ["y"])], inits=[ints("n", 10**9, 10**9)]), folder)


@hostile(MODELS)
def pads_of_2_to_the_62(folder: Path) -> Path:
    return save(model([N("Pad", ["x", "p"], ["y"])], inits=[ints("p", 2**62, 0, 2**62, 0)]), folder)


@hostile(MODELS)
def window_of_huge_stride(folder: Path) -> Path:
    node = N("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2**62, 0], pads=[2**62, 0, 0, 0])
    return save(model([node], inputs=[("x", F, [1, 1, 8, 8])]), folder)


@hostile(MODELS)
def split_into_nothing(folder: Path) -> Path:
    return save(
        model([N("Split", ["x", "s"], ["y", "z"], axis=1)], inits=[ints("s", -5, 8)], outputs=[("y", F, None), ("z", F, None)]),
        folder,
    )


# structure


@hostile(MODELS)
def nested_subgraphs(folder: Path) -> Path:
    inner = helper.make_graph([N("Identity", ["x"], ["o"])], "deepest", [], [helper.make_tensor_value_info("o", F, None)])
    for k in range(24):  # each is four messages deep, and protobuf's limit is a hundred
        node = (
            N("If", ["c"], [f"o{k}"], then_branch=inner, else_branch=inner)
            if k < 6
            else N("If", ["c"], [f"o{k}"], then_branch=inner)
        )
        inner = helper.make_graph([node], f"g{k}", [], [helper.make_tensor_value_info(f"o{k}", F, None)])
    node = N("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    return save(model([node], inputs=[("x", F, [2, 3]), ("c", TensorProto.BOOL, [])]), folder)


@hostile(MODELS)
def mutually_recursive_functions(folder: Path) -> Path:
    own = [helper.make_opsetid("own", 1)]
    functions = [
        helper.make_function("own", a, ["p"], ["q"], [N(b, ["p"], ["q"], domain="own")], own)
        for a, b in (("A", "B"), ("B", "A"))
    ]
    return save(model([N("A", ["x"], ["y"], domain="own")], functions=functions, domains=["own"]), folder)


@hostile(MODELS)
def recursive_function(folder: Path) -> Path:
    own = [helper.make_opsetid("own", 1)]
    f = helper.make_function(
        "own", "A", ["p"], ["q"], [N("A", ["p"], ["r"], domain="own"), N("A", ["r"], ["q"], domain="own")], own
    )
    return save(model([N("A", ["x"], ["y"], domain="own")], functions=[f], domains=["own"]), folder)


@hostile(MODELS)
def a_million_nodes(folder: Path) -> Path:
    one = model([N("Relu", ["x"], ["y"])])
    body = one.graph.node[0].SerializeToString()
    graph = one.graph.SerializeToString()
    graph += (b"\x0a" + bytes([len(body)]) + body) * 1_000_000  # field 1 of the graph, again and again
    del one.graph.node[:]
    one.ClearField("graph")
    head, n = one.SerializeToString(), len(graph)
    size = bytes([(n >> 7 * k & 127) | 128 for k in range(4)]) + bytes([n >> 28])
    (folder / "m.onnx").write_bytes(head + b"\x3a" + size + graph)
    return folder / "m.onnx"


@hostile(MODELS)
def opset_of_zero(folder: Path) -> Path:
    return save(model([N("Relu", ["x"], ["y"])], opset=0), folder)


@hostile(MODELS)
def two_opsets(folder: Path) -> Path:
    m = model([N("Relu", ["x"], ["y"])])
    m.opset_import.append(helper.make_opsetid("ai.onnx", 7))
    return save(m, folder)


@hostile(MODELS)
def reference_outside_a_function(folder: Path) -> Path:
    node = N("LeakyRelu", ["x"], ["y"], alpha=0.5)
    node.attribute[0].ref_attr_name = "slope"
    return save(model([node]), folder)


@hostile(MODELS)
def functions_that_double(folder: Path) -> Path:
    """Forty functions, each of which calls the one before twice: 2^40 nodes when written out."""
    functions = [helper.make_function("own", "F0", ["p"], ["q"], [N("Relu", ["p"], ["q"])], [helper.make_opsetid("", 18)])]
    for k in range(1, 40):
        nodes = [N(f"F{k - 1}", ["p"], ["r"], domain="own"), N(f"F{k - 1}", ["r"], ["q"], domain="own")]
        functions.append(helper.make_function("own", f"F{k}", ["p"], ["q"], nodes, [helper.make_opsetid("own", 1)]))
    return save(model([N("F39", ["x"], ["y"], domain="own")], functions=functions, domains=["own"]), folder)


@hostile(MODELS)
def cyclic_graph(folder: Path) -> Path:
    return save(model([N("Add", ["x", "b"], ["a"]), N("Relu", ["a"], ["b"]), N("Neg", ["b"], ["y"])]), folder)


@hostile(MODELS)
def node_reads_itself(folder: Path) -> Path:
    return save(model([N("Add", ["x", "y"], ["y"])]), folder)


@hostile(MODELS)
def names_collide(folder: Path) -> Path:
    return save(
        model([N("Relu", ["x"], ["w"]), N("Neg", ["w"], ["y"])], inits=[numpy_helper.from_array(np.ones(3, np.float32), "w")]),
        folder,
    )


@hostile(MODELS)
def output_written_twice(folder: Path) -> Path:
    return save(model([N("Relu", ["x"], ["y"]), N("Neg", ["x"], ["y"])]), folder)


@hostile(MODELS)
def unknown_element_type(folder: Path) -> Path:
    return save(model([N("Relu", ["x"], ["y"])], inputs=[("x", 77, [2])]), folder)


# attributes


def with_attribute(op: str, name: str, value: object, folder: Path, shape=(1, 2, 8, 8), **more: object) -> Path:
    return save(model([N(op, ["x"], ["y"], **{name: value}, **more)], inputs=[("x", F, list(shape))]), folder)


for _op, _attr, _value, _more in [
    ("Softmax", "axis", 1.5, {}), ("Softmax", "axis", "last", {}), ("Softmax", "axis", 2**62, {}), ("Transpose", "perm", [0, 0, 0, 0], {}), ("Transpose", "perm", [0, 1, 2, 9], {}),
    ("Transpose", "perm", "abcd", {}), ("MaxPool", "kernel_shape", [0, 0], {}), ("MaxPool", "kernel_shape", [-3, 3], {}), ("MaxPool", "kernel_shape", [3], {}), ("Cast", "to", 99, {}),
    ("LeakyRelu", "alpha", [1.0, 2.0], {}), ("Flatten", "axis", 77, {}), ("DepthToSpace", "blocksize", 0, {}), ("DepthToSpace", "blocksize", -2, {}),
    ("MaxPool", "strides", [0, 0], {"kernel_shape": [2, 2]}), ("MaxPool", "dilations", [0, 1], {"kernel_shape": [2, 2]}), ("Concat", "axis", 12, {}), ("ArgMax", "axis", -9, {}),
]:  # fmt: skip
    _key = f"attribute_{_op}_{_attr}_{_value}".replace(" ", "")
    MODELS[_key] = lambda folder, a=(_op, _attr, _value), m=_more: with_attribute(*a, folder, **m)


for _op, _attr, _value, _more in [
    (op, attr, value, more) for value in (float("nan"), float("inf"), float("-inf"))
    for op, attr, more in [
        ("LeakyRelu", "alpha", {}), ("Elu", "alpha", {}), ("HardSigmoid", "beta", {}), ("Shrink", "bias", {}), ("RandomNormalLike", "mean", {}),
        ("RandomUniformLike", "high", {}), ("Bernoulli", "seed", {}), ("MeanVarianceNormalization", "axes", {}),
    ]
]:  # fmt: skip
    MODELS[f"nonfinite_{_op}_{_attr}_{_value}"] = lambda folder, a=(_op, _attr, _value), m=_more: with_attribute(
        *a, folder, **m
    )
for _value in (float("nan"), float("inf"), float("-inf")):
    for _op, _ins in {"Range": "ozu", "Resize": "i#s", "Clip": "xz", "Dropout": "xzt", "Tile": "xn"}.items():

        def _make(folder: Path, op=_op, ins=_ins, value=_value) -> Path:
            known = {
                "z": np.float32(value),
                "o": np.float32(0),
                "u": np.float32(1),
                "s": np.array([1, 1, value, 2], np.float32),
                "t": np.array(True),
                "v": np.array([value, 1], np.float32),
            }
            inits = [numpy_helper.from_array(np.asarray(a), n) for n, a in known.items()]
            nodes = [N("Cast", ["v"], ["n"], to=TensorProto.INT64), N(op, [n.replace("#", "") for n in ins], ["y"])]
            return save(model(nodes, inputs=[("x", F, [2, 3]), ("i", F, [1, 2, 8, 8])], inits=inits), folder)

        MODELS[f"nonfinite_input_{_op}_{_value}"] = _make


# build directories: `folder / "good"` is a good one, copied to `folder / "b"`


def build(change: Callable[[Path], object]) -> Make:
    def make(folder: Path) -> Path:
        shutil.copytree(folder.parent / "good", folder / "b")
        change(folder / "b")
        return folder / "b"

    return make


def swap(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


for _file in ("plan.json", "certificate.json", "constants.bin"):
    for _how, _make in {
        "fifo": os.mkfifo, "endless": lambda p: p.symlink_to("/dev/zero"), "folder": lambda p: p.mkdir(), "link_outside": lambda p: p.symlink_to("/etc/passwd"),
        "empty": lambda p: p.write_bytes(b""), "deep": lambda p: p.write_bytes(b"[" * 1_000_000), "larger_than_memory": lambda p: os.truncate(os.open(p, os.O_CREAT | os.O_WRONLY), 1 << 40),
        "not_utf8": lambda p: p.write_bytes(b'{"version": "\xff\xfe"}'), "huge_number": lambda p: p.write_bytes(b'{"version": ' + b"9" * 100_000 + b"}"), "not_a_number": lambda p: p.write_bytes(b'{"version": NaN}'),
        "hard_link": lambda p: (shutil.copy(p.parent.parent.parent / "good" / p.name, p.parent.parent / "twin"), os.link(p.parent.parent / "twin", p), p.write_bytes(p.read_bytes() + b" ")),
    }.items():  # fmt: skip
        BUILDS[f"{_file}_{_how}"] = build(swap(_file, _make))


def resigned(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """The plan changed, and every hash made right again."""

    def write(folder: Path) -> None:
        import hashlib

        plan = json.loads((folder / "plan.json").read_text())
        change(plan)
        (folder / "plan.json").write_text(json.dumps(plan))
        body = json.loads((folder / "certificate.json").read_text())
        body.pop("sha256")
        body["files"] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in body["files"]}
        body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        (folder / "certificate.json").write_text(json.dumps(body, indent=1, sort_keys=True))

    return write


for _how, _change in {
    "model_elsewhere": lambda d: d.update(model="/etc/passwd"), "model_endless": lambda d: d.update(model="/dev/zero"), "devices_2_to_the_40": lambda d: d["program"].update(devices=1 << 40),
    "mesh_2_to_the_40": lambda d: d.update(mesh=[["d0", 1 << 40]]), "graph_of_huge_dims": lambda d: d.update(graph=d["graph"].replace("[2, 5, 12]", "[1000000000, 1000000000, 12]")),
    "graph_deep": lambda d: d.update(graph=d["graph"] + "body " + "(" * 200_000), "weights_above": lambda d: d.update(graph=d["graph"].replace('at "', 'at "../../')),
    "name_with_a_nul": lambda d: d.update(graph=d["graph"].replace("output y", 'output "y\0"')),
}.items():  # fmt: skip
    BUILDS[f"resigned_{_how}"] = build(resigned(_change))


def attempt(argv: list[str]) -> tuple[int, str]:
    """(exit status, standard error) of a command; a traceback is part of it."""
    from tapestry import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(argv)
        except SystemExit as e:
            status = int(e.code or 0)
        except BaseException as e:
            status = 99
            print(f"Traceback: {type(e).__name__}: {e}", file=sys.stderr)
    return status, err.getvalue()


def main(folder: Path, level: str) -> None:
    import onnxruntime  # noqa: F401  (what is mapped once it is needed counts before the limit)
    import torch  # noqa: F401

    resource.setrlimit(resource.RLIMIT_AS, (max(MEMORY, _mapped() + (2 << 30)),) * 2)
    for name, make in (MODELS | BUILDS).items():
        if (name in LONG) == (level == "long"):
            print(json.dumps({"begins": name}), flush=True)
            print(json.dumps(tried(name, make, folder)), flush=True)


def tried(name: str, make: Make, folder: Path) -> dict[str, object]:
    """What the commands say of a case, their seconds, and what they made elsewhere."""
    place = folder / f"case{len(list(folder.iterdir()))}"
    place.mkdir()
    path, began = str(make(place)), sum(os.times()[:4])
    before = set(folder.rglob("*"))
    out = place / "out"
    models = [["compile", path, "-o", str(out), "-q"]]
    results = [attempt(argv) for argv in (models if name in MODELS else [[c, path] for c in ("verify", "run", "explain")])]
    fresh = [str(p) for p in folder.rglob("*") if p not in before and out not in (p, *p.parents)]
    return {"case": name, "results": results, "seconds": sum(os.times()[:4]) - began, "fresh": fresh}


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
