"""Reports as tables on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tapestry.errors import some
from tapestry.interop.tile_patterns import SUPPRESSED, Tiling
from tapestry.ir.kernel import cut
from tapestry.plan.solver.pairs import PROVED
from tapestry.verify.rewriting.proofs import shown_text
from tapestry.viz.format import count, duration, figures_text, human, listed, moves_text, together, wrapped
from tapestry.viz.summary import beside_one_device


def compiled(report: Mapping[str, Any]) -> RenderableType:
    """What ``tapestry compile`` found."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column()
    size = f"{some(report['nodes'], 'node')} → {some(report['ops'], 'operation')}"
    facts.add_row("model", f"{size} → {some(report['signatures'], 'distinct signature')}")
    late = " at the time limit" if report["search"]["ended"] == "time" else ""
    gap = f"gap {report['gap']:.2%}{proof(report)}{late}"
    costs = f"objective {duration(report['objective_s'])}, lower bound {duration(report['lower_bound_s'])}"
    facts.add_row("plan", f"{costs}, {gap}")
    for line in accumulate_lines(report):
        facts.add_row("sums", line)
    for line in figures_text(report["topology"], report["devices"]):
        facts.add_row("cost", line)
    for line in size_lines(report.get("sizes", {})):
        facts.add_row("sizes", line)
    for k, s in enumerate(report.get("stages", ())):
        each = " per micro-batch" if report["micro_batches"] > 1 else ""
        devices = f"{some(len(s['devices']), 'device')} from number {s['devices'][0]} on"
        facts.add_row(f"stage {k}", f"{devices}, {some(s['ops'], 'operation')}, {duration(s['seconds'])}{each}")
    for move in moves_text(report["moves"]):
        facts.add_row("rewrite", move)
    for line in beside_one_device(report):
        facts.add_row("speed", line)
    peaks, whole = report["peak_bytes"], report["unsharded_peak_bytes"]
    share = f"{max(peaks) / whole:.0%} of {human(whole)} unsharded" if whole else ""
    facts.add_row("memory", f"peak {human(max(peaks))} per device, {share}")
    streamed = report.get("fit", {}).get("streamed", ())
    if streamed:
        facts.add_row("streamed", f"{some(len(streamed), 'weight')}, loaded again at each use: {listed(streamed)}")
    facts.add_row("host", f"{human(report['host_load_bytes'])} loaded by {some(report['devices'], 'device')}")
    if report.get("host_values"):
        values = some(len(report["host_values"]), "value")
        facts.add_row("on the host", f"{values} of a size known only at run time, not counted in the peak")
    laws = report["certificate"]["laws"]
    facts.add_row("verified", f"{sum(laws.values()):,} checks of {len(laws)} laws, the program against its graph, all hold")
    facts.add_row("", rewrites_text(report["rewrites"]))
    facts.add_row("kernels", f"{report['kernels']} distinct")
    seconds = ", ".join(f"{k} {v:.2f}" for k, v in report["seconds"].items())
    facts.add_row("seconds", seconds)
    parts: list[RenderableType] = [facts]
    if report["transfers"]:
        parts.append(transfers(report["transfers"]))
    if min(peaks) < max(peaks):
        parts.append(memory(peaks))
    if "pareto" in report:
        parts.append(pareto(report["pareto"]))
    return Group(*parts)


def size_lines(sizes: Mapping[str, Any]) -> Iterator[str]:
    """Sizes that follow from others, and the regions of a build for several."""
    for symbol, of in sizes.get("follow", {}).items():
        size = "" if "regions" in sizes else f" ({of['size']})"
        yield f"{symbol} = {of['is']}{size}, because of {of['because']}"
    for r in sizes.get("regions", ()):
        yield f"{r['sizes']}: {sum(r['laws'].values()):,} facts, each proved for all of them"


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
    table = titled("Latency against memory", ("objective", "peak per device"), left=())
    for p in points:
        table.add_row(duration(p["objective_s"]), human(p["peak_bytes"]))
    return table


def rewrites_text(rewrites: Mapping[str, Any] | None) -> str:
    """What was shown of the rewrites between the lifted graph and the plan's."""
    if rewrites is None:
        return "no log of rewrites: how the graph was made is not checked"
    return f"{some(rewrites['steps'], 'rewrite')}, {shown_text(rewrites['shown'])}"


def transfers(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Transfers by kind."""
    table = titled("Transfers between devices", ("kind", "count", "all senders"), left=("kind",))
    for r in rows:
        table.add_row(r["kind"], str(r["count"]), human(r["bytes"]))
    table.add_row("all", str(sum(r["count"] for r in rows)), human(sum(r["bytes"] for r in rows)), style="bold")
    return table


def memory(peaks: Sequence[int]) -> RenderableType:
    """Peak memory, as bars; devices that hold equally much share one."""
    table = titled("Peak memory per device", ("devices", "peak", ""), left=("devices", ""))
    for same in together(range(len(peaks)), lambda d: peaks[d]).values():
        peak = peaks[same[0]]
        which = ", ".join(map(str, same[:6])) + (f" and {len(same) - 6} more" if len(same) > 6 else "")
        table.add_row(which, human(peak), "█" * max(1, round(24 * peak / max(*peaks, 1))))
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
    more = [f(document[k]) for k, f in (("gpu", on_gpu), ("schedule", in_any_order)) if k in document]
    if "threads" in document:
        more.append(f"{some(document['threads']['count'], 'thread')}: {document['threads']['why']}")
    if document.get("random_inputs"):
        more.append(f"{', '.join(document['random_inputs'])}: random (seed {document['seed']})")
    return Group(table, *more, panel)


def in_any_order(told: Mapping[str, Any]) -> str:
    """What was computed in another order than the plan's."""
    same = "the same bits" if told["same_bits"] else "OTHER BITS: " + ", ".join([*told["other_outputs"], *told["differ"]][:8])
    return f"In a random order (seed {told['seed']}): {told['twice']:,} blocks, each twice: {same}"


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
            table.add_row(row["kernel"], str(row["launches"]), "", "", "", "", row["wrong"] or row["skipped"])
            continue
        times = ("" if row[k] is None else duration(row[k]) for k in ("default_seconds", "seconds", "library_seconds"))
        table.add_row(row["kernel"], str(row["launches"]), *times, str(row["tried"]), row["wrong"] or str(len(row["refused"])))
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


def show(thing: RenderableType, *, stderr: bool = False) -> None:
    """Print to the terminal (or as plain text into a file)."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False, markup=False, emoji=False)
    with console.capture() as text:
        console.print(thing)
    said = text.get() if console.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.get().splitlines())
    console.file.write(said)  # (in a file or a pipe lines are not padded)


def ran_on_processes(document: Mapping[str, Any]) -> RenderableType:
    """What ``tapestry run --processes`` did, per rank."""
    columns = ("rank", "devices", "weights", "buffers", "resident", "sent", "messages")
    table = titled("Processes", columns, left=())
    for r in document["ranks"]:
        peak = sum(document["peak_bytes"][d] for d in r["devices"])
        numbers = (r["weight_bytes"], peak, r["resident_bytes"]["running"], r["payload_bytes"])
        table.add_row(str(r["rank"]), ", ".join(map(str, r["devices"])), *map(human, numbers), str(r["messages"]))
    return Group(ran(document), table, *document["warnings"])


# kernels


def kernels(document: Mapping[str, Any]) -> str:
    """What ``tapestry kernels`` made: alike kernels once, with what each takes of the chip, and the model over one run."""
    lines = [f"Kernels for {document['target']}", f"{'×':>5} {'roofline':>9}  kernel"]
    for same in together(document["kernels"], _resources).values():
        launches, one = sum(r["launches"] for r in same), same[0]
        seconds = [r["launches"] * r["roofline_s"] for r in same if "bytes" in r]
        lines += wrapped(
            f"{launches:>5} {duration(sum(seconds)) if seconds else '':>9}  {listed([r['kernel'] for r in same])}", " " * 17
        )
        lines += wrapped(f"{'':17}{one['kind']}: {_resources(one)}", " " * 19)
    return "\n".join([*lines, *_model_lines(document["model"], document["precision"])])


def _resources(r: Mapping[str, Any]) -> str:
    """What one launch is, and takes."""
    shared = f"{r['spills']} spills, {human(r['shared'])} shared ({r['shared'] / r['shared_limit']:.0%})"
    grid = f"grid {'×'.join(map(str, r['grid']))}, {some(r['num_warps'], 'warp')}, {r['registers']} registers"
    text = f"{grid}, {shared}, occupancy {r['occupancy']:.0%}, {r['wide_share']:.0%} of bytes in 16-byte accesses"
    text += f", {r['matrix']}" if r["matrix"] else ""
    text += f", {human(r['in_flight'])} in flight" if r["in_flight"] else ""
    text += f"; {', '.join(m.split()[0] for m in r['messages'])}" if r["messages"] else ""
    if "bytes" not in r:
        return text
    passed = f"; passed over {len(r['refused'])}: {r['refused'][0]['why']}" if r["refused"] else ""
    return text + f"; {count(r['flops'])}FLOP, {human(r['bytes'])}, predicted {duration(r['predicted_s'])}{passed}"


def _model_lines(m: Mapping[str, Any], precision: str) -> list[str]:
    """The model in two lines."""
    text = f"One run: {m['launches']} launches, {human(m['bytes'])}, roofline {duration(m['roofline_s'])}"
    if "unfused_kernels" in m:
        text += f"; a kernel for each ONNX node: {m['unfused_kernels']} launches, {human(m['unfused_bytes'])}"
    text += f". Products of float32: {precision}."
    return wrapped(text) + (wrapped(f"Without a kernel: {', '.join(m['opaque'])}") if m["opaque"] else [])


def accumulate_lines(report: Mapping[str, Any]) -> list[str]:
    """In what products of f16 are summed, and the measured error of that."""
    finite = report.get("assume_finite")
    lines = [f"assumed to be finite: {some(finite['operations'], 'operation')} without tests for it"] if finite else []
    if form := report.get("for_format"):
        lines.append(f"only plans that {form} can say were searched; the bound is of these")
    a = report.get("accumulate")
    if not a:
        return lines
    worst = max(a["rel_err"], key=lambda r: r["f16"])
    errors = f"{worst['f16']:.2g} in f16, {worst['f32']:.2g} in f32"
    return [
        *lines,
        f"{a['products']} products of f16 summed in {a['dtype']}; measured error of {worst['products']} in a row: {errors}",
    ]


# auto-shard

TITLES = {"heuristic": "PopRT-like heuristic", "dynamic": "dynamic program", "manual": "your own"}
TRIALS = {"traversal": "candidates of the traversal", "exact": "stages of the exact search", "manual": "your own stages"}
MIB = 1 << 20


def sharded(document: Mapping[str, Any]) -> RenderableType:
    """Stages of both, their sums side by side, and which was chosen."""
    d = document
    count = d["subgraphs"]
    head = (
        f"{d['nodes']} nodes, {count['all']} subgraphs (candidates: {d['candidates']}), {d['devices']} devices of "
        f"{human(d['memory_bytes'])} ({d['topology']})"
    )
    parts: list[RenderableType] = [head, *(_stages_table(d[k], TITLES[k]) for k in TITLES if k in d), _sums(d)]
    return Group(*parts)


def sharding_lines(d: Mapping[str, Any]) -> list[str]:
    """The stages taken, as PopRT prints them, and where they are written."""
    if "measured" in d:
        return list(_trials(d, d["measured"]))
    why = " (the dynamic program is no better)" if d["chosen"] == "heuristic" else ""
    written = f"written {d['output']} in {d['seconds']['total']:.2f} s"
    return [*_sharding_nodes(d), f"chosen: {TITLES[d['chosen']]}{why}", written]


def _sharding_nodes(d: Mapping[str, Any]) -> list[str]:
    return [f"Sharding nodes: Device {k} - {ends}" for k, ends in enumerate(d["sharding_nodes"])]


def _trials(d: Mapping[str, Any], m: Mapping[str, Any]) -> Iterator[str]:
    """What was compiled and run, and the lines that PopRT prints of the best."""
    best, optimal = m[m["chosen"]], m.get("optimal", False)
    if m["processes"] > 1:
        yield f"measured in {m['processes']} processes, one for each device"
    for name, title in TRIALS.items():
        row = m.get(name)
        if row:
            took = f"{row['search_s']:.2f} s" if name == "traversal" else f"{row['search_s']:.2f} + {row['compile_s']:.2f} s"
            count = f", {row['candidates']} compiled, {row['refused']} refused" if name == "traversal" else ""
            how = f"{1e3 * row['latency_s']:.3f} ms" if row["fits"] else "does not fit"
            yield f"{title}: {how} at memory proportion {row['proportion']:g}{count}, in {took}"
    share = f"available_memory_proportion {best['available_memory_proportion']:g}"
    yield "[Success] The optimal solution:" if optimal else f"[Success] Compile successfully {share} and solution:"
    yield from _sharding_nodes(d)
    word = "optimal latency" if optimal else "latency"
    yield f"[Success] The {word} {1e3 * best['latency_s']} ms, tput {best['throughput_per_s']}"
    yield f"[Success] Save the sharded model to {d['output']}"


def _stages_table(outcome: Mapping[str, Any], title: str) -> RenderableType:
    if not outcome["fits"]:
        return f"{title}: no scheme fits"
    columns = ("stage", "nodes", "weights MiB", "activ. MiB", "memory", "GFLOP", "compute ms", "receive ms")
    table = _narrow(f"{title}, memory proportion {outcome['proportion']:g}", columns)
    for s in outcome["stages"]:
        table.add_row(
            str(s["stage"]),
            str(s["nodes"]),
            f"{s['weight_bytes'] / MIB:.2f}",
            f"{s['activation_bytes'] / MIB:.2f}",
            f"{s['share']:.1%}",
            f"{s['flops'] / 1e9:.3f}",
            f"{s['compute_s'] * 1e3:.4g}",
            f"{s['receive_s'] * 1e3:.4g}",
        )
    return table


def _narrow(title: str, columns: Sequence[str]) -> Table:
    """An empty table without a frame."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for c in columns:
        table.add_column(c, justify="right", no_wrap=True)
    return table


def _sums(d: Mapping[str, Any]) -> RenderableType:
    titles = {k: title for k, title in TITLES.items() if k in d}
    table = _narrow("Estimated pipeline", ("", *titles.values()))
    table.columns[0].justify, table.columns[0].no_wrap = "left", False
    rows: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "interval (slowest stage)": lambda f: duration(f["interval_s"]),
        "throughput, runs/s": lambda f: "" if f["throughput_per_s"] is None else f"{f['throughput_per_s']:.4g}",
        "latency of one run": lambda f: duration(f["latency_s"]),
        "mean stage / slowest stage": lambda f: f"{f['balance']:.1%}",
        "fullest stage": lambda f: human(f["peak_bytes"]),
        "schemes or cuts looked at": lambda f: str(f["schemes"]),
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(d[k]) if d[k]["fits"] else "–" for k in titles))
    return table


# passes

HEAD = ("name", "phase", "gives", "seconds")  # of a row; everything else is a size


def passes(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What ran, in order: what each pass gave that is new, its seconds, and how large that is."""
    table = Table(box=None, pad_edge=False)
    table.add_column("pass", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("gives, and its size")
    for r in rows:
        given, size = " ".join(r["gives"]) or "nothing new", sizes_text(r)
        table.add_row(r["name"], f"{r['seconds']:.3f}", Text(given) + (Text(f"\n{size}", style="dim") if size else Text()))
    return table


def sizes_text(row: Mapping[str, Any]) -> str:
    """``12 operations, 3,264 peak bytes``."""
    return ", ".join(f"{v:,} {k.replace('_', ' ')}" for k, v in row.items() if k not in HEAD)


# Tilings as pictures, for the terminal and for SVG.


MOST_SHEETS = 8


@dataclass(frozen=True, slots=True)
class Sheet:
    """A picture of two axes: rectangles (row ends, column ends, label), for one part of each further axis that is cut."""

    title: str
    rows: int
    columns: int
    tiles: tuple[tuple[tuple[int, int], tuple[int, int], str], ...]


def sheets(tiling: Tiling, extents: tuple[int, ...]) -> list[Sheet]:
    """A tiling as pictures: the two longest axes of those that are cut, and a sheet for each part of the others."""
    parts = tiling.over(len(extents))
    order = sorted(range(len(extents)), key=lambda k: (parts[k] > 1, extents[k], k), reverse=True)
    flat = sorted(order[:2])
    row, col = (None, None, *flat)[-2:]
    rest = [k for k in range(len(extents)) if k not in flat and parts[k] > 1]
    on: dict[int, list[int]] = {}
    for tile, instance in tiling.entries:
        on.setdefault(tile, []).append(instance)
    out: list[Sheet] = []
    for at in itertools.islice(itertools.product(*(range(parts[k]) for k in rest)), MOST_SHEETS):
        chosen = {k: cut(extents[k], parts[k], c) for k, c in zip(rest, at, strict=True)}
        tiles = tuple(_rectangles(tiling, extents, (row, col), chosen, on))
        names = ", ".join(f"axis {k} = {lo}:{hi}" for k, (lo, hi) in chosen.items())
        axes = " by ".join(f"axis {k}" for k in (row, col) if k is not None)
        title = axes + (f", {names}" if names else "")
        out.append(Sheet(title, 1 if row is None else extents[row], 1 if col is None else extents[col], tiles))
    return out


def _rectangles(
    tiling: Tiling,
    extents: tuple[int, ...],
    axes: tuple[int | None, int | None],
    chosen: Mapping[int, tuple[int, int]],
    on: Mapping[int, list[int]],
) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    for tile, instances in on.items():
        box = tiling.tile(tile, extents)
        if all(box[k] == ends for k, ends in chosen.items()):
            row, col = ((0, 1) if k is None else box[k] for k in axes)
            yield (row, col, ",".join("–" if i == SUPPRESSED else str(i) for i in instances))
