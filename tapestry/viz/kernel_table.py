"""The table of ``tapestry kernels``: resources of compiled kernels, and the model over one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from tapestry.viz import tables

_COLUMNS = (
    "kernel", "kind", "launches", "grid", "warps", "regs", "spills", "shared", "of limit", "occupancy", "matrix", "16-byte",
    "FLOPs", "bytes", "roofline",
)  # fmt: skip


_WIDTH = 200


def table(document: Mapping[str, Any]) -> RenderableType:
    """One row for each launch of a kernel, and a line about the model."""
    out = Table(title=f"Kernels for {document['target']}", title_justify="left")
    for c in _COLUMNS:
        out.add_column(c, justify="left" if c in ("kernel", "kind", "matrix") else "right", no_wrap=c == "kernel")
    for r in document["kernels"]:
        work = (f"{r['flops']:,}", f"{r['bytes']:,}", tables.ms(r["roofline_s"])) if "bytes" in r else ("", "", "")
        out.add_row(
            r["kernel"], r["kind"], str(r["launches"]), "×".join(map(str, r["grid"])), str(r["num_warps"]), str(r["registers"]),
            str(r["spills"]), f"{r['shared']:,}", f"{r['shared'] / r['shared_limit']:.0%}", f"{r['occupancy']:.0%}",
            r["matrix"], f"{r['wide_share']:.0%}", *work,
        )  # fmt: skip
    return Group(out, _model(document["model"], document["precision"]))


def _model(m: Mapping[str, Any], precision: str) -> str:
    """The model in two lines."""
    text = f"One run: {m['launches']} launches, {m['bytes'] / 1e6:.1f} MB, roofline {tables.ms(m['roofline_s'])}"
    if "unfused_kernels" in m:
        text += f"; a kernel for each ONNX node: {m['unfused_kernels']} launches, {m['unfused_bytes'] / 1e6:.1f} MB"
    text += f". Products of float32: {precision}."
    return text + (f"\nWithout a kernel: {', '.join(m['opaque'])}" if m["opaque"] else "")


def show(document: Mapping[str, Any]) -> None:
    """Print the table; into a file or a narrow terminal as wide as it is."""
    console = Console(highlight=False)
    Console(highlight=False, width=max(console.width, _WIDTH)).print(table(document), crop=False)
