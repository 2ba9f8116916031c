"""Philox4x32-10 as its paper defines it, one number at a time in Python integers: what the targets' own are held against.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 3.3.
"""

from __future__ import annotations

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round: the golden ratio and the square root of 3, less 1
ROUNDS = 10
WORD = 1 << 32


def block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four words of a counter, least significant first; all words are below 2^32."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        high0, low0 = divmod(MULTIPLIERS[0] * x0, WORD)
        high1, low1 = divmod(MULTIPLIERS[1] * x2, WORD)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) % WORD, (k1 + WEYL[1]) % WORD
    return x0, x1, x2, x3
