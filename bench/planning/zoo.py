"""Models of transformers by their makers' configurations, with two layers: planned for 8 H100, without a weight anywhere.

    python -m bench zoo [NAME …] [--json] [--values] [--page FILE] [--python PATH] [--limit SECONDS]

Each is on the meta device in bfloat16, and planned for ``triton:sm90``. With --values the same architectures have small
random weights, and what the plan computes on two devices is held against torch in float32 and in bfloat16: an answer is
right within 1e-4 of torch's norm in float32, and in bfloat16 within twice as far from torch's float32 as torch's own bfloat16
is. Each model has a process of its own. Writes bench/results/zoo.json; exits 1 if a model is refused or wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.doors import apart
from bench.exporters.zoo_models import ZOO
from bench.support import other_python, record
from bench.support.record import Row
from tapestry.viz.format import human

CLOSE = 1e-4
SEEDS = 5  # at most
FACTOR = 2.0  # of torch's own distance between bfloat16 and float32


def planned(case: Row) -> Row:
    """One model at its makers' sizes, in this process."""
    import tapestry
    from bench.exporters.zoo_models import made
    from tapestry.ir.graph import Opaque

    module, inputs = made(case["model"])
    start = time.process_time()
    plan = tapestry.compile(module, example_inputs=inputs, devices=8, topology="h100", target="triton:sm90")
    seconds, r = time.process_time() - start, plan.report
    opaque: dict[str, int] = {}
    for op in plan.build.plan.graph.ops:
        if isinstance(op, Opaque):
            opaque[op.kind] = opaque.get(op.kind, 0) + 1
    return {
        "inputs": {k: list(t.shape) for k, t in inputs.items()}, "operations": r["ops"], "opaque": opaque, "cpu_s": seconds,
        "gap": r["gap"], "objective_s": r["objective_s"], "transfer_bytes": sum(t["bytes"] for t in r["transfers"]),
        "peak_bytes": max(plan.build.peak_bytes),
    }  # fmt: skip


def valued(case: Row) -> Row:
    """One small model: what its plans compute beside torch.

    Rounding may send a token to another expert, in torch as with us: the figure is the median of as many weights as say so.
    """
    rows = [_distances(case["model"], 0)]
    while not _right(rows[-1]) and len(rows) < SEEDS:
        rows.append(_distances(case["model"], len(rows)))
    row: Row = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
    row |= {"weights": len(rows)} if len(rows) > 1 else {}
    return row if _right(row) else {**row, "failed": "wrong", "error": "further from torch than it may be"}


def _right(row: Row) -> bool:
    return row["f32"] <= CLOSE and row["bf16"] <= FACTOR * row["torch_bf16"]


def _distances(model: str, seed: int) -> Row:
    import torch

    from bench.exporters.zoo_models import made

    module, inputs = made(model, small=True, seed=seed)
    want = _first(module, inputs)
    row: Row = {"f32": _apart(_ran(module, inputs), want)}
    module = module.to(torch.bfloat16)
    inputs = {k: t.to(torch.bfloat16) if t.is_floating_point() else t for k, t in inputs.items()}
    return row | {"torch_bf16": _apart(_first(module, inputs), want), "bf16": _apart(_ran(module, inputs), want)}


def _ran(module: Any, inputs: Any) -> Any:
    import tapestry
    from bench.doors.modules import _arrays

    outs = tapestry.compile(module, example_inputs=inputs, devices=2, topology="cpu").run(_arrays(inputs))
    return next(iter(outs.values()))


def _first(module: Any, inputs: Any) -> Any:
    import torch

    with torch.no_grad():
        return module(**inputs)[0].float().numpy()


def _apart(got: Any, want: Any) -> float:
    import numpy as np

    got = np.asarray(got, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"the output is {got.shape}, not {want.shape}")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def worker(case: Row) -> Row:
    """One case, in this process."""
    import warnings

    warnings.simplefilter("ignore")
    return valued(case) if case["values"] else planned(case)


def cells(r: Row, values: bool) -> list[str]:
    """A row as text."""
    if values:
        figures = [f"{r[k]:.1e}" if k in r else "" for k in ("f32", "bf16", "torch_bf16")]
        return [r["model"], *figures, _said(r) if "failed" in r else ""]
    if "failed" in r:
        return [r["model"], *[""] * 5, _said(r)]
    opaque = ", ".join(f"{n} {k}" for k, n in sorted(r["opaque"].items())) or "0"
    return [r["model"], str(r["operations"]), opaque, f"{r['cpu_s']:.0f}", f"{r['gap']:.2%}", human(r["transfer_bytes"]), ""]


def _said(r: Row) -> str:
    return f"{r['failed']}: {r['error']}"


HEADS = {
    False: ("model", "operations", "opaque", "compile, s", "gap", "moved", "refusal"),
    True: ("model", "f32", "bf16", "torch's bf16", "failure"),
}


def page(planned_rows: list[Row], values_rows: list[Row]) -> str:
    """The results as a page."""
    of = record.read_more("zoo", "commit", "")
    out = [
        "# Models of transformers\n",
        "Written by `python -m bench zoo --page FILE`"
        + (f" (last at {of}; a row stays until it is measured again)." if of else "."),
        "\nModels by their makers' configurations, with two layers, in bfloat16, without weights (on the meta device). The",
        "plans are for 8 H100 and the target `triton:sm90`. Seconds are processor time from the module to the verified plan.",
        "The gap is how far a plan may be from the best one of the same form. Moved is what all transfers carry.\n",
    ]
    for values, rows in ((False, planned_rows), (True, values_rows)):
        if not rows:
            continue
        if values:
            text = "\n## Values\n\nThe same architectures, small, with random weights, on two devices of a CPU: the distance to"
            out += [text, "torch's float32, as a share of its norm; beside it that of torch's own bfloat16.\n"]
        heads = HEADS[values]
        out.append("| " + " | ".join(heads) + " |")
        out.append("| --- |" + " ---: |" * (len(heads) - 2) + " --- |")
        out += ["| " + " | ".join(c.replace("|", "\\|") for c in cells(r, values)) + " |" for r in rows]
    return "\n".join(out) + "\n"


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    other_python.add_python(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ZOO)}")
    parser.add_argument("--values", action="store_true", help="small models with weights, beside torch")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path, help="write the results as this page")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return apart.answer(worker, args.worker)
    if unknown := [n for n in args.names if n not in ZOO]:
        parser.error(f"no model {unknown[0]}; there are {', '.join(ZOO)}")
    other_python.moved(args, "zoo")
    if find_spec("transformers") is None:
        sys.exit("transformers is not installed: pip install transformers, or --python PATH of an environment that has it")
    new = [_measured(n, args) for n in args.names or ZOO]
    _show(new, args)
    if args.page:
        args.page.write_text(page(_sorted("rows"), _sorted("values")))
    return int(any("failed" in r for r in new))


def _measured(name: str, args: argparse.Namespace) -> Row:
    """One model, written down at once."""
    row = {"model": name, **apart.measured("zoo", {"model": name, "values": args.values}, args.limit)}
    if not args.json:
        print(*(c for c in cells(row, args.values) if c), sep="  ", flush=True)
    kept = {k: {r["model"]: r for r in _sorted(k)} for k in ("rows", "values")}
    kept["values" if args.values else "rows"][name] = row
    record.write("zoo", list(kept["rows"].values()), values=list(kept["values"].values()))
    return row


def _sorted(key: str) -> list[Row]:
    rows = record.read("zoo") if key == "rows" else record.read_more("zoo", key, [])
    return sorted((r for r in rows if r["model"] in ZOO), key=lambda r: list(ZOO).index(r["model"]))


def _show(rows: list[Row], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(*HEADS[args.values], title="models of transformers", title_justify="left")
    for r in rows:
        table.add_row(*cells(r, args.values))
    Console(width=None if sys.stdout.isatty() else 180, highlight=False).print(table)
    print(f"{sum('failed' not in r for r in rows)} of {len(rows)} models; bench/results/zoo.json")


if __name__ == "__main__":
    sys.exit(main())
