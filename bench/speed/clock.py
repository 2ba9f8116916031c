"""Whether the plan that is chosen is the one that is fastest: plans of one model, each timed on the world that it was made for.

    .venv/bin/python -m bench clock [--only MODEL …] [--world WORLD …] [--rounds R] [--again]

A world is a number of processes of one thread each: on this machine, or one on each of two hosts (network namespaces) with a
link of some rate between them. It is calibrated first (`tapestry calibrate`), and the planner is given that and nothing else.
Seven plans compete: the chosen one; one device (another compilation, run by one process); pure batch; pure tensor; the best
plans for two random other machines; and a random strategy for every operation. On one machine all of them stay loaded, each
in ranks of its own, and take turns of `BATCHES` batches and one that does not count, in a new order every round, so that what
else the machine does meets all of them alike; outputs stay on the ranks. Between two hosts a turn is a run of its own. A row
says for each plan what was predicted and what was measured (median seconds of a batch), for the chosen one how far each step
was off, and which share of the processors' time the machine's own host took away meanwhile. All of them count: those that lose
as well. Writes bench/results/clock.json.
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
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.correctness.models import materialize
from bench.support import record, two_hosts
from bench.support.plan_variants import saved, variants
from bench.support.record import ROOT, WORK, Row
from tapestry import Session, api
from tapestry.plan.topology import parse_mesh, topology

FOLDER = WORK / "clock"
CLOSE, BAD = 1.05, 1.15  # times the fastest: as good as it; too slow
BATCHES = 5  # different inputs of a turn; the first turn does not count
MODELS: dict[str, dict[str, str]] = {
    "bert_base": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "4x64"),
    "gpt2": dict.fromkeys(("input_ids", "attention_mask"), "1x64"),
    "llama_tiny": dict.fromkeys(("input_ids", "attention_mask"), "1x32"),
    "resnet50": {"input": "2x3x224x224"},
    "mobilenet_v2": {"input": "2x3x224x224"},
    "t5_small": {"input_ids": "4x32", "attention_mask": "4x32", "decoder_input_ids": "4x16"},
    "vit_base": {"pixel_values": "2x3x224x224"},
    "unet": {"x": "1x3x128x128"},
}


@dataclass(frozen=True)
class World:
    """Processes of one thread: on one machine, or on two hosts joined at so many Mbit/s."""

    processes: int
    megabits: int = 0

    def joined(self) -> Any:
        """The hosts, while they are needed."""
        return two_hosts.joined(self.megabits) if self.megabits else nullcontext()

    def tapestry(self, *argv: object, processes: int | None = None) -> Row:
        """The JSON document of a command that runs on all processes, or on some."""
        n = self.processes if processes is None else processes
        words = ["tapestry", *argv, "--threads", "1", "--json"]
        if self.megabits:
            return json.loads(two_hosts.on_both(words, n))
        return command(*words, "--processes", str(n))


WORLDS = {"2 processes": World(2), "4 processes": World(4), "1 Gbit/s": World(2, 1000), "50 Mbit/s": World(2, 50)}


def command(*words: object) -> Row:
    """The JSON document of a Python command.

    Raises:
        RuntimeError: it failed.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, env=env, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-400:])
    return json.loads(done.stdout)


def calibrated(name: str, world: World, again: bool) -> Path:
    """The topology file of a world, measured once."""
    path = FOLDER / f"{name.replace(' ', '-').replace('/', '-')}.json"
    if again or not path.is_file():
        world.tapestry("calibrate", "-o", path)
    return path


def builds(model: Path, shapes: dict[str, str], world: World, path: Path, folder: Path) -> dict[str, float]:
    """Write every plan as a build; predicted seconds by name."""
    sizes = [f"{k}={v}" for k, v in shapes.items()]
    out: dict[str, float] = {}
    for name, n in (("chosen", world.processes), ("one device", 1)):
        more = ["--devices", n, "--topology", path, "--json", "-q"]
        made = command("tapestry", "compile", model, "-o", folder / name, *more, "--shape", *sizes)
        out[name] = made["simulated_s"]
    topo = topology(parse_mesh(str(world.processes)), str(path))
    one = api.load(folder / "one device")
    for seed in (0, 1):
        for name, plan in variants(one, topo, seed, folder).items():
            if seed == 0 or name == "elsewhere":
                tag = name if seed == 0 else f"{name} {seed}"
                out[tag] = saved(one, plan, topo, folder / tag)
    return out


def feeds_of(folder: Path) -> list[dict[str, np.ndarray]]:
    """Inputs of some batches, which are files too."""
    place, one = folder / "in", api.load(folder / "one device")
    place.mkdir(exist_ok=True)
    made = [one.random_feeds(k) for k in range(BATCHES + 1)]
    for k, feeds in enumerate(made):
        np.savez(place / f"b{k}.npz", **feeds)
    return made


def measured(world: World, names: Sequence[str], folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each batch by plan, in turns."""
    feeds, order = feeds_of(folder), np.random.default_rng(0)
    out: dict[str, list[float]] = {n: [] for n in names}
    if world.megabits:  # the first batch of a run warms up
        for _ in range(-(-rounds // BATCHES)):
            for n in order.permutation(names):
                ran = world.tapestry("run", folder / n, "--inputs", folder / "in", processes=1 if n == "one device" else None)
                out[n] += ran["batch_seconds"][1:]
        return out
    with ExitStack() as loaded:
        sessions = {
            n: loaded.enter_context(Session(folder / n, processes=1 if n == "one device" else world.processes, threads=1))
            for n in names
        }
        for _ in range(-(-rounds // BATCHES) + 1):
            for n in order.permutation(names):
                for k, f in enumerate(feeds):
                    begun = time.perf_counter()
                    sessions[n].run(f, outputs=())
                    if k:  # the first batch of a turn finds caches full of another plan
                        out[n].append(time.perf_counter() - begun)
    return {n: samples[BATCHES:] for n, samples in out.items()}


def stolen() -> tuple[int, int]:
    """Ticks of all processors so far, and those that the machine's host took away (/proc/stat)."""
    ticks = [int(t) for t in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], ticks[7]


def step_error(world: World, folder: Path) -> float:
    """Median factor, either way, between estimated and measured seconds of the chosen plan's steps."""
    trace = folder / "trace.json"
    world.tapestry("run", folder / "chosen", "--inputs", folder / "in", "--trace", trace)
    steps = json.loads(trace.read_text())["otherData"]["steps"]
    pairs = [(s["estimated_s"], s["measured_s"]) for s in steps if s["estimated_s"] > 0 and s["measured_s"] > 0]
    return statistics.median(max(a / b, b / a) for a, b in pairs) if pairs else 1.0


def ranks(values: Sequence[float]) -> np.ndarray:
    """Positions when sorted, from 0; of equal ones the mean, as Spearman's correlation has them."""
    v = np.asarray(values)
    return ((v[:, None] > v).sum(1) + (v[:, None] >= v).sum(1) - 1) / 2


def row(name: str, world_name: str, args: argparse.Namespace) -> Row:
    """One model in one world."""
    out: Row = {"model": name, "shapes": MODELS[name], "world": world_name}
    world, model = WORLDS[world_name], materialize(name, WORK / name)
    if model is None:
        return {**out, "skipped": "the folder of exported models is not beside the checkout"}
    folder = FOLDER / "row"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with world.joined():
        predicted = builds(model, MODELS[name], world, calibrated(world_name, world, False), folder)
        before = stolen()
        samples = measured(world, list(predicted), folder, args.rounds)
        after = stolen()
        off = step_error(world, folder)
    median = {n: statistics.median(s) for n, s in samples.items()}
    fastest = min(median, key=lambda n: median[n])
    order = np.corrcoef(ranks(list(predicted.values())), ranks([median[n] for n in predicted]))[0, 1]
    plans = {n: {"predicted_s": predicted[n], "measured_s": median[n], "quartiles": quartiles(samples[n])} for n in predicted}
    return {
        **out, "plans": plans, "fastest": fastest, "ratio": median["chosen"] / median[fastest],
        "rank_correlation": float(order), "predicted_over_measured": predicted["chosen"] / median["chosen"],
        "median_step_factor": off, "load": os.getloadavg()[0],
        "rounds": min(map(len, samples.values())), "stolen": (after[1] - before[1]) / max(after[0] - before[0], 1),
    }  # fmt: skip


def quartiles(samples: Sequence[float]) -> list[float]:
    """The lower and the upper one."""
    low, _, high = statistics.quantiles(samples, n=4)
    return [low, high]


def summary(rows: Sequence[Row]) -> Row:
    """All rows in figures."""
    good = [r for r in rows if "plans" in r]
    if not good:
        return {}
    pairs = [(p["predicted_s"], p["measured_s"]) for r in good for p in r["plans"].values()]
    return {
        "rows": len(good), "within_5_percent": sum(r["ratio"] <= CLOSE for r in good),
        "beyond_15_percent": sum(r["ratio"] > BAD for r in good), "worst_ratio": max(r["ratio"] for r in good),
        "median_rank_correlation": statistics.median(r["rank_correlation"] for r in good),
        "rank_correlation_of_all": float(np.corrcoef(ranks([a for a, _ in pairs]), ranks([b for _, b in pairs]))[0, 1]),
        "total_within_20_percent": sum(1 / 1.2 <= r["predicted_over_measured"] <= 1.2 for r in good),
        "median_step_factor": statistics.median(r["median_step_factor"] for r in good),
    }  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """All rows for a person."""
    out = Table(title="the chosen plan beside its competitors", title_justify="left")
    for c in ("model", "world", "chosen ms", "predicted", "fastest", "ms", "ratio", "rank corr.", "step ×"):
        out.add_column(c, justify="left" if c in ("model", "world", "fastest") else "right")
    for r in rows:
        if "plans" not in r:
            out.add_row(r["model"], r["world"], *[""] * 6, r.get("skipped") or r["error"][:60])
            continue
        mine, best = r["plans"]["chosen"], r["plans"][r["fastest"]]
        times = (
            f"{mine['measured_s'] * 1e3:.1f}",
            f"{mine['predicted_s'] * 1e3:.1f}",
            r["fastest"],
            f"{best['measured_s'] * 1e3:.1f}",
        )
        out.add_row(
            r["model"],
            r["world"],
            *times,
            f"{r['ratio']:.2f}",
            f"{r['rank_correlation']:.2f}",
            f"{r['median_step_factor']:.2f}",
        )
    return out


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--world", nargs="+", choices=list(WORLDS), metavar="WORLD")
    parser.add_argument("--rounds", type=int, default=30, help="batches of each plan")
    parser.add_argument("--again", action="store_true", help="calibrate the worlds again")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = {(r["model"], r["world"]): r for r in record.read("clock")}
    for w in args.world or WORLDS:
        try:
            with WORLDS[w].joined():
                calibrated(w, WORLDS[w], args.again)
        except two_hosts.NotPermitted as e:
            print(f"{w}: left out, {e}", file=sys.stderr)
            continue
        for m in args.only or MODELS:
            try:
                rows[m, w] = row(m, w, args)
            except (RuntimeError, subprocess.TimeoutExpired) as e:
                rows[m, w] = {"model": m, "shapes": MODELS[m], "world": w, "error": str(e)}
            ordered = [rows[k, v] for v in WORLDS for k in MODELS if (k, v) in rows]
            record.write("clock", ordered, summary=summary(ordered))
            Console(width=None if sys.stdout.isatty() else 160).print(table([rows[m, w]]))
    found = [rows[k, v] for v in WORLDS for k in MODELS if (k, v) in rows]
    Console(width=None if sys.stdout.isatty() else 160).print(table(found))
    print(json.dumps(summary(found), indent=1))
    return 1 if any("error" in r for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
