"""The compiler on large meshes and deep models, planned for the links of the preset h100, on a machine without any of them.

    .venv/bin/python -m bench scale [--quick] [--memory] [--only NAME …]

`llama_7b` and `llama_70b` (graphs of shared/models without weights) at batch 8 and sequence 4096 on 8, 64 (8x8) and 1024
(8x16x8) devices; decoders of Llama-8B's sizes with 1 to 80 layers on 2x4; within limited memory Llama-70B on 8 and 8x8, and a
decoder of Llama-405B's sizes on 8x16x8 (``--memory``: these alone). Every row is one `tapestry compile --no-weights` in a
process of its own: "total" is the compiler's own clock from the file to the verified plan, "CPU" the seconds of all cores with
starting Python and writing the build, "verify" a `tapestry verify` of what was written. Writes bench/results/scale.json;
exits 1 where a target is missed. ``--quick`` leaves out the 1024 devices and more than 16 layers; ``--only`` all rows but
those named, as in ``"llama_70b 8x8 40GiB"``. Rows of an earlier run that are not measured anew stay.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.support import llama_layers, record
from bench.support.record import Row

FOLDER = record.WORK / "scale"
SHAPES = {"s72": "8", "s43": "8", "s53": "4096"}
MESHES = ("8", "8x8", "8x16x8")
LAYERS = (1, 2, 4, 8, 16, 32, 80)
LIMITED = (
    ("llama_70b", "8", "80GiB"),
    ("llama_70b", "8x8", "80GiB"),
    ("llama_70b", "8x8", "40GiB"),
    ("llama_405b", "8x16x8", "80GiB"),
)
LARGEST = llama_layers.Size(batch=8, sequence=4096, width=16384, heads=128, groups=8, inner=53248)  # Llama-3.1-405B: 126 layers
STAGES = ("lift", "simplify", "search", "verify", "codegen", "total")
GOALS: dict[tuple[str, ...], dict[str, float]] = {  # seconds, megabytes of resident memory, gap
    ("llama_70b", "8"): {"cpu_s": 30.0, "gap": 0.01},
    ("llama_70b", "8x8"): {"total_s": 20.0, "cpu_s": 40.0, "peak_mb": 4096.0, "gap": 0.01},
    ("llama_70b", "8x16x8"): {"total_s": 60.0, "cpu_s": 60.0, "gap": 0.05},
    ("llama_7b", "8x8"): {"gap": 0.01},
    ("llama_7b", "8x16x8"): {"gap": 0.05},
    ("layers 1", "2x4"): {"total_s": 5.0},
    **{row: {"search_cpu_s": 60.0, "verify_cpu_s": 60.0, "cpu_s": 120.0, "gap": 0.01} for row in LIMITED},
}


def tapestry(*arguments: str) -> tuple[str, float, float, float]:
    """Standard output, wall seconds, CPU seconds and peak megabytes of one command."""
    start = time.perf_counter()
    out = FOLDER / "out.json"
    with out.open("wb") as f, (FOLDER / "err.txt").open("wb") as e:
        process = subprocess.Popen([sys.executable, "-m", "tapestry", *arguments], stdout=f, stderr=e)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"tapestry {' '.join(arguments)}: {(FOLDER / 'err.txt').read_text()}")
    return out.read_text(), wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def measure(name: str, path: Path, mesh: str, shapes: dict[str, str], memory: str = "") -> Row:
    """One `tapestry compile`, and one `tapestry verify` of its build."""
    build = FOLDER / "build"
    bound = [a for item in shapes.items() for a in ("--shape", "=".join(item))]
    options = ["--mesh", mesh, "--topology", "h100", "--no-weights", "--json", *(["--memory", memory] if memory else [])]
    text, wall, cpu, peak = tapestry("compile", str(path), "-o", str(build), *options, *bound)
    _, verify, verify_cpu, _ = tapestry("verify", str(build))
    r = json.loads(text)
    keep = ("nodes", "ops", "signatures", "devices", "objective_s", "lower_bound_s", "gap", "seconds")
    searched = {p["name"]: p["processor_seconds"] for p in r["passes"] if p["phase"] == "search"}
    return {
        "model": name, "mesh": mesh, "memory": memory, "planned_peak": max(r["peak_bytes"]), **{k: r[k] for k in keep},
        "wall_s": wall, "cpu_s": cpu, "search_cpu_s": sum(searched.values()), "search_passes": searched, "peak_mb": peak,
        "plan_mb": (build / "plan.json").stat().st_size / 1e6, "verify_wall_s": verify, "verify_cpu_s": verify_cpu,
        "goals": GOALS.get((name, mesh, memory) if memory else (name, mesh), {}), "load": os.getloadavg()[0],
    }  # fmt: skip


def missed(row: Row) -> list[str]:
    """Goals that a row does not reach."""
    found = {"total_s": row["seconds"]["total"], **row}
    return [k for k, goal in row["goals"].items() if found[k] > goal]


def cases(quick: bool, limited: bool) -> list[tuple[str, str, str]]:
    """Model, mesh and memory of every row; ``limited``: of those with limited memory alone."""
    meshes = MESHES[:-1] if quick else MESHES
    free = [(name, mesh, "") for name in ("llama_7b", "llama_70b") for mesh in meshes]
    deep = [(f"layers {n}", "2x4", "") for n in (LAYERS[:5] if quick else LAYERS)]
    within = [row for row in LIMITED if not (quick and row[1] == MESHES[-1])]
    return within if limited else [*free, *deep, *within]


def measured(name: str, mesh: str, memory: str) -> Row | None:
    """A row; none where the model is not there."""
    if name.startswith("layers "):
        return measure(name, llama_layers.write(int(name.split()[1]), FOLDER), mesh, {}, memory)
    if name == "llama_405b":
        return measure(name, llama_layers.write(126, FOLDER, LARGEST), mesh, {}, memory)
    packed, path = record.SHARED / f"{name}.onnx.gz", FOLDER / f"{name}.onnx"
    if not packed.is_file():
        print(f"{name}: skipped, the folder of exported models is not beside the checkout")
        return None
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return measure(name, path, mesh, SHAPES, memory)


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="neither 1024 devices nor more than 16 layers")
    parser.add_argument("--memory", action="store_true", help="only what is planned within limited memory")
    parser.add_argument("--only", nargs="+", default=[], help="rows to measure: model, mesh, memory")
    options = parser.parse_args()
    chosen = [c for c in cases(options.quick, options.memory) if not options.only or " ".join(c).strip() in options.only]
    FOLDER.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    for c in chosen:
        found += [r for r in [measured(*c)] if r]
        if not options.quick:
            record.write("scale", record.merged("scale", found, ["model", "mesh", "memory"]), topology="h100", shapes=SHAPES)
    shutil.rmtree(FOLDER)
    table = Table(title="tapestry compile --topology h100, seconds", title_justify="left")
    table.add_column("model")
    for c in ("mesh", "ops", *STAGES, "CPU", "verify", "MB", "plan MB", "gap", "goal"):
        table.add_column(c, justify="right")
    for r in found:
        numbers = [f"{r['seconds'].get(k, 0.0):.2f}" for k in STAGES]
        sizes = [f"{r['peak_mb']:.0f}", f"{r['plan_mb']:.1f}", f"{r['gap']:.2%}"]
        goal = "" if not r["goals"] else f"[red]missed: {', '.join(missed(r))}" if missed(r) else "ok"
        table.add_row(
            f"{r['model']} {r['memory']}".strip(), r["mesh"], str(r["ops"]), *numbers, f"{r['cpu_s']:.1f}",
            f"{r['verify_cpu_s']:.1f}", *sizes, goal,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)
    return 1 if any(missed(r) for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
