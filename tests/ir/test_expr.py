"""Expressions share parts: what counts or rewrites them takes time by distinct parts, and says what a plain walk says."""

from __future__ import annotations

import numpy as np

from tapestry.ir.expr import Arg, Call, Expr, arg_positions, call, count, count_calls, distinct, rewrite, walk
from tapestry.ir.monoid import number


def random_expr(rng: np.random.Generator, size: int) -> Expr:
    """A graph of calls over earlier parts, which are used again and again."""
    parts: list[Expr] = [*(Arg(k, "f32") for k in range(3)), number(2, "f32")]
    for _ in range(size):
        a, b = (parts[int(k)] for k in rng.integers(max(0, len(parts) - 4), len(parts), 2))
        parts.append(call(str(rng.choice(["add", "mul", "max"])), a, b))
    return parts[-1]


def test_counts_and_rewrites_are_those_of_the_tree():
    rng = np.random.default_rng(5)
    for size in (0, 1, 5, 9):
        e = random_expr(rng, size)
        tree = list(walk(e))
        assert count_calls((e,)) == sum(isinstance(x, Call) for x in tree)
        assert count((e, e), lambda x: isinstance(x, Arg)) == 2 * sum(isinstance(x, Arg) for x in tree)
        assert set(distinct((e,))) == set(tree) and arg_positions((e,)) == {x.pos for x in tree if isinstance(x, Arg)}
        assert rewrite(e, lambda x: x) is e
        moved = rewrite(e, lambda x: Arg(x.pos + 7, x.dtype) if isinstance(x, Arg) else x)
        shifted = [Arg(x.pos + 7, x.dtype) if isinstance(x, Arg) else x for x in tree if not isinstance(x, Call)]
        assert [x for x in walk(moved) if not isinstance(x, Call)] == shifted
        assert [x.fn for x in walk(moved) if isinstance(x, Call)] == [x.fn for x in tree if isinstance(x, Call)]


def test_a_chain_that_reads_its_value_twice_takes_linear_time():
    e: Expr = Arg(0, "f32")
    for _ in range(200):  # 2**200 nodes as a tree
        e = call("add", e, e)
    assert count_calls((e,)) == 2**200 - 1 and arg_positions((e,)) == {0}
    moved = rewrite(e, lambda _: Arg(1, "f32"))
    assert arg_positions((moved,)) == {1} and len(list(distinct((moved,)))) == 201
