"""Kernels proved from their source text, and faults put into the text, each of which must be refused.

    .venv/bin/python -m bench kernels_proved [--models NAME …] [--each 2]

Models are compiled for two devices and `triton:sm90`; every kernel's source is proved against its operation: what it writes and
reads, and its value. Then every kind of fault of `tests/support/faults/kernel_edits.py` is put into `--each` kernels of it.
Rows of models that are not asked for stay as they are in bench/results/kernels_proved.json. Exits 1 if a kernel is refused or
a fault is not.
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
from tapestry.codegen.kernel_sources import named_kernels
from tapestry.codegen.kernel_texts import kernel_text_of
from tapestry.errors import LawError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel
from tapestry.verify.kernels.kernel_proofs import FORM, TRIAL, prove
from tapestry.verify.kernels.kernel_text import KernelText
from tests.support.faults.kernel_edits import EDITS

MODELS = (*EXPORTS, *LIGHT)
Kernels = dict[str, tuple[Kernel, KernelText]]


def kernels_of(name: str, folder: Path) -> tuple[Graph, Kernels] | None:
    """The graph of a model and its kernels' texts; None where the model is not to be had."""
    path = materialize(name, folder)
    if path is None:
        return None
    build = tapestry.compile(path, mesh="2", shapes=EXPORTS.get(name, {}), target="triton:sm90", time_limit=5.0).build
    graph = build.plan.graph
    made = named_kernels(graph, build.program, build.target, build.precision, build.knobs)
    return graph, {n: (kernel, kernel_text_of(graph, kernel, one, n, one.source)) for n, (kernel, one) in made.items()}


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
                found = prove(graph, kernel, wrong)
                row["accepted"].append(f"{seed} {n}: {found.value}")
            except LawError as e:
                row["laws"][e.law] = row["laws"].get(e.law, 0) + 1
                row["example"] = row["example"] or " ".join(str(e).split())[:200]
        out[kind] = row
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--each", type=int, default=2, help="kernels of a model that get each kind of fault")
    args = parser.parse_args()
    rows = {r["model"]: r for r in record.read("kernels_proved")}
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            found = kernels_of(name, Path(folder))
            if found is None:
                print(f"{name}: skipped, the folder of exported models is not beside the checkout", file=sys.stderr)
                continue
            rows[name] = {"model": name, **proved(*found), "faults": faults(*found, args.each, name)}
        print(summary(rows[name]), flush=True)
        record.write("kernels_proved", list(rows.values()), **totals(list(rows.values())))
    return int(any(r["refused"] or any(f["accepted"] for f in r["faults"].values()) for r in rows.values()))


def summary(row: dict[str, Any]) -> str:
    """One model in a line, and what was accepted."""
    tried = sum(f["tried"] for f in row["faults"].values())
    wrong = [a for f in row["faults"].values() for a in f["accepted"]]
    text = f"{row['model']}: {row['kernels']} kernels, {row['shown']}, {row['seconds']} s"
    text += f"; {tried - len(wrong)} of {tried} faults refused"
    accepted = [f"  accepted {kind}: {a}" for kind, f in row["faults"].items() for a in f["accepted"]]
    return "\n".join([text, *(f"  refused {r}" for r in row["refused"]), *accepted])


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the models."""
    kinds = [f for r in rows for f in r["faults"].items()]
    return {
        "models": len(rows), "kernels": sum(r["kernels"] for r in rows),
        "normal_form": sum(r["shown"].get(FORM, 0) for r in rows), "interpreted": sum(r["shown"].get(TRIAL, 0) for r in rows),
        "refused_good": sum(len(r["refused"]) for r in rows), "kinds": len({k for k, f in kinds if f["tried"]}),
        "faults": sum(f["tried"] for _, f in kinds), "accepted": sum(len(f["accepted"]) for _, f in kinds),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
