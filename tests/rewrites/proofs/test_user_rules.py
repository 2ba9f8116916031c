"""Users' rules through the commands: those that are right are accepted, those that are wrong refused at the place.

Some are equations (``rules/*.tap``), which `rules --check` proves on instances; the others are classes that make one
graph of another (``rules/*_graphs.txt``), proved where `opt` applies them.
"""

import re
from pathlib import Path

import pytest

from tapestry.rewrites import RULES
from tests.support.command_line import document, run
from tests.support.small_models import save

FOLDER = Path(__file__).parent / "rules"
WITNESS = re.compile(
    r"because: (at .*: .* became \S+|cell .* reads cell .*: with \S+ there \S+ became \S+|\S+\[.*\] became \S+\[.*\])"
)


def equations(name: str) -> dict[str, str]:
    texts = re.split(r"\n(?=rule )", (FOLDER / name).read_text())
    return {re.match(r"rule (\w+)", t)[1]: t for t in texts}


def pairs(name: str) -> dict[str, tuple[str, str]]:
    out = {}
    for text in (FOLDER / name).read_text().split("== ")[1:]:
        head, _, rest = text.partition("\n")
        before, _, after = rest.partition("=>\n")
        out[head.partition(":")[0]] = tuple(f"graph {head.partition(':')[0]}\n{g.strip()}\noutput y\n" for g in (before, after))
    return out


RIGHT, WRONG = equations("right.tap"), equations("wrong.tap")
RIGHT_PAIRS, WRONG_PAIRS = pairs("right_graphs.txt"), pairs("wrong_graphs.txt")
RULE = '''"""A rule of a user's own."""

from tapestry.ir.syntax.parser import parse
from tapestry.rewrites.core.rule import Move, Rule, register


@register
class Mine(Rule):
    name = "{name}"

    def find(self, graph):
        yield Move("{name}", "y")

    def apply(self, graph, move):
        return parse("""{after}""")
'''


@pytest.fixture(autouse=True)
def _table():
    mine = dict(RULES)
    yield
    RULES.clear()
    RULES.update(mine)


def written(folder: Path, name: str, before: str, after: str) -> tuple[Path, Path]:
    (folder / "g.tap").write_text(before)
    (folder / "mine.py").write_text(RULE.format(name=name, after=after))
    return folder / "g.tap", folder / "mine.py"


def test_there_are_thirty_of_each() -> None:
    assert len(RIGHT) + len(RIGHT_PAIRS) >= 30 and len(WRONG) + len(WRONG_PAIRS) >= 30


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_equation_is_proved(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.tap").write_text(RIGHT[name])
    (row,) = document("rules", "--check", tmp_path / "mine.tap")["checked"]
    assert row["rule"] == name and row["instances"] == 8 <= row["moves"] == sum(row["shown"].values())
    assert "not proved" not in row["shown"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_equation_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.tap").write_text(WRONG[name])
    status, _, err = run("rules", "--check", tmp_path / "mine.tap")
    assert status == 1 and f"{name}@y" in err and "operation 'y'" in err and WITNESS.search(err), err
    assert name not in RULES


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RIGHT_PAIRS)
def test_a_right_rule_is_applied(name: str, tmp_path: Path) -> None:
    graph, rules = written(tmp_path, name, *RIGHT_PAIRS[name])
    (row,) = document("opt", graph, "--rules", rules, "-r", f"{name}@y")["proved"]
    assert row["move"] == f"{name}@y" and row["shown"] and "not proved" not in row["shown"]


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_a_wrong_rule_is_refused_where_it_is_applied(name: str, tmp_path: Path) -> None:
    graph, rules = written(tmp_path, name, *WRONG_PAIRS[name])
    status, out, err = run("opt", graph, "--rules", rules, "-r", f"{name}@y")
    assert status == 1 and out == "" and f"{name}@y, operation '" in err and WITNESS.search(err), err


DROPS = '''"""Drop what stands behind every reduction."""

from dataclasses import replace

from tapestry.ir.expr import Acc
from tapestry.rewrites.core.matching import Match, OpRule
from tapestry.rewrites.core.rule import register


@register
class DropEpilogues(OpRule):
    name, phase = "drop_epilogues", "{phase}"

    def match(self, draft, at):
        op = draft.block(at)
        if op is None or op.monoid != "sum" or not op.lowers:
            return None
        return Match({{at: (replace(op, then=tuple(Acc(k, e.dtype) for k, e in enumerate(op.body))),)}})
'''


@pytest.mark.parametrize("phase", ["simplify", "search"])
def test_a_rule_that_drops_every_epilogue_is_not_compiled(phase: str, tmp_path: Path) -> None:
    (tmp_path / "drop.py").write_text(DROPS.format(phase=phase))
    status, _, err = run("compile", save("mlp"), "-o", tmp_path / "b", "--devices", "2", "--rules", tmp_path / "drop.py")
    assert status == 1 and "drop_epilogues" in err and "operation '" in err and WITNESS.search(err), err
    assert not (tmp_path / "b").exists()


SWAPS = '''"""Exchange the bytes of two weights."""

from dataclasses import replace

from tapestry.rewrites.core.rule import Move, Rule, register


@register
class Swap(Rule):
    name = "swap"

    def find(self, graph):
        yield Move("swap", "y")

    def apply(self, graph, move):
        a, b = graph.weights
        return replace(graph, weights={a: graph.weights[b], b: graph.weights[a]})
'''


def test_a_rule_that_exchanges_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "swap.py").write_text(SWAPS)
    weights = "".join(f'weight {n}: f32[4] at "m.bin" {at} 16 "{n}" "{at}"\n' for n, at in (("a", 0), ("b", 16)))
    text = f"graph g\n{weights}y: f32[4] = op [i: 4]\n  reads a[i], b[i]\n  body a - b\noutput y\n"
    (tmp_path / "g.tap").write_text(text)
    status, _, err = run("opt", tmp_path / "g.tap", "--rules", tmp_path / "swap.py", "-r", "swap@y")
    assert status == 1 and "swap@y: law 'access_unchanged' is broken: 'a' is another tensor, or other bytes" in err
