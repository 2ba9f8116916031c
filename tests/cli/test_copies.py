"""Copies of a compiled object, also through pickle in another process, give what it gives."""

import copy
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import pytest
import torch

import tapestry
from tests.support.small_models import save

ROOT = Path(__file__).parents[2]
OTHER = """
import pickle, sys
compiled, feeds = pickle.load(open(sys.argv[1], "rb"))
again = pickle.loads(pickle.dumps(compiled))
assert compiled.check(feeds)["passed"] and again.run(feeds).keys() == compiled.run(feeds).keys()
pickle.dump((again.run(feeds), compiled.verify(), again.report, compiled.printed), open(sys.argv[2], "wb"))
"""


def _sized(folder: Path) -> Path:
    x, y = (oh.make_tensor_value_info(n, 1, ["n", 8]) for n in "xy")
    w = onnx.numpy_helper.from_array(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), "w")
    model = oh.make_model(oh.make_graph([oh.make_node("MatMul", ["x", "w"], ["y"])], "sized", [x], [y], [w]), ir_version=9)
    onnx.save(model, folder / "sized.onnx")
    return folder / "sized.onnx"


@cache
def _file() -> tapestry.Compiled:
    return tapestry.compile(save("conv_chain"), mesh="2x2", topology="cpu", print_after=["lift-nodes"])


def _made(kind: str, folder: Path) -> tapestry.Compiled:
    if kind == "module":
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        return tapestry.compile(layers, (torch.ones(4, 8),), mesh="2", topology="cpu")
    if kind == "sizes":
        return tapestry.compile(_sized(folder), shapes={"n": "1..8"}, mesh="2", topology="cpu")
    if kind == "loaded":
        _file().save(folder / "b")
        return tapestry.load(folder / "b")
    return _file()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["file", "loaded", "module", "sizes"])
@pytest.mark.parametrize("ran", [False, True])
def test_a_deep_copy_gives_the_same(kind, ran, tmp_path):
    compiled = _made(kind, tmp_path)
    feeds = compiled.random_feeds()
    expected = compiled.run(feeds) if ran else None
    other = copy.deepcopy(compiled)
    expected = expected or compiled.run(feeds)
    del compiled  # the copy keeps what it needs
    found = other.run(feeds)
    assert other.report and all(np.array_equal(found[n], a) for n, a in expected.items())
    assert other.check(feeds)["passed"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["file", "loaded", "module", "sizes"])
def test_pickle_gives_the_same_in_another_process(kind, tmp_path):
    compiled = _made(kind, tmp_path)
    feeds = compiled.random_feeds()
    expected, laws, report, printed = compiled.run(feeds), compiled.verify(), compiled.report, compiled.printed
    (tmp_path / "object").write_bytes(pickle.dumps((compiled, feeds)))
    del compiled  # and with it the folder of a module's model
    command = [sys.executable, "-c", OTHER, tmp_path / "object", tmp_path / "found"]
    subprocess.run([str(c) for c in command], check=True, cwd=ROOT, timeout=100)
    found, *said = pickle.loads((tmp_path / "found").read_bytes())
    assert all(np.array_equal(found[n], a) for n, a in expected.items()) and found.keys() == expected.keys()
    assert said[0] == laws and said[2] == printed and said[1]["ops"] == report["ops"]
