"""A program's blocks in random orders, each twice: the same bits.

    .venv/bin/python -m bench schedules [--runs N] [--only NAME …]

Every model is planned for a few devices and run beside its plain run (N times, of all models together), in a random order.
Writes bench/results/schedules.json; exits 1 if a run has other bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support import record
from bench.support.record import Row
from examples import layer
from tapestry import api
from tapestry.tools.schedules import AnyOrderExecutor, run_beside
from tests.support.small_models import MODELS

MESHES = {
    "transformer layer": "2x2", "attention": "2x2", "convolutions": "4", "poolings": "3", "norms": "1", "recurrent": "3",
    "selections": "2", "random numbers": "4",
}  # fmt: skip
OURS = {
    "transformer layer": layer.model, "attention": MODELS["attention"], "convolutions": MODELS["conv_chain"],
    "poolings": MODELS["pools"], "norms": MODELS["norms"], "recurrent": MODELS["recurrent"],
    "selections": MODELS["selections"], "random numbers": MODELS["noise"],
}  # fmt: skip


def row_of(name: str, runs: int) -> Row:
    """A model's runs."""
    build = api.compile(OURS[name](), mesh=MESHES[name], topology="cpu")
    start = time.process_time()
    other = api.open_session(build.build, b"".join(build.constants.values()), make=AnyOrderExecutor)
    feeds, orders = build.random_feeds(0), set[tuple[int, ...]]()
    same, blocks = 0, 0
    for seed in range(runs):
        _, told = run_beside(build.session, other, feeds, seed)
        same, blocks = same + told["same_bits"], told["twice"]
        executor = other.executor
        assert isinstance(executor, AnyOrderExecutor)
        orders.add(tuple(executor.told.order))
    return {"model": name, "mesh": MESHES[name], "blocks": blocks, "runs": runs, "same_bits": same, "orders": len(orders),
            "cpu_s": time.process_time() - start}  # fmt: skip


def main() -> int:
    """Run, show, write; 1 if a run has other bits."""
    p = argparse.ArgumentParser(prog="bench schedules")
    p.add_argument("--runs", type=int, default=1000, metavar="N", help="of all models together")
    p.add_argument("--only", nargs="+", choices=MESHES, default=list(MESHES), metavar="NAME")
    args = p.parse_args()
    console, each = Console(), -(-args.runs // len(args.only))
    rows: list[Row] = []
    for name in args.only:
        row = row_of(name, each)
        rows.append(row)
        print(f"{name}: {row['same_bits']} of {row['runs']} runs with the same bits, {row['cpu_s']:.1f} s", flush=True)
    console.print(shown(rows))
    whole = set(args.only) == set(MESHES)
    record.write("schedules", rows if whole else record.merged("schedules", rows, ("model",)))
    return int(any(r["same_bits"] != r["runs"] for r in rows))


def shown(rows: list[Row]) -> Any:
    """The table on a terminal."""
    table = Table("model", "mesh", "blocks", "runs", "same bits")
    for r in rows:
        table.add_row(r["model"], r["mesh"], str(r["blocks"]), str(r["runs"]), str(r["same_bits"]))
    return table


if __name__ == "__main__":
    sys.exit(main())
