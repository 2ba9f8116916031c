"""Whether the plan that is chosen is the one that is fastest: plans of one model, each timed on the world that it was made for.

    .venv/bin/python -m bench clock [--only MODEL …] [--world WORLD …] [--rounds R] [--again | --resume]

A world is a number of processes of one thread each: on this machine, or one on each of two hosts (network namespaces) with a
link of some rate between them. It is calibrated first (`tapestry calibrate`), and the planner is given that and nothing else.
Seven plans compete: the chosen one; one device (another compilation, run by one process); pure batch; pure tensor; the best
plans for random other machines; and a random strategy for every operation. Where these are one program, it is measured once,
and best plans for more machines are looked for. All stay loaded, each in ranks of its own, on all hosts of the world, and take
turns of `BATCHES` batches and one that does not count, in a new order every round, so that what else the machine does meets
all of them alike; outputs stay on the ranks. One that takes `SLOW` times as long as the fastest takes no more turns after its
first, and one of `FAR` times, or of some seconds, is measured once; those that are as good as the fastest take up to twice as
many, for some seconds. A row says for each plan what was predicted and what was measured (median seconds of a batch), for the
chosen one how far each step was off, and which share of the processors' time the machine's own host took away meanwhile. All
count, losers too. Plans for which the same was predicted are named (`predicted_alike`), and so is the noise: between which
ratios to the fastest one the chosen one lies where batches are drawn anew from those measured (`ratio_between`, 90 %).
A row takes one to two minutes on a quiet machine, and is written
when it is done: after ``--again``, ``--resume`` goes on with those that were not measured under
the world's present calibration. Writes bench/results/clock.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.correctness.models import materialize
from bench.support import record, two_hosts
from bench.support.plan_variants import Competitors, saved
from bench.support.record import ROOT, WORK, Row
from tapestry import Session, api
from tapestry.build.store import Build
from tapestry.errors import TapestryError
from tapestry.plan.topology import parse_mesh, topology

FOLDER = WORK / "clock"
CLOSE, BAD = 1.05, 1.15  # times the fastest: as good as it; too slow
SLOW, FAR = 3.0, 10.0  # times the fastest: measured in one turn, in one batch
BATCHES = 5  # different inputs of a turn
TURN = 4.0  # seconds of one batch that end a turn
LONGER = 15.0  # seconds for more turns of plans that are as good as the fastest
ALIKE = 0.01  # apart: predictions that say the same
DRAWS = 400
FAILURES = (RuntimeError, TapestryError, OSError, ValueError, subprocess.TimeoutExpired)  # of one row, or of one world
BUILT = ("chosen", "one device")
PLANS, MACHINES = 7, 5  # different plans that are wanted; other machines that are tried for them
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

    def joined(self) -> AbstractContextManager[two_hosts.Hosts | None]:
        """The hosts, while they are needed; ``None``: this machine."""
        return two_hosts.joined(self.megabits) if self.megabits else nullcontext()

    def calibrate(self, hosts: two_hosts.Hosts | None, *argv: object) -> Row:
        """The JSON document of ``calibrate`` on all processes."""
        return self._on_all(hosts, "tapestry", "calibrate", *argv)

    def several_runs(self, hosts: two_hosts.Hosts | None, *argv: object) -> Row:
        """What the ranks of `bench.support.several_runs` measured."""
        return self._on_all(hosts, "bench.support.several_runs", *argv)

    def _on_all(self, hosts: two_hosts.Hosts | None, *argv: object) -> Row:
        words = [*argv, "--threads", "1", "--json"]
        if hosts is None:
            return command(*words, "--processes", self.processes)
        return json.loads(two_hosts.on_both(hosts, words))


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


def calibrated(name: str, hosts: two_hosts.Hosts | None, again: bool) -> Path:
    """The topology file of a world, measured once."""
    path = FOLDER / f"{name.replace(' ', '-').replace('/', '-')}.json"
    if again or not path.is_file():
        WORLDS[name].calibrate(hosts, "-o", path)
    return path


def builds(model: Path, shapes: dict[str, str], world: World, path: Path, folder: Path) -> dict[str, float]:
    """Write every plan as a build; predicted seconds by name, of different programs only."""
    sizes = [f"{k}={v}" for k, v in shapes.items()]
    out: dict[str, float] = {}
    there: list[Build] = []

    def keep(name: str, seconds: float) -> None:
        build = api.load(folder / name).build
        if all((build.plan.graph, build.program) != (b.plan.graph, b.program) for b in there):
            there.append(build)
            out[name] = seconds

    def compiled(name: str, devices: int) -> Row:
        more = ["--devices", devices, "--topology", path, "--json", "-q"]
        return command("tapestry", "compile", model, "-o", folder / name, *more, "--shape", *sizes)

    with ThreadPoolExecutor(2) as both:  # two compilers, a core each
        made = dict(zip(BUILT, both.map(compiled, BUILT, (world.processes, 1)), strict=True))
    for name in BUILT:
        keep(name, made[name]["simulated_s"])
    topo = topology(parse_mesh(str(world.processes)), str(path))
    competitors = Competitors(api.load(folder / "one device"), topo, folder)
    for name, plan in competitors.named(0):
        keep(name, saved(competitors.one, plan, topo, folder / name))
    for seed in range(MACHINES):
        if len(out) < PLANS:
            name = f"elsewhere {seed}"
            keep(name, saved(competitors.one, competitors.elsewhere(seed), topo, folder / name))
    return out


def feeds_of(folder: Path) -> list[dict[str, np.ndarray]]:
    """Inputs of some batches, which are files too."""
    place, one = folder / "in", api.load(folder / "one device")
    place.mkdir(exist_ok=True)
    made = [one.random_feeds(k) for k in range(BATCHES + 1)]
    for k, feeds in enumerate(made):
        np.savez(place / f"b{k}.npz", **feeds)
    return made


Run = Callable[[int], object]


def loaded(world: World, hosts: two_hosts.Hosts | None, names: Sequence[str], folder: Path, ends: ExitStack) -> dict[str, Run]:
    """What runs a batch of each plan, until the stack is closed."""
    feeds, out, apart = feeds_of(folder), dict[str, Run](), list[two_hosts.Ranks]()
    for k, n in enumerate(names):
        if hosts is not None and n != "one device":  # started together, for they mostly wait
            apart.append(ends.enter_context(two_hosts.Ranks(hosts, folder / n, folder / "in", k)))
            out[n] = apart[-1].run
            continue
        session = ends.enter_context(Session(folder / n, processes=1 if n == "one device" else world.processes, threads=1))
        out[n] = lambda b, s=session: s.run(feeds[b], outputs=())
    for ranks_of_one in apart:
        ranks_of_one.ready()
    return out


def measured(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each batch by plan, in turns."""
    order, first = np.random.default_rng(0), {n: turn(run, 1)[-1] for n, run in runs.items()}  # places are made, pages touched
    fastest = min(first.values())
    out = {n: [s] for n, s in first.items() if s > TURN or s > FAR * fastest}
    for _ in range(-(-rounds // BATCHES)):
        for n in order.permutation(list(runs)):
            if n not in out or statistics.median(out[n]) < SLOW * fastest:
                out[n] = out.get(n, []) + turn(runs[n], BATCHES)
        fastest = min(map(statistics.median, out.values()))
    close, begun = [n for n in runs if statistics.median(out[n]) <= CLOSE**2 * fastest], time.perf_counter()
    for _ in range(-(-rounds // BATCHES) if len(close) > 1 else 0):
        if time.perf_counter() - begun < LONGER:
            for n in order.permutation(close):
                out[n] += turn(runs[n], BATCHES)
    return {n: out[n] for n in runs}


def turn(run: Run, batches: int) -> list[float]:
    """Seconds of some batches after one that does not count, which finds caches full of another plan; of fewer, and of the
    first too, where one takes longer than all should."""
    out: list[float] = []
    for k in range(batches + 1):
        begun = time.perf_counter()
        run(k)
        out.append(time.perf_counter() - begun)
        if out[-1] > TURN:
            return out
    return out[1:]


def stolen() -> tuple[int, int]:
    """Ticks of all processors so far, and those that the machine's host took away (/proc/stat)."""
    ticks = [int(t) for t in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], ticks[7]


def step_error(world: World, hosts: two_hosts.Hosts | None, folder: Path) -> float:
    """Median factor, either way, between estimated and measured seconds of the chosen plan's steps."""
    trace = folder / "trace.json"
    world.several_runs(hosts, folder / "chosen", "--runs", BATCHES + 1, "--trace", trace)
    steps = json.loads(trace.read_text())["otherData"]["steps"]
    pairs = [(s["estimated_s"], s["measured_s"]) for s in steps if s["estimated_s"] > 0 and s["measured_s"] > 0]
    return statistics.median(max(a / b, b / a) for a, b in pairs) if pairs else 1.0


def between(samples: Mapping[str, Sequence[float]]) -> list[float]:
    """Of the chosen plan's ratio to the fastest one what 5 and 95 % of draws from the measured batches stay below."""
    rng = np.random.default_rng(0)
    drawn = {n: np.median(rng.choice(s, (DRAWS, len(s))), axis=1) for n, s in samples.items()}
    return np.quantile(drawn["chosen"] / np.min(list(drawn.values()), axis=0), (0.05, 0.95)).tolist()


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
    begun = time.monotonic()
    with world.joined() as hosts:
        path = calibrated(world_name, hosts, again=False)
        predicted = builds(model, MODELS[name], world, path, folder)
        with ExitStack() as ends:
            runs = loaded(world, hosts, list(predicted), folder, ends)
            before = stolen()
            samples = measured(runs, args.rounds)
            after = stolen()
        off = step_error(world, hosts, folder)
    median = {n: statistics.median(s) for n, s in samples.items()}
    fastest = min(median, key=lambda n: median[n])
    order = np.corrcoef(ranks(list(predicted.values())), ranks([median[n] for n in predicted]))[0, 1]
    plans = {
        n: {
            "predicted_s": predicted[n],
            "measured_s": median[n],
            "quartiles": quartiles(samples[n]),
            "batches": len(samples[n]),
        }
        for n in predicted
    }
    return {
        **out, "plans": plans, "fastest": fastest, "ratio": median["chosen"] / median[fastest],
        "ratio_between": between(samples),
        "predicted_alike": [n for n, p in predicted.items() if n != "chosen" and abs(p / predicted["chosen"] - 1) <= ALIKE],
        "rank_correlation": float(order), "predicted_over_measured": predicted["chosen"] / median["chosen"],
        "median_step_factor": off, "load": os.getloadavg()[0],
        "calibration": fingerprint(path), "took_s": time.monotonic() - begun,
        "stolen": (after[1] - before[1]) / max(after[0] - before[0], 1),
    }  # fmt: skip


def fingerprint(calibration: Path) -> str:
    """Of a world as it was measured."""
    return hashlib.sha256(calibration.read_bytes()).hexdigest()[:16]


def quartiles(samples: Sequence[float]) -> list[float]:
    """The lower and the upper one."""
    if len(samples) < 2:
        return [*samples, *samples]
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
        "surely_beyond_5_percent": sum(r["ratio_between"][0] > CLOSE for r in good if "ratio_between" in r),
        "beyond_15_percent": sum(r["ratio"] > BAD for r in good), "worst_ratio": max(r["ratio"] for r in good),
        "median_rank_correlation": statistics.median(r["rank_correlation"] for r in good),
        "rank_correlation_of_all": float(np.corrcoef(ranks([a for a, _ in pairs]), ranks([b for _, b in pairs]))[0, 1]),
        "total_within_20_percent": sum(1 / 1.2 <= r["predicted_over_measured"] <= 1.2 for r in good),
        "median_step_factor": statistics.median(r["median_step_factor"] for r in good),
    }  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """All rows for a person."""
    out = Table(title="the chosen plan beside its competitors", title_justify="left")
    for c in ("model", "world", "chosen ms", "predicted", "fastest", "ms", "ratio", "90 %", "rank corr.", "step ×"):
        out.add_column(c, justify="left" if c in ("model", "world", "fastest") else "right")
    for r in rows:
        if "plans" not in r:
            out.add_row(r["model"], r["world"], *[""] * 7, r.get("skipped") or r["error"][:60])
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
            "–".join(f"{x:.2f}" for x in r.get("ratio_between", ())),
            f"{r['rank_correlation']:.2f}",
            f"{r['median_step_factor']:.2f}",
        )
    return out


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--world", nargs="+", choices=list(WORLDS), metavar="WORLD")
    parser.add_argument("--rounds", type=int, default=15, help="batches of each plan")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--again", action="store_true", help="calibrate the worlds again")
    which.add_argument("--resume", action="store_true", help="only rows that the world's present calibration has not")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = {(r["model"], r["world"]): r for r in record.read("clock")}
    for w in args.world or WORLDS:
        try:
            with WORLDS[w].joined() as hosts:
                now = fingerprint(calibrated(w, hosts, args.again))
        except (two_hosts.NotPermitted, *FAILURES) as e:
            print(f"{w}: left out, {e}", file=sys.stderr)
            continue
        for m in args.only or MODELS:
            if args.resume and rows.get((m, w), {}).get("calibration") == now:
                continue
            try:
                rows[m, w] = row(m, w, args)
            except FAILURES as e:
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
