"""What the fuzzing of loaders calls: bytes to a model file or a build directory, to everything that reads it from there.

A case is in order if it is read, or refused with a `TapestryError`. Everything else is a defect: another exception, a graph
that breaks a law after it was lifted, a file that is opened or made outside the case's folder.

- A *model* case is the bytes of the .onnx file. It lies beside `w.bin`, 24 bytes of external data.
- A *build* case is two bytes and a file: which good build (`BASES`, modulo their number), which of its files is replaced
  (`FILES`, modulo; with or without making the hashes right again), and what it is replaced by.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tapestry
from bench.support.record import ROOT
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import BuildError, LawError, TapestryError, refusing
from tapestry.ir import laws
from tapestry.lift import lift
from tapestry.lift.examine import examine
from tapestry.rewrites.core.driver import simplify
from tapestry.viz.explain import explain

EXTERNAL = np.arange(6, dtype=np.float32).tobytes()
FILES = (
    ("plan.json", True), ("plan.json", True), ("certificate.json", False), ("constants.bin", True), ("kernel", True),
    ("plan.json", False),
)  # fmt: skip
BASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mlp", {"devices": 2}), ("conv_chain", {"mesh": "2x2"}), ("opaques", {"devices": 3}),
    ("norms", {"devices": 2}), ("mlp", {"devices": 2, "stages": 2, "micro_batches": 1}),
    ("halves", {"devices": 2}), ("attention", {"devices": 2}),
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Defect(Exception):
    """What a loader must not do."""


def model_case(data: bytes, folder: Path) -> str:
    """Read bytes as a model; returns "read" or why it was refused.

    Raises:
        Defect: it lifted to a graph that breaks a law.
    """
    (folder / "w.bin").write_bytes(EXTERNAL)
    path = folder / "m.onnx"
    path.write_bytes(data)
    try:
        if data[-1:] < b"\x10":
            examine(path)
        graph = lift(path).graph
    except LawError as e:
        raise Defect(f"lifting breaks a law: {e}") from e
    except TapestryError as e:
        return refused(e)
    for g in (graph, simplify(graph)):
        try:
            laws.check(g)
        except LawError as e:
            raise Defect(f"law '{e.law}' broken by what was lifted: {e}") from e
    return "read"


def refused(e: TapestryError) -> str:
    """Why, or, where only the last net caught it, what it caught."""
    cause = e.__cause__
    if cause is None or isinstance(cause, TapestryError):
        return e.what
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if "/tapestry/" in f.filename]
    return f"net: {type(cause).__name__} {Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "net"


def build_case(data: bytes, folder: Path) -> str:
    """Read a build directory of which one file was replaced; returns "read" or why it was refused."""
    place = folder / "b"
    shutil.rmtree(place, ignore_errors=True)
    number, which = (data + b"\0\0")[:2]
    shutil.copytree(base(number % len(BASES)), place)
    name, signed = FILES[which % len(FILES)]
    kernels = sorted(p for p in (place / "kernels").iterdir()) if (place / "kernels").is_dir() else []
    (kernels[0] if name == "kernel" and kernels else place / name.replace("kernel", "plan.json")).write_bytes(data[2:])
    if signed:
        sign(place)
    try:
        build, _, _ = verify_build(place)
        tapestry.load(place)
        with refusing(BuildError, "explain", str(place), ""):
            explain(build)
    except TapestryError as e:
        return e.what
    return "read"


def sign(place: Path) -> None:
    """Make every hash of a build directory right again, as one who wants to deceive would."""
    body = json.loads((place / "certificate.json").read_text())
    body.pop("sha256")
    body["files"] = {n: hashlib.sha256((place / n).read_bytes()).hexdigest() for n in body["files"]}
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (place / "certificate.json").write_text(json.dumps(body, indent=1, sort_keys=True))


_made: dict[int, Path] = {}


def base(number: int) -> Path:
    """A good build directory."""
    if number not in _made:
        models = small_models()
        name, options = BASES[number]
        folder = Path(models.FOLDER) / f"base{number}"
        tapestry.compile(models.save(name), time_limit=5.0, **options).save(folder)
        _made[number] = folder
    return _made[number]


def small_models() -> Any:
    """The models of the tests."""
    from tests.support import small_models

    return small_models


def build_seeds() -> list[bytes]:
    """Every base with its own files."""
    out: list[bytes] = []
    for number in range(len(BASES)):
        plan = json.loads((base(number) / "plan.json").read_text())
        plan |= {"report": {}, "model": "model.onnx"}
        small = json.dumps(plan, separators=(",", ":")).encode()
        out += [bytes([number, 0]) + small, bytes([number, 5]) + (base(number) / "plan.json").read_bytes()]
        out.append(bytes([number, 2]) + (base(number) / "certificate.json").read_bytes())
        out.append(bytes([number, 3]) + (base(number) / "constants.bin").read_bytes())
    return out


def model_seeds(folder: Path) -> list[bytes]:
    """Models of the tests, hostile ones, and small random ones of all families of operators."""
    models = small_models()
    from tests.fuzz.generate.random_model import random_model
    from tests.support.faults import hostile_cases

    out = [models.save(name).read_bytes() for name in models.MODELS]
    for k, make in enumerate(hostile_cases.MODELS.values()):
        (place := folder / f"hostile{k}").mkdir()
        path = make(place)
        if str(path).startswith(str(folder)) and "\0" not in str(path) and path.is_file() and path.stat().st_size < 1 << 16:
            out.append(path.read_bytes())
    for seed in range(150):
        out.append(random_model(f"loader {seed}", 2).save(folder / "random.onnx").read_bytes())
    return [data for data in out if len(data) < 1 << 15]


TARGETS: dict[str, Callable[[bytes, Path], str]] = {"model": model_case, "build": build_case}


def guard(folder: Path) -> list[str]:
    """A list to which every path is added that this process opens for writing, or makes, outside a folder; and every file that
    it reads elsewhere but for its own program."""
    seen: list[str] = []
    places = [folder.resolve(), Path(tapestry.__file__).parent, small_models().FOLDER, Path(np.__file__).parent.parent, ROOT]
    ours = [*map(str, places), sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/usr/lib", "/lib"]
    ours += ["/dev/null", "/etc/localtime", "/etc/os-release"]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir", "os.rename", "os.symlink", "os.link"):
            return
        path = args[0] if event in ("open", "os.mkdir") else args[1]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        text = os.fsdecode(path)
        absolute = text.startswith("/")
        if ".." in text.split("/") or (absolute and not any(text.startswith(p) for p in ours)):
            seen.append(f"{event} {text}")

    sys.addaudithook(hook)
    return seen
