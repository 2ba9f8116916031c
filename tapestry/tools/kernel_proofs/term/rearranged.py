"""A reduction in another order: which step of the operation each step of a source is, and that it is each of them once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tapestry.ir.index import Aff, Floor, Mod, const, dims_of
from tapestry.tools.kernel_proofs.addresses import Conditions
from tapestry.tools.kernel_proofs.term.evaluation import Evaluation, evaluated_together
from tapestry.tools.kernel_proofs.term.terms import REDUCING, Terms

MOST_STEPS_ONE_BY_ONE = 1 << 20  # steps that are looked at one by one


def rearranged_steps(terms: Terms, a: int, b: int, names: tuple[str, ...], step: str) -> Iterator[tuple[Aff, int]]:
    """Candidates for the ``step`` of ``b`` that a step of ``a`` (of variables ``names``) is, and where ``a`` has steps.

    They are read off addresses of one buffer in both bodies, and hold each step of ``b`` exactly once.
    """
    size = terms.sizes[step]
    if math.prod(terms.sizes[n] for n in names) > MOST_STEPS_ONE_BY_ONE:
        return
    real = terms.all(c for c in conditions(terms, a) if terms.free[c] and terms.free[c] <= set(names))
    seen = set[Aff]()
    for buffer, at in addresses(terms, b):
        digits = _digits(terms, at, step)
        for other, mine in addresses(terms, a):
            part = _variable_part(mine, names) if digits and other == buffer else None
            if part is None or part in seen:
                continue
            seen.add(part)
            low = terms.reach(part)[0]
            at_step = const(0)
            for by, weight, count in digits:
                at_step = at_step + terms.remainder(terms.divided(part - low, by), count) * weight
            run = Evaluation(terms, {}, {})
            own, (value, there) = evaluated_together([run.aff(at_step), run.of(real)])
            value, there = np.broadcast_arrays(value, there)
            hit = value[there]
            if set(own) == set(names) and len(hit) == size and np.array_equal(np.sort(hit), np.arange(size)):
                yield at_step, real


def _digits(terms: Terms, at: Aff, step: str) -> list[tuple[int, int, int]]:
    """How an address says its step: coefficients, what each digit counts in the step, and how many values it has."""
    out = list[tuple[int, int, int]]()
    for atom, c in at.terms:
        if step not in ({atom} if isinstance(atom, str) else dims_of(atom.arg)):
            continue
        weight, last = 1, atom
        while not isinstance(atom, str):
            inner = atom.arg
            if len(inner.terms) != 1 or inner.const or inner.terms[0][1] != 1:
                return []
            weight *= atom.div if isinstance(atom, Floor) else 1
            atom = inner.terms[0][0]
        count = last.div if isinstance(last, Mod) else -(-terms.sizes[step] // weight)
        if c <= 0:
            return []
        out.append((c, weight, count))
    return out


def _variable_part(at: Aff, names: tuple[str, ...]) -> Aff | None:
    """What of an address depends on variables; ``None`` where it depends on others with them."""
    own = Aff()
    for atom, c in at.terms:
        inside = {atom} if isinstance(atom, str) else dims_of(atom.arg)
        if inside & set(names):
            if not inside <= set(names):
                return None
            own = own + Aff(((atom, c),))
    return own


def addresses(terms: Terms, t: int) -> list[tuple[str, Aff]]:
    """Buffers and addresses of the loads of a body."""
    return [(key[1], key[2]) for key in _within(terms, t) if key[0] == "load"]


def conditions(terms: Terms, t: int) -> set[int]:
    """Conditions of the loads and choices of a body, each by itself."""
    found = set[int]()
    for key in _within(terms, t):
        c = key[3] if key[0] == "load" else key[1] if key[0] == "where" else terms.true
        found |= set(terms.conjuncts(c))
    return found - {terms.true}


def _within(terms: Terms, t: int) -> list[tuple[Any, ...]]:
    """The terms that a body is made of."""
    seen, stack, out = set[int](), [t], list[tuple[Any, ...]]()
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            out.append(terms.keys[x])
            stack += terms.parts(x)
    return out


def nothing(terms: Terms, ask: Conditions, t: int, fn: str, given: int) -> bool:
    """Whether a body is the identity of its reduction wherever a condition holds."""
    key = terms.keys[t]
    if terms.number(t) is not None:
        return terms.number(t) == REDUCING[fn]
    match key[0]:
        case "load":
            return ask.never(given, key[3]) and nothing(terms, ask, key[4], fn, given)
        case "where":
            return (ask.never(given, key[1]) or nothing(terms, ask, key[2], fn, given)) and (
                ask.follows(given, key[1]) or nothing(terms, ask, key[3], fn, given)
            )
        case "mul" if fn == "add":
            return any(nothing(terms, ask, x, fn, given) for x, _ in key[1]) and all(
                known(terms, ask, x, given) for x, _ in key[1]
            )
        case _:
            return False


def known(terms: Terms, ask: Conditions, t: int, given: int) -> bool:
    """Whether a value is a number wherever a condition holds: no lane that a load left as it was."""
    key = terms.keys[t]
    if t == terms.unknown:
        return False
    if key[0] == "load" and key[4] == terms.unknown:
        return ask.follows(given, key[3])
    if key[0] == "where":
        return (ask.never(given, key[1]) or known(terms, ask, key[2], given)) and (
            ask.follows(given, key[1]) or known(terms, ask, key[3], given)
        )
    return all(known(terms, ask, x, given) for x in terms.parts(t))
