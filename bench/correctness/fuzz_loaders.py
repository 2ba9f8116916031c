"""Coverage-guided fuzzing of what reads files: models (`--loader model`) and build directories (`--loader build`).

    pip install atheris==3.0.0          # beside the package; it has wheels for Linux
    python -m bench fuzz_loaders --loader model --minutes 30
    python -m bench fuzz_loaders --loader model --replay build/fuzz-loaders/model/found/CASE

libFuzzer (through atheris) sees the branches of Tapestry and of onnx_ir's and onnxscript's passes, and mutates bytes as well as
fields of protobufs and values of JSON documents. What counts: any exception but a `TapestryError`, a graph that breaks a law, a
file opened or made elsewhere, the death of the process, 20 seconds or 2 GB for one case. An exception is noted and the fuzzing
goes on; after a death, a hang or too much memory the case is tried once more alone (caches grow over many cases), and the
fuzzing starts again. Writes bench/results/loaders.json; exits 1 if anything was found.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pkgutil
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from bench.support import record

SECONDS, MEGABYTES = 20, 2048
GENERATION = 300  # seconds after which the process is replaced: what is remembered between cases takes memory
LONGEST = 1 << 16
INSTRUMENTED = ["tapestry", "onnx_ir", "onnxscript.optimizer"]
SKIPPED = (
    "tapestry.cli", "tests.fuzz", "tapestry.launch", "tapestry.runtime.__main__",
    "tapestry.codegen.triton.run.interpreter",
)  # fmt: skip


def targets() -> Any:
    """The module of the cases, with all that they use imported."""
    import tapestry

    for found in pkgutil.walk_packages(tapestry.__path__, "tapestry."):
        if not found.name.startswith(SKIPPED):
            importlib.import_module(found.name)
    return importlib.import_module("loader_targets")


# one process that fuzzes


def child(loader: str, work: Path, seconds: int) -> None:
    """Fuzz until the time is over or the process dies."""
    import atheris  # pyright: ignore[reportMissingImports]

    from bench.correctness.loader_mutators import MUTATORS

    with atheris.instrument_imports(include=INSTRUMENTED):
        module = targets()
    mutate, case = MUTATORS[loader], module.TARGETS[loader]
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=work))
    if loader == "build":
        for number in range(len(module.BASES)):
            module.base(number)
    case(b"", folder)  # what is imported or opened once is not a case's doing
    seen = module.guard(folder)

    def one(data: bytes) -> None:
        seen.clear()
        try:
            ends = case(data, folder)
            if seen:
                raise module.Defect(f"outside the folder: {seen[0]}")
            if ends.startswith("net"):
                keep(data, work / "netted", ends)
        except Exception as e:
            note(e, data, work / "found")

    def change(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        made = mutate(data, rng) if rng.random() < 0.8 else None
        return atheris.Mutate(data, most) if made is None or len(made) > most else made

    flags = [
        f"-max_total_time={seconds}", f"-timeout={2 * SECONDS}", f"-rss_limit_mb={MEGABYTES}", f"-max_len={LONGEST}",
        "-len_control=0", f"-artifact_prefix={work}/fatal/", "-print_final_stats=1", "-reload=0",
        f"-seed={int.from_bytes(os.urandom(3), 'little') + 1}",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *flags, str(work / "corpus")], one, custom_mutator=change)
    atheris.Fuzz()


def note(e: Exception, data: bytes, place: Path) -> None:
    """Keep the first case of each kind of defect."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/tapestry/" in f.filename and "/bench/" not in f.filename]
    at = f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "nowhere"
    text = re.sub(r"'[^']*'|\d+", "", str(e))[:60] if type(e).__name__ in ("Defect", "AssertionError") else ""
    name = keep(data, place, f"{type(e).__name__}-{at}-{text}")
    (place / f"{name}.txt").write_text("".join(traceback.format_exception(e))[-6000:])


def keep(data: bytes, place: Path, what: str) -> str:
    """Keep the first case of a kind."""
    name = re.sub(r"\W+", "-", what).strip("-")
    if not (place / name).exists():
        (place / name).write_bytes(data)
    return name


# the one that watches


def replay(loader: str, path: Path) -> dict[str, Any]:
    """One case in a fresh process without instruments: how it ends, CPU seconds, the peak of its memory."""
    argv = [sys.executable, "-m", "bench", "fuzz_loaders", "--loader", loader, "--alone", str(path)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20 * SECONDS)
    except subprocess.TimeoutExpired:
        return {"ends": f"not within {20 * SECONDS} s"}
    found = done.stdout.splitlines()[-1:]
    if done.returncode or not found:
        return {"ends": f"died with {done.returncode}: {done.stderr[-600:]}"}
    return json.loads(found[0])


def alone(loader: str, path: Path) -> None:
    """The process that `replay` starts."""
    module = targets()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module.TARGETS[loader](b"", folder)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        seen = module.guard(folder)
        try:
            ends = module.TARGETS[loader](path.read_bytes(), folder)
            ends = f"defect: outside the folder: {seen[0]}" if seen else ends
        except Exception as e:
            ends = "defect: " + "".join(traceback.format_exception(e))[-3000:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"ends": ends, "seconds": time.process_time() - began, "megabytes": peak >> 10, "before": before >> 10}))


def bad(found: dict[str, Any]) -> bool:
    """Whether a replayed case shows a defect."""
    wrong = found["ends"].startswith(("defect", "died", "not within"))
    return wrong or found["seconds"] > SECONDS or found["megabytes"] > MEGABYTES


def seed(loader: str, corpus: Path) -> None:
    """Fill an empty corpus; the cases that were found once come first."""
    module = targets()
    kept = [p.read_bytes() for p in sorted((record.ROOT / "tests" / "corpus" / loader).glob("*"))]
    with tempfile.TemporaryDirectory() as name:
        seeds = module.model_seeds(Path(name)) if loader == "model" else module.build_seeds()
    for data in (*kept, *seeds):
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)


def generation(loader: str, work: Path, seconds: int) -> dict[str, int]:
    """One process that fuzzes; what libFuzzer says of it at its end."""
    argv = [sys.executable, "-m", "bench", "fuzz_loaders", "--loader", loader, "--child"]
    argv += ["--work", str(work), "--seconds", str(seconds)]
    with (work / "log").open("ab") as log:
        start = log.tell()
        subprocess.run(argv, stdout=log, stderr=log, timeout=seconds + 20 * SECONDS)
    with (work / "log").open("rb") as f:
        f.seek(start)
        text = f.read().decode(errors="replace")
    lines = re.findall(r"#(\d+)\s.*?cov: (\d+) ft: (\d+) corp: (\d+)", text)
    if not lines:
        raise RuntimeError(f"no fuzzing: {text[-2000:]}")
    runs, cov, features, units = (int(x) for x in lines[-1])
    return {"executions": runs, "edges": cov, "features": features, "corpus": units}


def _cpu() -> float:
    """Processor seconds of all processes that ended: on a busy machine, minutes say little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def campaign(loader: str, work: Path, minutes: float) -> dict[str, Any]:
    """Generations until the time is over, and every defect that was seen."""
    for name in ("corpus", "found", "fatal", "netted"):
        (work / name).mkdir(parents=True, exist_ok=True)
    if not any((work / "corpus").iterdir()):
        seed(loader, work / "corpus")
    for old in (p for name in ("found", "fatal", "netted") for p in (work / name).iterdir()):
        old.unlink()
    began, busy, total, rows, checked = time.monotonic(), _cpu(), 0, [], {}
    while (left := 60 * minutes - (time.monotonic() - began)) > 1:
        rows.append(generation(loader, work, max(1, min(GENERATION, int(left)))))
        total += rows[-1]["executions"]
        for path in sorted((work / "fatal").iterdir()):
            if path.name not in checked:
                checked[path.name] = replay(loader, path)
        defects = [p.stem for p in (work / "found").glob("*.txt")] + [n for n, r in checked.items() if bad(r)]
        print(f"{loader}: {time.monotonic() - began:.0f} s, {total} executions, {rows[-1]}, {len(defects)} defects", flush=True)
    fatal = {n: r for n, r in checked.items() if bad(r)}
    return {
        "loader": loader, "minutes": minutes, "cpu_seconds": round(_cpu() - busy, 1), "executions": total,
        **{k: max(r[k] for r in rows) for k in ("edges", "features", "corpus")},
        "defects": sorted(p.stem for p in (work / "found").glob("*.txt")), "fatal": fatal,
        "caught_by_the_last_net": sorted(p.name for p in (work / "netted").iterdir()),
        "restarts": len(rows) - 1, "harmless_when_alone": len(checked) - len(fatal),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loader", choices=["model", "build"], required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--work", type=Path, help="where corpus, log and findings are kept (build/fuzz-loaders/LOADER)")
    parser.add_argument("--replay", type=Path, metavar="CASE", help="try one case and say how it ends")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = (args.work or record.ROOT / "build" / "fuzz-loaders" / args.loader).absolute()
    if args.alone:
        alone(args.loader, args.alone)
    elif args.child:
        child(args.loader, work, args.seconds)
    elif args.replay:
        found = replay(args.loader, args.replay)
        print(json.dumps(found, indent=1))
        return int(bad(found))
    else:
        row = campaign(args.loader, work, args.minutes)
        others = [r for r in record.read("loaders") if r["loader"] != args.loader]
        record.write("loaders", sorted([*others, row], key=lambda r: r["loader"]), seconds=SECONDS, megabytes=MEGABYTES)
        print(json.dumps(row, indent=1))
        return int(bool(row["defects"] or row["fatal"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
