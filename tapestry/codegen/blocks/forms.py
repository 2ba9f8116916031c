"""Which dimensions form which tile axis: contractions, streaming sums, rows, gathers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry.codegen.blocks.lowered import Task, points
from tapestry.codegen.blocks.operands import EXACT_IN, HALVES, common_operand, compute
from tapestry.codegen.blocks.regroup import split_groups
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Let, arg_positions, distinct, instructions, number, rewrite, uncast
from tapestry.ir.graph import Dim, names_of
from tapestry.ir.index import Aff, dims_of
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Moments, Monoid, Product, sums
from tapestry.ir.recognition.attention_roles import Attention, attention
from tapestry.ir.recognition.contraction import (
    Kept,
    Narrow,
    dims_read,
    dims_varied,
    inner_product,
    kept,
    narrow,
    product_roles,
    products,
    roles,
)
from tapestry.ir.recognition.exponential import INT8, exponential
from tapestry.ir.recognition.selection_sum import Selection, routed, selection
from tapestry.ir.types import FLOAT8, FLOATS


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
    operand: str  # `primitives.common_operand`
    masked: bool  # whether masks are over whole tiles after all
    more: tuple[tuple[Expr, Expr], ...] = ()  # factors of further sums side by side, with the same m and n

    @property
    def pairs(self) -> tuple[tuple[Expr, Expr], ...]:
        """The factors of every sum."""
        return ((self.a, self.b), *self.more)

    @property
    def kinds(self) -> frozenset[str]:
        """What the factors are exactly."""
        return frozenset(exact_dtype(e) for pair in self.pairs for e in pair)

    def kind(self, e: Expr) -> str:
        """What one factor is multiplied as."""
        return exact_dtype(e) if self.operand == "f8" else self.operand

    def value(self, e: Expr, task: Task) -> Expr:
        """What is loaded of one factor: of an integer less a zero point, the integer."""
        found = shifted(e, task) if self.operand == "i8" else None
        return found.value if found else e


SUMMED = frozenset({"f32", "f16", "bf16", "i32"})  # dtypes of sums that matrix units make


def plain_results(task: Task) -> bool:
    """Whether results are one sum each, scaled or rounded at most, so that one flat loop over tiles and depth pays."""
    return len(task.body) == 1 and not arg_positions(task.then) and instructions(task.then) <= 4


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def contraction(task: Task) -> Contraction | None:
    """The task as a matrix product, or ``None`` where ``tl.dot`` does not apply or does not pay."""
    pairs = products(task)
    if pairs is None or any(uncast(e).dtype not in SUMMED or e.dtype not in SUMMED for e in task.body):
        return None
    first, *others = [_sum_of_products(task, a, b) for a, b in pairs]
    if first is None or None in others:
        return None
    whole = replace(first, more=tuple((c.a, c.b) for c in others if c))
    operand = _operand(whole, task)  # of all of them
    if not operand or any(c and replace(c, a=first.a, b=first.b) != first for c in others):
        return None
    return replace(whole, operand=operand)


def _operand(c: Contraction, task: Task) -> str:
    """What the factors of all sums are multiplied as; ``""`` where matrix units have no such products."""
    whole = [shifted(e, task) for pair in c.pairs for e in pair]
    if all(whole):
        # a sum of floats that are integers is one of integers if no sum of them can overflow, rounded once
        most = max(n.largest for n in whole if n) ** 2 * points(task.reduce)
        if all(e.dtype == "i32" for e in task.body) or most < 1 << 31:
            return "i8"
    if any(e.dtype not in FLOATS for e in task.body):
        return ""
    operand = common_operand(c.kinds)
    if operand == "f8" and any(bare_read(e) is None for pair in c.pairs for e in pair):
        return "f16"  # computed in f32, and not rounded for a product
    return "f16" if operand == "i8" else operand


def _sum_of_products(task: Task, a: Expr, b: Expr) -> Contraction | None:
    """One sum of products as a matrix product."""
    of_a, of_b = dims_varied(task, a), dims_varied(task, b)
    m = tuple(d for d in task.dims if d.name in of_a - of_b)
    n = tuple(d for d in task.dims if d.name in of_b - of_a)
    if points(m) < 2 or points(n) < 2 or points(task.reduce) < 2:
        return None
    if points(m) < 64 <= points(n):  # matrix units take 64 rows at a time, but as few columns as 8
        a, b, m, n = b, a, n, m
    return _product(task, a, b, m, n, tuple(d for d in task.dims if d not in m + n))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream(Attention):
    """Attention by tiles of rows and keys.

    Attributes:
        operand: of the first product.
        weighted: of the second: f16 for values of 8 bits, for weights rounded to 8 would show.
    """

    operand: str
    weighted: str

    @property
    def kinds(self) -> frozenset[str]:
        """What the factors of the first product are exactly."""
        return frozenset({exact_dtype(self.query), exact_dtype(self.keys)})

    def kind(self, e: Expr) -> str:
        """What one of them is multiplied as."""
        return exact_dtype(e) if self.operand == "f8" else self.operand


def stream(task: Task) -> Stream | None:
    """The task as attention in one pass over the keys; ``None`` where it is none, or where its tiles are too wide."""
    a = attention(task) if task.mode != "finish" else None
    if a is None or any(e.dtype not in FLOATS - {"f64"} for e in (a.value, task.inner[0].body)):
        return None
    if points(a.depth) > 256 or points(a.columns) > 256:
        return None
    operand = common_operand(frozenset({exact_dtype(a.query), exact_dtype(a.keys)}))
    if operand == "i8" or (operand == "f8" and None in (bare_read(a.query), bare_read(a.keys))):
        operand = "f16"
    values = exact_dtype(a.value)
    rows, columns = (tuple(d for d in dims if d.size > 1) for dims in (a.rows, a.columns))
    weighted = "f16" if values in FLOAT8 | INT8 else values if values in HALVES else "f32"
    score = _unrounded(a.score) if weighted in HALVES else a.score
    return Stream(
        query=a.query,
        keys=a.keys,
        value=a.value,
        score=score,
        rows=rows,
        columns=columns,
        batch=tuple(d for d in task.dims if d not in rows + columns),
        key=a.key,
        depth=a.depth,
        weights=a.weights,
        operand=operand,
        weighted=weighted,
    )


_SCORES = HALVES | {"f32"}


def _unrounded(e: Expr) -> Expr:
    """A score in f32 throughout: its weights are rounded to 16 bits, and roundings before would hide masks and factors."""
    if e.dtype not in _SCORES or isinstance(e, Let):
        return e
    if isinstance(e, Call):
        if e.fn == "cast" and e.args[0].dtype in _SCORES:
            return _unrounded(e.args[0])
        return Call(fn=e.fn, args=tuple(map(_unrounded, e.args)), dtype="f32")
    if isinstance(e, Const):
        return Const(e.value, "f32")
    return e if e.dtype == "f32" else Call(fn="cast", args=(e,), dtype="f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A reduction of a product, tile by tile: the product has the map dimensions and the reduced ones as rows, columns, batch.

    Attributes:
        product: of one tile; its columns are reduced dimensions where the tile is folded along them.
        outer: reduced dimensions that tiles go through one after another.
        folds: whether columns are reduced.
        row: the element that rows keep, where a tile has whole rows.
    """

    product: Contraction
    outer: tuple[Dim, ...]
    folds: bool
    row: Kept | None = None


def folded(task: Task) -> Folded | None:
    """The task as a reduction of an inner sum of products; ``None`` where ``tl.dot`` does not apply."""
    body = inner_product(task) if task.mode != "finish" and exponential(task.monoid, sums=2) is None else None
    if task.monoid is None or body is None or body.dtype not in FLOATS - {"f64"} or points(task.inner_dims) < 2:
        return None
    a, b = body.args
    row = kept(task.monoid, task.dims, task.reduce, task.body) if task.mode == "full" else None
    found = product_roles(task, body, row)
    first, second = (dims_varied(task, e) - names_of(task.inner_dims) for e in (a, b))
    if routed(task) and (one := roles(task.dims, (), first, second)):
        found = replace(one, taps=task.reduce)  # one matrix after another
    if found is None:
        return None
    m, n = found.rows, found.columns
    if found.swapped:
        a, b = b, a
    elif not found.folds and points(m) < 64 <= points(n):
        a, b, m, n = b, a, n, m
    used = arg_positions((body,))
    inside = replace(
        task, dims=task.dims + task.reduce, reduce=task.inner_dims, reads={p: r for p, r in task.reads.items() if p in used}
    )
    product = _product(inside, a, b, m, n, found.batch)
    operand = common_operand(product.kinds)
    product = replace(product, operand="f16" if operand in ("f8", "i8") else operand)  # which has them all
    return Folded(product=product, outer=found.taps, folds=found.folds, row=row)


def _product(task: Task, a: Expr, b: Expr, m: tuple[Dim, ...], n: tuple[Dim, ...], batch: tuple[Dim, ...]) -> Contraction:
    """The contraction of two factors over the reduced dimensions."""
    taps = _entangled(task, m + n)
    k = tuple(d for d in task.reduce if d not in taps)
    masked = bool(taps) and points(k) < 16
    if masked:  # too few for a tile's depth
        k, taps = task.reduce, ()
    return Contraction(a=a, b=b, m=m, n=n, batch=batch, k=k, taps=taps, operand="", masked=masked)


def _entangled(task: Task, tile: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Reduced dimensions that stand beside a tile's in one check, floor or mod."""
    mapped = {d.name for d in tile if d.size > 1}
    found: set[str] = set()
    for access in task.reads.values():
        for group in (*(c.aff for c in access.checks), *(Aff((t,)) for t in access.offset.terms)):
            if dims_of(group) & mapped:
                found |= dims_of(group) - mapped
    return tuple(d for d in task.reduce if d.name in found)


def exact_dtype(e: Expr) -> str:
    """The dtype that an expression's value has before widening casts, which lose nothing."""
    if isinstance(e, Call) and e.fn == "cast" and (inner := exact_dtype(e.args[0])) in EXACT_IN.get(e.dtype, ()):
        return inner
    return e.dtype


def bare_read(e: Expr) -> int | None:
    """The position of the read that an expression is, but for widening casts."""
    exact = exact_dtype(e)
    while isinstance(e, Call) and e.fn == "cast" and e.dtype != exact:
        e = e.args[0]
    return e.pos if isinstance(e, Arg) else None


def shifted(e: Expr, task: Task) -> Narrow | None:
    """A factor as an integer of 8 bits less a zero point that all points of the reduction share; ``None`` where it is none."""
    found = narrow(e)
    summed = {d.name for d in task.reduce}
    return found if found is None or found.shift is None or not dims_read(task, found.shift) & summed else None


def row_dims(task: Task) -> tuple[tuple[Dim, ...], tuple[Dim, ...]] | None:
    """(rows, columns): dimensions that the states vary along, and the others; ``None`` where there are no others."""
    if not task.monoid or task.mode == "finish" or task.inner:
        return None
    kept = task.outs if task.mode == "partial" else ()  # a read of nothing varies along no dimension, its state may
    used = frozenset[str]().union(*(dims_of(a.offset) for a in kept), *(dims_read(task, e) for e in task.body))
    rows = tuple(d for d in task.dims if d.name in used or d.size == 1)
    columns = tuple(d for d in task.dims if d not in rows)
    return (rows, columns) if columns else None


def centred(task: Task) -> Monoid | None:
    """The monoid of the states that refer to a centre, which is computed first, for all lanes of a tile at once.

    They are all of the task's states or the first of them, with sums beside them. ``None``: there are none.
    """
    if task.monoid is None or any(compute(e.dtype) not in ("f32", "f64") for e in task.body):
        return None
    whole = MONOIDS[task.monoid]
    first, *others = whole.structure.parts if isinstance(whole.structure, Product) else (whole,)
    counts = exponential(first.name, sums=1) is not None and task.body[1] == number(1, task.body[1].dtype)
    fits = counts or isinstance(first.structure, Moments)
    return first if fits and all(p.structure == ByPrimitive("add") for p in others) else None


def without_columns(task: Task) -> Task:
    """States alone (``partial``): the columns do not take part."""
    found = row_dims(task)
    return replace(task, dims=found[0]) if found else task


def gather(task: Task) -> Selection | None:
    """The task as a selection with a place for each row; one place for all is a scalar, not a vector of rows."""
    picked = selection(task)
    return picked if picked and any(d.size > 1 for d in split_selection(task, picked)[0]) else None


def split_selection(task: Task, s: Selection) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """(rows, columns): the map dimensions that the place depends on, and the others."""
    used = dims_read(task, s.wanted)
    return tuple(d for d in task.dims if d.name in used), tuple(d for d in task.dims if d.name not in used)


def transposing_dims(task: Task) -> tuple[int, int] | None:
    """Positions of the dimension that some reads run along in memory, and of the writes' own; ``None`` if it is one."""
    ends = [k for k, d in enumerate(task.dims) if d.size > 1 and all(a.offset.coef(d.name) == 1 for a in task.outs)]
    if len(ends) != 1 or task.dims[ends[0]].size < 16:
        return None
    along: dict[int, int] = {}
    for a in task.reads.values():
        steps = [(k, a.offset.coef(d.name)) for k, d in enumerate(task.dims) if d.size >= 16]
        if any(k == ends[0] and step in (0, 1) for k, step in steps):
            continue  # it runs along the writes, or is the same there
        for k, step in steps:
            if step == 1:
                along[k] = along.get(k, 0) + points(task.dims)
    return (max(along, key=lambda k: along[k]), ends[0]) if along else None


# Sums side by side, such as the three products of an attention's input, whose results have nothing to do with each other.


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """Each sum of a contraction as a kernel of its own; one loop fits them all.

    Attributes:
        side: of which factor there is one for each sum: 0, the rows', or 1, the columns'.
        factors: the read of each sum that is that factor.
        shared: reads of results, such as biases, that all sums have, through the same projection: for each sum one.
    """

    forms: tuple[KernelForm, ...]
    side: int
    factors: list[int]
    shared: list[list[int]]


def siblings(form: KernelForm) -> Siblings | None:
    """The sums of a contraction one by one, where they differ in one factor and in what becomes of them alone."""
    task, c = form.task, form.product
    if form.kind != "dot" or c is None or not c.more or task.mode != "full" or c.operand == "i8":
        return None
    made = [{x.field for x in distinct((e,)) if isinstance(x, Acc)} for e in task.then]
    side = 0 if len({a for a, _ in c.pairs}) > 1 else 1
    read = [bare_read(pair[side]) for pair in c.pairs]
    factors = [p for p in read if p is not None]
    if len({pair[1 - side] for pair in c.pairs}) > 1 or len(factors) < len(read) or any(len(fields) != 1 for fields in made):
        return None
    same = {replace(task.reads[p], tensor="") for p in factors}
    if len(same) > 1 or set().union(*made) != set(range(len(read))):
        return None
    forms = tuple(_alone(form, c, f, [k for k, fields in enumerate(made) if f in fields]) for f in range(len(read)))
    short = [short_reads(f) for f in forms]
    projections = [[replace(task.reads[p], tensor="") for p in found] for found in short]
    shared = list(map(list, zip(*short, strict=True))) if all(p == projections[0] for p in projections) else []
    return Siblings(forms=forms, side=side, factors=factors, shared=shared)


def _alone(form: KernelForm, c: Contraction, field: int, outs: list[int]) -> KernelForm:
    """One of the sums, and what becomes of it."""
    task, (a, b) = form.task, c.pairs[field]
    then = tuple(rewrite(task.then[k], lambda x: Acc(0, x.dtype) if isinstance(x, Acc) else x) for k in outs)
    used = arg_positions((task.body[field], *then))
    alone = replace(
        task,
        body=(task.body[field],),
        then=then,
        outs=tuple(task.outs[k] for k in outs),
        monoid=sums(1),
        reads={p: r for p, r in task.reads.items() if p in used},
    )
    return replace(form, task=alone, product=replace(c, a=a, b=b, more=()), packed=None)


def short_reads(form: KernelForm) -> list[int]:
    """Reads of the results of a product that do not vary along both of its sides, such as a bias."""
    c, task = form.product, form.task
    assert c is not None
    found = sorted(arg_positions(task.then))
    return [p for p in found if not all(task.read_dims(p) & {d.name for d in dims} for dims in (c.m, c.n))]


# In which form a kernel is emitted, from its index space, projections and monoid alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """A kernel's task and the form in which it is emitted.

    Attributes:
        kind: ``map``; ``dot``, a contraction; ``stream``, a softmax-weighted sum of values in one pass; ``scan``; ``rows``, a
            reduction whose results are used along the row; ``gather``; ``folded``, a reduction of a product tile by tile;
            ``nest``, with inner reductions of any other kind; ``reduce``.
        product, streamed, picked, folded: what was recognised for ``dot`` (and ``folded``), ``stream``, ``gather``, ``folded``.
        reverse: for ``scan``, whether elements come last first.
        packed: for ``dot``, the same on copies of operands that cannot be read by whole rows.
        precision: of f32 operands on matrix units: ``ieee``, ``tf32x3`` or ``tf32``.
    """

    kind: str
    task: Task
    product: Contraction | None = None
    streamed: Stream | None = None
    picked: Selection | None = None
    folded: Folded | None = None
    reverse: bool = False
    precision: str = "ieee"
    packed: PackedOperands | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOperands:
    """A contraction on copies of operands.

    Attributes:
        copies: for each copied read its position and the copy, in order; copy j writes scratch buffer j.
        product: the contraction, with the same read positions.
        scratch: (dtype, elements) of the copies.
        moved: bytes that the copies read and write, at every run; weights are copied once.
        repeated: copies that every run makes.
        padded: whether some row is longer than what it holds.
    """

    copies: tuple[tuple[int, KernelForm], ...]
    product: KernelForm
    scratch: tuple[tuple[str, int], ...]
    moved: int
    repeated: int
    padded: bool


def classified(task: Task, precision: str = "ieee") -> KernelForm:
    """The operation of a task that is no scan."""
    if task.monoid is None or task.mode == "finish":
        return KernelForm(kind="map" if not task.inner else "nest", task=task)
    for cut in () if task.inner else (task, split_groups(task)):
        if (product := contraction(cut)) is not None:
            return KernelForm(kind="dot", task=cut, product=product, precision=precision)
    if (streamed := stream(task)) is not None:
        if points(streamed.rows) < 64:  # few queries: those of all heads that share keys and values make one tile
            shared = split_groups(task)
            if (wider := stream(shared)) is not None and points(wider.rows) > points(streamed.rows):
                task, streamed = shared, wider
        return KernelForm(kind="stream", task=task, streamed=streamed, precision=precision)
    if (of_product := folded(task)) is not None:
        return KernelForm(kind="folded", task=task, product=of_product.product, folded=of_product, precision=precision)
    if task.inner:
        return KernelForm(kind="nest", task=task)
    if (picked := gather(task)) is not None:
        return KernelForm(kind="gather", task=task, picked=picked)
    if task.mode == "partial":
        task = without_columns(task)
    elif _rows(shared := split_groups(task)) < _rows(task):  # channels of a group share its statistics
        task = shared
    return KernelForm(kind="rows" if task.mode == "full" and row_dims(task) else "reduce", task=task)


def _rows(task: Task) -> int:
    """Rows whose states are computed."""
    found = row_dims(task)
    return points(found[0] if found else task.dims)
