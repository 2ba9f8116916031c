"""The steps of a plan with equal ones of different layers on one line: ``layers.*.self_attn.q_proj ×32``, then exceptions.

Two operations are alike where their names differ in numbers of layers alone, and they are cut in the same way. Sizes may differ
then, and are shown as ranges. Where a model has no names, operations are alike if their sizes are equal, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tapestry.build.store import Build
from tapestry.ir.program import Launch
from tapestry.viz.format import duration, human
from tapestry.viz.summary import WIDTH, wrapped

Row = Mapping[str, Any]


@dataclass(slots=True)
class Alike:
    """Operations (or transfers) that one line stands for."""

    name: str
    rows: list[Row] = field(default_factory=list[Row])

    @property
    def seconds(self) -> float:
        """All of them together."""
        return sum(r["seconds"] for r in self.rows)


def template(name: str) -> str:
    """A name with ``*`` for the numbers of layers, which are those of all its parts but the last."""
    *outer, last = name.split(".")
    outer = ["*" if p.isdecimal() else re.sub(r"\d+$", "*", p) for p in outer]
    return ".".join([*outer, "*" if last.isdecimal() else re.sub(r"_\d+$", "", last)])


def folded(build: Build, facts: Mapping[str, Any]) -> list[str]:
    """All steps that compute or communicate, alike ones once, in the order in which they come first."""
    groups: dict[tuple[Any, ...], Alike] = {}
    moved = {t["step"]: t for t in facts["steps"]}
    for i, step in enumerate(build.program.steps):
        if i in moved:
            row = moved[i]
            name = template(row["name"])
            key = ("moved", name, row["kind"], row["group"], row["algorithm"])
        elif isinstance(step, Launch) and step.mode != "finish":
            row = facts["operations"][step.op]
            name, key = _operation_key(row)
        else:
            continue
        groups.setdefault(key, Alike(name)).rows.append(row)
    total = facts["simulated"]["seconds"] or 1.0
    lines = [f"{'×':>5} {'share':>6} {'time':>8}  {len(groups)} kinds of steps of {sum(len(g.rows) for g in groups.values())}"]
    for key, group in groups.items():
        lines += _group_text(group, total, moved=key[0] == "moved")
    return lines


def _operation_key(row: Row) -> tuple[str, tuple[Any, ...]]:
    """The name that stands for an operation, and what those which it stands for have in common."""
    name = template(row["name"]) if row["part"] else re.sub(r"\d+$", "*", row["name"])
    same = tuple(row["dims"].items()) if not row["part"] else tuple(row["dims"])
    return name, ("op", name, row["kind"], same, row["split"], row.get("stage"))


def _group_text(group: Alike, total: float, *, moved: bool) -> Iterator[str]:
    head = f"{len(group.rows):>5} {group.seconds / total:>6.1%} {duration(group.seconds):>8}  "
    one, indent = group.rows[0], " " * 23
    if moved:
        sent = sum(r["bytes"] for r in group.rows)
        how = "" if one["group"] is None else f" in groups of {one['group']} by {one['algorithm']}"
        yield from wrapped(f"{head}{one['kind']} of {group.name}{how}, {human(sent)} in all", indent)
        return
    split = "" if one["split"] == "none" else f"  split {one['split']}"
    dims = f"[{_dims_text(group.rows)}] {one['kind']}{_stage(one)}"
    if len(head) + len(group.name) + len(split) + len(dims) + 1 <= WIDTH:
        yield f"{head}{group.name}{split} {dims}"
    else:
        yield from wrapped(f"{head}{group.name}{split}", indent)
        yield from wrapped(f"{indent}{dims}", indent)
    if not one["part"] and len(group.rows) == 1 and one["nodes"]:
        yield from wrapped(f"{indent}from {', '.join(one['nodes'])}", indent)
    if "opaque_because" in one:
        yield from wrapped(f"{indent}opaque: {one['opaque_because']}", indent)
    pins = dict.fromkeys(pin for row in group.rows for pin in row["pins"])
    if pins:
        yield from wrapped(f"{indent}pinned by {', '.join(pins)}", indent)


def _stage(row: Row) -> str:
    return f" in stage {row['stage']}" if "stage" in row else ""


def _dims_text(rows: list[Row]) -> str:
    """``i: 128 sequence, n: 256..512 out``: sizes, as ranges where they differ, and better names."""
    better = rows[0]["dim_names"]
    out: list[str] = []
    for name in rows[0]["dims"]:
        sizes = [r["dims"][name] for r in rows]
        size = f"{min(sizes)}..{max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        out.append(f"{name}: {size}" + (f" {better[name]}" if name in better else ""))
    return ", ".join(out)
