"""The viewer on a large plan: how long until the first picture, and how large the file is.

    .venv/bin/python -m bench view [--build FOLDER]

Llama-70B (19,186 nodes, a graph of shared/models without weights) at batch 8 and sequence 4096 on 8x8 devices of the preset
h100. "First picture" is from the start of the navigation to all panels drawn, by the browser's own clock: the median of several
openings in a headless Chromium, in the size of a desk and of a phone. Writes bench/results/view.json; exits 1 where a target is
missed. Also takes the photograph of it in docs/viewer.md. ``--build`` is that plan, saved before.
"""

from __future__ import annotations

import argparse
import gzip
import os
import statistics
import sys
import time
from pathlib import Path

from bench.planning.scale import SHAPES
from bench.support import record
from tapestry import api
from tests.support.viewer import chromium

FOLDER = record.WORK / "view"
GOALS = {"first_picture_s": 1.5, "file_mb": 3.0}
TIMES = 7


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    packed = record.SHARED / "llama_70b.onnx.gz"
    if not packed.is_file() or chromium.PROGRAM is None:
        print("skipped: needs the folder of exported models beside the checkout, and Chromium")
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = FOLDER / "llama_70b.onnx"
    model.write_bytes(gzip.decompress(packed.read_bytes()))
    saved = api.load(args.build) if args.build else None
    build = saved or api.compile(model, mesh="8x8", topology="h100", shapes=SHAPES, weights=False)
    start = time.process_time()
    page = build.view().save(FOLDER / "llama_70b.html")
    made = time.process_time() - start
    rows: list[record.Row] = []
    with chromium.browser() as tab:
        for window, (width, height) in {"desk": (1280, 860), "phone": (390, 844)}.items():
            each = [tab.open(page, width=width, height=height) for _ in range(TIMES)]
            rows.append({
                "model": "llama_70b", "nodes": build.report["nodes"], "ops": build.report["ops"], "window": window,
                "first_picture_s": statistics.median(each), "slowest_s": max(each), "file_mb": page.stat().st_size / 1e6,
                "page_cpu_s": made, "load": os.getloadavg()[0],
            })  # fmt: skip
        tab.open(page, "tab=tensors&device=9&theme=dark")
        tab.photograph(record.ROOT / "docs" / "images" / "viewer-llama-70b.png")
        errors = list(tab.errors)
    for r in rows:
        times = f"first picture {r['first_picture_s']:.2f} s (slowest {r['slowest_s']:.2f})"
        print(
            f"{r['window']:6} {r['nodes']} nodes: {times}, file {r['file_mb']:.2f} MB, made in {r['page_cpu_s']:.1f} s of CPU"
        )
    record.write("view", rows, goals=GOALS, mesh="8x8", topology="h100", shapes=SHAPES)
    return 1 if errors or any(r[k] > goal for r in rows for k, goal in GOALS.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
