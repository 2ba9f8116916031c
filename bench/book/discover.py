"""Equations that the book does not have: found by their values, proved, and ranked by what they save on models.

    .venv/bin/python -m bench discover [--terms N] [--family NAME]

The corpus: the graphs of `bench.book.rule_graphs` and `bench.book.textbook_graphs`, and the exported models where their folder
is beside the checkout. A row is one equation that is proved for all sizes and ranks, and on instances, that no three equations
of the book in a row (without the chapter that came from here) derive, in either direction; with the graphs where it saves most
by price on one device. Writes bench/results/discover.json.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table

from bench.book import rule_graphs, textbook_graphs
from bench.correctness.models import EXPORTS
from bench.support import record
from tapestry.ir.graph import Graph
from tapestry.lift import lift
from tapestry.plan.topology import parse_mesh, topology
from tapestry.rewrites.core.driver import simplify
from tapestry.tools.rulebook.discovery import TERMS, Discovery
from tapestry.tools.rulebook.small_terms import FAMILIES

FOLDER = record.WORK / "discover"
CHAPTER = record.ROOT / "tapestry" / "rewrites" / "algebra" / "found.tap"  # of the book: what came from here, and is left out
MODELS = ("gpt2", "bert_base", "t5_small", "qwen3_tiny", "llama_tiny", "vit_base", "whisper_encoder", "convnext_tiny", "unet")


def corpus() -> Iterator[tuple[str, Graph]]:
    """All graphs, simplified."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for of in (rule_graphs.SEEN, rule_graphs.UNOPENED, textbook_graphs.GRAPHS):
        for name, make in of.items():
            path = FOLDER / f"{name}.onnx"
            onnx.save(make(), path)
            yield name, _lifted(path, {})
    for name in MODELS:
        packed = record.SHARED / f"{name}.onnx.gz"
        if packed.exists():
            path = FOLDER / f"{name}.onnx"
            path.write_bytes(gzip.decompress(packed.read_bytes()))
            yield name, _lifted(path, EXPORTS[name])


def _lifted(path: Path, shapes: dict[str, str]) -> Graph:
    return simplify(lift(path, shapes, weights=False).graph)


def main() -> int:
    """Search, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terms", type=int, default=TERMS, help="of a family, whose values are taken")
    parser.add_argument("--family", action="append", default=[], choices=[f.name for f in FAMILIES], help="only these")
    args = parser.parse_args()
    graphs, start = dict(corpus()), time.process_time()
    families = tuple(f for f in FAMILIES if not args.family or f.name in args.family)
    taken = frozenset(re.findall(r"^rule (\w+)", CHAPTER.read_text(encoding="utf-8"), re.MULTILINE))
    search = Discovery(graphs, topology(parse_mesh("1"), "cpu"), args.terms, families, taken)
    found = search.found()
    rows = [{"equation": f.title, "family": f.family, "saves": [asdict(s) for s in f.savings[:3]], "graphs": len(f.savings),
             "proof": f.proof, "shown": dict(f.shown), "rounding": f.rounding, "text": f.rule.text} for f in found]  # fmt: skip
    table = Table(title="Proved equations that three of the book in a row do not derive", title_justify="left")
    for c in ("equation", "family", "saves most on", "µs before", "after"):
        table.add_column(c, justify="right" if c in ("µs before", "after") else "left")
    for f in found:
        best = f.savings[0] if f.savings else None
        times = (f"{best.before * 1e6:.1f}", f"{best.after * 1e6:.1f}") if best else ("", "")
        table.add_row(f.title, f.family, best.model if best else "", *times)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    print(f"{len(found)} equations, {sum(bool(f.savings) for f in found)} of which save something on {len(graphs)} graphs; "
          + ", ".join(f"{n} {what}" for what, n in search.counts.items()))  # fmt: skip
    if not args.family and args.terms == TERMS:
        record.write("discover", rows, counts=dict(search.counts), corpus=list(graphs), cpu_s=time.process_time() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
