"""Reports as tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tapestry.plan.solver.pairs import PROVED
from tapestry.verify.rewriting.proofs import UNPROVED
from tapestry.viz.format import human, moves_text


def compiled(report: Mapping[str, Any]) -> RenderableType:
    """What ``tapestry compile`` found."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("model", f"{report['nodes']} nodes → {report['ops']} operations → {report['signatures']} distinct signatures")
    gap = f"gap {report['gap']:.2%}{proof(report)}"
    facts.add_row("plan", f"objective {ms(report['objective_s'])}, lower bound {ms(report['lower_bound_s'])}, {gap}")
    for r in report.get("sizes", {}).get("regions", ()):
        facts.add_row("sizes", f"{r['sizes']}: {sum(r['laws'].values()):,} facts, each proved for all of them")
    for k, s in enumerate(report.get("stages", ())):
        each = " per micro-batch" if report["micro_batches"] > 1 else ""
        devices = f"{len(s['devices'])} device(s) from {s['devices'][0]}"
        facts.add_row(f"stage {k}", f"{devices}, {s['ops']} operations, {ms(s['seconds'])}{each}")
    for move in moves_text(report["moves"]):
        facts.add_row("rewrite", move)
    peaks, alone = report["peak_bytes"], report["unsharded_peak_bytes"]
    share = f"{max(peaks) / alone:.0%} of {human(alone)} unsharded" if alone else ""
    facts.add_row("memory", f"peak {human(max(peaks))} per device, {share}")
    facts.add_row("host", f"{human(report['host_load_bytes'])} loaded by {report['devices']} device(s)")
    if report.get("host_values"):
        facts.add_row("on the host", f"{len(report['host_values'])} value(s) of a size known only at run time, in no peak")
    laws = report["certificate"]["laws"]
    facts.add_row("verified", f"{sum(laws.values()):,} checks of {len(laws)} laws, the program against its graph, all hold")
    facts.add_row("", rewrites_text(report["rewrites"]))
    facts.add_row("kernels", f"{report['kernels']} distinct")
    seconds = ", ".join(f"{k} {v:.2f}" for k, v in report["seconds"].items())
    facts.add_row("seconds", seconds)
    parts: list[RenderableType] = [facts, transfers(report["transfers"]), memory(peaks)]
    if "pareto" in report:
        parts.append(pareto(report["pareto"]))
    return Group(*parts)


def proof(report: Mapping[str, Any]) -> str:
    """What a gap of nothing proves: "optimal" alone only where nothing was left out."""
    if report["gap"] > PROVED:
        return ""
    if not report.get("not_bounded", ["unknown"]):
        return " (proved optimal)"
    forms = report.get("forms", {}).get("tried", [])
    return f" (optimal among {len(forms)} form{'s' if len(forms) > 1 else ''} of the graph)" if forms else ""


def titled(title: str, columns: Sequence[str], *, left: Collection[str]) -> Table:
    """An empty table; columns but those in ``left`` are of numbers."""
    table = Table(title=title, title_justify="left")
    for c in columns:
        table.add_column(c, justify="left" if c in left else "right")
    return table


def pareto(points: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Latency against memory, fastest first."""
    table = titled("Latency against memory", ("objective", "peak per device, bytes"), left=())
    for p in points:
        table.add_row(ms(p["objective_s"]), f"{p['peak_bytes']:,}")
    return table


def rewrites_text(rewrites: Mapping[str, Any] | None) -> str:
    """What was shown of the rewrites between the lifted graph and the plan's."""
    if rewrites is None:
        return "no log of rewrites: nothing is shown of how the graph was made"
    rows = [f"{n} by {how}" if how != UNPROVED else f"{n} NOT PROVED" for how, n in rewrites["shown"].items()]
    return f"{rewrites['steps']} rewrites of the lifted graph, results before against after: {'; '.join(rows) or 'none'}"


def transfers(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Transfers by kind."""
    table = titled("Transfers between devices", ("kind", "count", "bytes, all senders"), left=("kind",))
    for r in rows:
        table.add_row(r["kind"], str(r["count"]), f"{r['bytes']:,}")
    table.add_row("all", str(sum(r["count"] for r in rows)), f"{sum(r['bytes'] for r in rows):,}", style="bold")
    return table


def memory(peaks: Sequence[int]) -> RenderableType:
    """Peak bytes per device, as bars."""
    table = titled("Peak memory per device", ("device", "bytes", ""), left=("",))
    top = max([*peaks, 1])
    for d, p in enumerate(peaks):
        table.add_row(str(d), f"{p:,}", "█" * max(1, round(24 * p / top)))
    return table


def ran(document: Mapping[str, Any]) -> RenderableType:
    """What ``tapestry run`` did."""
    checked = document["reference"]
    columns = ("max abs err", "rel err") if checked else ()
    table = titled("Outputs", ("output", "shape", "dtype", *columns), left=("output",))
    for name, o in document["outputs"].items():
        errors = ["" if o[k] is None else f"{o[k]:.2e}" for k in ("max_abs_err", "rel_err") if checked]
        table.add_row(name, "×".join(map(str, o["shape"])), o["dtype"], *errors)
    for name, o in document["outputs"].items():
        if o.get("reference_spread") is not None:
            table.add_row(f"  (two references differ on {name} by)", "", "", "", f"{o['reference_spread']:.2e}")
    said = "FAILED" if not document["passed"] else "passed" if checked else "ran"
    verdict = f"{said} in {document['seconds']:.2f} s{f', compared with {checked}' if checked else ''}"
    panel = Panel(verdict, expand=False, style="green" if document["passed"] else "red")
    return Group(table, *([on_gpu(document["gpu"])] if "gpu" in document else []), panel)


def on_gpu(gpu: Mapping[str, Any]) -> str:
    """Where a run's kernels were, and why some of its work is not replayed from a CUDA graph."""
    arenas = ", ".join(f"{n:,}" for n in gpu["arena_bytes"])
    replayed = f"{gpu['captured']} of {gpu['calls']} calls in {gpu['graphs']} CUDA graphs"
    reasons = (f"  not captured, {n} calls: {why}" for why, n in gpu["not_captured"].items())
    return "\n".join([f"{gpu['device']}: arenas of {arenas} bytes; {replayed}", *reasons])


def tuned(document: Mapping[str, Any]) -> RenderableType:
    """What ``tapestry tune`` measured."""
    columns = ("kernel", "launches", "model's choice", "tuned", "library", "tried", "refused")
    table = titled(f"Kernels on {document['device']}, triton {document['triton']}", columns, left=("kernel",))
    for row in document["kernels"]:
        if "skipped" in row:
            table.add_row(row["kernel"], str(row["launches"]), "", "", "", "", row["skipped"])
            continue
        times = ("" if row[k] is None else ms(row[k]) for k in ("default_seconds", "seconds", "library_seconds"))
        table.add_row(row["kernel"], str(row["launches"]), *times, str(row["tried"]), str(len(row["refused"])))
    return table


def calibrated(document: Mapping[str, Any], path: Path) -> RenderableType:
    """What ``tapestry calibrate`` found, and how well it predicts what was kept back."""
    columns = ("measured", "points", "kept back", "off by (median)", "(worst)")
    table = titled(f"{path}: use it as --topology {path}", columns, left=("measured",))
    for name, row in document["fit"].items():
        if "kept" in row:
            table.add_row(name, str(row["points"]), "", row["kept"], "")
            continue
        errors = ("" if row[k] is None else f"{row[k]:.0%}" for k in ("median_error", "worst_error"))
        table.add_row(name, str(row["points"]), str(row["held_back"]), *errors)
    return table


def ms(seconds: float) -> str:
    """Milliseconds with four digits."""
    return f"{seconds * 1e3:.4g} ms"


def show(thing: RenderableType, *, stderr: bool = False) -> None:
    """Print to the terminal (or as plain text into a file)."""
    Console(stderr=stderr, highlight=False, soft_wrap=False).print(thing)


def ran_on_processes(document: Mapping[str, Any]) -> RenderableType:
    """What ``tapestry run --processes`` did, per rank."""
    columns = ("rank", "devices", "weights, bytes", "peak of buffers", "resident", "sent, bytes", "messages")
    table = titled("Processes", columns, left=())
    for r in document["ranks"]:
        peak = sum(document["peak_bytes"][d] for d in r["devices"])
        numbers = (r["weight_bytes"], peak, r["resident_bytes"]["running"], r["payload_bytes"], r["messages"])
        table.add_row(str(r["rank"]), ", ".join(map(str, r["devices"])), *(f"{n:,}" for n in numbers))
    again = f", started again {document['restarts']} times" if document["restarts"] else ""
    skipped = f", {document['skipped']} done before" if document["skipped"] else ""
    line = f"{document['batches']} batches{skipped}{again}; the last took {document['seconds']:.3f} s"
    results = [ran(document)] if "outputs" in document else [of_batches(document["checked"])] if "checked" in document else []
    return Group(*results, table, line)


def of_batches(checked: Mapping[str, Any]) -> RenderableType:
    """How far each batch of a stream is from the reference, over its outputs."""
    table = titled("Batches", ("batch", "compared with", "rel err", ""), left=("batch", "compared with"))
    for name, result in checked.items():
        worst = max((float(o["rel_err"]) for o in result["outputs"].values()), default=0.0)
        table.add_row(name, result["reference"], f"{worst:.2e}", "passed" if result["passed"] else "FAILED")
    return table


# kernels

_KERNEL_COLUMNS = (
    "kernel", "kind", "launches", "grid", "warps", "regs", "spills", "shared", "of limit", "occupancy", "matrix", "16-byte",
    "FLOPs", "bytes", "roofline",
)  # fmt: skip
_KERNEL_WIDTH = 200


def kernels(document: Mapping[str, Any]) -> RenderableType:
    """What ``tapestry kernels`` made: a row for each launch of a kernel, and the model over one run."""
    table = titled(f"Kernels for {document['target']}", _KERNEL_COLUMNS, left=("kernel", "kind", "matrix"))
    table.columns[0].no_wrap = True
    for r in document["kernels"]:
        work = (f"{r['flops']:,}", f"{r['bytes']:,}", ms(r["roofline_s"])) if "bytes" in r else ("", "", "")
        table.add_row(
            r["kernel"], r["kind"], str(r["launches"]), "×".join(map(str, r["grid"])), str(r["num_warps"]), str(r["registers"]),
            str(r["spills"]), f"{r['shared']:,}", f"{r['shared'] / r['shared_limit']:.0%}", f"{r['occupancy']:.0%}",
            r["matrix"], f"{r['wide_share']:.0%}", *work,
        )  # fmt: skip
    return Group(table, _model(document["model"], document["precision"]))


def _model(m: Mapping[str, Any], precision: str) -> str:
    """The model in two lines."""
    text = f"One run: {m['launches']} launches, {m['bytes'] / 1e6:.1f} MB, roofline {ms(m['roofline_s'])}"
    if "unfused_kernels" in m:
        text += f"; a kernel for each ONNX node: {m['unfused_kernels']} launches, {m['unfused_bytes'] / 1e6:.1f} MB"
    text += f". Products of float32: {precision}."
    return text + (f"\nWithout a kernel: {', '.join(m['opaque'])}" if m["opaque"] else "")


def show_wide(thing: RenderableType) -> None:
    """Print a table whole, into a file or a narrow terminal as well."""
    console = Console(highlight=False)
    Console(highlight=False, width=max(console.width, _KERNEL_WIDTH)).print(thing, crop=False)


# auto-shard

TITLES = {"heuristic": "PopRT-like heuristic", "dynamic": "dynamic program"}
MIB = 1 << 20


def sharded(document: Mapping[str, Any]) -> RenderableType:
    """Stages of both, their sums side by side, and which was chosen."""
    d = document
    count = d["subgraphs"]
    head = (
        f"{d['nodes']} nodes, {count['all']} subgraphs (candidates: {d['candidates']}), {d['devices']} devices of "
        f"{human(d['memory_bytes'])} ({d['topology']})"
    )
    parts: list[RenderableType] = [head, *(_stages(d[k], TITLES[k]) for k in TITLES), _sums(d)]
    for k, ends in enumerate(d["sharding_nodes"]):
        parts.append(f"sharding nodes: device {k} - {ends}")
    parts.append(f"chosen: {TITLES[d['chosen']]}{' (the dynamic program is no better)' if d['chosen'] == 'heuristic' else ''}")
    parts.append(f"written {d['output']} in {d['seconds']['total']:.2f} s")
    return Group(*parts)


def _stages(outcome: Mapping[str, Any], title: str) -> RenderableType:
    if not outcome["fits"]:
        return f"{title}: no scheme fits"
    columns = ("stage", "nodes", "weights MiB", "activ. MiB", "memory", "GFLOP", "compute ms", "receive ms")
    table = _narrow(f"{title}, memory proportion {outcome['proportion']:g}", columns)
    for s in outcome["stages"]:
        table.add_row(
            str(s["stage"]), str(s["nodes"]), f"{s['weight_bytes'] / MIB:.2f}", f"{s['activation_bytes'] / MIB:.2f}",
            f"{s['share']:.1%}", f"{s['flops'] / 1e9:.3f}", f"{s['compute_s'] * 1e3:.4g}", f"{s['receive_s'] * 1e3:.4g}",
        )  # fmt: skip
    return table


def _narrow(title: str, columns: Sequence[str]) -> Table:
    """An empty table without a frame."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for c in columns:
        table.add_column(c, justify="right", no_wrap=True)
    return table


def _sums(d: Mapping[str, Any]) -> RenderableType:
    table = _narrow("Estimated pipeline", ("", *TITLES.values()))
    table.columns[0].justify, table.columns[0].no_wrap = "left", False
    rows: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "interval (slowest stage)": lambda f: ms(f["interval_s"]),
        "throughput, runs/s": lambda f: "" if f["throughput_per_s"] is None else f"{f['throughput_per_s']:.4g}",
        "latency of one run": lambda f: ms(f["latency_s"]),
        "mean stage / slowest stage": lambda f: f"{f['balance']:.1%}",
        "fullest stage": lambda f: human(f["peak_bytes"]),
        "schemes or cuts looked at": lambda f: str(f["schemes"]),
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(d[k]) if d[k]["fits"] else "–" for k in TITLES))
    return table


# passes

HEAD = ("name", "phase", "takes", "gives", "seconds", "changed")  # of a row; everything else is a size


def passes(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What ran, in order: what each pass took and gave, its seconds, and how large what it gave is."""
    table = Table(box=None, pad_edge=False)
    table.add_column("pass", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("takes → gives, and its size")
    for r in rows:
        flow, size = f"{' '.join(r['takes'])} → {' '.join(r['gives']) or 'a check'}", sizes_text(r)
        table.add_row(r["name"], f"{r['seconds']:.3f}", Text(flow) + (Text(f"\n{size}", style="dim") if size else Text()))
    return table


def sizes_text(row: Mapping[str, Any]) -> str:
    """``12 operations, 3,264 peak bytes``; ``unchanged`` where a pass gave what it took."""
    if row["gives"] and not row["changed"]:
        return "unchanged"
    return ", ".join(f"{v:,} {k.replace('_', ' ')}" for k, v in row.items() if k not in HEAD)
