"""Files as they come, each in a process of its own: what is found right, and what a failure is called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bench.doors import apart, wild
from bench.exporters.zoo_models import ZOO
from bench.planning import zoo
from tapestry import TapestryError
from tapestry.viz.format import human

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def written(folder: Path, nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[int | str]]]) -> str:
    """A model with these nodes, whose last result is its output."""
    infos = [helper.make_tensor_value_info(n, kind, shape) for n, (kind, shape) in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info(nodes[-1].output[0], FLOAT, None)])
    path = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return str(path)


def test_inputs_are_what_their_names_and_ranks_say(tmp_path: Path) -> None:
    """Pixels, samples with their length, a rate, tokens."""
    kinds = {
        "image": (FLOAT, ["batch_size", 3, "h", "w"]), "waveforms": (FLOAT, ["batch_size", "N"]),
        "waveforms_lens": (INT64, ["batch_size"]), "sr": (INT64, []), "ids": (INT64, ["batch_size", "seq"]), "state": (FLOAT, [2, "", 128]),
    }  # fmt: skip
    path = written(tmp_path, [helper.make_node("Identity", ["image"], ["y"])], kinds)
    inputs = wild.inputs_of(onnx.load(path))
    sizes = next(wild.candidates(inputs))
    assert sizes == {"image": (1, 3, 224, 224), "waveforms": (1, 16000), "waveforms_lens": (1,), "sr": (), "ids": (1, 16),
                     "state": (2, 1, 128)}  # fmt: skip
    feeds = wild.values(inputs, sizes, 5)
    assert feeds["waveforms_lens"] == [16000] and feeds["sr"] == 16000
    assert feeds["image"].min() >= 0 and feeds["image"].max() < 1 and feeds["ids"].min() >= 0 and feeds["ids"].max() < 5


def test_sizes_are_those_that_onnxruntime_runs(tmp_path: Path) -> None:
    """A sound of 512 samples is the second guess; the row says what was taken."""
    shape = helper.make_node("Constant", [], ["s"], value_ints=[1, 512])
    nodes = [shape, helper.make_node("Reshape", ["input", "s"], ["x"]), helper.make_node("Tanh", ["x"], ["y"])]
    path = written(tmp_path, nodes, {"input": (FLOAT, ["batch", "n"])})
    row = wild.worker({"path": path, "devices": 2, "runs": 1})
    assert row["inputs"] == {"input": [1, 512]} and "failed" not in row and row["rel_err"] < 1e-6 and row["ratio"] > 0


def test_a_file_that_nothing_runs_is_unfit(tmp_path: Path) -> None:
    """Not ours to refuse: onnxruntime does not run it either."""
    (tmp_path / "m.onnx").write_bytes(b"none")
    assert wild.worker({"path": str(tmp_path / "m.onnx"), "devices": 1, "runs": 1})["failed"] == "unfit"


@pytest.mark.parametrize(
    ("error", "kind"), [(TapestryError("it is not possible", where="here"), "refused"), (KeyError("k"), "made by others")]
)
def test_failures_say_whose_they_are(error: Exception, kind: str) -> None:
    """A message of ours is a refusal; what no frame of the package raised is not ours."""
    row = apart.failure(error)
    assert row["failed"] == kind and row["error"]


def test_a_traceback_names_the_last_frame_of_the_package() -> None:
    """Of an exception that is none of ours and comes out of the package."""
    try:
        human("none")  # pyright: ignore[reportArgumentType]
    except TypeError as e:
        row = apart.failure(e)
    assert row["failed"] == "traceback" and row["at"].startswith("tapestry/viz/format.py:") and row["at"].endswith(" human")


def test_a_case_ends_at_its_limit_and_takes_nothing_down() -> None:
    """The time limit, and what no case is: both are rows."""
    assert apart.measured("wild", {"path": "none.onnx", "devices": 1, "runs": 1}, 0.2)["failed"] == "time"
    assert apart.measured("no_such_benchmark", {}, 60)["failed"] == "crash"


def test_far_counts_what_is_no_number() -> None:
    """NaN on both sides is equal; on one side, and in other shapes, infinitely far."""
    nan = np.array([1.0, np.nan])
    assert wild._far(nan, nan) == 0.0
    assert wild._far(np.array([1.0, 2.0]), nan) == wild._far(nan, np.array([1.0, 2.0])) == float("inf")
    assert wild._far(np.zeros(2), np.zeros((2, 1))) == float("inf")
    assert wild._far(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.25


def test_the_page_has_a_line_for_each_model_and_its_refusal() -> None:
    """Both tables; a refusal's message is on its line."""
    good = {"model": "A", "operations": 3, "opaque": {"LSTM": 2}, "cpu_s": 1.0, "gap": 0.0, "transfer_bytes": 1024}
    bad = {"model": "B", "failed": "refused", "error": "no rule for a|b"}
    value = {"model": "A", "f32": 1e-7, "bf16": 2e-3, "torch_bf16": 3e-3}
    text = zoo.page([good, bad], [value])
    assert "| A | 3 | 2 LSTM | 1 | 0.00% | 1.00 KiB |  |" in text and "refused: no rule for a\\|b" in text
    assert "| A | 1.0e-07 | 2.0e-03 | 3.0e-03 |  |" in text
    assert "## Values" not in zoo.page([good], [])


def test_models_are_of_different_architectures() -> None:
    """No architecture twice."""
    assert len(ZOO) >= 36 and len({model for model, *_ in ZOO.values()}) == len(ZOO)
