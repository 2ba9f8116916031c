"""Measuring a kernel's candidates on the GPU that it will run on: right first, then fastest.

Every candidate computes the same random data into buffers full of NaN, and is held against the CPU target's result before its
time counts. Times are medians, with the L2 cache flushed before each call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from tapestry.codegen.kernel_sources import distinct_kernels
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.base.scalars import NAMES, TORCH_DTYPES
from tapestry.codegen.torch_cpu.kernels import from_numpy
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import TritonKernel, generate
from tapestry.codegen.triton.kernel_config import candidates
from tapestry.codegen.triton.run import library
from tapestry.codegen.triton.run.launcher import Call, assemble_all, bind, first_line, here
from tapestry.codegen.triton.run.tuned import Cache, Choice, chip_name
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.errors import TapestryError
from tapestry.ir.expr import Call as Applied
from tapestry.ir.expr import Index, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, shape
from tapestry.ir.program import Program
from tapestry.ir.recognition.route_groups import unread
from tapestry.ir.types import FLOAT8, numpy_dtype

Tensor = torch.Tensor
log = logging.getLogger("tapestry")


Timer = Callable[[Call], float]
Candidates = Callable[[Graph, Kernel], Iterable[KernelConfig]]

TOLERANCE = {"f64": 1e-11, "f32": 2e-5, "f16": 5e-3, "bf16": 4e-2}  # of the largest value; sums of some thousand terms
COARSE = 100  # times that for products rounded to tf32, and for sums of 8-bit floats on Hopper (`emit_dot.dot_options`)
WRONG = "wrong:"  # how a refusal begins where a candidate ran and gave other values
MARGIN = 0.99  # of the default's time: what a candidate must stay under to replace it
_FATAL = ("CUDA error", "HIP error", "illegal memory", "misaligned address", "launch failure", "device-side assert")
FLUSH = 256 << 20  # bytes: more than any L2 cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate: its time, or why it was refused. ``config`` is ``None`` for the library."""

    config: KernelConfig | None
    seconds: float | None
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How to measure.

    Attributes:
        timer: seconds of a call.
        candidates: config to try for a kernel, the default first.
        libraries: also measure the vendor's library.
        limit: seconds for everything.
        precision: of products of f32.
        again: measure what the cache has, too.
    """

    device: torch.device
    timer: Timer
    candidates: Candidates
    libraries: bool = False
    limit: float = 600.0
    again: bool = False
    precision: str = "ieee"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Data:
    """Random inputs of a kernel where it runs, what it should give, and buffers for what it gives."""

    ins: list[Tensor | None]
    states: list[Tensor]
    outs: list[Tensor]
    expected: list[Tensor]
    narrow: bool = False  # whether 8-bit floats are multiplied, whose sums not every chip keeps in f32
    loose: bool = False  # whether a kernel may leave cells alone that nobody reads: 0 is expected there


def cuda_timer(device: torch.device, budget: float = 0.05) -> Timer:
    """Medians of single calls with a cold L2 cache, by CUDA events; about ``budget`` seconds for each candidate."""
    flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)

    def timer(call: Call) -> float:
        call()
        torch.cuda.synchronize(device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(50)]
        spent, done = 0.0, 0
        for first, last in events:
            flush.zero_()
            first.record()
            call()
            last.record()
            done += 1
            if done == 3:  # the queue is deep enough for the device to be busy all the time
                last.synchronize()
                spent = sum(a.elapsed_time(b) for a, b in events[:done]) / done * 1e-3
            if done >= 5 and done * spent > budget:
                break
        torch.cuda.synchronize(device)
        return float(np.median([a.elapsed_time(b) for a, b in events[:done]])) * 1e-3

    return timer


def local_candidates(device: torch.device, precision: str = "ieee") -> Candidates:
    """The generator's own candidates for a device, the model's choice first."""
    name = chip_name(device)
    fails = version("triton").startswith("3.9.")  # in attention with warps that load, and says so in a thousand lines

    def found(graph: Graph, kernel: Kernel) -> Iterable[KernelConfig]:
        form = kernel_form(graph, kernel, precision)
        return [k for k in candidates(form, name) if not (k.warp_specialize and fails and form.kind == "stream")]

    return found


def tune(
    graph: Graph, program: Program, cache: Cache, how: How, report: Callable[[int, int], None] = lambda done, total: None
) -> list[dict[str, Any]]:
    """Measure every distinct kernel of a program; one row per kernel. Winners are in the cache as soon as they are known."""
    found = distinct_kernels(graph, program).values()
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    for done, (kernel, launches) in enumerate(found):
        report(done, len(found))
        key = cache.key(graph, kernel)
        name = generate(graph, kernel, target=chip_name(how.device), precision=how.precision).name
        row: dict[str, Any] = {"kernel": name, "launches": launches}
        known = None if how.again else cache.read(key)
        left = how.limit - (time.monotonic() - start)
        if known is not None or left <= 0:
            why = "in the cache" if known is not None else "the time limit"
            knobs = asdict(known.config) if known and known.config else None
            rows.append({**row, "skipped": why, "knobs": knobs, "wrong": known.wrong if known else ""})
            continue
        trials = measure(graph, kernel, how, left / (len(found) - done) * 2)
        choice, measured = choose(trials)
        cache.write(key, choice, measured)
        rows.append({**row, **measured, "knobs": asdict(choice.config) if choice.config else None, "library": choice.library})
    report(len(found), len(found))
    return rows


def choose(trials: Sequence[Trial]) -> tuple[Choice, dict[str, Any]]:
    """The fastest right candidate, the default unless it is beaten clearly; and the numbers behind it.

    The numbers say what was ``wrong`` with the default's values, the choice if no candidate's were right.
    """
    ours = [t for t in trials if t.config is not None and t.seconds is not None]
    theirs = next((t.seconds for t in trials if t.config is None), None)
    default = trials[0].seconds if trials else None
    best = min(ours, key=lambda t: t.seconds or 0.0, default=None)
    config = None if best is None else best.config
    seconds = None if best is None else best.seconds
    if seconds is not None and default is not None and seconds > MARGIN * default:
        config, seconds = None, default
    faster = theirs is not None and (seconds is None or theirs < MARGIN * seconds)
    wrong = [t.refused for t in trials if t.config is not None and t.refused.startswith(WRONG)]
    refused = [f"{t.config or 'library'}: {t.refused}" for t in trials if t.refused]
    measured = {
        "seconds": seconds,
        "default_seconds": default,
        "library_seconds": theirs,
        "tried": len(trials),
        "refused": refused,
        "wrong": wrong[0] if wrong and (not ours or trials[0].refused == wrong[0]) else "",
    }
    return Choice(config=config, library=faster, wrong=wrong[0] if wrong and not ours else ""), measured


def measure(graph: Graph, kernel: Kernel, how: How, seconds: float = float("inf")) -> list[Trial]:
    """Try a kernel's candidates, the default first; but for that one, none is begun when so many seconds are over.

    They count from the start: the reference on the CPU and compiling take longer than to measure.

    Raises:
        TapestryError: the GPU failed, so that nothing after this can be trusted.
    """
    until = time.monotonic() + seconds
    data = random_data(graph, kernel, how.device, how.seed)
    trials: list[Trial] = []
    wanted = list(how.candidates(graph, kernel))
    if how.device.type != "cpu":
        made = generated_with(graph, kernel, wanted, chip_name(how.device), how.precision)
        assemble_all([(tk, one) for tk in made for one in tk.launches], here())  # in Triton's cache from here on
    for config in wanted:
        if trials and time.monotonic() > until:
            break
        trials.append(_try(graph, kernel, data, how, config))
    if how.libraries and (call := library.bind_library(graph, kernel, data.ins, data.outs)) is not None:
        trials.append(_timed(call, data, how, None))
    return trials


def generated_with(
    graph: Graph, kernel: Kernel, wanted: Sequence[KernelConfig], target: str, precision: str
) -> list[TritonKernel]:
    """What the generator makes of configs; it may refuse some."""
    out: list[TritonKernel] = []
    for config in wanted:
        with suppress(Exception):
            out.append(generate(graph, kernel, config, target=target, precision=precision))
    return out


def _try(graph: Graph, kernel: Kernel, data: Data, how: How, config: KernelConfig) -> Trial:
    try:
        made = generate(graph, kernel, config, target=chip_name(how.device), precision=how.precision)
        given = [x for k in made.reads if (x := data.ins[k]) is not None]
        call = bind(made, [*given, *data.states, *data.outs])
    except Exception as e:
        return Trial(config=config, seconds=None, refused=f"does not compile: {first_line(e)}")
    return _timed(call, data, how, config)


def _timed(call: Call, data: Data, how: How, config: KernelConfig | None) -> Trial:
    """The time of a call, if what it computes is right."""
    for out in data.outs:
        out.fill_(0 if data.loose else float("nan") if out.is_floating_point() else 1)
    try:
        call()
        why = wrong(data, COARSE if how.precision == "tf32" or data.narrow else 1)
        seconds = None if why else how.timer(call)
    except Exception as e:
        if any(text in str(e) for text in _FATAL):
            raise TapestryError(
                "the GPU failed while a candidate ran; kernels measured before it are in the cache",
                where=str(config),
                why=first_line(e),
                hint="run tune again; it goes on from there",
            ) from None
        return Trial(config=config, seconds=None, refused=first_line(e))
    return Trial(config=config, seconds=seconds, refused=why)


def wrong(data: Data, factor: float = 1.0) -> str:
    """How the results differ from what they should be; "" where they do not. ``factor`` widens the tolerance of f32."""
    for n, (got, want) in enumerate(zip(data.outs, data.expected, strict=True)):
        have = got.cpu()
        if not want.is_floating_point():
            if not torch.equal(have, want):
                return f"{WRONG} output {n} differs in {int((have != want).sum())} cells"
            continue
        a, b = have.double(), want.double()
        scale = float(b[b.isfinite()].abs().max()) if bool(b.isfinite().any()) else 1.0
        tolerance = TOLERANCE[NAMES[want.dtype]] * (factor if want.dtype == torch.float32 else 1.0)
        close = torch.isclose(a, b, rtol=0.0, atol=tolerance * max(scale, 1e-30), equal_nan=True)
        if not bool(close.all()):
            return f"{WRONG} output {n} is off by {float((a - b).abs().nan_to_num(float('inf')).max()):.3g} of {scale:.3g}"
    return ""


def random_data(graph: Graph, kernel: Kernel, device: torch.device, seed: int) -> Data:
    """Inputs by a seed, and what the CPU target makes of them."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    rng = np.random.default_rng(seed)
    dtypes = [graph.tensors[r.tensor].dtype for r in op.reads]
    rows = _rows(op)
    ins = [None if b is None else _random(d, shape(b), rng, rows) for b, d in zip(kernel.ins, dtypes, strict=True)]
    fields = [e.dtype for e in op.body]
    states: list[Tensor] = []
    if kernel.mode == "finish":
        from tapestry.ir.recognition.state import state_box

        boxes = [state_box(op, f, kernel.outs[0]) for f in range(len(fields))]
        states = [_random(d, shape(b), rng, rows).abs() + 1 for d, b in zip(fields, boxes, strict=True)]
    results = fields if kernel.mode == "partial" else [graph.tensors[t].dtype for t in op.outs]
    expected = [v.contiguous() for v in TorchCpu().kernel(graph, kernel)(ins, [s.clone() for s in states])]
    outs = [torch.empty(shape(b), dtype=TORCH_DTYPES[d], device=device) for b, d in zip(kernel.outs, results, strict=True)]
    there = [None if x is None else x.to(device) for x in ins]
    narrow = any(d in FLOAT8 for d in dtypes)
    return Data(there, [s.to(device) for s in states], outs, expected, narrow, unread(graph, op) is not None)


def _random(dtype: str, extents: Sequence[int], rng: np.random.Generator, rows: int) -> Tensor:
    if dtype in TOLERANCE:
        return from_numpy(rng.standard_normal(extents).astype(np.float32)).to(TORCH_DTYPES[dtype])
    if dtype in FLOAT8:
        return from_numpy(rng.standard_normal(extents).astype(numpy_dtype(dtype)))
    if dtype == "bool":
        return from_numpy(rng.random(extents) < 0.5)
    kind = numpy_dtype(dtype)
    return from_numpy(rng.integers(0, min(rows, np.iinfo(kind).max), extents).astype(kind))


def _rows(op: Block) -> int:
    """For an operation that picks rows of a table by number, how many there are; else a small number."""
    equals = (x for e in op.point for x in walk(e) if isinstance(x, Applied) and x.fn == "eq")
    picks = any(isinstance(a, Index) for x in equals for a in x.args)
    return max((d.size for d in op.reduce), default=8) if picks else 8
