"""Where benchmark results go: one JSON each, with its machine, commit and day."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
WORK = ROOT / "build" / "bench"
SHARED = ROOT.parent / "shared" / "models"  # exported models, an optional folder beside the checkout

Row = dict[str, Any]
SOURCES = ("tapestry", "bench", "tests/support", "examples")


@cache
def commit() -> str:
    """HEAD, with ``+changes`` where sources are not as they are there; empty outside of a repository."""
    said = ""
    for words in (("rev-parse", "--short=8", "HEAD"), ("--no-optional-locks", "status", "--porcelain", "--", *SOURCES)):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        changes = [x for x in done.stdout.splitlines() if "bench/results/" not in x]
        said += "+changes" * bool(changes) if said else done.stdout.strip()
    return said


def stamp() -> Row:
    """Of a result that this process measures."""
    return {"commit": commit(), "date": str(datetime.date.today())}


def machine() -> Row:
    """What the numbers were measured on."""
    packages = {p: version(p) for p in ("torch", "onnx", "onnxruntime", "highspy", "islpy", "numpy")}
    return {"cores": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version(), **packages}


def read(name: str) -> list[Row]:
    """The rows of an earlier run, each with what it was measured on: it stays with those that are written again."""
    of = {k: read_more(name, k, "") for k in ("commit", "date")}
    return [{"measured": of, **r} for r in read_more(name, "rows", [])]


def read_more(name: str, key: str, otherwise: Any) -> Any:
    """What an earlier run wrote under a key."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()).get(key, otherwise) if path.is_file() else otherwise


def merged(name: str, rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """The rows of an earlier run with those of this one in their places; ``keys`` tell rows apart, new ones come last."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(k, "") for k in keys)

    new = {key(r): r for r in rows}
    return [new.pop(key(r), r) for r in read(name)] + list(new.values())


def write(name: str, rows: Sequence[Row], **more: Any) -> Path:
    """Write ``bench/results/NAME.json``."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    mark = stamp()
    earlier = [r.get("measured", mark)["commit"] != mark["commit"] for r in rows]
    kept = [r if old else {k: v for k, v in r.items() if k != "measured"} for r, old in zip(rows, earlier, strict=True)]
    document = {**mark, "machine": machine(), **more, "rows": kept}
    part = path.with_suffix(".part")  # a call that ends in the middle leaves what there was
    part.write_text(json.dumps(document, indent=1).replace(f"{ROOT}/", "") + "\n")  # whose folder it was says nothing
    part.replace(path)
    return path
