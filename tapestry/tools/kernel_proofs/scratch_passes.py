"""Kernels of two passes: what the first one leaves in scratch, as terms at any address of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from tapestry.ir.index import Aff, Mod, const, dims_of
from tapestry.tools.kernel_proofs.program_reading import Store
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported

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
