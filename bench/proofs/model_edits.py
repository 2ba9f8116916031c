"""Plans that are not their model's: edits that keep every law of a plan, signed again, each of which `verify` must refuse.

    .venv/bin/python -m bench model_edits [--models NAME …] [--only REGEX] [--each 1]

Builds of five models for two devices: exported ones (../shared/models, or --folder) and one of opaque nodes, loops and layouts
(`tests/support/faults/edited_model.py`). Every kind of edit is put into a build of each that has a place for it, everything
around it (program, kernels, report, hashes) is made anew, and `verify_build` must refuse it by a law and say where. Kinds of
`graph_edits_later` were written after the checker was finished and are counted apart, with those of `graph_edits_awkward`,
which show at infinities, NaN and huge numbers alone. Each build is verified untouched as well, beside one evaluation of its
model by onnxruntime. An edit that changes no value is not tried, and counted apart: proved by a normal form, or no difference
seen on random and awkward numbers. bench/results/model_edits.json keeps what was found for each model, so that they may be
asked in several calls; exits 1 if an edit was accepted.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tapestry
from bench.correctness.models import materialize
from bench.proofs.mutations import MODELS
from bench.support import record
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import TapestryError
from tapestry.runtime.feeds import random_feeds
from tapestry.verify import model_outputs
from tests.support.faults import edited_build, graph_edits
from tests.support.faults.edited_model import mixed
from tests.support.faults.graph_edits_awkward import ALL_EDITS

PLACES = 6
FOUR = ("llama_tiny", "bert_base", "resnet50", "t5_small")


def compiled(name: str, folder: Path | None, place: Path) -> Path:
    """A saved build of a model on two devices; without a folder of models it is written there first."""
    if name == "mixed":
        path = place / "mixed.onnx"
        path.write_bytes(mixed().SerializeToString())
        plan = tapestry.compile(path, devices=2, layouts=["y:0=2@d0"], topology="cpu", sharding=False)
    else:
        if folder is None and materialize(name, place) is None:
            raise SystemExit("the folder of exported models is not beside the checkout")
        folder = folder or place
        plan = tapestry.compile(folder / f"{name}.onnx", devices=2, shapes=MODELS[name], time_limit=5.0, topology="cpu")
    plan.save(place / name)
    return place / name


def timed(build: Path) -> dict[str, float]:
    """Processor seconds to verify a build, and of one evaluation of its model by onnxruntime, the session made and used."""
    start = time.process_time()
    found, _, evidence = verify_build(build)
    verified = time.process_time() - start
    feeds = random_feeds(found.plan.graph, 0)
    start = time.process_time()
    model_outputs.reference(Path(found.model), feeds)
    evaluated = time.process_time() - start
    return {"verify_s": verified, "onnxruntime_s": evaluated, "within": verified <= 3 * evaluated + 2, "evidence": evidence[0]}


def attempt(good: Path, edit: graph_edits.Edit, seed: str) -> tuple[str, str]:
    """What refused an edit and what it said; ("", "") where nothing did, ("none", "") where there is no place for it, ("same",
    how that is known) where it changes no value."""
    with tempfile.TemporaryDirectory() as name:
        e = edited_build.load(good, random.Random(seed))
        before = e.graph
        if not edit(e):
            return "none", ""
        if edited_build.proved_alike(before, e.graph) and before != e.graph:
            return "same", "proved: a maximum of what is no less already"
        if not edited_build.alters(before, e.graph):
            return "same", "not seen to change a value"
        try:
            edited_build.save(e, Path(name) / "b")
        except (AssertionError, KeyError, IndexError, ValueError, TapestryError) as reason:
            return "none", f"cannot be made: {reason}"[:200]
        try:
            verify_build(Path(name) / "b")
        except TapestryError as refused:
            law = getattr(refused, "law", type(refused).__name__)
            return law, " ".join(str(refused).split())[:300]
    return "", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*FOUR, "mixed"])
    parser.add_argument("--folder", type=Path, help="where MODEL.onnx are; else they are written with random weights")
    parser.add_argument("--only", default=".", help="edits whose names match")
    parser.add_argument("--missing", action="store_true", help="only what no earlier run has asked")
    parser.add_argument("--times", action="store_true", help="only the seconds, beside the edits of an earlier run")
    parser.add_argument("--each", type=int, default=1, help="places for each kind of edit in each model")
    args = parser.parse_args()
    done = {r["edit"]: r["models"] for r in record.read("model_edits")}
    times = record.read_more("model_edits", "models", dict[str, Any]())
    rows: list[dict[str, Any]] = [
        {"edit": k, "later": k not in graph_edits.EDITS, "models": done.get(k, {})} for k in ALL_EDITS
    ]
    with tempfile.TemporaryDirectory() as name:
        for model in args.models:
            good = compiled(model, args.folder, Path(name))
            times[model] = timed(good)
            print(model, {k: v for k, v in times[model].items() if k != "evidence"}, file=sys.stderr, flush=True)
            for row in (r for r in rows if not args.times and re.search(args.only, r["edit"])):
                if not (args.missing and model in row["models"]):
                    row["models"][model] = tried(row["edit"], ALL_EDITS[row["edit"]], model, good, args.each)
                    keep(rows, times)
            print(model, "refused, tried:", counts(rows, model), file=sys.stderr, flush=True)
    keep(rows, times)
    return report(rows, times)


def tried(kind: str, edit: graph_edits.Edit, model: str, good: Path, each: int) -> dict[str, Any]:
    """What became of one kind of edit in one model."""
    out: dict[str, Any] = {"tried": 0, "laws": {}, "accepted": 0, "said": "", "same": ""}
    for n in range(each):
        law, text = attempt(good, edit, f"{model} {kind} {n}")
        for again in range(PLACES):  # another place, where nothing changes in one
            if law == "same":
                law, text = attempt(good, edit, f"{model} {kind} {n} {again}")
        if law in ("none", "same"):
            out["same"] = text if law == "same" else out["same"]
            continue
        out["tried"] += 1
        if law:
            out["laws"][law] = out["laws"].get(law, 0) + 1
            out["said"] = out["said"] or text
        else:
            out["accepted"] += 1
    return out


def counts(rows: list[dict[str, Any]], *models: str) -> tuple[int, int]:
    """How many edits were refused, and how many tried; of some models, or of all."""
    found = [r for row in rows for m, r in row["models"].items() if not models or m in models]
    return sum(r["tried"] - r["accepted"] for r in found), sum(r["tried"] for r in found)


def keep(rows: list[dict[str, Any]], times: dict[str, Any]) -> None:
    """Write down what is known."""
    (refused, tried), later = counts(rows), [r for r in rows if r["later"]]
    sums = {"kinds": len(rows), "later": len(later), "tried": tried, "refused": refused}
    record.write("model_edits", rows, models=times, **sums, never=[r["edit"] for r in rows if not counts([r])[1]])


def report(rows: list[dict[str, Any]], times: dict[str, Any]) -> int:
    """Say what was refused."""
    (refused, tried), later = counts(rows), [r for r in rows if r["later"]]
    wrong = [(r["edit"], m) for r in rows for m, x in r["models"].items() if x["accepted"]]
    never = [r["edit"] for r in rows if not counts([r])[1]]
    print(f"{len(rows)} kinds, {refused} of {tried} edits refused; of the {len(later)} kinds written later {counts(later)}")
    alike = [(r["edit"], m, x["same"]) for r in rows for m, x in r["models"].items() if x.get("same")]
    print(f"changed no value: {len([a for a in alike if 'proved' in a[2]])} proved, {len(alike)} in all")
    print(f"accepted: {wrong or 'none'}; never: {never or 'none'}")
    for model, t in times.items():
        print(f"{model}: verify {t['verify_s']:.2f} s, onnxruntime {t['onnxruntime_s']:.2f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
