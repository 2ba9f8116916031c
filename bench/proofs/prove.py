"""`tapestry prove` on programs whose answer is known: faults that were put in, and parallel programs that are right.

Four parts: ``faults`` (every kind of `tests.support.program_faults` on five networks), ``programs`` (data, tensor, sequence,
context, pipeline and expert parallelism at many sizes), ``llama`` (80 layers of Llama-70B's sizes on 8 ranks, without
weights), ``plans`` (transformers' own tensor-parallel plans, from programs that
`bench/exporters/transformers_ranks.py` has exported). ``--ranks FOLDER [NAME ...]``: instead, what ``export --format
onnx-ranks`` writes of each .onnx of a folder, cut by batch, heads and sequence (`own_ranks`). Writes bench/results/prove.json;
exits 1 where an answer is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx

from bench.proofs import own_ranks
from bench.support import record
from tapestry.errors import TapestryError
from tapestry.tools.prove.verdict import PROVED, REFUTED, Verdict, prove
from tests.support.parallel_nets import Sizes, Style, write
from tests.support.program_faults import KINDS
from tests.support.programs import rank_files

SMALL = Sizes(batch=2, sequence=4, width=16, inner=16, layers=2, vocabulary=8)
STYLES: dict[str, list[Style]] = {
    "mlp": [Style(tp=4), Style(dp=2, tp=2)],
    "decoder": [Style(tp=4), Style(tp=2, sequence=True), Style(tp=2, context=True), Style(pp=2, tp=2, head="gathered")],
    "encoder": [Style(tp=4), Style(tp=2, sequence=True), Style(pp=2)],
    "convolutions": [Style(tp=4), Style(dp=2, tp=2)],
    "experts": [Style(tp=4), Style(dp=2, tp=2)],
}
PARTS = {"faults": REFUTED, "programs": PROVED, "llama": PROVED, "plans": "", "ranks": ""}  # what each must answer
LLAMA_70B = Sizes(batch=1, sequence=4096, width=8192, heads=64, groups=8, inner=28672, layers=80, vocabulary=128256)


def decided(model: Path, program: Path) -> tuple[str, str, float]:
    """Status, witness or reason, and seconds."""
    begin = time.perf_counter()
    try:
        v: Verdict = prove(model, [program])
    except TapestryError as e:
        return "not readable", str(e), time.perf_counter() - begin
    return v.status, (v.witness or {}).get("text", v.reason), time.perf_counter() - begin


def faults(folder: Path, each: int, kinds: Sequence[str]) -> Iterator[record.Row]:
    """For every kind so many faults, network by network in turn, out of up to eight times as many draws."""
    for kind in kinds:
        done = 0
        for draw, net in itertools.product(range(8 * each), STYLES):
            row = _fault(folder, kind, net, draw)
            done += row is not None
            if row is not None:
                yield row
            if done == each:
                break


def _fault(folder: Path, kind: str, net: str, draw: int) -> record.Row | None:
    """One fault put into a right program, and what is said of it; None where the network has no place for one that shows
    when onnxruntime runs the files."""
    rng, style = random.Random(f"{kind} {net} {draw}"), STYLES[net][draw % len(STYLES[net])]
    model, program = write(net, style, folder / "fault", SMALL, seed=draw)
    files = [program / f"rank{r}.onnx" for r in range(style.world)]
    for stale in set(program.glob("*.onnx")) - set(files):
        stale.unlink()
    ranks = [onnx.load(f) for f in files]
    at = KINDS[kind](ranks, rng)
    if at is None:
        return None
    for f, m in zip(files, ranks, strict=True):
        onnx.save(m, f)
    if not rank_files.differs(model, program):  # what is changed may do nothing: softmax does not see a bias of its keys
        return None
    status, text, seconds = decided(model, program)
    return {
        "part": "faults", "kind": kind, "net": net, "style": str(style), "at": at, "status": status, "witness": text,
        "seconds": round(seconds, 3),
    }  # fmt: skip


def right_programs(count: int) -> Iterator[tuple[str, Style, Sizes]]:
    """Networks, styles and sizes that fit each other, in a fixed order."""
    rng = random.Random(0)
    seen: set[str] = set()
    while len(seen) < count:
        net = rng.choice(list(STYLES))
        dp, tp = rng.choice([1, 1, 2]), rng.choice([1, 2, 2, 4])
        pp = rng.choice([1, 1, 2]) if net in ("decoder", "encoder") else 1
        how = rng.choice(["tensor", "sequence", "context", "ring"]) if net in ("decoder", "encoder") and tp > 1 else "tensor"
        head = rng.choice(["whole", "gathered", "rows"]) if net == "decoder" and how not in ("context", "ring") else "whole"
        context = how in ("context", "ring")
        style = Style(dp=dp, pp=pp, tp=tp, sequence=how == "sequence", context=context, ring=how == "ring", head=head)
        groups = rng.choice([4, 8]) if net == "decoder" else 8
        sizes = Sizes(
            batch=dp * rng.choice([1, 2]), sequence=tp * rng.choice([1, 2, 3]), width=32, heads=8, groups=groups,
            inner=8 * rng.choice([1, 2, 3]), layers=2, vocabulary=24,
        )  # fmt: skip
        if net == "convolutions":
            sizes = Sizes(batch=sizes.batch, sequence=6, inner=sizes.inner, layers=2)
        key = f"{net} {style} {sizes}"
        if style.world > 1 and key not in seen:
            seen.add(key)
            yield net, style, sizes


def programs(folder: Path, count: int) -> Iterator[record.Row]:
    """Programs that are right."""
    for k, (net, style, sizes) in enumerate(right_programs(count)):
        model, program = write(net, style, folder / f"right{k}", sizes, seed=k)
        status, text, seconds = decided(model, program)
        yield {
            "part": "programs",
            "net": net,
            "style": str(style),
            "sizes": str(sizes),
            "status": status,
            "reason": text,
            "seconds": round(seconds, 3),
        }


def llama(folder: Path) -> Iterator[record.Row]:
    """Llama-70B's layers on 8 ranks: lifting, proof and all."""
    model, program = write("decoder", Style(tp=8, head="gathered"), folder / "llama", LLAMA_70B, data=False)
    status, text, seconds = decided(model, program)
    yield {
        "part": "llama",
        "ranks": 8,
        "layers": LLAMA_70B.layers,
        "status": status,
        "reason": text,
        "seconds": round(seconds, 1),
    }


def plans(folder: Path) -> Iterator[record.Row]:
    """Programs that transformers makes of its own plans."""
    for case in sorted(p for p in folder.iterdir() if (p / "program" / "rank1.onnx").is_file()):
        status, text, seconds = decided(case / "model.onnx", case / "program")
        yield {"part": "plans", "architecture": case.name, "status": status, "witness": text, "seconds": round(seconds, 2)}


def _write(rows: list[record.Row], shown: bool = True) -> None:
    summary = {part: dict(Counter(r["status"] for r in rows if r["part"] == part)) for part in PARTS}
    if shown:
        print(summary, flush=True)
    record.write("prove", rows, summary=summary, kinds=len({r["kind"] for r in rows if r["part"] == "faults"}))


def _ranks_row(row: record.Row) -> bool:
    """Print a row and write it among the others; whether it is wrong: the programs are right."""
    print(own_ranks.line(row), flush=True)
    _write(record.merged("prove", [row], ("part", "name", "way")), False)
    return row["status"] == REFUTED


def _asked(row: record.Row, args: argparse.Namespace) -> bool:
    """Whether a row of an earlier run is made anew."""
    if row["part"] == "plans" and not (args.plans / row["architecture"]).is_dir():
        return False
    return row["part"] in args.parts and row.get("kind", args.kinds[0]) in args.kinds


def main() -> None:
    """Run the parts that are asked for."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--ranks", type=Path, metavar="FOLDER", help="of models; the arguments are their names")
    p.add_argument("parts", nargs="*", default=["faults", "programs", "llama"])
    p.add_argument("--each", type=int, default=10, help="faults per kind")
    p.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="of faults; rows of others stay")
    p.add_argument("--programs", type=int, default=200, help="programs that are right")
    p.add_argument(
        "--plans", type=Path, default=record.WORK / "plans", help="folder with exported programs; rows of others stay"
    )
    args = p.parse_args()
    if args.ranks:
        names = args.parts if args.parts != p.get_default("parts") else []
        wrong = [row for row in own_ranks.rows(args.ranks, names) if _ranks_row(row)]
        sys.exit(bool(wrong))
    rows = [r for r in record.read("prove") if not _asked(r, args)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        makers = {
            "faults": lambda: faults(folder, args.each, args.kinds), "programs": lambda: programs(folder, args.programs),
            "llama": lambda: llama(folder), "plans": lambda: plans(args.plans),
        }  # fmt: skip
        for part in args.parts:
            for row in makers[part]():
                rows.append(row)
                if PARTS[part] not in ("", row["status"]):
                    print(row, flush=True)
            _write(rows)
    sys.exit(any(PARTS[r["part"]] not in ("", r["status"]) for r in rows))


if __name__ == "__main__":
    main()
