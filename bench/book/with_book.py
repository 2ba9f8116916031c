"""Plans with the book of equations and without: processor seconds of the search, and the objective.

    .venv/bin/python -m bench with_book [--only NAME …] [--mesh MESH …]

A row is one model on one mesh, searched twice in one process from one lifted graph: without the book, then with it (as by
``--rules algebra``). Models are the exports of shared/models without their weights, ResNet-50 of the onnx package, and the
encoders of `bench compiler`; meshes are 2 and 4 processes of one machine, 2x4 of them, and 8 and 8x8 H100. Rows that are not
measured anew stay. Writes bench/results/with_book.json; exits 1 if a plan is worse with the book, or a search takes more than
twice as long.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from bench.correctness.models import EXPORTS
from bench.support import encoder, record
from bench.support.record import Row
from examples import light
from tapestry.compiler import pipeline
from tapestry.compiler.pass_runner import Runner
from tapestry.frontends.choices import Choices, opened_source
from tapestry.frontends.choices import options as options_of
from tapestry.rewrites.core.rule import BOOK

FOLDER = record.WORK / "with_book"
LONG: dict[str, Any] = {"s72": 8, "s43": 8, "s53": 4096}
LLAMAS = {"llama_7b": LONG, "llama_70b": LONG}
ENCODERS = {f"encoder {n}": n for n in (6, 12, 24, 48)}
MESHES = {"2": "cpu", "2x2": "cpu", "2x4": "cpu", "8": "h100", "8x8": "h100"}
MOST, WORSE = 2.0, 1 + 1e-9  # times the seconds without the book; of the objective


def cases() -> list[tuple[str, str]]:
    """Every model with every mesh that it is planned on."""
    found = [(name, mesh) for name in EXPORTS for mesh in ("2", "2x2", "8")]
    found += [(name, mesh) for name in LLAMAS for mesh in ("8", "8x8")]
    return found + [(name, "2x4") for name in ("light_resnet50", "bert_base", *ENCODERS)]


def written(name: str) -> Path | None:
    """The model's file; None where it is not to be had."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if name in ENCODERS:
        return encoder.write(ENCODERS[name], FOLDER)
    if name.startswith("light_"):
        return light.write(name.removeprefix("light_"), FOLDER)
    source, path = record.SHARED / f"{name}.onnx.gz", FOLDER / f"{name}.onnx"
    if not source.is_file():
        return None
    path.write_bytes(gzip.decompress(source.read_bytes()))
    return path


def lifted(name: str, path: Path, mesh: str) -> tuple[Runner, pipeline.Options]:
    """Everything before the search."""
    shapes = LLAMAS.get(name) or EXPORTS.get(name, {})
    weights = name.startswith(("light", "encoder"))
    choices: dict[str, Any] = {"mesh": mesh, "topology": MESHES[mesh], "weights": weights, "shapes": shapes}
    options = options_of(opened_source(path), cast(Choices, choices))
    return pipeline.begun(options, lambda phase, name: None), options


def searched(runner: Runner, options: pipeline.Options, rules: Sequence[Path]) -> tuple[Runner, float]:
    """A search with some rules, and its processor seconds."""
    runner = replace(runner, at=runner.at.made(options=replace(options, rules=rules)))
    start = time.process_time()
    pipeline.searched(runner, options)
    return runner, time.process_time() - start


def measure(name: str, path: Path, mesh: str) -> Row:
    """One model on one mesh."""
    begun, options = lifted(name, path, mesh)
    (_, before), (runner, after) = sides = [searched(begun, options, rules) for rules in ((), (Path(BOOK),))]
    old, new = (r.at.plan.objective for r, _ in sides)
    equations = [t.data() for t in runner.at.planned.scope.equations]
    return {
        "model": name, "mesh": mesh, "topology": MESHES[mesh], "without": {"objective_s": old, "search_cpu_s": before},
        "with": {"objective_s": new, "search_cpu_s": after}, "times": after / before, "better": old / new,
        "equations": equations,
    }  # fmt: skip


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="only these models")
    parser.add_argument("--mesh", action="append", choices=MESHES, help="only these meshes")
    args = parser.parse_args()
    rows = list[Row]()
    searched(*lifted("encoder 6", encoder.write(6, FOLDER), "2"), (Path(BOOK),))  # what is imported and made once is no model's
    for name, mesh in cases():
        if (args.only and name not in args.only) or (args.mesh and mesh not in args.mesh):
            continue
        path = written(name)
        if path is None:
            print(f"{name}: skipped, the folder of exported models is not beside the checkout")
            continue
        rows.append(measure(name, path, mesh))
        record.write("with_book", record.merged("with_book", rows[-1:], ("model", "mesh")))
    table = Table(title="Without the book of equations, and with it", title_justify="left")
    for c in ("model", "mesh", "search, CPU s", "times", "objective ms", "better", "equations taken"):
        table.add_column(c, justify="left" if c in ("model", "equations taken") else "right")
    for r in rows:
        seconds, ms = (
            f"{r['without'][k] * u:.4g} → {r['with'][k] * u:.4g}" for k, u in (("search_cpu_s", 1), ("objective_s", 1e3))
        )
        taken = "; ".join(e["equations"] for e in r["equations"] if e["taken"])
        table.add_row(r["model"], r["mesh"], seconds, f"{r['times']:.2f}", ms, f"{r['better']:.4f}", taken)
    Console(width=None if sys.stdout.isatty() else 170, highlight=False).print(table)
    worse = [f"{r['model']} {r['mesh']}" for r in rows if r["with"]["objective_s"] > r["without"]["objective_s"] * WORSE]
    longer = [f"{r['model']} {r['mesh']}" for r in rows if r["times"] > MOST]
    print(f"{len(rows)} rows; worse: {', '.join(worse) or 'none'}; over {MOST:g} times as long: {', '.join(longer) or 'none'}")
    return 1 if worse or longer else 0


if __name__ == "__main__":
    sys.exit(main())
