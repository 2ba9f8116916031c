"""A kernel's source against its operation: writes, reads and values, each with the kind of evidence that was had."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tapestry.errors import LawError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import Aff, const
from tapestry.ir.kernel import Kernel, shape, strides
from tapestry.ir.recognition.state import varies
from tapestry.ir.types import Array
from tapestry.tools.kernel_proofs import addresses
from tapestry.tools.kernel_proofs.addresses import Conditions
from tapestry.tools.kernel_proofs.kernel_text import KernelText, block_of
from tapestry.tools.kernel_proofs.operation_terms import Operation, orders
from tapestry.tools.kernel_proofs.program_reading import Program, Store
from tapestry.tools.kernel_proofs.scratch_passes import inlined
from tapestry.tools.kernel_proofs.source_trials import compare_programs
from tapestry.tools.kernel_proofs.term.term_matching import Matching, flattened
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported
from tapestry.tools.kernel_proofs.triton_source import read_launch

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
) -> str:
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
