"""The ASPLOS/EuroSys 2025 contest on intra-operator parallelism (google/iopddl): our cost, our bound, the best of 20 teams.

    python -m bench iopddl DIR [--only G,B] [--time-factor 2.0]

DIR holds the contest's instances, ``NAME.json.gz`` or ``NAME.json``, and optionally a README.md with a table of the best
known costs and the contest's time limits (of which twice as much is allowed here: the contest had eight cores). Costs and
feasibility are evaluated here from the file alone, apart from the solver. Ctrl-C ends the present instance with what was found,
and the run after it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.record import SHARED, Row, machine, write
from tapestry.plan.solver.budget import Budget
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


def measure(path: Path, facts: dict[str, float], factor: float, stop: threading.Event | None = None) -> Row:
    """Solve one instance and check the result."""
    name = path.name.split(".")[0]
    start = time.monotonic()
    problem = read(path)
    given = instance(problem)
    limit = facts.get("seconds", SECONDS) * factor
    state = search(given, Budget.of(0.98 * limit - (time.monotonic() - start), stop))
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
        "limit_seconds": limit, "seconds": round(seconds, 2), "peak": peak, "usage_limit": limit_of(problem),
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


def main() -> int:
    """Print the table and write ``bench/results/iopddl.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path, nargs="?", default=SHARED.parent / "iopddl")
    parser.add_argument("--only", default="", help="instances, separated by commas")
    parser.add_argument("--time-factor", type=float, default=2.0, help="of the contest's time limits")
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    found = (p for form in ("*.json.gz", "*.json") for p in options.directory.glob(form))
    paths = sorted(found) if options.directory.is_dir() else []
    paths = [p for p in paths if not only or p.name.split(".")[0] in only]
    if not paths:
        print(f"no instances in {options.directory}: skipped")
        return 0
    facts = known(options.directory)
    print(" ".join(h.rjust(w) for h, w in zip(HEAD, WIDE)), flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    rows: list[Row] = []
    for path in paths:
        if not stop.is_set():
            rows.append(measure(path, facts.get(path.name.split(".")[0], {}), options.time_factor, stop))
            print(show(rows[-1]), flush=True)
    print("written:", write("iopddl", rows, time_factor=options.time_factor, machine=machine()))
    return 0 if all(r["feasible"] or r["infeasible"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
