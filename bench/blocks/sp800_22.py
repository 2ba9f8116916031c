"""Eight of the fifteen tests of NIST SP 800-22 rev. 1a (Rukhin et al. 2010), on many sequences of bits at once.

A test takes ``bits``: unsigned 64-bit words [sequences, n / 64], and gives a p-value per sequence. Left out: overlapping and
non-overlapping templates, Maurer's universal test, linear complexity, approximate entropy (near to the serial test), and the
two on random excursions. `judged` is the standard's second level (section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

Bits = np.ndarray[Any, np.dtype[np.uint64]]
Values = np.ndarray[Any, np.dtype[np.float64]]
ALPHA = 0.01


def _erfc(x: Values) -> Values:
    return torch.special.erfc(torch.from_numpy(x)).numpy()


def _igamc(a: float, x: Values) -> Values:
    """The upper incomplete gamma function, regularised."""
    return torch.special.gammaincc(torch.tensor(a, dtype=torch.float64), torch.from_numpy(np.asarray(x))).numpy()


def _ones(bits: Bits) -> Values:
    return np.bitwise_count(bits).sum(axis=1, dtype=np.int64).astype(np.float64)


def frequency(bits: Bits) -> Values:
    """2.1: ones and zeros are about as many."""
    n = bits.shape[1] * 64
    return _erfc(np.abs(2 * _ones(bits) - n) / math.sqrt(2 * n))


def block_frequency(bits: Bits) -> Values:
    """2.2: so they are in every block of 128 bits."""
    ones = np.bitwise_count(bits).astype(np.int64).reshape(len(bits), -1, 2).sum(axis=2)
    statistic = 4 * 128 * np.square(ones / 128 - 0.5).sum(axis=1)
    return _igamc(ones.shape[1] / 2, statistic / 2)


def runs(bits: Bits) -> Values:
    """2.3: bits change as often as they should."""
    n = bits.shape[1] * 64
    after = (bits[:, 1:] & np.uint64(1)) << np.uint64(63)
    changes = np.bitwise_count(bits[:, :-1] ^ (bits[:, :-1] >> np.uint64(1) | after)).sum(axis=1, dtype=np.int64)
    last = bits[:, -1] ^ (bits[:, -1] >> np.uint64(1))
    changes = changes + np.bitwise_count(last & np.uint64((1 << 63) - 1))
    p = _ones(bits) / n
    return _erfc(np.abs(changes + 1 - 2 * n * p * (1 - p)) / (2 * math.sqrt(2 * n) * p * (1 - p)))


@lru_cache(maxsize=1)
def _longest() -> Values:
    """Chances that the longest run of ones in 64 bits is at most 3, 4, 5, 6, 7, 8, or more: exact, by counting."""

    def at_most(k: int) -> float:
        ways = [1] + [0] * k  # strings by the length of the run of ones that they end with
        for _ in range(64):
            ways = [sum(ways), *ways[:-1]]
        return sum(ways) / 2.0**64

    total = [at_most(k) for k in range(3, 9)]
    return np.diff([0.0, *total, 1.0])


def longest_run(bits: Bits) -> Values:
    """2.4: the longest runs of ones in blocks (of 64 bits here) are as long as they should be."""
    length, x = np.zeros(bits.shape, np.int8), bits.copy()
    for _ in range(9):  # 9 and more are one class
        length += x != 0
        x &= x << np.uint64(1)
    classes = np.clip(length, 3, 9) - 3
    chances, count = _longest(), bits.shape[1]
    seen = np.stack([(classes == k).sum(axis=1) for k in range(len(chances))], axis=1)
    return _igamc((len(chances) - 1) / 2, (np.square(seen - count * chances) / (count * chances)).sum(axis=1) / 2)


def _rank_chance(r: int) -> float:
    """Of a random 32 × 32 matrix of bits to have rank r (section 3.5)."""
    return 2.0 ** (r * (64 - r) - 1024) * math.prod((1 - 2.0 ** (k - 32)) ** 2 / (1 - 2.0 ** (k - r)) for k in range(r))


def matrix_rank(bits: Bits) -> Values:
    """2.5: 32 × 32 matrices of bits have full rank as often as they should."""
    rows = bits.view(np.uint32).reshape(-1, 32).copy()
    rank, at = np.zeros(len(rows), np.int64), np.arange(len(rows))
    for column in range(32):
        has = (rows >> np.uint32(column)) & np.uint32(1)
        has &= np.arange(32)[None, :] >= rank[:, None]
        pivot, found = has.argmax(axis=1), has.any(axis=1)
        place = np.minimum(rank, 31)
        row = np.where(found, rows[at, pivot], np.uint32(0))
        rows[at[found], pivot[found]] = rows[at[found], place[found]]
        rows[at[found], place[found]] = row[found]
        below = ((rows >> np.uint32(column)) & np.uint32(1)).astype(bool) & (np.arange(32)[None, :] > rank[:, None])
        rows ^= np.where(below & found[:, None], row[:, None], np.uint32(0))
        rank += found
    full, less = _rank_chance(32), _rank_chance(31)
    chances = np.array([full, less, 1 - full - less])
    ranks = rank.reshape(len(bits), -1)
    seen = np.stack([(ranks == 32).sum(1), (ranks == 31).sum(1), (ranks < 31).sum(1)], axis=1)
    count = ranks.shape[1]
    return np.exp(-(np.square(seen - count * chances) / (count * chances)).sum(axis=1) / 2)


def spectrum(bits: Bits) -> Values:
    """2.6: no frequency stands out."""
    out: list[float] = []
    for sequence in bits:
        x = np.unpackbits(sequence.view(np.uint8)).astype(np.float32) * 2 - 1
        n = len(x)
        below = int((np.abs(np.fft.rfft(x)[: n // 2]) < math.sqrt(math.log(1 / 0.05) * n)).sum())
        out.append((below - 0.95 * n / 2) / math.sqrt(n * 0.95 * 0.05 / 4))
    return _erfc(np.abs(np.array(out)) / math.sqrt(2))


def serial(bits: Bits) -> Values:
    """2.11: all patterns of 8 bits, overlapping, are as frequent (the first of its two p-values; m = 8)."""
    n, text = bits.shape[1] * 64, bits.view(np.uint8)
    following = np.roll(text, -1, axis=1)
    both = text.astype(np.uint16) | following.astype(np.uint16) << 8
    squares: dict[int, Values] = {}
    counts = np.zeros((len(bits), 256), np.int64)
    for shift in range(8):
        window = (both >> shift) & 255
        counts += np.stack([np.bincount(row, minlength=256) for row in window])
    for m, c in ((8, counts), (7, counts.reshape(-1, 2, 128).sum(axis=1))):
        squares[m] = (2.0**m / n) * np.square(c.astype(np.float64)).sum(axis=1) - n
    return _igamc(2.0**6, (squares[8] - squares[7]) / 2)


def cumulative_sums(bits: Bits) -> Values:
    """2.13: the walk of +1 and -1 does not go too far (forward)."""
    n = bits.shape[1] * 64
    root, out = math.sqrt(n), list[float]()

    def phi(x: Values) -> Values:
        return torch.special.ndtr(torch.from_numpy(x)).numpy()

    for sequence in bits:
        walk = np.cumsum(np.unpackbits(sequence.view(np.uint8), bitorder="little").astype(np.int32) * 2 - 1)
        z = int(np.abs(walk).max())
        k = np.arange(math.floor((-n / z + 1) / 4), math.floor((n / z - 1) / 4) + 1, dtype=np.float64)
        j = np.arange(math.floor((-n / z - 3) / 4), math.floor((n / z - 1) / 4) + 1, dtype=np.float64)
        first = (phi((4 * k + 1) * z / root) - phi((4 * k - 1) * z / root)).sum()
        out.append(1 - first + (phi((4 * j + 3) * z / root) - phi((4 * j + 1) * z / root)).sum())
    return np.array(out)


QUICK: dict[str, Callable[[Bits], Values]] = {"frequency": frequency, "block frequency": block_frequency, "runs": runs}
TESTS = QUICK | {
    "longest run": longest_run, "matrix rank": matrix_rank, "spectrum": spectrum, "serial": serial,
    "cumulative sums": cumulative_sums,
}  # fmt: skip


def judged(p: Values) -> tuple[bool, float, float]:
    """(passed, share of sequences that pass, uniformity): the share is within three deviations of 1 - α, and p-values over ten
    bins are even (P_T >= 0.0001)."""
    share = float((p >= ALPHA).mean())
    bins = np.histogram(p, bins=10, range=(0.0, 1.0))[0]
    uniform = float(_igamc(4.5, np.array(np.square(bins - len(p) / 10).sum() / (len(p) / 10) / 2)))
    return abs(share - (1 - ALPHA)) <= 3 * math.sqrt(ALPHA * (1 - ALPHA) / len(p)) and uniform >= 1e-4, share, uniform
