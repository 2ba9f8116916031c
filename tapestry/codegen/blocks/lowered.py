"""A kernel in its own coordinates: what is left of an operation once block, buffers and origins are constants.

Every dimension runs over ``[0, extent)`` of the block, every access is one element offset into its buffer plus the checks
that cannot be decided from the extents. Two kernels with equal tasks have the same source up to names, whichever layer,
device or corner of a tensor they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Call, Const, Expr, Index, arg_positions, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Guard, Inner, Opaque, Read
from tapestry.ir.index import Aff, Floor, Mod, Ranges, const, dim, dims_of, span, substitute
from tapestry.ir.kernel import Box, Kernel, strides
from tapestry.ir.recognition.state import state_box, varies
from tapestry.ir.syntax.printer import expr as expr_text
from tapestry.ir.types import FLOAT8, STORED


@dataclass(frozen=True, slots=True)
class Check:
    """``aff <op> bound``; ``op`` is ``>=``, ``<`` or ``==`` and aff has no constant."""

    aff: Aff
    op: str
    bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One buffer, and which of its elements each point touches (``offset``, in elements) when all ``checks`` hold."""

    tensor: str
    dtype: str
    offset: Aff
    checks: tuple[Check, ...] = ()
    other: float | int | bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A block operation in block coordinates; ``reads`` by position in the operation, only those that are used.

    ``dims`` has the dimensions of inner reductions nowhere: they are those of ``inner``.
    """

    mode: str
    dims: tuple[Dim, ...]
    reduce: tuple[Dim, ...]
    monoid: str | None
    reads: Mapping[int, Access]
    states: tuple[Access, ...]
    outs: tuple[Access, ...]
    body: tuple[Expr, ...]
    then: tuple[Expr, ...]
    inner: tuple[Inner, ...] = ()

    @property
    def ranges(self) -> dict[str, int]:
        """Dimension name to extent of the block."""
        return {d.name: d.size for d in self.dims + self.reduce + self.inner_dims}

    @property
    def inner_dims(self) -> tuple[Dim, ...]:
        """Dimensions of the inner reductions."""
        return tuple(d for s in self.inner for d in s.dims)

    def read_dims(self, pos: int) -> frozenset[str]:
        """Dimensions that one read depends on, by its place or by its checks."""
        access = self.reads[pos]
        return dims_of(access.offset).union(*(dims_of(c.aff) for c in access.checks))

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """Every expression of the task."""
        return tuple(s.body for s in self.inner) + self.body + self.then


def points(dims: tuple[Dim, ...]) -> int:
    """Number of points of a box of dimensions."""
    return prod(d.size for d in dims)


def unavailable(graph: Graph, op: int) -> str:
    """Why ``graph.ops[op]`` has no Triton kernel; ``""`` when it has one."""
    found = graph.ops[op]
    if isinstance(found, Opaque):
        return f"ONNX {found.kind} has no affine structure to generate a kernel from" + (f": {found.why}" if found.why else "")
    if any(graph.tensors[t].dtype in STORED - FLOAT8 for t in (*found.inputs, *found.outs)):
        return "Triton has no such element type"
    return ""


def lower(graph: Graph, kernel: Kernel, *, without: Guard | None = None) -> Task:
    """Move a kernel to block coordinates.

    Args:
        without: a guard that the reads of the task do not check, because whoever asks sees to it.

    Raises:
        TapestryError: the operation is opaque.
    """
    op = graph.ops[kernel.op]
    if not isinstance(op, Block):
        raise TapestryError(
            "no Triton kernel for this operation",
            where=op.source[-1] if op.source else op.outs[0],
            why=unavailable(graph, kernel.op),
            hint="run it with the torch-cpu target",
        )
    return task_of(op, graph, kernel, without=without)


def task_of(op: Block, graph: Graph, kernel: Kernel, *, without: Guard | None = None) -> Task:
    """`lower` of an operation that need not be the graph's."""
    space = op.dims if kernel.mode == "finish" else op.space
    shift = {d.name: dim(d.name) + lo for d, (lo, _) in zip(space, kernel.block, strict=True)}
    local = tuple(Dim(d.name, hi - lo) for d, (lo, hi) in zip(space, kernel.block, strict=True))
    ranges = {d.name: d.size for d in local}

    def moved(e: Expr) -> Expr:
        return without_certain_tests(substitute_indices(e, shift, ranges), ranges)

    body = () if kernel.mode == "finish" else tuple(map(moved, op.body))
    inner = () if kernel.mode == "finish" else tuple(replace(s, body=moved(s.body)) for s in op.inner)
    ends = op.then or tuple(Acc(f, e.dtype) for f, e in enumerate(op.body))
    then = tuple(map(moved, ends)) if op.monoid and kernel.mode != "partial" else ()
    reads: dict[int, Access] = {}
    for p in sorted(arg_positions(tuple(s.body for s in inner) + body + then)):
        box = kernel.ins[p]
        assert box is not None, f"read {p} of {op.outs[0]} is used in mode {kernel.mode} but has no buffer"
        tensor = graph.tensors[op.reads[p].tensor]
        read = replace(op.reads[p], when=tuple(g for g in op.reads[p].when if g != without))
        reads[p] = _access(read, tensor.dtype, tensor.shape, box, shift, ranges)
    fields = tuple((f"state{f}", e.dtype) for f, e in enumerate(op.body))
    written = fields if kernel.mode == "partial" else tuple((t, graph.tensors[t].dtype) for t in op.outs)
    along = varies(op) if kernel.mode == "partial" else ((True,) * len(op.dims),) * len(op.outs)
    outs = tuple(_map_access(n, t, b, op.dims, shift, v) for (n, t), b, v in zip(written, kernel.outs, along, strict=True))
    states = tuple(
        _map_access(n, t, state_box(op, f, kernel.outs[0]), op.dims, shift, varies(op)[f])
        for f, (n, t) in enumerate(fields if kernel.mode == "finish" else ())
    )
    first, last = len(op.dims), len(op.dims) + len(op.reduce)
    return Task(
        mode=kernel.mode,
        dims=local[:first],
        reduce=local[first:last],
        monoid=op.monoid,
        reads=reads,
        states=states,
        outs=outs,
        body=body,
        then=then,
        inner=inner,
    )


def task_text(task: Task) -> str:
    """Everything that the source depends on besides names."""
    names = [f"%{i}" for i in range(max(task.reads, default=-1) + 1)]
    lines = [f"{task.mode} {task.dims} {task.reduce} {task.monoid} {[(s.dims, s.monoid) for s in task.inner]}"]
    for group in (tuple(task.reads.items()), tuple(enumerate(task.states)), tuple(enumerate(task.outs))):
        for i, a in group:
            checks = [f"{c.aff} {c.op} {c.bound}" for c in a.checks]
            lines.append(f"{i} {a.dtype} {a.offset} {checks} {a.other!r}")
    lines += [f"{e.dtype} {expr_text(e, names)}" for e in task.exprs]
    return "\n".join(lines)


def _map_access(
    name: str, dtype: str, box: Box, dims: tuple[Dim, ...], shift: Mapping[str, Aff], along: tuple[bool, ...]
) -> Access:
    """Access to a buffer over the map dimensions: the identity projection, but for those that are kept once."""
    offset = const(0)
    for d, (lo, _), step, own in zip(dims, box, strides(box), along, strict=True):
        offset = offset + (shift[d.name] - lo) * (step if own else 0)
    return Access(tensor=name, dtype=dtype, offset=offset)


def _access(read: Read, dtype: str, extents: tuple[int, ...], box: Box, shift: Mapping[str, Aff], ranges: Ranges) -> Access:
    index = [substitute(e, shift, ranges) for e in read.index]
    offset = const(0)
    for e, (lo, _), step in zip(index, box, strides(box), strict=True):
        offset = offset + (e - lo) * step
    checks: list[Check] = []
    if read.other is not None:
        for e, n in zip(index, extents, strict=True):
            checks += inside(e, n, ranges)
    for g in read.when:
        e = substitute(g.aff, shift, ranges)
        lo, hi = span(e, ranges)
        if not (lo >= 0 if g.op == "ge" else lo == hi == 0):
            checks.append(Check(e - e.const, ">=" if g.op == "ge" else "==", -e.const))
    return Access(
        tensor=read.tensor, dtype=dtype, offset=recombine(offset), checks=tuple(dict.fromkeys(checks)), other=read.other
    )


def substitute_access(access: Access, env: Mapping[str, Aff], ranges: Ranges | None = None) -> Access:
    """An access with dimensions replaced by index expressions over others, of the extents ``ranges``."""
    moved = [(substitute(c.aff, env, ranges), c) for c in access.checks]
    checks = tuple(Check(e - e.const, c.op, c.bound - e.const) for e, c in moved)
    return replace(access, offset=recombine(substitute(access.offset, env, ranges)), checks=checks)


def substitute_indices(e: Expr, env: Mapping[str, Aff], ranges: Ranges | None = None) -> Expr:
    """An expression with dimensions replaced by index expressions over others, of the extents ``ranges``."""
    return rewrite(e, lambda x: Index(substitute(x.aff, env, ranges), x.dtype) if isinstance(x, Index) else x)


_TRUE = Const(True, "bool")
_LEAST = {"ge": 0, "gt": 1}  # of the difference


def without_certain_tests(e: Expr, ranges: Ranges) -> Expr:
    """An expression without tests of places that hold in the whole block, such as the causal mask of keys that all rows see.

    Those that hold nowhere stay: which tiles a loop visits is read off them.
    """
    known: dict[int, Expr] = {}

    def of(e: Expr) -> Expr:
        if isinstance(e, Call) and id(e) not in known:
            known[id(e)] = _certain(replace(e, args=tuple(map(of, e.args))), ranges)
        return known.get(id(e), e)

    return of(e)


def _certain(e: Call, ranges: Ranges) -> Expr:
    first, *others = e.args
    if (fn := {"le": "ge", "lt": "gt"}.get(e.fn, e.fn)) in _LEAST:
        a, b = (place_of(x) for x in (e.args if fn == e.fn else e.args[::-1]))
        return _TRUE if a is not None and b is not None and span(a - b, ranges)[0] >= _LEAST[fn] else e
    if e.fn in ("and", "or") and _TRUE in e.args:
        return _TRUE if e.fn == "or" else others[0] if first == _TRUE else first
    return others[0] if e.fn == "where" and first == _TRUE else e


def place_of(e: Expr) -> Aff | None:
    """An integer that is an index or a number; ``None`` for any other."""
    if isinstance(e, Index):
        return e.aff
    return const(int(e.value)) if isinstance(e, Const) and e.dtype in ("i32", "i64") else None


def substitute_task(task: Task, env: Mapping[str, Aff], ranges: Ranges | None = None) -> Task:
    """A task with dimensions replaced in every access and expression; ``dims`` and ``reduce`` are left to the caller."""

    def access(a: Access) -> Access:
        return substitute_access(a, env, ranges)

    def expr(e: Expr) -> Expr:
        return substitute_indices(e, env, ranges)

    return replace(
        task,
        reads={p: access(a) for p, a in task.reads.items()},
        states=tuple(map(access, task.states)),
        outs=tuple(map(access, task.outs)),
        body=tuple(map(expr, task.body)),
        then=tuple(map(expr, task.then)),
        inner=tuple(replace(s, body=expr(s.body)) for s in task.inner),
    )


def inside(e: Aff, extent: int, ranges: Ranges) -> list[Check]:
    """The checks that an index expression is within ``[0, extent)``, as far as its ranges do not say so."""
    lo, hi = span(e, ranges)
    checks = [Check(e - e.const, ">=", -e.const)] if lo < 0 else []
    return [*checks, Check(e - e.const, "<", extent - e.const)] if hi >= extent else checks


def recombine(e: Aff) -> Aff:
    """``c*k*floor(a/k) + c*(a mod k)`` is ``c*a``: what a reshape read as row-major memory comes to."""
    coefs = dict(e.terms)
    for atom, c in e.terms:
        if isinstance(atom, Mod) and coefs.get(Floor(atom.arg, atom.div)) == c * atom.div:
            whole = Aff(((Floor(atom.arg, atom.div), c * atom.div), (atom, c)))
            return recombine(e - whole + atom.arg * c)
    return e
