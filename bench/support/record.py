"""Where benchmark results go: one JSON each, with its machine, commit, day, and a hash over the sources it depends on."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("BENCH_RESULTS", ROOT / "bench" / "results"))
WORK = ROOT / "build" / "bench"
SHARED = ROOT.parent / "shared" / "models"  # exported models, an optional folder beside the checkout

Row = dict[str, Any]
_TOP = ("*.py", "ir", "lift", "rewrites", "plan", "onnx_eval", "verify")
_RUN = (*_TOP, "codegen/torch_cpu", "runtime", "build", "cli")
ROOMS: dict[str, tuple[str, ...]] = {  # of the headline's results, in tapestry/; any other one depends on the whole package
    "communication": (*_TOP, "interop", "sharding"), "mutations": (*_TOP, "build", "codegen/torch_cpu"), "cpu": _RUN,
    "conformance": _RUN, "faults": _RUN, "models": (*_RUN, "codegen"), "scale": (*_TOP, "build", "cli", "codegen/torch_cpu"),
    "clock": _RUN,
}  # fmt: skip
_SOURCES = (".py", ".c", ".h", ".tap", ".js", ".css", ".html")
_PLUMBING = {f"bench/support/{n}.py" for n in ("record", "headline")}  # where a figure goes, not what it is
_IMPORT = re.compile(r"^\s*from ((?:bench|tests|examples)[\w.]*) import (\([^)]*\)|[^\n#]*)", re.MULTILINE)


def tree() -> dict[str, str]:
    """The hash of every source that a result may depend on, by path."""
    files = (p for d in ("tapestry", "bench", "tests/support", "examples") for p in sorted((ROOT / d).rglob("*")))
    return {str(p.relative_to(ROOT)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.suffix in _SOURCES}


_AT_START = tree()


def sources(name: str, hashes: dict[str, str]) -> list[str]:
    """The files that a result depends on: its rooms, its benchmark, and what that imports beside the package."""
    rooms = re.compile("|".join("tapestry/" + r.replace("*.py", "[^/]*$") for r in ROOMS.get(name, ("",))))
    found = {f for f in hashes if rooms.match(f)}
    benches = [f for f in hashes if f.startswith("bench/")]
    todo = [f for f in benches if Path(f).stem == name] or benches
    while todo:
        if (at := todo.pop()) not in found | _PLUMBING:
            found.add(at)
            for module, names in _IMPORT.findall((ROOT / at).read_text()):
                base = module.replace(".", "/")
                todo += [f for f in (f"{base}.py", *(f"{base}/{n}.py" for n in re.findall(r"\w+", names))) if f in hashes]
    return sorted(found)


def code(name: str, hashes: Row | None = None) -> str:
    """The hash over the sources of a result, as they are now."""
    hashes = hashes or tree()
    return hashlib.sha256("".join(f"{f} {hashes[f]}\n" for f in sources(name, hashes)).encode()).hexdigest()


@cache
def commit(name: str) -> str:
    """HEAD, with ``+changes`` where the sources of a result are not as they are there; empty outside of a repository."""
    said = ""
    paths = (*(f":(glob)tapestry/{r}" for r in ROOMS.get(name, ("",))), *sources(name, _AT_START))
    for words in (("rev-parse", "--short=8", "HEAD"), ("--no-optional-locks", "status", "--porcelain", "--", *paths)):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        said += "+changes" * bool(done.stdout) if said else done.stdout.strip()
    return said


def stamp(name: str) -> Row:
    """Of a result that this process measures; no hash (and so of no commit's code) where its sources changed meanwhile."""
    now = code(name)
    return {"commit": commit(name), "date": str(datetime.date.today()), "code": now if now == code(name, _AT_START) else ""}


def machine() -> Row:
    """What the numbers were measured on."""
    packages = {p: version(p) for p in ("torch", "onnx", "onnxruntime", "highspy", "islpy", "numpy")}
    return {"cores": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version(), **packages}


def read(name: str) -> list[Row]:
    """The rows of an earlier run, each with what it was measured on: it stays with those that are written again."""
    of = {k: read_more(name, k, "") for k in ("commit", "date", "code")}
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
    mark = stamp(name)
    earlier = [not mark["code"] or r.get("measured", mark)["code"] != mark["code"] for r in rows]
    kept = [r if old else {k: v for k, v in r.items() if k != "measured"} for r, old in zip(rows, earlier, strict=True)]
    document = {**mark, "machine": machine(), **more, "rows": kept}
    part = path.with_suffix(".part")  # a call that ends in the middle leaves what there was
    part.write_text(json.dumps(document, indent=1).replace(f"{ROOT}/", "") + "\n")  # whose folder it was says nothing
    part.replace(path)
    return path
