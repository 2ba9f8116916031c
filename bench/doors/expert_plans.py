"""Plans that people write by hand, as pins or stages, beside ours: time on our clock and bytes that travel.

    python -m bench expert_plans [NUMBER …] [--python PATH] [--limit SECONDS]

The cases are in expert_plans.json: decoders, dense and with experts, encoders, a CNN, a U-Net and a diffusion transformer, for
small and large batches, with ample and tight memory, on NVLink, PCIe, two hosts and machines on Ethernet, whose layers are
split as llama.cpp splits them. What the pins leave open is searched, as ours is. Models of transformers and diffusers by their
makers' sizes have two layers; exports of shared/models are whole, and none has weights. Exits 1 where theirs is faster, or is
within 0.5 % and sends fewer bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from bench.doors import apart
from bench.support import other_python, record
from bench.support.record import Row

CASES: list[Row] = json.loads(Path(__file__).with_suffix(".json").read_text())
NEARLY = 1.005


def model_of(case: Row) -> tuple[Any, dict[str, Any]]:
    """The model of a case, and further options of `tapestry.compile`."""
    import torch

    from bench.exporters import zoo_models

    name, shape = case["model"], case.get("shape", ())
    if name.endswith(".onnx"):
        path = record.WORK / name
        record.WORK.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.decompress((record.SHARED / f"{name}.gz").read_bytes()))
        return path, {"shapes": case["shapes"], "weights": False}
    if name == "DiT-XL":
        from diffusers import DiTTransformer2DModel

        with torch.device("meta"):
            module = DiTTransformer2DModel(num_layers=2, sample_size=shape[1]).to(torch.bfloat16).eval()
        steps = torch.zeros(shape[0], dtype=torch.int64)
        pixels = torch.rand(shape[0], 4, shape[1], shape[1], dtype=torch.bfloat16)
        inputs = {"hidden_states": pixels, "timestep": steps, "class_labels": steps}
    else:
        zoo_models.ZOO[name] = (*zoo_models.ZOO[name][:3], tuple(shape))
        module, inputs = zoo_models.made(name)
    return module, {"example_inputs": inputs, "target": "triton:sm90"}


def worker(case: Row) -> Row:
    """One case, in this process."""
    warnings.simplefilter("ignore")
    import tapestry

    model, more = model_of(case)
    if isinstance(case["topology"], dict):
        record.WORK.mkdir(parents=True, exist_ok=True)
        (record.WORK / "cluster.json").write_text(json.dumps(case["topology"]))
        case = {**case, "topology": str(record.WORK / "cluster.json")}
    row: Row = {}
    for whose, fixed in (("ours", {}), ("theirs", {k: case[k] for k in ("pins", "stage_at") if k in case})):
        asked = {"mesh": case["mesh"], "topology": case["topology"], "memory": case.get("memory")}
        r = tapestry.compile(model, **asked, **more, **fixed).report
        row |= {f"{whose}_s": r["objective_s"], f"{whose}_gap": r["gap"]}
        row |= {f"{whose}_bytes": sum(t["bytes"] for t in r["transfers"])}
    return row


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    other_python.add_python(parser)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help=f"of cases, 1 to {len(CASES)}")
    parser.add_argument("--limit", type=float, default=400, help="seconds of a case")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return apart.answer(worker, args.worker)
    other_python.moved(args, "expert_plans")
    rows: list[Row] = []
    for n in args.numbers or range(1, len(CASES) + 1):
        case = CASES[n - 1]
        row = {"number": n, "what": case["what"], "model": case["model"], **apart.measured("expert_plans", case, args.limit)}
        if "failed" not in row:
            time, sent = row["ours_s"] / row["theirs_s"], (row["ours_bytes"], row["theirs_bytes"])
            row["lost"] = time > 1 + 1e-9 or (time > 1 / NEARLY and sent[0] > sent[1])
        rows.append(row)
        print(json.dumps(row), flush=True)
    record.write("expert_plans", rows)
    return int(any(r.get("lost", True) for r in rows))


if __name__ == "__main__":
    sys.exit(main())
