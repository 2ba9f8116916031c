"""Bugs to seed in kernels and in the runtime; see `seeded_bugs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bench.correctness.seeded_bugs import BUGS, Swaps, bug, seeded
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.base import contract, scalars, selection, state_merges, strided_reads
from tapestry.runtime import arrays
from tapestry.runtime.one_process.logical_devices import LocalExecutor

# kernels and runtime


@bug
def stale_key_of_kernels(s: Swaps) -> None:
    """A stale cache key: the kernel of the first device is used on all whose block has the same shape."""
    old = LocalExecutor.bind

    def wrong(m: Any) -> None:
        if m.packing:
            return
        old(m)
        first: dict[Any, Any] = {}
        for (at, d), (run, ins) in m.launches.items():
            extents = tuple(hi - lo for lo, hi in m.program.steps[at].blocks[d])
            m.launches[at, d] = first.setdefault((at, extents), run), ins

    s.method(LocalExecutor, "bind", wrong)


@bug
def last_state_dropped(s: Swaps) -> None:
    """A reduction over devices leaves the last device's state out."""
    old = TorchCpu.merge
    s.method(TorchCpu, "merge", lambda t, name, states: old(t, name, states[:-1] if len(states) > 2 else states))


@bug
def slice_forgets_its_origin(s: Swaps) -> None:
    """A message is cut at the tensor's coordinates, not the buffer's, where both fit."""
    old = arrays.part

    def wrong(array: Any, box: Any, origin: Any) -> Any:
        fits = all(hi <= n for (_, hi), n in zip(box, array.shape, strict=True))
        return old(array, box, tuple((0, hi) for _, hi in origin) if fits else origin)

    s.function(old, wrong)


@bug
def guards_never_asked(s: Swaps) -> None:
    """A kernel reads where a guard says that it must not."""
    s.function(strided_reads.mask, lambda guards, frame: None)


@bug
def gathered_part_not_shifted(s: Swaps) -> None:
    """A masked gather on a part of the table takes positions from the table's beginning."""
    old = selection.gather

    def wrong(op: Any, graph: Any, kernel: Any, frame: Any) -> Any:
        *rest, (lo, hi) = kernel.block
        return old(op, graph, replace(kernel, block=(*rest, (0, hi - lo))), frame)

    s.function(old, wrong)


@bug
def padding_on_the_wrong_side(s: Swaps) -> None:
    """A convolution's zeros before and after a block change places."""
    old = contract._axis

    def wrong(v: Any, at: Any, box: Any, extent: int) -> Any:
        take, (before, after) = old(v, at, box, extent)
        return take, (after, before)

    s.function(old, wrong)


@bug
def positions_from_the_block(s: Swaps) -> None:
    """A kernel that asks for its position is told the one within its block."""
    old = strided_reads.index_values

    def wrong(e: Any, frame: Any) -> Any:
        return old(e, replace(frame, box=tuple((0, hi - lo) for lo, hi in frame.box)))

    s.function(old, wrong)


@bug
def division_rounds_down(s: Swaps) -> None:
    """Integers are divided with floor, not towards zero."""
    s.item(
        scalars.TABLE, "div", lambda a, b: torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="floor")
    )


@bug
def scan_merged_backwards(s: Swaps) -> None:
    """States that fold in order are merged right to left."""
    old = state_merges.combine
    s.function(old, lambda name, a, b, dtypes: old(name, b, a, dtypes))


@bug
def input_slice_shifted(s: Swaps) -> None:
    """A device that loads a part of an input loads it a cell early."""
    old = LocalExecutor.load

    def wrong(m: Any, name: Any, device: Any, box: Any) -> None:
        kept = m.kept[device].get(name)
        old(m, name, device, tuple((lo - 1, hi - 1) if lo > 0 else (lo, hi) for lo, hi in box) if kept is None else box)

    s.method(LocalExecutor, "load", wrong)


__all__ = ["BUGS", "seeded"]
