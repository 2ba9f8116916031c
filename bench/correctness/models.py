"""Every model on every mesh: compile, verify from the files, run and compare with onnxruntime.

    .venv/bin/python -m bench models [--only NAME …] [--mesh M …] [--dtype bf16]

Models are the nine light ones of the onnx package (`examples/light.py` gives them random weights) and, where the folder
of exports lies beside the checkout, twelve exports of well-known architectures. Three models are planned once more
with a quarter of the memory that one device needs. Every case is a process of its own, whose peak resident memory
at the end of compilation is the compiler's. A result may be further than 1e-4 from onnxruntime only where the ONNX reference
evaluator is as well; the row says so. Writes bench/results/models.json; exits 1 if a case fails.

With ``--dtype`` every float32 of the exports is of 16 bits (the light models are of opsets without bfloat16), and a result is
right where `tapestry run --check` says so; models too large to be run here are compiled and verified without weights. Writes
bench/results/models_DTYPE.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.support import half_models, record
from bench.support.record import SHARED, WORK, Row
from examples import light

MESHES = ("1", "2", "4", "8", "2x4")
TOLERANCE = 1e-4
TIMEOUT = 900  # seconds for one case
TOKENS = {"input_ids": "2x32", "attention_mask": "2x32"}
EXPORTS: dict[str, dict[str, str]] = {
    "bert_base": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "1x128"),
    "gpt2": {"input_ids": "1x64", "attention_mask": "1x64"},
    "llama_tiny": TOKENS,
    "llama_tiny_opset23": {"input_ids": "1x32", "attention_mask": "1x32"},  # the export is valid at batch 1 only
    "qwen3_tiny": TOKENS,
    # short: under random weights T5's unscaled scores amplify rounding; at 32 tokens two references differ by 2e-4 to 1e-3
    "t5_small": {"input_ids": "1x8", "attention_mask": "1x8", "decoder_input_ids": "1x4"},
    "vit_base": {"pixel_values": "1x3x224x224"},
    "convnext_tiny": {"pixel_values": "1x3x224x224"},
    "whisper_encoder": {"input_features": "1x80x3000"},
    "unet": {"x": "1x3x128x128"},
    "resnet50": {"input": "2x3x224x224"},
    "mobilenet_v2": {"input": "2x3x224x224"},
}
TIGHT = ("bert_base", "gpt2", "light_vgg19")  # planned again with a quarter of the memory, on 8 devices
_PROMPT = {"s72": "1", "s53": "64", "s43": "1"}
LARGE = {"llama_7b": _PROMPT, "llama_70b": _PROMPT}  # without weights, in 16 bits alone
LIGHT = tuple(f"light_{n}" for n in light.NAMES)


def materialize(name: str, folder: Path, dtype: str = "") -> Path | None:
    """Write a model with random weights, in 16 bits if a ``dtype`` is given; None where it is not to be had."""
    if name in LIGHT:
        path = light.write(name.removeprefix("light_"), folder)
    elif not (SHARED / f"{name}.onnx.gz").is_file():
        return None
    else:
        words = ["--no-weights"] if name in LARGE else []
        subprocess.run([sys.executable, str(SHARED / "materialize.py"), name, str(folder), *words], check=True)
        path = folder / f"{name}.onnx"
    return half_models.rewritten(path, dtype, with_weights=name not in LARGE) if dtype else path


def worker(case: Row) -> Row:
    """One case, in this process."""
    import tapestry
    from tapestry.api import run_checked
    from tapestry.compiler.saved_build import verify_build

    folder = Path(case["folder"])
    large = case["model"] in LARGE
    build = tapestry.compile(case["path"], mesh=case["mesh"], shapes=case["shapes"], memory=case["memory"], weights=not large)
    build.save(folder)
    compiler = peak_resident()
    r = build.report
    start = time.perf_counter()
    _, laws, _ = verify_build(folder)
    verified = time.perf_counter() - start
    if large:
        return {"seconds": {**r["seconds"], "verify_files": verified}, "checks": sum(laws.values()), "passed": True}
    loaded = tapestry.load(folder)
    _, ran = run_checked(loaded, loaded.random_feeds(0), check=True)
    outputs = ran["outputs"].values()
    error, spread = max(o["rel_err"] for o in outputs), [o["reference_spread"] for o in outputs if o.get("reference_spread")]
    keep = ("nodes", "ops", "signatures", "objective_s", "lower_bound_s", "gap", "unsharded_peak_bytes", "host_load_bytes",
            "transfers", "kernels", "moves")  # fmt: skip
    return {
        **{k: r[k] for k in keep}, "peak_bytes": ran["peak_bytes"], "planned_peak_bytes": r["peak_bytes"],
        "compiler_rss_bytes": compiler, "seconds": {**r["seconds"], "verify_files": verified, "run": ran["seconds"]},
        "reference": ran["reference"], "rel_err": error, "reference_spread": max(spread, default=None),
        "checks": sum(laws.values()),
        "passed": bool(ran["passed"] and (error <= TOLERANCE or spread or case["dtype"])),
    }  # fmt: skip


def peak_resident() -> int:
    """Peak resident bytes of this process. (getrusage's figure starts at that of the process that started this one.)"""
    status = Path("/proc/self/status")
    if status.is_file():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM:")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def answer(case: Row) -> int:
    """Print what `worker` found as JSON; an error of Tapestry's is a failed case with its message."""
    from tapestry import TapestryError

    try:
        print(json.dumps(worker(case)))
    except TapestryError as e:
        print(json.dumps({"passed": False, "error": str(e)}))
    return 0


def measure(name: str, mesh: str, path: Path, memory: int | None = None, dtype: str = "") -> Row:
    """One case, in a process of its own."""
    key: Row = {"model": name, "mesh": mesh, "memory": memory}
    case = {
        **key, "path": str(path), "folder": str(WORK / name / "build"), "shapes": (EXPORTS | LARGE).get(name, {}),
        "memory": None if memory is None else str(memory), "dtype": dtype,
    }  # fmt: skip
    command = [sys.executable, "-m", "bench", "models", "--worker", json.dumps(case)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {**key, "passed": False, "error": f"not done after {TIMEOUT} s"}
    if done.returncode:
        return {**key, "passed": False, "error": done.stderr.strip()[-2000:]}
    row = {**key, **json.loads(done.stdout.splitlines()[-1])}
    if memory is not None and max(row["peak_bytes"]) > memory:
        row |= {"passed": False, "error": f"peak {max(row['peak_bytes'])} of {memory} bytes"}
    return row


def cases(names: list[str], meshes: list[str], dtype: str = "") -> Iterator[Row]:
    """Rows as they are measured; a model that is not to be had gives one row with the reason."""
    for name in names:
        folder = WORK / name
        path = materialize(name, folder, dtype)
        if path is None:
            yield {"model": name, "mesh": "", "skipped": "the folder of exported models is not beside the checkout"}
            continue
        alone = None
        for mesh in meshes:
            row = measure(name, mesh, path, dtype=dtype)
            alone = row.get("unsharded_peak_bytes") or alone
            yield row
        if name in TIGHT and "8" in meshes and alone and not dtype:
            yield measure(name, "8", path, alone // 4)
        shutil.rmtree(folder)


def table(rows: list[Row]) -> Table:
    """All rows for a person."""
    out = Table(title="models × meshes", title_justify="left")
    for c in ("model", "mesh"):
        out.add_column(c)
    for c in ("rel err", "gap", "lift", "simplify", "search", "verify", "codegen", "total", "verify files", "run",
              "peak/device", "unsharded", "share", "compiler", ""):  # fmt: skip
        out.add_column(c, justify="right")
    for r in rows:
        out.add_row(*cells(r), style="" if r.get("passed") or "skipped" in r else "bold red")
    return out


def cells(r: Row) -> list[str]:
    """One row as text."""
    mesh = r["mesh"] + (" ¼ memory" if r.get("memory") else "")
    if "peak_bytes" not in r:
        said = r.get("skipped") or ("ok, not run" if r["passed"] else one_line(r["error"]))
        return [r["model"], mesh, *[""] * 14, said]
    s = r["seconds"]
    stages = [f"{s[k]:.2f}" for k in ("lift", "simplify", "search", "verify", "codegen", "total", "verify_files", "run")]
    peak, alone = max(r["peak_bytes"]), r["unsharded_peak_bytes"]
    mib = [f"{n / 2**20:.0f} MiB" for n in (peak, alone, r["compiler_rss_bytes"])]
    verdict = "ok" if r["passed"] else one_line(r.get("error", "FAILED"))
    if r["rel_err"] > TOLERANCE and r.get("reference_spread"):
        verdict += f", two references differ by {r['reference_spread']:.1e}"
    quality = [f"{r['rel_err']:.1e}", f"{r['gap']:.2%}"]
    return [r["model"], mesh, *quality, *stages, *mib[:2], f"{peak / alone:.0%}", mib[2], verdict]


def key(r: Row) -> tuple[int, bool, int]:
    """Where a row belongs in the table; a later row of the same key replaces it."""
    return [*LIGHT, *EXPORTS, *LARGE].index(r["model"]), bool(r.get("memory")), (*MESHES, r["mesh"]).index(r["mesh"])


def one_line(text: str) -> str:
    """The last line of a traceback, or all of a short message."""
    return text.splitlines()[-1] if text.startswith("Traceback") else " ".join(text.split())


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*LIGHT, *EXPORTS, *LARGE], metavar="NAME")
    parser.add_argument("--mesh", nargs="+", metavar="M")
    parser.add_argument("--dtype", choices=[*half_models.KINDS], default="", help="in 16 bits, every f32 of this type")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return answer(json.loads(args.worker))

    partial = args.only or args.mesh
    result = f"models_{args.dtype}" if args.dtype else "models"
    names = args.only or ([*EXPORTS, *LARGE] if args.dtype else [*LIGHT, *EXPORTS])
    found = {key(r): r for r in record.read(result)} if partial else {}
    new: list[Row] = []
    for row in cases(names, args.mesh or list(MESHES), args.dtype):
        print(*(c for c in cells(row) if c), sep="  ", flush=True)
        new.append(row)
        found[key(row)] = row
        record.write(result, sorted(found.values(), key=key))
    Console(width=None if sys.stdout.isatty() else 200).print(table(new))
    failed = [r for r in new if not r.get("passed") and "skipped" not in r]
    print(f"{len(new) - len(failed)} of {len(new)} cases passed; bench/results/{result}.json")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
