"""A kernel's source against its operation: writes, reads and values, each with the kind of evidence that was had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import Aff, const
from tapestry.ir.kernel import Kernel, shape
from tapestry.ir.state import varies
from tapestry.verify.kernels import addresses, scratch_passes, source_trials
from tapestry.verify.kernels.integer_conditions import Conditions
from tapestry.verify.kernels.kernel_text import KernelText
from tapestry.verify.kernels.operation_terms import Operation, orders
from tapestry.verify.kernels.reading import c_source, triton_source
from tapestry.verify.kernels.reading.program_reading import Program, Store
from tapestry.verify.kernels.term_matching import Matching, flattened
from tapestry.verify.kernels.terms import Terms, Unsupported

NO_FORM = "no common normal form"
Array = np.ndarray[Any, Any]
Along = tuple[tuple[bool, ...], ...]
FORM, TRIAL, COMPARED = "normal form", "exact interpretation of the source at sampled programs", "compared only"


@dataclass(frozen=True, slots=True)
class Evidence:
    """How a kernel was shown to be its operation's: ``addresses`` and ``value`` are kinds; ``why`` says what is missing."""

    addresses: str
    value: str
    why: str = ""


def weakest(shown: Sequence[Evidence]) -> Evidence | None:
    """What several texts of one kernel were all shown by at least; ``None`` of none."""
    order = (COMPARED, TRIAL, FORM)
    return min(shown, key=lambda e: order.index(e.value), default=None)


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
    ask = Conditions(programs[-1].terms)
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    where = _check_addresses(ask, programs, kernel, text, _along(kernel, op))
    first, *others = orders(kernel, op)
    why = why or _mismatch(graph, kernel, text, programs, ask, [first])
    if not why:
        return Evidence(where, FORM)
    formless = why.endswith(NO_FORM)
    try:
        source_trials.run(graph, kernel, text, programs, cell)  # before other orders are tried: a wrong kernel has none
        shown = TRIAL
    except Unsupported as e:
        shown, why = COMPARED, f"{why}; {e}"
    if others and formless and not _mismatch(graph, kernel, text, programs, ask, others):
        return Evidence(where, FORM)
    return Evidence(where, shown, why)


def _mismatch(
    graph: Graph, kernel: Kernel, text: KernelText, programs: list[Program], ask: Conditions, ways: list[tuple[int, ...]]
) -> str:  # fmt: skip
    """Why a kernel's values and its operation's have no common normal form; ``""`` where they have."""
    try:
        _match(graph, kernel, text, programs, ask, ways)
    except Unsupported as e:
        return str(e)
    return ""


def _programs(text: KernelText) -> tuple[list[Program], str]:
    """What the launches do, and why their loops had to be read step by step (``""`` where they need not)."""
    why, read = "", c_source.read if text.language == "c" else triton_source.read
    for unrolled in (False, True):
        terms = Terms()
        try:
            return [read(terms, text.source, launch, text.buffers, unrolled) for launch in text.launches], why
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
            buffer = text.buffers[name]
            wanted = addresses.cells_of(kernel.block[:rank], kernel.outs[at], along[at], buffer) if last else None
            filled[name] = addresses.writes(terms, program.stores, program.grid, name, buffer.size, wanted)
        addresses.reads(terms, ask, program.loads, text.buffers)
        addresses.reads_of_scratch(terms, program, text.buffers, filled)
    return "isl" if ask.asked else "intervals"


def _match(
    graph: Graph, kernel: Kernel, text: KernelText, programs: list[Program], ask: Conditions, ways: list[tuple[int, ...]]
) -> None:  # fmt: skip
    """Compare the value of each store with the operation's at its cell, its reduced dimensions in one of some orders.

    Raises:
        Unsupported: they have no common form.
    """
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    *before, program = programs
    terms = program.terms
    made = dict[str, list[Store]]()
    for p in before:
        for store in p.stores:
            made.setdefault(store.to.buffer, []).append(
                replace(store, value=scratch_passes.inlined(terms, store.value, made, {}))
            )
    sizes = _sizes(kernel, op)
    for store in program.stores:
        store = _narrowed(terms, store)
        value = flattened(terms, scratch_passes.inlined(terms, store.value, made, {}) if made else store.value, sizes, {})
        at, k = cell(terms, store, kernel, text), text.outs.index(store.to.buffer)
        for order in ways:
            right = Operation(terms, graph, kernel, text, order).values(at)[k]
            if Matching(terms, ask).same(value, right, store.to.mask):
                break
        else:
            raise Unsupported(f"line {store.to.line}: {NO_FORM}")


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
    for k, ((lo, hi), s) in enumerate(zip(box, text.buffers[store.to.buffer].steps(box), strict=True)):
        part = terms.divided(store.to.at, s)
        if hi - lo == 1:  # of a state that does not vary there, any cell of the block
            lo, part = kernel.block[k][0], const(0)
        elif s * (hi - lo) < size:
            part = terms.remainder(part, hi - lo)
        out.append(part + lo)
    return out


def _sizes(kernel: Kernel, op: Block) -> list[int]:
    """How many steps the operation's reductions have."""
    extents = [hi - lo for lo, hi in kernel.block]
    out, at = list[int](), len(op.dims)
    for dims in (op.reduce, *(s.dims for s in op.inner)):
        out.append(prod(extents[at : at + len(dims)]))
        at += len(dims)
    return [n for n in out if n > 1]
