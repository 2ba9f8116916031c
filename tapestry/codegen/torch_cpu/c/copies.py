"""What torch copies while a call is bound to fixed addresses, as calls in C that come before it at every run.

A kernel asks torch for its inputs as it needs them: of another order of axes, padded, or picked by index. Most of these are
views; the others are copies, which are done anew at every run, without torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, Ins, batch
from tapestry.codegen.torch_cpu.c.thread_parts import Work

Tensor = torch.Tensor
End = tuple[Tensor, "np.dtype[Any]"]  # an output where it stays, with its type as numpy has it
Places = list[
    tuple[Any, int, int]
]  # tables of addresses, the place in each, and how far its address is from a first cell, in bytes
PIECE = 4096  # cells of a row that threads take pieces of
COPIED = 2  # cells of a nanosecond, of one thread: an estimate, as those of `thread_parts`


@dataclass(slots=True)
class Scratch:
    """Memory that the copies of one call share with those of others, which run before it or after.

    Attributes:
        room: bytes that there may be.
        slots: memory for the first copy of a call, for the second one, …; what was too small for a later one stays.
        nbytes: of all that was taken.
    """

    room: int
    slots: list[Tensor] = field(default_factory=list[Tensor])
    nbytes: int = 0

    def like(self, x: Tensor, at: int) -> Tensor | None:
        """Memory for a tensor without gaps, in the order of its axes, that is copy number ``at`` of a call."""
        if at == len(self.slots) or self.slots[at].numel() < x.nbytes:
            if self.nbytes + x.nbytes > self.room:
                return None
            self.nbytes += x.nbytes
            self.slots[at:] = [torch.empty(x.nbytes, dtype=torch.uint8), *self.slots[at + 1 :]]
        return self.slots[at][: x.nbytes].view(x.dtype).as_strided(x.shape, x.stride())


def bind(recorder: CpuKernel, ins: Ins, memory: Sequence[Tensor], scratch: Scratch) -> Calls | None:
    """The call for inputs and outputs that stay where they are; ``None`` where torch computes on the way to it."""
    assert recorder.bind
    with _Watch(scratch) as seen:
        call = recorder.bind(ins, memory)
    return Calls.of(*seen.calls, call) if seen.copies_only else None


@dataclass(frozen=True, slots=True)
class Given:
    """The copy of a row-major array, wherever it is, to one that stays where it is."""

    to: Tensor
    call: CCall

    @classmethod
    def to_place(cls, to: Tensor) -> Given | None:
        """Copies to a row-major array of at most 8 bytes a cell; ``None`` where there is nothing to copy."""
        call = copy(to, to)
        return call and cls(to, call)

    def of(self, x: Tensor) -> Tensor:
        """Take it from an array, which has to stay until the call has run; that array, or what it was made."""
        if x.dtype != self.to.dtype or not x.is_contiguous():  # torch's calls take as long where there is nothing to do
            x = x.to(self.to.dtype).contiguous()
        if x.data_ptr() % x.itemsize:  # kernels take whole cells' addresses
            x = x.clone()
        self.call.buffers.x = x.data_ptr()
        return x


class WholeRun:
    """A run that is calls alone, on the caller's own arrays: their addresses are put into the calls that read or write them.

    Args:
        given: copies of inputs to memory that nothing else has, which are among the calls.
        ends: outputs in memory that nothing else has.
        tensor_of: a tensor with an array's bits.

    Attributes:
        moved: inputs and outputs whose own memory is not used. An output in another order is copied.
        whole: whether there is nothing left for torch to copy.
    """

    def __init__(
        self,
        given: Sequence[tuple[str, Given]],
        calls: Sequence[CCall | Calls],
        ends: Mapping[str, End],
        tensor_of: Callable[[Any], Tensor],
    ) -> None:
        self.tensor_of, self.given, self.ends = tensor_of, list[tuple[str, Given, Places]](), list[tuple[Any, ...]]()
        own = {id(c): _copied(c) for c in Calls.of(*calls).parts}
        self.moved, self.whole, last = set[str](), True, list[CCall]()
        for name, g in given:
            call = own.pop(id(g.call))
            if found := _addresses_in(own.values(), g.to):
                self.moved.add(name)
            else:
                last.append(call)
                found = [(_words(call.buffers), 0, 0)]  # `Copied.x`
            self.given.append((name, g, found))
        first, last = last, list[CCall]()
        for name, (x, dtype) in ends.items():
            if x.is_contiguous() and (found := _addresses_in(own.values(), x)):
                self.moved.add(name)
            elif call := copy(torch.empty(x.shape, dtype=x.dtype), x):
                last.append(call)
                found = [(_words(call.buffers), 1, 0)]  # `Copied.y`
            else:
                self.whole, found = False, []
            bits = dtype if dtype.isbuiltin else np.dtype(f"u{dtype.itemsize}")
            self.ends.append((name, tuple(x.shape), bits, dtype, found))
        self.run = batch([*first, *own.values(), *last])

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name, for arrays of numpy's by name."""
        there, out = list[Tensor](), dict[str, Any]()
        for name, given, places in self.given:
            x = given.of(self.tensor_of(feeds[name]))
            there.append(x)  # its memory is read until the run is over
            at = x.data_ptr()
            for words, k, offset in places:
                words[k] = at + offset
        for name, shape, bits, dtype, places in self.ends:
            new: Any = np.empty(shape, bits)
            at = ctypes.addressof(ctypes.c_char.from_buffer(new))
            for words, k, offset in places:
                words[k] = at + offset
            out[name] = new if bits is dtype else new.view(dtype)
        self.run()
        return out


def _copied(c: CCall) -> CCall:
    """A call with addresses of its own."""
    kind: Any = c.buffers.__class__
    return replace(c, buffers=kind.from_buffer_copy(c.buffers))


def _words(buffers: Any) -> Any:
    """What a structure of ctypes' consists of, as numbers of 64 bits."""
    return (ctypes.c_int64 * (ctypes.sizeof(buffers) // 8)).from_buffer(buffers)


def _addresses_in(calls: Iterable[CCall], x: Tensor) -> Places:
    """Where calls hold addresses of a tensor's memory; [] if not all are found, of tensors that they say they work on."""
    low, high = x.data_ptr(), x.data_ptr() + x.nbytes
    tables = [_words(c.buffers) for c in calls]
    out = [(words, k, at - low) for words in tables for k, at in enumerate(words) if low <= at < high]
    known = {k.data_ptr() - low for c in calls for k in c.kept if isinstance(k, Tensor) and low <= k.data_ptr() < high}
    return out if known <= {offset for _, _, offset in out} else []


class _Watch(TorchDispatchMode):
    """Sees each operator that torch runs: views and constants are as they are, copies become calls."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.scratch, self.calls, self.copies_only, self.known = scratch, list[CCall](), True, dict[Any, Tensor]()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record it."""
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if func is _ATEN.empty.memory_format:  # to work in: what is there is nothing to those that come after
            out = self._in_scratch(out)
        move = _MOVES.get(func)
        if move is None or not isinstance(out, Tensor):
            apart = given and not any(_is_of(out, x) for x in given)
            self.copies_only &= not (apart or func._schema.is_mutable)
            return out
        if func is not torch.ops.aten.copy_.default:
            same = (func, _arguments(args), out.stride())
            if same in self.known:
                return self.known[same]
            if out.dtype != given[0].dtype:
                self.copies_only = False
                return out
            out = self.known[same] = self._in_scratch(out)
        else:
            self.known.clear()  # what was copied may be another one by now
        for call in move(out, *args):
            if call is None:
                self.copies_only = False
            else:
                self.calls.append(call)
        return out

    def _in_scratch(self, x: Tensor) -> Tensor:
        """A tensor in memory that is shared."""
        place = None if _leaves_gaps(x) else self.scratch.like(x, self.count)
        self.copies_only &= place is not None
        self.count += 1
        return x if place is None else place


def _arguments(x: Any) -> Any:
    """What makes two operators' arguments the same."""
    if isinstance(x, list | tuple):
        return tuple(_arguments(y) for y in cast(Sequence[Any], x))
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _is_of(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _leaves_gaps(x: Tensor) -> bool:
    return 0 in x.shape or sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 != x.numel()


Steps = Sequence[CCall | None]


def _as_it_is(out: Tensor, x: Tensor, *_: Any) -> Steps:
    return [copy(out, x)]


def _copied_into(_: Tensor, out: Tensor, x: Tensor, *__: Any) -> Steps:
    return [copy(out, x)]


def _picked(out: Tensor, x: Tensor, axis: int, index: Tensor) -> Steps:
    return [copy(out, x, axis % x.dim(), index)]


def _from_anywhere(out: Tensor, x: Tensor, index: Sequence[Tensor | None]) -> Steps:
    """``x[index]`` of a flat tensor."""
    only = index[0]
    if x.dim() != 1 or len(index) != 1 or only is None or only.dtype != torch.int64 or not out.is_contiguous():
        return [None]
    return [copy(out.view(-1), x, 0, only.reshape(-1))]


def _framed(out: Tensor, x: Tensor, pad: Sequence[int], value: float = 0) -> Steps:
    inside = out
    for k, (low, high) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if low < 0 or high < 0:
            return [None]
        inside = inside.narrow(-1 - k, low, x.shape[-1 - k])
    return [copy(out, torch.full((1,) * out.dim(), value, dtype=out.dtype)), copy(inside, x)]


_ATEN = torch.ops.aten
_MOVES: dict[Any, Callable[..., Steps]] = {
    _ATEN.clone.default: _as_it_is,
    _ATEN._to_copy.default: _as_it_is,
    _ATEN.copy_.default: _copied_into,
    _ATEN.index_select.default: _picked,
    _ATEN.index.Tensor: _from_anywhere,
    _ATEN.constant_pad_nd.default: _framed,
}


def copy(out: Tensor, x: Tensor, axis: int = -1, index: Tensor | None = None) -> CCall | None:
    """The copy of a tensor that broadcasts, or of places of one axis of it; ``None`` where there are too many axes.

    Args:
        index: (places), negative ones from the end.
    """
    if out.dtype != x.dtype or out.element_size() > 8 or out.numel() == 0:
        return None
    x = x if index is not None else x.expand(out.shape)
    places = None if index is None else (torch.where(index < 0, index + x.shape[axis], index) * x.stride(axis)).contiguous()
    axes = [(n, x.stride(k), out.stride(k), k == axis and places is not None) for k, n in enumerate(out.shape) if n > 1]
    axes = _walked_as_one(sorted(axes, key=lambda a: -a[2]))
    if len(axes) > 1:  # rows: what is adjacent in what is read, if cells are not
        row = min(axes[:-1], key=lambda a: (a[3], a[1] == 0, a[1]))
        axes = [*(a for a in axes[:-1] if a is not row), row, axes[-1]]
    axes = [(1, 0, 0, False)] * (2 - len(axes)) + axes
    if len(axes) > native.MOST_AXES:
        return None
    extents, steps, to = zip(*(a[:3] for a in axes), strict=True)
    sizes = native.Copy(len(axes), x.element_size(), extents, steps, to)
    listed = [None if places is None or not a[3] else places.data_ptr() for a in axes]
    buffers = native.Copied(x.data_ptr(), out.data_ptr(), tuple(listed))
    lib: Any = native.library()
    units = prod(extents[:-1]) if prod(extents[:-1]) > 1 or any(listed) else out.numel() // PIECE
    return CCall(lib.tapestry_copy, sizes, buffers, (x, out, places), Work(units, out.numel() / COPIED))


def _walked_as_one(axes: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int, int, bool]]:
    """Axes (extent, stride there, stride here, whether places are listed), neighbours that are walked like one joined."""
    out = list[tuple[int, int, int, bool]]()
    for n, there, here, listed in axes:
        if out and not listed and not out[-1][3] and out[-1][1] == there * n and out[-1][2] == here * n:
            out[-1] = (out[-1][0] * n, there, here, False)
        else:
            out.append((n, there, here, listed))
    return out
