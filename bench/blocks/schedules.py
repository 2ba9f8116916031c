"""A program's blocks in random orders, twice, elsewhere, and again where they were lost: the same bits, and what that costs.

    .venv/bin/python -m bench schedules [--runs N] [--only NAME …]

Every model is planned for a few devices and run N times in all beside its plain run: a third of the runs in a random order with
every block a second time on another device, a third with blocks lost at random (one after each block with a chance of 5 %), a
third with one device lost for good. What was computed again is set beside what a restart at each loss would do again: all that
had been done by then. Bytes are those that come to a device, from the host and from other devices. Writes
bench/results/schedules.json; exits 1 if a run has other bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support import record
from bench.support.record import Row
from examples import layer
from tapestry import api
from tapestry.runtime.block_walk import Asked
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
LOSE = 0.05


def asked(seed: int, several: bool) -> tuple[str, Asked]:
    """What happens in a run, in turns."""
    ways = (
        ("order", Asked(seed=seed)), ("lost_blocks", Asked(seed=seed, lose=LOSE, twice=False)),
        ("lost_device", Asked(seed=seed, devices=1, twice=False)),
    )  # fmt: skip
    return ways[seed % (3 if several else 2)]


def row_of(name: str, runs: int) -> Row:
    """A model's runs."""
    build = api.compile(OURS[name](), mesh=MESHES[name], topology="cpu")
    start = time.process_time()
    other = api.open_session(build.build, b"".join(build.constants.values()), make=AnyOrderExecutor)
    feeds, sums, orders = build.random_feeds(0), dict[str, Counter[str]](), set[tuple[int, ...]]()
    same, blocks = 0, 0
    for seed in range(runs):
        way, what = asked(seed, build.build.plan.devices > 1)
        _, told = run_beside(build.session, other, feeds, what)
        same, blocks = same + told["same_bits"], told["plan"]["blocks"]
        executor = other.executor
        assert isinstance(executor, AnyOrderExecutor)
        orders.add(tuple(executor.told.order))
        sums.setdefault(way, Counter()).update(_flat(told))
    rows = {way: dict(c) for way, c in sums.items()}
    return {"model": name, "mesh": MESHES[name], "blocks": blocks, "runs": runs, "same_bits": same, "orders": len(orders),
            **rows, "cpu_s": time.process_time() - start}  # fmt: skip


def _flat(told: Row) -> dict[str, int]:
    """Counts of a run, to be summed."""
    out = {k: told[k] for k in ("computed", "twice", "elsewhere", "lost_blocks")} | {"runs": 1, "losses": _losses(told)}
    for work in ("plan", "again", "restart"):
        out |= {f"{work}_{k}": n for k, n in told[work].items()}
    return out


def _losses(told: Row) -> int:
    return len(told["lost_devices"]) or told["lost_blocks"]


def share(row: Row, way: str, what: str) -> str:
    """What was done again, of what a restart does again."""
    sums = row.get(way, {})
    return f"{sums[f'again_{what}'] / sums[f'restart_{what}']:.1%}" if sums.get(f"restart_{what}") else "-"


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
    record.write("schedules", rows if whole else record.merged("schedules", rows, ("model",)), lose=LOSE)
    return int(any(r["same_bits"] != r["runs"] for r in rows))


def shown(rows: list[Row]) -> Any:
    """The table on a terminal."""
    heads = ("model", "mesh", "blocks", "runs", "same bits", "blocks lost: FLOPs", "bytes", "device lost: FLOPs", "bytes")
    table = Table(*heads)
    for r in rows:
        shares = [share(r, way, what) for way in ("lost_blocks", "lost_device") for what in ("flops", "bytes")]
        table.add_row(r["model"], r["mesh"], str(r["blocks"]), str(r["runs"]), str(r["same_bits"]), *shares)
    return table


if __name__ == "__main__":
    sys.exit(main())
