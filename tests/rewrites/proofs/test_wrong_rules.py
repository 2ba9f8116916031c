"""A rule whose proof fails is left out where it fails, and the search goes on; the environment can ask for the error instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tapestry
from tapestry.errors import LawError
from tapestry.ir.expr import Call, Const, call
from tapestry.ir.graph import Block, Dim, Graph
from tapestry.rewrites import RULES
from tapestry.rewrites.core.matching import Draft, Match, OpRule
from tapestry.rewrites.core.rule import Move, Refusal, Rule, left_out
from tests.support.command_line import run

TEXT = """graph g
input x: f32[64, 64]
input w: f32[64, 32]
u: f32[64, 64] = op [i: 64, j: 64]
  reads x[i, j]
  body x + x
v: f32[64, 64] = op [i: 64, j: 64]
  reads x[i, j]
  body abs(x)
y: f32[64, 32] = op [i: 64, n: 32 | m: 64 sum]
  reads v[i, m], w[m, n]
  body v * w
output u, v, y
"""


class Spoiler(OpRule):
    """Doubles what is added to itself, which is right, and takes ``abs`` away; as a choice of the search, it sums fewer products."""

    name = "spoiler"
    built_in = True

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        op = draft.block(at)
        if op is not None and self.phase != "simplify" and op.monoid == "sum" and op.reduce[0].size > 8:
            return Match({at: (replace(op, reduce=(Dim(op.reduce[0].name, 8),)),)})
        made = op is not None and op.monoid is None and isinstance(op.body[0], Call) and op.body[0].fn
        if op is None or made not in ("add", "abs"):
            return None
        (x, *_) = op.body[0].args
        return Match({at: (replace(op, body=(call("mul", x, Const(2.0, "f32")) if made == "add" else x,)),)})


def inputs() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {"x": random.standard_normal((64, 64), np.float32), "w": random.standard_normal((64, 32), np.float32)}


def model(folder: Path) -> Path:
    path = folder / "g.tap"
    path.write_text(TEXT)
    return path


def check_results(build: tapestry.api.Compiled) -> None:
    feeds = inputs()
    found, v = build.run(feeds), np.abs(feeds["x"])
    for name, want in {"u": 2 * feeds["x"], "v": v, "y": v @ feeds["w"]}.items():
        assert np.allclose(found[name], want, atol=1e-4), name


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPESTRY_STRICT", "0")


class Plain(Rule):
    """The same as a choice of the search, of a rule that is written by hand."""

    name = "spoiler"
    built_in = True
    ours = Spoiler("search")

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        return self.ours.find(graph)

    def apply(self, graph: Graph, move: Move) -> Graph:
        return self.ours.apply(graph, move)


class Moving(Spoiler):
    """Is wrong elsewhere as soon as it is left out at one place."""

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        op = draft.block(at)
        turn = "v" if not left_out(self.name, ["v"]) else "u"
        return super().match(draft, at) if op is None or turn != "u" or op.outs[0] != "u" else Match({at: (outside(op),)})


def outside(op: Block) -> Block:
    """An operation that reads beyond the end of a tensor."""
    read = op.reads[0]
    return replace(op, reads=(replace(read, index=(read.index[0] + 1, *read.index[1:])),))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [r.getMessage() for r in caplog.records if "left undone" in r.getMessage()]
    caplog.clear()
    return said


RULES_AND_PLACES = {
    "simplify": (Spoiler("simplify"), ["without spoiler@v:"]),
    "search": (Spoiler("search"), ["without spoiler@v, spoiler@y:"]),
    "by hand": (Plain(), ["without spoiler@v, spoiler@y:"]),
    "moving": (Moving("simplify"), ["without spoiler@v:", "without spoiler:"]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", RULES_AND_PLACES)
@pytest.mark.usefixtures("lenient")
def test_a_wrong_rule_is_left_out_where_its_proof_fails(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rule, places = RULES_AND_PLACES[case]
    monkeypatch.setitem(RULES, "spoiler", rule)
    build = tapestry.compile(model(tmp_path), devices=2, topology="cpu")
    said = warned(caplog)
    assert len(said) == len(places) and all(p in s and "law '" in s for p, s in zip(places, said, strict=True))
    check_results(build)
    build.save(tmp_path / "b")
    assert run("verify", tmp_path / "b", "-q")[0] == 0
    (u,) = (op for op in build.build.plan.graph.ops if "u" in op.outs)
    assert ("mul" in str(u)) == (case == "simplify")  # what is right was done: it is no choice
    again = tapestry.compile(model(tmp_path), devices=2, topology="cpu", resume=tmp_path / "b")
    assert not warned(caplog) or rule.phase != "simplify"  # the build says what was left out
    check_results(again)


def test_the_environment_asks_for_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "spoiler", Spoiler("simplify"))
    with pytest.raises(LawError, match="'v' differs"):
        tapestry.compile(model(tmp_path), devices=2, topology="cpu")


@pytest.mark.usefixtures("lenient")
def test_a_plan_that_breaks_a_law_is_still_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> dict[str, int]:
        raise LawError("peak", "more memory than the plan says")

    monkeypatch.setattr("tapestry.compiler.passes.certificate.check", broken)
    with pytest.raises(LawError, match="more memory"):
        tapestry.compile(model(tmp_path), devices=2, topology="cpu")
