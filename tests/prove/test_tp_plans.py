"""Tensor-parallel plans of transformers' kind, applied to a model: right ones are proved, others are refuted or cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tapestry.cli.entry import main
from tapestry.errors import TapestryError
from tapestry.tools.prove.verdict import PROVED, REFUTED, Verdict, prove
from tests.support.parallel_nets import Sizes, Style, write

SIZES = Sizes(batch=2, sequence=4, width=16, inner=16, layers=2, vocabulary=8)
COLUMNS, ROWS = ("q", "k", "v", "up", "gate"), ("o", "down")
MEGATRON = {f"l*.{n}": "colwise" for n in COLUMNS} | {f"l*.{n}": "rowwise" for n in ROWS}


def decided(net: str, plan: dict[str, str], folder: Path, ranks: int = 2) -> Verdict:
    model, _ = write(net, Style(), folder / net, SIZES)
    (folder / "plan.json").write_text(json.dumps({"mesh": {"tp": ranks}, "tp_plan": plan}))
    return prove(model, [folder / "plan.json"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_right_plan_is_proved(ranks: int, tmp_path: Path) -> None:
    """Attention and a gated feed-forward part; then with the head's columns, gathered; then with biases."""
    verdict = decided("decoder", MEGATRON, tmp_path, ranks)
    assert verdict.status == PROVED, verdict.text()
    assert verdict.document["collectives"] == 4 * ranks
    gathered = decided("decoder", {**MEGATRON, "head": "colwise_rep"}, tmp_path, ranks)
    assert gathered.status == PROVED and gathered.document["collectives"] == 5 * ranks
    biased = {k: v for k, v in MEGATRON.items() if "gate" not in k}
    biased |= {f"{k}.b": v for k, v in biased.items()}
    assert decided("encoder", biased, tmp_path, ranks).status == PROVED


def test_a_pattern_of_nothing_is_named(tmp_path: Path) -> None:
    verdict = decided("decoder", {**MEGATRON, "embed": "embedding_rowwise"}, tmp_path)
    assert verdict.status == PROVED and "the plan's 'embed' is of nothing in the model" in verdict.document["assumed"]


def test_styles_that_stand_alone(tmp_path: Path) -> None:
    """Columns that are gathered at once, bias and all, and rows of an input that every rank has whole."""
    plan = {"l*.a": "colwise_rep", "l*.a.b": "colwise_rep", "l*.b": "rowwise_rep", "l*.b.b": "rowwise_rep"}
    verdict = decided("mlp", plan, tmp_path)
    assert verdict.status == PROVED, verdict.text()
    assert verdict.document["collectives"] == 8


def test_a_table_whose_columns_are_cut(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32), "embed.weight")
    ends = [helper.make_tensor_value_info("ids", 7, [2, 3]), helper.make_tensor_value_info("y", 1, [2, 3, 6])]
    graph = helper.make_graph([helper.make_node("Gather", ["embed.weight", "ids"], ["y"])], "g", ends[:1], ends[1:], [table])
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    (tmp_path / "plan.json").write_text(json.dumps({"embed": "embedding_colwise"}))
    verdict = prove(tmp_path / "m.onnx", [tmp_path / "plan.json"])
    assert verdict.status == PROVED and verdict.document["collectives"] == 2, verdict.text()


def fused(folder: Path) -> Path:
    """Queries, keys and values in one weight: a cut of its columns is a part of none of them."""
    rng = np.random.default_rng(0)
    data = {"attn.qkv.weight": (8, 24), "attn.out.weight": (8, 8)}
    weights = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in data.items()]
    weights.append(numpy_helper.from_array(np.array([8, 8, 8]), "sizes"))
    nodes = [
        helper.make_node("MatMul", ["x", "attn.qkv.weight"], ["qkv"]),
        helper.make_node("Split", ["qkv", "sizes"], ["q", "k", "v"], axis=-1),
        helper.make_node("Mul", ["q", "k"], ["s"]), helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("Mul", ["p", "v"], ["h"]), helper.make_node("MatMul", ["h", "attn.out.weight"], ["y"]),
    ]  # fmt: skip
    info = [helper.make_tensor_value_info(n, 1, [4, 8]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], weights)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), folder / "fused.onnx")
    return folder / "fused.onnx"


def test_a_wrong_plan_is_refuted_with_a_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan as transformers has it, without a number of ranks: two."""
    model, plan = fused(tmp_path), tmp_path / "plan.json"
    plan.write_text(json.dumps({"attn.qkv": "colwise", "attn.out": "rowwise"}))
    verdict = prove(model, [plan])
    assert verdict.status == REFUTED and verdict.document["ranks"] == 2
    assert verdict.witness is not None and verdict.witness["tensor"] == "y"
    assert main(["prove", str(model), str(plan), "-q"]) == 1
    plan.write_text(json.dumps({"attn.qkv": "colwise_rep", "attn.out": "rowwise_rep"}))
    assert main(["prove", str(model), str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proved"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"l*.nowhere": "colwise"}, "not in the model"),
        ({**MEGATRON, "head": "sequence_parallel"}, "is not known"),
        ({k: v for k, v in MEGATRON.items() if "gate" not in k}, "cannot run it on its parts"),
        ({"head": "colwise", "l*.q": "rowwise_rep", "norm": "rowwise"}, ""),
    ],
)
def test_a_plan_that_cannot_be_applied_says_where(plan: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(TapestryError, match=said or None):
        decided("decoder", plan, tmp_path, 3 if not said else 2)
