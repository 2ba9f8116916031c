"""Documents as JSON: schemas that are those of the code, builds that keep to them, errors that say where, histories that replay."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tapestry import api
from tapestry.build import store
from tapestry.errors import BuildError, LawError, TapestryError, TextError
from tapestry.ir.graph import Graph
from tapestry.ir.program import Launch
from tapestry.ir.syntax.ir_document import from_document, to_document
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import op_text, to_text
from tapestry.verify import certificate
from tapestry.verify.rewriting import history, rewrite_log
from tests.docs.schemas import SCHEMAS, file_of, schema
from tests.support.command_line import document, run
from tests.support.paths import ROOT
from tests.support.small_models import FOLDER, save

MODELS = ("attention", "opaques", "conv_chain", "norms")
GRAPHS = re.findall(r"```tap\n(.*?)```", (ROOT / "docs" / "grammar.md").read_text(), re.DOTALL)


@cache
def built(name: str) -> Path:
    """A build of a small model for two devices."""
    folder = FOLDER / f"schemas-{name}"
    api.compile(save(name), devices=2, topology="cpu").save(folder)
    return folder


def documents(name: str) -> dict[str, Any]:
    """The documents of a build, by schema."""
    graph = store.read(built(name))[0].plan.graph
    log = rewrite_log.read((built(name) / store.REWRITES).read_bytes(), name)
    plan = json.loads((built(name) / "plan.json").read_text())
    found = {"plan": plan, "ir": to_document(graph), "history": history.to_document(log, graph)}
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_those_of_the_code(name: str):
    assert file_of(name).read_text() == schema(name), "python -m tests.docs.update --generated"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_builds_keep_to_the_schemas(name: str):
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    for kind, found in documents(name).items():
        known = json.loads(file_of(kind).read_text())
        validator.check_schema(known)
        validator(known).validate(found)
        assert not validator(known).is_valid({**found, "more": 1}), "a key that nobody knows"
        assert not validator(known).is_valid({k: v for k, v in found.items() if k != next(iter(found))})


# the IR as a document


@pytest.mark.parametrize("text", GRAPHS)
def test_every_graph_of_the_grammar_reads_back(text: str):
    graph = parse(text)
    again = from_document(json.dumps(to_document(graph)))
    assert again == graph and to_text(again) == to_text(graph)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_plans_graph_reads_back(name: str, tmp_path: Path):
    graph = store.read(built(name))[0].plan.graph
    done = document("export", built(name), "--format", "ir", "-o", tmp_path / "g.json")
    assert done["operations"] == len(graph.ops) and from_document((tmp_path / "g.json").read_bytes()) == graph
    document("export", built(name), "--format", "ir", "-o", tmp_path / "g.tap")
    assert parse((tmp_path / "g.tap").read_text()) == graph
    shown = document("opt", tmp_path / "g.json")
    assert shown["graph"] == to_text(graph) and from_document(json.dumps(shown["document"])) == graph


def edited(found: Any, pointer: str, value: Any) -> str:
    """A document with the part at a pointer replaced."""
    copy = json.loads(json.dumps(found))
    *path, last = [int(p) if p.isdigit() else p for p in pointer.split("/")[1:]]
    at = copy
    for p in path:
        at = at[p]
    at[last] = value
    return json.dumps(copy)


FAULTS = {
    "/operations/0/reads/1/index/0": "m +",
    "/operations/0/reads/0/tensor": "nowhere",
    "/operations/0/body/0": "x * nothing",
    "/operations/0/then/0": "max(acc0, 0)",
    "/operations/0/monoid": "median",
    "/operations/0/id": "z",
    "/operations/0/dims/1/size": "three",
    "/inputs/1/dtype": "f31",
    "/outputs/0": "z",
    "/schema": "tapestry-ir/9",
}


@pytest.mark.parametrize("pointer", FAULTS)
def test_a_fault_in_a_graph_is_pointed_at(pointer: str, tmp_path: Path):
    graph = parse(next(t for t in GRAPHS if t.startswith("graph linear")))
    text = edited(to_document(graph), pointer, FAULTS[pointer])
    with pytest.raises(TextError) as e:
        from_document(text)
    assert e.value.pointer == pointer
    (tmp_path / "g.json").write_text(text)
    status, out, err = run("opt", tmp_path / "g.json", "--json")
    assert status == 2 and json.loads(out)["pointer"] == pointer and f"at: {pointer}" in err


@pytest.mark.parametrize("pointer", ["/program/steps/1", "/strategies/0", "/peak_bytes/0", "/mesh/0"])
def test_a_fault_in_a_plan_is_pointed_at(pointer: str):
    text = edited(json.loads((built("norms") / "plan.json").read_text()), pointer, "odd")
    with pytest.raises(BuildError) as e:
        store.decode(text.encode())
    assert e.value.pointer == pointer


def test_a_broken_law_is_pointed_at():
    build, _ = store.read(built("attention"))
    program = build.program
    at = next(k for k, s in enumerate(program.steps) if isinstance(s, Launch) and len([b for b in s.ins if b]) > 1)
    plan = json.loads((built("attention") / "plan.json").read_text())
    ins = plan["program"]["steps"][at]["ins"]
    last = max(k for k, b in enumerate(ins) if b)
    first = next(b for b in ins if b != ins[last])
    wrong = store.decode(edited(plan, f"/program/steps/{at}/ins/{last}", first).encode())
    with pytest.raises(LawError) as e:
        certificate.check(wrong.plan.annotated(), wrong.program, places=wrong.plan.places)
    assert e.value.pointer == f"/program/steps/{at}/ins/{last}"


# the history of rewrites


def operations(graph: Graph) -> list[str]:
    return sorted(op_text(op, graph) for op in graph.ops)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_history_replays_to_the_plans_graph(name: str, tmp_path: Path):
    plan = store.read(built(name))[0].plan.graph
    told = document("export", built(name), "--format", "history", "-o", tmp_path / "h.json")
    done = document("opt", "--replay", tmp_path / "h.json")
    again = parse(done["graph"])
    assert told["steps"] == done["steps"] and told["end_sha256"] == done["end_sha256"]
    assert operations(again) == operations(plan) and (again.inputs, again.outputs) == (plan.inputs, plan.outputs)
    assert again.weights == plan.weights
    _, laws, _ = run("verify", built(name), "--json")
    assert json.loads(laws)["rewrites"]["shown"] == done["shown"], "proved forwards as backwards"
    begin = parse(json.loads((tmp_path / "h.json").read_text())["begin"])
    assert len(begin.ops) >= len(again.ops)


@pytest.mark.parametrize("name", MODELS)
def test_ids_stay_through_rewrites(name: str):
    found = documents(name)
    ids = [op.outs[0] for op in parse(found["history"]["begin"]).ops]
    assert len({*ids}) == len(ids)
    for step in found["history"]["steps"]:
        assert {*step["gone"], *step["kept"]} <= {*ids}
        read = {t for op in parse(step["after"]).ops for t in op.inputs} | {*parse(step["after"]).outputs}
        needed = {*parse(step["before"]).outputs}
        assert needed <= read | {*step["come"]} | {t for op in parse(step["after"]).ops for t in op.outs}
        ids = [i for i in ids if i not in step["gone"]] + step["come"]
        assert len({*ids}) == len(ids)
    assert {*ids} == {op["id"] for op in found["ir"]["operations"]}


@pytest.mark.parametrize(
    ("edit", "pointer"),
    [
        (lambda h: h["steps"].pop(), "/end_sha256"),
        (lambda h: h["steps"].reverse(), "/steps/1"),  # (the last one can be the first)
        (lambda h: h["steps"][1].update(after=h["steps"][1]["after"].replace(" + ", " - ")), "/steps/1"),
        (lambda h: h["steps"][0].update(after="graph g"), "/steps/0/after"),
        (lambda h: h.update(begin=h["begin"].replace(" + ", " - ", 1)), "/begin_sha256"),
        (lambda h: h["steps"][0].update(more=1), "/steps/0"),
        (lambda h: h.update(schema="other/1"), "/schema"),
    ],
)
def test_a_wrong_history_is_refused(edit: Any, pointer: str):
    found = documents("attention")["history"]
    assert len(found["steps"]) > 1 and " + " in found["begin"] and " + " in found["steps"][1]["after"]
    edit(found)
    with pytest.raises(TapestryError) as e:
        history.from_document(json.dumps(found).encode(), "h.json")
    assert e.value.pointer == pointer
