"""Random sizes of models from one build each: ``python -m bench sizes [--models NAME …] [--meshes 1 2 4 2x2]``.

One row for each model and mesh: how many regions, the largest difference from onnxruntime, processor seconds of compiling for
all sizes and for one, of binding a size, and of a run beside that of a build that was searched for the size alone (of the
first ``--fixed`` sizes, both in turns, the least of each), and at how many of these both give the same bits: two plans that cut
sums in other ways do not. Sizes are drawn anew from everything that was asked for; inputs are random.
After loading, a pass, a proof or a compiler would end the benchmark.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import torch

import tapestry
from bench.correctness.models import materialize
from bench.support import record
from tapestry.compiler.pass_runner import Runner
from tapestry.verify import certificate
from tapestry.verify.many_sizes import sized_laws

RANGES = {
    "bert_base": {"s18": "1..4", "s41": "1..128"},
    "gpt2": {"s72": "1..2", "s70": "2..128", "s43": "s72", "s53": "s70"},
    "llama_tiny": {"s72": "1..8", "s53": "1..256"},
    "llama_tiny_opset23": {"s72": "1", "s53": "1..256"},
    "qwen3_tiny": {"s72": "1..8", "s53": "3..256"},
    "resnet50": {"s31": "1..8"},
    "whisper_encoder": {"s6": "1..4"},
    "t5_small": {"s11": "1..4", "s53": "1..64", "s28": "1..64"},
    "vit_base": {"s99": "1..8"},
}
SEED = 18
REPEATS = 7


def processor_seconds(work: Any) -> tuple[float, Any]:
    """Of this process and of those that it has waited for."""
    start = time.process_time()
    out = work()
    return time.process_time() - start, out


def options(model: Path, mesh: str, shapes: dict[str, Any]) -> dict[str, Any]:
    """What both builds are made with."""
    return {"model": model, "mesh": mesh, "topology": "cpu", "shapes": shapes}


def row(name: str, model: Path, mesh: str, count: int, fixed_of: int) -> dict[str, Any]:
    """One model on one mesh."""
    draw = random.Random(SEED)
    compile_s, build = processor_seconds(lambda: tapestry.compile(**options(model, mesh, RANGES[name])))
    sized = build.sized
    assert sized is not None
    build.prepare()
    session = onnxruntime.SessionOptions()
    session.intra_op_num_threads = 1
    peer = onnxruntime.InferenceSession(model, session)
    all_sizes = [tuple(draw.choice(list(sized.asked.along(k))) for k in range(len(sized.symbols))) for _ in range(count)]
    error, bind, ours, theirs, ratio, one, same = 0.0, list[float](), 0.0, 0.0, list[float](), list[float](), 0
    for n, sizes in enumerate(dict.fromkeys(all_sizes)):
        named = dict(zip(sized.symbols, sizes, strict=True))
        never = mock.Mock(side_effect=AssertionError("this is not done for a size"))
        with (
            mock.patch.object(Runner, "run", never), mock.patch.object(certificate, "check", never),
            mock.patch.object(sized_laws, "check_sizes", never), mock.patch.object(subprocess, "run", never),
        ):  # fmt: skip
            seconds, at = processor_seconds(lambda named=named: build.at(named))
            feeds = at.random_feeds(n)
            out = build.run(feeds)
            took, out = processor_seconds(lambda feeds=feeds: build.run(feeds))
        want_s, want = processor_seconds(lambda feeds=feeds, out=out: peer.run(list(out), feeds))
        bind.append(seconds)
        ours, theirs = ours + took, theirs + want_s
        for a, b in zip(out.values(), want, strict=True):
            error = max(error, float(np.abs(a - b).max() / max(1e-6, np.abs(b).max())))
        if n < fixed_of:
            fixed_s, fixed = processor_seconds(
                lambda named=named: tapestry.compile(**options(model, mesh, {**RANGES[name], **named}))
            )
            alone = fixed.run(feeds)
            same += all(alone[t].tobytes() == a.tobytes() for t, a in out.items())
            one.append(fixed_s)
            ratio.append(_ratio(build, fixed, feeds))
    return {
        "model": name, "mesh": mesh, "ranges": RANGES[name], "sizes": len(set(all_sizes)), "regions": len(sized.regions),
        "largest_error": error, "equal_to_1e-4": error < 1e-4, "compile_s": compile_s, "compile_one_s": min(one, default=None),
        "bind_ms_median": 1e3 * float(np.median(bind)), "bind_ms_most": 1e3 * max(bind), "run_s": ours, "onnxruntime_s": theirs,
        "same_bits_as_fixed": f"{same} of {len(one)}", "run_over_fixed": float(np.median(ratio)) if ratio else None,
    }  # fmt: skip


def _ratio(ours: tapestry.Compiled, fixed: tapestry.Compiled, feeds: dict[str, Any]) -> float:
    """Processor time of a run of one build over that of another."""
    seconds = [[processor_seconds(lambda b=b: b.run(feeds))[0] for b in (ours, fixed)] for _ in range(REPEATS)]
    least = np.array(seconds).min(axis=0)
    return float(least[0] / max(least[1], 1e-9))


def main() -> None:
    """Run the models and meshes that are asked for; rows of others stay as they were."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--models", nargs="+", default=list(RANGES), choices=list(RANGES))
    p.add_argument("--meshes", nargs="+", default=["1", "2", "4", "2x2"])
    p.add_argument("--sizes", type=int, default=60)
    p.add_argument("--fixed", type=int, default=2, help="sizes for which a build is made beside")
    args = p.parse_args()
    torch.set_num_threads(1)
    folder = record.WORK / "models"
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        model = materialize(name, folder)
        for mesh in args.meshes if model else ():
            rows.append(row(name, model, mesh, args.sizes, args.fixed))
            print(rows[-1], flush=True)
            record.write("sizes", record.merged("sizes", rows, ("model", "mesh")))


if __name__ == "__main__":
    main()
