"""The ASPLOS/EuroSys 2025 contest on intra-operator parallelism (google/iopddl): our cost, our bound, the best of 20 teams.

    python -m bench iopddl DIR [--only G,B] [--time-factor 1.0] [--work] [--shapes]

DIR holds the contest's instances, ``NAME.json.gz`` or ``NAME.json``, and optionally a README.md with a table of the best
known costs and the contest's time limits (which hold here too, although the contest had eight cores). Costs and feasibility are
evaluated here from the file alone, apart from the solver. Ctrl-C ends the present instance with what was found, and the run
after it. ``--shapes`` solves generated problems with hardly more edges than nodes instead (`bench.support.iopddl_shapes`);
nothing is known of their least costs but our bound, and they have a file of results of their own. ``--work`` counts work
instead of looking at the clock, as much as the limit allows on an idle core: for machines that do other things meanwhile. Each
row tells processor time, and cost and bound after every step. Rows of an earlier run that are not solved anew stay.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.iopddl_shapes import SHAPES
from bench.support.iopddl_shapes import problem as problem_of
from bench.support.record import SHARED, Row, machine, merged, write
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.pairs import FORBIDDEN, Instance, Usage
from tapestry.plan.solver.pairwise import search

SECONDS = 180.0  # for an instance whose time limit the README does not tell


def read(path: Path) -> dict[str, Any]:
    """The contest's problem: nodes with intervals, costs and usages; edges with nodes and costs; the usage limit."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as f:
        document = json.load(f)
    return document.get("problem", document)


def instance(problem: dict[str, Any]) -> Instance:
    """Flat arrays of a problem."""
    nodes, edges = problem["nodes"], problem.get("edges", {})
    costs, pairs = nodes["costs"], edges.get("nodes", [])
    flat = lambda rows: np.array([x for row in rows for x in row], float)  # noqa: E731
    sizes = np.array([len(c) for c in costs], np.int64)
    return Instance(
        sizes=sizes,
        unary=flat(costs),
        pairs=np.array(pairs, np.int64).reshape(-1, 2),
        tables=flat(edges.get("costs", [])),
        usage=_usage(sizes, flat(nodes["usages"]), nodes["intervals"], problem.get("usage_limit")),
    )


def _usage(sizes: np.ndarray, amount: np.ndarray, intervals: list[list[int]], limit: int | None) -> Usage:
    """What every choice uses while its node is alive."""
    if limit is None:
        return Usage.none()
    lo, hi = np.repeat(np.array([i or [0, 0] for i in intervals], np.int64).reshape(-1, 2), sizes, axis=0).T
    used = np.flatnonzero((amount != 0) & (hi > lo))
    end = int(hi[used].max(initial=0))
    return Usage(used, lo[used], hi[used], amount[used], np.full(end, float(limit)), np.arange(end))


def evaluate(problem: dict[str, Any], choice: list[int]) -> tuple[int, int]:
    """(cost, largest sum of usages alive at one time), in whole numbers, with nothing of the solver; cost -1: forbidden."""
    nodes, edges = problem["nodes"], problem.get("edges", {})
    terms = [costs[c] for costs, c in zip(nodes["costs"], choice, strict=True)]
    for (i, j), table in zip(edges.get("nodes", []), edges.get("costs", []), strict=True):
        terms.append(table[choice[i] * len(nodes["costs"][j]) + choice[j]])
    change: dict[int, int] = {}
    for interval, usages, c in zip(nodes["intervals"], nodes["usages"], choice, strict=True):
        if interval and interval[0] < interval[1]:
            change[interval[0]] = change.get(interval[0], 0) + usages[c]
            change[interval[1]] = change.get(interval[1], 0) - usages[c]
    used = most = 0
    for t in sorted(change):
        used += change[t]
        most = max(most, used)
    return (-1 if any(t >= FORBIDDEN for t in terms) else sum(terms)), most


def limit_of(problem: dict[str, Any]) -> float:
    """Of the sum of the usages alive at one time."""
    limit = problem.get("usage_limit")
    return float("inf") if limit is None else float(limit)


def known(directory: Path) -> dict[str, dict[str, float]]:
    """Seconds, best cost and XLA's ratio by instance, from the table in the README, if there is one."""
    readme = directory / "README.md"
    out: dict[str, dict[str, float]] = {}
    for line in readme.read_text().splitlines() if readme.is_file() else []:
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if len(cells) < 8 or not re.fullmatch(r"[A-Z]", cells[0]):
            continue
        numbers = [re.match(r"[\d.,]+", c) for c in cells[5:8]]
        values = [float(n.group().replace(",", "")) if n else float("nan") for n in numbers]
        out[cells[0]] = dict(zip(("seconds", "best", "xla"), values))
    return out


def measure(path: Path, facts: dict[str, float], factor: float, stop: threading.Event | None = None, work: bool = False) -> Row:
    """Solve one instance of a file and check the result; reading takes its time too."""
    start = time.monotonic()
    return solve(path.name.split(".")[0], read(path), facts, factor, start, stop, work)


def solve(
    name: str,
    problem: dict[str, Any],
    facts: dict[str, float],
    factor: float,
    start: float,
    stop: threading.Event | None,
    work: bool = False,
) -> Row:
    """Solve a problem and check the result, with the clock at ``start`` when it began; ``work``: no clock ends it."""
    limit, used = facts.get("seconds", SECONDS) * factor, time.process_time()
    given, stop = instance(problem), stop or threading.Event()
    seconds = 0.98 * limit - (time.monotonic() - start)
    state = search(given, Budget(0.98 * limit * SECOND, interrupt=stop) if work else Budget.of(seconds, stop))
    seconds = time.monotonic() - start
    cost, peak = evaluate(problem, [int(c) for c in state.choice])
    feasible = np.isfinite(state.cost)
    if feasible and (abs(cost - state.cost) > 1e-9 * abs(cost) or cost < 0 or peak > limit_of(problem)):
        said = f"the solver says {state.cost}, the evaluator {cost} at a peak of {peak} of {limit_of(problem)}"
        raise SystemExit(f"{name}: {said}")
    bound = float(state.bound)
    best = facts.get("best", float("nan"))
    return {
        "instance": name, "nodes": len(given.sizes), "edges": len(given.pairs), "feasible": bool(feasible),
        "infeasible": bool(state.bound == np.inf),
        "cost": cost if feasible else None, "bound": _plain(bound), "gap": (cost - bound) / cost if feasible and cost else None,
        "best_known": _plain(best), "ratio": _plain(cost / best) if feasible else None,
        "xla_ratio": _plain(facts.get("xla", float("nan"))),
        "limit_seconds": limit, "seconds": round(seconds, 2), "by_work": work,
        "processor_seconds": round(time.process_time() - used, 2), "load": os.getloadavg()[0],
        "peak": peak, "usage_limit": limit_of(problem),
        "steps": [[round(t, 2), what, _plain(c), _plain(b)] for t, what, c, b in state.log],
    }  # fmt: skip


def _plain(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


HEAD = ("instance", "nodes", "edges", "cost", "bound", "gap", "best known", "ratio", "XLA", "seconds")
WIDE = (8, 7, 8, 19, 19, 8, 17, 7, 6, 8)


def show(row: Row) -> str:
    """One line of the table."""
    form = {"nodes": ",d", "edges": ",d", "cost": ",d", "bound": ",.0f", "gap": ".3%", "best_known": ",.0f", "ratio": ".4f"}
    form |= {"instance": "", "xla_ratio": ".2f", "seconds": ".1f"}
    keys = ("instance", "nodes", "edges", "cost", "bound", "gap", "best_known", "ratio", "xla_ratio", "seconds")
    cells = ["—" if row[k] is None else format(row[k], form[k]) for k in keys]
    line = " ".join(c.rjust(w) for c, w in zip(cells, WIDE))
    if row["feasible"]:
        return line
    return line + ("  proved: no choice keeps to the limits" if row["infeasible"] else "  no choice was found in time")


def _files(options: argparse.Namespace, only: set[str], stop: threading.Event) -> Iterator[Callable[[], Row]]:
    """The contest's instances, to be solved one after another."""
    facts = known(options.directory)
    paths = sorted(p for form in ("*.json.gz", "*.json") for p in options.directory.glob(form))
    for path in paths:
        name = path.name.split(".")[0]
        if not only or name in only:
            yield partial(measure, path, facts.get(name, {}), options.time_factor, stop, options.work)


def _shapes(only: set[str], factor: float, stop: threading.Event, work: bool) -> Iterator[Callable[[], Row]]:
    """The generated problems; what making them takes does not count."""
    for name, shape in SHAPES.items():
        if not only or name in only:
            made = problem_of(shape)
            yield lambda made=made, name=name, limit=shape.seconds: solve(
                name, made, {"seconds": limit}, factor, time.monotonic(), stop, work
            )


def main() -> int:
    """Print the table and write ``bench/results/iopddl.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path, nargs="?", default=SHARED.parent / "iopddl")
    parser.add_argument("--only", default="", help="instances, separated by commas")
    parser.add_argument("--time-factor", type=float, default=1.0, help="of the contest's time limits")
    parser.add_argument("--work", action="store_true", help="count work instead of looking at the clock")
    parser.add_argument("--shapes", action="store_true", help="generated problems with hardly more edges than nodes instead")
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    rows: list[Row] = []
    shapes, factor = options.shapes, options.time_factor
    for make in _shapes(only, factor, stop, options.work) if shapes else _files(options, only, stop):
        if not rows:
            print(" ".join(h.rjust(w) for h, w in zip(HEAD, WIDE)), flush=True)
        rows.append(make())
        print(show(rows[-1]), flush=True)
        if stop.is_set():
            break
    if not rows:
        print(f"no instances in {options.directory}: skipped")
        return 0
    name = "iopddl_shapes" if options.shapes else "iopddl"
    print("written:", write(name, merged(name, rows, ["instance"]), time_factor=factor, machine=machine()))
    return 0 if all(r["feasible"] or r["infeasible"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
