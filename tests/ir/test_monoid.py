"""The laws of every registered monoid, on extreme values, through the interpreter's own arithmetic."""

import math
from functools import reduce as fold
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry.errors import TapestryError
from tapestry.ir.expr import call
from tapestry.ir.monoid import (
    MONOIDS,
    MOST_SUMS,
    Action,
    highest,
    lowest,
    number,
    prove_driven,
    prove_moments,
    prove_rebased,
    register,
    rescale,
    sums,
)
from tapestry.ir.monoid import State as Fields
from tapestry.ir.types import numpy_dtype
from tapestry.verify.interp import value

EXTREME = [-math.inf, math.inf, math.nan, 1e30, -1e30, 0.0, -0.0, 1.0]
anything = st.sampled_from(EXTREME) | st.floats(-100, 100, width=32)
moderate = st.floats(-100, 100, width=32)
integers = st.integers(-(2**31), 2**31 - 1)

# name -> (dtypes of the fields, states to try, whether merging is exact)
DOMAINS = {
    "sum": (("i64",), st.tuples(integers), True),
    **{sums(n): (("i64",) * n, st.tuples(*[integers] * n), True) for n in range(2, MOST_SUMS + 1)},
    "prod": (("f64",), st.tuples(st.sampled_from([math.inf, math.nan, 1e30, -2.0, 0.5, 1.0, 3.0])), False),
    "max": (("f32",), st.tuples(anything), True),
    "min": (("f32",), st.tuples(anything), True),
    "any": (("bool",), st.tuples(st.booleans()), True),
    "all": (("bool",), st.tuples(st.booleans()), True),
    "moments": (("f64",) * 3, st.tuples(st.just(1.0), moderate | st.sampled_from([1e30, -1e30]), st.just(0.0)), False),
    "logsumexp": (("f64",) * 2, st.tuples(anything, st.just(1.0)), False),
    "softsum": (("f64",) * 3, st.tuples(anything, st.just(1.0), moderate), False),
    "affine": (("f64",) * 2, st.tuples(st.floats(-2, 2, width=32), moderate), False),
    "argmax": (("f32", "i64"), st.tuples(anything, st.integers(0, 9)), True),
    "argmin": (("f32", "i64"), st.tuples(anything, st.integers(0, 9)), True),
}
State = tuple[object, ...]


def merge(name: str, a: State, b: State) -> State:
    dtypes = DOMAINS[name][0]
    args = [np.asarray(x, numpy_dtype(d)) for x, d in zip((*a, *b), dtypes * 2, strict=True)]
    with np.errstate(all="ignore"):
        return tuple(value(e, args, [], {}, False) for e in MONOIDS[name].combiner(dtypes))


def zero(name: str) -> State:
    return tuple(c.value for c in MONOIDS[name].zero(DOMAINS[name][0]))


def agree(name: str, a: State, b: State, *of: State) -> None:
    """Two states are the same, or near for what they were merged of: terms that cancel leave a rounding."""
    exact = DOMAINS[name][2]
    if name in ("logsumexp", "softsum") and np.isnan(a[0]) and np.isnan(b[0]):  # type: ignore[call-overload]
        return  # m + log(s) is NaN whatever s
    for x, y, dtype in zip(a, b, DOMAINS[name][0], strict=True):
        want, got = np.asarray(x, numpy_dtype(dtype)), np.asarray(y, numpy_dtype(dtype))
        scale = max((abs(float(v)) for v in chain(a, b, *of) if np.isfinite(v)), default=1.0)  # type: ignore[call-overload]
        if exact or not np.isfinite(want):
            np.testing.assert_array_equal(want, got)
        else:
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12 * scale)


def states(name: str, count: int) -> st.SearchStrategy[list[State]]:
    """Lifted values, merges of some, and the identity."""
    plain = DOMAINS[name][1]
    merged = st.lists(plain, min_size=1, max_size=3).map(lambda xs: fold(lambda a, b: merge(name, a, b), xs))
    return st.lists(plain | merged | st.just(zero(name)), min_size=count, max_size=count)


@pytest.mark.parametrize("name", sorted(MONOIDS))
@given(data=st.data())
def test_associative(name: str, data: st.DataObject) -> None:
    a, b, c = data.draw(states(name, 3))
    agree(name, merge(name, merge(name, a, b), c), merge(name, a, merge(name, b, c)), a, b, c)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(MONOIDS))
@given(data=st.data())
def test_identity(name: str, data: st.DataObject) -> None:
    (a,) = data.draw(states(name, 1))
    agree(name, a, merge(name, a, zero(name)))
    agree(name, a, merge(name, zero(name), a))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(n for n, m in MONOIDS.items() if m.commutative))
@given(data=st.data())
def test_commutative(name: str, data: st.DataObject) -> None:
    a, b = data.draw(states(name, 2))
    agree(name, merge(name, a, b), merge(name, b, a))


@pytest.mark.slow
@given(st.lists(moderate, min_size=1, max_size=20))
def test_moments_are_mean_and_variance(xs: list[float]) -> None:
    n, mean, spread = fold(lambda a, b: merge("moments", a, b), [(1.0, x, 0.0) for x in xs])
    assert n == len(xs)
    np.testing.assert_allclose(mean, np.mean(xs), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(spread, np.var(xs) * len(xs), rtol=1e-9, atol=1e-7)


@given(st.lists(anything, min_size=1, max_size=12))
def test_argmax_is_numpys(xs: list[float]) -> None:
    for name, reference in (("argmax", np.argmax), ("argmin", np.argmin)):
        _, index = fold(lambda a, b, name=name: merge(name, a, b), [(x, i) for i, x in enumerate(xs)], zero(name))
        assert index == reference(np.asarray(xs, np.float32))  # the first of equals, a NaN before all


def test_identities_bound_their_type() -> None:
    for dtype in ("i8", "u8", "i64", "u64", "i32", "u16"):
        info = np.iinfo(numpy_dtype(dtype))
        assert (lowest(dtype).value, highest(dtype).value) == (info.min, info.max)
    assert (lowest("bool").value, highest("bool").value) == (False, True)


def test_every_monoid_is_tested_and_names_are_taken_once() -> None:
    assert set(DOMAINS) == set(MONOIDS)
    with pytest.raises(AssertionError):
        register(MONOIDS["sum"])


# Proofs of actions, over the real numbers.


def scaled(by: Fields, s: Fields) -> Fields:
    """Every sum times a factor."""
    return tuple(call("mul", x, by[0]) for x in s)


@pytest.mark.parametrize("sums_of", [1, 3])
def test_scaling_sums_is_an_action_and_shifting_them_is_none(sums_of: int) -> None:
    acted = MONOIDS["sum" if sums_of == 1 else sums(sums_of)]
    prove_driven(MONOIDS["prod"], acted, scaled)
    with pytest.raises(TapestryError, match="not an action"):
        prove_driven(MONOIDS["prod"], acted, lambda by, s: tuple(call("add", x, by[0]) for x in s))
    with pytest.raises(TapestryError, match=r"act\(1, s\) = s"):
        prove_driven(MONOIDS["sum"], acted, scaled)  # nothing added is 0 times
    less = number(1, "f64")
    with pytest.raises(TapestryError, match=r"act\(ab, s\)"):
        prove_driven(MONOIDS["prod"], acted, lambda by, s: tuple(call("add", x, call("sub", by[0], less)) for x in s))


def unguarded(old: Fields, new: Fields, s: Fields) -> Fields:
    """Sums of ``exp(x - old)`` as those of ``exp(x - new)``."""
    scale = call("exp", call("sub", old[0], new[0]))
    return tuple(call("mul", x, scale) for x in s)


def guarded(act: Action, otherwise: float | None = None) -> Action:
    """An action with a guard where the centres are the same: there the state stays, or is times a number."""

    def with_guard(old: Fields, new: Fields, s: Fields) -> Fields:
        kept = s if otherwise is None else tuple(call("mul", x, number(otherwise, "f64")) for x in s)
        same = call("eq", old[0], new[0])
        return tuple(call("where", same, a, b) for a, b in zip(kept, act(old, new, s), strict=True))

    return with_guard


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sums_of", [1, 2])
def test_another_centre_is_an_action_with_and_without_its_guard(sums_of: int) -> None:
    """A guard may keep infinities apart, never change the value where the centres are equal."""
    acted = MONOIDS["sum" if sums_of == 1 else sums(sums_of)]
    for act in (rescale, unguarded, guarded(unguarded)):
        prove_rebased(MONOIDS["max"], acted, act)
    with pytest.raises(TapestryError, match="not an action"):
        prove_rebased(MONOIDS["max"], acted, guarded(unguarded, otherwise=2.0))
    with pytest.raises(TapestryError, match=r"act\(c, c, s\) = s"):
        prove_rebased(MONOIDS["max"], acted, lambda old, new, s: scaled((call("exp", old[0]),), s))
    with pytest.raises(TapestryError, match="not an action"):
        prove_rebased(MONOIDS["max"], acted, lambda old, new, s: unguarded(old, (call("mul", new[0], old[0]),), s))


def test_moments_are_proved_and_others_refused() -> None:
    for name in ("moments", "logsumexp", "softsum"):
        proof = MONOIDS[name].proof
        assert proof is not None
        proof()
    with pytest.raises(TapestryError, match="mean is another"):
        prove_moments(lambda a, b: (call("add", a[0], b[0]), call("add", a[1], b[1]), call("add", a[2], b[2])))
