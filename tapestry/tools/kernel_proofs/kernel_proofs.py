"""A kernel's source against its operation: writes, reads and values, each with the kind of evidence that was had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.expr import Const, Index, distinct
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import Aff, Mod, const, dims_of
from tapestry.ir.kernel import Kernel, shape, strides
from tapestry.ir.states import varies
from tapestry.ir.types import Array
from tapestry.tools.kernel_proofs import addresses
from tapestry.tools.kernel_proofs.addresses import Conditions
from tapestry.tools.kernel_proofs.kernel_text import Evaluation, KernelText, OutOfReach, block_of, evaluated_together
from tapestry.tools.kernel_proofs.program_reading import Program, Store
from tapestry.tools.kernel_proofs.term_matching import Matching, Operation, flattened, orders
from tapestry.tools.kernel_proofs.terms import Terms, Unsupported, kind_of
from tapestry.tools.kernel_proofs.triton_source import read_launch

# Kernels of two passes: what the first one leaves in scratch, as terms at any address of it.


Made = Mapping[str, Sequence[Store]]


def inlined(terms: Terms, t: int, made: Made, known: dict[int, int]) -> int:
    """A term with what was stored in the place of loads from scratch.

    Raises:
        Unsupported: an address has no inverse in closed form.
    """

    def of(x: int) -> int:
        if x not in known:
            key = terms.keys[x]
            known[x] = terms.rebuilt(x, of)
            if key[0] == "load" and key[1] in made:
                known[x] = terms.where(key[3], of(stored(terms, made[key[1]], key[2])), key[4])
        return known[x]

    return of(t)


def stored(terms: Terms, stores: Sequence[Store], at: Aff) -> int:
    """The value that was stored at an address."""
    if len(stores) != 1:
        raise Unsupported("scratch that two statements write")
    (store,) = stores
    env, rest = _digits_of_store(terms, store), at
    to = terms.placed(store.to.at, env)
    env_of, rest = dict[str, Aff](), at - to.const
    parts = sorted(to.terms, key=lambda x: -x[1])
    if any(not isinstance(a, str) or a[0] == "#" or c < 0 for a, c in parts):
        raise Unsupported("scratch is written at an address without an inverse")
    below = sum(c * (terms.sizes[str(a)] - 1) for a, c in parts)
    for atom, c in parts:
        below -= c * (terms.sizes[str(atom)] - 1)
        if below >= c:
            raise Unsupported("scratch is written at an address without an inverse")
        env_of[str(atom)] = terms.divided(rest, c)
        rest = terms.remainder(rest, c) if c > 1 else const(0)
    value = terms.substituted(terms.substituted(store.value, env), env_of)
    if terms.free[store.value] - env.keys() - env_of.keys() - set(terms.sizes):
        raise Unsupported("scratch holds what an address does not say")
    return value


def _digits_of_store(terms: Terms, store: Store) -> dict[str, Aff]:
    """Variables that are taken apart by division, as sums of variables of their own."""
    cuts: dict[str, set[int]] = {}
    _collect(store.to.at, cuts)
    out = dict[str, Aff]()
    for name, divs in cuts.items():
        size, ordered = terms.sizes[name], sorted(divs)
        chain = [1, *ordered, size]
        if any(b % a for a, b in pairwise(chain)):
            raise Unsupported("a grid that its divisions do not divide")
        total = const(0)
        for a, b in pairwise(chain):
            total = total + terms.variable(terms.fresh(), b // a) * a
        out[name] = total
    return out


def _collect(e: Aff, cuts: dict[str, set[int]]) -> None:
    for atom, _ in e.terms:
        if isinstance(atom, str):
            continue
        if atom.arg.is_dim:
            cuts.setdefault(str(atom.arg), set()).add(atom.div)
        elif len(dims_of(atom.arg)) == 1 and len(atom.arg.terms) == 1 and isinstance(atom.arg.terms[0][0], Mod):
            _collect(atom.arg, cuts)
            (name,) = dims_of(atom.arg)
            cuts.setdefault(name, set()).add(atom.div)
        else:
            raise Unsupported("a division of more than one variable")


# A source interpreted on random data in float64, and its operation at the same cells: for what has no common normal form.
#
# Every cell that the chosen programs write is compared. Buffers of two passes are filled by all programs of the first.


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
) -> None:  # fmt: skip
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
                "kernel_value", f"'{store.to.buffer}' at {int(place[inside][w])} is not the operation's value",
                where=f"line {store.to.line}", why=f"{a[w]:.6g}, not {b[w]:.6g} (at {_said(chosen)})",
            )  # fmt: skip


def _said(chosen: Mapping[str, int]) -> str:
    return ", ".join(f"program {k}" for k in chosen.values())


def _chosen(program: Program) -> list[dict[str, int]]:
    """Programs that are compared."""
    names = dict(list(program.grid.items())[:1])
    rng = np.random.default_rng(1)
    out = {tuple(max(0, min(at(n), n - 1)) for n in names.values()) for at in EDGES}
    out |= {tuple(int(rng.integers(0, n)) for n in names.values()) for _ in range(PROGRAMS - len(out))}
    return [dict(zip(names, at, strict=True)) for at in sorted(out)]


NO_FORM = "no common normal form"
Along = tuple[tuple[bool, ...], ...]
FORM, TRIAL, COMPARED = "normal form", "exact interpretation of the source at sampled programs", "compared only"


@dataclass(frozen=True, slots=True)
class Evidence:
    """How a kernel was shown to be its operation's: ``addresses`` and ``value`` are kinds; ``why`` says what is missing."""

    addresses: str
    value: str
    why: str = ""


def prove(graph: Graph, kernel: Kernel, text: KernelText) -> Evidence:
    """Prove a kernel.

    Raises:
        LawError: it is not its operation: which law, at which line, which cell.
    """
    try:
        return _prove(graph, kernel, text)
    except LawError as e:
        raise LawError(e.law, e.what.partition(": ")[2] or e.what, where=f"{text.name}, {e.where}", why=e.why) from None
    except Unsupported as e:
        return Evidence(COMPARED, COMPARED, str(e))
    except (RecursionError, KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        return Evidence(COMPARED, COMPARED, f"the source does not read: {type(e).__name__}: {e}")  # a text may say anything


def _prove(graph: Graph, kernel: Kernel, text: KernelText) -> Evidence:
    if not any(prod(shape(b)) for b in kernel.outs):
        return Evidence("nothing is written", FORM)
    programs, why = _programs(text)
    ask, op = Conditions(programs[-1].terms), block_of(graph, kernel)
    where = _check_addresses(ask, programs, kernel, text, _along(kernel, op))
    first, *others = orders(kernel, op)
    why = why or _mismatch(graph, kernel, text, programs, ask, [first])
    if not why:
        return Evidence(where, FORM)
    formless = why.endswith(NO_FORM)
    try:
        compare_programs(graph, kernel, text, programs, cell)  # before other orders are tried: a wrong kernel has none
        shown = TRIAL
    except Unsupported as e:
        shown, why = COMPARED, f"{why}; {e}"
    if others and formless and not _mismatch(graph, kernel, text, programs, ask, others):
        return Evidence(where, FORM)
    return Evidence(where, shown, why)


def _mismatch(
    graph: Graph, kernel: Kernel, text: KernelText, programs: list[Program], ask: Conditions, ways: list[tuple[int, ...]]
) -> str:  # fmt: skip
    """Why a kernel's values and its operation's have no common normal form; ``""`` where they have.

    They are compared at each store's cell, with the reduced dimensions in one of some orders.
    """
    *before, program = programs
    terms, made = program.terms, dict[str, list[Store]]()
    sizes = _reduction_steps(kernel, block_of(graph, kernel))
    try:
        for store in (s for p in before for s in p.stores):
            made.setdefault(store.to.buffer, []).append(replace(store, value=inlined(terms, store.value, made, {})))
        for store in (_narrowed(terms, s) for s in program.stores):
            value = flattened(terms, inlined(terms, store.value, made, {}) if made else store.value, sizes, {})
            at, k = cell(terms, store, kernel, text), text.outs.index(store.to.buffer)
            rights = (Operation(terms, graph, kernel, text, order).outputs(at)[k] for order in ways)
            if not any(Matching(terms, ask).same(value, right, store.to.mask) for right in rights):
                return f"line {store.to.line}: {NO_FORM}"
    except Unsupported as e:
        return str(e)
    return ""


def _programs(text: KernelText) -> tuple[list[Program], str]:
    """What the launches do, and why their loops had to be read step by step (``""`` where they need not)."""
    why = ""
    for unrolled in (False, True):
        terms = Terms()
        try:
            return [read_launch(terms, text.source, launch, text.buffers, unrolled) for launch in text.launches], why
        except Unsupported as e:
            why = why or str(e)
    raise Unsupported(why)


def _along(kernel: Kernel, op: Block) -> Along:
    """On which axes each output's buffer has the cells of the block: states have one cell where they do not vary."""
    return varies(op) if kernel.mode == "partial" else ((True,) * len(op.dims),) * len(kernel.outs)


def _check_addresses(ask: Conditions, programs: list[Program], kernel: Kernel, text: KernelText, along: Along) -> str:
    """Check what is written and read; returns by what it was shown."""
    terms, rank, filled = ask.terms, len(kernel.outs[0]), dict[str, Array]()
    for k, program in enumerate(programs):
        last = k == len(programs) - 1
        own = set(text.outs) if last else {n for n, b in text.buffers.items() if b.scratch}
        odd = {s.to.buffer for s in program.stores} - own
        if odd:
            raise LawError("kernel_writes", f"'{min(odd)}' is written, which is no output", where="its stores")
        for name in sorted({s.to.buffer for s in program.stores} | (own if last else set())):
            at = text.outs.index(name) if last else 0
            wanted = addresses.cells_of(kernel.block[:rank], kernel.outs[at], along[at]) if last else None
            filled[name] = addresses.writes(terms, program.stores, program.grid, name, text.buffers[name].size, wanted)
        addresses.reads(terms, ask, program.loads, text.buffers)
        addresses.reads_of_scratch(terms, program, text.buffers, filled)
    return "isl" if ask.asked else "intervals"


def _narrowed(terms: Terms, store: Store) -> Store:
    """A store whose variables run over those values alone that its mask leaves."""
    env = dict[str, Aff]()
    for c in terms.conjuncts(store.to.mask):
        aff = terms.aff_of(c, "ge")
        name = aff.terms[0][0] if len(aff.terms) == 1 and aff.terms[0][1] == -1 else None
        if isinstance(name, str) and name[0] != "#" and aff.const + 1 < terms.sizes[name]:
            env[name] = terms.variable(terms.fresh(), aff.const + 1)
    if not env:
        return store
    at = terms.aff(terms.substituted(terms.int(store.to.at), env))
    to = replace(store.to, at=at, mask=terms.substituted(store.to.mask, env))
    return Store(to, terms.substituted(store.value, env))


def cell(terms: Terms, store: Store, kernel: Kernel, text: KernelText) -> list[Aff]:
    """The cell of the tensor that a store writes, in coordinates of the whole tensor, from its address."""
    box = kernel.outs[text.outs.index(store.to.buffer)]
    out, size = list[Aff](), prod(shape(box))
    for k, ((lo, hi), s) in enumerate(zip(box, strides(box), strict=True)):
        part = terms.divided(store.to.at, s)
        if hi - lo == 1:  # of a state that does not vary there, any cell of the block
            lo, part = kernel.block[k][0], const(0)
        elif s * (hi - lo) < size:
            part = terms.remainder(part, hi - lo)
        out.append(part + lo)
    return out


def _reduction_steps(kernel: Kernel, op: Block) -> list[int]:
    extents = {d.name: hi - lo for d, (lo, hi) in zip(op.space, kernel.block, strict=True)}
    steps = [prod(extents[d.name] for d in dims) for dims in (op.reduce, *(s.dims for s in op.inner))]
    return [n for n in steps if n > 1]
