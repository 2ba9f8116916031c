"""The compiler's passes as they ran, as a table on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

HEAD = ("name", "phase", "takes", "gives", "seconds", "changed")  # of a row; everything else is a size


def ran(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
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
