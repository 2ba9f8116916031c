"""What rules are built of: matches that become find, apply and sweep, constants, and names of monoids that do not matter."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, call
from tapestry.ir.graph import Block
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.rewrites import RULES
from tapestry.rewrites.core.constants import constant
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.matching import Draft, Match, OpRule
from tapestry.rewrites.core.rule import Move, Refusal, refuse
from tapestry.rewrites.core.rule_check import random_feeds, same
from tapestry.rewrites.fusion import softmax_pattern

CHAIN = """graph chain
input x: f32[4]
a: f32[4] = op [i: 4]
  reads x[i]
  body exp(x)
b: f32[4] = op [i: 4]
  reads a[i]
  body neg(a)
c: f32[4] = op [i: 4]
  reads b[i]
  body exp(b)
output c
"""


class NoExp(OpRule):
    """Exponentials become absolute values, but for that of the output: wrong, and easily seen."""

    name = "no_exp"
    nothing = "no exponential is there"

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        op = draft.block(at)
        if op is None or not isinstance(op.body[0], Call) or op.body[0].fn != "exp":
            return None
        if op.outs[0] in draft.outputs:
            return refuse("it is an output", op.outs[0])
        return Match({at: (replace(op, body=(call("abs", *op.body[0].args),)),)})


def test_everything_follows_from_match() -> None:
    rule, graph = NoExp(), parse(CHAIN)
    assert list(rule.find(graph)) == [Move("no_exp", "a"), Refusal("no_exp", "c", "it is an output", "c")]
    after = to_text(graph).replace("exp(x)", "abs(x)")
    assert to_text(rule.apply(graph, Move("no_exp", "a"))) == to_text(rule.sweep(graph)) == after
    for at, message in (("b", "no exponential is there"), ("c", "it is an output"), ("d", "no operation writes 'd'")):
        with pytest.raises(TapestryError, match=message):
            rule.apply(graph, Move("no_exp", at))
    assert rule.choose(graph, lambda old, new: len(old) < len(new)) == (graph, [])


def test_a_draft_knows_makers_and_readers_of_what_it_has_become() -> None:
    graph = parse(CHAIN)
    draft = Draft(graph)
    assert draft.only_reader("a") == 1 and draft.only_reader("c") is None
    reader = draft.block(2)
    assert reader is not None
    draft.put(Match({1: (), 2: (replace(reader, reads=(replace(reader.reads[0], tensor="a"),)),)}))
    assert draft.readers_of("a") == [2] and draft.maker("b") is None and draft.block(1) is None
    after = draft.graph()
    assert after is not None and [op.outs for op in after.ops] == [("a",), ("c",)] and "b" not in after.tensors


def test_three_contractions_of_one_factor_each_stay_whole() -> None:
    """The last shares a factor with each of the two before it."""
    graph = parse("""graph three
input x: f32[4, 4]
input w: f32[4, 4]
input u: f32[4, 4]
a: f32[4, 4] = op [i: 4, n: 4 | m: 4 sum]
  reads x[i, m], u[m, n]
  body x * u
b: f32[4, 4] = op [i: 4, n: 4 | m: 4 sum]
  reads a[i, m], w[m, n]
  body a * w
y: f32[4, 4] = op [i: 4, n: 4 | m: 4 sum]
  reads x[i, m], w[m, n]
  body x * w
output a, b, y
""")
    rule = RULES["fuse_sums"]
    same(graph, rule.sweep(graph), random_feeds(graph, np.random.default_rng(0)), "fuse_sums, swept")


def f32(value: float) -> Const:
    return Const(value, "f32")


@pytest.mark.parametrize(
    ("e", "want"),
    [
        (call("exp", call("sub", f32(-math.inf), f32(-math.inf))), math.nan),
        (call("where", call("isnan", f32(math.nan)), f32(0.0), f32(1.0)), 0.0),
        (call("div", f32(1.0), f32(0.0)), math.inf),
        (call("tanh", call("abs", Arg(0, "f32"))), 0.0),
        (call("max", f32(math.nan), f32(1.0)), math.nan),
        (Call("cast", (f32(2.5),), "i64"), None),
        (Call("cast", (f32(-3.0),), "i64"), -3),
        (call("erf", f32(0.0)), 0.0),
        (call("fmod", f32(-5.5), f32(2.0)), -1.5),
        (call("div", Const(-7, "i64"), Const(2, "i64")), -3),
        (call("div", Const(7, "i64"), Const(0, "i64")), 0),
        (call("mod", Const(-7, "i64"), Const(3, "i64")), 2),
        (call("exp", Acc(0, "f32")), None),
        (call("add", Const(2, "i64"), Const(3, "i64")), 5),
    ],
)
def test_constants(e: Expr, want: float | None) -> None:
    got = constant(e, [0.0])
    assert got == want or (got is not None and want is not None and math.isnan(got) and math.isnan(want))


SOFTMAX = """graph attention
input s: f32[4, 5]
input v: f32[5, 2]
top: f32[4] = op [i: 4 | n: 5 max]
  reads s[i, n]
  body s
e: f32[4, 5] = op [i: 4, n: 5]
  reads s[i, n], top[i]
  body exp((s - top))
total: f32[4] = op [i: 4 | n: 5 sum]
  reads e[i, n]
  body e
p: f32[4, 5] = op [i: 4, n: 5]
  reads e[i, n], total[i]
  body e / total
y: f32[4, 2] = op [i: 4, e: 2 | n: 5 sum]
  reads p[i, n], v[n, e]
  body p * v
output y
"""


def test_softmax_is_streamed_whatever_its_monoids_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("logsumexp", "softsum"):
        monoid = replace(MONOIDS[name], name=f"my_{name}")
        monkeypatch.delitem(MONOIDS, name)
        monkeypatch.setitem(MONOIDS, monoid.name, monoid)
    assert softmax_pattern.weighted_sums(2) == "my_softsum"
    graph = parse(SOFTMAX)
    after = simplify(graph)
    assert [op.monoid for op in after.ops if isinstance(op, Block)] == ["my_softsum"]
    same(graph, after, random_feeds(graph, np.random.default_rng(0)), "streamed")
