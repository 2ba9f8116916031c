"""The command line, as section 8 of the design says: documents, exit statuses, atomic writes, tampered builds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry.errors import BuildError, LawError, TapestryError
from tapestry.rewrites import RULES
from tapestry.runtime.outputs import write_outputs
from tests.support.command_line import attention_build, document, run
from tests.support.paths import EXAMPLES
from tests.support.small_models import N, case, f32, net, save


@pytest.fixture
def build() -> Path:
    return attention_build()


@pytest.fixture
def symbolic(tmp_path) -> Path:
    nodes = [N("MatMul", ["x", "w"], ["h"], "mm"), N("Relu", ["h"], ["y"], "act")]
    m = net(nodes, {"x": (T.FLOAT, ["batch", "time", 4])}, {"y": T.FLOAT}, {"w": f32(4, 3)})
    path = tmp_path / "symbolic.onnx"
    path.write_bytes(m.SerializeToString())
    return path


# --- documents


def test_compile_document(tmp_path):
    d = document("compile", save("conv_chain"), "-o", tmp_path / "b", "--mesh", "2x2")
    for key in (
        "model", "nodes", "ops", "signatures", "devices", "objective_s", "lower_bound_s", "gap", "peak_bytes", "unsharded_peak_bytes",
        "host_load_bytes", "transfers", "kernels", "certificate", "seconds",
    ):  # fmt: skip
        assert key in d, key
    assert d["nodes"] == 7 and d["devices"] == 4 and len(d["peak_bytes"]) == 4
    assert 0 < d["lower_bound_s"] <= d["objective_s"] and 0 <= d["gap"] < 1
    assert d["certificate"]["passed"] is True and all(isinstance(n, int) and n > 0 for n in d["certificate"]["laws"].values())
    assert {"ssa", "written_once", "read_after_write", "split_partition", "access_preserved", "memory"} <= set(
        d["certificate"]["laws"]
    )
    assert set(d["seconds"]) >= {"lift", "simplify", "search", "verify", "codegen", "total"}
    assert all({"kind", "count", "bytes"} <= set(t) for t in d["transfers"])
    assert d["kernels"] == len(list((tmp_path / "b" / "kernels").glob("*.py"))) > 0


def test_run_document_and_files(build, tmp_path):
    status, out, err = run("run", build, "--check", "--output", tmp_path / "out", "--json")
    assert status == 0, err
    d = json.loads(out)
    assert set(d) >= {"outputs", "reference", "passed", "peak_bytes", "transfers", "seconds"}
    assert d["passed"] is True and d["reference"] in ("onnxruntime", "onnx.reference")
    y = d["outputs"]["y"]
    assert set(y) == {"shape", "dtype", "max_abs_err", "rel_err"} and y["shape"] == [2, 5, 12] and y["rel_err"] <= 1e-4
    written = np.load(tmp_path / "out" / "y.npy", allow_pickle=False)
    assert written.shape == (2, 5, 12) and np.isfinite(written).all()
    planned = json.loads((build / "plan.json").read_text())["peak_bytes"]
    assert d["peak_bytes"] == planned


def test_run_with_given_inputs(build, tmp_path):
    c = case("attention")
    for name, a in c.feeds.items():
        np.save(tmp_path / f"{name}.npy", a)
    args = [x for name in c.feeds for x in ("--input", f"{name}={tmp_path / f'{name}.npy'}")]
    status, _, err = run("run", build, *args, "--output", tmp_path / "o", "-q")
    assert status == 0, err
    np.testing.assert_allclose(np.load(tmp_path / "o" / "y.npy"), c.expected["y"], atol=1e-5)


def test_seeds_of_random_inputs(build, tmp_path):
    outs = []
    for n, seed in enumerate((1, 1, 2)):
        assert run("run", build, "--seed", str(seed), "--output", tmp_path / str(n), "-q")[0] == 0
        outs.append(np.load(tmp_path / str(n) / "y.npy"))
    assert np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[0], outs[2])


def test_a_wrong_result_is_exit_1(build, tmp_path, monkeypatch):
    from tapestry.verify import model_outputs

    real = model_outputs.reference
    monkeypatch.setattr(model_outputs, "exact", lambda *_: {})  # which would say that ours is right
    for spoil in (lambda a: a + 1, lambda a: np.full_like(a, np.nan), lambda a: a[..., :-1], lambda a: a.astype(np.float64)):
        monkeypatch.setattr(
            model_outputs, "reference", lambda m, f, s=spoil: (real(m, f)[0], {k: s(v) for k, v in real(m, f)[1].items()})
        )
        status, out, _err = run("run", build, "--check", "--json")
        assert status == 1, spoil
        assert json.loads(out)["passed"] is False


def test_a_result_of_a_short_type_is_held_to_that_type(tmp_path):
    """A float32 that was computed in bfloat16 may be off as bfloat16 is; one that was only stored so may not."""
    from tapestry.verify import model_outputs

    nodes = [
        N("Cast", ["x"], ["b"], to=T.BFLOAT16), N("MatMul", ["b", "b"], ["c"]), N("Cast", ["c"], ["rounded"], to=T.FLOAT),
        N("Gather", ["h", "i"], ["r"]), N("Cast", ["r"], ["w"], to=T.FLOAT), N("Mul", ["w", "w"], ["moved"]),
    ]  # fmt: skip
    ins = [helper.make_tensor_value_info(*v) for v in (("x", T.FLOAT, [4, 4]), ("h", T.BFLOAT16, [5, 2]), ("i", T.INT64, [3]))]
    outs = [helper.make_tensor_value_info(n, T.FLOAT, None) for n in ("rounded", "moved")]
    graph = helper.make_graph(nodes, "g", ins, outs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "m.onnx")
    graph = tapestry.compile(tmp_path / "m.onnx").build.plan.graph
    allowed = model_outputs.tolerances(graph)
    assert allowed["rounded"] == 5e-2 and allowed["moved"] == 1e-4
    one = np.ones(4, np.float32)
    assert model_outputs.compare_outputs(one * np.float32(1.01), one, allowed["rounded"]).passed
    assert not model_outputs.compare_outputs(one * np.float32(1.1), one, allowed["rounded"]).passed
    assert not model_outputs.compare_outputs(one * np.float32(1.001), one, allowed["moved"]).passed


def test_explain_verify_and_rules(build):
    d = document("explain", build)
    assert d["text"] and d["devices"] == 2
    status, text, _ = run("explain", build)
    assert status == 0 and text == d["text"]
    for word in ("softmax", "scores", "mix"):
        assert word in text
    d = document("verify", build)
    assert d["passed"] is True and d["laws"]["kernels"] > 0 and d["laws"]["read_after_write"] > 0
    status, text, _ = run("verify", build)
    assert status == 0 and "all hold" in text
    d = document("rules")
    assert {r["name"] for r in d["rules"]} >= {"split", "split_reduce", "fuse_maps"}
    status, text, _ = run("rules", "split")
    assert status == 0 and "before:" in text and "legal when" in text
    assert "refused" in document("rules", "--refused", save("opaques"))


def test_opt(tmp_path):
    path = tmp_path / "g.tap"
    path.write_text("graph g\ninput x: f32[7, 5]\ny: f32[7] = op [n: 7 | m: 5 sum]\n  reads x[n, m]\n  body x\noutput y\n")
    status, out, _ = run("opt", path, "-r", "split@y{dim=n,parts=3,to=mesh.d0}")
    assert status == 0 and "split n/3 mesh.d0" in out
    d = document("opt", path, "-r", "split@y{dim=n,parts=3,to=mesh.d0}", "--print-between")
    assert len(d["between"]) == 1 and d["laws"]["split_partition"] == 1
    for move in (
        "split@y{dim=n,parts=8,to=mesh.d0}",
        "split@nope{dim=n,parts=2,to=time}",
        "nope@y",
        "???",
        "split@y{dim=n}",
        "split@y{dim=n,parts=x,to=time}",
    ):
        status, out, err = run("opt", path, "-r", move)
        assert status == 2 and out == "" and "tapestry opt:" in err, move
    path.write_text("graph g\nnonsense\n")
    status, out, err = run("opt", path)
    assert status == 2 and out == "" and err
    path.write_text("graph g\ninput x: f32[7]\ny: f32[7] = op [n: 7]\n  reads x[n + 1]\n  body x\noutput y\n")
    status, _, err = run("opt", path)
    assert status == 1 and "reads_inside" in err  # a law, with its witness
    assert "n" in err and "6" in err
    path.write_bytes(b"\xff\xfe\x00graph")
    assert run("opt", path)[0] == 2


def test_json_errors_are_documents(tmp_path, symbolic):
    status, out, err = run("compile", symbolic, "-o", tmp_path / "b", "--json")
    assert status == 2
    d = json.loads(out)
    assert (d["kind"] and d["error"] in err + "\n") or d["what"] in err
    assert {"error", "kind", "what", "where", "why", "hint"} <= set(d)


def test_nothing_but_json_on_standard_output(tmp_path):
    for argv in (
        ["compile", save("mlp"), "-o", tmp_path / "b"],
        ["run", tmp_path / "b", "--check"],
        ["verify", tmp_path / "b"],
        ["explain", tmp_path / "b"],
        ["rules"],
    ):
        status, out, _ = run(*argv, "--json", "-v")
        assert status == 0
        json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_quiet_says_nothing(tmp_path):
    for argv in (
        ["compile", save("mlp"), "-o", tmp_path / "b"],
        ["run", tmp_path / "b", "--check"],
        ["verify", tmp_path / "b"],
    ):
        assert run(*argv, "-q") == (0, "", "")


def test_verbose_and_plain_say_something(tmp_path):
    status, out, _err = run("compile", save("mlp"), "-o", tmp_path / "b", "-v")
    assert status == 0 and str(tmp_path / "b") in out
    status, out, _ = run("run", tmp_path / "b", "--check")
    assert status == 0 and "y" in out


# --- exit 2, one message, nothing written


def bad_lines(tmp_path: Path) -> dict[str, list]:
    m = save("mlp")
    text = tmp_path / "not.onnx"
    text.write_text("hello")
    truncated = tmp_path / "cut.onnx"
    truncated.write_bytes(m.read_bytes()[:200])
    return {
        "no such model": [tmp_path / "none.onnx"], "a folder": [tmp_path], "not a protobuf": [text], "truncated": [truncated],
        "no such axis": [m, "--devices", "2", "--pin", "up:i=2@d7"], "no such operation": [m, "--devices", "2", "--pin", "nope:i=2@d0"],
        "impossible pin": [m, "--devices", "16", "--pin", "up:i=16@d0"], "bad pin": [m, "--devices", "2", "--pin", "up"],
        "bad layout": [m, "--devices", "2", "--layout", "x:9=2@d0"], "bad mesh": [m, "--mesh", "2y2"], "no devices": [m, "--devices", "0"],
        "too many devices": [m, "--devices", "99999999"], "both": [m, "--devices", "2", "--mesh", "2"], "bad memory": [m, "--memory", "lots"],
        "too little memory": [m, "--memory", "100"], "bad topology": [m, "--topology", tmp_path / "none.json"], "bad target": [m, "--target", "abacus"],
        "bad shape": [m, "--shape", "x"], "unknown shape": [m, "--shape", "nope=3"], "no rules": [m, "--rules", tmp_path / "none.py"],
    }  # fmt: skip


LINES = ["no such model", "a folder", "not a protobuf", "truncated", "no such axis", "no such operation", "impossible pin", "bad pin", "bad layout", "bad mesh", "no devices",
         "too many devices", "both", "bad memory", "too little memory", "bad topology", "bad target", "bad shape", "unknown shape", "no rules"]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LINES)
def test_bad_input_is_exit_2_and_writes_nothing(tmp_path, name):
    lines = bad_lines(tmp_path)
    assert set(lines) == set(LINES)
    before = sorted(tmp_path.rglob("*"))
    status, out, err = run("compile", *lines[name], "-o", tmp_path / "deep" / "b")
    assert status == 2, err
    assert out == ""
    assert err.startswith("tapestry compile: ") and len(err.strip().splitlines()) <= 6
    assert sorted(tmp_path.rglob("*")) == before


def test_an_impossible_pin_says_why(tmp_path):
    _, _, err = run("compile", save("mlp"), "-o", tmp_path / "b", "--devices", "16", "--pin", "up:i=16@d0")
    assert "7 points of 'i'" in err and "part 0 is empty" in err


@pytest.mark.slow
def test_too_little_memory_says_by_how_much(tmp_path):
    _, _, err = run("compile", save("mlp"), "-o", tmp_path / "b", "--memory", "100", "--devices", "2")
    assert "of 100" in err and "too many" in err and "device" in err


def test_an_unbound_symbol_lists_them(tmp_path, symbolic):
    status, _, err = run("compile", symbolic, "-o", tmp_path / "b")
    assert status == 2 and "batch" in err and "time" in err and "--shape" in err
    status, _, err = run("compile", symbolic, "-o", tmp_path / "b", "--shape", "batch=3")
    assert status == 2 and "time" in err
    d = document("compile", symbolic, "-o", tmp_path / "b", "--shape", "batch=3", "time=5", "--devices", "3")
    assert d["devices"] == 3
    d = document("compile", symbolic, "-o", tmp_path / "b", "--shape", "x=3x5x4")
    assert d["devices"] == 1


def test_bad_arguments_are_exit_2():
    for argv in ([], ["nope"], ["compile"], ["compile", "x.onnx"], ["run"], ["compile", "x", "-o", "y", "--devices", "two"]):
        status, out, err = run(*argv)
        assert status == 2 and "error: " in err and "usage" not in err and out == ""


def test_bad_inputs_of_run(build, tmp_path):
    np.save(tmp_path / "wrong.npy", np.zeros((2, 2), np.float32))
    np.save(tmp_path / "double.npy", np.zeros((2, 5, 12)))
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "junk.npy").write_bytes(b"junk")
    for item in (
        "x",
        "x=",
        f"x={tmp_path}/none.npy",
        f"x={tmp_path}/wrong.npy",
        f"x={tmp_path}/double.npy",
        f"x={tmp_path}/pickled.npy",
        f"x={tmp_path}/junk.npy",
        f"nope={tmp_path}/wrong.npy",
    ):
        status, out, err = run("run", build, "--input", item, "--output", tmp_path / "o")
        assert status == 2 and out == "" and err.startswith("tapestry run: "), item
        assert not (tmp_path / "o").exists()


# --- start-up, rules of one's own


def test_help_is_fast():
    heavy = "import sys; from tapestry.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    heavy += "assert not {'torch', 'numpy', 'onnx', 'islpy', 'highspy', 'sympy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, check=False).returncode == 0


def test_a_rule_of_ones_own_makes_the_plan_better(tmp_path):
    nodes = [N("MatMul", ["q", "kt"], ["s"], "scores"), N("MatMul", ["s", "v"], ["y"], "mix")]
    m = net(nodes, {"q": (T.FLOAT, [512, 8]), "kt": (T.FLOAT, [8, 512]), "v": (T.FLOAT, [512, 8])}, {"y": T.FLOAT})
    path = tmp_path / "linear.onnx"
    path.write_bytes(m.SerializeToString())
    plain = document("compile", path, "-o", tmp_path / "plain")
    mine = dict(RULES)
    try:
        better = document("compile", path, "-o", tmp_path / "better", "--rules", EXAMPLES / "reassociate.tap")
    finally:
        RULES.clear()
        RULES.update(mine)
    assert better["objective_s"] < plain["objective_s"] * 0.9
    assert any("reassociate" in move for move in better["moves"]) and not plain["moves"]
    assert run("verify", tmp_path / "better", "-q")[0] == 0
    assert run("run", tmp_path / "better", "--check", "-q")[0] == 0


def test_rules_that_do_not_load(tmp_path):
    for name, text in (
        ("syntax", "def"),
        ("raises", "1/0"),
        ("norule", "from tapestry.rewrites.core.rule import register\n@register\nclass X: pass"),
    ):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        status, _, err = run("rules", "--rules", path)
        assert (status == 2 and str(path) in err) or "X" in err


# --- the Python interface


def test_python_interface(tmp_path):
    c = case("mlp")
    build = tapestry.compile(save("mlp"), devices=2)
    np.testing.assert_allclose(build.run(c.feeds)["y"], c.expected["y"], atol=1e-6)
    assert "softmax" in build.explain().lower() or "probs" in build.explain()
    build.save(tmp_path / "b")
    again = tapestry.load(tmp_path / "b")
    assert np.array_equal(again.run(c.feeds)["y"], build.run(c.feeds)["y"])
    assert again.report["objective_s"] == build.report["objective_s"]
    for feeds in (
        {},
        {**c.feeds, "nope": c.feeds["x"]},
        {"x": c.feeds["x"][:3]},
        {"x": c.feeds["x"].astype(np.float64)},
        {"x": [[1, 2], [3]]},
    ):
        with pytest.raises(TapestryError):
            build.run(feeds)
    with pytest.raises(TapestryError):
        tapestry.compile(save("mlp"), target="abacus")
    with pytest.raises(BuildError):
        tapestry.load(tmp_path)
    assert issubclass(LawError, TapestryError)


def test_outputs_with_names_longer_than_a_file_may_have_are_files_all_the_same(tmp_path):
    first, second = "a" * 300 + "1", "a" * 300 + "2"
    found = write_outputs(tmp_path, {first: np.ones(2), second: np.zeros(2)})
    assert [float(np.load(p)[0]) for p in found] == [1.0, 0.0] and sorted(tmp_path.iterdir()) == sorted(found)


def test_scalars_and_inputs_that_are_outputs_run_from_a_build(tmp_path):
    c = case("scalars")
    build = tapestry.compile(save("scalars"), devices=3)
    build.save(tmp_path / "b")
    out = tapestry.load(tmp_path / "b").run(c.feeds)
    assert {k: v.shape for k, v in out.items()} == {k: v.shape for k, v in c.expected.items()}
    for k, v in c.expected.items():
        np.testing.assert_allclose(out[k], v, rtol=1e-5, atol=1e-6)


def test_awkward_names(tmp_path):
    """Tensor and node names with slashes, spaces, quotes, commas and dots in them, in pins and in files."""
    nodes = [N("MatMul", ["in put/0", 'w"q'], ["a,b"], "/layer.0/mat mul"), N("Relu", ["a,b"], ["../out:0"], "")]
    m = net(nodes, {"in put/0": (T.FLOAT, [4, 3])}, {"../out:0": T.FLOAT}, {'w"q': f32(3, 5)})
    path = tmp_path / "names.onnx"
    path.write_bytes(m.SerializeToString())
    d = document(
        "compile",
        path,
        "-o",
        tmp_path / "b",
        "--devices",
        "2",
        "--pin",
        "/layer.0/mat mul:i=2@d0",
        "--layout",
        "in put/0:0=2@d0",
    )
    assert d["certificate"]["passed"]
    status, _, err = run("run", tmp_path / "b", "--check", "--output", tmp_path / "out", "-q")
    assert status == 0, err
    (written,) = (tmp_path / "out").iterdir()
    assert written.parent == tmp_path / "out" and np.load(written).shape == (4, 5)


def test_a_model_with_no_operations(tmp_path):
    m = net([N("Identity", ["x"], ["y"], "id")], {"x": (T.FLOAT, [3])}, {"y": T.FLOAT})
    path = tmp_path / "id.onnx"
    path.write_bytes(m.SerializeToString())
    assert document("compile", path, "-o", tmp_path / "b", "--devices", "2")["certificate"]["passed"]
    assert run("run", tmp_path / "b", "--check", "-q")[0] == 0


def test_empty_tensors(tmp_path):
    m = net(
        [N("Relu", ["x"], ["r"], "relu"), N("Concat", ["r", "z"], ["y"], "cat", axis=0)],
        {"x": (T.FLOAT, [0, 3]), "z": (T.FLOAT, [2, 3])},
        {"y": T.FLOAT, "r": T.FLOAT},
    )
    path = tmp_path / "empty.onnx"
    path.write_bytes(m.SerializeToString())
    status, _, err = run("compile", path, "-o", tmp_path / "b", "--devices", "2", "-q")
    assert status in (0, 2), err
    if status == 0:
        assert run("run", tmp_path / "b", "--check", "-q")[0] == 0


@pytest.mark.slow
def test_kernels_are_compiled_and_tabled(build, tmp_path):
    d = document("kernels", build, "-o", tmp_path / "k", "--target", "triton:sm90")
    assert d["target"] == "triton:sm90" and d["kernels"]
    for row in d["kernels"]:
        assert (tmp_path / "k" / f"{row['kernel']}.py").is_file() and (tmp_path / "k" / f"{row['kernel']}.ptx").is_file()
    status, _, err = run("kernels", build, "-o", tmp_path / "k2", "--target", "triton:abacus")
    assert status == 2 and err and not (tmp_path / "k2").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("more", "then"),
    [
        ([], "tapestry run B --check"),
        (["--no-weights"], "tapestry verify B"),
        (["--target", "triton:sm90"], "tapestry verify B --kernels; on a GPU tapestry run B --check"),
    ],
)
def test_what_compile_says_to_do_next_can_be_done(more: list[str], then: str, tmp_path: Path):
    folder = tmp_path / "b"
    _, out, _ = run("compile", save("mlp"), "-o", folder, "--devices", "2", *more)
    said = out.splitlines()[-1].removeprefix("next: ").replace(str(folder), "B")
    assert said == f"tapestry explain B; {then}"
    for command in said.replace("B", str(folder)).split("; "):
        if not command.startswith("on a GPU"):
            assert run(*command.split()[1:])[0] == 0, command


def test_a_run_on_processes_says_that_a_preset_is_not_this_machine(tmp_path: Path):
    preset, own = tmp_path / "preset", tmp_path / "own"
    (tmp_path / "own.json").write_text(
        '{"device": {"memory": "1GiB", "bandwidth": 1e10, "flops": {"f32": 1e11}}, "levels": [{"alpha": 1e-5, "beta": 1e-9}]}'
    )
    for folder, topology in ((preset, "cpu"), (own, str(tmp_path / "own.json"))):
        run("compile", save("mlp"), "-o", folder, "--devices", "2", "--topology", topology, "-q")
    status, out, _ = run("run", preset, "--processes", "1")
    assert status == 0 and "warning: the plan is for the preset 'cpu', its forecast not of this machine" in " ".join(
        out.split()
    )
    assert document("run", own, "--processes", "1")["warnings"] == []
