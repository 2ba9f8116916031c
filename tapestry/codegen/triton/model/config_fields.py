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
            program's own. Of products; Triton 3.9 does not compile streaming sums so.
        one_loop: a streaming sum masks every tile of keys; else those that every row sees whole have a loop of their own.
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
