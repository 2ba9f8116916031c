"""Bytes, seconds, splits and steps as a person reads them."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tapestry.errors import some
from tapestry.ir.graph import Block, Op
from tapestry.ir.plan import Mesh, Strategy
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Step, Transfer
from tapestry.plan.topology.measured_costs import BUSY, doubtful

WIDTH = 80


def wrapped(line: str, indent: str = "    ") -> list[str]:
    """A line as lines of at most 80 columns; words longer than a line are cut."""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False) or [""]


def evidence_text(row: Mapping[str, Any]) -> str:
    """What was compared with what, how, and how much of it."""
    if row["kind"] == "plug-in":
        p = row["plugin"]
        return f"  plug-in '{p['name']}' of {p['package']} {p['version']}: {row['what']} against {row['against']}"
    counts = ", ".join(f"{n:,} {what}" for what, n in row["counts"].items() if n)
    more = [row[k] for k in ("why", "power", "weights") if k in row]
    return "; ".join([f"  {row['what']} against {row['against']}: {row['kind']}", *([counts] if counts else []), *more])


def kernels_text(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """By what kernels were shown to be their operations, and those of which it was not the strongest way."""
    counts = Counter((r["value"], r["addresses"]) for r in rows)
    lines = [f"  {some(n, 'kernel')}: value by {by}, addresses by {at}" for (by, at), n in counts.most_common()]
    return lines + [f"    {r['kernel']}: {r['value']}: {r['why']}" for r in rows if r["why"]]


def human(n: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < (1024 if unit == "B" else 1000) or unit == "GiB":
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.2f} {unit}"
        n /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """``12.3 µs``, ``4.56 ms``, ``7.89 s``: three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if abs(seconds) >= scale * 0.9995:
            value = seconds / scale
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    return "0 s"


def figures_text(topology: Mapping[str, Any], devices: int) -> list[str]:
    """How old and how sure measured figures are, and how to make others where that is worth while."""
    f: Mapping[str, float] = topology.get("figures", {})
    if not f:
        return []
    age = max(0, int(time.time() - f["when"]))
    n, unit = next(((age // s, unit) for s, unit in ((86400, "day"), (3600, "hour"), (60, "minute")) if age >= s), (0, ""))
    ago = f"{n} {unit}{'s' * (n > 1)} ago" if n else "just now"
    rounds = f"two rounds within {f['agreement']:.0%}" if "agreement" in f else "in one round"
    busy = f", while other work took {f['others']:.0%} of the cores" if f["others"] > BUSY else ""
    again = f"; again: tapestry calibrate --auto --processes {devices}" if doubtful(f) and topology["name"] == "auto" else ""
    return [f"measured {ago}, {rounds}{busy}{again}"]


def times(ratio: float) -> str:
    """``0.57``, ``4.3``, ``126``: two digits, and three near 1."""
    return f"{ratio:,.0f}" if ratio >= 99.5 else f"{ratio:.{3 if 0.95 <= ratio < 1.05 else 2}g}"


def count(n: float) -> str:
    """A number of FLOPs with a prefix behind it: ``1.07 G``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} "


def signed(seconds: float) -> str:
    """A duration that always has a sign."""
    return ("+" if seconds >= 0 else "−") + duration(abs(seconds))


def shape_text(extents: tuple[int, ...]) -> str:
    """``4×8`` or ``()``."""
    return "×".join(map(str, extents)) or "()"


def split_text(op: Op, s: Strategy, mesh: Mesh) -> str:
    """``h/8@d0+d1, m/4@d2 (reduce_scatter to o)`` as ``--pin`` writes it, with what becomes of partial results."""
    reduced = {d.name for d in op.reduce} if isinstance(op, Block) else set[str]()
    axes: dict[tuple[str, str], list[int]] = {}
    for a, (d, out) in enumerate(zip(s.dims, s.out, strict=True)):
        if d is not None:
            ends = "" if d not in reduced else " (all_reduce)" if out is None else f" (reduce_scatter to {op.dims[out].name})"
            axes.setdefault((d, ends), []).append(a)
    splits: list[str] = []
    for (d, ends), cut_by in axes.items():
        parts = 1
        for a in cut_by:
            parts *= mesh[a].size
        splits.append(f"{d}/{parts}@{'+'.join(mesh[a].name for a in cut_by)}{ends}")
    splits += [f"{d}/{mesh[a].size} round {mesh[a].name}" for a, d in enumerate(s.ring) if d is not None]
    return ", ".join(splits) or "none"


def split_words(op: Op, s: Strategy, mesh: Mesh) -> str:
    """What every device does of an operation, in words."""
    reduced = {d.name for d in op.reduce} if isinstance(op, Block) else set[str]()
    own = dict.fromkeys(f"'{d}'" for d in s.dims if d is not None and d not in reduced)
    partial = dict.fromkeys(
        (f"'{d}'", "an all_reduce completes" if o is None else f"a reduce_scatter along '{op.dims[o].name}' completes")
        for d, o in zip(s.dims, s.out, strict=True) if d in reduced
    )  # fmt: skip
    words = [f"computes its own part of {' and '.join(own)}"] if own else []
    words += [f"merges its own part of {d}, which {end}" for d, end in partial]
    words += [
        f"merges what comes by as blocks of '{d}' travel round {mesh[a].name}" for a, d in enumerate(s.ring) if d is not None
    ]
    idle = [a.name for a, d in zip(mesh, s.dims, strict=True) if d is None and a.size > 1]
    if not words:
        return "every device computes all of it"
    return f"each device {' and '.join(words)}" + (f"; repeated along {', '.join(idle)}" if idle else "")


def kind_text(op: Op) -> str:
    """``map``, the monoid, or which opaque node it is."""
    return (op.monoid or "map") if isinstance(op, Block) else f"opaque {op.kind}"


def step_text(step: Step, program: Program, ops: tuple[Op, ...]) -> str:
    """What one step does, in a few words."""
    match step:
        case Launch():
            return ", ".join(ops[step.op].outs) + ("" if step.mode == "full" else f" ({step.mode})")
        case Transfer():
            return f"{step.kind} of '{program.buffers[step.src].tensor}'"
        case Reduce():
            return f"{step.kind} of '{program.buffers[step.srcs[0]].tensor}'"
        case Load():
            return f"load '{step.buffer}'"
        case Free():
            return "free " + ", ".join(f"'{b}'" for b in step.buffers)


# charts

BLOCKS = " ▁▂▃▄▅▆▇█"


def columns(values: Sequence[int], width: int) -> list[int]:
    """At most ``width`` values: the largest of each of so many equal stretches, so that no peak is lost."""
    n = len(values)
    if n <= width:
        return list(values)
    return [max(values[k * n // width : (k + 1) * n // width]) for k in range(width)]


def area(values: Sequence[int], width: int = 72, height: int = 3) -> list[str]:
    """An area chart from 0 to the largest value, in lines of block characters; anything above 0 shows."""
    heights = columns(values, width)
    top = max(heights, default=0) or 1
    steps = len(BLOCKS) - 1
    levels = [0 if v <= 0 else max(1, round(v / top * height * steps)) for v in heights]
    rows = range(height - 1, -1, -1)
    return ["".join(BLOCKS[min(steps, max(0, level - row * steps))] for level in levels) for row in rows]
