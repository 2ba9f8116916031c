"""Exact communication: five cases whose least bytes are known, planned and compared with the figures of a peer's compiler.

    .venv/bin/python bench/communication.py

Expected bytes are derived in each case's docstring; XLA's (JAX 0.10.2, Shardy, 8 host devices, counted from its HLO) are
the same. Writes bench/results/communication.json; exits 1 on any mismatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import record
from onnx import TensorProto, helper, numpy_helper
from record import WORK, Row
from rich.console import Console
from rich.table import Table

import tapestry

DEVICES = 8
Case = tuple[onnx.ModelProto, list[str], list[str], Callable[[list[Row]], bool], int, int]
"""(model, layouts, pins, whether the transfers are as they should be, expected bytes, XLA's bytes)."""


def model(nodes: list[onnx.NodeProto], x: list[int], y: list[int], weights: dict[str, list[int]]) -> onnx.ModelProto:
    """A model x → y with random weights."""
    rng = np.random.default_rng(0)
    tensors = [numpy_helper.from_array(rng.standard_normal(s, dtype=np.float32), n) for n, s in weights.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)]
    graph = helper.make_graph(nodes, "case", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def convolution(kernel: int, stride: int, pad: int, rows: int) -> Case:
    """8×224×224×64 with H over 8 devices at both ends: ``rows`` rows of 8·224·64 floats cross each of 7 boundaries.

    3×3 stride 1: one row each way. 3×3 stride 2, pad 1: output row h reads 2h−1 … 2h+1, so one row from above only.
    7×7 stride 2, pad 3: rows 2h−3 … 2h+3, so three from above and two from below.
    """
    window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", **window)
    out = (224 + 2 * pad - kernel) // stride + 1
    made = model([node], [8, 64, 224, 224], [8, 64, out, out], {"w": [64, 64, kernel, kernel]})
    expected = rows * 7 * 8 * 224 * 64 * 4
    return made, ["x:2=8@d0", "y:2=8@d0"], [], lambda t: only(t, "halo", expected), expected, expected


def megatron() -> Case:
    """512×4096 → 16384 → 4096, the first weight cut by columns, the second by rows, output replicated.

    One all-reduce of 512·4096 floats = 8,388,608 bytes per device; a ring puts 2·7 times that on the wire in all.
    """
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], name="up"),
        helper.make_node("Relu", ["h"], ["a"], name="act"),
        helper.make_node("MatMul", ["a", "w2"], ["y"], name="down"),
    ]
    made = model(nodes, [512, 4096], [512, 4096], {"w1": [4096, 16384], "w2": [16384, 4096]})
    layouts = ["x:replicated", "w1:1=8@d0", "w2:0=8@d0", "y:replicated"]
    payload = 512 * 4096 * 4

    def right(t: list[Row]) -> bool:
        return only(t, "all_reduce", 14 * payload) and t[0]["count"] == 1 and t[0]["payload_bytes"] == payload

    return made, layouts, ["up:n=8@d0", "down:m=8@d0"], right, 14 * payload, 14 * payload


def softmax() -> Case:
    """4096×1024, softmax along the sharded axis of 4096: a maximum and a sum per column, no element of the matrix moves.

    At most two all-reduces of 1024 floats, 2·7·4096 bytes on the wire each; one of both together is as good.
    """
    made = model([helper.make_node("Softmax", ["x"], ["y"], name="softmax", axis=0)], [4096, 1024], [4096, 1024], {})
    most = 2 * 14 * 1024 * 4

    def right(t: list[Row]) -> bool:
        return {r["kind"] for r in t} == {"all_reduce"} and t[0]["count"] <= 2 and t[0]["bytes"] <= most

    return made, ["x:0=8@d0", "y:0=8@d0"], [], right, most, most


def only(transfers: list[Row], kind: str, nbytes: int) -> bool:
    """Whether there is one kind of transfer and it moves exactly so many bytes."""
    return [(t["kind"], t["bytes"]) for t in transfers] == [(kind, nbytes)]


CASES: dict[str, Callable[[], Case]] = {
    "conv 3×3 stride 1": lambda: convolution(3, 1, 1, 2),
    "conv 3×3 stride 2 pad 1": lambda: convolution(3, 2, 1, 1),
    "conv 7×7 stride 2 pad 3": lambda: convolution(7, 2, 3, 5),
    "Megatron MLP": megatron,
    "softmax, sharded axis": softmax,
}


def measure(name: str, case: Case) -> Row:
    """Plan one case."""
    made, layouts, pins, right, expected, xla = case
    WORK.mkdir(parents=True, exist_ok=True)
    path = Path(WORK / "case.onnx")
    onnx.save(made, path)
    build = tapestry.compile(path, devices=DEVICES, layouts=layouts, pins=pins)
    transfers: list[dict[str, Any]] = list(build.report["transfers"])
    total = sum(t["bytes"] for t in transfers)
    return {
        "case": name, "layouts": layouts, "pins": pins, "transfers": transfers, "bytes": total, "expected_bytes": expected,
        "xla_bytes": xla, "ratio_to_xla": total / xla, "passed": right(transfers), "moves": build.report["moves"],
    }  # fmt: skip


def main() -> int:
    """Measure, print and record."""
    rows = [measure(name, case()) for name, case in CASES.items()]
    table = Table(title=f"Bytes between {DEVICES} devices, all senders", title_justify="left")
    for c in ("case", "transfers", "ours", "expected", "XLA", "ours / XLA", ""):
        table.add_column(c, justify="left" if c in ("case", "transfers") else "right")
    for r in rows:
        kinds = ", ".join(f"{t['count']} {t['kind']} ({t['payload_bytes']:,} per device)" for t in r["transfers"])
        numbers = [f"{r[k]:,}" for k in ("bytes", "expected_bytes", "xla_bytes")]
        table.add_row(r["case"], kinds, *numbers, f"{r['ratio_to_xla']:.3f}", "ok" if r["passed"] else "[red]DIFFERS")
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    record.write("communication", rows, devices=DEVICES)
    return 0 if all(r["passed"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
