"""What every registered rule is held to, for free: `check_rule`.

Laws before and after, equal dependences (law 5), equal values on random data, text that round-trips, replay from text.
`documented` reads the example that a rule's docstring shows, so that the tests run exactly what a reader sees.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tapestry.errors import LawError, TapestryError
from tapestry.ir import laws
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.ir.types import FLOATS, Array, numpy_dtype
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import Move, Refusal, Rule, parse_move
from tapestry.verify import interp
from tapestry.verify.rewriting import footprints
from tapestry.verify.rewriting.trials import Trial

TOLERANCE = 1e-9  # of float64, relative to the greatest magnitude: rules may reassociate, not approximate


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCase:
    """A graph in IR text to try a rule on, with the moves to try; without any, all that the rule finds."""

    before: str
    moves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a check looked at: the moves applied, the refusals met, and why dependences of some output were not compared."""

    moves: tuple[Move, ...]
    refusals: tuple[Refusal, ...]
    skipped: Mapping[str, str]


def check_rule(rule: Rule, case: RuleCase, rng: np.random.Generator) -> Report:
    """Hold a rule to the laws on one case.

    Raises:
        LawError: naming what is broken, with the move and a witness.
        TapestryError: the rule finds nothing in the case, or a move is not legal there.
    """
    before = parse(case.before)
    laws.check(before)
    found = list(rule.find(before))
    if list(rule.find(before)) != found:
        raise LawError("replay", "find() gives other moves the second time", where=rule.name)
    moves = [parse_move(m) for m in case.moves] or [m for m in found if isinstance(m, Move)]
    if not moves:
        raise TapestryError("the rule finds no move in its case", where=rule.name, why="; ".join(map(str, found)))
    feeds = random_feeds(before, rng)
    skipped: dict[str, str] = {}
    for move in moves:
        after = rule.apply(before, move)
        _replays(rule, before, move, after)
        skipped |= same(before, after, feeds, str(move))
    if rule.phase == "simplify":
        skipped |= same(before, rule.sweep(before), feeds, f"{rule.name}, swept")
    return Report(moves=tuple(moves), refusals=tuple(r for r in found if isinstance(r, Refusal)), skipped=skipped)


def same(before: Graph, after: Graph, feeds: Mapping[str, Array], what: str) -> dict[str, str]:
    """Whether two graphs say the same; returns the outputs whose dependences could not be compared, with the reason.

    Raises:
        LawError: naming what differs.
    """
    laws.check(after)
    if not _equal(parse(to_text(after)), after):
        raise LawError("text", "the graph does not read back from its own text", where=what)
    skipped = same_dependences(before, after, what)
    same_values(before, after, feeds, what)
    return skipped


def same_dependences(before: Graph, after: Graph, what: str) -> dict[str, str]:
    """Law 5: each cell of every output depends on exactly the same cells of every input, as isl relations. Reads that differ
    are of values that a selection does not take.

    Dependences through an opaque operation are not affine: outputs behind one are skipped, and returned with the reason.
    """
    skipped: dict[str, str] = {}
    if (before.inputs, before.outputs) != (after.inputs, after.outputs):
        raise LawError("access_unchanged", "the graph has other inputs or outputs than before", where=what)
    for out in before.outputs:
        if before.tensors[out] != after.tensors[out]:
            why = f"{before.tensors[out]} became {after.tensors[out]}"
            raise LawError("access_unchanged", f"'{out}' is another tensor than before", where=what, why=why)
        opaque = _opaque_behind(before, out) or _opaque_behind(after, out)
        if opaque:
            skipped[out] = f"'{out}' depends on the opaque operation '{opaque}'"
            continue
        one, other = replace(before, outputs=(out,)), replace(after, outputs=(out,))
        found = footprints.compare(one, other)
        if found is None:
            skipped[out] = f"isl takes too long for '{out}'"
        for d in found or ():
            try:
                Trial(one, other, exact=False).explain(d)
            except LawError as e:
                lost = f"a dependence of '{out}' on '{d.source}' was {d.verb}"
                raise LawError("access_unchanged", lost, where=what, why=e.why) from e
    return skipped


def _opaque_behind(graph: Graph, output: str) -> str:
    needed = {output}
    for op in reversed(graph.ops):
        if needed & set(op.outs):
            if not isinstance(op, Block):
                return op.outs[0]
            needed |= set(op.inputs)
    return ""


def same_values(before: Graph, after: Graph, feeds: Mapping[str, Array], what: str) -> None:
    """Whether two graphs give the same outputs: floats computed in float64 to `TOLERANCE`, the rest exactly; no NaN passes."""
    used = {n: a for n, a in feeds.items() if n in after.tensors}
    old, new = interp.run(before, feeds, wide=True), interp.run(after, used, wide=True)
    for name, want in old.items():
        got = new[name]
        if want.shape != got.shape or want.dtype != got.dtype:
            raise LawError("same_values", f"'{name}' is {got.dtype}{got.shape}, was {want.dtype}{want.shape}", where=what)
        wrong = _wrong(want, got)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise LawError("same_values", f"'{name}' differs", where=what, why=f"at {at}: {want[at]} became {got[at]}")


def _wrong(want: Array, got: Array) -> Array:
    if not np.issubdtype(want.dtype, np.floating):
        return np.asarray(want != got)
    finite = np.isfinite(want)
    scale = max(1.0, float(np.max(np.abs(want), where=finite, initial=0.0)))
    with np.errstate(invalid="ignore"):
        close = np.abs(want - got) <= TOLERANCE * scale
    return np.asarray(~(close | (want == got)))


def random_feeds(graph: Graph, rng: np.random.Generator) -> dict[str, Array]:
    """Random values for every input and weight: floats normal, integers small and of both signs, booleans even."""
    out: dict[str, Array] = {}
    for name in (*graph.inputs, *graph.weights):
        t = graph.tensors[name]
        dtype = numpy_dtype(t.dtype)
        if t.dtype in FLOATS:
            out[name] = rng.standard_normal(t.shape).astype(dtype)
        elif t.dtype == "bool":
            out[name] = rng.random(t.shape) < 0.5
        else:
            out[name] = rng.integers(0 if t.dtype.startswith("u") else -4, 5, t.shape).astype(dtype)
    return out


def _replays(rule: Rule, before: Graph, move: Move, after: Graph) -> None:
    if move.rule != rule.name or parse_move(str(move)) != move:
        raise LawError("replay", f"'{move}' does not read back as the move of '{rule.name}'", where=rule.name)
    again = apply_moves(before, [parse_move(str(move))])
    if not _equal(again, after):
        raise LawError("replay", "the move gives another graph the second time", where=str(move))


def _equal(a: Graph, b: Graph) -> bool:
    """Structural equality, a NaN literal being equal to itself (and -0.0 not to 0.0)."""
    return repr(a.ops) == repr(b.ops) and replace(a, ops=()) == replace(b, ops=())


def documented(rule: Rule) -> tuple[str, str, str]:
    """The example of a rule's docstring: the graph before, the move, the graph after, as text.

    Raises:
        TapestryError: a section is missing.
    """
    sections: dict[str, str] = {}
    current = ""
    for line in rule.doc.splitlines():
        head = re.match(r"(before|move|after|legal when):\s*(.*)", line)
        if head:
            current = head.group(1)
            sections[current] = head.group(2)
        elif current and line and not line.startswith(" "):
            current = ""
        elif current:
            sections[current] += f"\n{line}"
    missing = [s for s in ("before", "move", "after", "legal when") if not sections.get(s, "").strip()]
    if missing:
        raise TapestryError(f"its docstring lacks '{missing[0]}:'", where=rule.name)
    before, after = (textwrap.dedent(sections[s]).strip() + "\n" for s in ("before", "after"))
    return before, sections["move"].strip(), after
