"""Derivations by the book of equations: found by price, composed, replayed as texts, planned beside the graph as it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.book.rule_graphs import SEEN
from tapestry.compiler.pipeline import Options, compile_model
from tapestry.ir.graph import changes
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.algebra import Book
from tapestry.plan.solver.budget import Meter
from tapestry.plan.topology import parse_mesh, topology
from tapestry.rewrites.core.driver import apply_legal, replay, simplify
from tapestry.rewrites.core.rule import BOOK, parse_move, rule_table
from tests.support.command_line import run

ALGEBRA = (Path(BOOK),)
LAYER = """{x}t{k}: f32[256, 256] = op [i: 256, n: 256 | m: 4 sum]
  reads a{k}[i, m], b{k}[m, n], w{k}[i, n]
  body a{k} * b{k}
  then w{k} + (acc0 * 0.5)
y{k}: f32[16, 256] = op [i: 16, n: 256 | m: 256 sum]
  reads {of}[i, m], t{k}[m, n]
  body {of} * t{k}
  then tanh(acc0)
"""


def adapters(layers: int) -> str:
    """Linear layers whose weights have low-rank updates added to them."""
    inputs = "".join(f"input w{k}: f32[256, 256]\ninput a{k}: f32[256, 4]\ninput b{k}: f32[4, 256]\n" for k in range(layers))
    ops = "".join(LAYER.format(k=k, of=f"y{k - 1}" if k else "x", x="") for k in range(layers))
    return f"graph g\ninput x: f32[16, 256]\n{inputs}{ops}output y{layers - 1}\n"


def book(**more) -> Book:
    return Book(topology=topology(parse_mesh("1"), "cpu"), meter=Meter(), units=1e12, **more)


def planned(model, folder, mesh="1", **more):
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return compile_model(Options(model=path, mesh=parse_mesh(mesh), topology="cpu", **more))


def test_equations_compose_and_equal_regions_are_searched_once() -> None:
    one, three = book(), book()
    (first,) = one.derivations(parse(adapters(1)))
    found = three.derivations(parse(adapters(3)))
    assert first.name == "distribute_update then literal_through then reassociate_contraction"
    assert first.after < first.before and sum(d.places for d in found) == 3
    assert len(three.known) <= 3  # the first, the last, and those in between


def test_a_derivation_replays_as_a_text() -> None:
    graph = parse(adapters(2))
    moves = [m for d in book().derivations(graph) for m in d.moves]
    texts = [str(m) for m in moves]
    new, done = apply_legal(graph, moves)
    again = replay(graph, [parse_move(t) for t in texts])
    assert done and to_text(simplify(new)) == to_text(again) and len(again.ops) == 6


def test_moves_at_many_places_are_made_in_one_pass() -> None:
    steps = list[int]()
    for layers in (3, 9):
        graph = parse(adapters(layers))
        moves = [m for d in book().derivations(graph) for m in d.moves]
        new, done = apply_legal(graph, moves)
        assert len(done) >= 3 * layers and len(new.ops) < len(graph.ops) * 2
        steps.append(len(changes(new)))
    assert steps[0] == steps[1]


def test_rules_that_are_left_out_are_not_used() -> None:
    graph = parse(adapters(1))
    assert book(disabled=frozenset({"distribute_update"})).derivations(graph) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["last_token", "chain", "unet"])
def test_a_plan_with_the_book_is_better_and_right(name: str, tmp_path) -> None:
    model = SEEN[name]()
    without, with_ = (planned(model, tmp_path, rules=r) for r in ((), ALGEBRA))
    assert with_.build.report["objective_s"] < without.build.report["objective_s"] / 2
    taken = [t for t in with_.build.report["equations"] if t["taken"]]
    assert taken and taken[0]["after_s"] < taken[0]["before_s"]
    assert set(with_.build.report["rewrites"]["shown"]) & {"normal form", "isl and sampled cells"}
    again = planned(model, tmp_path, rules=ALGEBRA)
    assert again.build.report["plan_sha256"] == with_.build.report["plan_sha256"]


def test_fusions_that_stand_in_the_way_are_left_out(tmp_path) -> None:
    """Two contractions of one factor go side by side, unless their sum is one contraction."""
    assert list(planned(SEEN["two_products"](), tmp_path, rules=ALGEBRA).build.moves) == ["common_factor@t2"]


def test_the_search_is_never_worse_on_several_devices(tmp_path) -> None:
    model = SEEN["lora"]()
    without, with_ = (planned(model, tmp_path, "4", rules=r).build.report for r in ((), ALGEBRA))
    assert with_["objective_s"] <= without["objective_s"] * (1 + 1e-9)


def test_the_space_of_derivations_on_the_command_line(tmp_path) -> None:
    file = tmp_path / "g.tap"
    file.write_text(adapters(1))
    status, out, _ = run("rules", "--derive", file, "--forms", "30", "--json")
    forms = json.loads(out)["forms"]
    best = min(forms, key=lambda f: f["seconds"])
    assert status == 0 and forms[0]["of"] is None and best["seconds"] < forms[0]["seconds"]
    status, text, _ = run("opt", file, *(x for m in best["moves"] for x in ("-r", m)))
    assert status == 0 and parse(text).ops == parse(best["graph"]).ops
    status, out, _ = run("rules", "--derive", file, "--forms", "30", "--dot")
    assert status == 0 and out.startswith("digraph") and "reassociate_contraction" in out


def test_ablation_on_the_command_line(tmp_path) -> None:
    (tmp_path / "m.onnx").write_bytes(SEEN["greedy"]().SerializeToString())
    status, out, _ = run("rules", "--ablate", tmp_path / "m.onnx", "--json")
    rows = {r["equations"]: r for r in json.loads(out)["ablations"]}
    assert status == 0 and set(rows) == {"all", "none", "without increasing_out", "increasing_out alone"}
    assert rows["all"]["objective_s"] == rows["increasing_out alone"]["objective_s"] < rows["none"]["objective_s"]


def test_a_plain_compile_reads_no_book(tmp_path) -> None:
    """The matcher of equations is there for three rules of another phase; the book, and what proves it, is not."""
    (tmp_path / "m.onnx").write_bytes(SEEN["chain"]().SerializeToString())
    done = python(
        "import sys, tapestry; built = tapestry.compile(sys.argv[1], devices=2, topology='cpu'); assert not built.build.moves\n"
        "from tapestry.rewrites.core.rule import own_rules\n"
        "assert 'algebra' not in {r.phase for r in own_rules().values()}\n"
        "assert not {'tapestry.rewrites.algebra', 'tapestry.rewrites.equations.instances'} & set(sys.modules)",
        tmp_path / "m.onnx",
    )
    assert done.returncode == 0, done.stderr


def python(script: str, *args: Path):
    """A process that has read nothing yet."""
    return subprocess.run([sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, check=False)


def test_a_build_that_used_the_book_is_verified_without_being_asked_for_it(tmp_path) -> None:
    (tmp_path / "m.onnx").write_bytes(SEEN["two_products"]().SerializeToString())
    status, out, _ = run("compile", tmp_path / "m.onnx", "-o", tmp_path / "b", "--json", "--rules", "algebra")
    assert status == 0 and json.loads(out)["moves"] == ["common_factor@t2"]
    done = python("import sys; from tapestry.cli import main; sys.exit(main(['verify', sys.argv[1], '-q']))", tmp_path / "b")
    assert done.returncode == 0, done.stderr


def test_rules_of_ones_own_of_the_phase_are_tried(tmp_path) -> None:
    """They are asked for by their file; the book is not."""
    rule = rule_table()["common_factor"]
    (tmp_path / "mine.tap").write_text(rule.rule.text.replace("common_factor", "mine_alone"))
    try:
        built = planned(SEEN["two_products"](), tmp_path, rules=(tmp_path / "mine.tap",))
        assert list(built.build.moves) == ["mine_alone@t2"]
    finally:
        rule_table().pop("mine_alone", None)
