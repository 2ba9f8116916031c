"""Ranks that are killed in the middle of a run: what the others compute again, beside what a restart does.

    .venv/bin/python -m bench rank_losses [--runs N] [--seed S]

Random plans of small models on 2 to 5 processes (gloo, this host); one rank ends itself by SIGKILL before a random step, in
some runs another one at a step of its own or in the middle of what is left. The others meet anew, compute what is gone from
what they hold, end the batch and run another; both must have the bits of one process. FLOPs and bytes of blocks that had been
done before are counted, against those of all that had been done, which a restart repeats; bytes are those that come to a
device by the plan. Writes bench/results/rank_losses.json; exits 1 if a bit
differs, or some runs were broken off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

from bench.support import record
from bench.support.record import ROOT, Row

MODELS = ("mlp", "attention", "norms", "reductions", "branches", "integers", "noise", "conv_chain")
MESHES = ("2", "3", "2x2", "5")
PIECE = 10  # runs of one process, which forks all ranks


def piece(seed: int, runs: int) -> list[Row] | None:
    """Some runs, and what was told at each loss; what differed is under ``wrong``. ``None``: they were broken off, as by a
    machine that stopped the ranks for longer than their timeout."""
    asked = {"runs": runs, "seed": seed, "models": MODELS, "meshes": MESHES}
    command = [sys.executable, "-m", "tests.support.programs.losses", json.dumps(asked)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    found = json.loads(done.stdout)
    bad = {int(w.partition(":")[0].removeprefix("run ")) for w in found["wrong"]}
    return [{**r, "wrong": k in bad} for k, r in enumerate(found["rows"])]


def row_of(model: str, runs: list[Row]) -> Row:
    """A model's runs, summed."""
    told: list[Any] = [t for r in runs for t in r["told"]]
    sums = Counter[str]()
    for t in told:
        sums.update({f"{w}_{k}": t[w][k] for w in ("again", "restart") for k in ("blocks", "flops", "bytes")})
        sums["lost_blocks"] += t["lost_blocks"]
    return {"model": model, "runs": len(runs), "same_bits": sum(not r["wrong"] for r in runs), "losses": len(told),
            "twice": sum(len(r["told"]) > 1 for r in runs), **sums}  # fmt: skip


def main() -> int:
    """Run, show, write; 1 if a bit differs."""
    p = argparse.ArgumentParser(prog="bench rank_losses")
    p.add_argument("--runs", type=int, default=200, metavar="N")
    p.add_argument("--seed", type=int, default=0, metavar="S")
    args = p.parse_args()
    runs, rows, broken = list[Row](), list[Row](), 0
    for n in range(-(-args.runs // PIECE)):
        found = piece(args.seed + n, PIECE)
        runs, broken = runs + (found or []), broken + (found is None)
        print(f"{len(runs)} runs, {sum(r['wrong'] for r in runs)} with other bits, {broken} pieces broken off", flush=True)
        rows = [row_of(m, mine) for m in MODELS if (mine := [r for r in runs if r["model"] == m])]
        record.write("rank_losses", rows, seed=args.seed, broken_off=broken)
    for r in rows:
        share = " ".join(f"{k} {r[f'again_{k}'] / max(1, r[f'restart_{k}']):.1%}" for k in ("flops", "bytes"))
        print(f"{r['model']}: {r['same_bits']} of {r['runs']} with the same bits; again, of a restart: {share}")
    return int(broken > 0 or any(r["wrong"] for r in runs))


if __name__ == "__main__":
    sys.exit(main())
