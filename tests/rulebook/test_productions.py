"""The space of equivalent graphs: every form computes the same, replays from its moves, and costs what its plan costs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tapestry.ir import laws
from tapestry.ir.syntax.parser import parse
from tapestry.plan.algebra import Book
from tapestry.plan.solver.budget import Meter
from tapestry.plan.topology import parse_mesh, topology
from tapestry.tools.rulebook.production_space import ProductionSpace
from tapestry.tools.rulebook.small_graphs import GRAPHS
from tapestry.verify import interp
from tests.support.command_line import run

LINEAR = """
graph linear
input x: f32[3, 4]
input w: f32[4, 2]
input b: f32[2]
y: f32[3, 2] = op [i: 3, n: 2 | m: 4 sum]
  reads x[i, m], w[m, n], b[n]
  body x * w
  then acc0 + b
output y
"""
STRIDED = """
graph strided
input x: f32[2, 9]
input k: f32[3, 2, 3]
y: f32[3, 4] = op [o: 3, h: 4 | c: 2 sum, r: 3 sum]
  reads x[c, 2*h + r], k[o, c, r]
  body x * k
output y
"""
STDDEV = """
graph stddev
input x: f32[3, 8]
y: f32[3] = op [i: 3 | m: 8 moments]
  reads x[i, m]
  body 1.0, x, 0.0
  then sqrt(acc2 / acc0)
output y
"""


def space(text: str, mesh: str = "1", most: int = 60) -> ProductionSpace:
    book = Book(topology=topology(parse_mesh("1"), "cpu"), meter=Meter(), units=0.0)
    out = ProductionSpace(topology=topology(parse_mesh(mesh), "cpu"), book=book, most=most)
    out.derive(parse(text, "g"))
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("text", "mesh"), [(LINEAR, "1"), (LINEAR, "2"), (STRIDED, "1"), (STDDEV, "2")])
def test_every_form_computes_the_same(text, mesh):
    found = space(text, mesh, 25)
    begin = found.forms[0].graph
    rng = np.random.default_rng(0)
    feeds = {t: rng.standard_normal(begin.tensors[t].shape).astype(np.float32) for t in begin.inputs}
    expected = interp.run(begin, feeds)
    assert len(found.forms) == 25
    for f in found.forms:
        laws.check(f.graph)
        np.testing.assert_allclose(interp.run(f.graph, feeds)["y"], expected["y"], rtol=2e-5, atol=2e-6, err_msg=str(f.moves))


def test_rules_of_the_document():
    """Linear ⇒ matmul ⇒ sum with fan-in b, cuts of batch and nodes, strided slices; each is there, with its cost."""
    found = space(GRAPHS["Linear"], "2", 20)
    by = {str(f.by): f for f in found.forms if f.depth == 1}
    for move in ("epilogue_apart@y", "split_reduce@y{dim=m,parts=4,fanin=2}", "split_reduce@y{dim=m,parts=4,fanin=4}",
                 "split_time@y{dim=i,parts=2,back=0}", *(f"split@y{{dim={d},parts=2,to=mesh.d0}}" for d in "inm")):  # fmt: skip
        assert move in by, move
    assert by["split@y{dim=i,parts=2,to=mesh.d0}"].nbytes < found.forms[0].nbytes  # half of x and of y on each
    assert by["split@y{dim=m,parts=2,to=mesh.d0}"].seconds > by["split@y{dim=n,parts=2,to=mesh.d0}"].seconds  # an all-reduce
    deep, flat = by["split_reduce@y{dim=m,parts=4,fanin=2}"], by["split_reduce@y{dim=m,parts=4,fanin=4}"]
    assert len(deep.graph.ops) == len(flat.graph.ops) + 1
    assert deep.seconds > flat.seconds > found.forms[0].seconds
    assert any(f.by and f.by.rule == "slice_strided" for f in space(STRIDED, most=9).forms)


def test_forms_are_found_once_and_by_the_fewest_moves():
    found = space(LINEAR, "2x2", 60)
    texts = [(f.graph.ops, f.graph.tensors) for f in found.forms]
    assert all(a != b for k, a in enumerate(texts) for b in texts[:k])
    assert [f.depth for f in found.forms] == sorted(f.depth for f in found.forms)
    assert found.again  # two cuts commute
    for a, b, _ in found.again:
        assert found.forms[b].depth <= found.forms[a].depth + 1
    assert found.pruned["beyond 60 forms"]
    cut = [f for f in found.forms if any(op.splits for op in f.graph.ops)]
    assert cut
    assert all(m.rule == "split" for f in found.forms if f.parent and found.forms[f.parent] in cut for m in [f.by] if m)


def test_what_is_dear_is_not_followed():
    found = space(STRIDED, most=60)
    begin = found.forms[0]
    dear = {f.number for f in found.forms if f.seconds > 2.5 * begin.seconds and f.nbytes >= begin.nbytes}
    assert dear
    assert all(f.parent not in dear for f in found.forms)


def test_a_price_is_that_of_the_plan():
    """Of what the search of plans may choose, a form's price is one; the cheapest cut of one operation is what it chooses."""
    from tapestry.plan.search.planner import search

    text = GRAPHS["Linear"].replace("64", "2048").replace("256", "1024")
    found = space(text, "4", 12)
    graph = found.forms[0].graph
    best = search(replace(graph, log=None), topology(parse_mesh("4"), "cpu"))
    cuts = [f.seconds for f in found.forms if all(m.rule == "split" for m in f.moves)]
    assert min(cuts) == pytest.approx(best.objective)


def test_on_the_command_line(tmp_path):
    status, out, _ = run("rules", "--derive", "Linear", "--mesh", "2", "--forms", "40", "--json")
    document = json.loads(out)
    assert status == 0
    assert len(document["forms"]) == 40
    assert document["deepest"] == max(f["depth"] for f in document["forms"])
    (tmp_path / "g.tap").write_text(GRAPHS["Linear"])
    for form in document["forms"][::7]:
        status, text, _ = run("opt", tmp_path / "g.tap", *(x for m in form["moves"] for x in ("-r", m)))
        assert status == 0
        assert parse(text).ops == parse(form["graph"]).ops
    status, out, _ = run("rules", "--derive", "Linear", "--forms", "9")
    assert status == 0
    assert "9 forms" in out
    assert "split_reduce@y{dim=m,parts=4,fanin=2}" in out
    status, _, said = run("rules", "--derive", "Nothing")
    assert status == 2
    assert "Stddev" in said
