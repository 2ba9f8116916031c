"""Long campaigns: chunks of cases in processes of their own, several at a time, each logged when it is done, so that a series
goes on where it was ended. A chunk that dies is a failure like any other."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapestry import flags
from tapestry.errors import TapestryError
from tests.fuzz.campaign import PLANS
from tests.support.paths import ROOT

CHUNK = 250  # cases of one process: what is remembered between cases takes memory
PATIENCE = 3600.0  # seconds for a chunk
Document = dict[str, Any]
COUNTED = ("refused", "families", "operators", "rules", "via", "meshes", "free_cells")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What is to be done.

    Attributes:
        log: a file of one JSON line per chunk; chunks of the same seed in it are not run again.
        limit: seconds after which no chunk is begun.
    """

    seed: int
    first: int
    count: int
    jobs: int
    log: Path | None = None
    limit: float = float("inf")
    output: Path | None = None
    chunk: int = CHUNK


def run(s: Series, progress: Callable[[int, int], None] = lambda done, total: None) -> Document:
    """Run what the log lacks; the document of all chunks together, as one campaign's.

    Raises:
        TapestryError: the log is another file.
    """
    if s.count < 1 or s.first < 0 or s.jobs < 1:
        raise TapestryError(f"cases {s.first} to {s.first + s.count - 1} in {s.jobs} processes", where="fuzz", hint="from 0 on")
    known, lock, began = {(d["first"], d["count"]): d for d in _read(s)}, threading.Lock(), time.monotonic()
    done = [known[c] for c in _chunks(s) if c in known]

    def one(chunk: tuple[int, int]) -> None:
        if time.monotonic() - began > s.limit:
            return
        found = _chunk(s, *chunk)
        with lock:
            done.append(found)
            if s.log:
                with s.log.open("a") as f:
                    f.write(json.dumps(found) + "\n")
            progress(sum(d["cases"] for d in done), s.count)

    with ThreadPoolExecutor(s.jobs) as pool:
        list(pool.map(one, [c for c in _chunks(s) if c not in known]))
    return _together(s, done, time.monotonic() - began)


def _chunks(s: Series) -> Iterator[tuple[int, int]]:
    """(first case, number of cases), each of whole models."""
    size = max(PLANS, s.chunk // PLANS * PLANS)
    for first in range(s.first, s.first + s.count, size):
        yield first, min(size, s.first + s.count - first)


def _read(s: Series) -> list[Document]:
    if s.log is None or not s.log.exists():
        return []
    try:
        found = [json.loads(line) for line in s.log.read_text().splitlines() if line.endswith("}")]
        return [d for d in found if d["seed"] == s.seed]
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise TapestryError(f"not a log of a series: {e}", where=str(s.log), hint="another --log") from None


def _chunk(s: Series, first: int, count: int) -> Document:
    argv = [sys.executable, "-m", "tests.fuzz", "--seed", str(s.seed), "--first", str(first), "--count", str(count)]
    argv += ["--json", *(["--output", str(s.output)] if s.output else [])]
    done = None
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=flags.interpreted(), timeout=PATIENCE, cwd=ROOT)
        document: Document = json.loads(done.stdout)
        end = ""
    except subprocess.TimeoutExpired:
        document, end = {}, f"not done within {PATIENCE:g} s"
    except ValueError:
        document, end = {}, f"status {done.returncode}: {done.stderr[-2000:]}" if done else ""
    if "cases" not in document:
        row: Document = {
            "case": first,
            "seed": s.seed,
            "kind": "died",
            "what": "a process",
            "detail": end or str(document),
            "nodes": [],
        }
        document = {"cases": 0, "models": 0, "seconds": 0.0, "failures": [row]}
    return {"seed": s.seed, "first": first, "count": count, **document}


def _together(s: Series, done: list[Document], seconds: float) -> Document:
    """Sums; ``busy_seconds`` are those of all processes, ``seconds`` those of this call."""
    failures = [f for d in done for f in d["failures"]]
    out: Document = {
        "passed": not failures, "seed": s.seed, "first": s.first, "cases": sum(d["cases"] for d in done), "of": s.count,
        "models": sum(d["models"] for d in done), "seconds": round(seconds, 2),
        "busy_seconds": round(sum(d["seconds"] for d in done), 2), "failures": failures,
    }  # fmt: skip
    for key in COUNTED:
        total = Counter[str]()
        for d in done:
            total.update(d.get(key, {}))
        out[key] = dict(total.most_common())
    return out


def summary(document: Document) -> str:
    """One line of JSON."""
    kinds = Counter(f"{f['kind']}: {f['what']}" for f in document["failures"])
    keys = ("passed", "seed", "first", "cases", "of", "models", "seconds", "busy_seconds", "via")
    return json.dumps({**{k: document[k] for k in keys}, "refused": sum(document["refused"].values()), "failures": dict(kinds)})
