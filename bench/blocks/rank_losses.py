"""Ranks that are killed in the middle of a run: what the others compute again, beside what a restart does.

    .venv/bin/python -m bench rank_losses [--runs N] [--seed S]

Random plans of small models on 2 to 5 processes (gloo, this host); one rank ends itself by SIGKILL before a random step, in
some runs another one at a step of its own or in the middle of what is left. The others meet anew, compute what is gone from
what they hold, end the batch and run another; both must have the bits of one process. FLOPs and bytes of blocks that had been
done before are counted, against those of all that had been done, which a restart repeats; bytes are those that come to a
device by the plan. Writes bench/results/rank_losses.json; exits 1 if a bit differs.
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
PIECE = 20  # runs of one process, which forks all ranks


def pieces(runs: int, seed: int) -> list[Row]:
    """Every run, and what was told at each loss; what differed is under ``wrong``."""
    out: list[Row] = []
    for n in range(-(-runs // PIECE)):
        asked = {"runs": min(PIECE, runs - n * PIECE), "seed": seed + n, "models": MODELS, "meshes": MESHES}
        command = [sys.executable, "-m", "tests.support.programs.losses", json.dumps(asked)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )  # fmt: skip
        found = json.loads(done.stdout)
        bad = {int(w.partition(":")[0].removeprefix("run ")) for w in found["wrong"]}
        out += [{**r, "wrong": k in bad} for k, r in enumerate(found["rows"])]
        print(f"{len(out)} runs, {sum(r['wrong'] for r in out)} with other bits", flush=True)
    return out


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
    runs = pieces(args.runs, args.seed)
    rows = [row_of(m, mine) for m in MODELS if (mine := [r for r in runs if r["model"] == m])]
    for r in rows:
        share = " ".join(f"{k} {r[f'again_{k}'] / max(1, r[f'restart_{k}']):.1%}" for k in ("flops", "bytes"))
        print(f"{r['model']}: {r['same_bits']} of {r['runs']} with the same bits; again, of a restart: {share}")
    record.write("rank_losses", rows, seed=args.seed)
    return int(any(r["wrong"] for r in runs))


if __name__ == "__main__":
    sys.exit(main())
