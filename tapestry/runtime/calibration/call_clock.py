"""Seconds of the calls of torch.distributed that carry a plan's collectives and messages, by size and group."""

from __future__ import annotations

import base64
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from onnx import helper

from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, shape
from tapestry.ir.plan import MeshAxis, Plan, Strategy
from tapestry.ir.program import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, EXCHANGE, REDUCE_SCATTER, Launch, Load, carrier
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import FLOATS, itemsize, numpy_dtype
from tapestry.plan.cost import compute
from tapestry.plan.lower import lower
from tapestry.plan.strategy import footprints, op_boxes
from tapestry.runtime.calibration.rate_fit import KernelPoint, kernel_point
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.one_process.static_schedule import Schedule
from tapestry.runtime.target_protocol import Target

api: Any = torch.distributed  # its types are known in part
SIZES = (8, 512, *(1 << k for k in range(12, 25)))  # bytes
REPEATS = 4
GATHER = getattr(api, "all_gather_single", None) or api.all_gather_into_tensor  # as `runtime.processes.wire` calls them
SCATTER = getattr(api, "reduce_scatter_single", None) or api.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class CallPoint:
    """One call as measured: seconds of the slowest rank, all groups of that size and stride at once."""

    call: str
    group: int
    stride: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of this process's group, ``stride`` apart; ``handle`` is the backend's, to which all ranks contributed."""

    ranks: tuple[int, ...]
    stride: int
    handle: Any


def groups(rank: int, world: int, strided: bool) -> Iterator[Group]:
    """This rank's group of every size that divides the world, neighbours together; with ``strided`` also those whose
    neighbours are far apart, as along the outer axes of a mesh. All ranks make all of them."""
    for size in (n for n in range(2, world + 1) if world % n == 0):
        strides = [s for s in range(1, world // size + 1) if (world // size) % s == 0] if strided else [1]
        for stride in strides:
            mine: Group | None = None
            for first in range(world):
                if first // stride % size:
                    continue
                ranks = tuple(first + stride * k for k in range(size))
                handle = api.new_group(list(ranks))
                mine = Group(ranks, stride, handle) if rank in ranks else mine
            assert mine is not None
            yield mine


@dataclass(frozen=True, slots=True)
class Timed:
    """A call on buffers that are there.

    Attributes:
        nbytes: of them, as `ir.program.Call` has them.
        ahead: what the engine does some kernels before it makes the call.
    """

    run: Callable[[], object]
    nbytes: int = 0
    ahead: Callable[[], object] = lambda: None

    def whole(self) -> None:
        """All of it at once."""
        self.ahead()
        self.run()


def call_of(name: str, group: Group, nbytes: int, device: torch.device) -> Timed:
    """The call on about so many bytes."""
    n, cells = len(group.ranks), max(nbytes // 4, 1)
    if name == EXCHANGE:
        cells = max(cells // (n - 1), 1)
        exchange = Exchange(group, cells, device)
        return Timed(exchange.finish, 4 * cells * (n - 1), exchange.receive)
    part = max(cells // n, 1)
    if carrier(name, "gloo" if device.type == "cpu" else "nccl") == EXCHANGE:
        return _gathered(group, part, device, merged=name == REDUCE_SCATTER)
    whole, other = torch.zeros(part * n, device=device), torch.zeros(part * n, device=device)  # sums stay what they are
    piece, roots, g = torch.ones(part, device=device), cycle(group.ranks), group.handle
    calls: dict[str, Callable[[], object]] = {
        ALL_REDUCE: lambda: api.all_reduce(whole, group=g),
        ALL_GATHER: lambda: GATHER(whole, piece, group=g),
        REDUCE_SCATTER: lambda: SCATTER(piece, whole, group=g),
        ALL_TO_ALL: lambda: api.all_to_all_single(other, whole, group=g),
        BROADCAST: lambda: api.broadcast(whole, src=next(roots), group=g),  # in turns: one sender would run ahead
    }
    return Timed(calls[name], 4 * part * n)


def _gathered(group: Group, part: int, device: torch.device, *, merged: bool) -> Timed:
    """A gather, or with ``merged`` a reduce-scatter, as the engine makes it of messages."""
    exchange, parts = Exchange(group, part, device), torch.ones(len(group.ranks), part, device=device)

    def run() -> None:
        exchange.finish()
        if merged:
            torch.stack(list(parts), dim=-1).sum(-1)

    return Timed(run, 4 * part * len(group.ranks), exchange.receive)


class Exchange:
    """Every rank sends to every other one of the group, and receives as much: as the engine does, which says where a message is
    to go before it sends its own (`runtime.messages.point_to_point`). On gloo the word that a receiver is ready would otherwise
    wait behind the bytes that this rank sends, and both directions of a link would take turns."""

    def __init__(self, group: Group, cells: int, device: torch.device) -> None:
        others = [r for r in group.ranks if r != api.get_rank()]
        sent = torch.ones(cells, device=device)
        self._receives = [api.P2POp(api.irecv, torch.ones(cells, device=device), r, group.handle) for r in others]
        self._sends = [api.P2POp(api.isend, sent, r, group.handle) for r in others]
        self._ahead = device.type == "cpu"  # on NCCL a receive holds up the stream until it is met
        self._works: list[Any] = []

    def receive(self) -> None:
        """Post what is to come, where that is done ahead."""
        if self._ahead:
            self._works = list(api.batch_isend_irecv(self._receives))

    def send(self) -> None:
        """Send, and where nothing is posted ahead receive."""
        self._works += api.batch_isend_irecv(self._sends if self._ahead else self._receives + self._sends)

    def wait(self) -> None:
        """For all that was posted."""
        for work in self._works:
            work.wait()
        self._works = []

    def finish(self) -> None:
        """Send and wait."""
        self.send()
        self.wait()


class CallClock:
    """Measures calls that all ranks make together.

    Attributes:
        work: what each rank does between two calls, where these are measured in place: threads of the backend have gone to
            sleep meanwhile, caches hold other things, and one rank comes later than another.
    """

    def __init__(
        self, device: torch.device, settled: Callable[[Sequence[float]], float] = min, work: Callable[[], object] | None = None
    ) -> None:
        self.device, self.settled, self.work = device, settled, work

    def agreed(self, seconds: float) -> float:
        """The largest of all ranks' numbers."""
        out = torch.tensor([seconds], dtype=torch.float64)
        api.all_reduce(out, op=api.ReduceOp.MAX)
        return float(out[0])

    def seconds(self, call: Timed, window: float) -> float:
        """Seconds of one call: the mean over as many as fit into a time, of the slowest rank.

        All groups make as many calls, so that none is measured while another one rests.
        """
        call.whole()  # connections are made by the first call
        once = self.agreed(self._mean(call.whole, 2))
        if once > window:
            return once
        if self.work is not None:
            return self._in_place(call, self.work, window)
        return self.settled([self.agreed(self._mean(call.whole, n)) for n in self._counts(once, window)])

    def _in_place(self, call: Timed, work: Callable[[], object], window: float) -> float:
        """Seconds that a call adds to the work before it; at least what it takes without."""

        def both() -> None:
            call.ahead()
            work()
            call.run()

        once = self.agreed(self._mean(both, 2))
        counts = self._counts(once, window)
        added = [self.agreed(self._mean(both, n)) - self.agreed(self._mean(work, n)) for n in counts]
        return max(statistics.median(added), min(self.agreed(self._mean(call.whole, 4)) for _ in counts))

    @staticmethod
    def _counts(once: float, window: float) -> list[int]:
        return [max(2, min(4096, int(window / REPEATS / max(once, 1e-7))))] * REPEATS

    def _mean(self, run: Callable[[], object], count: int) -> float:
        api.barrier()
        start = time.perf_counter()
        for _ in range(count):
            run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / count


# This machine, as far as measurements depend on it. Light: it does not import torch.


LAST_CACHE = 32 << 20


def memory_bytes() -> int:
    """Bytes of its memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def last_cache() -> int:
    """Bytes of the largest cache of a core, as Linux says it; 32 MiB where it says nothing."""
    try:
        found = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        return max((int(t.removesuffix("K")) << 10 for t in found if t.endswith("K")), default=LAST_CACHE)
    except (OSError, ValueError):
        return LAST_CACHE


# Operations to measure, as texts of the IR in the forms that plans have: a class of kernels at several sizes.
#
# Every probe is one operation, written ``copies`` times with weights of its own, so that these come from where a model's come
# from: a real model's weights do not stay in a core's cache between two uses.


COLD = 2 * last_cache()  # bytes of weights in all copies of a probe, where a probe has any
COPIES = 12  # with the weights of what runs between them (`kernel_clock`), as many bytes
GELU = "(acc0 + b) * (0.5 * (erf(((acc0 + b) / 1.4142135381698608)) + 1.0))"


@dataclass(frozen=True)
class Probe:
    """An operation.

    Attributes:
        tensors: inputs, and after ``/`` weights: ``x: f32[4, 8] / w: f32[8, 8]``.
        op: of one output ``y``.
    """

    kind: str
    tensors: str
    op: str
    dtype: str = "f32"

    @cached_property
    def graph(self) -> Graph:
        """The operation as often as `COLD` weights allow, over the same inputs and weights of each copy's own."""
        one = parse(f"graph probe\n{self._declared(0)}{self.op.replace('@', '0')}\noutput y0\n")
        size = sum(t.size * itemsize(t.dtype) for n, t in one.tensors.items() if n in one.weights)
        copies = max(1, min(COPIES, COLD // size)) if size else 1
        ops = "\n".join(self.op.replace("@", str(k)) for k in range(copies))
        outs = ", ".join(f"y{k}" for k in range(copies))
        return parse(f"graph probe\n{self._declared(copies - 1)}{ops}\noutput {outs}\n")

    def _declared(self, last: int) -> str:
        inputs, _, weights = self.tensors.partition(" / ")
        lines = [f"input {t}" for t in inputs.split("; ")]
        for k in range(last + 1):
            lines += [f'weight {t.replace("@", str(k))} at "" 0 0 "" ""' for t in weights.split("; ") if t]
        return "\n".join(lines) + "\n"


def _product_probe(m: int, k: int, n: int, dtype: str = "f32", then: str = "") -> Probe:
    """x[m, k] · w[k, n], with a bias and perhaps more in ``then``."""
    tail = f", b = b@[n]\n  body x * w\n  then {then}" if then else "\n  body x * w"
    op = f"y@: {dtype}[{m}, {n}] = op [i: {m}, n: {n} | m: {k} sum]\n  reads x[i, m], w = w@[m, n]{tail}"
    return Probe("contraction", f"x: {dtype}[{m}, {k}] / w@: {dtype}[{k}, {n}]" + f"; b@: {dtype}[{n}]" * bool(then), op, dtype)


def _three(m: int, k: int, n: int) -> Probe:
    """Three products of one matrix, as of queries, keys and values."""
    shape = f"f32[{m}, {n}]"
    op = (
        f"p@: {shape}, q@: {shape}, y@: {shape} = op [i: {m}, n: {n} | m: {k} sums3]\n"
        "  reads x[i, m], u = u@[m, n], v = v@[m, n], w = w@[m, n]\n  body x * u, x * v, x * w"
    )
    return Probe("contraction", f"x: f32[{m}, {k}] / " + "; ".join(f"{w}@: f32[{k}, {n}]" for w in "uvw"), op)


def _attention(b: int, heads: int, queries: int, keys: int, *, masked: bool = False) -> Probe:
    """Softmax of q · kᵀ, times v, 64 features a head; ``masked``: with numbers added to the scores, rows of which may be -∞."""
    width = 64 * heads
    scores, then = "let0 * 0.125", "acc2 / acc1"
    if masked:
        scores, then = f"({scores}) + a", f"where(isnan(acc0 - acc0), acc0 - acc0, {then})"
    op = (
        f"y@: f32[{b}, {heads}, {queries}, 64] = op [b0: {b}, b1: {heads}, i: {queries}, n: 64 | m: {keys} softsum]\n"
        f"  reads v[b0, m, 64*b1 + n], q[b0, i, 64*b1 + c], k[b0, m, 64*b1 + c]{', a[b0, b1, i, m]' * masked}\n"
        f"  let [c: 64 sum] q * k\n  body {scores}, 1.0, v\n  then {then}"
    )
    added = f"; a: f32[{b}, {heads}, {queries}, {keys}]" * masked
    return Probe(
        "attention", f"q: f32[{b}, {queries}, {width}]; k: f32[{b}, {keys}, {width}]; v: f32[{b}, {keys}, {width}]{added}", op
    )


def _scored(b: int, heads: int, queries: int, keys: int, *, causal: bool = False) -> Probe:
    """Attention with numbers added to those scores alone that a comparison of places, or another tensor, lets stand."""
    width = 64 * heads
    stands = "le(index(m), index(i))" if causal else "gt(z, 0)"
    op = (
        f"y@: f32[{b}, {heads}, {queries}, 64] = op [b0: {b}, b1: {heads}, i: {queries}, n: 64 | m: {keys} softsum]\n"
        f"  reads v[b0, m, 64*b1 + n], q[b0, i, 64*b1 + c], k[b0, m, 64*b1 + c], a[i, m, b1]{', z[b0, m]' * (not causal)}\n"
        f"  let [c: 64 sum] q * k\n  body let0 + where({stands}, a, f32(-3.4028234663852886e+38)), 1.0, v\n"
        "  then where(isnan(acc0 - acc0), acc0 - acc0, acc2 / acc1)"
    )
    mask = f"; z: i64[{b}, {keys}]" * (not causal)
    rows = f"q: f32[{b}, {queries}, {width}]; k: f32[{b}, {keys}, {width}]; v: f32[{b}, {keys}, {width}]"
    return Probe("scored", f"{rows}; a: f32[{queries}, {keys}, {heads}]{mask}", op)


def _rotated(b: int, heads: int, keyed: int, rows: int, width: int) -> Probe:
    """Attention whose queries are rotated by their places in it, ``heads / keyed`` heads with the same keys and values."""
    half, each = width // 2, heads // keyed
    at = f"b0, i, {width}*b1 + c"
    op = (
        f"y@: f32[{b}, {heads}, {rows}, {width}] = op [b0: {b}, b1: {heads}, i: {rows}, n: {width} | m: {rows} softsum]\n"
        f"  reads v[b0, m, n + {width}*floor((b1)/{each})], k[b0, floor((b1)/{each}), m, c], f[i, c], g[i, c], q[{at}], "
        f"p = q[{at} - {half}] when c - {half} >= 0 else 0.0, r = q[{at} + {half}] when -c + {half - 1} >= 0 else 0.0\n"
        f"  let [c: {width} sum] ((q * f) + (where(lt(index(c), {half}), neg(r), p) * g)) * k\n"
        "  body (let0 * 0.125), 1.0, v\n  then acc2 / acc1"
    )
    table, keys = f"f32[{rows}, {width}]", f"f32[{b}, {keyed}, {rows}, {width}]"
    values, queries = (f"f32[{b}, {rows}, {n * width}]" for n in (keyed, heads))
    return Probe("computed", f"v: {values}; k: {keys}; f: {table}; g: {table}; q: {queries}", op)


def _convolution(b: int, c: int, o: int, side: int, window: int) -> Probe:
    """Same-size convolution with bias and ReLU."""
    pad = window // 2
    place = f"h + r - {pad}, s + w_ - {pad}" if pad else "h + r, s + w_"
    other = " else 0.0" if pad else ""
    op = (
        f"y@: f32[{b}, {o}, {side}, {side}] = op [b: {b}, o: {o}, h: {side}, w_: {side} | c: {c} sum, r: {window} sum, s: "
        f"{window} sum]\n  reads x[b, c, {place}]{other}, w = w@[o, c, r, s], b_ = b@[o]\n"
        "  body x * w\n  then max((acc0 + b_), 0.0)"
    )
    return Probe("convolution", f"x: f32[{b}, {c}, {side}, {side}] / w@: f32[{o}, {c}, {window}, {window}]; b@: f32[{o}]", op)


def _unfolded(c: int, o: int, dims: Mapping[str, int], x: Sequence[int], place: str) -> Probe:
    """A convolution by 3 × 3 with ReLU, of images that have strips of rows as an axis, or get one.

    Args:
        dims: output dimensions after batch and features.
        x: extents of an image after batch and channels.
        place: where along these it is read, and what it is elsewhere.
    """
    extents, names = ", ".join(map(str, dims.values())), ", ".join(f"{d}: {n}" for d, n in dims.items())
    op = (
        f"y@: f32[1, {o}, {extents}] = op [b: 1, o: {o}, {names} | c: {c} sum, r: 3 sum, s: 3 sum]\n"
        f"  reads x[b, c, {place}, w = w@[o, c, r, s]\n  body x * w\n  then max(acc0, 0.0)"
    )
    return Probe("unfolded", f"x: f32[1, {c}, {', '.join(map(str, x))}] / w@: f32[{o}, {c}, 3, 3]", op)


def _strips(c: int, o: int, side: int, parts: int) -> Probe:
    """Over the overlapping strips that an image was made in."""
    rows = side // parts
    place = f"floor((h)/{rows}), r + ((h) mod {rows}), s + w_ - 1] when h + r - 1 >= 0 when -h - r + {side} >= 0 else 0.0"
    return _unfolded(c, o, {"h": side, "w_": side}, (parts, rows + 2, side), place)


def _into_strips(c: int, o: int, side: int, parts: int) -> Probe:
    rows = side // parts
    place = f"{rows}*k + p + r - 2, s + w_ - 1] else 0.0"
    return _unfolded(c, o, {"k": parts, "p": rows + 2, "w_": side}, (side, side), place)


def _norm(rows: int, width: int) -> Probe:
    op = (
        f"y@: f32[{rows}, {width}] = op [i: {rows}, n: {width} | m: {width} moments]\n"
        "  reads x[i, m], z = x[i, n], g = g@[n], b = b@[n]\n  body 1.0, x, 0.0\n"
        "  then (((z - acc1) * (1.0 / sqrt(((acc2 / acc0) + 1e-05)))) * g) + b"
    )
    return Probe("row", f"x: f32[{rows}, {width}] / g@: f32[{width}]; b@: f32[{width}]", op)


def _softmax(rows: int, width: int) -> Probe:
    op = (
        f"y@: f32[{rows}, {width}] = op [i: {rows}, n: {width} | m: {width} logsumexp]\n"
        "  reads x[i, m], z = x[i, n]\n  body x, 1.0\n  then exp((z - acc0)) / acc1"
    )
    return Probe("softmax", f"x: f32[{rows}, {width}]", op)


def _sum_probe(rows: int, width: int) -> Probe:
    op = f"y@: f32[{rows}] = op [i: {rows} | m: {width} sum]\n  reads x[i, m]\n  body x"
    return Probe("row", f"x: f32[{rows}, {width}]", op)


def _map(rows: int, width: int, body: str) -> Probe:
    both = "x[i, n], z[i, n]" if "z" in body else "x[n, i]" if body == "x" else "x[i, n]"
    tensors = f"x: f32[{width}, {rows}]" if body == "x" else f"x: f32[{rows}, {width}]"
    op = f"y@: f32[{rows}, {width}] = op [i: {rows}, n: {width}]\n  reads {both}\n  body {body}"
    return Probe("map", tensors + f"; z: f32[{rows}, {width}]" * ("z" in body), op)


def _gather(rows: int, table: int, width: int) -> Probe:
    op = (
        f"y@: f32[{rows}, {width}] = op [i: {rows}, n: {width} | v: {table} sum]\n  reads t[v, n], ids[i]\n"
        "  body where(eq(ids, index(v)), t, 0.0)"
    )
    return Probe("gather", f"ids: i64[{rows}]; t: f32[{table}, {width}]", op)


def _opaque(rows: int, width: int) -> Probe:
    """The largest of every row as the ONNX node; the number that is wanted comes as an input, as in a model."""
    node = helper.make_node("TopK", ["in0", "in1"], ["out0", "out1"], axis=-1)
    text = base64.b64encode(node.SerializeToString()).decode()
    op = (
        f"y@: f32[{rows}, 1], n@: i64[{rows}, 1] = opaque TopK [i: {rows}]\n  reads x[0], k[_]\n  writes y@[0], n@[0]\n"
        f'  node "{text}"\n  opsets "" 20\n  why "selects by value"'
    )
    return Probe("opaque", f"x: f32[{rows}, {width}]; k: i64[1]", op)


def probes() -> Iterator[Probe]:
    """All that ``calibrate`` measures: sizes of layers of small and medium models, cut into parts or not."""
    for m, k, n in (
        (1, 64, 64), (8, 64, 256), (32, 128, 128),
        (1, 768, 768), (1, 768, 3072), (1, 3072, 768), (4, 768, 768), (16, 768, 384), (16, 768, 3072), (64, 192, 768),
        (64, 768, 768), (64, 3072, 384), (256, 768, 192), (256, 768, 1536), (256, 1536, 768), (512, 768, 3072), (768, 768, 768),
        (4, 768, 16001), (64, 512, 16001),
    ):  # fmt: skip
        yield _product_probe(m, k, n)
    yield from (_product_probe(m, 768, n, then=GELU) for m, n in ((1, 3072), (64, 1536), (256, 3072)))
    yield from (_three(m, 768, n) for m, n in ((1, 384), (64, 768), (256, 384)))
    yield from (_attention(*s) for s in ((1, 4, 16, 16), (1, 6, 64, 64), (4, 12, 64, 64), (1, 12, 128, 128), (1, 12, 1, 128)))
    yield from (_attention(*s, masked=True) for s in ((1, 4, 16, 16), (2, 8, 16, 32), (1, 12, 64, 64), (4, 8, 128, 128)))
    yield from (_scored(*s) for s in ((1, 4, 16, 16), (2, 8, 32, 32), (4, 8, 32, 32), (1, 12, 128, 128)))
    yield from (_scored(*s, causal=True) for s in ((2, 8, 16, 16), (1, 12, 64, 64), (4, 12, 64, 64)))
    yield from (
        _rotated(*s) for s in ((1, 4, 2, 16, 16), (1, 8, 4, 32, 32), (1, 8, 8, 1, 64), (1, 12, 12, 64, 64), (1, 8, 8, 128, 64))
    )
    for b, c, o, side, window in (
        (1, 64, 64, 56, 1), (1, 256, 64, 28, 1), (4, 128, 512, 14, 1), (1, 64, 64, 28, 3), (1, 128, 128, 28, 3),
        (4, 64, 64, 14, 3), (1, 256, 256, 7, 3), (1, 32, 64, 56, 3), (1, 16, 16, 14, 3),
    ):  # fmt: skip
        yield _convolution(b, c, o, side, window)
    yield from (_strips(*s) for s in ((16, 16, 14, 2), (64, 64, 14, 2), (256, 128, 14, 2), (32, 16, 56, 4)))
    yield from (_into_strips(*s) for s in ((8, 16, 14, 2), (64, 64, 28, 2), (128, 128, 14, 2)))
    yield from (_norm(rows, 768) for rows in (1, 16, 64, 256, 1024))
    yield from (_softmax(rows, n) for rows, n in ((16, 64), (192, 128), (1536, 64), (3072, 128), (64, 8192), (4, 32768)))
    yield from (_sum_probe(rows, n) for rows, n in ((64, 64), (256, 768), (2048, 768)))
    for body in ("x + z", "x", "tanh(x)"):
        yield from (_map(rows, n, body) for rows, n in ((8, 64), (64, 768), (256, 768), (512, 3072)))
    yield from (_gather(rows, 8192, 768) for rows in (1, 16, 64, 256, 1024))
    yield from (_opaque(rows, n) for rows, n in ((1, 1024), (16, 1024), (64, 4096), (256, 4096)))


def few_probes() -> Iterator[Probe]:
    """Up to six of every class, the first and the last among them."""
    of: dict[str, list[Probe]] = {}
    for p in probes():
        of.setdefault(p.kind, []).append(p)
    for found in of.values():
        yield from (found[k] for k in sorted({i * (len(found) - 1) // 5 for i in range(6)}))


def rates_by_dtype() -> Iterator[Probe]:
    """One product per dtype of floats, to compare them."""
    for dtype in ("f32", "f64", "f16", "bf16"):
        yield _product_probe(256, 768, 768, dtype)


def between() -> Probe:
    """A kernel that runs before what is measured in place; it takes about as long as a transfer of some hundred kilobytes."""
    return _product_probe(64, 768, 768)


# Seconds of a probe's kernel, run as the processes of a run do: step by step, on arrays that are there, and after another
# kernel, which leaves caches full of other things: its own weights, and its own instructions and ours.


ONE = (MeshAxis("d0", 1),)
WHOLE = Strategy((None,), (None,))


class _StepByStep(LocalExecutor):
    """As a rank runs it."""

    folds = False  # what is timed may read weights alone

    def scheduled(self) -> Schedule | None:
        """Nothing is bound to a position."""
        return None


class KernelClock:
    """A probe, bound to its arrays."""

    def __init__(self, probe: Probe, target: Target) -> None:
        graph = probe.graph
        plan = Plan(graph=graph, mesh=ONE, strategies=(WHOLE,) * len(graph.ops))
        rng = np.random.default_rng(0)
        normal = rng.standard_normal(99991, dtype=np.float32) * np.float32(0.1)

        def data(tensor: str, box: Box) -> Any:
            t = graph.tensors[tensor]
            if t.dtype in FLOATS:
                return target.from_numpy(np.resize(normal, shape(box)).astype(numpy_dtype(t.dtype)))
            top = graph.tensors["t"].shape[0] if tensor == "ids" else 2
            return target.from_numpy(rng.integers(1, top, shape(box)).astype(numpy_dtype(t.dtype)))

        self.probe, self.executor = probe, _StepByStep(graph, lower(plan), target, data)
        self.executor.room = [1 << 40]
        self.executor.bind()
        self.executor.begin(data)
        steps = self.executor.program.steps
        for at, step in enumerate(steps):
            if isinstance(step, Load):
                self.executor.step(at)
        self.launches = [at for at, step in enumerate(steps) if isinstance(step, Launch)]
        self._turns = cycle(self.launches)
        self.run()

    def run(self) -> None:
        """Every copy once."""
        for at in self.launches:
            self.executor.step(at)

    def next(self) -> None:
        """One copy: of all in turns."""
        self.executor.step(next(self._turns))

    def seconds(self, window: float, between: Callable[[], object] = lambda: None) -> float:
        """Seconds of one kernel: the mean over a time long enough that others on the same core have had their turns.

        Args:
            between: what runs before each kernel, and does not count.
        """
        count, spent, start = 0, 0.0, time.perf_counter()
        while count == 0 or time.perf_counter() - start < window:
            between()
            begun = time.perf_counter()
            self.next()
            spent += time.perf_counter() - begun
            count += 1
        return spent / count

    def point(self, seconds: float) -> KernelPoint:
        """The measurement, with FLOPs and bytes as the cost model counts them."""
        op, graph = self.probe.graph.ops[0], self.probe.graph
        block = op_boxes(op, WHOLE.dims, ONE)
        final = block[:, : len(op.dims)]
        reads = {(t, b.tobytes()): b for _, t, b in footprints(op, graph, WHOLE, ONE)}
        heavy, light, moved = compute.quantities(op, graph, block, final, reads)
        return kernel_point(self.probe.kind, float(heavy[0]), float(light[0]), float(moved[0]), seconds, self.probe.dtype)
