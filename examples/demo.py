"""ResNet-50 from the onnx package on four logical devices: compiled, verified, run, compared, and shown.

`make demo` runs this. Everything it writes goes to build/demo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table

import tapestry
from examples import light
from tapestry.api import run_checked
from tapestry.compiler.pipeline import PASSES
from tapestry.compiler.saved_build import verify_build
from tapestry.viz import progress
from tapestry.viz.format import duration, human
from tapestry.viz.tables import proof

FOLDER = Path("build/demo")
DEVICES = 4
T = TypeVar("T")


def main() -> int:
    """Compile, verify, run, compare; returns 1 if anything is not as it should be."""
    console = Console(highlight=False)
    model = light.write("resnet50", FOLDER)
    with progress.passes([p.name for p in PASSES], quiet=False) as show:
        built = tapestry.compile(model, devices=DEVICES, topology="cpu", progress=show.begin, found=show.found)
        built.save(FOLDER / "plan")
    _, laws, _ = working("verify", lambda step: verify_build(FOLDER / "plan"))
    loaded = tapestry.load(FOLDER / "plan")
    working("load weights", lambda step: loaded.session)
    feeds = loaded.random_feeds(0)
    _, document = working("run and compare", lambda step: run_checked(loaded, feeds, check=True, progress=step))
    console.print(summary(built.report, laws, document))
    console.print(transfers(built.report["transfers"]))
    console.print(memory(document["peak_bytes"], built.report["unsharded_peak_bytes"]))
    console.print(f"\n{len(built.kernels)} Triton kernels in {FOLDER}/plan/kernels")
    passed = bool(document["passed"]) and document["reference"] == "onnxruntime"
    console.print(verdict(document, passed))
    console.print(f"next: .venv/bin/tapestry explain {FOLDER}/plan")
    return 0 if passed else 1


def working(title: str, do: Callable[[Callable[[int, int], None]], T]) -> T:
    """Do something under a progress bar."""
    with progress.bar(title, quiet=False) as advance:
        return do(advance)


def summary(r: Mapping[str, Any], laws: Mapping[str, int], document: Mapping[str, Any]) -> RenderableType:
    """The model, the plan, the proof and the error, a line each."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    sizes = f"{r['nodes']} nodes → {r['ops']} operations → {r['signatures']} distinct"
    table.add_row("model", f"ResNet-50, random weights: {sizes}")
    gap = f"gap {r['gap']:.2%}{proof(r)}"
    table.add_row("plan", f"objective {duration(r['objective_s'])}, lower bound {duration(r['lower_bound_s'])}, {gap}")
    table.add_row("verified", f"{sum(laws.values()):,} checks of {len(laws)} laws from the files alone, all hold")
    for name, out in document["outputs"].items():
        kind = f"{'×'.join(map(str, out['shape']))} {out['dtype']}"
        table.add_row("output", f"{name} {kind}, relative error {out['rel_err']:.1e} against {document['reference']}")
    table.add_row("seconds", f"compile {r['seconds']['total']:.1f} s, run {document['seconds']:.2f} s")
    return table


def transfers(rows: list[Mapping[str, Any]]) -> RenderableType:
    """Every kind of transfer with its bytes, and bars in proportion."""
    table = Table(title="\nWhat moves between devices", title_justify="left", title_style="bold", box=None, header_style="dim")
    table.add_column("kind", style="cyan")
    table.add_column("times", justify="right")
    table.add_column("bytes on the wire", justify="right")
    table.add_column("largest", justify="right")
    table.add_column("")
    top = max([r["bytes"] for r in rows], default=1)
    for r in sorted(rows, key=lambda r: -r["bytes"]):
        name = r["kind"].replace("_", "-")
        table.add_row(name, str(r["count"]), f"{r['bytes']:,}", f"{r['payload_bytes']:,}", bar(r["bytes"] / top, "yellow"))
    table.add_row("all", str(sum(r["count"] for r in rows)), f"{sum(r['bytes'] for r in rows):,}", "", "", style="bold")
    return table


def memory(peaks: list[int], alone: int) -> RenderableType:
    """Measured peak bytes per device against one device that runs it all."""
    table = Table(title="\nPeak memory, measured", title_justify="left", title_style="bold", box=None, header_style="dim")
    table.add_column("device", style="cyan")
    table.add_column("bytes", justify="right")
    table.add_column("")
    table.add_column("")
    table.add_row("unsharded", f"{alone:,}", human(alone), bar(1.0, "red"))
    for d, p in enumerate(peaks) if len(set(peaks)) > 1 else [(f"each of {len(peaks)}", peaks[0])]:
        table.add_row(str(d), f"{p:,}", human(p), bar(p / alone, "green") + f" {p / alone:.0%}")
    return table


def bar(share: float, color: str) -> str:
    """A bar of up to 20 characters."""
    return f"[{color}]{'█' * max(1, round(20 * share))}[/]"


def verdict(document: Mapping[str, Any], passed: bool) -> str:
    """One line: whether the result is right and the memory is as planned."""
    if passed:
        return "[green]✔ same result as the reference, and exactly the memory that was planned[/]"
    return f"[red]✘ {document.get('reason', 'the results differ')}[/]"


if __name__ == "__main__":
    sys.exit(main())
