"""Plans of ours taken out and run by others: ``tapestry export``, its formats, and their own consumers.

    python -m bench doors [NAME ...]                 transformers' tensor parallelism, on two gloo ranks (`tensor_parallel`)
    python -m bench doors --onnx FOLDER [NAME ...]   per-rank and fused ONNX, for every .onnx of a folder (`onnx_folders`)
    python -m bench doors --jax PYTHON [NAME ...]    XLA given PartitionSpecs (`xla_layouts`)
    python -m bench doors --modules [--module PACKAGE:FUNCTION] [--python PATH]
                                                     modules of torch and checkpoints, in f32 and bf16 (`modules`)

Every row is compared with the model itself, or with the bytes of the plan; a row that fails is shown with the reason. JSON goes
to bench/results/doors.json, among the rows of earlier runs.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.doors import modules, onnx_folders, tensor_parallel, xla_layouts
from bench.support import other_python, record


def main() -> None:
    """Measure what is asked for; print a row each, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--onnx", type=Path, metavar="FOLDER")
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter that has jax")
    parser.add_argument("--modules", action="store_true")
    help = "with --modules: a function of yours that makes a module and its inputs, instead of the list"
    parser.add_argument("--module", action="append", default=[], metavar="PACKAGE:FUNCTION", help=help)
    other_python.add_python(parser)
    args = parser.parse_args()
    other_python.moved(args, "doors")
    found: Iterable[record.Row]
    line: Callable[[dict[str, Any]], str]
    if args.onnx:
        found, line = onnx_folders.rows(args.onnx, args.names), onnx_folders.line
    elif args.modules or args.module:
        found, line = modules.rows(args.names, args.module), modules.line
    elif args.jax:
        found, line = xla_layouts.rows(args.jax, args.names), xla_layouts.line
    else:
        found, line = tensor_parallel.rows(args.names), tensor_parallel.line
    equal, counts = Counter[str](), Counter[str]()
    for row in found:
        row |= {} if row["equal"] else {"why": line(row)[:400]}
        equal[row["door"]] += row["equal"]
        counts[row["door"]] += 1
        print(f"{row['door']:10} {row['name']:36} {'equal' if row['equal'] else 'not equal':10} {line(row)}", flush=True)
        record.write("doors", record.merged("doors", [row], ("door", "name")))
    for door, n in counts.items():
        print(f"{door}: {equal[door]} of {n} equal")


if __name__ == "__main__":
    main()
