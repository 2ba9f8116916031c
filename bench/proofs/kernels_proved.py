"""Kernels proved from their source text, and faults put into the text, each of which must be refused.

    .venv/bin/python -m bench kernels_proved [--models NAME …] [--each 2]

Models are compiled for two devices and for `triton:sm90`; every kernel's source is proved against its operation: what it writes
and reads, and its value. Then every kind of fault of `tests/support/faults/kernel_edits.py` is put into `--each` kernels of it.
Rows that are not asked for stay as they are in bench/results/kernels_proved.json. Exits 1 if a kernel is refused or a fault is
not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tapestry
from bench.correctness.models import EXPORTS, LIGHT, materialize
from bench.support import record
from tapestry.codegen import kernel_sources
from tapestry.errors import LawError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel
from tapestry.tools.kernel_proofs.build_kernels import kernel_text_of
from tapestry.tools.kernel_proofs.kernel_proofs import COMPARED, FORM, TRIAL, prove
from tapestry.tools.kernel_proofs.kernel_text import KernelText
from tests.support.faults.kernel_edits import EDITS

MODELS = (*EXPORTS, *LIGHT)
TRITON = "triton:sm90"
Kernels = dict[str, tuple[Kernel, KernelText]]


def kernels_of(name: str, folder: Path) -> tuple[Graph, Kernels] | None:
    """The graph of a model and its kernels with their texts, by name; None where the model is not to be had."""
    path = materialize(name, folder)
    if path is None:
        return None
    build = tapestry.compile(path, mesh="2", shapes=EXPORTS.get(name, {}), target=TRITON, time_limit=5.0).build
    graph = build.plan.graph
    named = kernel_sources.named_kernels(graph, build.program, build.target, build.precision, build.knobs)
    return graph, {n: (k, kernel_text_of(graph, k, one, n, one.source)) for n, (k, one) in named.items()}


def proved(graph: Graph, kernels: Kernels) -> dict[str, Any]:
    """By what the kernels were shown, and what was not."""
    start = time.process_time()
    counts, rest, refused = Counter[str](), list[dict[str, str]](), list[str]()
    for n, (kernel, text) in kernels.items():
        try:
            found = prove(graph, kernel, text)
        except LawError as e:
            refused.append(f"{n}: {e}")
            continue
        counts[found.value] += 1
        if found.why:
            rest.append({"kernel": n, "value": found.value, "why": found.why})
    seconds = round(time.process_time() - start, 2)
    return {"kernels": len(kernels), "shown": dict(counts), "rest": rest, "refused": refused, "seconds": seconds}


def faults(graph: Graph, kernels: Kernels, each: int, seed: str) -> dict[str, dict[str, Any]]:
    """Of each kind of fault how often it was tried, and by which law refused."""
    out: dict[str, dict[str, Any]] = {}
    for kind, edit in EDITS.items():
        row: dict[str, Any] = {"tried": 0, "laws": {}, "accepted": [], "example": ""}
        names = sorted(kernels)
        random.Random(f"{seed} {kind}").shuffle(names)
        for n in names:
            kernel, text = kernels[n]
            wrong = edit(text)
            if wrong is None or not each - row["tried"] > 0:
                continue
            row["tried"] += 1
            try:
                row["accepted"].append(f"{seed} {n}: {prove(graph, kernel, wrong).value}")
            except LawError as e:
                row["laws"][e.law] = row["laws"].get(e.law, 0) + 1
                row["example"] = row["example"] or " ".join(str(e).split())[:200]
        out[kind] = row
    return out


def row_of(name: str, each: int) -> dict[str, Any] | None:
    """A model's row; None where the model is not to be had."""
    with tempfile.TemporaryDirectory() as folder:
        found = kernels_of(name, Path(folder))
        if found is None:
            return None
        graph, kernels = found
        return {"model": name, "target": TRITON, **proved(graph, kernels), "faults": faults(graph, kernels, each, name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--each", type=int, default=2, help="kernels of a model that get each kind of fault")
    args = parser.parse_args()
    rows = {r["model"]: r for r in record.read("kernels_proved")}
    for name in args.models:
        row = row_of(name, args.each)
        if row is None:
            print(f"{name}: skipped, the folder of exported models is not beside the checkout", file=sys.stderr)
            continue
        rows[name] = row
        print(summary(row), flush=True)
        record.write("kernels_proved", list(rows.values()), **{TRITON: totals(list(rows.values()))})
    return int(any(r["refused"] or any(f["accepted"] for f in r["faults"].values()) for r in rows.values()))


def summary(row: dict[str, Any]) -> str:
    """One model in a line, and what was accepted."""
    tried = sum(f["tried"] for f in row["faults"].values())
    wrong = [a for f in row["faults"].values() for a in f["accepted"]]
    text = f"{row['model']} on {row['target']}: {row['kernels']} kernels, {row['shown']}, {row['seconds']} s"
    text += f"; {tried - len(wrong)} of {tried} faults refused"
    accepted = [f"  accepted {kind}: {a}" for kind, f in row["faults"].items() for a in f["accepted"]]
    return "\n".join([text, *(f"  refused {r}" for r in row["refused"]), *accepted])


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the models."""
    kinds = [f for r in rows for f in r["faults"].items()]
    return {
        "models": len(rows), "kernels": sum(r["kernels"] for r in rows),
        "normal_form": sum(r["shown"].get(FORM, 0) for r in rows), "interpreted": sum(r["shown"].get(TRIAL, 0) for r in rows),
        "compared": sum(r["shown"].get(COMPARED, 0) for r in rows),
        "refused_good": sum(len(r["refused"]) for r in rows), "kinds": len({k for k, f in kinds if f["tried"]}),
        "faults": sum(f["tried"] for _, f in kinds), "accepted": sum(len(f["accepted"]) for _, f in kinds),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
