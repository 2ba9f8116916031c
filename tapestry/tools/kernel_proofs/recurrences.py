"""What a loop leaves in the variables that it carries, as reductions over its steps.

Known are sums, maxima and minima, and sums that refer to a centre which the loop carries too: where ``u`` becomes
``u * g(m) / g(m') + x / g(m')`` with the new centre m', ``u * g(m)`` is a plain sum of the x.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tapestry.ir.index import const
from tapestry.tools.kernel_proofs.lane_tiles import Tile, each
from tapestry.tools.kernel_proofs.term.term_arithmetic import arithmetic, extreme
from tapestry.tools.kernel_proofs.term.terms import REDUCING, Terms


def closed(
    terms: Terms,
    loop: str,
    step: tuple[str, int],
    runs: int,
    before: Mapping[str, Tile],
    starts: Mapping[str, Tile],
    after: Mapping[str, Tile],
) -> dict[str, Tile]:
    """Values after a loop of those variables that are reductions over it.

    Args:
        loop: what terms that depend on the loop's state are free in.
        step: the loop's variable and its size; the loop runs where ``runs`` holds.
        before, starts, after: before the loop, when a step begins (the carried terms), and when it ends.
    """
    out = dict[str, Tile]()
    for n in after:
        found = _plain(terms, loop, step, runs, before[n], starts[n], after[n])
        if found is not None:
            out[n] = found
    for n in after:
        if n not in out and (found := _centred(terms, loop, step, runs, n, before, starts, after, out)) is not None:
            out[n] = found
    return out


def _plain(terms: Terms, loop: str, step: tuple[str, int], runs: int, before: Tile, start: Tile, after: Tile) -> Tile | None:
    key = terms.keys[after.term]
    if loop not in terms.free[after.term] and runs == terms.true:  # nothing of what was before: the last step's
        return Tile(terms.substituted(after.term, {step[0]: const(step[1] - 1)}), after.shape)
    if key[0] == "add":
        rest = terms.add([(key[1], terms.const(1.0)), *((c, t) for t, c in key[2] if t != start.term)])
        if dict(key[2]).get(start.term) == 1.0 and loop not in terms.free[rest]:
            total = terms.reduce("add", (step,), terms.where(runs, rest, terms.const(0.0)))
            return each(terms, partial(arithmetic, terms, "add"), before, Tile(total, after.shape))
    if key[0] in ("max", "min") and start.term in key[1]:
        rest = terms.call(key[0], [t for t in key[1] if t != start.term])
        if loop not in terms.free[rest]:
            most = terms.reduce(key[0], (step,), terms.where(runs, rest, terms.const(REDUCING[key[0]])))
            return each(terms, partial(extreme, terms, str(key[0])), before, Tile(most, after.shape))
    return None


def _centred(
    terms: Terms,
    loop: str,
    step: tuple[str, int],
    runs: int,
    name: str,
    before: Mapping[str, Tile],
    starts: Mapping[str, Tile],
    after: Mapping[str, Tile],
    done: Mapping[str, Tile],
) -> Tile | None:
    """A sum that is moved to each new centre."""
    own, value = starts[name].term, after[name].term
    key = terms.keys[value]
    if key[0] != "add":
        return None
    parts: tuple[tuple[int, float], ...] = key[2]
    mine = [(t, c) for t, c in parts if terms.keys[t][0] == "mul" and (own, 1.0) in terms.keys[t][1]]
    if len(mine) != 1 or mine[0][1] != 1.0:
        return None
    factors: list[tuple[int, float]] = [f for f in terms.keys[mine[0][0]][1] if f != (own, 1.0)]
    centres = {starts[n].term: n for n in done}
    back, first, final = list[tuple[int, float]](), list[tuple[int, float]](), list[tuple[int, float]]()
    for t, e in factors:
        held: tuple[Any, ...] = terms.keys[t]
        if held[0] != "exp":
            return None
        n = centres.get(held[1])
        if n is None:
            continue  # of the new centre: looked at below
        new = terms.exp(after[n].term)
        if (new, -e) not in factors or starts[n].shape != starts[name].shape[: len(starts[n].shape)]:
            return None
        back.append((new, e))
        first.append((terms.exp(before[n].term), e))
        final.append((terms.exp(done[n].term), -e))
    if len(factors) != 2 * len(back):
        return None
    rest = terms.add([(key[1], terms.const(1.0)), *((c, t) for t, c in parts if t != mine[0][0])])
    plain = (
        terms.mul([(rest, 1.0), *back])
        if terms.keys[rest][0] != "add"
        else terms.add([(c, terms.mul([(t, 1.0), *back])) for t, c in terms.keys[rest][2]])
    )
    if loop in terms.free[plain]:
        return None
    total = terms.reduce("add", (step,), terms.where(runs, plain, terms.const(0.0)))
    start = terms.mul([(before[name].term, 1.0), *first])
    return Tile(terms.mul([(terms.add([(1.0, start), (1.0, total)]), 1.0), *final]), after[name].shape)
