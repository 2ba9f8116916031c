"""What every device does when, as the cost model has it: kernels, transfers, and memory; equal devices share a lane."""

from __future__ import annotations

from typing import Any

from tapestry.ir.plan import Plan
from tapestry.ir.program import Launch, Reduce, Transfer
from tapestry.tools.viewer import program_tables
from tapestry.tools.viewer.draw import NONE, PALETTE, Drawing, build_of, drawing, ranges, rect, tag, words
from tapestry.viz import explain
from tapestry.viz.format import duration, human, split_text, step_text

LANES_LEFT, ROW, MEMORY, MOST = 150.0, 15.0, 40.0, 4
KINDS = ("", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "halo", "broadcast", "permute")


def split_colours(plan: Plan) -> list[str]:
    """A colour for every operation by what is cut; the most frequent cuts have one of their own."""
    both = zip(plan.graph.ops, plan.strategies, strict=True)
    texts = [split_text(op, s, plan.stage(i).mesh) for i, (op, s) in enumerate(both)]
    order = sorted(dict.fromkeys(t for t in texts if t != "none"), key=lambda t: -texts.count(t))
    known = dict(zip(order, PALETTE, strict=False))
    return [known.get(t, NONE) for t in texts]


def lanes(build: object, *, width: int = 760, most: int = MOST) -> Drawing:
    """The picture of a build's simulated schedule.

    Args:
        most: lanes that are drawn; a lane is of all devices that do the same at the same time.
    """
    b = build_of(build)
    timed = explain.schedule(b)
    total, table = timed.total or 1.0, program_tables.lanes(timed)
    memory = program_tables.memory(b.program, dict(enumerate(b.peak_bytes)))
    colours = split_colours(b.plan)
    scale = (width - LANES_LEFT - 12) / total
    parts = [words(12, 16, f"simulated {duration(timed.total)}; {timed.assumption.split(';')[0]}"[:120], class_="note")]
    y = 30.0
    classes: list[list[int]] = table["classes"][:most]
    for k, devices in enumerate(classes):
        names = [f"device {ranges(devices)}" if len(devices) == 1 else f"devices {ranges(devices)}", "kernels", "transfers"]
        parts += [words(12, y + 11, names[0][:14], class_="name")]
        parts += [words(LANES_LEFT - 6, y + 11 + n * (ROW + 1), names[n + 1], class_="note", text_anchor="end") for n in (0, 1)]
        parts += [_bar(b, row, k, (y, scale), colours) for row in table["steps"] if row["begin"][k] is not None]
        parts.append(_memory(b, memory, table, (k, devices[0]), (y + 2 * ROW + 6, scale, total)))
        peak = human(b.peak_bytes[devices[0]])
        parts.append(words(LANES_LEFT - 6, y + 2 * ROW + 24, f"memory {peak}", class_="note", text_anchor="end"))
        y += 2 * ROW + MEMORY + 22
    return drawing(width, y, "what every device does when", parts)


def _bar(b: Any, row: dict[str, Any], k: int, place: tuple[float, float], colours: list[str]) -> str:
    y, scale = place
    step = b.program.steps[row["step"]]
    begin, end = row["begin"][k], row["end"][k]
    if isinstance(step, Transfer | Reduce):
        fill = PALETTE[KINDS.index(step.kind) if step.kind in KINDS else 0]
    else:
        fill = colours[step.op] if isinstance(step, Launch) else NONE
    title = f"{step_text(step, b.program, b.plan.graph.ops)}: {duration(end - begin)}"
    top, wide = y + row["stream"] * (ROW + 1), max(0.8, (end - begin) * scale)
    return rect(LANES_LEFT + begin * scale, top, wide, ROW, title, fill=fill)


def _memory(b: Any, memory: Any, table: Any, which: tuple[int, int], place: tuple[float, float, float]) -> str:
    """Bytes alive, as an area over the time of the steps."""
    (lane, device), (y, scale, total) = which, place
    alive = memory["alive"][next(k for k, c in enumerate(memory["classes"]) if device in c)]
    begins = {r["step"]: r["begin"][lane] for r in table["steps"]}
    most, now, path = max(1, *alive), 0.0, ""
    for step, n in enumerate(alive):
        now = max(now, begins.get(step) or 0.0)
        at = f"{LANES_LEFT + now * scale:.1f}", f"{y + MEMORY * (1 - n / most):.1f}"
        path += f"H{at[0]}V{at[1]}" if path else f"M{at[0]},{at[1]}"
    right = LANES_LEFT + total * scale
    return tag("path", d=f"{path}H{right:.1f}V{y + MEMORY:.1f}H{LANES_LEFT:.1f}Z", class_="memory")
