"""A real run beside the model of it: a trace with a track per rank and stream, and every step's seconds against the estimate.

What is measured of a kernel is its time on the device where it took longest, as in the estimate. A transfer's time on a rank
contains what that rank waits for the others to come; the rank that comes last does not wait, so the least time of all is the
transfer's own, and the rest is reported as waiting. Medians over the batches, without the first, which builds the kernels.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from tapestry.build.atomic import new_file
from tapestry.build.store import Build
from tapestry.ir.program import Launch, Reduce, Transfer, payload_bytes, transfer_bytes
from tapestry.viz import explain
from tapestry.viz.format import duration, step_text, template, together, wrapped

Slices = Sequence[np.ndarray[Any, Any]]  # per rank: rows of (batch, step, device, stream, start, end), nanoseconds
Row = dict[str, Any]
RANK_STREAMS = ("compute", "transfer")  # of a rank; messages on their way (2) overlap, and are async events
FLOWN = 2


def write_measured(path: Path, build: Build, slices: Slices) -> dict[str, int]:
    """Write a Chrome trace, whole or not at all; returns how many ranks and slices it has."""
    events, counts = list(_events(build, slices)), {"ranks": len(slices), "slices": sum(len(s) for s in slices)}
    other = {"what": "a real run", **counts, "topology": build.topology, "steps": rows(build, slices)}
    _write_events(path, events, other)
    return counts


def _write_events(path: Path, events: Sequence[Row], other: Mapping[str, Any]) -> None:
    """Write events as a Chrome trace, whole or not at all; ``other`` is data about all of it."""
    data = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
    with new_file(path) as temporary, temporary.open("w") as f:
        json.dump(data, f, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _events(build: Build, slices: Slices) -> Iterator[Row]:
    """Names of tracks, then slices; nanoseconds count from the first of all."""
    begin = min((int(s[:, 4].min()) for s in slices if len(s)), default=0)
    for rank, of_rank in enumerate(slices):
        devices = sorted({int(d) for d in of_rank[:, 2]} - {-1})
        yield _named("process_name", rank, 0, f"rank {rank} (devices {', '.join(map(str, devices))})")
        for tid, stream in enumerate(RANK_STREAMS):
            yield _named("thread_name", rank, tid, stream)
        for n, (batch, step, device, stream, start, end) in enumerate(cast("list[list[int]]", of_rank.tolist())):
            if step == len(build.program.steps):  # outputs on their way to rank 0
                continue
            s = build.program.steps[step]
            name, span = step_text(s, build.program, build.plan.graph.ops), ((start - begin) / 1e3, (end - begin) / 1e3)
            args: Row = {"step": step, "batch": batch}
            if stream == FLOWN:
                common = {"name": name, "cat": "on its way", "pid": rank, "id": f"{rank}.{n}", "args": args}
                yield from ({**common, "ph": phase, "ts": ts} for phase, ts in zip("be", span, strict=True))
                continue
            if isinstance(s, Transfer | Reduce):
                args |= {"kind": s.kind, "bytes, all senders": transfer_bytes(s, build.program)}
            else:
                args |= {"kind": "compute", "device": device}
            yield {
                "name": name,
                "cat": args["kind"],
                "ph": "X",
                "pid": rank,
                "tid": stream,
                "ts": span[0],
                "dur": (end - start) / 1e3,
                "args": args,
            }


def _named(what: str, pid: int, tid: int, name: str) -> Row:
    """The name of a process or a thread."""
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def rows(build: Build, slices: Slices) -> list[Row]:
    """Every step that takes time: what was estimated, what was measured, and what was waited (seconds)."""
    spent: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    batches: set[int] = set()
    for rank, of_rank in enumerate(slices):
        for batch, step, device, stream, start, end in of_rank.tolist():
            if stream == FLOWN or step == len(build.program.steps):
                continue
            batches.add(batch)
            who = device if isinstance(build.program.steps[step], Launch) else rank
            spent[batch, step][who] += (end - start) / 1e9
    counted = sorted(batches)[1:] or sorted(batches)
    out: list[Row] = []
    for t in explain.schedule(build).timed:
        step = build.program.steps[t.step]
        each = [list(spent[b, t.step].values()) for b in counted if spent[b, t.step]]
        if not each:
            continue
        longest, least = statistics.median(map(max, each)), statistics.median(map(min, each))
        compute = isinstance(step, Launch)
        row: Row = {
            "step": t.step, "kind": "compute" if compute else getattr(step, "kind", "load"), "estimated_s": t.seconds,
            "measured_s": longest if compute else least, "waited_s": 0.0 if compute else longest - least,
            "what": step_text(step, build.program, build.plan.graph.ops),
        }  # fmt: skip
        if isinstance(step, Transfer | Reduce):
            row |= {"bytes": transfer_bytes(step, build.program), "payload_bytes": payload_bytes(step, build.program)}
        out.append(row)
    return out


def overlap(slices: Slices) -> Row:
    """How long messages were on their way, summed over ranks, how much of that kernels ran beside, and how much was waited.

    A message is on its way from when it was expected until it was taken; ``hidden_s`` is what of it lies under kernels.
    """
    flown = hidden = 0.0
    for of_rank in slices:
        kernels = of_rank[of_rank[:, 3] == 0][:, 4:6]
        for _, _, _, _, start, end in of_rank[of_rank[:, 3] == FLOWN].tolist():
            flown += (end - start) / 1e9
            under = np.minimum(kernels[:, 1], end) - np.maximum(kernels[:, 0], start)
            hidden += float(under[under > 0].sum()) / 1e9
    return {"on_the_way_s": flown, "hidden_s": hidden}


def analysis(build: Build, slices: Slices, seconds: Sequence[float]) -> Row:
    """Rows, totals by kind, and how far the cost model is off."""
    steps = rows(build, slices)
    by_kind = together(steps, lambda r: str(r["kind"]))
    kinds = {kind: {"steps": len(same), **_column_sums(same)} for kind, same in by_kind.items()}
    ratios = [abs(math.log(r["measured_s"] / r["estimated_s"])) for r in steps if r["measured_s"] > 0 and r["estimated_s"] > 0]
    total = statistics.median(list(seconds)[1:] or seconds)
    simulated = explain.schedule(build).total
    return {
        "steps": steps,
        "kinds": kinds,
        "overlap": overlap(slices),
        "measured_s": total,
        "simulated_s": simulated,
        "error": total / simulated - 1 if simulated else 0.0,
        "step_error": math.exp(statistics.fmean(ratios)) if ratios else 1.0,
    }


def text(facts: Row) -> str:
    """The analysis as a person reads it, counterparts in different layers once."""
    out = [f"measured on {facts['processes']} processes of {facts['threads']} threads, beside what the plan estimates", ""]
    head = f"{'×':>5} {'estimated':>9} {'measured':>9} {'ratio':>7} {'waited':>9} "
    out.append(f"{head} what")
    for what, same in together(facts["steps"], lambda r: template(r["what"].replace("'", ""))).items():
        out += wrapped(f"{len(same):>5} {_row_times(_column_sums(same))}  {what}", " " * 46)
    out += ["", f"{head} kind"]
    out += [f"{k['steps']:>5} {_row_times(k)}  {kind}" for kind, k in facts["kinds"].items()]
    way = facts["overlap"]
    if way["on_the_way_s"]:
        share = way["hidden_s"] / way["on_the_way_s"]
        out += [
            "",
            f"messages were on their way for {duration(way['on_the_way_s'])} (all ranks), {share:.0%} of it beside kernels",
        ]
    hint = " (tapestry calibrate -o FILE.json measures this machine, compile --topology FILE.json uses it)"
    mend = hint if abs(facts["error"]) > 0.5 else ""
    both = f"{duration(facts['measured_s'])} measured, {duration(facts['simulated_s'])} simulated"
    step = f"a step is off by a factor of {facts['step_error']:.2f} on (geometric) average"
    out += ["", *wrapped(f"in all {both}: error of the cost model {facts['error']:+.0%}{mend}; {step}")]
    return "\n".join(out) + "\n"


def _column_sums(rows: Sequence[Row]) -> Row:
    return {k: sum(r[k] for r in rows) for k in ("estimated_s", "measured_s", "waited_s")}


def _row_times(row: Row) -> str:
    """Estimated, measured, their ratio, waited."""
    ratio = row["measured_s"] / row["estimated_s"] if row["estimated_s"] else math.inf
    estimated, measured, waited = (duration(row[f"{k}_s"]) for k in ("estimated", "measured", "waited"))
    return f"{estimated:>9} {measured:>9} {ratio:>7.2f} {waited:>9}"
