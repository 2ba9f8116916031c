"""What ``tapestry auto-shard`` found, as a table: the heuristic beside the dynamic program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from tapestry.viz.explain import human
from tapestry.viz.tables import ms

TITLES = {"heuristic": "PopRT-like heuristic", "dynamic": "dynamic program"}
MiB = 1 << 20


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


def _stages(found: Mapping[str, Any], title: str) -> RenderableType:
    if not found["fits"]:
        return f"{title}: no scheme fits"
    table = Table(box=None, pad_edge=False, title=f"{title}, memory proportion {found['proportion']:g}", title_justify="left")
    for c in ("stage", "nodes", "weights MiB", "activ. MiB", "memory", "GFLOP", "compute ms", "receive ms"):
        table.add_column(c, justify="right", no_wrap=True)
    for s in found["stages"]:
        table.add_row(
            str(s["stage"]), str(s["nodes"]), f"{s['weight_bytes'] / MiB:.2f}", f"{s['activation_bytes'] / MiB:.2f}",
            f"{s['share']:.1%}", f"{s['flops'] / 1e9:.3f}", f"{s['compute_s'] * 1e3:.4g}", f"{s['receive_s'] * 1e3:.4g}",
        )  # fmt: skip
    return table


def _sums(d: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, pad_edge=False, title="Estimated pipeline", title_justify="left")
    table.add_column("")
    for title in TITLES.values():
        table.add_column(title, justify="right", no_wrap=True)
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
