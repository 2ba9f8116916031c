"""Mistakes that people make, each with what it says."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import highspy
import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tapestry
from tapestry.cli.entry import main, parsed
from tapestry.errors import TapestryError, some
from tapestry.ir.plan import MeshAxis
from tapestry.plan.solver.mip import Solver
from tapestry.runtime.calibration.automatic import automatic
from tapestry.tools.rulebook.small_graphs import GRAPHS
from tapestry.viz import measured
from tapestry.viz.format import human
from tests.support.command_line import document, run
from tests.support.paths import ROOT
from tests.support.small_models import net, save


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command says that is refused."""
    try:
        status = main([str(w) for w in words])
    except SystemExit as e:
        status = int(e.code or 0)
    assert status == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes") / "b"
    tapestry.compile(save("mlp"), devices=2).save(folder)
    return folder


def test_a_place_that_is_taken_is_said_before_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    start = time.process_time()
    assert "was not written by this command" in said(capsys, "compile", tmp_path / "notes.txt", "-o", tmp_path)
    assert time.process_time() - start < 2 and (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_outputs_do_not_go_into_a_build(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (build, build / "out", build / ".." / build.name / "out"):
        assert "a folder beside it" in said(capsys, "run", build, "--output", place)
    assert main(["verify", str(build), "-q"]) == 0


def test_a_name_that_is_nearly_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tapestry.compile(save("mlp"), devices=1).build.model
    said_so = said(capsys, "compile", model, "-o", tmp_path / "b", "--shape", "xx=4x4")
    assert "unknown name in --shape" in said_so and "--shape x=4x4" in said_so
    for words, right in (
        (("complie", model), "'compile'"),
        (("compile", model, "-o", tmp_path / "b", "--device", "2"), "'--devices'"),
        (("compile", model, "-o", tmp_path / "b", "--topology", "h10"), "'h100'"),
        (("compile", model, "-o", tmp_path / "b", "--without-rule", "fuse_map"), "'fuse_maps'"),
        (("compile", model, "-o", tmp_path / "b", "--print-after", "solv"), "'solve'"),
        (("compile", model, "-o", tmp_path / "b", "--pin", "dwn:m=2@d0", "--devices", "2"), "down"),
        (("rules", "fuse_map"), "'fuse_maps'"),
    ):
        assert right in said(capsys, *words).split("  try: ")[1], words
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("compile MODEL -o OUT --mesh tp=2,tp=4", "tp stands twice"),
        ("compile MODEL -o OUT --devices 2 --pin up:i=d0,n=d0", "mesh axis 'd0' is pinned twice"),
        ("compile MODEL -o OUT --devices 2 --topology machine.json", "machine.json: not a topology: no such preset or file"),
        ("compile MODEL -o OUT --target cuda", "triton:sm80, "),
        ("run OUT", "there is no such folder"),
        ("opt GRAPH -r fuse_map@y", "'fuse_maps' is similar"),
    ],
)
def test_what_is_wrong_is_named(words: str, right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "g.tap").write_text(GRAPHS["Linear"])
    places = {"MODEL": save("mlp"), "OUT": tmp_path / "b", "GRAPH": tmp_path / "g.tap"}
    assert right in said(capsys, *(places.get(w, w) for w in words.split()))


def test_names_of_the_hub_are_not_fetched() -> None:
    with pytest.raises(TapestryError) as e:
        tapestry.from_pretrained("Qwen/Qwen2-0.5B")
    assert "names of the hub are not fetched" in e.value.hint


def test_auto_may_stand_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPESTRY_TOPOLOGY", "auto")
    monkeypatch.setattr("tapestry.runtime.calibration.automatic.place", lambda devices: (tmp_path / "none" / "t.json", 1))
    assert automatic(1) == "cpu"


def test_what_is_no_terminal_gets_no_blanks(build: Path, tmp_path: Path) -> None:
    words = ("compile", save("mlp"), "-o", tmp_path / "b", "--devices", "2", "--topology", "cpu")
    for text in (run(*words)[1], run("run", build)[1]):
        assert len(text.splitlines()) > 5 and all(line == line.rstrip() for line in text.splitlines())


def test_one_thing_is_not_called_several() -> None:
    assert [some(n, "batch") for n in (0, 1, 2000)] == ["0 batches", "1 batch", "2,000 batches"]
    assert [human(n) for n in (1023, 1 << 20, 1_070_000_000)] == ["1,023 B", "1.00 MiB", "1.00 GiB"]


def test_a_model_that_was_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "at").mkdir()
    model = tmp_path / "at" / "m.onnx"
    model.write_bytes(save("mlp").read_bytes())
    tapestry.compile(model, devices=1).save(tmp_path / "at" / "b")
    now = model.rename(tmp_path / "elsewhere.onnx")
    assert "tapestry run BUILD --model FILE" in said(capsys, "run", tmp_path / "at" / "b")
    assert main(["run", str(tmp_path / "at" / "b"), "--model", str(now), "--check"]) == 0
    assert main(["verify", str(tmp_path / "at" / "b"), "--model", str(now), "-q"]) == 0
    now.write_bytes(save("conv_chain").read_bytes())
    assert "weight" in said(capsys, "run", tmp_path / "at" / "b", "--model", now), "another model is none of its"
    model.write_bytes(save("mlp").read_bytes())
    (tmp_path / "at").rename(tmp_path / "moved")
    assert main(["run", str(tmp_path / "moved" / "b")]) == 0, "a model that moved with its build is found beside it"


def test_data_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(onnx.load(save("mlp")), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    tapestry.compile(tmp_path / "m.onnx", devices=1).save(tmp_path / "b")
    (tmp_path / "w.bin").unlink()
    assert "run: a moved model by --model" in said(capsys, "run", tmp_path / "b")
    assert "--no-weights goes without it" in said(capsys, "compile", tmp_path / "m.onnx", "-o", tmp_path / "c")


def test_memory_that_cannot_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, model = time.process_time(), save("mlp")
    text = said(capsys, "compile", model, "-o", tmp_path / "b", "--devices", "2", "--memory", "24")
    assert "24 is bytes; write 24MiB" in text and time.process_time() - start < 2
    assert "not an amount of memory" in said(capsys, "compile", model, "-o", tmp_path / "b", "--memory", "much")
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(model)), tmp_path / "m.onnx")
    text = said(capsys, "compile", tmp_path / "m.onnx", "-o", tmp_path / "b", "--devices", "2", "--memory", "60B")
    assert "no plan fits: the outputs take" in text
    text = said(capsys, "compile", model, "-o", tmp_path / "b", "--devices", "2", "--memory", "600", "--pin", "up:m=2@d0")
    assert "284 too many" in text and "pins and annotations keep the graph as it is" in text


def test_a_package_that_is_not_installed(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tapestry.compile(save("mlp"), target="triton:sm90").save(tmp_path / "t")
    for name in [n for n in sys.modules if n.partition(".")[0] == "triton" or n.startswith("tapestry.codegen.triton.run")]:
        monkeypatch.delitem(sys.modules, name)
    for package, words in (
        ("triton", ("run", tmp_path / "t")),
        ("triton", ("kernels", build, "-o", tmp_path / "k")),
    ):
        with monkeypatch.context() as m:
            m.setitem(sys.modules, package, None)
            text = said(capsys, *words)
        assert f"'{package}' is not installed" in text and f"pip install {package}" in text and "bug" not in text


def test_estimates_that_are_far_off_say_what_mends_them() -> None:
    step = {"what": "'y'", "kind": "compute", "estimated_s": 1e-6, "measured_s": 1.7e-5, "waited_s": 0.0}
    facts = {
        "processes": 1, "threads": 1, "steps": [step, step], "kinds": {"compute": {"steps": 2, **step}}, "error": 16.3,
        "overlap": {"on_the_way_s": 0.0, "hidden_s": 0.0}, "measured_s": 3.4e-5, "simulated_s": 2e-6, "step_error": 17.0,
    }  # fmt: skip
    far, near = (" ".join(measured.text({**facts, "error": e}).split()) for e in (16.3, 0.2))
    assert "tapestry calibrate -o" in far and "compile --topology" in far and "calibrate" not in near


def test_a_value_between_two_equal_cells_is_that_value(tmp_path: Path) -> None:
    resize = helper.make_node("Resize", ["x", "", "s"], ["r"], mode="linear")
    scales = numpy_helper.from_array(np.array([1, 1, 3, 3], np.float32), "s")
    nodes = [resize, helper.make_node("Floor", ["r"], ["y"])]
    ends = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [1, 1, 5, 5]), ("y", [1, 1, 15, 15]))]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], [scales])), tmp_path / "m.onnx")
    x = np.full((1, 1, 5, 5), 6, np.float32)
    assert (tapestry.compile(tmp_path / "m.onnx", devices=2).run({"x": x})["y"] == 6).all()


def test_a_terminal_without_our_letters(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("ascii", "latin-1", "cp1252"):
        out = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding, errors="strict"))
        for command in ("explain", "run"):
            assert main([command, str(build)]) == 0
        sys.stdout.flush()
        assert b"ran in" in out.getvalue() or command == "explain"


def test_a_run_that_compares_nothing_has_not_passed(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(build)]) == 0
    plain = capsys.readouterr().out
    assert "ran in" in plain and "passed" not in plain and "rel err" not in plain
    assert main(["run", str(build), "--check"]) == 0
    checked = capsys.readouterr().out
    assert "passed in" in checked and "rel err" in checked


def test_arguments_from_python() -> None:
    model = save("mlp")
    for mesh in ((1, 2), [1, 2], "1x2", {"dp": 1, "tp": 2}, (MeshAxis("dp", 1), MeshAxis("tp", 2))):
        assert [a.size for a in tapestry.compile(model, mesh=mesh).build.plan.mesh] == [1, 2]
    assert tapestry.compile(model, devices=2, memory=1 << 30).build.memory == 1 << 30
    pinned = tapestry.compile(model, mesh={"tp": 2}).build.plan.graph.ops[0]
    one = tapestry.compile(model, mesh={"tp": 2}, pins=f"{pinned.source[-1]}:{pinned.dims[0].name}=2@tp")
    assert any(s.dims[0] == pinned.dims[0].name for s in one.build.plan.strategies)
    for name, values in {
        "devices": ("4", 2.0, True, 0), "mesh": (2.5, (2, "a")), "memory": (1.5, -3, "16GiBB"), "pins": (3, ["up:m=2@d0", 4]),
        "layouts": ({"x": 0},), "rules": (5,), "target": (None, "tritn"), "time_limit": ("x",), "topology": (5, "h10"),
        "shapes": (["x=3"],), "without": (object(),), "seed": (None, "1")[1:], "precision": ("tf33",),
    }.items():  # fmt: skip
        for wrong in values:
            with pytest.raises(TapestryError) as e:
                tapestry.compile(model, **{"devices": None, name: wrong})
            assert e.value.hint, (name, wrong)


def test_a_plan_says_what_it_is(tmp_path: Path) -> None:
    made = tapestry.compile(save("mlp"), mesh={"tp": 2}, topology="h100", pins="up:m=2@tp", stages=1)
    text = repr(made)
    assert "mlp.onnx" in text and "tp=2" in text and "gap" in text and "torch-cpu" in text
    (up,) = (i for i, op in enumerate(made.build.plan.graph.ops) if "up" in op.source)
    assert made.build.plan.strategies[up].dims == ("m",)
    assert {"tp"} == {a for cut in made.placements.values() for a in cut}
    assert sum(t["bytes"] for t in made.transfers) == sum(t["bytes"] for t in made.report["transfers"]) > 0
    assert max(made.memory["peak_bytes"]) == max(made.report["peak_bytes"])
    assert made.check()["passed"] and made.check()["reference"]
    assert set(made.laws) <= set(made.verify())
    assert made.export(tmp_path / "m.onnx")["specs"] > 0 and (tmp_path / "m.onnx").is_file()
    assert made.export(tmp_path / "m.json", "dtensor", nearest=True)["parameters"] == 3 and (tmp_path / "m.json").is_file()
    with pytest.raises(tapestry.TapestryError, match="'dtensor' is similar"):
        made.export(tmp_path / "m.json", "dtenso")


@pytest.mark.parametrize("option", ["--shape n=4", "--shape n=4 m=5", "--pin y:x0=1", "--layout x:replicated"])
def test_a_list_of_values_ends_before_the_model(option):
    args = parsed(["compile", "-o", "b", *option.split(), "model.onnx", "-q"])
    assert str(args.model) == "model.onnx" and args.quiet
    assert getattr(args, option.split()[0][2:] + "s") == option.split()[1:]
    prove = parsed(["prove", "--shape", "n=4", "model.onnx", "ranks"])
    assert [str(p) for p in prove.program] == ["ranks"] and prove.shapes == ["n=4"]


def test_a_mistake_in_the_arguments_is_said_in_two_lines(capsys):
    for words in (["compile", "m.onnx"], ["compile", "m.onnx", "-o", "b", "--devices", "two"], ["run", "b", "--shape"]):
        err = said(capsys, *words)
        assert "error: " in err and len(err.splitlines()) == 2, err


# inputs that nobody gave


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [(), ("--processes", "1")])
def test_inputs_that_nobody_gave_are_named(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    nodes = [helper.make_node("Mul", ["x", "mask"], ["y"])]
    onnx.save(net(nodes, {"x": (T.FLOAT, (2, 4)), "mask": (T.FLOAT, (2, 4))}, {"y": T.FLOAT}), tmp_path / "m.onnx")
    build = tmp_path / "b"
    assert run("compile", tmp_path / "m.onnx", "-o", build, "--topology", "cpu", "-q")[0] == 0
    for name in ("x", "mask"):
        np.save(tmp_path / f"{name}.npy", np.ones((2, 4), np.float32))
    some = ("run", build, *ranks, "--input", f"x={tmp_path / 'x.npy'}")
    status, out, err = run(*some, "--seed", "3")
    assert status == 0
    assert "mask: random (seed 3)" in out
    assert "mask: random (seed 3)" in err
    assert document(*some)["random_inputs"] == ["mask"]
    status, out, err = run(*some, "--input", f"mask={tmp_path / 'mask.npy'}")
    assert (status, err, "random" in out) == (0, "", False)
    status, out, err = run("run", build, *ranks)
    assert (status, err) == (0, "")
    assert "x, mask: random (seed 0)" in out


LOUD = """
import ctypes, sys
from tapestry.cli import entry
def loud(find):
    def wrapped(*a):
        ctypes.CDLL(None).puts(b"a banner of a library in C")  # stays in C's buffer to the end of the process
        import os
        os.write(1, b"a banner\\n")
        print("a banner in Python")
        return find(*a)
    return wrapped
entry.COMMANDS = {k: (loud(f), *rest) for k, (f, *rest) in entry.COMMANDS.items()}
sys.argv = ["tapestry", *sys.argv[1:]]
sys.exit(entry.main())
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["mlp", "none"])
def test_a_document_is_alone_on_standard_output(tmp_path: Path, model: str) -> None:
    """Whatever a library prints there, on success and on failure."""
    path = save("mlp") if model == "mlp" else tmp_path / "none.onnx"
    (tmp_path / "none.onnx").write_bytes(b"no model")
    words = [sys.executable, "-c", LOUD, "compile", str(path), "-o", str(tmp_path / "b"), "--topology", "cpu", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ("error" in json.loads(done.stdout)) == (done.returncode == 2) == (model == "none")
    assert done.stderr.count("a banner") == 3


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even as it is made: HiGHS 1.16 greets when callbacks are asked for."""
    flags, enable = [], highspy.Highs.enableCallbacks

    def watched(self: highspy.Highs) -> None:
        flags.append(self.getOptionValue("output_flag")[1])
        enable(self)

    monkeypatch.setattr(highspy.Highs, "enableCallbacks", watched)
    Solver().run()
    assert flags == [False]
    assert capfd.readouterr() == ("", "")


# interrupts, and a full disk


@pytest.mark.slow
def test_an_interrupted_run_by_ranks_ends_with_status_130(build: Path, tmp_path: Path) -> None:
    """As any other interrupted command: a script must not take it for a failed check."""
    words = [sys.executable, "-m", "tests.support.programs.slow_ranks", tmp_path / "mark", "1", "tapestry"]
    run = subprocess.Popen([*words, "run", build, "--processes", "2"], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    end = time.monotonic() + 100
    while not (tmp_path / "mark").exists():
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert "interrupted by SIGINT" in err
    assert run.returncode == 130


FULL = """
import resource, sys
from tapestry.cli import entry
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # no file may be longer: as where a disk is full
sys.exit(entry.main())
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", ["run", "compile", "view"])
def test_what_cannot_be_written_is_named(tmp_path: Path, command: str) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    weight = {"w": np.ones((40, 40), np.float32)}
    onnx.save(net(nodes, {"x": (T.FLOAT, (40, 40))}, {"y": T.FLOAT}, weight), tmp_path / "m.onnx")
    tapestry.compile(tmp_path / "m.onnx", devices=1, topology="cpu").save(tmp_path / "b")
    place, b = tmp_path / "there", tmp_path / "b"
    words = {
        "run": ["run", b, "--output", place],
        "compile": ["compile", tmp_path / "m.onnx", "-o", place, "--topology", "cpu", "--bundle"],
        "view": ["view", b, "-o", place],
    }[command]
    done = subprocess.run([sys.executable, "-c", FULL, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"{place}" in done.stderr and "cannot be written" in done.stderr, done.stderr
    assert not list(tmp_path.glob(".*"))
