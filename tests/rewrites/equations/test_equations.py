"""Rules whose text is the rule: found modulo names, refused clause by clause, proved by trying, refused when they are wrong."""

import numpy as np
import pytest

from tapestry.errors import LawError, TapestryError, TextError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import rules_of
from tapestry.rewrites.core.rule import Move, Refusal, parse_move
from tapestry.rewrites.core.rule_check import random_feeds, same
from tapestry.rewrites.equations.equation import Equation
from tapestry.rewrites.equations.instances import prove_moves
from tapestry.rewrites.equations.rule_texts import load_rules
from tests.support.command_line import run
from tests.support.paths import EXAMPLES

EQUATIONS = sorted(n for n, r in RULES.items() if isinstance(r, Equation))
SCALE = """rule scale {how}"Multiply behind the sum."
y: T[I..] = op [i..: I.. | m..: M.. sum]
  reads x[i.., m..], c[i..]
  body x * c
=>
s: T[I..] = op [i..: I.. | m..: M.. sum]
  reads x[i.., m..]
  body x
y: T[I..] = op [i..: I..]
  reads s[i..], c[i..]
  body {right}
when: float(T)
"""


def load(text: str, folder) -> None:
    path = folder / "mine.tap"
    path.write_text(text)
    load_rules(path)


def moves(rule: str, graph: Graph) -> list[str]:
    return [str(m) for m in RULES[rule].find(graph) if isinstance(m, Move)]


def refusals(rule: str, graph: Graph) -> list[str]:
    return [str(r) for r in RULES[rule].find(graph) if isinstance(r, Refusal)]


def test_ten_of_the_built_in_rules_are_equations() -> None:
    assert len(EQUATIONS) >= 10
    assert {"fuse_maps", "fuse_places", "select_first"} <= set(EQUATIONS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in EQUATIONS if RULES[n].phase != "algebra"])
def test_both_sides_say_the_same(name: str) -> None:
    held(name)


@pytest.mark.slow  # the default level tries each twice: test_book.py
@pytest.mark.parametrize("name", [n for n in EQUATIONS if RULES[n].phase == "algebra"])
def test_both_sides_of_the_book_say_the_same(name: str) -> None:
    held(name)


def held(name: str) -> None:
    rule = RULES[name]
    assert isinstance(rule, Equation)
    assert prove_moves(rule, np.random.default_rng(7), enough=12).moves >= 12


@pytest.mark.parametrize("name", [n for n in EQUATIONS if RULES[n].phase == "request"])
def test_what_is_there_for_the_asking_is_never_tried(name: str) -> None:
    assert RULES[name] not in {*rules_of("search"), *rules_of("simplify"), *rules_of("fusion"), *rules_of("fit")}


def test_example_is_short() -> None:
    assert len((EXAMPLES / "reassociate.tap").read_text().splitlines()) < 25


# what is wrong is refused when it is loaded


@pytest.mark.parametrize(
    ("right", "law", "witness"),
    [("s + c", "same_values", "became"), ("s", "access_unchanged", "was lost"), ("s * c * c", "same_values", "became")],
)
def test_sides_that_disagree(right: str, law: str, witness: str, tmp_path) -> None:
    text = SCALE.replace("{how}", "").replace("{right}", right)
    with pytest.raises(LawError) as e:
        load(text, tmp_path)
    assert e.value.law == law
    assert "scale@y" in e.value.where and (witness in e.value.why or witness in e.value.what)
    assert "scale" not in RULES


def test_a_rule_that_claims_to_be_exact_is_tried_on_infinities(tmp_path) -> None:
    load(SCALE.replace("{how}", "").replace("{right}", "s * c"), tmp_path)
    del RULES["scale"]
    with pytest.raises(LawError, match=r"'y' differs\n  because: at .* \(in its own type\)|of infinities and NaN"):
        load(SCALE.replace("{how}", "exact ").replace("{right}", "s * c"), tmp_path)
    assert "scale" not in RULES


def test_a_condition_that_is_missing_is_seen(tmp_path) -> None:
    text = _text("split_sum").replace("rule split_sum", "rule mine")
    assert ", M == parts * (M // parts)" in text
    with pytest.raises(LawError) as e:
        load(text.replace(", M == parts * (M // parts)", ""), tmp_path)
    assert e.value.where.startswith("mine@y") and "mine" not in RULES


def _text(name: str) -> str:
    rule = RULES[name]
    assert isinstance(rule, Equation)
    return rule.rule.text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("body s * c", "body s * d", "mine.tap:9:1: unknown function or name 'd' on the right-hand side"),
        ("=>", "->", "mine.tap:5:2: expected a name or a number, found '>'"),
        ("float(T)", "float(", "mine.tap:13:1: expected a name or a number, found 'end of text'"),
        ("float(T)", "floats(T)", "mine.tap:12:7: unknown condition 'floats'; conditions: "),
        (
            "| m..: M.. sum]\n  reads x[i.., m..], c",
            "| m..: M..]\n  reads x[i.., m..], c",
            "mine.tap:2:36: expected a monoid, found ']'",
        ),
        (
            "y: T[I..] = op [i..: I..]\n",
            "z: T[I..] = op [i..: I..]\n",
            "does not write what the last operation of the left writes",
        ),
    ],
)
def test_errors_point_at_what_is_wrong(old: str, new: str, message: str, tmp_path) -> None:
    text = SCALE.replace("{how}", "").replace("{right}", "s * c")
    assert old in text
    with pytest.raises(TextError) as e:
        load(text.replace(old, new), tmp_path)
    assert message in str(e.value) and str(e.value).rstrip().endswith("^")


def test_no_instance(tmp_path) -> None:
    text = SCALE.replace("{how}", "").replace("{right}", "s * c").replace("float(T)", "T == i8")
    with pytest.raises(TapestryError, match="no small instance of its left-hand side meets its conditions"):
        load(text, tmp_path)


# matching


def test_found_whatever_things_are_called_and_in_which_order() -> None:
    graph = parse(
        """graph g
input scale: f32[5]
input big: f32[7, 2, 5]
out: f32[5, 2] = op [q: 5, z: 2 | w: 6 sum]
  reads big[w + 1, z, q], scale[q]
  body scale * big
output out
"""
    )
    assert moves("factor_out", graph) == ["factor_out@out"]
    after = RULES["factor_out"].apply(graph, Move("factor_out", "out"))
    same(graph, after, random_feeds(graph, np.random.default_rng(0)), "renamed")
    assert "big[w + 1, z, q]" in to_text(after) and [len(op.reads) for op in after.ops if isinstance(op, Block)] == [1, 2]


def test_guards_and_fills_travel_with_a_read() -> None:
    graph = parse(
        """graph g
input x: f32[9]
y: f32[4] = op [h: 4 | r: 6 sum]
  reads x[2*h + r - 1] when h - r + 3 >= 0 else 0.5
  body abs(x)
output y
"""
    )
    for parts in (2, 3, 6):
        after = apply_moves(graph, [parse_move(f"split_sum@y{{parts={parts}}}")])
        same(graph, after, random_feeds(graph, np.random.default_rng(parts)), "guarded")


MAPS = """graph g
input x: f32[4, 6]
t: f32[4, 6] = op [a: 4, b: 6]
  reads x[a, b]
  body exp(x)
y: f32[4] = op [i: 4 | n: 6 sum]
  reads t[i, n]
  body t
output y
"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("reads t[i, n]\n", "reads t[i, 0]\n", "fuse_maps@y: a cell of 't' is read at two points"),
        ("reads t[i, n]\n  body t", "reads t[i, n - 1] else 0.0\n  body t", "'t' is read outside its cells"),
        ("reads t[i, n]\n  body t", "reads t[i, n], u = t[i, 5 - n]\n  body t * u", "through 2 projections"),
        ("output y", "output y, t", ""),
    ],
)
def test_a_refusal_says_which_condition_fails(old: str, new: str, why: str) -> None:
    graph = parse(MAPS.replace(old, new))
    assert moves("fuse_maps", graph) == []
    assert why in " ".join(refusals("fuse_maps", graph))
    with pytest.raises(TapestryError, match=why.rsplit("@y: ", maxsplit=1)[-1] or "this is not a map and its only reader"):
        apply_moves(graph, [parse_move("fuse_maps@y{tensor=t}")])


def test_a_refusal_gives_the_values_of_the_sizes() -> None:
    graph = parse(MAPS)
    with pytest.raises(TapestryError) as e:
        apply_moves(graph, [parse_move("split_sum@y{parts=4}")])
    assert "6 points of 'n' do not go into 4 equal parts" in str(e.value)
    with pytest.raises(TapestryError) as e:
        apply_moves(graph, [parse_move("split_sum@y{parts=1}")])
    assert "2 <= parts does not hold\n  because: parts is 1" in str(e.value)


def test_a_body_that_is_used_often_is_not_written_out() -> None:
    body = "t"
    for _ in range(6):
        body = f"({body} + {body})"
    graph = parse(MAPS.replace("  body t\n", f"  body {body}\n").replace("exp(x)", "tanh(exp(sin(cos(x))))"))
    assert "the body of 't' would be written 64 times (e.g. (uses(t) - 1)*nodes(F) is 315)" in " ".join(
        refusals("fuse_maps", graph)
    )


def test_a_tensor_that_others_read_stays() -> None:
    graph = parse(
        """graph g
input x: f32[3, 4]
see: bool[3, 4] = op [i: 3, n: 4]
  body ge(index(i), index(n))
y: f32[3, 4] = op [i: 3, n: 4]
  reads x[i, n], see[i, n]
  body where(see, x, 0.0)
output y, see
"""
    )
    after = RULES["fuse_places"].sweep(graph)
    assert [op.outs[0] for op in after.ops] == ["see", "y"] and after.ops[1].inputs == ("x",)


def test_a_chain_of_maps_becomes_one_in_a_sweep() -> None:
    maps = "".join(f"t{k + 1}: f32[4] = op [i: 4]\n  reads t{k}[i]\n  body tanh(t{k})\n" for k in range(9))
    graph = parse(f"graph g\ninput t0: f32[4]\n{maps}output t9\n")
    after = RULES["fuse_maps"].sweep(graph)
    assert len(after.ops) == 1
    same(graph, after, random_feeds(graph, np.random.default_rng(0)), "chain")


def test_two_bodies_with_inner_reductions_are_not_one() -> None:
    part = "  reads x[i, e], x1 = x[n, e]\n  let [e: 3 sum] x * x1\n  body {}\n"
    graph = parse(
        "graph g\ninput x: f32[4, 3]\n"
        f"a: f32[4] = op [i: 4 | n: 4 sum]\n{part.format('let0')}b: f32[4] = op [i: 4 | n: 4 sum]\n{part.format('exp(let0)')}"
        "y: f32[4] = op [i: 4]\n  reads a[i], b[i]\n  body a + b\noutput y\n"
    )
    assert moves("add_sums", graph) == []
    assert "two bodies with inner reductions" in " ".join(refusals("add_sums", graph))


def test_an_inner_reduction_goes_with_its_body() -> None:
    graph = parse(
        """graph g
input x: f32[4, 3]
input c: f32[4]
s: f32[4] = op [i: 4 | n: 4 sum]
  reads x[i, e], a1 = x[n, e]
  let [e: 3 sum] x * a1
  body exp(let0)
y: f32[4] = op [i: 4]
  reads s[i], c[i]
  body s * c
output y
"""
    )
    after = RULES["factor_in"].apply(graph, Move("factor_in", "y"))
    assert len(after.ops) == 1
    same(graph, after, random_feeds(graph, np.random.default_rng(0)), "inner")


def test_the_command_line_takes_files_of_equations(tmp_path) -> None:
    """`tapestry rules NAME` shows the equation, `tapestry opt` applies it, and what is wrong is told with a caret."""
    (tmp_path / "g.tap").write_text(MAPS.replace("body t\n", "body t * x\n").replace("reads t[i, n]", "reads t[i, n], x[0, i]"))
    (tmp_path / "mine.tap").write_text(SCALE.replace("{how}", "").replace("{right}", "s * c"))
    (tmp_path / "bad.tap").write_text("rule x\n")
    mine = dict(RULES)
    try:
        status, out, _ = run("rules", "scale", "--rules", tmp_path / "mine.tap")
        assert status == 0 and "Multiply behind the sum." in out and "body x * c" in out
        del RULES["scale"]
        status, out, _ = run("opt", tmp_path / "g.tap", "--rules", tmp_path / "mine.tap", "-r", "scale@y")
        assert status == 0 and "body a0 * x" in out
        status, _, err = run("rules", "--rules", tmp_path / "bad.tap")
        assert status == 2 and "bad.tap:2:1: expected a tensor, found 'end of text'" in err and "^" in err
    finally:
        RULES.clear()
        RULES.update(mine)
