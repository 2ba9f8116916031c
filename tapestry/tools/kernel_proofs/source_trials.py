"""A source interpreted on random data in float64, and its operation at the same cells: for what has no common normal form.

Every cell that the chosen programs write is compared. Buffers of two passes are filled by all programs of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.expr import Const, Index, distinct
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import Aff
from tapestry.ir.kernel import Kernel
from tapestry.ir.types import Array
from tapestry.tools.kernel_proofs import addresses
from tapestry.tools.kernel_proofs.kernel_text import KernelText, block_of
from tapestry.tools.kernel_proofs.operation_terms import Operation
from tapestry.tools.kernel_proofs.program_reading import Program, Store
from tapestry.tools.kernel_proofs.term.evaluation import Evaluation, OutOfReach, evaluated_together
from tapestry.tools.kernel_proofs.term.term_arithmetic import kind_of
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported

PROGRAMS = 10  # that are compared
EDGES: tuple[Callable[[int], int], ...] = (lambda n: 0, lambda n: 1, lambda n: n // 2, lambda n: n - 2, lambda n: n - 1)
CLOSE = 1e-6  # of a value and the largest one: sources have constants of f32, and approximations
GREAT = 100.0  # beyond it a value says nothing of others' cancellation
NARROW = frozenset({"i8", "i16", "u8", "u16"})
SCRATCH = 1 << 22  # elements of scratch that are computed


def compare_programs(graph: Graph, kernel: Kernel, text: KernelText, programs: Sequence[Program], at: Any) -> None:
    """Compare the outputs of a kernel at the cells of some programs.

    Args:
        at: gives the cell of the tensor that a store writes, as expressions.

    Raises:
        LawError: a cell differs; Unsupported: there is a term without a value, or too many numbers.
    """
    op = block_of(graph, kernel)
    for positive in (False, True):
        data = _drawn(text, op, np.random.default_rng(positive), positive)
        try:
            for p in programs[:-1]:
                _filled(p, text, data)
            for store in programs[-1].stores:
                _compare(graph, kernel, text, programs[-1], store, data, at)
        except (OutOfReach, MemoryError):
            raise Unsupported("too many numbers to interpret") from None


def _drawn(text: KernelText, op: Block, rng: np.random.Generator, positive: bool) -> dict[str, Array]:
    named = {abs(int(c.value)) for c in distinct((*op.point, *op.then)) if isinstance(c, Const) and c.dtype[0] in "iu"}
    named |= {abs(x.aff.const) for x in distinct((*op.point, *op.then)) if isinstance(x, Index)} | {d.size for d in op.space}
    near = np.array(sorted({m + s for m in named for s in (-1, 0, 1)} | set(range(-3, 12))))
    out = dict[str, Array]()
    for name, b in text.buffers.items():
        kind = kind_of(b.dtype)
        if b.scratch:
            out[name] = np.full(b.size, np.nan)
        elif kind.kind == "int":
            lo, hi = (0 if not kind.signed else -(1 << min(kind.bits - 1, 40)), 1 << min(kind.bits - kind.signed, 40))
            fits = near[(near >= lo) & (near < hi)]
            out[name] = rng.choice(fits, b.size)
        elif kind.kind == "bool":
            out[name] = rng.integers(0, 2, b.size).astype(bool)
        else:
            out[name] = rng.uniform(0.5, 1.5, b.size) if positive else rng.standard_normal(b.size)
    return out


def _filled(program: Program, text: KernelText, data: dict[str, Array]) -> None:
    """Scratch as a pass leaves it."""
    for store in program.stores:
        if text.buffers[store.to.buffer].size > SCRATCH:
            raise Unsupported("scratch is too large to interpret")
        names = addresses.variables(program.terms, store, program.grid)
        first, count = next(iter(names.items()), ("", 1))
        for k in range(count):
            run = Evaluation(program.terms, {first: np.arange(k, k + 1)}, data)
            _, (place, inside, value) = evaluated_together([run.aff(store.to.at), run.of(store.to.mask), run.of(store.value)])
            place, inside, value = np.broadcast_arrays(place, inside, value)
            data[store.to.buffer][place[inside]] = value[inside]


def _compare(
    graph: Graph, kernel: Kernel, text: KernelText, program: Program, store: Store, data: dict[str, Array], at: Any
) -> None:
    terms: Terms = program.terms
    cell: list[Aff] = at(terms, store, kernel, text)
    right = Operation(terms, graph, kernel, text).outputs(cell)[text.outs.index(store.to.buffer)]
    for chosen in _chosen(program):
        run = Evaluation(terms, {n: np.arange(k, k + 1) for n, k in chosen.items()}, data)
        parts = [run.aff(store.to.at), run.of(store.to.mask), run.of(store.value), run.of(right)]
        _, (place, inside, made, wanted) = evaluated_together(parts)
        place, inside, made, wanted = np.broadcast_arrays(place, inside, made, wanted)
        a, b = made[inside].astype(np.float64), wanted[inside].astype(np.float64)
        with np.errstate(all="ignore"):
            size = np.abs(b) + min(np.max(np.abs(b[np.isfinite(b)]), initial=0.0), GREAT)
            wrong = np.flatnonzero(~((np.abs(a - b) <= CLOSE * size) | (a == b) | np.isnan(b)))
        if len(wrong) and any(e.dtype in NARROW for e in block_of(graph, kernel).body):
            raise Unsupported("sums of short integers, which wrap around")
        if len(wrong):
            w = int(wrong[0])
            raise LawError(
                "kernel_value",
                f"'{store.to.buffer}' at {int(place[inside][w])} is not the operation's value",
                where=f"line {store.to.line}",
                why=f"{a[w]:.6g}, not {b[w]:.6g} (at {_said(chosen)})",
            )


def _said(chosen: Mapping[str, int]) -> str:
    return ", ".join(f"program {k}" for k in chosen.values())


def _chosen(program: Program) -> list[dict[str, int]]:
    """Programs that are compared."""
    names = dict(list(program.grid.items())[:1])
    rng = np.random.default_rng(1)
    out = {tuple(max(0, min(at(n), n - 1)) for n in names.values()) for at in EDGES}
    out |= {tuple(int(rng.integers(0, n)) for n in names.values()) for _ in range(PROGRAMS - len(out))}
    return [dict(zip(names, at, strict=True)) for at in sorted(out)]
