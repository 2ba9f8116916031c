"""Every registered rule: its documented example, its laws, its refusals; and the four splitting and slicing rules in depth."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import tapestry.rewrites  # noqa: F401  (fills the table of rules)
from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import Block, Graph, Split
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.search.planner import search
from tapestry.plan.topology import parse_mesh, topology
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import Move, Refusal, Rule, parse_move
from tapestry.rewrites.core.rule_check import RuleCase, check_rule, documented, random_feeds, same
from tapestry.rewrites.equations.rule_texts import load_rules
from tapestry.rewrites.splitting.split import halo, refusals, splittable
from tapestry.verify import interp
from tests.support.paths import EXAMPLES
from tests.support.rule_cases import OUT_TYPES, REDUCTIONS, opaque_graph, reduction


def conv(h: int, k: int, stride: int = 1, dilation: int = 1, pad: int = 0, width: int = 0, then: str = "acc0") -> str:
    """A convolution along h; also along w (3 points read from ``width`` cells by a window of 2) when there is a width."""
    out = (h + 2 * pad - dilation * (k - 1) - 1) // stride + 1
    at = f"{stride}*h + {dilation}*r - {pad}"
    w, s, column, tap, x_shape, k_shape, axes = "", "", "", "", f"2, {h}", f"2, 2, {k}", f"2, {out}"
    if width:
        w, s, column, tap = ", w: 3", ", s: 2 sum", ", 2*w + s", ", s"
        x_shape, k_shape, axes = f"{x_shape}, {width}", f"{k_shape}, 2", f"{axes}, 3"
    return f"""graph conv
input x: f32[{x_shape}]
input k: f32[{k_shape}]
input b: f32[2]
y: f32[{axes}] = op [o: 2, h: {out}{w} | c: 2 sum, r: {k} sum{s}]
  reads x[c, {at}{column}]{" else 0.0" if pad else ""}, k[o, c, r{tap}], b[o]
  body x * k
  then {then}
output y
"""


POOL = """graph pool
input x: f32[2, 9]
y: f32[2, 4] = op [c: 2, h: 4 | r: 3 max]
  reads x[c, 2*h + r]
  body x
output y
"""

CASES = {
    "split": [
        RuleCase(before=conv(9, 3, pad=1), moves=("split@y{dim=h,parts=4,to=mesh.d0}", "split@y{dim=c,parts=2,to=loop}")),
        RuleCase(before=reduction("moments", 7), moves=("split@y0{dim=m,parts=3,to=mesh.d0}",)),
        RuleCase(before=to_text(opaque_graph())),
    ],
    "split_reduce": [RuleCase(before=reduction("argmax", 7)), RuleCase(before=conv(9, 3, pad=1, then="tanh((acc0 + b))"))],
    "slice_dilated": [RuleCase(before=conv(11, 3, dilation=2, pad=2, width=7, then="acc0 + b"))],
    "slice_strided": [RuleCase(before=conv(11, 3, stride=2, pad=1, width=7, then="acc0 + b")), RuleCase(before=POOL)],
}


def test_every_rule_has_a_case_or_an_example() -> None:
    for rule in RULES.values():
        assert documented(rule)
    assert set(CASES) <= set(RULES)


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_documented_example_is_what_happens(name: str) -> None:
    before, move, after = documented(RULES[name])
    assert to_text(apply_moves(parse(before), [parse_move(move)])) == after


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", sorted(RULES))
def test_rule_keeps_the_laws(name: str) -> None:
    rng = np.random.default_rng(0)
    before, move, _ = documented(RULES[name])
    check_rule(RULES[name], RuleCase(before=before, moves=(move,)), rng)
    for case in (RuleCase(before=before), *CASES.get(name, [])):
        report = check_rule(RULES[name], case, rng)
        assert report.moves
        assert not report.skipped or "opaque" in case.before


def test_opaque_outputs_are_skipped_with_the_reason() -> None:
    report = check_rule(RULES["split"], RuleCase(before=to_text(opaque_graph())), np.random.default_rng(0))
    assert report.skipped == {"y": "'y' depends on the opaque operation 'y'"}
    assert [str(r) for r in report.refusals] == [
        "split@y: no other axis commutes with splitting: its output is ranked along axis 1"
    ]


# split


def test_seven_over_three() -> None:
    graph = parse(reduction("sum", 7))
    for dim in ("n", "m"):
        after = apply_moves(graph, [parse_move(f"split@y0{{dim={dim},parts=3,to=time}}")])
        assert after.ops[0].splits == (Split(dim, 3, "time"),)
        same(graph, after, random_feeds(graph, np.random.default_rng(1)), dim)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pad", "want"),
    [(224, 3, 1, 1, (1, 1)), (224, 3, 2, 1, (1, 0)), (224, 7, 2, 3, (3, 2)), (8, 1, 1, 0, (0, 0))],
)
def test_halo(size: int, kernel: int, stride: int, pad: int, want: tuple[int, int]) -> None:
    graph = parse(conv(size, kernel, stride, pad=pad))
    op = graph.ops[0]
    assert isinstance(op, Block)
    assert halo(op, op.reads[0], "h", 8, graph) == want
    assert halo(op, op.reads[1], "h", 8, graph) == (0, 0)  # the kernel does not depend on h


@pytest.mark.parametrize(
    ("move", "message"),
    [
        ("split@y0{dim=m,parts=8,to=grid}", "7 points of 'm' cannot be cut into 8 non-empty parts\n  because: part 0 is empty"),
        ("split@y0{dim=q,parts=2,to=grid}", "there is no dimension 'q'\n  because: the dimensions are 'n', 'm'"),
        ("split@y0{dim=n,parts=2,to=space}", "'space' is not a resource"),
        ("split@y0{dim=n,parts=0,to=time}", "cannot be cut into 0 parts"),
        ("split@z{dim=n,parts=2,to=time}", "no operation writes 'z'"),
        ("split@y0{dim=n,to=time}", "parameter 'parts' is missing"),
    ],
)
def test_split_refuses(move: str, message: str) -> None:
    with pytest.raises(TapestryError) as e:
        apply_moves(parse(reduction("sum", 7)), [parse_move(move)])
    assert message in str(e.value)


def test_split_refuses_a_second_use() -> None:
    graph = apply_moves(parse(reduction("sum", 7)), [parse_move("split@y0{dim=m,parts=2,to=mesh.d0}")])
    with pytest.raises(TapestryError, match=r"'mesh\.d0' already cuts 'm'"):
        apply_moves(graph, [parse_move("split@y0{dim=n,parts=3,to=mesh.d0}")])
    with pytest.raises(TapestryError, match="7 points of 'm' cannot be cut into 8 non-empty parts"):
        apply_moves(graph, [parse_move("split@y0{dim=m,parts=4,to=time}")])


def test_split_of_opaque() -> None:
    graph = opaque_graph()
    assert [d.name for d in splittable(graph.ops[0])] == ["b"]
    with pytest.raises(TapestryError, match="axis 'x1' does not commute with splitting: its output is ranked along axis 1"):
        apply_moves(graph, [parse_move("split@y{dim=x1,parts=2,to=time}")])


def test_monoids_that_are_missing_or_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    op = parse(conv(9, 3)).ops[0]
    assert isinstance(op, Block)
    lost = refusals(replace(op, monoid="concat"))
    assert {str(r) for r in lost} == {f"split@y: '{d}' is reduced by no known monoid (e.g. monoid concat)" for d in "cr"}
    monkeypatch.setitem(MONOIDS, "sum", replace(MONOIDS["sum"], commutative=False))
    assert [d.name for d in splittable(op)] == ["o", "h", "c"]
    found = [r for r in RULES["split_reduce"].find(parse(conv(9, 3))) if isinstance(r, Refusal)]
    assert [r.reason for r in found] == ["'sum' does not commute and 'r' is not the first reduced dimension"]
    assert "would be merged before 1" in next(str(r) for r in RULES["slice_strided"].find(parse(conv(9, 3, 2))))


# split_reduce


@pytest.mark.sampled(100)
@pytest.mark.parametrize("monoid", sorted(MONOIDS))
@pytest.mark.parametrize("fanin", [2, 3, 8])
@pytest.mark.parametrize(("size", "parts"), [(8, 4), (7, 3), (10, 4), (9, 9), (9, 4)])
def test_merge_trees(monoid: str, fanin: int, size: int, parts: int) -> None:
    graph = parse(reduction(monoid, size))
    after = apply_moves(graph, [parse_move(f"split_reduce@y0{{dim=m,parts={parts},fanin={fanin}}}")])
    same(graph, after, random_feeds(graph, np.random.default_rng(size)), monoid)
    levels = len(after.ops) - 1
    assert fanin ** (levels - 1) < parts <= fanin**levels
    assert levels == math.ceil(round(math.log(parts, fanin), 9))


@pytest.mark.parametrize("monoid", ["max", "min", "argmax", "argmin", "logsumexp"])
def test_points_beyond_the_end_do_not_count(monoid: str) -> None:
    graph = parse(reduction(monoid, 7).replace("i32", "f32"))
    after = apply_moves(graph, [parse_move("split_reduce@y0{dim=m,parts=3,fanin=2}")])
    x = np.full((3, 9), -np.inf if monoid != "min" else np.inf, np.float32)
    x[1, 3] = np.nan
    x[2, 5] = 1e30
    before, now = interp.run(graph, {"x": x}), interp.run(after, {"x": x})
    for name, want in before.items():
        np.testing.assert_array_equal(want, now[name])


def test_padding_is_selected_away_where_multiplying_would_not_remove_it() -> None:
    text = """graph scaled
input x: f32[7]
input w: f32[1]
y: f32[] = op [ | m: 7 sum]
  reads x[m], w[0]
  body x * w
output y
"""
    after = apply_moves(parse(text), [parse_move("split_reduce@y{dim=m,parts=3,fanin=4}")])
    out = interp.run(after, {"x": np.ones(7, np.float32), "w": np.full(1, np.inf, np.float32)})
    assert out["y"] == np.inf
    assert "where" in to_text(after)


@pytest.mark.parametrize(
    ("body", "then"), [("abs(x)", "acc0"), ("x * x", "sqrt(acc0)"), ("x", "acc0 / 7.0"), ("exp(x)", "log(acc0)")]
)
def test_norms_and_means(body: str, then: str) -> None:
    graph = parse(reduction("sum", 7, [body], [then]))
    after = apply_moves(graph, [parse_move("split_reduce@y0{dim=m,parts=3,fanin=2}")])
    same(graph, after, random_feeds(graph, np.random.default_rng(3)), body)


def test_linear_becomes_matmul_then_sum() -> None:
    graph = parse(documented(RULES["split_reduce"])[0])
    after = apply_moves(graph, [parse_move("split_reduce@y{dim=m,parts=7,fanin=7}")])
    matmul, total = after.ops
    assert isinstance(matmul, Block) and isinstance(total, Block)
    assert [r.tensor for r in matmul.reads] == ["x", "w"] and [r.tensor for r in total.reads] == ["y.p.value", "b"]
    assert after.tensors["y.p.value"].shape == (7, 4, 3)
    rng = np.random.default_rng(0)
    feeds = random_feeds(graph, rng)
    got = interp.run(after, feeds, wide=True)["y"]
    np.testing.assert_allclose(got, feeds["x"].astype(float) @ feeds["w"] + feeds["b"], rtol=1e-12)


def test_moves_compose() -> None:
    graph = parse(conv(13, 3, stride=2, pad=1, then="acc0 + b"))
    at = "y.r0.value"
    moves = ["slice_strided@y{dim=h}", f"split@{at}{{dim=h,parts=3,to=time}}", f"split_reduce@{at}{{dim=c,parts=2,fanin=2}}"]
    after = apply_moves(graph, map(parse_move, moves))
    same(graph, after, random_feeds(graph, np.random.default_rng(0)), "composed")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("dim=m,parts=8,fanin=2", "7 points of 'm' cannot be cut into 8 non-empty parts\n  because: part 7 is empty"),
        ("dim=m,parts=1,fanin=2", "cannot be cut into 1 non-empty parts"),
        ("dim=n,parts=2,fanin=2", "'n' is not reduced by a monoid\n  because: the reduced dimensions are 'm'"),
        ("dim=m,parts=4,fanin=1", "a tree of fan-in 1 never ends\n  because: 4 states stay 4"),
    ],
)
def test_split_reduce_refuses(params: str, message: str) -> None:
    with pytest.raises(TapestryError) as e:
        apply_moves(parse(reduction("sum", 7)), [parse_move(f"split_reduce@y0{{{params}}}")])
    assert message in str(e.value)


def test_split_reduce_refuses_splits_and_opaques() -> None:
    moves = [parse_move("split@y0{dim=m,parts=2,to=time}"), parse_move("split_reduce@y0{dim=m,parts=2,fanin=2}")]
    with pytest.raises(TapestryError, match="'m' is split already"):
        apply_moves(parse(reduction("sum", 7)), moves)
    with pytest.raises(TapestryError, match="'y' is opaque: its output is ranked"):
        apply_moves(opaque_graph(), [parse_move("split_reduce@y{dim=b,parts=2,fanin=2}")])


# slicing

GRID = list(itertools.product((7, 10), (1, 2, 3), (1, 2, 3), (1, 2, 3), (0, 1, 2)))  # size, kernel, stride, dilation, pad


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [0, 7], ids=["1d", "2d"])
@pytest.mark.parametrize("rule", ["slice_dilated", "slice_strided"])
def test_slicing_keeps_dependences_and_values(rule: str, width: int) -> None:
    rng = np.random.default_rng(5)
    applied = 0
    for h, k, stride, dilation, pad in GRID if not width else GRID[::5]:
        graph = parse(conv(h, k, stride, dilation, pad, width, "acc0 + b"))
        found = next(f for f in RULES[rule].find(graph) if isinstance(f, Refusal) or f.text("dim") == "h")
        wanted = (dilation > 1 and stride == 1) if rule == "slice_dilated" else (stride > 1 and dilation % stride != 0)
        if isinstance(found, Move):
            applied += 1
            what = f"{found} of {(h, k, stride, dilation, pad)}"
            same(graph, RULES[rule].apply(graph, found), random_feeds(graph, rng), what)
        assert isinstance(found, Move) == wanted or "leave one of" in str(found), (h, k, stride, dilation, pad, found)
    assert applied > (20 if not width else 4)


def test_both_dimensions_can_be_sliced() -> None:
    graph = parse(conv(9, 3, stride=2, pad=1, width=7, then="acc0 + b"))
    one = apply_moves(graph, [parse_move("slice_strided@y{dim=h}"), parse_move("slice_strided@y.r0.value{dim=w}")])
    same(graph, one, random_feeds(graph, np.random.default_rng(2)), "h, then w")


@pytest.mark.parametrize("monoid", ["max", "moments", "argmax", "logsumexp"])
def test_any_commutative_window_can_be_sliced(monoid: str) -> None:
    dtype, body, then = REDUCTIONS[monoid]
    outs = ", ".join(f"y{i}: {d}[5]" for i, d in enumerate(OUT_TYPES.get(monoid, [dtype] * len(then))))
    graph = parse(f"""graph pool
input x: f32[19]
{outs} = op [h: 5 | m: 7 {monoid}]
  reads x[3*h + m]
  body {", ".join(body)}
  then {", ".join(then)}
output y0
""")
    after = apply_moves(graph, [parse_move("slice_strided@y0{dim=h}")])
    same(graph, after, random_feeds(graph, np.random.default_rng(4)), monoid)


def test_slices_are_dense() -> None:
    for text, move in (
        (conv(12, 3, dilation=3, pad=2), "slice_dilated@y{dim=h}"),
        (conv(12, 4, stride=2, pad=1), "slice_strided@y{dim=h}"),
    ):
        after = apply_moves(parse(text), [parse_move(move)])
        parts = [op for op in after.ops if isinstance(op, Block) and op.reduce]
        assert parts and all({c for e in op.reads[0].index for _, c in e.terms} == {1} for op in parts)


@pytest.mark.parametrize(
    ("text", "move", "message"),
    [
        (conv(9, 3), "slice_dilated@y{dim=h}", "the window is dense along 'h'\n  because: 'r' 0 and 1 read 'x' 1 apart"),
        (conv(9, 3, 2), "slice_dilated@y{dim=h}", "see slice_strided\n  because: 'h' 0 and 1 read 'x' 2 apart"),
        (conv(9, 3), "slice_dilated@y{dim=o}", "no window slides along 'o'"),
        (conv(9, 3), "slice_dilated@y{dim=r}", "'r' is not a map dimension\n  because: the map dimensions are 'o', 'h'"),
        (conv(10, 4, 1, 3), "slice_dilated@y{dim=h}", "1 points of 'h' leave one of 3 phases empty"),
        (conv(2, 2, 1, 4, 4), "slice_dilated@y{dim=h}", "'x' has fewer than 4 cells along axis 1"),
        (conv(9, 3), "slice_strided@y{dim=h}", "the window does not stride along 'h'"),
        (conv(9, 3, 2, 2), "slice_strided@y{dim=h}", "the window reads one phase of 'x' alone\n  because: step 2, 'r' by 2"),
        (conv(9, 3), "slice_strided@y{dim=o}", "no window slides along 'o'"),
        (conv(2, 3, 3, 1, 2), "slice_strided@y{dim=h}", "'x' has fewer than 3 cells along axis 1"),
        (conv(300, 66, 65), "slice_strided@y{dim=h}", "65 phases are more than 64"),
        (conv(300, 3, 1, 65), "slice_dilated@y{dim=h}", "65 phases are more than 64"),
        (conv(9, 3, 2).replace("1*r", "r + c"), "slice_strided@y{dim=h}", "more than one reduced dimension walks 'x'"),
    ],
)
def test_slicing_refuses(text: str, move: str, message: str) -> None:
    text = text.replace("x: f32[2, 9]", "x: f32[2, 10]") if "+ c" in text else text
    with pytest.raises(TapestryError) as e:
        apply_moves(parse(text), [parse_move(move)])
    assert message in str(e.value)


# rules of the user's own, and rules that are wrong


ATTENTION = """graph attention
input q: f32[8, 2]
input k: f32[8, 2]
input v: f32[8, 3]
s: f32[8, 8] = op [i: 8, n: 8 | m: 2 sum]
  reads q[i, m], k[n, m]
  body q * k
y: f32[8, 3] = op [i: 8, n: 3 | m: 8 sum]
  reads s[i, m], v[m, n]
  body s * v
output y
"""


def test_the_example_rule_is_checked_and_betters_a_plan() -> None:
    load_rules(EXAMPLES / "reassociate.tap")
    try:
        rule = RULES["reassociate"]
        before, move, after = documented(rule)
        assert to_text(apply_moves(parse(before), [parse_move(move)])) == after
        before = ATTENTION
        assert check_rule(rule, RuleCase(before=before), np.random.default_rng(0)).moves == (parse_move("reassociate@y"),)
        short = before.replace("8, 2]", "8, 20]").replace("m: 2 sum", "m: 20 sum").replace("8", "2")
        assert list(rule.find(parse(short))) == []  # two tokens of twenty features: the other order would cost more
        tokens = parse(before.replace("8", "512").replace("n: 3", "n: 64").replace(", 3]", ", 64]"))
        topo = topology(parse_mesh("4"))
        plans = [search(g, topo) for g in (tokens, apply_moves(tokens, [m for m in rule.find(tokens) if isinstance(m, Move)]))]
        assert plans[1].objective < plans[0].objective / 2
        with pytest.raises(TapestryError, match="not a chain of two products"):
            apply_moves(parse(before), [parse_move("reassociate@s")])
    finally:
        del RULES["reassociate"]


class Wrong(Rule):
    """A rule that replaces a piece of text: wrong in whatever way a test wants."""

    name = "wrong"

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def find(self, graph: Graph):
        yield Move("wrong", "y0")

    def apply(self, graph: Graph, move: Move) -> Graph:
        return parse(to_text(graph).replace(self.old, self.new))


@pytest.mark.parametrize(
    ("old", "new", "law", "message"),
    [
        ("m + 1]", "m]", "access_unchanged", "a dependence of 'y0' on 'x' was lost"),
        ("m + 1]", "m + 9]", "reads_inside", "reads 'x'"),
        ("body x", "body x + x", "same_values", "'y0' differs"),
        ("body x", "body x * f32(nan)", "same_values", "became nan"),
        (
            "reads x[n, m + 1]\n  body x",
            "body 1.0",
            "access_unchanged",
            "a dependence of 'y0' on 'x' was lost\n  because: cell (",
        ),
    ],
)
def test_check_rule_catches(old: str, new: str, law: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Wrong(old, new)
    monkeypatch.setitem(RULES, "wrong", rule)
    with pytest.raises(LawError) as e:
        check_rule(rule, RuleCase(before=reduction("sum", 7)), np.random.default_rng(0))
    assert e.value.law == law
    assert message in str(e.value)


def test_check_rule_needs_a_move_and_a_docstring() -> None:
    with pytest.raises(TapestryError, match="finds no move in its case"):
        check_rule(RULES["slice_strided"], RuleCase(before=reduction("sum", 7)), np.random.default_rng(0))
    with pytest.raises(TapestryError, match="its docstring lacks 'before:'"):
        documented(Wrong("", ""))
