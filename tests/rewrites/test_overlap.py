"""Two windows in one halo exchange: equal dependences, exact padding, found where latency dominates, refused with a reason."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import tapestry
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.base import contract
from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, cut, whole
from tapestry.ir.program import Transfer
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.onnx_eval.ort_session import ort_session
from tapestry.plan.search.planner import search
from tapestry.plan.strategy import Pin
from tapestry.plan.topology import parse_mesh, topology
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import Move, Refusal, parse_move
from tapestry.rewrites.core.rule_check import RuleCase, check_rule
from tapestry.verify import certificate, interp
from tests.support.lifting import build, data, node
from tests.support.triton_kernels import check, compare, footprint, from_torch, random_arrays, to_torch

WINDOWS = [(3, 1, 1), (3, 2, 1), (5, 1, 2), (4, 2, 0), (3, 1, 0)]  # kernel, stride, padding
KINDS = ["conv", "max"]


def window(kind: str, name: str, source: str, size: int, kernel: int, stride: int, pad: int) -> tuple[str, int]:
    """One operation along h, over two channels, five columns wide; and how many rows it writes."""
    out = (size + 2 * pad - kernel) // stride + 1
    place = f"{stride}*h + r - {pad}" if pad else f"{stride}*h + r"
    if kind == "conv":
        k = f"k{name}"
        return (
            f"""{name}: f32[1, 2, {out}, 5] = op [b: 1, o: 2, h: {out}, w: 5 | c: 2 sum, r: {kernel} sum, s: 3 sum]
  reads x = {source}[b, c, {place}, w + s - 1] else 0.0, k = {k}[o, c, r, s], e = bias[o]
  body x * k
  then max((acc0 + e), f32(0.0))""",
            out,
        )
    fill = " else -inf" if pad else ""
    return (
        f"""{name}: f32[1, 2, {out}, 5] = op [b: 1, c: 2, h: {out}, w: 5 | r: {kernel} max]
  reads x = {source}[b, c, {place}, w]{fill}
  body x""",
        out,
    )


def chain(first: tuple[str, tuple[int, int, int]], second: tuple[str, tuple[int, int, int]], size: int = 23) -> str:
    t, rows = window(first[0], "t", "x", size, *first[1])
    y, _ = window(second[0], "y", "t", rows, *second[1])
    kernels = "".join(
        f"input k{n}: f32[2, 2, {k}, 3]\n" for n, (kind, (k, _, _)) in (("t", first), ("y", second)) if kind == "conv"
    )
    bias = "input bias: f32[2]\n" if kernels else ""
    return f"graph two\ninput x: f32[1, 2, {size}, 5]\n{kernels}{bias}{t}\n{y}\noutput y\n"


def moved(text: str, parts: int) -> Graph:
    return apply_moves(parse(text), [parse_move(f"overlap@y{{tensor=t,dim=h,parts={parts}}}")])


PAIRS = [((a, v), (b, w)) for (a, b), v, w in itertools.product(itertools.product(KINDS, KINDS), WINDOWS[:4], WINDOWS[:4])]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("first,second", PAIRS[::3], ids=str)
def test_dependences_and_values_stay(first, second) -> None:
    """Blocks that divide the rows and blocks that do not; strides, paddings, no padding; convolution and pooling."""
    text = chain(first, second)
    rows = parse(text).tensors["y"].shape[2]
    moves = tuple(f"overlap@y{{tensor=t,dim=h,parts={p}}}" for p in (2, 3) if p <= rows)
    report = check_rule(RULES["overlap"], RuleCase(before=text, moves=moves), np.random.default_rng(0))
    assert len(report.moves) == len(moves)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first,second", PAIRS[1::5], ids=str)
def test_blocks_on_the_cpu(first, second, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block from buffers that hold its footprint alone; convolutions stay torch's convolutions."""
    calls: list[int] = []
    plain = contract.conv
    monkeypatch.setattr(contract, "conv", lambda *a: (calls.append(1), plain(*a))[1])
    graph = moved(chain(first, second), 3)
    values = random_arrays(graph)
    count, rows = graph.tensors["t.wide"].shape[2], graph.tensors["y"].shape[2]
    each = -(-rows // 3)
    for i, op in enumerate(graph.ops):
        assert isinstance(op, Block)
        one = replace(graph, ops=graph.ops[: i + 1], outputs=op.outs)
        want = interp.run(one, {n: values[n] for n in graph.inputs})[op.outs[0]]
        box = list(whole(tuple(d.size for d in op.space)))
        along = next(k for k, d in enumerate(op.dims) if d.name in ("k", "h"))
        for part in range(count):
            box[along] = (part, part + 1) if i == 0 else (part * each, min((part + 1) * each, rows))
            block = tuple(box)
            ins = tuple(footprint(graph, op, p, block, 0) for p in range(len(op.reads)))
            run = TorchCpu().kernel(graph, Kernel(op=i, mode="full", block=block, ins=ins, outs=(block[: len(op.dims)],)))
            held = [to_torch(values[r.tensor][tuple(slice(*s) for s in b)], "f32") for r, b in zip(op.reads, ins, strict=True)]
            got = from_torch(run(held, [])[0])
            compare(got, want[tuple(slice(a, b) for a, b in block[: len(op.dims)])], "f32")
        values[op.outs[0]] = want
    assert len(calls) == count * [first[0], second[0]].count("conv")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first,second", PAIRS[2::16], ids=str)
def test_triton_runs_them(first, second) -> None:
    check(to_text(moved(chain(first, second), 2)))


def test_rows_beyond_the_middle_tensor_are_the_readers_fill() -> None:
    """With a bias the first convolution is not zero beyond its end: the second must read its own padding there."""
    graph = moved(chain(("conv", (3, 1, 1)), ("conv", (3, 1, 1)), size=12), 4)
    values = {n: np.ones_like(a) for n, a in random_arrays(graph).items()}
    before = interp.run(parse(chain(("conv", (3, 1, 1)), ("conv", (3, 1, 1)), size=12)), values)["y"]
    np.testing.assert_array_equal(interp.run(graph, values)["y"], before)
    assert before[0, 0, 0, 2] < before[0, 0, 5, 2]


def test_refusals_say_why() -> None:
    text = chain(("conv", (3, 1, 1)), ("conv", (3, 1, 1)))

    def reasons(source: str) -> list[str]:
        return [f"{r.reason} ({r.witness})" for r in RULES["overlap"].find(parse(source)) if isinstance(r, Refusal)]

    assert (
        reasons(text.replace("output y", "output y, t"))
        == ["'t' has other readers, which need it as it is (it is an output)"] * 2
    )
    assert reasons(chain(("conv", (3, 1, 1)), ("max", (4, 4, 0)))) == [
        "windows along 'h' do not overlap (each is 4 wide, and 4 from the next)"
    ]
    with pytest.raises(TapestryError, match="cannot be cut into 99 blocks"):
        moved(text, 99)
    split = apply_moves(parse(text), [parse_move("split@t{dim=h,parts=2,to=time}")])
    assert all(isinstance(r, Refusal) for r in RULES["overlap"].find(split))
    assert sum(isinstance(m, Move) for m in RULES["overlap"].find(parse(text))) == 2  # rows and columns


def model(tmp_path: Path, channels: int, size: int) -> Path:
    rng = np.random.default_rng(0)
    w = {n: (rng.standard_normal((channels, channels, 3, 3)) / channels).astype(np.float32) for n in ("w1", "w2")}
    nodes = [node("Conv", "x w1", "a", pads=[1, 1, 1, 1]), node("Relu", "a", "r"), node("Conv", "r w2", "y", pads=[1, 1, 1, 1])]
    path = tmp_path / "two.onnx"
    onnx.save(build(nodes, {"x": data(1, channels, size, size)}, ["y"], w), path)
    return path


@pytest.mark.slow
def test_one_exchange_where_latency_dominates(tmp_path: Path) -> None:
    path = model(tmp_path, 16, 64)
    layouts = ["x:2=4@d0", "y:2=4@d0"]
    fast = tapestry.compile(path, devices=4, layouts=layouts, topology="a100-pcie")
    assert [(t["kind"], t["count"]) for t in fast.report["transfers"]] == [("halo", 1)]
    assert [m.split("{")[0] for m in fast.report["moves"]] == ["overlap@y"]
    x = data(1, 16, 64, 64, seed=5)
    want = ort_session(path).run(None, {"x": x})[0]
    np.testing.assert_allclose(fast.run({"x": x})["y"], want, rtol=1e-4, atol=1e-5)


def test_two_exchanges_where_arithmetic_does(tmp_path: Path) -> None:
    """On a slow processor, rows computed twice cost more than a message."""
    built = tapestry.compile(model(tmp_path, 64, 64), devices=4, layouts=["x:2=4@d0", "y:2=4@d0"], topology="cpu")
    assert not built.report["moves"]
    assert [(t["kind"], t["count"]) for t in built.report["transfers"]] == [("halo", 2)]


def test_a_halo_that_is_one_row_short_is_refused() -> None:
    graph = moved(chain(("conv", (3, 1, 1)), ("conv", (3, 1, 1)), size=24), 4)
    pins = {0: (Pin("k", 0),), 1: (Pin("h", 0),)}
    found = search(graph, topology(parse_mesh("4"), "a100-pcie"), pins=pins, inputs={"x": (2,)}, outputs={"y": (2,)})
    plan, program = found.plan.annotated(), found.program
    certificate.check(plan, program, mesh=found.plan.mesh)
    (at,) = (i for i, s in enumerate(program.steps) if isinstance(s, Transfer))
    halo = program.steps[at]
    assert isinstance(halo, Transfer) and halo.kind == "halo" and len(halo.messages) == 6
    for k, m in enumerate(halo.messages):
        (lo, hi), axis = m.box[2], 2
        assert hi - lo == 2 and cut(24, 4, m.src)[0] <= lo
        short = replace(m, box=(*m.box[:axis], (lo, hi - 1), *m.box[axis + 1 :]))
        step = replace(halo, messages=(*halo.messages[:k], short, *halo.messages[k + 1 :]))
        with pytest.raises(LawError, match="lacks cells"):
            certificate.check(
                plan, replace(program, steps=(*program.steps[:at], step, *program.steps[at + 1 :])), mesh=found.plan.mesh
            )
