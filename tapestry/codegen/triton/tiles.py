"""Which dimensions form which tile axis, and how big the tiles are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry.codegen.triton.lowered import Access, Task, points
from tapestry.codegen.triton.primitives import HALVES
from tapestry.ir.expr import Arg, Call, Expr, Index, Let, walk
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, dims_of
from tapestry.ir.monoid import MONOIDS, SUMS
from tapestry.ir.state import counts_ones
from tapestry.ir.types import FLOATS, itemsize

_SMS = 128  # tiles shrink until there are about as many programs as a large GPU has multiprocessors


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What a tuner may turn; the defaults come from the sizes.

    Attributes:
        block: elements per program of a map.
        rows, cols: tile of a reduction, over map and reduced points.
        bm, bn, bk: tile of a contraction.
        group: rows of tiles that neighbouring programs share, for the L2 cache.
    """

    block: int = 1024
    rows: int = 1
    cols: int = 1024
    bm: int = 64
    bn: int = 64
    bk: int = 32
    group: int = 8
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """``sum(a * b)`` with the map dimensions of a alone (m), b alone (n) and the others (batch); k and taps are reduced.

    Taps are the reduced dimensions that meet map dimensions in a mask, such as the rows and columns of a convolution's
    kernel. Stepping through them one by one leaves masks along m or n alone instead of over whole tiles.
    """

    a: Expr
    b: Expr
    m: tuple[Dim, ...]
    n: tuple[Dim, ...]
    batch: tuple[Dim, ...]
    k: tuple[Dim, ...]
    taps: tuple[Dim, ...]
    operand: str
    masked: bool  # whether masks are over whole tiles after all
    more: tuple[tuple[Expr, Expr], ...] = ()  # factors of further sums side by side, with the same m and n


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def contraction(task: Task) -> Contraction | None:
    """The task as a matrix product, or ``None`` where ``tl.dot`` does not apply or does not pay."""
    if task.monoid not in SUMS or any(e.dtype not in FLOATS - {"f64"} for e in task.body):
        return None
    first, *others = [_sum_of_products(task, k) for k in range(len(task.body))]
    shapes = [replace(c, a=first.a, b=first.b) if c and first else None for c in others]
    if first is None or any(s != first for s in shapes):
        return None
    return replace(first, more=tuple((c.a, c.b) for c in others if c))


def _sum_of_products(task: Task, field: int) -> Contraction | None:
    """One field of the task as a matrix product."""
    body = task.body[field]
    while isinstance(body, Call) and body.fn == "cast" and body.args[0].dtype in FLOATS:
        body = body.args[0]
    if not (isinstance(body, Call) and body.fn == "mul") or body.dtype == "f64":
        return None
    a, b = body.args
    of_a, of_b = _dims(a, task), _dims(b, task)
    m = tuple(d for d in task.dims if d.name in of_a - of_b)
    n = tuple(d for d in task.dims if d.name in of_b - of_a)
    if points(m) < 2 or points(n) < 2 or points(task.reduce) < 2:
        return None
    batch = tuple(d for d in task.dims if d not in m + n)
    kinds = {exact_dtype(a), exact_dtype(b)}
    operand = kinds.pop() if len(kinds) == 1 else "f32"
    operand = operand if operand in HALVES else "f32"
    taps = _entangled(task)
    k = tuple(d for d in task.reduce if d not in taps)
    masked = bool(taps) and points(k) < 16
    if masked:  # too few for a tile's depth
        k, taps = task.reduce, ()
    return Contraction(a=a, b=b, m=m, n=n, batch=batch, k=k, taps=taps, operand=operand, masked=masked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """``sum over key of exp(score - max) * value`` with ``score`` made of ``sum over depth of query * keys``.

    Rows are the map dimensions of the query alone, columns those of the values alone, batch the others.
    """

    query: Expr
    keys: Expr
    value: Expr
    rows: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    batch: tuple[Dim, ...]
    key: Dim
    depth: tuple[Dim, ...]
    operand: str  # of the first product
    weights: str  # of the second


def stream(task: Task) -> Stream | None:
    """The task as a streaming softmax-weighted sum of products, by its projections; ``None`` when it is none."""
    if task.monoid != "softsum" or task.mode == "finish" or len(task.inner) != 1 or len(task.reduce) != 1:
        return None
    s, key, value = task.inner[0], task.reduce[0], task.body[2]
    if s.monoid != "sum" or not (isinstance(s.body, Call) and s.body.fn == "mul") or not counts_ones(task.body):
        return None
    if value.dtype not in FLOATS - {"f64"} or s.body.dtype not in FLOATS - {"f64"} or points(s.dims) > 256:
        return None
    depth, keyed = {d.name for d in s.dims if d.size > 1}, {key.name} if key.size > 1 else set[str]()
    of_v, of_s = _dims(value, task), _dims(task.body[0], task)
    for q, k in (s.body.args, s.body.args[::-1]):
        of_q, of_k = _dims(q, task), _dims(k, task)
        if of_q & keyed or not keyed <= of_k or not depth <= of_q & of_k or of_v & depth:
            continue
        columns = tuple(d for d in task.dims if d.name in of_v - of_q - of_k - of_s)
        rows = tuple(d for d in task.dims if d.name in (of_q | of_s) - of_k - of_v)
        batch = tuple(d for d in task.dims if d not in rows + columns)
        if points(columns) > 256:
            continue
        kinds = {exact_dtype(q), exact_dtype(k)}
        first = kinds.pop() if len(kinds) == 1 else "f32"
        second = exact_dtype(value)
        return Stream(
            query=q, keys=k, value=value, rows=rows, columns=columns, batch=batch, key=key, depth=s.dims,
            operand=first if first in HALVES else "f32", weights=second if second in HALVES else "f32",
        )  # fmt: skip
    return None


def stream_knobs(s: Stream) -> Knobs:
    """Tiles of queries and keys: 128 x 64 for 16-bit operands, 32 x 32 for f32; the heads' widths are whole."""
    half = s.operand in HALVES and s.weights in HALVES
    wide = max(points(s.depth), points(s.columns))
    bm = min(128 if half and wide <= 128 else 64 if half else 32, max(16, power_of_two(points(s.rows))))
    bn = min(64 if half and wide <= 128 else 32, max(16, power_of_two(s.key.size)))
    return Knobs(bm=bm, bn=bn, num_warps=8 if bm >= 128 or (wide > 64 and bm >= 32) else 4, num_stages=2)


def _entangled(task: Task) -> tuple[Dim, ...]:
    """Reduced dimensions that stand beside map dimensions in one check, floor or mod."""
    mapped = {d.name for d in task.dims if d.size > 1}
    found: set[str] = set()
    for access in task.reads.values():
        for group in (*(c.aff for c in access.checks), *(Aff((t,)) for t in access.offset.terms)):
            if dims_of(group) & mapped:
                found |= dims_of(group) - mapped
    return tuple(d for d in task.reduce if d.name in found)


def exact_dtype(e: Expr) -> str:
    """The dtype that an expression's value has before widening casts, which lose nothing."""
    while isinstance(e, Call) and e.fn == "cast" and e.dtype == "f32" and e.args[0].dtype in HALVES:
        e = e.args[0]
    return e.dtype


def bare_read(e: Expr) -> int | None:
    """The position of the read that an expression is, but for widening casts."""
    while isinstance(e, Call) and e.fn == "cast" and e.dtype == "f32" and e.args[0].dtype in HALVES:
        e = e.args[0]
    return e.pos if isinstance(e, Arg) else None


def _dims(e: Expr, task: Task) -> frozenset[str]:
    """Dimensions of more than one point that a value varies along."""
    out: set[str] = set()
    for x in walk(e):
        if isinstance(x, Index):
            out |= dims_of(x.aff)
        elif isinstance(x, Arg):
            access = task.reads[x.pos]
            out |= dims_of(access.offset).union(*(dims_of(c.aff) for c in access.checks))
        elif isinstance(x, Let):
            out |= _dims(task.inner[x.pos].body, task) - {d.name for d in task.inner[x.pos].dims}
    return frozenset(d for d in out if task.ranges[d] > 1)


def map_knobs(task: Task) -> Knobs:
    """Tiles of a map: 4 KiB of output (16 bytes per thread and access), fewer for a small block."""
    width = max(itemsize(a.dtype) for a in task.outs)
    return Knobs(block=min(max(1024, 4096 // width), power_of_two(points(task.dims))))


def reduce_knobs(task: Task) -> Knobs:
    """Tiles of a reduction: about 2048 elements (1024 with several fields), long along what lies contiguous in memory."""
    rows, cols = points(task.dims), points(task.reduce)
    lanes = 2048 if len(task.body) == 1 else 1024
    if task.monoid and not MONOIDS[task.monoid].commutative:
        return Knobs(rows=min(128, power_of_two(rows)), cols=1)  # lanes would merge out of order
    along_rows = any(_contiguous(a, task.dims) and not _contiguous(a, task.reduce) for a in task.reads.values())
    width = min(power_of_two(cols), 32 if along_rows else lanes)
    height = min(power_of_two(rows), max(1, lanes // max(1, width)))
    while height > 8 and -(-rows // height) < _SMS:
        height //= 2
    width = min(power_of_two(cols), max(width, lanes // height if not along_rows else width))
    return Knobs(rows=height, cols=max(1, width), num_warps=4 if height * width >= 512 else 1)


def _contiguous(access: Access, dims: tuple[Dim, ...]) -> bool:
    """Whether neighbours along one of the dimensions are neighbours in memory."""
    return any(access.offset.coef(d.name) in (1, -1) and d.size > 1 for d in dims)


def dot_knobs(c: Contraction) -> Knobs:
    """Tiles of a contraction: 128 x 128 x 64 for 16-bit operands, 64 x 64 x 16 for f32, fewer for small extents."""
    m, n, k = points(c.m), points(c.n), points(c.k)
    top, deep = (128, 64) if c.operand in HALVES else (64, 16)
    bm = min(top, max(16, power_of_two(m)))
    bn = min(top, max(16, power_of_two(n)))
    for _ in c.more:  # each has an accumulator of its own
        bn = max(16, bn // 2) if bn * (1 + len(c.more)) > top * 2 else bn
    while bm * bn > 64 * 64 and -(-m // bm) * -(-n // bn) * points(c.batch) < _SMS:
        bm, bn = (bm // 2, bn) if bm >= bn else (bm, bn // 2)
    # what is gathered element by element takes registers for each: a mask over the tile most, a strided k less
    deep = 16 if c.masked else min(deep, 32) if c.taps else deep
    bk = min(deep, max(16, power_of_two(k)))
    return Knobs(bm=bm, bn=bn, bk=bk, num_warps=8 if bm * bn >= 128 * 128 else 4)
