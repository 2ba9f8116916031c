"""Every plan of small random graphs on the simulated clock, beside the bound that the planner states.

    .venv/bin/python -m bench bounds [--graphs N] [--first SEED]

A graph has two to five operations (products, maps, reductions, attention), results that several operations read, and two
devices of a random sort: alike or not, joined by a switch or by slow links, transfers beside kernels or not. In a third of the
graphs the layouts of an input and an output are fixed; in half of them memory is short, for many plans or for all in space. A
choice of strategies is lowered and put on the clock, with transfers in the order of the program, moved ahead and in better
orders, and with rings for gathers. Where memory is short, so are the plans of every graph that one split in time makes (as many
as `SAMPLE` of each), and only plans that fit count. The rows say how far the bound is below the least of all, and how
far the plan that was found is above it; written to bench/results/bounds.json. Exits 1 where a plan is below the bound.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from bench.support import record
from bench.support.record import Row
from tapestry.errors import PlanError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout, MeshAxis
from tapestry.ir.program import Program, peak_bytes
from tapestry.ir.syntax.parser import parse
from tapestry.plan.cost import floor
from tapestry.plan.hoist_transfers import early, in_better_order
from tapestry.plan.memory.memory_fit import fit
from tapestry.plan.search.planner import in_rings, search
from tapestry.plan.search.priced_plan import PricedPlan, TooBig, priced_plan
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.simulate import simulate
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.topology import Topology, parse_mesh, topology
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.splitting import split_time

MOST = 300  # plans of a graph in space
ORDERED = 4  # plans whose transfers are put in better orders
SAMPLE = 8  # plans of a graph that a split in time makes, drawn where it has more
FIT = 0.5 * SECOND  # for a search of splits in time
ROUNDING = 1e-9
MAPS = ("tanh({0})", "{0} + {1}", "{0} * {1}", "max({0}, 0.0) - {1}")
PRODUCT = """{out}: f32[{n}, {n}] = op [i: {n}, j: {n} | m: {n} sum]
  reads a = {0}[{p}], b = {1}[{q}]
  body a * b
"""
MAP = """{out}: f32[{n}, {n}] = op [i: {n}, j: {n}]
  reads a = {0}[{p}], b = {1}[{q}]
  body {body}
"""
ROWS = """{out}.r: f32[{n}] = op [i: {n} | j: {n} {monoid}]
  reads a = {0}[{p}]
  body a
{out}: f32[{n}, {n}] = op [i: {n}, j: {n}]
  reads a = {1}[{q}], b = {out}.r[i]
  body a - b
"""
ATTENTION = """{out}.s: f32[{n}, {n}] = op [i: {n}, j: {n} | d: {n} sum]
  reads a = {0}[i, d], b = {1}[j, d]
  body a * b
{out}.l: f32[{n}] = op [i: {n} | j: {n} max]
  reads a = {out}.s[i, j]
  body a
{out}.e: f32[{n}, {n}] = op [i: {n}, j: {n}]
  reads a = {out}.s[i, j], b = {out}.l[i]
  body exp(a - b)
{out}.t: f32[{n}] = op [i: {n} | j: {n} sum]
  reads a = {out}.e[i, j]
  body a
{out}: f32[{n}, {n}] = op [i: {n}, d: {n} | j: {n} sum]
  reads a = {out}.e[i, j], b = {out}.t[i], c = {1}[j, d]
  body (a / b) * c
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A graph with two devices, fixed layouts, and how many bytes each device has."""

    graph: Graph
    topo: Topology
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]


def written(rng: random.Random) -> Graph:
    """A graph; new operations read old results as often as new ones."""
    n = rng.choice((32, 64, 96, 256))
    names, text = ["x", "w"], f"graph g\ninput x: f32[{n}, {n}]\ninput w: f32[{n}, {n}]\n"
    attends = rng.random() < 0.2
    for k in range(rng.randint(1, 2) if attends else rng.randint(3, 4)):
        first, second = rng.choice(names[-2:]), rng.choice(names)
        p, q = (rng.choice(("i, {}", "{}, i")) for _ in range(2))
        kind = rng.choice((PRODUCT, PRODUCT, MAP, ROWS))
        if kind is PRODUCT:
            p, q = p.format("m"), rng.choice(("m, j", "j, m"))
        p, q = p.format("j"), q.format("j")
        more = {"body": rng.choice(MAPS).format("a", "b"), "monoid": rng.choice(("sum", "max"))}
        text += kind.format(first, second, out=f"t{k}", n=n, p=p, q=q, **more)
        names.append(f"t{k}")
    if attends:
        text += ATTENTION.format(names[-1], rng.choice(names), out="y", n=n)
        names.append("y")
    used = [t for t in names[2:] if not any(f"= {t}[" in line for line in text.splitlines())]
    graph = parse(text + f"output {', '.join(used)}\n")
    return simplify(graph) if attends else graph


def devices(rng: random.Random) -> Topology:
    """Two devices of a random sort."""
    topo = topology(parse_mesh("2"), rng.choice(("cpu", "h100", "a100-pcie")))
    topo = replace(topo, overlap=rng.random() < 0.6)
    if rng.random() < 0.3:
        topo = replace(topo, links=(replace(topo.links[0], beta=topo.links[0].beta * 30),))
    if rng.random() < 0.3:  # (launches that cost little beside work and messages)
        topo = replace(topo, device=replace(topo.device, launch=topo.device.launch / 20))
    if rng.random() < 0.2:
        topo = replace(topo, mesh=(MeshAxis("a", 2, rng.choice(((2, 1), (1, 3)))),))
    if rng.random() < 0.2:
        slow = replace(topo.device, vector=topo.device.vector / 3, bandwidth=topo.device.bandwidth / 2)
        topo = replace(topo, kinds=(topo.device, slow)[:: rng.choice((1, -1))])
    return topo


def case(seed: int) -> Case:
    """The graph of a number, with devices and layouts; one of at most `MOST` plans."""
    rng = random.Random(seed)
    while True:
        graph, topo = written(rng), devices(rng)
        ends = {t: (rng.choice((None, 0, 1)),) for t in ("x", graph.outputs[0])} if rng.random() < 1 / 3 else {}
        inputs, outputs = ({t: at for t, at in ends.items() if (t in graph.inputs) == k} for k in (True, False))
        found = Case(graph=graph, topo=topo, inputs=inputs, outputs=outputs)
        if len(graph.ops) > 1 and 1 < prod(problem_of(found).sizes) <= MOST:
            return found


def problem_of(given: Case, graph: Graph | None = None) -> Problem:
    """Its strategies, or those of a graph that was made of it."""
    return build(graph or given.graph, given.topo, {}, given.inputs, given.outputs)


def every(problem: Problem, rng: random.Random, most: int) -> list[tuple[float, int]]:
    """(seconds, bytes of the device that needs most) of all plans of a problem, with rings and without; of so many where there
    are more. The transfers of those that take least are put in better orders, too."""
    choices = itertools.product(*map(range, problem.sizes))
    if prod(problem.sizes) > most:
        choices = (tuple(rng.randrange(n) for n in problem.sizes) for _ in range(most))
    out: list[tuple[float, int]] = []
    plans: list[tuple[float, int, PricedPlan]] = []
    for choice in choices:
        found = priced_plan(problem, choice, -np.inf)
        for p in (found, in_rings(found)):
            if p and np.isfinite(p.objective):
                plans.append((clocked(p, early(p.program)), len(plans), p))
    for seconds, n, p in sorted(plans):
        again = seconds
        if problem.topo.overlap and len(out) < ORDERED:
            again = clocked(p, in_better_order(p.plan, p.program, problem.topo)[0])
        out.append((min(seconds, again), max(peak_bytes(plans[n][2].program)[0])))
    return out


def clocked(found: PricedPlan, program: Program) -> float:
    """Simulated seconds of a plan, the least with its transfers as they were lowered and as in another program of it."""
    topo = found.problem.topo if found.problem else None
    if topo is None or not topo.overlap or program is found.program:
        return found.objective
    return min(found.objective, simulate(found.plan, program, topo).total)


def in_time(given: Case, rng: random.Random) -> Iterator[tuple[float, int]]:
    """(seconds, bytes) of plans of all graphs that one split in time makes."""
    for at, op in enumerate(given.graph.ops):
        for d, parts, back in itertools.product(op.space, (2, 4), (0, at)):
            if (at or not back) and split_time.split_time_refusal(op, d.name, parts) is None:
                graph = apply_moves(given.graph, [split_time.time_move(op, d.name, parts, back)])
                yield from every(problem_of(given, graph), rng, SAMPLE)


def measure(seed: int) -> Row:
    """The bound, the plan that was found and the best of all plans: of a case, or of the same with short memory."""
    given, rng = case(seed), random.Random(f"memory {seed}")
    plans = every(problem_of(given), rng, MOST)
    least, limit, short = min(m for _, m in plans), np.inf, rng.choice(("", "", "", "space", "space", "time"))
    if short:
        fits = sorted({m for _, m in plans})
        limit = fits[rng.randrange(len(fits))] if short == "space" else int(least * rng.uniform(0.75, 1.0))
        given = replace(given, topo=replace(given.topo, device=replace(given.topo.device, memory=int(limit))))
        given = replace(given, topo=replace(given.topo, kinds=tuple(replace(k, memory=int(limit)) for k in given.topo.kinds)))
        plans += in_time(given, rng) if short == "time" else []
    fitting = [seconds for seconds, m in plans if m <= limit]
    try:
        found = search(given.graph, given.topo, inputs=given.inputs, outputs=given.outputs)
    except TooBig as e:
        try:
            found = fit(
                given.graph, given.topo, e.closest, inputs=given.inputs, outputs=given.outputs, budget=Budget.of(None).part(FIT)
            ).found
        except PlanError:
            found = None
    fitting += [found.objective] if found else []
    return {
        "seed": seed, "operations": len(given.graph.ops), "plans": len(plans), "memory": short, "overlap": given.topo.overlap,
        "bound_s": found.bound if found else floor.least_seconds(given.graph, given.topo),
        "objective_s": found.objective if found else None, "best_s": min(fitting, default=None),
    }  # fmt: skip


def below(row: Row) -> bool:
    """Whether some plan is below the bound."""
    return row["best_s"] is not None and row["best_s"] < row["bound_s"] * (1 - ROUNDING)


def spread(gaps: list[float]) -> str:
    """How many are nothing, and quantiles."""
    at = np.quantile(gaps, (0.5, 0.75, 0.9, 1.0)).tolist() if gaps else []
    named = ", ".join(f"{name} {v:.2%}" for name, v in zip(("median", "75 %", "90 %", "most"), at, strict=False))
    return f"{sum(g <= ROUNDING for g in gaps)} nothing; {named}"


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    given = parser.parse_args()
    rows: list[Row] = []
    for seed in range(given.first, given.first + given.graphs):
        rows.append(measure(seed))
        if below(rows[-1]):
            print(f"below the bound: {rows[-1]}", flush=True)
    wrong, known = [r for r in rows if below(r)], [r for r in rows if r["best_s"] is not None]
    print(
        f"{len(rows)} graphs, {sum(r['plans'] for r in rows):,} plans; below the bound: {[r['seed'] for r in wrong] or 'none'}"
    )
    for name, part in (("no limit", ""), ("plans in space fit", "space"), ("only splits in time", "time")):
        mine = [r for r in known if r["memory"] == part]
        print(f"{name} ({len(mine)})")
        print("  bound below the best: ", spread([1 - r["bound_s"] / r["best_s"] for r in mine]))
        print("  found above the best: ", spread([r["objective_s"] / r["best_s"] - 1 for r in mine if r["objective_s"]]))
    if given.graphs >= 200 and not given.first:
        record.write("bounds", rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
