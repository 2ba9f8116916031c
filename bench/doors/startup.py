"""What small commands cost in processor time (with their helpers), beside ``python -c "import torch"`` in turns.

    .venv/bin/python -m bench startup [--rounds N] [--python PYTHON]

Medians of ratios, each to the torch of its own round; bytecode is warm. The model is the transformer layer of README, on a 2×4
mesh of the preset ``cpu``. ``--python`` is the interpreter of an environment that has Tapestry installed (default: this one).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.support import record

COMPILE = ["compile", "layer.onnx", "-o", "layer.plan", "--mesh", "2x4", "--topology", "cpu", "-q"]
COMMANDS = {
    "a wrong path": (["compile", "nowhere.onnx", "-o", "other.plan"], 0.4),
    "a wrong flag": (["run", "layer.plan", "--inptu", "x"], 0.4),
    "explain": (["explain", "layer.plan"], 0.4),
    "doctor": (["doctor", "layer.onnx"], 0.8),
    "verify": (["verify", "layer.plan"], 1.3),
    "run": (["run", "layer.plan"], 1.5),
    "compile": (COMPILE, 1.6),
}
"""Each with what it may cost."""


def seconds(command: list[str], folder: Path) -> float:
    """Processor seconds of a command and of what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print the table; status 1 where a command costs more than it may."""
    p = argparse.ArgumentParser(prog="python -m bench startup", description=__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--python", default=sys.executable)
    args = p.parse_args()
    ratios: dict[str, list[float]] = {name: [] for name in COMMANDS}
    torch: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run([args.python, record.ROOT / "examples" / "layer.py", folder / "layer.onnx"], check=True)
        for k in range(args.rounds + 1):  # the first one writes bytecode
            beside = seconds([args.python, "-c", "import torch"], folder)
            each = {n: seconds([args.python, "-m", "tapestry", *c], folder) for n, (c, _) in reversed(COMMANDS.items())}
            if k:
                torch.append(beside)
                for name, spent in each.items():
                    ratios[name].append(spent / beside)
    rows: list[record.Row] = []
    for name, found in ratios.items():
        least, middle, most = (round(f(found), 2) for f in (min, statistics.median, max))
        rows.append({"command": name, "ratio": middle, "least": least, "most": most, "aim": COMMANDS[name][1]})
    print(f"import torch: {statistics.median(torch):.2f} s of processor time, {args.rounds} rounds")
    for r in rows:
        late = "" if r["ratio"] <= r["aim"] else "  over"
        print(f"{r['command']:14} {r['ratio']:5.2f}  ({r['least']:.2f} to {r['most']:.2f}; aim {r['aim']}){late}")
    print("written", record.write("startup", rows))
    return int(any(r["ratio"] > r["aim"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
