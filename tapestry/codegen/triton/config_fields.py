"""What a tuner may turn in each kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """What a tuner may turn; tile sizes are powers of two.

    Attributes:
        block: elements per program of a map (``rows`` by ``cols`` where memory is transposed and rows is above 1).
        rows, cols: tile of a reduction, row operation or scan, over map and reduced points.
        bm, bn, bk: tile of a contraction; of a streaming sum, queries (bm) and keys (bn).
        group: rows of tiles that neighbouring programs share, for the L2 cache.
        persistent: as many programs as multiprocessors, each going through several tiles of a contraction.
        packed: operands of a contraction are copied first into rows that can be read 16 bytes at a time (`staging`).
        split_k: parts of the reduced dimension that become programs of their own; a second pass merges their states.
        descriptors: tiles copied by tensor descriptors (TMA) where strides and alignment allow.
        warp_specialize: producer and consumer warps of their own, on sm90 with ``num_warps=4`` only; descriptors are then the
            program's own. Never a default. Triton 3.6 compiles streaming sums so that load by descriptors alone, 3.9 none.
        one_loop: a streaming sum masks every tile of keys; else those that some row does not see, which come before the loop.
        apart: of sums side by side each has tiles of its own (`tiles.siblings`); else a tile has all of them.
        registers: the most that a thread gets of CUDA's 255: with fewer, more programs share a multiprocessor.
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
    persistent: bool = False
    packed: bool = False
    split_k: int = 1
    descriptors: bool = False
    warp_specialize: bool = False
    one_loop: bool = False
    apart: bool = False
    registers: int = 255
