"""Processes of ours do not outlive us, and do not hold an interrupt up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import onnx.helper as oh
import pytest

ROOT = Path(__file__).parents[2]
LOOPING = """
import sys
from tapestry.onnx_eval import ort_session
ort_session.ready()
print(ort_session._helper[1].pid, flush=True)
ort_session.apart(open(sys.argv[1], "rb").read(), {})
"""
BUSY = """
import subprocess, sys, threading, time
from tapestry.system.processes import started
made = []
def start():
    made.append(started([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL))
thread = threading.Thread(target=start)  # which is gone long before its process is
thread.start(); thread.join(); time.sleep(0.3)
assert made[0].poll() is None
print(made[0].pid, flush=True)
time.sleep(60)
"""
SPAWNED = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from tapestry.system.processes import end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def endless() -> onnx.ModelProto:
    """A Loop of 1e12 steps, which nothing but the end of its process stops."""
    number = onnx.TensorProto.INT64
    flag = oh.make_tensor_value_info("go", onnx.TensorProto.BOOL, [])
    held, step, y = (oh.make_tensor_value_info(n, number, []) for n in ("held", "step", "y"))
    sums = [oh.make_node("Add", ["held", "step"], ["next"]), oh.make_node("Identity", ["go"], ["more"])]
    more, following = (
        oh.make_tensor_value_info("more", onnx.TensorProto.BOOL, []),
        oh.make_tensor_value_info("next", number, []),
    )
    body = oh.make_graph(sums, "body", [step, flag, held], [more, following])
    stored = [oh.make_tensor("n", number, [], [10**12]), oh.make_tensor("zero", number, [], [0])]
    nodes = [oh.make_node("Loop", ["n", "", "zero"], ["y"], "spin", body=body)]
    graph = oh.make_graph(nodes, "endless", [], [y], stored)
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 17)], ir_version=9)


def _there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
@pytest.mark.parametrize("program", [LOOPING, BUSY, SPAWNED], ids=["onnxruntime", "a thread's", "multiprocessing's"])
def test_a_process_is_gone_when_its_parent_is_killed(program, tmp_path):
    onnx.save(endless(), tmp_path / "m.onnx")
    (tmp_path / "p.py").write_text(program)
    command = [sys.executable, tmp_path / "p.py", tmp_path / "m.onnx"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(2 if program == LOOPING else 0.2)  # it computes
        assert _there(child) and parent.poll() is None
        parent.kill()
    end = time.monotonic() + 2
    while _there(child) and time.monotonic() < end:
        time.sleep(0.02)
    gone = not _there(child)
    if not gone:
        os.kill(child, signal.SIGKILL)
    assert gone
