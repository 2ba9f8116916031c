"""Equations that the book does not have, whose left-hand sides occur in models: mined, proved, priced where they occur.

    .venv/bin/python -m bench discover_mined FOLDER

FOLDER has models, NAME.onnx (as `bench/exporters/corpus_exports.py` writes them) or NAME.tap (their simplified graphs as IR
text). A row is one equation that is proved for all sizes, and on instances, that no three equations of the book in a row derive
in either direction, with the models where it saves most, by price on one device. Writes bench/results/discover_mined.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.correctness.models import EXPORTS
from bench.support import record
from tapestry.ir.graph import Graph
from tapestry.ir.syntax.parser import parse
from tapestry.lift import lift
from tapestry.plan.book.mined_discovery import MinedDiscovery
from tapestry.plan.topology import parse_mesh, topology
from tapestry.rewrites.core.driver import simplify


def corpus(folder: Path) -> Iterator[tuple[str, Graph]]:
    """All graphs of a folder, simplified."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".tap":
            yield path.stem, parse(path.read_text(encoding="utf-8"), path.name)
        elif path.suffix == ".onnx" and not path.with_suffix(".tap").is_file():
            yield path.stem, simplify(lift(path, EXPORTS.get(path.stem, {}), weights=False).graph)


def main() -> int:
    """Search, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    start, graphs = time.process_time(), dict(corpus(args.folder))
    search = MinedDiscovery(graphs, topology(parse_mesh("1"), "cpu"))
    table = Table(title="Proved equations out of models that three of the book in a row do not derive", title_justify="left")
    for c in ("equation", "saves most on", "places", "µs before", "after"):
        table.add_column(c, justify="right" if c in ("places", "µs before", "after") else "left")
    rows: list[record.Row] = []
    for f in search.found():  # written one by one: a search that is stopped leaves what it found
        best = f.best
        assert best is not None
        table.add_row(f.title, best.model, str(best.places), f"{best.before * 1e6:.1f}", f"{best.after * 1e6:.1f}")
        rules = [{"where": r.where, "proof": r.proof, "rounding": r.rounding, "shown": dict(r.shown),
                  "saves": [asdict(s) for s in r.savings], "text": r.text.text} for r in f.rules]  # fmt: skip
        rows.append({"equation": f.title, "best": asdict(best), "points": dict(f.points), "rules": rules})
        rows.sort(key=lambda r: r["best"]["after"] - r["best"]["before"])
        more = {"counts": dict(search.counts), "corpus": list(graphs), "cpu_s": time.process_time() - start}
        record.write("discover_mined", rows, **more)
        print(f"{f.title}: {best.model}, {best.before * 1e6:.1f} to {best.after * 1e6:.1f} µs", flush=True)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    print(f"{len(rows)} equations; " + ", ".join(f"{n} {what}" for what, n in search.counts.items()))
    record.write("discover_mined", rows, counts=dict(search.counts), corpus=list(graphs), cpu_s=time.process_time() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
