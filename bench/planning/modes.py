"""Prefill and decode of Llama-8B on one placement: ``python -m bench modes [--layers N] [--mesh 2x4] [--prompt S]``.

Both modes are planned alone, and together with weights and caches where both find them (`tapestry.sizes.joint_modes`). A row
has the seconds of each mode's step, of both plans alone (the peer, in the same run) and on the shared placement, what the pair
costs over them, what is proven of any pair, and the bytes that a switch moves: of the two plans alone, and of the pair.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.support import llama_layers, record
from tapestry import pipeline
from tapestry.plan.topology.meshes import parse_mesh
from tapestry.sizes.joint_modes import compile_modes, moved_bytes


def row(args: argparse.Namespace) -> dict[str, Any]:
    """One model on one mesh."""
    size = llama_layers.Size(batch=args.batch, caches=True)
    model = llama_layers.write(args.layers, record.WORK / "models" / f"caches-{args.batch}", size)
    names = [f"{k}.{part}" for k in range(args.layers) for part in ("key", "value")]
    caches = {f"past_key_values.{n}": f"present.{n}" for n in names}
    modes = [_options(model, args, n) for n in (args.prompt, 1)]
    start = time.process_time()
    found = compile_modes(modes, (1.0, float(args.tokens)), caches)
    seconds, alone = [c.build.report["objective_s"] for c in found.compiled], [p.objective for p in found.alone]
    pair, free, bound = (prefill + args.tokens * decode for prefill, decode in (seconds, alone, [p.bound for p in found.alone]))
    graph, programs = found.alone[0].plan.graph, [c.build.program for c in found.compiled]
    layouts = Counter((t.split(".", 1)[-1], str(layout)) for t, layout in found.placement.items())
    return {
        "model": f"llama-8b, {args.layers} layers", "mesh": args.mesh, "topology": args.topology, "batch": args.batch,
        "prompt": args.prompt, "past": args.past, "tokens": args.tokens, "prefill_s": seconds[0],
        "decode_s": seconds[1], "prefill_alone_s": alone[0], "decode_alone_s": alone[1], "pair_over_alone": pair / free,
        "pair_over_bound": pair / bound, "switch_bytes": moved_bytes(graph, programs),
        "switch_bytes_alone": moved_bytes(graph, [p.program for p in found.alone]), "shared_tensors": len(found.placement),
        "pairs_tried": len(found.tried),
        "placement": {f"{t} {layout}": n for (t, layout), n in sorted(layouts.items())},
        "cpu_s": time.process_time() - start,
    }  # fmt: skip


def _options(model: Path, args: argparse.Namespace, rows: int) -> pipeline.Options:
    shapes = {"sequence": rows, "past": args.past, "total": args.past + rows}
    return pipeline.Options(
        model=model, shapes=shapes, mesh=parse_mesh(args.mesh), topology=args.topology, weights=False, stages="1",
        micro_batches="1",
    )  # fmt: skip


def main() -> None:
    """Plan and record; rows of other sizes stay as they were."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--layers", 32), ("--batch", 8), ("--prompt", 1024), ("--past", 4096), ("--tokens", 256)):
        p.add_argument(name, type=int, default=default)
    p.add_argument("--mesh", default="2x4")
    p.add_argument("--topology", default="h100")
    found = row(p.parse_args())
    print({k: v for k, v in found.items() if k != "placement"})
    record.write("modes", record.merged("modes", [found], ("model", "mesh", "topology", "batch", "prompt", "past", "tokens")))


if __name__ == "__main__":
    main()
