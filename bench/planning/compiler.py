"""Speed of the compiler: ResNet-50 and BERT on a 2x4 mesh, and BERT with 6, 12, 24 and 48 layers.

    .venv/bin/python -m bench compiler

Every row is one `tapestry compile` in a process of its own; "total" is the compiler's own clock, "wall" and "CPU"
(seconds of all cores) include starting Python and writing the build. Writes bench/results/compiler.json; exits 1 if
ResNet-50 or BERT-base takes 10 s or more.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.correctness.models import EXPORTS, materialize
from bench.support import encoder, record
from bench.support.record import Row

GOAL = 10.0  # seconds
FOLDER = record.WORK / "compiler"
MESH = "2x4"
STAGES = ("lift", "simplify", "search", "verify", "codegen", "total")
LAYERS = (6, 12, 24, 48)


def measure(name: str, path: Path, shapes: dict[str, str]) -> Row:
    """One `tapestry compile`."""
    tapestry = [sys.executable, "-m", "tapestry", "compile"]
    command = [*tapestry, str(path), "-o", str(FOLDER / "build"), "--mesh", MESH, "--json"]
    for item in shapes.items():
        command += ["--shape", "=".join(item)]
    before, start = cpu(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall, used = time.perf_counter() - start, cpu() - before
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    r = json.loads(done.stdout)
    keep = ("nodes", "ops", "signatures", "objective_s", "gap", "seconds")
    return {"model": name, "wall_s": wall, "cpu_s": used, **{k: r[k] for k in keep}}


def cpu() -> float:
    """CPU seconds of all children so far: what a busy machine changes least."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows() -> list[Row]:
    """All cases."""
    out: list[Row] = []
    for name in ("light_resnet50", "bert_base"):
        path = materialize(name, FOLDER)
        if path is None:
            print(f"{name}: skipped, the folder of exported models is not beside the checkout")
            continue
        out.append({**measure(name, path, EXPORTS.get(name, {})), "goal_s": GOAL})
    for layers in LAYERS:
        row = measure(f"encoder, {layers} layers", encoder.write(layers, FOLDER), {})
        out.append({**row, "layers": layers, **({"goal_s": GOAL} if layers == 12 else {})})
    shutil.rmtree(FOLDER)
    return out


def main() -> int:
    """Measure, print and record."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = rows()
    table = Table(title=f"tapestry compile --mesh {MESH}, seconds", title_justify="left")
    table.add_column("model")
    for c in ("nodes", "ops", "signatures", *STAGES, "wall", "CPU", "gap", "goal"):
        table.add_column(c, justify="right")
    for r in found:
        numbers = [str(r[k]) for k in ("nodes", "ops", "signatures")] + [f"{r['seconds'][k]:.2f}" for k in STAGES]
        goal = "" if "goal_s" not in r else f"< {r['goal_s']:.0f} ok" if r["seconds"]["total"] < r["goal_s"] else "[red]missed"
        table.add_row(r["model"], *numbers, f"{r['wall_s']:.2f}", f"{r['cpu_s']:.2f}", f"{r['gap']:.2%}", goal)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    record.write("compiler", found, mesh=MESH)
    return 0 if all(r["seconds"]["total"] < r.get("goal_s", float("inf")) for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
