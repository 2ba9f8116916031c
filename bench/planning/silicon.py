"""The presets' seconds beside measured times of real cards, and a model's decoding steps on 1 to 8 of them.

    .venv/bin/python -m bench silicon FOLDER [--json] [--only KIND …]

FOLDER has the tables that are described in its README: products, causal attention, decoding attention, calls of NCCL inside a
host, expert layers, decoding steps. Each row is priced by the planner's own functions: an operation on one device
(`plan.cost.compute`), a merge of sums (`plan.cost.collective`), an all-gather (`plan.cost.transfer`), an all-to-all
(`Topology.call_seconds`: what the planner adds for copies to their places is not in the tables). Figures are measured ÷ ours.
Decoding steps are whole plans of decoders of a layer and of two at the shortest and the longest context, drawn out to all
layers and in between. Writes bench/results/silicon.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

import tapestry
from bench.support import llama_layers, record
from bench.support.half_models import in_half
from bench.support.record import Row
from tapestry.errors import TapestryError
from tapestry.ir.footprint import Boxes
from tapestry.ir.graph import Block, Graph
from tapestry.ir.plan import Layout, Strategy
from tapestry.ir.syntax.parser import parse
from tapestry.plan.cost import collective, transfer
from tapestry.plan.cost.compute import seconds
from tapestry.plan.strategy import op_boxes, reads_once, result_boxes, tensor_boxes
from tapestry.plan.topology import Topology, parse_mesh, topology

CARDS = {"a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "l40s": "l40s"}
DECODING = "h100"  # the card of the decoding steps
LEAST = 1 << 16  # bytes of a message that is judged


@cache
def cards(card: str, count: int = 1) -> Topology:
    """So many of a card."""
    return topology(parse_mesh(str(count)), CARDS[card])


def alone(graph: Graph, topo: Topology) -> float:
    """Seconds of a graph's operations on one device."""
    whole = Strategy((None,), (None,))

    def of(op: Block) -> float:
        block, final = op_boxes(op, whole.dims, topo.mesh), result_boxes(op, whole, topo.mesh)
        return seconds(op, graph, block, final, reads_once(op, graph, whole, topo.mesh), topo)

    return sum(of(op) for op in graph.ops if isinstance(op, Block))


def product(r: Row) -> float:
    """``[m, k] @ [k, n]`` of bf16."""
    m, n, k = (int(r[x]) for x in "mnk")
    text = f"""graph g input x: bf16[{m}, {k}] input w: bf16[{k}, {n}]
      y: bf16[{m}, {n}] = op [i: {m}, j: {n} | k: {k} sum] reads x[i, k], w[k, j]
        body cast(x, f32) * cast(w, f32) then cast(acc0, bf16) output y"""
    return alone(parse(text), cards(r["card"]))


def attention(r: Row, rows: int, keys: int, heads: int, groups: int, causal: bool) -> float:
    """Rows over keys, as `compile` has it of ONNX's Attention: scores in f32, rounded, and what a row of -inf gives."""
    b, d, each = int(r["batch_size"]), int(r["head_dim"]), heads // groups
    score = "let0 * 0.1" if not causal else "where(ge(index(i - n), 0), (let0 * 0.1), f32(-inf))"
    text = f"""graph g input q: bf16[{b}, {heads}, {rows}, {d}] input k: bf16[{b}, {groups}, {keys}, {d}]
      input v: bf16[{b}, {groups}, {keys}, {d}]
      y: bf16[{b}, {heads}, {rows}, {d}] = op [b: {b}, h: {heads}, i: {rows}, x: {d} | n: {keys} softsum]
        reads v[b, floor((h)/{each}), n, x], q[b, h, i, m], k[b, floor((h)/{each}), n, m]
        let [m: {d} sum] cast(q, f32) * cast(k, f32)
        body cast(cast({score}, bf16), f32), 1.0, cast(v, f32) then cast(acc2 / acc1, bf16) output y"""
    return alone(parse(text), cards(r["card"]))


def prefill(r: Row) -> float:
    """Causal attention of tokens over themselves."""
    n = int(r["isl"])
    return attention(r, n, n, int(r["num_heads"]), int(r["num_key_value_heads"]), True)


def decode(r: Row) -> float:
    """One new token for each sequence."""
    keys = int(r["isl"]) + int(r["step"])
    return attention(r, 1, keys, int(r["num_heads"]), int(r["num_key_value_heads"]), False)


def call(r: Row) -> float:
    """A collective, of so many elements of 2 bytes in the larger buffer."""
    n, size = int(r["num_gpus"]), 2 * int(r["message_size"])
    topo = cards(r["card"], n)
    match r["op_name"]:
        case "all_reduce" | "reduce_scatter" as name:
            ways = collective.merge(size, [(0, name == "reduce_scatter")], topo, ("sum", "sum"))
            return sum(w.seconds for w in ways)
        case "all_gather":
            shape = (max(n, size // 2),)
            held: list[tuple[Layout, Boxes]] = [((0,), tensor_boxes(shape, (0,), topo.mesh))]
            return float(transfer.costs(held, [tensor_boxes(shape, (None,), topo.mesh)], 2, topo).seconds[0, 0])
        case _:
            found = topo.call_seconds("all_to_all_single", n, size, 1, n)
            return found if found is not None else float("nan")


def experts(r: Row) -> float:
    """Two products of the rows that a share of the experts gets, three matrices each."""
    tokens, width, inner = (int(r[k]) for k in ("num_tokens", "hidden_size", "inter_size"))
    inner, own = inner // int(r["moe_tp_size"]), int(r["num_experts"]) // int(r["moe_ep_size"])
    rows = max(1, tokens * int(r["topk"]) // int(r["moe_ep_size"]))
    text = f"""graph g input x: bf16[{rows}, {width}] input e: i64[{rows}] input w: bf16[{own}, {width}, {2 * inner}]
      input u: bf16[{own}, {inner}, {width}]
      a: bf16[{rows}, {2 * inner}] = op [i: {rows}, j: {2 * inner} | v: {own} sum] reads e[i], x[i, m], w[v, m, j]
        let [m: {width} sum] cast(x, f32) * cast(w, f32) body where(eq(e, index(v)), let0, 0.0) then cast(acc0, bf16)
      h: bf16[{rows}, {inner}] = op [i: {rows}, j: {inner}] reads a0 = a[i, j], a1 = a[i, j + {inner}]
        body (a0 * sigmoid(a0)) * a1
      y: bf16[{rows}, {width}] = op [i: {rows}, j: {width} | v: {own} sum] reads e[i], h[i, m], u[v, m, j]
        let [m: {inner} sum] cast(h, f32) * cast(u, f32) body where(eq(e, index(v)), let0, 0.0) then cast(acc0, bf16)
      output y"""
    return alone(parse(text), cards(r["card"]))


TABLES = {
    "products": product,
    "attention_prefill": prefill,
    "attention_decode": decode,
    "collectives": call,
    "experts": experts,
}


def kind(table: str, r: Row) -> str:
    """What a row is counted under."""
    return f"{r['op_name']} of {r['num_gpus']}" if table == "collectives" else table


def ratios(folder: Path, table: str) -> Iterator[tuple[str, str, float]]:
    """(card, kind, measured ÷ ours) of the rows of a table that are judged."""
    with (folder / f"{table}.csv").open() as f:
        for r in csv.DictReader(f):
            small = table == "collectives" and 2 * int(r["message_size"]) < LEAST
            if r["card"] in CARDS and not small:
                yield r["card"], kind(table, r), float(r["ms"]) / 1e3 / TABLES[table](r)


def decoder(size: Row, batch: int, context: int, count: int) -> float:
    """Seconds of a decoding step of all layers on so many cards."""
    found: list[float] = []
    of = llama_layers.Size(
        batch=batch, sequence=1, cached=context, width=int(size["hidden"]), heads=int(size["heads"]),
        groups=int(size["kv_heads"]), inner=int(size["intermediate"]),
    )  # fmt: skip
    for layers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            path = llama_layers.write(layers, Path(folder), of)
            onnx.save(in_half(onnx.load(path, load_external_data=False), "bf16"), path)
            made = tapestry.compile(path, mesh=str(count), topology=DECODING, weights=False)
            found.append(float(made.report["objective_s"]))
    head = {"card": "h100_sxm", "m": batch, "n": int(size["vocabulary"]) // count, "k": size["hidden"]}
    return found[0] + (int(size["layers"]) - 1) * (found[1] - found[0]) + product(head)


def ranks(values: Sequence[float]) -> np.ndarray:
    """The place of each in their order."""
    return np.argsort(np.argsort(values))


def gain(seconds: dict[tuple[int, int, int], float], before: int, after: int) -> float:
    """How many times as fast steps are on more cards: the median over contexts and batches."""
    both = [(c, b) for c, b, t in seconds if t == before and (c, b, after) in seconds]
    return float(np.median([seconds[c, b, before] / seconds[c, b, after] for c, b in both]))


def end_to_end(folder: Path) -> Iterator[Row]:
    """Each model on each engine: speed-ups from one number of cards to the next, and how alike the orders are."""
    sizes = {r["model"]: r for r in csv.DictReader((folder / "models.csv").open())}
    steps: dict[tuple[str, str], dict[tuple[int, int, int], float]] = defaultdict(dict)
    for r in csv.DictReader((folder / "end_to_end.csv").open()):
        context = int(r["input_tokens"]) + int(r["output_tokens"]) // 2
        steps[r["model"], r["engine"]][context, int(r["batch"]), int(r["tp"])] = float(r["tpot_ms"]) / 1e3
    ours: dict[tuple[str, int, int, int], float] = {}
    for (model, engine), measured in steps.items():
        ends = min(c for c, *_ in measured), max(c for c, *_ in measured)
        for batch, count in {(b, t) for _, b, t in measured}:
            low, high = (decoder(sizes[model], batch, c, count) for c in ends)
            for c in {c for c, b, t in measured if (b, t) == (batch, count)}:
                ours[model, c, batch, count] = low + (high - low) * (c - ends[0]) / max(1, ends[1] - ends[0])
        pairs = [(measured[at], ours[model, *at]) for at in measured]
        of_both = ranks([a for a, _ in pairs]), ranks([b for _, b in pairs])
        tps, gains = sorted({t for *_, t in measured}), dict[str, Row]()
        planned = {at: ours[model, *at] for at in measured}
        for before, after in pairwise(tps):
            gains[f"{before} to {after}"] = {"measured": gain(measured, before, after), "ours": gain(planned, before, after)}
        steps_of = float(np.median([a / b for a, b in pairs]))
        yield {
            "model": model, "engine": engine, "n": len(pairs), "rank_correlation": float(np.corrcoef(*of_both)[0, 1]),
            "speedups": gains, "measured_by_ours": steps_of,
        }  # fmt: skip


def main() -> int:
    """Price every row, print and record; exits 2 where the folder has no tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=(*TABLES, "end_to_end"), metavar="KIND", default=(*TABLES, "end_to_end"))
    args = parser.parse_args()
    there = [t for t in args.only if (args.folder / f"{t}.csv").is_file()]
    if not there:
        raise TapestryError("no table of measured times", where=str(args.folder), hint="a folder with products.csv, …")
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for table in there:
        for card, of, ratio in ratios(args.folder, table) if table in TABLES else ():
            found[card, of].append(ratio)
    rows: list[Row] = []
    for (card, of), values in sorted(found.items()):
        p5, median, p95 = np.percentile(values, [5, 50, 95]).tolist()
        rows.append({"card": card, "kind": of, "n": len(values), "p5": p5, "median": median, "p95": p95})
    ends = list(end_to_end(args.folder)) if "end_to_end" in there else []
    document = {"rows": rows, "end_to_end": ends}
    record.RESULTS.mkdir(exist_ok=True)
    (record.RESULTS / "silicon.json").write_text(json.dumps({**record.stamp(), **document}, indent=1) + "\n")
    if args.json:
        print(json.dumps(document, indent=1))
        return 0
    table = Table(title="measured ÷ ours")
    for name in ("card", "kind", "n", "5 %", "median", "95 %"):
        table.add_column(name)
    for r in rows:
        table.add_row(r["card"], r["kind"], str(r["n"]), *(f"{r[k]:.2f}" for k in ("p5", "median", "p95")))
    Console().print(table)
    for r in ends:
        gains = ", ".join(f"{k}: {v['measured']:.2f} (ours {v['ours']:.2f})" for k, v in r["speedups"].items())
        print(f"{r['model']} on {r['engine']}, {r['n']} steps: rank correlation {r['rank_correlation']:.3f}; speed-ups {gains}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
