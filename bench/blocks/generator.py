"""The generator of random numbers under statistical tests, and how fast it is.

    .venv/bin/python -m bench generator [--seconds S] [--gigabytes G] [--dieharder PROGRAM]

Streams are what random operators take: of one key the words of consecutive elements (a uniform tensor), two words of each (a
normal one), one word of elements that are a row apart (a column), and of element 0 under consecutive keys (seeds). Three tests
of NIST SP 800-22 see G gigabytes of the first stream, the five slower ones a part, the other streams all eight on a part. Where
there is a ``dieharder`` (Brown; Debian has it), its tests read the first stream through a pipe, one after another, until S
seconds are over; each row says how many bytes its test took. Speed is that of one core beside numpy's Philox and torch's
generator. Writes bench/results/generator.json; exits 1 if a test fails.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from bench.blocks import sp800_22
from bench.support import record
from bench.support.record import Row
from tapestry.codegen.torch_cpu.base import scalars
from tapestry.ir import philox

KEY = 0x5EED_1234_ABCD
ROW = 4096  # elements of a row, of the stream that goes down a column
CHUNK = 1 << 18  # words at a time
SEQUENCE = 1 << 20  # bits of a sequence
FAST, SLOW = 2 * 8 * CHUNK * 4, 8 * CHUNK * 4  # bytes at a time
DIEHARDER = (0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 15, 16, 17, 100, 101, 102, 202, 203, 204, 206, 209)
"""Tests by number, but for those that take longest and those that its author calls suspect (5, 6, 7 and 14)."""


def words(index: torch.Tensor, word: int = 0, key: int = KEY) -> np.ndarray[Any, Any]:
    """Output words of elements, by the function that runs call."""
    one = [torch.tensor(x) for x in (key, 0, 0, word)]
    return scalars.TABLE["philox"](*one, index).to(torch.int32).numpy().view(np.uint32)


def _uniform(first: int, count: int) -> np.ndarray[Any, Any]:
    return words(torch.arange(first, first + count))


def _normal(first: int, count: int) -> np.ndarray[Any, Any]:
    index = torch.arange(first // 2, (first + count) // 2)
    return np.stack([words(index, 0), words(index, 1)], axis=1).reshape(-1)


def _column(first: int, count: int) -> np.ndarray[Any, Any]:
    return words(torch.arange(first, first + count) * ROW)


def _keys(first: int, count: int) -> np.ndarray[Any, Any]:
    """Element 0 under consecutive keys: numpy's way, for the key varies."""
    return philox.philox(np.arange(first, first + count), 0, 0, 0, np.zeros(count)).astype(np.uint32)


STREAMS: dict[str, Callable[[int, int], np.ndarray[Any, Any]]] = {
    "uniform": _uniform, "normal": _normal, "column": _column, "keys": _keys,
}  # fmt: skip


def sequences(stream: str, nbytes: int, at_once: int) -> Iterator[sp800_22.Bits]:
    """Sequences of bits of a stream, some at a time."""
    for first in range(0, nbytes // 4, at_once // 4):
        parts = [STREAMS[stream](first + k, CHUNK) for k in range(0, at_once // 4, CHUNK)]
        yield np.concatenate(parts).view(np.uint64).reshape(-1, SEQUENCE // 64)


def sp800(stream: str, names: list[str], nbytes: int, at_once: int = SLOW) -> Iterator[Row]:
    """Tests on a stream: p-values of all sequences, judged as the standard does."""
    found: dict[str, list[np.ndarray[Any, Any]]] = {n: [] for n in names}
    for bits in sequences(stream, nbytes, at_once):
        for n in names:
            found[n].append(sp800_22.TESTS[n](bits))
    for n, parts in found.items():
        p = np.concatenate(parts)
        passed, share, uniform = sp800_22.judged(p)
        yield {"suite": "SP 800-22", "test": n, "stream": stream, "bytes": len(p) * SEQUENCE // 8, "sequences": len(p),
               "share": share, "p": uniform, "passed": bool(passed)}  # fmt: skip


def dieharder(program: str, seconds: float) -> Iterator[Row]:
    """Its tests, each on the next part of the stream, until the time is over."""
    start, first = time.monotonic(), 0
    for number in DIEHARDER:
        if time.monotonic() - start > seconds:
            return
        shown = [w for column in ("test_name", "ntuple", "pvalues", "assessment") for w in ("-D", column)]
        begin, command = first, [program, "-g", "200", "-d", str(number), "-c", "|", *shown]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
            assert p.stdin is not None and p.stdout is not None
            with suppress(BrokenPipeError):  # the test has read enough
                while True:
                    p.stdin.write(_uniform(first, CHUNK).tobytes())
                    first += CHUNK
            with suppress(BrokenPipeError):
                p.stdin.close()
            lines = p.stdout.read().decode().splitlines()
        if p.returncode or not lines:
            raise RuntimeError(f"{' '.join(command)} ended with {p.returncode} and {len(lines)} results")
        for result, line in enumerate(lines):
            cells = [c.strip() for c in line.split("|")]
            yield {"suite": "dieharder", "test": cells[0], "size": int(cells[1]), "result": result, "stream": "uniform",
                   "bytes": (first - begin) * 4, "p": float(cells[2]), "assessment": cells[3],
                   "passed": cells[3] != "FAILED"}  # fmt: skip


def speed() -> Row:
    """Million words a second of one core: ours for a whole run of cells, by numpy, and of others' generators."""
    torch.set_num_threads(1)
    index = torch.arange(1 << 22)
    key = [np.asarray(x) for x in (KEY, 0, 0, 0)]
    other, size = np.random.Generator(np.random.Philox(7)), len(index)
    some, high = index.numpy()[: size // 8], 1 << 31
    ways: dict[str, Callable[[], object]] = {
        "tapestry": lambda: words(index), "tapestry without a C compiler": lambda: philox.philox(*key, some),
        "numpy Philox": lambda: other.integers(0, 2 * high, size, np.uint32), "torch": lambda: torch.randint(0, high, (size,)),
    }  # fmt: skip
    out: Row = {}
    for name, run in ways.items():
        run()
        start = time.process_time()
        run()
        done = size // 8 if "without" in name else size
        out[name] = done / (time.process_time() - start) / 1e6
    return out


def main() -> int:
    """Test, show, write; 1 if a test fails."""
    p = argparse.ArgumentParser(prog="bench generator")
    p.add_argument("--seconds", type=float, default=120.0, metavar="S", help="for dieharder")
    p.add_argument("--gigabytes", type=float, default=10.0, metavar="G", help="for the three quick tests")
    p.add_argument("--only", nargs="+", choices=(*STREAMS, "dieharder"), default=(*STREAMS, "dieharder"), metavar="STREAM",
                   help="streams for SP 800-22, or dieharder; rows of the others stay")  # fmt: skip
    p.add_argument("--dieharder", default=shutil.which("dieharder"), metavar="PROGRAM", help="where it is, if not on the path")
    args = p.parse_args()
    fast, failed = speed(), 0
    print({k: round(v, 1) for k, v in fast.items()}, flush=True)

    def add(found: Iterator[Row]) -> None:
        nonlocal failed
        for r in found:
            print(
                f"{r['suite']} {r['test']} on {r['stream']}: {r['bytes']:,} bytes, p {r['p']:.4f}, passed {r['passed']}",
                flush=True,
            )
            failed += not r["passed"]
            kept = record.merged("generator", [r], ("suite", "test", "stream", "size", "result"))
            record.write("generator", kept, million_words_a_second=fast)

    part = int(min(args.gigabytes * 1e9, 32e6))
    slower = [n for n in sp800_22.TESTS if n not in sp800_22.QUICK]
    for stream in (n for n in STREAMS if n in args.only):
        first = stream == "uniform"
        add(sp800(stream, list(sp800_22.QUICK), int(args.gigabytes * 1e9) if first else part // 2, FAST))
        add(sp800(stream, slower, part if first else part // 2))
    if args.dieharder and "dieharder" in args.only:
        add(dieharder(args.dieharder, args.seconds))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
