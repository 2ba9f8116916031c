"""Ctrl-C at any moment is status 130 without a traceback, and so is a reader that goes away quiet."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import onnx
import onnx.helper as oh
import pytest

from tests.support.small_models import save

ROOT = Path(__file__).parents[2]
IN_PROCESS = """
import sys
from tapestry.system import interrupts
from tapestry.onnx_eval.ort_session import ort_session
session = ort_session(open(sys.argv[1], "rb").read())
sys.exit(interrupts.ending(lambda: print("runs", flush=True) or session.run(None, {}) or 0))
"""
SWALLOWED = """
import sys, time
from tapestry.system import interrupts
def command():
    print("runs", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
sys.exit(interrupts.ending(command))
"""


def _started(*words: object, code: str = "") -> subprocess.Popen[str]:
    how = ["-c", code] if code else ["-m", "tapestry"]
    command = [sys.executable, *how, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def _ended(*words: object) -> int:
    process = _started(*words)
    process.communicate(timeout=100)
    return process.returncode


def _interrupted(process: subprocess.Popen[str]) -> tuple[int, str, float]:
    """Its status, what it said, and the seconds it took to end."""
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    err = process.communicate(timeout=100)[1]
    return process.returncode, err, time.monotonic() - start


@cache
def _folder() -> Path:
    place = Path(tempfile.mkdtemp(prefix="tapestry-test-"))
    command = [sys.executable, "-m", "tapestry", "compile", save("conv_chain"), "-o", place / "build", "--mesh", "2x2", "-q"]
    subprocess.run([*map(str, command), "--topology", "cpu"], check=True, cwd=ROOT)
    return place


def _commands() -> dict[str, list[object]]:
    build = _folder() / "build"
    return {
        "compile": ["compile", save("conv_chain"), "-o", _folder() / "other", "--mesh", "2x2", "--topology", "cpu"],
        "run": ["run", build, "--check"],
        "verify": ["verify", build],
        "explain": ["explain", build],
        "doctor": ["doctor", save("conv_chain")],
    }


def _python_up() -> float:
    """Seconds until Python itself is up, as busy as the machine is now: before that nobody can catch a signal."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import runpy, typing"], check=True)
    return time.monotonic() - start


def _steps(name: str, steps: int) -> None:
    words, other = _commands()[name], _folder() / "other"
    first = 0.04 + 2 * max(_python_up() for _ in range(3))
    start = time.monotonic()
    assert _ended(*words) == 0
    whole = max(time.monotonic() - start, 2 * first)
    seen = set[int]()
    for k in range(steps):
        process = _started(*words)
        time.sleep(first + (whole - first) * k / steps)
        status, err, _ = _interrupted(process)
        seen.add(status)
        assert status in (0, 130) and "Traceback" not in err, (k, status, err)
        left = [p.name for p in _folder().iterdir()]
        assert set(left) <= {"build", "other"}, left
        if other.exists():
            assert _ended("verify", other) == 0
    assert 130 in seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["explain"])
def test_three_moments(name):
    _steps(name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compile", "run", "verify", "explain", "doctor"])
def test_twenty_moments(name):
    _steps(name, 20)


def _endless() -> onnx.ModelProto:
    """A Loop of 1e12 steps, which nothing but the end of its process stops."""
    number, flag = onnx.TensorProto.INT64, onnx.TensorProto.BOOL
    sums = [oh.make_node("Add", ["held", "step"], ["next"]), oh.make_node("Identity", ["go"], ["more"])]
    ins = [oh.make_tensor_value_info(n, t, []) for n, t in (("step", number), ("go", flag), ("held", number))]
    outs = [oh.make_tensor_value_info(n, t, []) for n, t in (("more", flag), ("next", number))]
    stored = [oh.make_tensor("n", number, [], [10**12]), oh.make_tensor("zero", number, [], [0])]
    loop = oh.make_node("Loop", ["n", "", "zero"], ["y"], "spin", body=oh.make_graph(sums, "body", ins, outs))
    graph = oh.make_graph([loop], "endless", [], [oh.make_tensor_value_info("y", number, [])], stored)
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 17)], ir_version=9)


@pytest.mark.slow
def test_a_loop_that_never_ends(tmp_path):
    onnx.save(_endless(), tmp_path / "m.onnx")
    words = ["compile", tmp_path / "m.onnx", "-o", tmp_path / "b", "--mesh", "2", "--topology", "cpu", "-q"]
    assert _ended(*words) == 0
    process = _started("run", tmp_path / "b")
    time.sleep(5)
    assert process.poll() is None
    status, err, seconds = _interrupted(process)
    assert status == 130 and "Traceback" not in err and seconds < 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("code", [IN_PROCESS, SWALLOWED], ids=["in onnxruntime", "swallowed"])
def test_what_an_exception_does_not_end(code, tmp_path):
    onnx.save(_endless(), tmp_path / "m.onnx")
    process = _started(tmp_path / "m.onnx", code=code)
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    time.sleep(0.5)
    status, err, seconds = _interrupted(process)
    assert status == 130 and "Traceback" not in err and seconds < 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["--version", "-v"], ["--print-completion", "bash"], ["compile", "--help"], ["rules"], ["rules", "--json"],
     ["explain"], ["explain", "--json"], ["doctor", "-v"], ["nothing"]],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("both", [False, True])
def test_a_closed_pipe(words, both):
    words = [*words, *{"explain": [_folder() / "build"], "doctor": [save("conv_chain")]}.get(words[0], [])]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        command = [sys.executable, "-m", "tapestry", *map(str, words)]
        done = subprocess.run(command, stdout=closed, stderr=closed if both else subprocess.PIPE, cwd=ROOT, timeout=100)
    expected = {2} if words == ["nothing"] and not both else {141}
    assert done.returncode in expected | ({0} if "--help" in words else set()), done  # (argparse takes no notice itself)
    assert b"Traceback" not in (done.stderr or b"") and b"Exception" not in (done.stderr or b"")
