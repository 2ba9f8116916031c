"""Llama-70B as a module on the meta device, without a weight anywhere: exported, lifted, planned for 8 H100 and verified.

    python -m bench meta_device [--python PATH] [--layers N] [--batch B] [--sequence S]

Needs transformers. Prints and writes processor seconds (bench/results/meta_device.json): of torch's export, of the ONNX file,
and of the plan; the peer is torch's own export, which is in every row. Exits 1 above 60 s.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

import torch

import tapestry
from bench.support import other_python, record
from tapestry.frontends.choices import opened_source
from tapestry.frontends.torch_export import exported

GOAL = 60.0  # seconds of processor time
SIZES = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def measured(layers: int, batch: int, sequence: int) -> dict[str, Any]:
    """One module, from its configuration to a verified plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    start = time.process_time()
    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **SIZES)).eval()
    program = exported(module, {"input_ids": torch.zeros((batch, sequence), dtype=torch.int64)})
    traced = time.process_time()
    source = opened_source(program)
    written = time.process_time()
    build = tapestry.compile(source, devices=8, topology="h100")
    done = time.process_time()
    keep = ("nodes", "ops", "signatures", "objective_s", "lower_bound_s", "gap", "seconds")
    spent = {"export_cpu_s": traced - start, "file_cpu_s": written - traced, "plan_cpu_s": done - written}
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    sizes = {"layers": layers, "batch": batch, "sequence": sequence, "dtype": dtype}
    return {**sizes, **spent, "cpu_s": done - start, "goal_s": GOAL, **{k: build.report[k] for k in keep}}


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    other_python.add_python(parser)
    for name, default in (("--layers", 80), ("--batch", 8), ("--sequence", 4096)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    other_python.moved(args, "meta_device")
    warnings.simplefilter("ignore")
    row = measured(args.layers, args.batch, args.sequence)
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    if args.layers == parser.get_default("layers"):
        record.write("meta_device", [row])
    return 0 if row["cpu_s"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
