"""Ranks that are killed in the middle of a run: what the others compute again, beside what a restart does.

    .venv/bin/python -m bench rank_losses [--runs N] [--commands N] [--seed S] [--more]

Random plans of small models on 2 to 5 processes (gloo, this host); one rank ends itself by SIGKILL before a random step, in
some runs another one at a step of its own or in the middle of what is left. The others meet anew, compute what is gone from
what they hold, end the batch and run another; both must have the bits of one process. ``--commands`` more runs are of plans
that the planner chose, by `tapestry run --processes N --on-loss recompute`. FLOPs and bytes of blocks that had been
done before are counted, against those of all that had been done, which a restart repeats; bytes are those that come to a
device by the plan. Writes bench/results/rank_losses.json, with ``--more`` beside the runs that it has; exits 1 if a bit
differs, or some runs were broken off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import tapestry
from bench.support import record
from bench.support.record import ROOT, Row
from tests.support.small_models import MODELS as MADE

MODELS = ("mlp", "attention", "norms", "reductions", "branches", "integers", "noise", "conv_chain")
MESHES = ("2", "3", "2x2", "5")
PIECE = 10  # runs of one process, which forks all ranks


def piece(seed: int, runs: int) -> list[Row] | None:
    """Some runs, and what was told at each loss; what differed is under ``wrong``. ``None``: they were broken off, as by a
    machine that stopped the ranks for longer than their timeout."""
    asked = {"runs": runs, "seed": seed, "models": MODELS, "meshes": MESHES}
    command = [sys.executable, "-m", "tests.support.programs.losses", json.dumps(asked)]
    found = said(command)
    if found is None:
        return None
    bad = {int(w.partition(":")[0].removeprefix("run ")) for w in found["wrong"]}
    return [{**r, "wrong": k in bad} for k, r in enumerate(found["rows"])]


def said(command: list[str]) -> Any:
    """The JSON that a command prints; ``None`` where it fails."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout)


def by_command(seed: int) -> list[Row] | None:
    """A plan of the planner's, run by the command, with one rank that is killed before a step. ``None``: it was broken off."""
    rng = random.Random(f"command {seed}")
    name, mesh = rng.choice(MODELS), rng.choice(MESHES)
    build = tapestry.compile(MADE[name](), mesh=mesh, topology="cpu")
    program, feeds = build.build.program, build.random_feeds(seed)
    world = rng.randint(2, program.devices)
    rank, step = rng.randrange(world), rng.randrange(len(program.steps))
    alone = build.session.run(feeds).outputs
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        build.save(at / "plan")
        for k, a in feeds.items():
            np.save(at / f"{k}.npy", a)
        given = [x for k in feeds for x in ("--input", f"{k}={at / k}.npy")]
        command = [sys.executable, "-m", "tests.support.programs.lost_at_step", rank, step, "run", at / "plan", *given,
                   "--processes", world, "--on-loss", "recompute", "--output", at / "out", "--json", "-q"]  # fmt: skip
        found = said([str(c) for c in command])
        if found is None:
            return None
        wrong = any(np.load(at / "out" / f"{k}.npy").tobytes() != a.tobytes() for k, a in alone.items())
    return [{"model": name, "told": found["losses"], "wrong": wrong or len(found["losses"]) != 1, "command": True}]


def row_of(model: str, runs: list[Row]) -> Row:
    """A model's runs, summed."""
    told: list[Any] = [t for r in runs for t in r["told"]]
    sums = Counter[str]()
    for t in told:
        sums.update({f"{w}_{k}": t[w][k] for w in ("again", "restart") for k in ("blocks", "flops", "bytes")})
        sums["lost_blocks"] += t["lost_blocks"]
    return {"model": model, "runs": len(runs), "commands": sum("command" in r for r in runs),
            "same_bits": sum(not r["wrong"] for r in runs), "losses": len(told),
            "twice": sum(len(r["told"]) > 1 for r in runs), **sums}  # fmt: skip


def added(known: list[Row], rows: list[Row]) -> list[Row]:
    """Rows of a model, added up."""
    sums: dict[str, Counter[str]] = {}
    for r in (*known, *rows):
        sums.setdefault(r["model"], Counter()).update({k: n for k, n in r.items() if k != "model"})
    return [{"model": m, **sums[m]} for m in MODELS if m in sums]


def main() -> int:
    """Run, show, write; 1 if a bit differs."""
    p = argparse.ArgumentParser(prog="bench rank_losses")
    p.add_argument("--runs", type=int, default=200, metavar="N")
    p.add_argument("--commands", type=int, default=40, metavar="N", help="runs by the command, besides")
    p.add_argument("--seed", type=int, default=0, metavar="S")
    p.add_argument("--more", action="store_true", help="add to the runs that were recorded, which had other seeds")
    args = p.parse_args()
    known, seeds = (record.read("rank_losses"), record.read_more("rank_losses", "seeds", [])) if args.more else ([], [])
    runs, rows, broken = list[Row](), list[Row](known), record.read_more("rank_losses", "broken_off", 0) if args.more else 0
    ways = [("ranks", s) for s in range(args.seed, args.seed - (-args.runs // PIECE))]
    ways += [("command", s) for s in range(args.seed, args.seed + args.commands)]
    for way, seed in ways:
        if f"{way} {seed}" in seeds:
            continue
        found = piece(seed, PIECE) if way == "ranks" else by_command(seed)
        runs, broken, seeds = runs + (found or []), broken + (found is None), [*seeds, f"{way} {seed}"]
        print(f"{len(runs)} runs, {sum(r['wrong'] for r in runs)} with other bits, {broken} broken off", flush=True)
        rows = added(known, [row_of(m, mine) for m in MODELS if (mine := [r for r in runs if r["model"] == m])])
        record.write("rank_losses", rows, seeds=seeds, broken_off=broken)
    for r in rows:
        share = " ".join(f"{k} {r[f'again_{k}'] / max(1, r[f'restart_{k}']):.1%}" for k in ("flops", "bytes"))
        print(f"{r['model']}: {r['same_bits']} of {r['runs']} with the same bits; again, of a restart: {share}")
    return int(broken > 0 or any(r["same_bits"] != r["runs"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
