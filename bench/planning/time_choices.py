"""Splits in time as choices beside cuts in space, against splits that are made where the best plan in space does not fit.

    .venv/bin/python -m bench time_choices [--only NAME …] [--share S …]

Networks whose activations are large beside their weights, on two devices, within a part of what their best plan needs.
*Before* is the search from graph to graph alone (`plan.memory.fit`), whose bound is the least work of each operation;
*together* is with the search that chooses splits and cuts at once, whose bound is of all plans of the splits that it was
offered. Processor seconds are of planning. Every plan is verified, and run against onnxruntime. Writes
bench/results/time_choices.json; exits 1 if a plan is worse, does not fit, or is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from unittest import mock

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

import tapestry
from bench.support import record
from bench.support.record import Row
from tapestry.plan.memory import fit

N = helper.make_node
SHARES = (0.6, 0.4)
MORE = 1e-3  # of the objective: plans that differ by less are equally good


def made(nodes: list[onnx.NodeProto], ins: dict[str, list[int]], weights: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """A model whose only result is that of its last node."""
    rng = np.random.default_rng(0)
    data = [numpy_helper.from_array((rng.standard_normal(s) / s[0] ** 0.5).astype("f"), n) for n, s in weights.items()]
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in ins.items()]
    outs = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", given, outs, data)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def feed_forward() -> onnx.ModelProto:
    """Three blocks of two products each, eight times as wide inside."""
    nodes, weights, t = list[onnx.NodeProto](), dict[str, tuple[int, ...]](), "x"
    for k in range(3):
        weights |= {f"up{k}": (64, 512), f"down{k}": (512, 64)}
        nodes += [N("MatMul", [t, f"up{k}"], [f"h{k}"], f"h{k}"), N("Tanh", [f"h{k}"], [f"a{k}"], f"a{k}")]
        nodes += [N("MatMul", [f"a{k}", f"down{k}"], [f"d{k}"], f"d{k}"), N("Add", [f"d{k}", t], [f"y{k}"], f"y{k}")]
        t = f"y{k}"
    return made(nodes, {"x": [2048, 64]}, weights)


def convolutions() -> onnx.ModelProto:
    """Four convolutions of many pixels and few channels."""
    nodes, weights, t = list[onnx.NodeProto](), dict[str, tuple[int, ...]](), "x"
    for k, (c, o) in enumerate(((3, 16), (16, 16), (16, 8), (8, 4))):
        weights[f"k{k}"] = (o, c, 3, 3)
        nodes += [N("Conv", [t, f"k{k}"], [f"c{k}"], f"c{k}", pads=[1] * 4), N("Relu", [f"c{k}"], [f"r{k}"], f"r{k}")]
        t = f"r{k}"
    return made(nodes, {"x": [2, 3, 96, 96]}, weights)


def scores() -> onnx.ModelProto:
    """Attention without a softmax: the scores of all pairs, with a bias."""
    nodes = [N("MatMul", ["x", f"w{c}"], [c], c) for c in "qkv"] + [
        N("Transpose", ["k"], ["kt"], "kt", perm=[0, 2, 1]),
        N("MatMul", ["q", "kt"], ["s"], "s"), N("Add", ["s", "bias"], ["b"], "b"),
        N("Relu", ["b"], ["p"], "p"), N("MatMul", ["p", "v"], ["c"], "c"), N("MatMul", ["c", "wo"], ["y"], "y"),
    ]  # fmt: skip
    return made(nodes, {"x": [2, 512, 64], "bias": [512, 512]}, {f"w{c}": (64, 64) for c in "qkvo"})


MODELS = {"feed forward": feed_forward, "convolutions": convolutions, "scores": scores}


def planned(model: onnx.ModelProto, limit: int, *, together: bool) -> Row:
    """A plan within a limit, verified and run."""
    start = time.process_time()
    apart = mock.patch.object(fit._Search, "together", lambda *args: None)  # pyright: ignore[reportPrivateUsage]
    try:
        if not together:
            apart.start()
        build = tapestry.compile(model, devices=2, topology="cpu", memory=str(limit))
    finally:
        mock.patch.stopall()
    report = build.report
    return {
        "objective_s": report["objective_s"], "gap": report["gap"], "peak_bytes": max(report["peak_bytes"]),
        "moves": report["moves"], "offered": len(report.get("fit", {}).get("offered", [])),
        "cpu_s": round(time.process_time() - start, 2),
        "ok": bool(build.verify()) and build.check(build.random_feeds(0))["passed"] and max(report["peak_bytes"]) <= limit,
    }  # fmt: skip


def rows_of(name: str, shares: list[float]) -> list[Row]:
    """A model within each part of what its best plan needs."""
    model = MODELS[name]()
    free = tapestry.compile(model, devices=2, topology="cpu").report
    out: list[Row] = []
    for share in shares:
        limit = int(share * max(free["peak_bytes"]))
        both = {k: planned(model, limit, together=k == "together") for k in ("before", "together")}
        out.append({"model": name, "share": share, "limit": limit, "free_s": free["objective_s"], **both})
    return out


def good(row: Row) -> bool:
    """Whether both plans are right, and the second one no worse."""
    a, b = row["before"], row["together"]
    return a["ok"] and b["ok"] and b["objective_s"] <= a["objective_s"] * (1 + MORE)


def main() -> int:
    """Run, show, write; 1 if a plan is worse or wrong."""
    p = argparse.ArgumentParser(prog="bench time_choices")
    p.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    p.add_argument("--share", nargs="+", type=float, default=SHARES, metavar="S")
    args = p.parse_args()
    rows = [r for name in args.only for r in rows_of(name, args.share)]
    table = Table("model", "limit", "before ms", "gap", "together ms", "gap", "of", "offered", "CPU s", box=None)
    for r in rows:
        a, b = r["before"], r["together"]
        table.add_row(
            r["model"], f"{r['share']:.0%}", f"{a['objective_s'] * 1e3:.3f}", f"{a['gap']:.1%}",
            f"{b['objective_s'] * 1e3:.3f}", f"{b['gap']:.1%}", f"{b['objective_s'] / a['objective_s']:.3f}", str(b["offered"]),
            f"{a['cpu_s']} → {b['cpu_s']}",
        )  # fmt: skip
    Console(width=120).print(table)
    record.write("time_choices", record.merged("time_choices", rows, ("model", "share")))
    return int(not all(map(good, rows)))


if __name__ == "__main__":
    sys.exit(main())
