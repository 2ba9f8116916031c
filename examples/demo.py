"""ResNet-50 from the onnx package on four logical devices: compiled, verified, run, compared, and shown.

`make demo` runs this. Everything it writes goes to build/demo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table

import tapestry
from examples import light
from tapestry.api import run_checked
from tapestry.pipeline import verify_build
from tapestry.viz import progress
from tapestry.viz.format import human
from tapestry.viz.tables import ms

FOLDER = Path("build/demo")
DEVICES = 4
T = TypeVar("T")


def main() -> int:
    """Compile, verify, run, compare; returns 1 if anything is not as it should be."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    model = light.write("resnet50", FOLDER)
    with progress.stages(quiet=False) as report:
        built = tapestry.compile(model, devices=DEVICES, progress=report)
        built.save(FOLDER / "plan")
    _, laws = working("verify", lambda step: verify_build(FOLDER / "plan"))
    loaded = tapestry.load(FOLDER / "plan")
    working("load weights", lambda step: loaded.session)
    feeds = loaded.random_feeds(0)
    _, document = working("run and compare", lambda step: run_checked(loaded, feeds, check=True, progress=step))
    console.print(Rule("Tapestry: an ONNX model as a verified, sharded plan", style="cyan"))
    console.print(summary(built.report, laws, document))
    console.print(transfers(built.report["transfers"]))
    console.print(memory(document["peak_bytes"], built.report["unsharded_peak_bytes"]))
    console.print(kernel(built.kernels))
    passed = bool(document["passed"]) and document["reference"] == "onnxruntime"
    console.print(verdict(document, passed))
    console.print(f"next: .venv/bin/tapestry explain {FOLDER}/plan", style="dim")
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
    sizes = f"{r['nodes']} nodes → {r['ops']} operations → {r['signatures']} distinct signatures"
    table.add_row("model", f"ResNet-50, random weights: {sizes}")
    gap = f"gap {r['gap']:.2%}" + (", proved optimal for this cost model" if r["gap"] < 1e-6 else "")
    table.add_row("plan", f"objective {ms(r['objective_s'])}, lower bound {ms(r['lower_bound_s'])}, {gap}")
    table.add_row("verified", f"{sum(laws.values()):,} checks of {len(laws)} laws from the files alone, all hold")
    for name, out in document["outputs"].items():
        kind = f"{'×'.join(map(str, out['shape']))} {out['dtype']}"
        table.add_row("output", f"{name} {kind}, relative error {out['rel_err']:.1e} against {document['reference']}")
    s = r["seconds"]
    stages = " + ".join(f"{k} {s[k]:.2f}" for k in ("lift", "simplify", "search", "verify", "codegen"))
    table.add_row("seconds", f"compile {s['total']:.2f} ({stages}), run {document['seconds']:.2f}")
    return table


def transfers(rows: list[Mapping[str, Any]]) -> RenderableType:
    """Every kind of transfer with its bytes, and bars in proportion."""
    table = Table(title="\nWhat moves between devices", title_justify="left", title_style="bold", box=None, header_style="dim")
    table.add_column("kind", style="cyan")
    table.add_column("times", justify="right")
    table.add_column("bytes on the wire", justify="right")
    table.add_column("largest, per device", justify="right")
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
    for d, p in enumerate(peaks):
        table.add_row(str(d), f"{p:,}", human(p), bar(p / alone, "green") + f" {p / alone:.0%}")
    return table


def bar(share: float, color: str) -> str:
    """A bar of up to 30 characters."""
    return f"[{color}]{'█' * max(1, round(30 * share))}[/]"


def kernel(sources: Mapping[str, str]) -> RenderableType:
    """Where the kernels are, and the shortest that has a dot product."""
    name = min((n for n in sources if "tl.dot" in sources[n]), key=lambda n: len(sources[n]), default=min(sources))
    head = "\n".join(sources[name].splitlines()[:40])
    where = FOLDER / "plan" / "kernels"
    code = Panel(Syntax(head, "python", theme="ansi_dark", background_color="default"), title=name, title_align="left")
    return Group(f"\n[bold]{len(sources)} Triton kernels[/] in {where}, for example:", code)


def verdict(document: Mapping[str, Any], passed: bool) -> RenderableType:
    """One line in a frame."""
    good = "same result as the reference, and exactly the memory that was planned"
    text = good if passed else document.get("reason", "the results differ")
    return Panel(("✔ " if passed else "✘ ") + text, expand=False, border_style="green" if passed else "red")


if __name__ == "__main__":
    sys.exit(main())
