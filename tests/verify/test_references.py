"""What neither laws nor kernels speak of: which weights a plan reads, and what its opaque nodes are."""

from __future__ import annotations

import base64
import re
import shutil

import numpy as np
import onnx
import pytest
from onnx import NodeProto, helper, numpy_helper
from onnx import TensorProto as T

import tapestry
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import BuildError, LawError, TapestryError
from tapestry.ir.graph import Opaque
from tapestry.onnx_eval import opaque_node
from tests.support.command_line import run
from tests.support.faults.file_faults import edited
from tests.support.small_models import N, net


@pytest.fixture(scope="module", params=["inline", "external"])
def good(request, tmp_path_factory):
    """A plan with two weights of one shape and an opaque node."""
    folder = tmp_path_factory.mktemp("references")
    info = helper.make_tensor_value_info
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((12, 12), np.float32), n) for n in ("v", "w")]
    nodes = [
        N("MatMul", ["x", "v"], ["a"]), N("Relu", ["a"], ["b"]), N("MatMul", ["b", "w"], ["c"]),
        N("TopK", ["c", "k"], ["y", "at"], name="top", largest=0),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", [info("x", T.FLOAT, [8, 12])], [info("y", T.FLOAT, None)], weights)
    graph.initializer.append(numpy_helper.from_array(np.array([5]), "k"))
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    if request.param == "external":
        (folder / "data.bin").write_bytes(b"".join(w.raw_data for w in graph.initializer[:2]))
        for k, w in enumerate(graph.initializer[:2]):
            w.ClearField("raw_data")
            w.data_location = T.EXTERNAL
            for key, value in {"location": "data.bin", "offset": str(576 * k), "length": "576"}.items():
                w.external_data.add(key=key, value=value)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    tapestry.compile(folder / "m.onnx", devices=2).save(folder / "good")
    assert verify_build(folder / "good")[1]["model"] == 9
    return folder / "good"


def changed(good, folder, change):
    shutil.copytree(good, folder / "b")
    edited(folder / "b", change)
    return folder / "b"


def exchange_weights(plan):
    one, two = re.findall(r"^weight [vw]: \S+ \S+ (at .*)$", plan["graph"], flags=re.M)
    plan["graph"] = plan["graph"].replace(one, "@").replace(two, one).replace("@", two)


def node_changed(change):
    def apply(plan):
        text = re.search(r'node "([^"]+)"', plan["graph"])[1]
        node = NodeProto.FromString(base64.b64decode(text))
        change(node)
        plan["graph"] = plan["graph"].replace(text, base64.b64encode(node.SerializeToString()).decode())

    return apply


def largest(node):
    next(a for a in node.attribute if a.name == "largest").i = 1


def without_largest(node):
    kept = [a for a in node.attribute if a.name != "largest"]
    del node.attribute[:]
    node.attribute.extend(kept)


def sorted_too(node):
    node.attribute.append(helper.make_attribute("sorted", 0))


def another_operator(node):
    node.op_type = "Unique"


def opset(plan):
    plan["graph"] = plan["graph"].replace('opsets "" 18', 'opsets "" 11')


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "change",
    [exchange_weights, opset, *map(node_changed, (largest, without_largest, sorted_too, another_operator))],
    ids=["weights", "opset", "attribute", "attribute gone", "attribute added", "operator"],
)
def test_another_function_than_the_models_is_refused(good, tmp_path, change):
    with pytest.raises(LawError, match="law 'model' is broken") as e:
        verify_build(changed(good, tmp_path, change))
    assert e.value.where and e.value.why


def test_a_plan_without_its_model_is_checked_as_far_as_it_goes(good, tmp_path):
    assert run("verify", changed(good, tmp_path, lambda plan: plan.update(model="/nowhere/m.onnx")), "-q")[0] == 0


@pytest.mark.sampled(1)
def test_an_edited_kernel_is_refused_by_a_line_of_it(good, tmp_path):
    folder = changed(good, tmp_path, lambda plan: None)
    path = sorted((folder / "kernels").iterdir())[0]
    path.write_text(path.read_text().replace("+", "-", 1))
    edited(folder, lambda plan: None)
    status, _, err = run("verify", folder)
    assert status == 1 and "law 'kernels' is broken" in err and "because: line " in err


@pytest.mark.sampled(1)
def test_what_stands_at_the_output_is_not_lost(good, tmp_path):
    """A link stays a link to the build, with nothing beside it; a folder with files of somebody's is left alone."""
    plan = tapestry.compile(good.parent / "m.onnx", devices=2)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    plan.save(tmp_path / "link")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"] and (tmp_path / "link").is_symlink()
    assert verify_build(tmp_path / "real")
    (tmp_path / "real" / "notes.txt").write_text("mine")
    with pytest.raises(BuildError, match=r"notes\.txt"):
        plan.save(tmp_path / "real")
    assert (tmp_path / "real" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "layouts", [{"inputs": {"z": [0]}}, {"inputs": {"x": [2]}}, {"outputs": {"y": [0, 0]}}, {"outputs": {"x": [0]}}]
)
def test_layouts_are_of_tensors_that_there_are(good, tmp_path, layouts):
    with pytest.raises(LawError, match="law 'agreement'"):
        verify_build(changed(good, tmp_path, lambda plan: plan.update(layouts)))


@pytest.mark.parametrize("kind", ["AveragePool", "LpPool"])
def test_the_reference_heeds_dilations_where_windows_are_not_padded(kind):
    """Both evaluators are asked; onnx's own makes the result as large as if nothing were dilated."""
    x = np.random.default_rng(0).standard_normal((1, 2, 7, 8)).astype(np.float32)
    node = N(kind, ["x"], ["y"], kernel_shape=[3, 2], dilations=[2, 1], auto_pad="VALID")
    op = Opaque(outs=("y",), ins=("x",), kind=kind, node=node.SerializeToString(), opsets=(("", 22),), source=("n",))
    first, second = (opaque_node.run(op, [x], [("f32", (1, 2, 3, 7))], independent=k)[0] for k in (False, True))
    np.testing.assert_allclose(first, second, rtol=1e-5)


@pytest.mark.parametrize("region", [[0, 0, 1e30, 1e30], [0, 0, 1e-25, 1e30], [5, 5, 5, -np.inf]])
def test_a_region_of_more_samples_than_memory_holds_is_refused(region):
    """Both libraries write down all samples of a region before they add them."""
    node = N("RoiAlign", ["x", "r", "b"], ["y"], output_height=2, output_width=2).SerializeToString()
    op = Opaque(outs=("y",), ins=("x", "r", "b"), kind="RoiAlign", node=node, opsets=(("", 16),), source=("roi",))
    x, b = np.ones((1, 1, 5, 5), np.float32), np.zeros(1, np.int64)
    expected = [("f32", (1, 1, 2, 2))]
    for independent in (False, True):
        with pytest.raises(TapestryError, match=r"'roi' \(RoiAlign\).*more than 16,777,216 samples"):
            opaque_node.run(op, [x, np.array([region], np.float32), b], expected, independent=independent)
    assert opaque_node.asked_of("onnx.reference", op, [x, np.array([region], np.float32), b], expected) is None
    out = opaque_node.run(op, [x, np.array([[0, 0, 3, 3]], np.float32), b], expected)[0]
    np.testing.assert_array_equal(out, np.ones((1, 1, 2, 2), np.float32))


@pytest.mark.parametrize("batch", [1, 5])
def test_lrn_has_as_many_channels_as_its_input(batch, tmp_path):
    """onnx's own has those of the batch: neither the reference nor a folded constant may be what it says."""
    x = np.random.default_rng(0).standard_normal((batch, 3, 2, 2)).astype(np.float32) * 4
    node = N("LRN", ["w"], ["t"], alpha=0.5, beta=0.75, bias=1.5, size=3)
    path = tmp_path / "m.onnx"
    onnx.save(net([node, N("Add", ["t", "x"], ["y"])], {"x": (T.FLOAT, x.shape)}, {"y": T.FLOAT}, {"w": x}), path)
    edges = np.pad(x**2, ((0, 0), (1, 1), (0, 0), (0, 0)))
    expected = x / (1.5 + 0.5 / 3 * (edges[:, :-2] + edges[:, 1:-1] + edges[:, 2:])) ** 0.75
    op = Opaque(outs=("t",), ins=("w",), kind="LRN", node=node.SerializeToString(), opsets=(("", 18),))
    for name in ("onnxruntime", "onnx.reference"):
        (found,) = opaque_node.asked_of(name, op, [x], [("f32", x.shape)])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    (found,) = tapestry.compile(path).run({"x": np.zeros_like(x)}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("opset", [9, 13, 15])
def test_a_normalised_batch_has_the_statistics_that_it_is_given(opset):
    """Of opsets before 14 onnx's own reference takes those of the batch."""
    rng = np.random.default_rng(0)
    x, scale, bias, mean = rng.standard_normal((4, 2, 3)).astype(np.float32), *rng.standard_normal((3, 3)).astype(np.float32)
    x, variance = np.moveaxis(x, 1, 2), np.float32([0.5, 1, 2])
    node = N("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"])
    op = Opaque(outs=("y",), ins=tuple(node.input), kind=node.op_type, node=node.SerializeToString(), opsets=(("", opset),))
    at = (slice(None), None)
    expected = scale[at] * (x - mean[at]) / np.sqrt(variance[at] + 1e-5) + bias[at]
    for name in ("onnxruntime", "onnx.reference"):
        (found,) = opaque_node.asked_of(name, op, [x, scale, bias, mean, variance], [("f32", x.shape)])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
