"""Numbers of devices that divide nothing: what plans compute, and what padding would send.

    python -m bench uneven [--only NAME …] [--devices N …]

The twelve exports of `bench models` on 3, 5, 6, 7, 12 and 24 devices, so slow at computing beside their links that plans cut:
each is compiled, verified, run and compared with onnxruntime. Padding is what others do: every device has and sends as much
as the one that has most. Writes bench/results/uneven.json; exits 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import prod

from rich.console import Console
from rich.table import Table

from bench.correctness.models import EXPORTS, TOLERANCE, materialize
from bench.doors import apart
from bench.support import record
from bench.support.record import WORK, Row

DEVICES = (3, 5, 6, 7, 12, 24)
SLOW = {
    "device": {"memory": "8GiB", "bandwidth": 1e9, "launch": 1e-7, "vector": 1e8, "flops": {"f32": 1e9, "other": 1e8}},
    "levels": [{"alpha": 1e-6, "beta": 1e-10}],
}


def worker(case: Row) -> Row:
    """One case, in this process."""
    import tapestry
    from tapestry.api import run_checked
    from tapestry.ir.kernel import size
    from tapestry.ir.program import Reduce, Transfer, transfer_bytes
    from tapestry.ir.types import itemsize

    made = tapestry.compile(case["path"], devices=case["devices"], topology=case["topology"], shapes=case["shapes"])
    program = made.build.program
    _, ran = run_checked(made, made.random_feeds(0), check=True)
    outputs = ran["outputs"].values()
    moved = padded = 0
    for step in program.steps:
        if isinstance(step, Transfer | Reduce):
            moved += transfer_bytes(step, program)
        if isinstance(step, Transfer):  # as many bytes to each as to the one that receives most
            got: dict[int, int] = {}
            for m in step.messages:
                got[m.dst] = got.get(m.dst, 0) + size(m.box) * itemsize(program.buffers[step.dst].dtype)
            padded += max(got.values(), default=0) * len(got)
        elif isinstance(step, Reduce):
            even = [max(program.buffers[b].nbytes(d) for d in g) / max(1, sum(program.buffers[b].nbytes(d) for d in g)) * len(g)
                    for g in step.groups for b in step.sent]  # fmt: skip
            padded += int(transfer_bytes(step, program) * max(even, default=1.0))
    held = [sum(b.nbytes(d) for b in program.buffers.values()) for d in range(case["devices"])]
    error = max(o["rel_err"] for o in outputs)
    spread = any(o.get("reference_spread") for o in outputs)
    cut = sum(any(s.dims) for s in made.build.plan.strategies) / len(made.build.plan.strategies)
    return {
        "rel_err": error, "passed": bool(ran["passed"] and (error <= TOLERANCE or spread)), "moved_bytes": moved,
        "padded_bytes": padded, "held": sum(held), "held_padded": max(held) * len(held), "cut": cut,
    }  # fmt: skip


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(EXPORTS), metavar="NAME")
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), metavar="N")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return apart.answer(worker, args.worker)
    folder, rows = WORK / "uneven", list[Row]()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slow.json").write_text(json.dumps(SLOW))
    for name in args.only:
        path = materialize(name, folder)
        if path is None:
            sys.exit("the exported models are not beside the checkout")
        for n in args.devices:
            case = {"path": str(path), "devices": n, "topology": str(folder / "slow.json"), "shapes": EXPORTS[name]}
            rows.append({"model": name, "devices": n, **apart.measured("uneven", case, 900)})
            print(*(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in rows[-1].items()), flush=True)
    record.write("uneven", rows)
    table = Table("model", *(str(n) for n in args.devices), title="bytes sent, and held, by what padding sends and holds")
    for name in args.only:
        mine = [r for r in rows if r["model"] == name]
        table.add_row(name, *(_cell(r) for r in mine))
    Console().print(table)
    done = [r for r in rows if r.get("padded_bytes")]
    ratio = prod(r["moved_bytes"] / r["padded_bytes"] for r in done) ** (1 / max(1, len(done)))
    print(f"{sum(bool(r.get('passed')) for r in rows)} of {len(rows)} right; {ratio:.3f} of padding's bytes")
    return int(not all(r.get("passed") for r in rows))


def _cell(r: Row) -> str:
    if not r.get("passed"):
        return f"wrong: {r.get('error', r.get('rel_err'))}"
    sent = f"{r['moved_bytes'] / r['padded_bytes']:.2f}" if r["padded_bytes"] else "none"
    return f"{sent}, {r['held'] / r['held_padded']:.2f}"


if __name__ == "__main__":
    sys.exit(main())
