"""Real models on several processes: the same results as in one, and the bytes and memory that were planned; and the speed of
two processes beside one.

    .venv/bin/python -m bench distributed [--only NAME …] [--meshes 2 3 4 2x2] [--models FOLDER] [--runs 3]
    .venv/bin/python -m bench distributed --scaling [--only NAME …] [--rounds 5] [--models FOLDER]  # BERT 8x128, GPT-2 4x64

Every build runs on one process per device, in one process, and its model as a plan for one device in one process, one thread
each, with the same inputs. A case passes when all outputs have the same bits in one process and in many (where the backend
adds floats of more than two devices, in an order of its own: agree to 1e-5), agree with the one-device plan to 1e-4, the
bytes that the ranks hand to torch.distributed are the plan's, and the peak of every device's buffers is the plan's. Of
memory, per rank and the worst of them: `grown_bytes` is the most that was resident (VmHWM) while it ran, less what was
resident before weights were loaded (Python, torch and the plan); the plan counts the buffers of it (`peak_bytes`), packed
weights beyond them (`packed_bytes`) and the places of what travels (`staged_bytes`); the rest is what torch and the allocator
keep. Times are medians of the runs after the first: seconds on the clock, and processor seconds of the busiest rank.
Writes bench/results/distributed.json (`--scaling`: distributed_scaling.json); exits 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.correctness.models import materialize
from bench.support import record
from bench.support.record import ROOT, WORK, Row
from tapestry import Session, api
from tapestry.ir.collective_calls import reduce_op
from tapestry.ir.program import Reduce
from tapestry.ir.types import FLOATS
from tapestry.runtime.outputs import file_name, write_outputs

MODELS: dict[str, dict[str, str]] = {
    "resnet50": {"input": "4x3x224x224"},
    "bert_base": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "8x64"),
    "gpt2": {"input_ids": "4x64", "attention_mask": "4x64"},
    "llama_tiny": {"input_ids": "4x32", "attention_mask": "4x32"},
    "t5_small": {"input_ids": "4x8", "attention_mask": "4x8", "decoder_input_ids": "4x4"},
    "unet": {"x": "4x3x128x128"},
}
SCALED: dict[str, dict[str, str]] = {
    "bert_base": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "8x128"),
    "gpt2": {"input_ids": "4x64", "attention_mask": "4x64"},
}
FOLDER = WORK / "distributed"
BATCHES = 4  # of a turn


def command(*argv: object) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON and errors of a module."""
    command = [sys.executable, "-m", *map(str, argv), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, done.stderr.strip()


def run(build: Path, processes: int, tag: str, runs: int) -> tuple[dict[str, Any], str]:
    """The inputs of ``FOLDER/in`` on so many processes of one thread, several times."""
    out = FOLDER / tag
    shutil.rmtree(out, ignore_errors=True)
    given = [x for t in api.load(build).build.plan.graph.inputs for x in ("--input", f"{t}={FOLDER / 'in' / file_name(t)}.npy")]
    more = ["--output", out, "--threads", 1, "--timeout", 120, "--runs", runs]
    status, found, error = command("bench.support.several_runs", build, "--processes", processes, *given, *more)
    return found, error if status else ""


def same(one: str) -> tuple[bool, float]:
    """Whether two runs wrote the same bits, and the largest relative difference otherwise."""
    worst, equal = 0.0, True
    for p in sorted((FOLDER / one).glob("*.npy")):
        a, b = np.load(p), np.load(FOLDER / "many" / p.name)
        equal = equal and a.shape == b.shape and a.tobytes() == b.tobytes()
        worst = max(worst, float(np.linalg.norm((a - b).ravel()) / max(float(np.linalg.norm(a.ravel())), 1e-30)))
    return equal, worst


def rounded(build: Path) -> bool:
    """Whether gloo adds or multiplies floats of more than two devices, which rounds in an order of its own."""
    plan, program = api.load(build).build.plan, api.load(build).build.program
    reduces = [(s, plan.graph.ops[s.op]) for s in program.steps if isinstance(s, Reduce)]
    return any(
        len(s.groups[0]) > 2 and reduce_op(op) in ("sum", "prod") and program.buffers[s.sent[0]].dtype in FLOATS
        for s, op in reduces
    )


def compiled(model: Path, mesh: str, shapes: list[object]) -> tuple[Path, dict[str, Any], str]:
    """A build, the document of the command that made it, and what it said if it failed."""
    build = FOLDER / f"build-{mesh}"
    status, made, error = command("tapestry", "compile", model, "-o", build, "-q", "--mesh", mesh, "--time-limit", 20, *shapes)
    return build, made, error if status else ""


def feed(build: Path) -> None:
    """Write ``FOLDER/in``."""
    shutil.rmtree(FOLDER / "in", ignore_errors=True)
    write_outputs(FOLDER / "in", api.load(build).random_feeds(0))


def spent(found: dict[str, Any]) -> dict[str, float]:
    """Seconds on the clock and processor seconds of the busiest rank, medians of the runs after the first."""
    cpu = (statistics.median(r["cpu_seconds"][1:]) for r in found["ranks"])
    return {"seconds": statistics.median(found["run_seconds"][1:]), "cpu_seconds": max(cpu)}


def memory(found: dict[str, Any]) -> dict[str, int]:
    """What the worst rank grew by, and the parts of it that are known."""
    rank = max(found["ranks"], key=lambda r: r["resident_bytes"]["running"] - r["resident_bytes"]["before"])
    grown = rank["resident_bytes"]["running"] - rank["resident_bytes"]["before"]
    planned = sum(found["peak_bytes"][d] + found["packed_bytes"][d] for d in rank["devices"]) + rank["staged_bytes"]
    packed = sum(found["packed_bytes"][d] for d in rank["devices"])
    return {"grown_bytes": grown, "known_bytes": planned, "packed_bytes": packed, "staged_bytes": rank["staged_bytes"]}


def case(name: str, model: Path, shapes: list[object], mesh: str, runs: int) -> Row:
    """One model on one mesh."""
    alone, _, first = compiled(model, "1", shapes)
    build, made, error = compiled(model, mesh, shapes)
    if first or error:
        return {"model": name, "mesh": mesh, "ok": False, "note": (first or error)[:300]}
    feed(build)
    devices = len(made["peak_bytes"])
    done = [run(alone, 1, "alone", runs), run(build, 1, "one", runs), run(build, devices, "many", runs)]
    failed = next((note for _, note in done if note), "")
    if failed:
        return {"model": name, "mesh": mesh, "ok": False, "note": failed[:300]}
    single, one, many = (found for found, _ in done)
    equal, apart = same("one")
    _, worst = same("alone")
    planned = sum(t["bytes"] for t in made["transfers"])
    sent = sum(r["payload_bytes"] for r in many["ranks"]) / runs
    peaks = many["peak_bytes"] == made["peak_bytes"] == one["peak_bytes"]
    alike = (equal or (rounded(build) and apart < 1e-5)) and worst < 1e-4
    return {
        "model": name, "mesh": mesh, "ok": alike and sent == planned and peaks,
        "same_bits": equal, "rel_diff_to_one_process": apart, "backend_calls": many["ranks"][0]["backend_calls"],
        "rel_diff_to_one_device": worst, "planned_bytes": planned, "sent_bytes": sent, "peaks_as_planned": peaks,
        "peak_bytes": max(made["peak_bytes"]), "unsharded_peak": made["unsharded_peak_bytes"], **memory(many),
        "one_device": spent(single), "processes": spent(many), "simulated_s": made["simulated_s"],
    }  # fmt: skip


def scaling(name: str, model: Path, rounds: int) -> Row:
    """One process on a plan for one device, and two on a plan for two, loaded side by side, in turns."""
    shapes: list[object] = [x for k, v in SCALED[name].items() for x in ("--shape", f"{k}={v}")]
    made = [compiled(model, mesh, shapes) for mesh in ("1", "2")]
    note = next((note for _, _, note in made if note), "")
    if note:
        return {"model": name, "ok": False, "note": note[:300]}
    feeds = [api.load(made[0][0]).random_feeds(k) for k in range(BATCHES + 1)]
    seconds: list[list[float]] = [[], []]
    with ExitStack() as loaded:
        sessions = [loaded.enter_context(Session(build, processes=n, threads=1)) for n, (build, _, _) in enumerate(made, 1)]
        for _ in range(rounds):
            for session, own in zip(sessions, seconds, strict=True):
                for k, f in enumerate(feeds):
                    begun = time.perf_counter()
                    session.run(f, outputs=())
                    if k:  # the first finds caches full of the other's
                        own.append(time.perf_counter() - begun)
    one, two = map(statistics.median, seconds)
    return {
        "model": name, "shapes": SCALED[name], "seconds": seconds, "one_s": one, "two_s": two, "speed_up": one / two,
        "predicted": made[0][1]["simulated_s"] / made[1][1]["simulated_s"], "load": os.getloadavg()[0], "ok": True,
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--meshes", nargs="*", default=["2", "3", "4", "2x2"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", type=Path, help="a folder of NAME.onnx")
    parser.add_argument("--scaling", action="store_true", help="the speed of two processes beside one, and nothing else")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.scaling:
        again = list[Row]()
        for name in (n for n in SCALED if n in args.only):
            found = args.models / f"{name}.onnx" if args.models else materialize(name, WORK / "models")
            again.append(scaling(name, found, args.rounds) if found else {"model": name, "skipped": "no models", "ok": True})
            print(json.dumps({k: v for k, v in again[-1].items() if k != "seconds"}, indent=1), flush=True)
        record.write("distributed_scaling", record.merged("distributed_scaling", again, ("model",)))
        return 0 if all(r["ok"] for r in again) else 1
    kept = {(r["model"], r.get("mesh")): r for r in record.read("distributed") if "one_device" in r}
    rows: list[Row] = []
    for name in args.only:
        given = args.models / f"{name}.onnx" if args.models else None
        model = given or materialize(name, WORK / "models")
        if model is None or not model.is_file():
            rows.append({"model": name, "skipped": "no folder of exported models beside the checkout", "ok": True})
            continue
        shapes: list[object] = [x for k, v in MODELS[name].items() for x in ("--shape", f"{k}={v}")]
        for mesh in args.meshes:
            rows.append(case(name, model, shapes, mesh, args.runs))
            print(json.dumps(rows[-1]), flush=True)
        kept |= {(r["model"], r.get("mesh")): r for r in rows}
        record.write("distributed", list(kept.values()))
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
