"""Proofs that a rewrite says the same before and after, at the place where it was applied; each says by what it was shown.

The types of what others read are compared, then terms (`normal_form`); what has no common term is held to equal dependences
(`footprints`) and to equal values at its cells (`trials`). Equal regions are proved once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tapestry.errors import LawError, some
from tapestry.ir import laws
from tapestry.ir.graph import Graph, Opaque, Rewrite
from tapestry.verify.rewriting import footprints, normal_form
from tapestry.verify.rewriting.cells import TooMuch
from tapestry.verify.rewriting.regions import Change, without_names
from tapestry.verify.rewriting.trials import Trial

FORM, REAL = "normal form", "normal form in real arithmetic"
ISL, INSTANCES, SAMPLED = "isl", "exact arithmetic on instances", "sampled cells"
UNREAD, UNPROVED = "unused", "not proved"
FINITE = "the assumption that values are finite"
WEAKER = {  # than equal bits
    REAL: "proved equal in real arithmetic", INSTANCES: "compared at every cell", SAMPLED: "compared on sampled cells",
    FINITE: "equal where all values are finite", UNREAD: UNREAD, UNPROVED: "not proved (-v lists them)",
}  # fmt: skip
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evidence:
    """How a result was shown to be the same; ``notes`` say what may differ and does."""

    kinds: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " and ".join(self.kinds)


_shown: dict[tuple[object, bool], Evidence] = {}


def prove(before: Graph, after: Graph, exact: bool = False) -> Evidence:
    """The one output of two graphs over the same inputs is the same; the evidence is kept for equal pairs.

    Raises:
        LawError: it is not, with the cell and both values, or both dependences.
    """
    old, new = before.tensors[before.outputs[0]], after.tensors[after.outputs[0]]
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        why = f"{old.dtype}{list(old.shape)} became {new.dtype}{list(new.shape)}"
        raise LawError("access_unchanged", f"'{old.name}' is another tensor than before", why=why)
    key = without_names(before, after), exact
    if key not in _shown:
        _shown[key] = _prove(before, after, exact)
    return _shown[key]


def _prove(before: Graph, after: Graph, exact: bool) -> Evidence:
    if normal_form.equal(before, after, real=False):
        return Evidence((FORM,))
    laws.check(after)
    kinds = [REAL] if normal_form.equal(before, after, real=True) else []
    trial = Trial(before, after, exact)
    if any(isinstance(op, Opaque) for op in (*before.ops, *after.ops)):
        return Evidence((UNPROVED,), ("an opaque operation is in the way",))
    differing = footprints.compare(before, after)
    try:
        for d in differing or ():
            trial.explain(d)
        trial.run()
    except TooMuch:
        return Evidence((REAL,)) if kinds else Evidence((UNPROVED,), ("a cell depends on too many others to be computed",))
    kinds += [ISL] if differing == [] else []
    return Evidence((*kinds, INSTANCES if trial.complete else SAMPLED), tuple(trial.notes))


def prove_step(step: Rewrite) -> Counter[str]:
    """Every result of a rewrite that somebody reads is the same; how many were shown by what.

    Raises:
        LawError: one is not; names the move, the operation, the cell and what it was and became.
    """
    return prove_change(Change.of(step))


def prove_change(change: Change) -> Counter[str]:
    """`prove_step`, of a step that is taken apart already."""
    if change.step.by == footprints.ASSUMED:
        if not footprints.follows(change.step.before, change.step.after):
            raise LawError("same_values", "more was changed than tests for NaN and infinities", where=change.step.by)
        return Counter({FINITE: len(change.needed & change.come.keys())})
    lost = next((t for t in sorted(change.needed) if t not in change.come), None)
    if lost is not None:
        raise LawError("ssa", f"'{lost}' is read and no longer written", where=_where(change, lost))
    was, now = change.step.before.tensors, change.step.after.tensors
    odd = next((t for t in change.kept if t in now and now[t] is not was[t] and now[t] != was[t]), None)
    if odd is not None:
        raise LawError(
            "access_unchanged", f"'{odd}' is another tensor than before", where=change.step.by, why=f"{was[odd]}, {now[odd]}"
        )
    out, cuts, broken = Counter[str](), set[str](), dict[str, LawError]()
    for t in (t for t in change.come if t in change.gone):
        try:
            found = _result(change, t, cuts)
        except LawError as e:
            if t in change.needed:
                broken[t] = _placed(e, _where(change, t))
                cuts.add(t)  # what reads it may be right
            continue
        if UNPROVED not in found.kinds:
            cuts.add(t)
        if t in change.needed:
            out[str(found)] += 1
            if UNPROVED in found.kinds:
                log.info(f"not proved: '{t}' of {change.step.by}: {'; '.join(found.notes)}")
    for first in broken.values():
        first.rewrites = frozenset(f"{change.step.by.partition('@')[0]}@{t}" for t in broken)
        raise first
    return out if change.needed else Counter({UNREAD: 1})


def prove_steps(steps: Iterable[Rewrite]) -> Counter[str]:
    """`prove_step` of all: how many results were shown by what.

    Raises:
        LawError: as `prove_step`.
    """
    out = Counter[str]()
    for step in steps:
        out += prove_step(step)
    return out


def _result(change: Change, t: str, cuts: Collection[str]) -> Evidence:
    a, b, exact = change.gone[t], change.come[t], change.step.exact
    if not (isinstance(a, Opaque) and isinstance(b, Opaque)):
        return _of_cones(change.cones(t, t, cuts), exact)
    same = (a.kind, a.node, a.opsets, a.outs.index(t), len(a.ins)) == (b.kind, b.node, b.opsets, b.outs.index(t), len(b.ins))
    if not same:
        return Evidence((UNPROVED,), ("an opaque operation became another one",))
    kinds = dict.fromkeys((FORM,))
    for x, y in zip(a.ins, b.ins, strict=True):
        if bool(x) != bool(y):
            raise LawError("same_values", f"an input of the opaque '{t}' is missing")
        if x != y or (x in change.gone and x not in cuts):
            kinds |= dict.fromkeys(_of_cones(change.cones(x, y, cuts), exact).kinds)
    return Evidence((UNPROVED,) if UNPROVED in kinds else tuple(kinds))


def _of_cones(cones: Iterable[tuple[Graph, Graph]], exact: bool) -> Evidence:
    """What the first pair shows that says the same; where none is shown to, what the first was found to differ in."""
    broken: LawError | None = None
    for before, after in cones:
        try:
            found = prove(before, after, exact)
        except LawError as e:
            broken = broken or e
        else:
            if broken is None or UNPROVED not in found.kinds:
                return found
    if broken is not None:
        raise broken
    return Evidence((UNPROVED,), ("what they read is the same too many operations back, if it is",))


def _where(change: Change, t: str) -> str:
    return f"{change.step.by}, {laws.where(change.gone[t])}"


def _placed(e: LawError, where: str) -> LawError:
    out = LawError(e.law, "", where=f"{where}: {e.where}" if e.where and e.where not in where else where, why=e.why)
    out.what = e.what
    return out


def whole(before: Graph, after: Graph, what: str, exact: bool = False) -> dict[str, Evidence]:
    """Every output of two whole graphs is the same: the evidence by output.

    Raises:
        LawError: as `prove_step`.
    """
    if (before.inputs, before.outputs) != (after.inputs, after.outputs):
        raise LawError("access_unchanged", "the graph has other inputs or outputs than before", where=what)
    gone, come = ({t: op for op in g.ops for t in op.outs} for g in (before, after))
    change = Change(Rewrite(what, before, after, exact), gone, come, {}, frozenset(before.outputs))
    out = dict[str, Evidence]()
    for t in before.outputs:
        try:
            out[t] = _result(change, t, ()) if t in gone else Evidence((FORM,))
        except LawError as e:
            raise _placed(e, what) from None
    return out


def shown_text(counts: Mapping[str, int]) -> str:
    """How much was shown of how many results: ``12 results checked: 11 proved equal, 1 compared on sampled cells``."""
    said = Counter[str]()
    for how, n in counts.items():
        said[" and ".join(text for kind, text in WEAKER.items() if kind in how) or "proved equal"] += n
    return f"{some(said.total(), 'result')} checked: {', '.join(f'{n:,} {what}' for what, n in said.most_common()) or 'none'}"
