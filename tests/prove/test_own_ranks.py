"""``prove`` on what ``export --format onnx-ranks`` writes: right ones are proved, and stay refuted with a fault put in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import tapestry
from tapestry.exports import rank_onnx
from tapestry.prove.verdict import PROVED, REFUTED, UNDECIDED, Verdict, prove

HEAD = '<ir_version: 9, opset_import: ["" : 18]>\n'
LOOKED_UP = """g (int64[4, 6] ids) => (float[4, 6, 8] y) {
  e = Gather(table, ids)
  u = MatMul(e, up)
  three = Constant<value = float {3.0}>()
  r = Mul(u, three)
  h = Relu(r)
  d = MatMul(h, down)
  y = Add(e, d)
}"""
WEIGHTS = {"table": (10, 8), "up": (8, 16), "down": (16, 8)}
BUCKETS = """g (float[4, 64] x) => (float[4, 32] y) <float[1] eight = {8}, float[1] width = {2.7725887298583984}> {
  one = Constant<value = int64 {8}>()
  end = Constant<value = int64 {40}>()
  step = Constant<value = int64 {1}>()
  r = Range(one, end, step)
  f = Cast<to = 1>(r)
  d = Div(f, eight)
  l = Log(d)
  q = Div(l, width)
  b = Mul(q, eight)
  i = Cast<to = 7>(b)
  y = Gather<axis = 1>(x, i)
}"""


def saved(text: str, path: Path, weights: dict[str, tuple[int, ...]]) -> Path:
    """A model in a file, with random weights."""
    model, rng = parser.parse_model(HEAD + text), np.random.default_rng(0)
    data = {n: rng.standard_normal(s).astype(np.float32) for n, s in weights.items()}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in data.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def ranks(model: Path, pins: list[str]) -> Path:
    """The folder of rank files of a plan for two devices."""
    c = tapestry.compile(model, mesh={"tp": 2}, topology="cpu", stages=1, pins=pins)
    rank_onnx.export(c.build, b"".join(c.constants.values()), model.parent / "ranks", nearest=True)
    return model.parent / "ranks"


CUTS = {
    "batch": ["e:x0=2@tp", "d:b0=2@tp"],
    "sequence": ["e:x1=2@tp"],
    "width": ["e:x2=2@tp", "u:n=2@tp", "d:m=2@tp"],
}


@pytest.mark.parametrize("way", CUTS)
def test_a_look_up_of_a_part_of_the_rows(way: str, tmp_path: Path) -> None:
    model = saved(LOOKED_UP, tmp_path / "m.onnx", WEIGHTS)
    verdict = prove(model, [ranks(model, CUTS[way])])
    assert verdict.status == PROVED, verdict.text()


def _constant(rank: onnx.ModelProto) -> None:
    t = next(t for t in rank.graph.initializer if numpy_helper.to_array(t).tolist() == 3.0)
    t.CopyFrom(numpy_helper.from_array(np.array(3.5, np.float32), t.name))


def _half(rank: onnx.ModelProto) -> None:
    t = next(t for t in rank.graph.initializer if t.name.startswith("down"))
    a = numpy_helper.to_array(t)
    t.CopyFrom(numpy_helper.from_array(np.concatenate([a[4:], a[:4]]), t.name))


def _sum(rank: onnx.ModelProto) -> None:
    node = next(n for n in rank.graph.node if n.op_type == "DistCollective" and b"REDUCE" in n.attribute[0].s)
    outs = [node.output[0], f"{node.output[0]}.rest"]
    node.CopyFrom(helper.make_node("Split", list(node.input), outs, name=node.name, axis=0, num_outputs=2))


@pytest.mark.parametrize("fault", [_constant, _half, _sum], ids=lambda f: f.__name__)
def test_a_fault_in_such_a_program_is_refuted(fault, tmp_path: Path) -> None:
    model = saved(LOOKED_UP, tmp_path / "m.onnx", WEIGHTS)
    folder = ranks(model, ["u:n=2@tp", "d:m=2@tp"])
    assert prove(model, [folder]).status == PROVED
    for file in folder.glob("*.onnx"):
        rank = onnx.load(file)
        fault(rank)
        onnx.save(rank, file)
    verdict = prove(model, [folder])
    assert verdict.status == REFUTED, verdict.text()
    assert f"y: rank {verdict.witness['rank']} has another value" in verdict.text()


def buckets(folder: Path) -> tuple[Path, Path]:
    model = saved(BUCKETS, folder / "m.onnx", {})
    return model, ranks(model, ["y:x0=2@tp"])


def test_an_index_that_comes_from_a_logarithm_is_not_refuted(tmp_path: Path) -> None:
    """8·log(16/8)/log(16) is 2.0 in float32, as the ranks have it, and a little less in float64."""
    model, folder = buckets(tmp_path)
    verdict = prove(model, [folder])
    assert verdict.status != REFUTED, verdict.text()
    assert verdict.status == PROVED or "'b' is computed in f32, near a step of Cast" in verdict.reason


def test_another_index_in_its_place_is_refuted(tmp_path: Path) -> None:
    model, folder = buckets(tmp_path)
    rank = onnx.load(folder / "rank0.onnx")
    table = next(t for t in rank.graph.initializer if numpy_helper.to_array(t).size == 32)
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table) + 1, table.name))
    onnx.save(rank, folder / "rank0.onnx")
    assert prove(model, [folder]).status == REFUTED


def test_what_is_undecided_is_said_in_one_voice(tmp_path: Path) -> None:
    """``2x`` and ``x + x``: no difference was seen, and none is said to be there."""
    weights: dict[str, tuple[int, ...]] = {}
    model = saved("g (float[4] x) => (float[4] y) { y = Add(x, x) }", tmp_path / "m.onnx", weights)
    text = "g (float[4] x) => (float[4] y) { two = Constant<value = float {2.0}>()\n y = Mul(x, two) }"
    verdict: Verdict = prove(model, [saved(text, tmp_path / "r" / "rank0.onnx", weights)])
    assert verdict.status == UNDECIDED
    assert "another value" not in verdict.text()
    assert "'y' of rank 0 is the first value that is not known as the model's; both were run on random input and agree" in (
        verdict.reason
    )
