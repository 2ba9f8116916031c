"""Reads as torch tensors over the index space: a strided view wherever the projection is affine, else a gather.

Every value has one axis per dimension of the space, of size 1 where it does not depend on the dimension, so that values
broadcast against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tapestry.codegen.torch_cpu.base.torch_api import tensor_of
from tapestry.ir.graph import Dim, Guard, Read
from tapestry.ir.index import Aff, Atom, Floor, bounds, dims_of, evaluate
from tapestry.ir.kernel import Box

Tensor = torch.Tensor


Fetch = Callable[[Tensor], Tensor]
SAME_BITS = {  # dtypes that torch does not gather, and those of as many bits that it does
    torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.int8, torch.float8_e4m3fnuz: torch.int8, torch.float8_e5m2: torch.int8,
    torch.float8_e5m2fnuz: torch.int8, torch.float8_e8m0fnu: torch.int8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """A block of an index space: its dimensions and the half-open interval of each."""

    dims: tuple[Dim, ...]
    box: Box

    @property
    def intervals(self) -> dict[str, tuple[int, int]]:
        """Inclusive intervals, for `ir.index.bounds`."""
        return {d.name: (lo, hi - 1) for d, (lo, hi) in zip(self.dims, self.box, strict=True)}

    @property
    def extents(self) -> list[int]:
        """Number of points along each dimension."""
        return [hi - lo for lo, hi in self.box]

    def grid(self) -> dict[str, np.ndarray]:
        """Values of each dimension, shaped to broadcast."""
        rank = len(self.dims)
        return {
            d.name: np.arange(lo, hi, dtype=np.int64).reshape([-1 if k == i else 1 for k in range(rank)])
            for i, (d, (lo, hi)) in enumerate(zip(self.dims, self.box, strict=True))
        }


def index_values(e: Aff, frame: Frame) -> Tensor:
    """Values of an index expression over a block, in global coordinates; a part of their memory, so that no result is that."""
    value = np.asarray(evaluate(e, frame.grid()), np.int64)
    memory = tensor_of(np.append(value, 0))
    return memory[:-1].view(value.shape or (1,) * len(frame.dims))


def mask(guards: tuple[Guard, ...], frame: Frame) -> Tensor | None:
    """Where all guards hold; ``None`` when there are none."""
    out: Tensor | None = None
    for g in guards:
        v = index_values(g.aff, frame)
        ok = v >= 0 if g.op == "ge" else v == 0
        out = ok if out is None else out & ok
    return out


def reader(read: Read, frame: Frame, box: Box, shape: tuple[int, ...]) -> Fetch:
    """A function from the buffer (which holds ``box`` of the tensor) to the read's values over a block."""
    inner = _strided(read, frame, box, shape) if _is_strided(read.index) else _digits(read, frame, box, shape)
    inner = inner or _selected(read, frame, box, shape) or _gathered(read, frame, box, shape)
    keep = mask(read.when, frame)
    if keep is None or bool(keep.all()):
        return inner
    assert read.other is not None
    fill = read.other
    return lambda buffer: torch.where(keep, inner(buffer), torch.full((), fill, dtype=buffer.dtype))


def _is_strided(index: tuple[Aff, ...]) -> bool:
    return all(e.is_affine and all(c > 0 for _, c in e.terms) for e in index)


def _strided(read: Read, frame: Frame, box: Box, shape: tuple[int, ...]) -> Fetch | None:
    """A view with one stride per dimension, of the buffer or of a padded copy of the block's footprint."""
    hull = [tuple(int(v) for v in bounds(e, frame.intervals)) for e in read.index]
    low = [h[0] for h in hull]
    high = [max(h[0], h[1] + 1) for h in hull]
    sizes = [n if any(d.name in dims_of(e) for e in read.index) else 1 for d, n in zip(frame.dims, frame.extents, strict=True)]
    inside = all(lo >= 0 and hi <= n for lo, hi, n in zip(low, high, shape, strict=True))
    held = all(b[0] <= lo and hi <= b[1] for lo, hi, b in zip(low, high, box, strict=True))
    if inside and held:
        start = [lo - b[0] for lo, b in zip(low, box, strict=True)]
        return lambda buffer: _view(buffer, start, read.index, frame, sizes)
    if read.other is None:  # a guard elsewhere keeps the missing cells from being used
        return None
    fill = read.other
    clipped = [(max(lo, b[0], 0), min(hi, b[1], n)) for lo, hi, b, n in zip(low, high, box, shape, strict=True)]
    origin = [0] * len(low)

    def padded(buffer: Tensor) -> Tensor:
        whole = torch.full([h - lo for lo, h in zip(low, high, strict=True)], fill, dtype=buffer.dtype)
        if all(a < b for a, b in clipped):
            put = tuple(slice(a - lo, b - lo) for (a, b), lo in zip(clipped, low, strict=True))
            take = tuple(slice(a - o[0], b - o[0]) for (a, b), o in zip(clipped, box, strict=True))
            whole[put] = buffer[take]
        return _view(whole, origin, read.index, frame, sizes)

    return padded


def _view(buffer: Tensor, start: list[int], index: tuple[Aff, ...], frame: Frame, sizes: list[int]) -> Tensor:
    strides = buffer.stride()
    step = [sum(s * e.coef(d.name) for s, e in zip(strides, index, strict=True)) for d in frame.dims]
    offset = buffer.storage_offset() + sum(s * k for s, k in zip(strides, start, strict=True))
    return buffer.as_strided(sizes, step, offset)


def _digits(read: Read, frame: Frame, box: Box, shape: tuple[int, ...]) -> Fetch | None:
    """Axes ``floor(m / d)`` and ``m mod d`` of one dimension (heads merged into features): a view over both digits."""
    atoms = {a for e in read.index for a, _ in e.terms if not isinstance(a, str)}
    names = {str(a.arg) for a in atoms if a.arg.is_dim}
    if len(names) != 1 or len({a.div for a in atoms}) != 1 or not all(a.arg.is_dim for a in atoms):
        return None
    name, div = names.pop(), atoms.pop().div
    at = next(k for k, d in enumerate(frame.dims) if d.name == name)
    lo, hi = frame.box[at]
    if lo % div or hi % div or any(a == name for e in read.index for a, _ in e.terms):
        return None
    high, low = f"{name} high", f"{name} low"
    index = tuple(Aff(tuple((_digit(a, high, low), c) for a, c in e.terms), e.const) for e in read.index)
    dims = (*frame.dims[:at], Dim(high, -(-frame.dims[at].size // div)), Dim(low, div), *frame.dims[at + 1 :])
    places = (*frame.box[:at], (lo // div, hi // div), (0, div), *frame.box[at + 1 :])
    plain = Read(tensor=read.tensor, index=index, other=read.other)
    if not _is_strided(index):
        return None
    inner = _strided(plain, Frame(dims, places), box, shape)
    if inner is None:
        return None
    both = [any(n in dims_of(e) for e in index) for n in (high, low)]
    extents = [(hi - lo) // div, div]

    def fetch(buffer: Tensor) -> Tensor:
        view = inner(buffer)
        sizes = list(view.shape)
        if any(both):
            sizes[at : at + 2] = extents
        return view.expand(sizes).flatten(at, at + 1)

    return fetch


def _digit(atom: Atom, high: str, low: str) -> Atom:
    return atom if isinstance(atom, str) else high if isinstance(atom, Floor) else low


def _selected(read: Read, frame: Frame, box: Box, shape: tuple[int, ...]) -> Fetch | None:
    """Axes with floor or mod (or a negative step) of one dimension each, picked by index; the rest is strided."""
    if any(hi <= lo for lo, hi in box):  # all of it is outside: there is nothing to pick
        return None
    picks: list[tuple[int, Tensor]] = []
    index = list(read.index)
    new_box = list(box)
    for i, e in enumerate(read.index):
        if e.is_affine and all(c > 0 for _, c in e.terms):
            continue
        names = dims_of(e)
        others = frozenset[str]().union(*(dims_of(o) for k, o in enumerate(read.index) if k != i))
        if len(names) != 1 or names & others:
            return None
        name = next(iter(names))
        values = np.ravel(evaluate(e, frame.grid()))
        if not values.size or values.min() < box[i][0] or values.max() >= box[i][1]:
            return None
        picks.append((i, tensor_of(np.ascontiguousarray(values - box[i][0]))))
        index[i] = Aff(((name, 1),))
        new_box[i] = next(b for d, b in zip(frame.dims, frame.box, strict=True) if d.name == name)
    extents = tuple(hi if i in dict(picks) else n for i, ((_, hi), n) in enumerate(zip(new_box, shape, strict=True)))
    rest = _strided(Read(tensor=read.tensor, index=tuple(index), other=read.other), frame, tuple(new_box), extents)
    if rest is None:
        return None

    def fetch(buffer: Tensor) -> Tensor:
        bits = buffer.view(SAME_BITS.get(buffer.dtype, buffer.dtype))
        for axis, at in picks:
            bits = bits.index_select(axis, at)
        return rest(bits.view(buffer.dtype))

    return fetch


def _gathered(read: Read, frame: Frame, box: Box, shape: tuple[int, ...]) -> Fetch:
    """Any projection: flat positions in the buffer, computed once."""
    flat: np.ndarray = np.zeros([1] * len(frame.dims), np.int64)
    valid: np.ndarray = np.ones([1] * len(frame.dims), bool)
    for e, (lo, hi), n in zip(read.index, box, shape, strict=True):
        v = np.asarray(evaluate(e, frame.grid()), np.int64)
        valid = valid & (v >= max(0, lo)) & (v < min(n, hi))
        flat = flat * (hi - lo) + np.clip(v, lo, max(lo, hi - 1)) - lo
    positions = tensor_of(np.ascontiguousarray(flat))
    everywhere = bool(valid.all())
    ok = tensor_of(np.ascontiguousarray(valid))
    fill = 0 if read.other is None else read.other

    def fetch(buffer: Tensor) -> Tensor:
        if buffer.numel() == 0:
            return torch.full(positions.shape, fill, dtype=buffer.dtype)
        taken = buffer.reshape(-1)[positions]
        return taken if everywhere else torch.where(ok, taken, torch.full((), fill, dtype=buffer.dtype))

    return fetch
