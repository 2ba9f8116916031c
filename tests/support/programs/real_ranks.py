"""Builds of every sort on forked ranks, each beside the same build in one process; a program of its own, because a process that
has used torch's threads must not fork. Prints one JSON document: case -> what is wrong, and facts about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry import api, launch
from tapestry.api import Compiled
from tapestry.ir.graph import Block
from tapestry.ir.program import Launch, Load, Reduce, Transfer, transfer_bytes
from tests.support.small_models import N, f32, net

Facts = dict[str, Any]
DEVICE = {"memory": "1GiB", "bandwidth": 1e10, "launch": 1e-6, "vector": 1e10, "flops": {"f32": 1e10, "other": 1e10}}
NODES = {"device": DEVICE, "levels": [{"devices": 2, "alpha": 1e-7, "beta": 1e-11}, {"alpha": 1e-4, "beta": 1e-7}]}
FAST = {"name": "fast", "bandwidth": 5e10, "vector": 5e10, "flops": {"f32": 5e10}}


class Trial:
    """A folder in which builds run on processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wrong = folder, list[str]()
        folder.mkdir(parents=True)

    def model(self, proto: Any) -> Path:
        path = self.folder / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        return path

    def outputs(self, build: Compiled, processes: int, *, runs: int = 1, check: bool = False) -> dict[str, bytes]:
        """Every file that a run wrote, or several of the same ranks; bytes and peaks are held against the plan."""
        place = self.folder / f"build-{build.build.program.devices}"
        build.save(place)
        out = self.folder / f"out-{build.build.program.devices}-{processes}"
        request = launch.Request(folder=place, output=out, timeout=60.0, threads=1)
        if runs == 1:
            found = launch.run(request, launch.Launch(processes=processes, check=check))
            self.expect(found["passed"], f"{processes} processes did not pass: {found.get('reason')}")
        else:
            from tapestry.runtime.processes.supervisor import supervise

            job = replace(launch.job_of(request, processes, api.load(place)), runs=runs)
            found = supervise(job, processes, api.open_session)
        program = build.build.program
        planned = sum(transfer_bytes(s, program) for s in program.steps if isinstance(s, Transfer | Reduce))
        sent = sum(r["payload_bytes"] for r in found["ranks"])
        self.expect(found["peak_bytes"] == list(build.build.peak_bytes), f"peaks on {processes} processes")
        if processes == program.devices:
            self.expect(sent == planned * runs, f"{sent} bytes sent, {planned} planned")
        return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.npy"))}

    def same(self, build: Compiled, *processes: int, runs: int = 1, check: bool = False) -> dict[str, bytes]:
        """One process and many: the same bits in the same files."""
        first = self.outputs(build, 1, runs=runs)
        for n in processes:
            found = self.outputs(build, n, runs=runs, check=check)
            self.expect(found == first and len(first) > 0, f"{n} processes: files that differ of {sorted(found)}")
        return first

    def expect(self, good: bool, otherwise: str) -> None:
        if not good:
            self.wrong.append(otherwise)


def tower(layers: int = 6, width: int = 256, batch: int = 8) -> Any:
    names = ["x", *[f"h{k}" for k in range(layers - 1)], "y"]
    nodes = []
    for k in range(layers):
        nodes += [N("MatMul", [names[k], f"w{k}"], [f"m{k}"], f"mm{k}"), N("Relu", [f"m{k}"], [names[k + 1]], f"act{k}")]
    weights = {f"w{k}": f32(width, width) / 8 for k in range(layers)}
    return net(nodes, {"x": (T.FLOAT, [batch, width])}, {"y": T.FLOAT}, weights)


def heads(b: int = 2, h: int = 3, s: int = 6, n: int = 24, d: int = 8) -> Any:
    nodes = [
        N("Transpose", ["k"], ["kt"], "turn", perm=[0, 1, 3, 2]), N("MatMul", ["q", "kt"], ["w"], "scores"),
        N("Mul", ["w", "scale"], ["z"], "scaled"), N("Softmax", ["z"], ["p"], "soft", axis=-1), N("MatMul", ["p", "v"], ["y"], "mix"),
    ]  # fmt: skip
    ins = {"q": (T.FLOAT, [b, h, s, d]), "k": (T.FLOAT, [b, h, n, d]), "v": (T.FLOAT, [b, h, n, d])}
    return net(nodes, ins, {"y": T.FLOAT}, {"scale": np.float32(0.35)})


def staged(t: Trial) -> Facts:
    """Two stages of two devices, four micro-batches, three runs of the same ranks."""
    (t.folder / "nodes.json").write_text(json.dumps(NODES))
    how: dict[str, Any] = {"mesh": "2x2", "topology": str(t.folder / "nodes.json"), "memory": "640KB"}
    build = tapestry.compile(t.model(tower()), stages=2, micro_batches=4, **how)
    t.same(build, 2, 3, 4, runs=3)
    crossing = [s for s in build.build.program.steps if isinstance(s, Transfer)]
    return {"stages": len(build.report["stages"]), "micro_batches": build.report["micro_batches"], "transfers": len(crossing)}


def overlapped(t: Trial) -> Facts:
    """A tensor that is needed elsewhere long after it was made: its way lies beside what is computed in between."""
    n, layers = 768, 4
    names = ["r", *[f"h{k}" for k in range(layers)]]
    nodes = [
        N("MatMul", ["x", "up"], ["u"], "wide"),
        N("Relu", ["u"], ["v"], "act"),
        N("MatMul", ["v", "down"], ["r"], "first"),
    ]
    nodes += [
        N("Transpose", ["r"], ["late"], "turn", perm=[1, 0])
    ]  # memory is at its peak before, so there is room to be early
    nodes += [N("MatMul", [names[k], f"w{k}"], [names[k + 1]], f"mm{k}") for k in range(layers)]
    nodes += [N("Tanh", ["late"], ["s"], "bend"), N("Add", [names[-1], "s"], ["y"], "join")]
    weights = {f"w{k}": f32(n, n) / 30 for k in range(layers)}
    weights |= {"up": f32(n, 6 * n) / 30, "down": f32(6 * n, n) / 70}
    pins = ["wide:i=2@d0", "first:i=2@d0", *(f"mm{k}:i=2@d0" for k in range(layers))]
    build = tapestry.compile(t.model(net(nodes, {"x": (T.FLOAT, [n, n])}, {"y": T.FLOAT}, weights)), devices=2, pins=pins)
    t.same(build, 2, check=True)
    trace = t.folder / "trace.json"
    request = launch.Request(folder=t.folder / "build-2", output=t.folder / "traced", timeout=60.0, threads=1, trace=trace)
    launch.run(request, launch.Launch(processes=2))
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [(e["pid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 0]
    flown = {e["id"]: [e["pid"], e["ts"]] for e in events if e["ph"] == "b"}
    for e in events:
        if e["ph"] == "e":
            flown[e["id"]].append(e["ts"])
    beside = [sum(p == q and begin < start and end < stop for q, start, end in kernels) for p, begin, stop in flown.values()]
    steps = build.build.program.steps
    first = next(i for i, s in enumerate(steps) if isinstance(s, Transfer))
    between = 0
    for s in steps[first + 1 :]:
        if isinstance(s, Launch):
            if steps[first].dst in s.ins:  # type: ignore[union-attr]
                break
            between += 1
    return {"messages": len(flown), "kernels_beside": beside, "launches_between": between}


def streamed(t: Trial) -> Facts:
    """Weights that do not fit are loaded for every use, each rank its own slices."""
    build = tapestry.compile(t.model(tower()), devices=2, memory="420KB", stages=1, micro_batches=1)
    t.same(build, 2, runs=2)
    t.same(build, 2, check=True)
    loads = [s.buffer for s in build.build.program.steps if isinstance(s, Load)]
    return {"streamed": len(build.build.plan.streamed), "loads": len(loads)}


def attention(t: Trial) -> Facts:
    """Keys cut over devices: states of the streaming softmax travel, and are merged in the plan's order."""
    model = t.model(heads())
    whole = tapestry.compile(model, devices=1)
    op = next(o for o in whole.build.plan.graph.ops if isinstance(o, Block) and o.monoid == "softsum")
    kinds: list[str] = []
    for n in (2, 3, 4):
        build = tapestry.compile(model, devices=n, pins=[f"{op.source[-1]}:{op.reduce[0].name}={n}@d0"])
        t.same(build, n, check=True)
        ops, steps = build.build.plan.graph.ops, build.build.program.steps
        kinds += [f"{n} {s.kind} {getattr(ops[s.op], 'monoid', '')}" for s in steps if isinstance(s, Reduce)]
    return {"merges": kinds}


def uneven(t: Trial) -> Facts:
    """Shares by rate: one device is five times as fast as the others."""
    topology = t.folder / "t.json"
    levels = [{"alpha": 1e-6, "beta": 1e-11}]
    topology.write_text(json.dumps({"device": DEVICE, "levels": levels, "others": [{"devices": [0], **FAST}]}))
    build = tapestry.compile(t.model(tower(batch=64)), devices=3, topology=str(topology))
    t.same(build, 2, 3, check=True)
    blocks = next(s.blocks for s in build.build.program.steps if isinstance(s, Launch))
    return {"shares": [[hi - lo for lo, hi in b or ()] for b in blocks]}


def hosted(t: Trial) -> Facts:
    """Outputs whose shape depends on the data, which no device holds."""
    nodes = [
        N("Relu", ["x"], ["r"], "relu"), N("NonZero", ["r"], ["at"], "where"), N("Transpose", ["at"], ["rows"], "turn"),
        N("GatherND", ["r", "rows"], ["kept"], "take"), N("ReduceSum", ["kept", "axes"], ["total"], "sum", keepdims=0),
        N("Mul", ["r", "total"], ["y"], "scale"),
    ]  # fmt: skip
    info = helper.make_tensor_value_info
    proto = net(nodes, {"x": (T.FLOAT, [4, 6])}, {}, {"axes": np.array([0], np.int64)})
    outs = [info("y", T.FLOAT, [4, 6]), info("kept", T.FLOAT, [None]), info("at", T.INT64, [2, None])]
    proto.graph.output.extend(outs)
    build = tapestry.compile(t.model(proto), devices=2, pins=["y:x0=2@d0"])
    return {"files": sorted(t.same(build, 2, check=True)), "hosted": sorted(build.report["host_values"])}


CASES: dict[str, Callable[[Trial], Facts]] = {f.__name__: f for f in (staged, overlapped, streamed, attention, uneven, hosted)}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    found: dict[str, Any] = {}
    for name in names:
        trial = Trial(folder / name)
        found[name] = {**CASES[name](trial), "wrong": trial.wrong}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
