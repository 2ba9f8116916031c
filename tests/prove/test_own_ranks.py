"""``prove`` on what ``export --format onnx-ranks`` writes: right ones are proved, and stay refuted with a fault put in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import tapestry
from tapestry.tools.exports import rank_onnx
from tapestry.tools.prove.verdict import PROVED, REFUTED, UNDECIDED, Verdict, prove

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


def saved(text: str, path: Path, weights: dict[str, tuple[int, ...]], cleared: bool = False, opset: int = 18) -> Path:
    """A model in a file, with random weights; ``cleared``: the output's shape is left to inference."""
    model, rng = parser.parse_model(HEAD.replace("18", str(opset)) + text), np.random.default_rng(0)
    data = {n: rng.standard_normal(s).astype(np.float32) for n, s in weights.items()}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in data.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    if cleared:
        model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    return path


def ranks(model: Path, pins: list[str]) -> Path:
    """The folder of rank files of a plan for two devices."""
    c = tapestry.compile(model, mesh={"tp": 2}, topology="cpu", stages=1, pins=pins)
    rank_onnx.export_ranks(c.build, b"".join(c.constants.values()), model.parent / "ranks", nearest=True)
    return model.parent / "ranks"


CUTS = {
    "batch": ["e:x0=2@tp", "d:b0=2@tp"],
    "sequence": ["e:x1=2@tp"],
    "width": ["e:x2=2@tp", "u:n=2@tp", "d:m=2@tp"],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", CUTS)
def test_a_look_up_of_a_part_of_the_rows(way: str, tmp_path: Path) -> None:
    model = saved(LOOKED_UP, tmp_path / "m.onnx", WEIGHTS)
    verdict = prove(model, [ranks(model, CUTS[way])])
    assert verdict.status == PROVED, verdict.text()


PATCHES = """g (float[1, 8, 3, 5] x) => (float[1, 16, 8] y) {
  rows = Constant<value = int64[3] {1, 8, 15}>()
  r = Reshape(x, rows)
  t = Transpose<perm = [0, 2, 1]>(r)
  c = Concat<axis = 1>(first, t)
  p = Add(c, places)
  n = LayerNormalization(p, scale)
  k = Transpose<perm = [0, 2, 1]>(n)
  s = MatMul(n, k)
  w = Softmax(s)
  y = MatMul(w, n)
}"""
ROTATED = """g (float[2, 4, 6, 8] x) => (float[2, 4, 6, 8] y) {
  e = Exp(x)
  r = RotaryEmbedding(e, cos, sin)
  y = Relu(r)
}"""
PIECES = {
    "a row before those of an image, cut by rows": (
        PATCHES, {"first": (1, 1, 8), "places": (1, 16, 8), "scale": (8,)},
        ["p:x1=2@tp", "y:i=2@tp"],
    ),
    "rotated halves, cut by heads": (ROTATED, {"cos": (2, 6, 4), "sin": (2, 6, 4)}, ["e:x1=2@tp", "y:x1=2@tp"]),
    "rotated halves, cut by batch": (ROTATED, {"cos": (2, 6, 4), "sin": (2, 6, 4)}, ["e:x0=2@tp", "y:x0=2@tp"]),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", PIECES)
def test_reads_that_begin_inside_a_row(what: str, tmp_path: Path) -> None:
    """The second rank of the first has no cell of what the model puts before the image."""
    text, weights, pins = PIECES[what]
    model = saved(text, tmp_path / "m.onnx", weights, opset=23)
    verdict = prove(model, [ranks(model, pins)])
    assert verdict.status == PROVED, verdict.text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", PIECES)
def test_pieces_in_another_order_are_refuted(what: str, tmp_path: Path) -> None:
    text, weights, pins = PIECES[what]
    model = saved(text, tmp_path / "m.onnx", weights, opset=23)
    folder = ranks(model, pins)
    file = onnx.load(folder / "rank0.onnx")
    joined = next(n for n in file.graph.node if n.op_type == "Concat")
    joined.input[:] = reversed(joined.input)
    onnx.save(file, folder / "rank0.onnx")
    assert prove(model, [folder]).status == REFUTED


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


@pytest.mark.sampled(1)
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


RIGHT = {
    "a row that has no value": (
        "float[4, 6] x, float[6, 3] v", "s = Softmax(x)\n n = IsNaN(s)\n z = Constant<value = float {0.0}>()\n"
        "w = Where(n, z, s)\n y = MatMul(w, v)",
        "s = Softmax(x)\n y = MatMul(s, v)",
    ),
    "a mask on one side of a diagonal": (
        "float[4, 4] x", "y = Trilu<upper = 0>(x)",
        "m = Constant<value = bool[4, 4] {1,0,0,0, 1,1,0,0, 1,1,1,0, 1,1,1,1}>()\n"
        "z = Constant<value = float {0.0}>()\n y = Where(m, x, z)",
    ),
    "places that are floats": (
        "float[4] x", "o = Constant<value = int64 {3}>()\n n = Constant<value = int64 {7}>()\n"
        "l = Constant<value = int64 {1}>()\n q = Range(o, n, l)\n f = Cast<to = 1>(q)\n y = Mul(x, f)",
        "i = Constant<value = int64[4] {3, 4, 5, 6}>()\n f = Cast<to = 1>(i)\n y = Mul(x, f)",
    ),
    "a scale that is put off": (
        "float[4, 6] x, float[6, 3] v", "c = Constant<value = float {0.3}>()\n a = Mul(x, c)\n b = Mul(v, c)\n y = MatMul(a, b)",
        "c = Constant<value = float {0.09000000357627869}>()\n s = MatMul(x, v)\n y = Mul(s, c)",
    ),
    "columns of windows": (
        "float[1, 2, 6] x, float[3, 2, 3] v", "y = Conv(x, v)",
        "a = Constant<value = int64[4, 3] {0,1,2, 1,2,3, 2,3,4, 3,4,5}>()\n"
        "one = Constant<value = int64[6] {0,0,0,1,1,1}>()\n"
        "s = Constant<value = int64[2] {3, 6}>()\n w = Reshape(v, s)\n u = Gather<axis = 2>(x, a)\n"
        "t = Transpose<perm = [0, 2, 1, 3]>(u)\n c = Constant<value = int64[3] {1, 4, 6}>()\n f = Reshape(t, c)\n"
        "o = Transpose<perm = [1, 0]>(w)\n m = MatMul(f, o)\n y = Transpose<perm = [0, 2, 1]>(m)",
    ),
    "a bias that is added later": (
        "float[2, 3, 4] x, float[3, 2, 2] v, float[2] b", "y = ConvTranspose<strides = [2]>(x, v, b)",
        "c = ConvTranspose<strides = [2]>(x, v)\n s = Constant<value = int64[2] {2, 1}>()\n d = Reshape(b, s)\n y = Add(c, d)",
    ),
    "a number as its type has it": (
        "float[4, 6] x, float[6] s", "y = LayerNormalization(x, s)", "y = LayerNormalization<epsilon = 0.00001>(x, s)",
    ),
    "a greatest value that there is": (
        "float[4, 6] x", "l = Constant<value = int64[1] {1}>()\n m = ReduceMax(x, l)\n i = Constant<value = float {inf}>()\n"
        "g = Neg(i)\n q = Equal(m, g)\n z = Constant<value = float {0.0}>()\n k = Where(q, z, m)\n d = Sub(x, k)\n y = Exp(d)",
        "l = Constant<value = int64[1] {1}>()\n m = ReduceMax(x, l)\n d = Sub(x, m)\n y = Exp(d)",
    ),
    "nothing beyond a place that is asked for": (
        "float[4, 6] x", "m = Constant<value = bool[6] {0,0,1,1,1,1}>()\n z = Constant<value = float {0.0}>()\n y = Where(m, x, z)",
        "m = Constant<value = bool[6] {0,0,1,1,1,1}>()\n w = Constant<value = bool[6] {0,1,1,1,1,1}>()\n"
        "z = Constant<value = float {0.0}>()\n i = Where(w, x, z)\n y = Where(m, i, z)",
    ),
}  # fmt: skip
CHANGES = {
    "a mask on one side of a diagonal": ("1,1,1,0, 1", "1,1,1,1, 1"),
    "places that are floats": ("3, 4, 5, 6", "3, 4, 5, 7"),
    "a scale that is put off": ("0.09000000357627869", "0.091"),
    "columns of windows": ("2,3,4", "2,3,5"),
    "a bias that is added later": ("c, d", "c, c"),
    "nothing beyond a place that is asked for": ("0,1,1,1", "0,0,0,1"),
}


def _pair(what: str, folder: Path, change: tuple[str, str] = ("", "")) -> Verdict:
    ins, model, rank = RIGHT[what]
    head = f"g ({ins}) => (float y) {{\n"
    assert change[0] in rank
    files = {"m.onnx": model, "r/rank0.onnx": rank.replace(*change)}
    m, r = (saved(head + text + "\n}", folder / name, {}, cleared=True) for name, text in files.items())
    return prove(m, [r.parent])


@pytest.mark.parametrize("what", RIGHT)
def test_what_a_compiler_writes_otherwise_is_proved(what: str, tmp_path: Path) -> None:
    verdict = _pair(what, tmp_path)
    assert verdict.status == PROVED, verdict.text()


@pytest.mark.parametrize("what", CHANGES)
def test_and_something_else_in_its_place_is_refuted(what: str, tmp_path: Path) -> None:
    verdict = _pair(what, tmp_path, CHANGES[what])
    assert verdict.status == REFUTED, verdict.text()


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
