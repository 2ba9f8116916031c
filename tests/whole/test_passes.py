"""The list of passes: what each gives is what it made, ``compile`` shows what ran, and what is printed reads back."""

from __future__ import annotations

import inspect
import json
import logging
import math
import subprocess
import sys
import time
import types
import typing

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry import flags
from tapestry.compiler import pass_runner
from tapestry.compiler.compilation import Compilation
from tapestry.compiler.pass_runner import FIELDS, Pass, Runner, unreported
from tapestry.compiler.pipeline import PASSES, Options, asked
from tapestry.errors import LawError, TapestryError
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.fusion import fused
from tapestry.rewrites import RULES
from tapestry.rewrites.core.driver import rules_of
from tapestry.viz import progress
from tests.support.command_line import document, run
from tests.support.paths import EXAMPLES, ROOT
from tests.support.small_models import N, case, net, save

NAMES = [p.name for p in PASSES]


@pytest.fixture
def wide(tmp_path):
    """A small model with inputs of 4 KiB."""
    m = net([N("Relu", ["x"], ["y"], "act")], {"x": (T.FLOAT, [32, 32])}, {"y": T.FLOAT})
    path = tmp_path / "wide.onnx"
    path.write_bytes(m.SerializeToString())
    return path


# --- the list


@pytest.mark.slow
def test_what_passes_make_is_of_the_types_of_the_fields(monkeypatch):
    """`made` takes any value for a field, so a compilation in which every pass has something to do is looked at."""
    ends, run = list[Compilation](), Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, passes: (run(self, passes), ends.append(self.at)))
    tapestry.compile(save("attention"), mesh="2x2", pareto=True)
    hints = typing.get_type_hints(Compilation)
    for name in FIELDS:
        value, parts = getattr(ends[-1], name), typing.get_args(hints[name])
        kinds = parts if isinstance(hints[name], types.UnionType) else (hints[name],)
        assert isinstance(value, tuple(typing.get_origin(k) or k for k in kinds)), name
    assert len(set(NAMES)) == len(NAMES)


def test_what_no_pass_has_made_cannot_be_used():
    at = asked(Options(model=save("mlp")))
    with pytest.raises(AssertionError, match="no pass has made"):
        _ = at.plan.objective
    with pytest.raises(AssertionError, match="no pass has made"):
        Runner(at=at, report=unreported).run([p for p in PASSES if p.name == "simplify"])


@pytest.mark.slow
def test_passes_say_what_they_made():
    gives = {r["name"]: r["gives"] for r in tapestry.compile(save("attention"), mesh="2x2").report["passes"]}
    assert gives["solve"] == ["candidate"] and gives["check-memory"] == []
    assert "peak_alone" in gives["compare-whole-graph"]


def test_every_rule_that_is_tried_by_price_says_so():
    """`plan.alternatives.fused` is what applies the rules of the phase fusion: it names each of them, and no other."""
    source = inspect.getsource(fused)
    assert {type(r).__name__ for r in rules_of("fusion")} == {
        type(r).__name__ for r in RULES.values() if f"{type(r).__name__}()" in source
    }


# --- what ran


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_json_says_what_ran(name, tmp_path):
    d = document("compile", save(name), "-o", tmp_path / "b", "--devices", "2")
    assert [r["name"] for r in d["passes"]] == NAMES
    rows = {r["name"]: r for r in d["passes"]}
    for p in PASSES:
        assert rows[p.name]["seconds"] >= 0
    assert rows["read-model"]["nodes"] == d["nodes"]
    assert rows["hoist-transfers"]["operations"] == d["ops"] and rows["solve"]["steps"] > 0
    assert rows["hoist-transfers"]["peak_bytes"] == max(d["peak_bytes"])
    assert rows["verify"]["checks"] == sum(d["certificate"]["laws"].values())
    assert rows["emit-kernels"]["kernels"] == d["kernels"]
    assert sum(r["seconds"] for r in d["passes"]) == pytest.approx(
        sum(s for k, s in d["seconds"].items() if k != "total"), abs=0.01
    )


def test_print_passes(tmp_path):
    status, out, err = run("compile", save("attention"), "-o", tmp_path / "b", "--devices", "2", "--print-passes")
    assert status == 0 and err == ""
    rows = [line for line in out.splitlines() if line.split(" ")[0] in NAMES]
    assert [line.split()[0] for line in rows] == NAMES
    assert all(float(line.split()[1]) >= 0 for line in rows)
    assert "operations" in out and "nodes" in out and "kernels" in out


def test_the_search_says_what_it_has_found(capfd):
    """In a pipe there is a line every few seconds, with the best plan, its bound and the gap; nothing with -q."""
    for quiet in (False, True):
        with progress.passes(["lift", "solve"], quiet=quiet, every=0.01) as watch:
            watch.begin("lift", "lift")
            time.sleep(0.05)
            assert watch.line() == "" and capfd.readouterr().err == ""
            watch.begin("search", "solve")
            time.sleep(0.05)
            watch.found(2e-3, -math.inf)
            watch.found(3e-3, 2.5e-3)  # of another form, which is slower
            assert watch.best() == "plan 2 ms, no bound yet"
            watch.found(2e-3, 1.5e-3)
            time.sleep(0.05)
        err = capfd.readouterr().err
        assert ("solve: no plan yet" in err and "plan 2 ms, bound 1.5 ms, gap 25.00%" in err) is not quiet
        assert quiet == (err == "")


@pytest.mark.slow
def test_who_watches_is_told_of_plans_and_changes_nothing():
    """Whoever watches is told of plans and bounds; the report's plan is the best of them, and watching changes nothing."""
    found = list[tuple[float, float]]()
    done = tapestry.compile(save("attention"), mesh="2x2", found=lambda seconds, bound: found.append((seconds, bound)))
    assert min(s for s, _ in found) == pytest.approx(done.report["objective_s"], rel=1e-9)
    assert sum(np.isfinite(bound) for _, bound in found) > 1
    assert tapestry.compile(save("attention"), mesh="2x2").report["plan_sha256"] == done.report["plan_sha256"]


def test_progress_goes_to_standard_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tapestry", "compile", str(save("mlp")), "-o", str(tmp_path / "b"), "-v", "--json"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    json.loads(done.stdout)
    assert "lift-nodes: " in done.stderr and "solve: " in done.stderr


# --- the IR after a pass


def test_what_is_printed_after_every_pass_reads_back():
    printed = tapestry.compile(save("attention"), mesh="2x2", print_after=NAMES).printed
    assert list(printed) == NAMES
    for at, (name, text) in enumerate(printed.items()):
        assert text.startswith(f"# after {name}\n")
        if at < NAMES.index("lift-nodes"):  # ONNX's own text
            assert onnx.parser.parse_model(text).graph.node, name
            continue
        graph = parse(text)
        assert to_text(graph) == text[text.index("\ngraph ") + 1 :], name
        assert any(op.splits for op in graph.ops) == (at >= NAMES.index("solve")), name


def test_json_has_what_was_asked_to_be_printed(tmp_path):
    d = document("compile", save("mlp"), "-o", tmp_path / "b", "--print-after", "lift-nodes")
    assert list(d["printed"]) == ["lift-nodes"] and len(parse(d["printed"]["lift-nodes"]).ops) == d["passes"][5]["operations"]
    assert "printed" not in document("compile", save("mlp"), "-o", tmp_path / "b")


def test_printed_ir_is_all_of_standard_output(tmp_path):
    folder = tmp_path / "b"
    status, out, err = run("compile", save("mlp"), "-o", folder, "--print-after", "simplify", "--print-passes")
    assert status == 0 and len(parse(out).ops) == len(case("mlp").graph.ops)
    assert "simplify" in err and "seconds" in err
    plan = json.loads((folder / "plan.json").read_text())
    status, out, _ = run("compile", save("mlp"), "-o", folder, "--print-after", "hoist-transfers", "-q")
    assert status == 0 and to_text(parse(out)).startswith("graph ") and "# step 0: load" in out and plan


def test_several_prints_come_in_the_order_of_the_passes(tmp_path):
    status, out, _ = run("compile", save("mlp"), "-o", tmp_path / "b", "--print-after", "solve", "--print-after", "simplify")
    assert status == 0 and out.index("# after simplify") < out.index("# after solve")
    assert all(parse("# after" + part) for part in out.split("# after")[1:])


def test_an_unknown_pass_is_an_error_before_anything_runs(tmp_path):
    (tmp_path / "none.onnx").write_bytes(b"no model")
    status, out, err = run("compile", tmp_path / "none.onnx", "-o", tmp_path / "b", "--print-after", "simplfy")
    assert status == 2 and out == "" and "'simplify' is similar" in err
    assert len(err.splitlines()) <= 6


def test_the_moves_of_opt_print_between_read_back(tmp_path):
    moves = ["split@hidden{dim=i,parts=2,to=mesh.d0}", "split@hidden{dim=n,parts=2,to=mesh.d1}"]
    graph = parse((EXAMPLES / "mlp.tap").read_text())
    first = next(op for op in graph.ops if len(op.dims) > 1)
    moves = [f"split@{first.outs[0]}{{dim={d.name},parts=2,to=mesh.d{k}}}" for k, d in enumerate(first.dims[:2])]
    status, out, err = run("opt", EXAMPLES / "mlp.tap", "--print-between", *(x for m in moves for x in ("-r", m)))
    assert status == 0, err
    parts = out.split("# after ")[1:]
    assert [p.splitlines()[0] for p in parts] == moves
    assert [len(parse("# after " + p).ops[graph.ops.index(first)].splits) for p in parts] == [1, 2]


def test_comments_in_ir_text():
    text = to_text(case("attention").graph)
    commented = "# a comment\n" + text.replace("\n", "  # and 'another', \"one\" %$\n")
    assert parse(commented) == parse(text)
    with pytest.raises(TapestryError, match="line 3"):
        parse("# one\n# two\nnonsense\n")


# --- the runner


def test_laws_are_checked_between_passes(monkeypatch, caplog):
    """With TAPESTRY_DEBUG=2 a pass that breaks a law is caught behind it, not at the end."""
    broken = parse("graph g\ninput x: f32[7]\ny: f32[7] = op [n: 7]\n  reads x[n + 1]\n  body x\noutput y\n")

    def spoil(c: Compilation) -> Compilation:
        return c.made(graph=broken)

    passes, at = [Pass(spoil, "simplify", "")], asked(Options(model=save("mlp")))
    Runner(at=at, report=unreported).run(passes)
    for level in (2, 3):
        monkeypatch.setattr(flags, "debug_level", lambda level=level: level)
        with pytest.raises(LawError, match="reads_inside"), caplog.at_level(logging.WARNING, logger="tapestry"):
            Runner(at=at, report=unreported).run(passes)
    assert "# after spoil" in caplog.text and pass_runner.log.name == "tapestry"


def test_every_pass_is_reported_as_it_begins():
    seen: list[tuple[str, str]] = []
    tapestry.compile(save("mlp"), progress=lambda phase, name: seen.append((phase, name)))
    assert seen == [(p.phase, p.name) for p in PASSES]


# --- small things


@pytest.mark.parametrize("word,tip", [("complie", "compile"), ("autoshard", "auto-shard"), ("zzz", "--help")])
def test_an_unknown_command_gets_a_tip(word, tip):
    status, out, err = run(word)
    assert status == 2 and out == "" and "error: " in err and "try: " in err and tip in err.splitlines()[-1]
    assert "check-sharding" not in err


def test_version():
    status, out, _ = run("--version")
    assert status == 0 and out == f"tapestry {tapestry.__version__}\n"
    assert tapestry.__version__[0].isdigit()


def test_bytes_that_were_meant_as_mebibytes_are_refused_before_lifting(wide, tmp_path, monkeypatch):
    from tapestry.lift import onnx_to_graph

    monkeypatch.setattr(onnx_to_graph, "prepare", lambda *a, **k: pytest.fail("lifted"))
    status, _, err = run("compile", wide, "-o", tmp_path / "b", "--memory", "24", "--devices", "2")
    assert status == 2 and "24 is bytes; write 24MiB" in err and "4,096 bytes" in err


def test_what_does_not_fit_says_what_a_bare_number_is(wide, tmp_path):
    status, _, err = run("compile", wide, "-o", tmp_path / "b", "--memory", "4200", "--time-limit", "0")
    assert status == 2 and "a bare number is bytes" in err and "too many" in err
    assert run("compile", wide, "-o", tmp_path / "b", "--memory", "24MiB", "-q")[0] == 0
