"""Bytes between 8 devices: plans against JAX's partitioner, compiled in the same run from the same graphs and layouts.

    .venv/bin/python -m bench communication --jax PYTHON [--only NAME …]

PYTHON is an interpreter that has jax (the extra ``peers``, or an environment of its own; default: this one). Without jax,
XLA's figures are those noted before, and marked. Both sides get the layouts of the graph's ends and choose the rest; an end
without a layout is free on both sides, and each row says which are. We minimise estimated time, not bytes: ratios are shown of
plans for the links of every preset, and rows above 1 on any are named, with what the extra bytes buy: the time of the plan on
our clock, beside that of the quickest of the other presets' plans that sends no more than XLA. Products of float32 are priced
in IEEE arithmetic, as our kernels compute them; the last ratio is of plans for ``--topology`` with products in TF32, as XLA's
are on such a GPU: where a product takes less time, less of it hides transfers. ``--only``: the cases whose names have one of
these texts in them; rows of an earlier run that are not measured anew stay. Writes bench/results/communication.json; exits 1
where we move more than XLA under ``--topology``, or where the least bytes are known and we miss them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import onnx
from rich.console import Console
from rich.table import Table

import tapestry
from bench.planning import xla
from bench.planning.partitioner_cases import Case, all_cases
from bench.support import record
from bench.support.record import WORK, Row
from tapestry.ir.plan import Plan
from tapestry.plan.lower import lower
from tapestry.plan.simulate import simulate
from tapestry.plan.topology import PRESETS, topology

TOLERANCE = 1e-3
TF32 = "tf32"
NOTES = (
    "XLA's pipeline for CPU forms no reduce-scatter. In 'MLP, batch cut at both ends' a slice follows its all-reduce: with a",
    "reduce-scatter there it would move 14,680,064 bytes per device, as we do (ratio 1.000).",
    "Where 8 does not divide, each side has shares of its own: XLA's are ⌈n/8⌉ and what is left, ours differ by one at most.",
)


def plan(case: Case, preset: str, precision: str = "ieee") -> tapestry.Compiled:
    """Our plan."""
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / "case.onnx"
    onnx.save(case.model(), path)
    mesh = "x".join(map(str, case.mesh))
    options = {"layouts": case.texts(), "topology": preset, "weights": False, "precision": precision}
    return tapestry.compile(path, mesh=mesh, **options)


def seconds(made: Plan, preset: str) -> float:
    """What a plan takes on our clock, with the links of a preset."""
    return simulate(made, lower(made), topology(made.mesh, preset)).total


def total(transfers: list[Row]) -> int:
    """Bytes on the wire, all senders together."""
    return sum(t["bytes"] for t in transfers)


def row(name: str, case: Case, main_preset: str, peer: Row | None, other: Row | None) -> Row:
    """Plan one case and compare; ``peer`` is what XLA did in this run, ``other`` what it did with the other form."""
    plans = {p: plan(case, p) for p in (main_preset, *(p for p in PRESETS if p != main_preset))}
    sent = {p: total(made.report["transfers"]) for p, made in plans.items()}
    transfers, ours = list(plans[main_preset].report["transfers"]), sent[main_preset]
    theirs = peer["bytes"] if peer else case.noted
    ratio = None if theirs is None else ours / theirs
    exact = case.exact is None or [(t["kind"], t["bytes"]) for t in transfers] == [case.exact]
    elsewhere = {p: n for p, n in sent.items() if p != main_preset}
    elsewhere[f"{main_preset}, {TF32}"] = total(plan(case, main_preset, TF32).report["transfers"])
    thrifty = [p for p, n in sent.items() if theirs and n <= theirs * (1 + TOLERANCE)]
    bought = {
        p: [seconds(plans[p].build.plan, p), min((seconds(plans[q].build.plan, p) for q in thrifty), default=None)]
        for p in sent.keys() - {*thrifty}
        if theirs
    }
    return {
        "case": name, "mesh": case.mesh, "layouts": case.texts(), "free": case.free(), "transfers": transfers, "bytes": ours,
        "bytes_per_device": ours / xla.DEVICES, "bytes_elsewhere": elsewhere, "bought": bought,
        "expected": case.exact, "aim_bytes": case.aim, "xla_bytes": theirs, "xla_same_run": peer is not None,
        "xla_collectives": peer["collectives"] if peer else None, "ratio_to_xla": ratio,
        "xla_bytes_other_form": other["bytes"] if other else None,
        "passed": exact and (ratio is None or ratio <= 1 + TOLERANCE),
    }  # fmt: skip


def with_recorded(made: Row) -> Row:
    """A row with what XLA did in the run that is recorded, where that is there."""
    old = next((r for r in record.read("communication") if r["case"] == made["case"]), made)
    if old["xla_collectives"] is None:
        return made
    theirs = {k: old[k] for k in ("xla_bytes", "xla_collectives", "xla_bytes_other_form")}
    ratio = made["bytes"] / old["xla_bytes"] if old["xla_bytes"] else None
    exact = made["expected"] is None or [(t["kind"], t["bytes"]) for t in made["transfers"]] == [made["expected"]]
    return {**made, **theirs, "ratio_to_xla": ratio, "passed": exact and (ratio is None or ratio <= 1 + TOLERANCE)}


def _times(kinds: Counter[str]) -> str:
    return ", ".join(f"{n} {k.replace('_', '-')}" for k, n in kinds.items()) or "none"


def _ratios(r: Row, topology: str) -> dict[str, float | None]:
    """Our bytes over XLA's, by what the plan is for."""
    found = {topology: r["bytes"], **r["bytes_elsewhere"]}
    return {p: n / r["xla_bytes"] if r["xla_bytes"] else None for p, n in found.items()}


def show(rows: list[Row], topology: str, versions: Row | None) -> None:
    """Print the table and what it does not say."""
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    peer = f"XLA, jax {versions['jax']} in this run" if versions else "XLA as noted before (no jax; see --jax)"
    table = Table(
        title=f"Bytes on the wire per device, 8 devices; ours planned for {topology}, ratios for each preset; {peer}",
        title_justify="left",
    )
    plans = list(_ratios(rows[0], topology))
    for c in ("case", "free ends", "our transfers", "ours", "XLA", "XLA's collectives", *plans, "aim", ""):
        table.add_column(c, justify="right" if c in ("ours", "XLA", *plans, "aim") else "left")
    for r in rows:
        ours = _times(Counter({t["kind"]: t["count"] for t in r["transfers"]}))
        theirs = _times(Counter(c["kind"] for c in r["xla_collectives"])) if r["xla_same_run"] else "noted"
        numbers = [f"{b / xla.DEVICES:,.0f}" if b is not None else "" for b in (r["bytes"], r["xla_bytes"], r["aim_bytes"])]
        ratios = [
            "" if x is None else f"[red]{x:.3f}" if x > 1 + TOLERANCE else f"{x:.3f}" for x in _ratios(r, topology).values()
        ]
        mark = "" if r["aim_bytes"] is None else "met" if r["bytes"] <= r["aim_bytes"] else "not met"
        free, met = ", ".join(r["free"]) or "none", mark if r["passed"] else "[red]FAILS"
        table.add_row(r["case"], free, ours, numbers[0], numbers[1], theirs, *ratios, numbers[2], met)
    console.print(table)
    console.print(*NOTES)
    for r in (r for r in rows if r["xla_bytes_other_form"]):
        theirs = r["xla_bytes_other_form"]
        how = "is jnp.mean and jnp.var; JAX code with E[x²]−E[x]² sends"
        text = f"'{r['case']}' {how} {theirs / xla.DEVICES:,.0f}, ratio {r['bytes'] / theirs:.3f}: the count is not sent."
        console.print(text, markup=False)
    for preset in plans:
        found = [
            f"{r['case']} {x:.3f}{_bought(r, preset)}"
            for r in rows
            if (x := _ratios(r, topology)[preset]) and x > 1 + TOLERANCE
        ]
        console.print(f"Planned for {preset}, more than XLA: {'; '.join(found) or 'none'}.")


def _bought(r: Row, preset: str) -> str:
    ours, thrifty = r.get("bought", {}).get(preset, (None, None))
    return "" if thrifty is None else f" ({ours * 1e6:.0f} µs; {thrifty * 1e6:.0f} with no more bytes)"


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description="Bytes between devices, ours against JAX's partitioner.")
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter that has jax (default: this one, if it has)")
    parser.add_argument("--topology", choices=PRESETS, default="a100-pcie", help="the links that our plans are for")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="cases with one of these texts in their names")
    given = parser.parse_args()
    python = given.jax or sys.executable
    cases = {n: c for n, c in all_cases().items() if not given.only or any(text in n for text in given.only)}
    if not cases:
        parser.error("no case has such a name: " + ", ".join(all_cases()))
    peers: Row | None = None
    if xla.available(python):
        others = [c.document(f"{n}, other form", other=True) for n, c in cases.items() if c.other_form]
        peers = xla.measure([c.document(n) for n, c in cases.items()] + others, python)
    elif given.jax:
        parser.error(f"{given.jax} has no jax")
    found, versions = (peers["cases"], peers["versions"]) if peers else ({}, None)
    rows = [row(n, c, given.topology, found.get(n), found.get(f"{n}, other form")) for n, c in cases.items()]
    if given.only and not peers:
        rows = [with_recorded(r) for r in rows]
    show(rows, given.topology, versions)
    passed = all(r["passed"] for r in rows)
    if given.only:
        rows = record.merged("communication", rows, ["case"])
        versions = versions or record.read_more("communication", "peer", None)
    record.write("communication", rows, devices=xla.DEVICES, topology=given.topology, peer=versions)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
