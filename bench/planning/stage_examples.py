"""PopRT's two examples of auto-sharding: the lines printed, and the traversal's stages beside those of the exact search.

    .venv/bin/python -m bench stage_examples

Both models are made here (`bench.exporters.stage_nets`). Each runs as ``tapestry auto-shard --measure`` on two devices: every
candidate is compiled, and those that fit are run, in one process that plays both devices. The DeBERTa has too little memory for
the first proportion. Writes bench/results/stage_examples.json; exits 1 if a line that PopRT prints is missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from bench.exporters import stage_nets
from bench.support import record
from bench.support.record import WORK, Row

EXAMPLES: dict[str, tuple[str, ...]] = {"deberta_like": ("--memory", "12MiB"), "vit_l_like": ("--optimal-perf",)}
LINES = (
    r"\[Success\] (Compile successfully available_memory_proportion [\d.]+ and|The optimal) solution:",
    r"Sharding nodes: Device 0 - ",
    r"\[Success\] The (optimal )?latency [\d.]+ ms, tput [\d.]+",
    r"\[Success\] Save the sharded model to ",
)
"""What PopRT's document shows, in its order."""


def example(name: str, path: Path) -> Row:
    """One example: its command, and the last lines that it prints."""
    command = ["auto-shard", "--input-model", path.name, "--num-devices", "2", "--measure", *EXAMPLES[name]]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tapestry", *command], cwd=path.parent, capture_output=True, text=True, check=False
    )  # fmt: skip
    seconds = time.perf_counter() - start
    printed = [line.rstrip().replace(f"{path.parent}/", "") for line in done.stdout.splitlines()]
    shown = [next((line for line in printed if re.match(pattern, line)), None) for pattern in LINES]
    return {
        "model": name, "command": " ".join(["tapestry", *command]), "file_bytes": path.stat().st_size,
        "status": done.returncode, "complete": None not in shown, "lines": printed[-6:], "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> int:
    """Run, show, write."""
    folder = WORK / "stage_examples"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [example(name, stage_nets.export(name, folder)) for name in EXAMPLES]
    for row in rows:
        print(f"$ {row['command']}", *row["lines"], "", sep="\n")
    record.write("stage_examples", rows)
    return 0 if all(r["complete"] and r["status"] == 0 for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
