"""The steps of a plan with equal ones of different layers on one line: ``layers.*.self_attn.q_proj ×32``, then exceptions.

Two operations are alike where they are counterparts (`folds`) and cut in the same way. Sizes may differ where names say so,
and are shown as ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tapestry.build.store import Build
from tapestry.errors import some
from tapestry.ir.program import Launch
from tapestry.viz.format import duration, human, template, together, wrapped

Row = Mapping[str, Any]
INDENT = " " * 23


def folded(build: Build, facts: Mapping[str, Any]) -> list[str]:
    """All steps that compute or communicate, alike ones once, in the order in which they come first."""
    moved = {t["step"]: t for t in facts["steps"]}
    rows: list[Row] = []
    for i, step in enumerate(build.program.steps):
        if i in moved:
            rows.append(moved[i])
        elif isinstance(step, Launch) and step.mode != "finish":
            rows.append(facts["operations"][step.op])
    groups = together(rows, _line_key)
    total = facts["simulated"]["seconds"] or 1.0
    beside = facts["simulated"]["beside_s"]
    more = f"; {duration(beside)} of them beside others" if beside > total / 1000 else ""
    lines = [f"{'×':>5} {'share':>6} {'time':>8}  {some(len(rows), 'step')}, {len(groups)} distinct{more}"]
    for same in groups.values():
        seconds = sum(r["seconds"] for r in same)
        head = f"{len(same):>5} {seconds / total:>6.1%} {duration(seconds):>8}  "
        lines += _moved_text(head, same) if "step" in same[0] else _operation_text(head, same)
    return lines


def _line_key(row: Row) -> tuple[Any, ...]:
    """What those steps have in common that one line stands for."""
    if "step" in row:
        return "moved", template(row["name"]), row["kind"], row["group"], row["algorithm"]
    same = tuple(row["dims"]) if row["part"] else tuple(row["dims"].items())
    return "op", row["alike"], row["kind"], same, row["split"], row.get("stage")


def _moved_text(head: str, rows: Sequence[Row]) -> list[str]:
    one, sent = rows[0], sum(r["bytes"] for r in rows)
    sent_as = f", sent as {one['sent_as']}," if one["sent_as"] else ""
    how = "" if one["group"] is None else f"{sent_as} in groups of {one['group']} by {one['algorithm']}"
    return wrapped(f"{head}{one['kind']} of {template(one['name'])}{how}, {human(sent)} in all", INDENT)


def _operation_text(head: str, rows: Sequence[Row]) -> Iterator[str]:
    one = rows[0]
    split = "" if one["split"] == "none" else f"  split {one['split']}"
    at = f" in stage {one['stage']}" if "stage" in one else ""
    dims = f"[{_dims_text(rows)}] {one['kind']}{at}"
    yield from wrapped(f"{head}{one['alike']}{split} {dims}", INDENT)
    if not one["part"] and len(rows) == 1 and one["nodes"] not in ([], [one["name"]]):
        yield from wrapped(f"{INDENT}from {', '.join(one['nodes'])}", INDENT)
    if "opaque_because" in one:
        yield from wrapped(f"{INDENT}opaque: {one['opaque_because']}", INDENT)
    pins = dict.fromkeys(pin for row in rows for pin in row["pins"])
    if pins:
        yield from wrapped(f"{INDENT}pinned by {', '.join(pins)}", INDENT)


def _dims_text(rows: Sequence[Row]) -> str:
    """``i: 128 sequence, n: 256..512 out``: sizes, as ranges where they differ, and better names."""
    better = rows[0]["dim_names"]
    out: list[str] = []
    for name in rows[0]["dims"]:
        sizes = [r["dims"][name] for r in rows]
        size = f"{min(sizes)}..{max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        out.append(f"{name}: {size}" + (f" {better[name]}" if name in better else ""))
    return ", ".join(out)
