"""Mixtures of experts by their makers' sizes, two layers each, for 8 H100: plans, their bytes, and what kernels multiply.

    python -m bench experts [NAME …] [--python PATH] [--limit SECONDS]

At prefill (8,192 tokens of one sequence) and decoding (64 sequences, a token each). What a kernel of routed products multiplies
is counted by running its text in a small numpy stand-in of Triton, in which only routes and orders have values, for programs
drawn from its grid: each ``tl.dot`` counts. It is divided by what the rows that pick one of its matrices need. Routes are drawn
anew: each token picks its experts, all different, evenly (``even``) or by a Zipf law (``skewed``). A line of JSON for each
row. Needs transformers; exits 1 where a model is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.doors import apart
from bench.support import other_python, record
from bench.support.record import Row

MODELS = ("Mixtral-8x7B", "Qwen3-30B-A3B", "GPT-OSS-20B", "DeepSeek-V3")
SHAPES = {"prefill": (1, 8192), "decoding": (64, 1)}
PROGRAMS = 96  # of a kernel's grid
DEVICES = 8


class Cells(np.ndarray):
    """A tensor of a kernel."""

    def to(self, kind: Any, **_: Any) -> Cells:
        """Of another type: integers stay exact."""
        return cells(self.astype(np.int64)) if kind in ("int32", "int64") else self


def cells(x: Any) -> Cells:
    """Anything as a kernel's tensor."""
    return np.asarray(x).view(Cells)


class Pointer:
    """A place in a buffer; what a kernel only multiplies has no values."""

    def __init__(self, data: np.ndarray[Any, Any] | None, offset: Any = 0) -> None:
        self.data, self.offset = data, offset

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.data, self.offset + by)

    def __sub__(self, by: Any) -> Pointer:
        return Pointer(self.data, self.offset - by)


class Language:
    """``triton.language`` as far as kernels of routed products use it; ``dots`` adds up what is multiplied."""

    int32, int64, float32, float16, bfloat16, constexpr = "int32", "int64", "float32", "float16", "bfloat16", None
    PropagateNan = SimpleNamespace(ALL=None)

    def __init__(self, program: int) -> None:
        self.program, self.dots = program, 0
        self.where, self.maximum, self.minimum = (self.wrapped(f) for f in (np.where, np.maximum, np.minimum))

    @staticmethod
    def wrapped(f: Any) -> Any:
        """A function of numpy's, of which options are left out."""
        return lambda *args, **_: cells(f(*args))

    def program_id(self, _: int) -> Cells:
        """Which program this is."""
        return cells(self.program)

    def arange(self, lo: int, hi: int) -> Cells:
        """Lanes."""
        return cells(np.arange(lo, hi))

    def zeros(self, shape: tuple[int, ...], kind: Any = "float32") -> Cells:
        """Zeros."""
        return cells(np.zeros(shape)).to(kind)

    def full(self, shape: tuple[int, ...], value: float, kind: Any = "float32") -> Cells:
        """One number everywhere."""
        return cells(np.full(shape, value)).to(kind)

    def cast(self, x: Any, *_: Any) -> Cells:
        """Of another type."""
        return cells(x)

    def load(self, at: Pointer, mask: Any = True, other: Any = 0, **_: Any) -> Cells:
        """What stands there."""
        offset = np.asarray(at.offset)
        if at.data is None:
            return cells(np.zeros(offset.shape))
        mask = np.broadcast_to(np.asarray(mask), offset.shape)
        return cells(np.where(mask, at.data[np.where(mask, offset, 0)], other))

    def store(self, at: Pointer, value: Any, mask: Any = True, **_: Any) -> None:
        """Into a buffer that has values."""
        if at.data is not None:
            mask = np.broadcast_to(np.asarray(mask), np.shape(at.offset))
            at.data[np.asarray(at.offset)[mask]] = np.broadcast_to(value, mask.shape)[mask]

    def dot(self, a: Any, b: Any, acc: Any = None, *_: Any, **__: Any) -> Any:
        """Counted."""
        self.dots += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return acc

    def sum(self, x: Any, axis: int = 0) -> Cells:
        """Along an axis."""
        return cells(np.sum(x, axis=axis))

    def max(self, x: Any, axis: int = 0) -> Cells:
        """Along an axis."""
        return cells(np.max(x, axis=axis))

    def min(self, x: Any, axis: int = 0) -> Cells:
        """Along an axis."""
        return cells(np.min(x, axis=axis))

    def histogram(self, x: Any, bins: int) -> Cells:
        """How often there is each number."""
        return cells(np.bincount(np.ravel(x), minlength=bins)[:bins])

    def cumsum(self, x: Any, axis: int = 0) -> Cells:
        """Along an axis."""
        return cells(np.cumsum(x, axis=axis))

    def trans(self, x: Any) -> Cells:
        """Transposed."""
        return cells(np.transpose(x))

    def __getattr__(self, name: str) -> Any:
        """Whatever else is done element by element."""
        return lambda x, *_, **__: x


def multiplied(made: Any, data: dict[int, np.ndarray[Any, Any]], rng: np.random.Generator) -> float:
    """FLOPs of ``tl.dot`` in all programs of a generated kernel: of a sample of its last pass, drawn evenly.

    Args:
        data: values by number of the kernel's argument.
    """
    own, names = Language(0), dict[str, Any]()
    text = "\n".join(line for line in made.source.splitlines() if not line.startswith("import "))
    exec(compile(text, made.name, "exec"), {"tl": own, "triton": SimpleNamespace(jit=lambda f: f)}, names)  # (our own text)
    last = len(made.args)
    held = data | {last + k: np.zeros(n, np.int64) for k, (dtype, n) in enumerate(made.scratch) if dtype == "i32"}
    for one in made.passes:
        programs = np.arange(one.grid[0])
        if one is made.passes[-1]:
            programs = rng.choice(programs, min(PROGRAMS, len(programs)), replace=False)
        own.dots = 0
        for own.program in programs.tolist():
            names[one.function](*(_argument(one, p, held.get(at)) for p, at in zip(one.params, one.takes, strict=True)))
    return own.dots * made.passes[-1].grid[0] / max(1, len(programs))


def _argument(one: Any, param: str, data: np.ndarray[Any, Any] | None) -> Any:
    box = one.descriptors.get(param)
    if box is None:
        return Pointer(data)
    tile = cells(np.zeros(box.block))
    return SimpleNamespace(load=lambda _: tile, store=lambda *_: None)


def routes(rng: np.random.Generator, tokens: int, top: int, count: int, skewed: bool) -> np.ndarray[Any, Any]:
    """``[tokens, top]`` different experts of each token (Gumbel's trick for draws without replacement)."""
    weights = -np.log(np.arange(1, count + 1)) * skewed
    return np.argsort(-(weights[rng.permutation(count)] + rng.gumbel(size=(tokens, count))), axis=1)[:, :top]


def work_of(build: Any, skewed: bool, seed: int) -> tuple[float, float]:
    """What routed products of all devices multiply, and what they need, over the first of the layers that have any."""
    from tapestry.codegen.triton.emit.source import generate
    from tapestry.ir.index import bounds
    from tapestry.ir.kernel import Kernel
    from tapestry.ir.program import Launch
    from tapestry.ir.recognition.selection_sum import place_read, routed

    graph, program, rng = build.plan.graph, build.program, np.random.default_rng(seed)
    found, done, picks = 0.0, 0.0, dict[str, np.ndarray[Any, Any]]()
    for step in (s for s in program.steps if isinstance(s, Launch)):
        op = graph.ops[step.op]
        route = routed(op) if hasattr(op, "inner") else None
        known = place_read(route.wanted, route.places) if route else None
        if route is None or known is None:
            continue
        read = op.reads[known[0]]
        whole, size = graph.tensors[read.tensor], int(np.prod(graph.tensors[read.tensor].shape))
        tokens = max(n for t in graph.inputs for n in graph.tensors[t].shape if "ids" in t)
        if read.tensor not in picks:
            picks[read.tensor] = routes(rng, tokens, size // tokens, route.places, skewed).reshape(whole.shape)
        for d, block in enumerate(step.blocks):
            if block is None:
                continue
            ins = tuple(program.buffers[b].boxes[d] if b else None for b in step.ins)
            outs = tuple(program.buffers[b].boxes[d] for b in step.outs)
            made = generate(graph, Kernel(op=step.op, mode=step.mode, block=block, ins=ins, outs=outs), target="sm90")
            box = ins[known[0]]
            assert box is not None
            part = picks[read.tensor][tuple(slice(*b) for b in box)].ravel()
            found += multiplied(made, {made.reads.index(known[0]): part}, rng)
            extent = {x.name: hi - lo for x, (lo, hi) in zip(op.space, block, strict=True)}
            at = {x.name: (lo, hi - 1) for x, (lo, hi) in zip(op.space, block, strict=True)}
            low, high = bounds(route.base, at)
            lo, hi = at[route.over.name]
            mine = int(((part >= low + lo) & (part <= high + hi)).sum())
            columns = np.prod([extent[x.name] for x in route.of_columns if x.name not in str(route.base)])
            done += 2 * mine * float(columns) * float(np.prod([extent[x.name] for x in op.inner_dims]))
    return found, done


def worker(case: Row) -> Row:
    """One model at one size, in this process."""
    warnings.simplefilter("ignore")
    import tapestry
    from bench.exporters import zoo_models

    made, name = zoo_models.ZOO, case["model"]
    made[name] = (*made[name][:3], tuple(case["shape"]))
    module, inputs = zoo_models.made(name)
    plan = tapestry.compile(module, example_inputs=inputs, devices=DEVICES, topology="h100", target="triton:sm90")
    r = plan.report
    row: Row = {"objective_s": r["objective_s"], "gap": r["gap"], "moved": sum(t["bytes"] for t in r["transfers"])}
    row["in_groups"] = "part_routes" in str(plan.build.moves)
    row["largest"] = max((t["bytes"] for t in r["transfers"]), default=0)
    for skewed in (False, True):
        found, needed = work_of(plan.build, skewed, 1)
        row["skewed" if skewed else "even"] = found / needed
    return row


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    other_python.add_python(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--limit", type=float, default=400, help="seconds of a model at one size")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return apart.answer(worker, args.worker)
    other_python.moved(args, "experts")
    if find_spec("transformers") is None:
        sys.exit("transformers is not installed: pip install transformers, or --python PATH of an environment that has it")
    rows: list[Row] = []
    for name in args.names or MODELS:
        for what, shape in SHAPES.items():
            case = {"model": name, "shape": shape}
            rows.append({"model": name, "rows": what, **apart.measured("experts", case, args.limit)})
            print(json.dumps(rows[-1]), flush=True)
    record.write("experts", rows)
    return int(any("failed" in r for r in rows))


if __name__ == "__main__":
    sys.exit(main())
