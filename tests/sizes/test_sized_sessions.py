"""One build for a range of sizes, kept: by a session in this process, by ranks, and what its sizes have in common."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper

import tapestry
from tapestry.cli.entry import main
from tapestry.errors import TapestryError
from tapestry.ir.many_sizes.equal_launches import equal_launches
from tapestry.onnx_eval.ort_session import ort_session
from tests.support.programs.sized_models import PINS, compiled, path_of


def close(found, expected):
    return all(np.abs(a - b).max() <= 1e-5 * np.abs(b).max() for a, b in zip(found.values(), expected, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")  # as a rank has
def test_ranks_answer_at_every_size_with_the_bits_of_one_process():
    c = replace(compiled("tokens", 2, (), "batch=2..6", "sequence=7,20,64"))  # what others have bound is for their threads
    peer = ort_session(path_of("tokens"))
    with tapestry.Session(c, processes=2) as s:
        for seed, sizes in enumerate([(6, 64), (2, 7), (5, 20), (2, 7), (3, 64)]):
            feeds = c.planned(sizes).random_feeds(seed)
            found = s.run(feeds)
            assert close(found, peer.run(list(found), feeds))
            assert all(found[t].tobytes() == a.tobytes() for t, a in c.run(feeds).items())
        with pytest.raises(TapestryError, match="sequence 8 is outside the build's sizes 7, 20, 64"):
            s.run({n: a[:, :8] for n, a in feeds.items()})
        assert close(s.run(feeds), peer.run(list(found), feeds))  # what was refused has reached no rank


def test_a_run_by_ranks_has_the_sizes_of_its_inputs(tmp_path, capsys):
    c = compiled("rows", 2, PINS["rows"], "batch=2..40")
    c.save(tmp_path / "b")
    for batch in (3, 40):
        ((name, array),) = c.planned((batch,)).random_feeds(batch).items()
        np.save(tmp_path / "x.npy", array)
        given = ["--input", f"{name}={tmp_path / 'x.npy'}", "--check", "--json", "-q"]
        assert main(["run", str(tmp_path / "b"), "--processes", "2", *given]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["passed"] and said["reference"] == "onnxruntime" and "outputs" in said


def layers(tmp_path):
    """Three layers of the same kind, two inputs of which one has a fixed size that the other may have too."""
    rng, nodes, before = np.random.default_rng(0), [], "x"
    weights = [
        helper.make_tensor(f"w{k}", TensorProto.FLOAT, [8, 8], rng.standard_normal(64).astype(np.float32)) for k in range(3)
    ]
    for k in range(3):
        nodes += [
            helper.make_node("MatMul", [before, f"w{k}"], [f"h{k}"], name=f"up{k}"),
            helper.make_node("Tanh", [f"h{k}"], [f"y{k}"], name=f"curve{k}"),
        ]
        before = f"y{k}"
    nodes.append(helper.make_node("Tanh", ["z"], ["u"], name="other"))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["batch", 8]), ("z", [6, 8]))]
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("y2", ["batch", 8]), ("u", [6, 8]))]
    graph = helper.make_graph(nodes, "layers", values, outs, weights)
    path = tmp_path / "layers.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString())
    return path


def test_layers_are_one_function_and_equal_numbers_alone_are_not(tmp_path):
    path = layers(tmp_path)
    c = tapestry.compile(path, topology="cpu", shapes={"batch": "2..18"})
    assert c.sized is not None and c.sized.regions[0].made_at == (6,)  # where both inputs are of one size
    peer = ort_session(path)
    for batch in (6, 3, 18):
        feeds = c.planned((batch,)).random_feeds(batch)
        found = c.run(feeds)
        assert close(found, peer.run(list(found), feeds))
    plan = c.sized.regions[0].plan
    numbers = equal_launches(plan)
    by_output = {plan.program.steps[at].outs[0]: n for (at, _), n in numbers.items()}
    assert len(by_output) == 4 and by_output["y1"] == by_output["y2"]
    assert by_output["u"] not in {n for t, n in by_output.items() if t != "u"}
