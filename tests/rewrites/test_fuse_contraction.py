"""Contractions inside the reductions that read them: pools behind convolutions, reductions of logits."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import generate
from tapestry.codegen.triton.kernel_config import candidates, default_config
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.errors import TapestryError
from tapestry.ir import laws
from tapestry.ir.graph import Block, Graph
from tapestry.ir.recognition.contraction import folded_roles
from tapestry.ir.syntax.parser import parse
from tapestry.lift import lift, read_weight
from tapestry.plan.fusion import Machine, fused
from tapestry.plan.lower import lower
from tapestry.plan.topology.presets import SOURCES
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import Move, Refusal
from tapestry.rewrites.core.rule_check import same
from tapestry.runtime.feeds import random_feeds
from tapestry.verify import certificate, interp
from tapestry.verify.rewriting.proofs import prove_step
from tests.support.small_models import FOLDER, Case, N, assert_same, execute, f32, i64, mesh_of, net, random_plan
from tests.support.triton_kernels import check, compare, kernel_of, poisoned_lanes, run_kernel  # noqa: F401

RULE = RULES["fuse_contraction"]
GPU = Machine(device=SOURCES["h100"].device, eager=False)
CPU = Machine(device=SOURCES["cpu"].device, eager=True)
WINDOW: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}


def image(*after: onnx.NodeProto, channels: int = 5, size: int = 9, kernel: int = 3, stride: int = 1) -> onnx.ModelProto:
    """A convolution with bias, normalised and clamped or not, and what follows it."""
    pad, out = kernel // 2, 8
    weights = {"k": f32(out, channels, kernel, kernel), "c": f32(out), "g": f32(out), "v": np.abs(f32(out)) + 1}
    weights |= {"r": f32(2, out, size, size)}
    conv = N("Conv", ["x", "k", "c"], ["t0"], kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)
    return net([conv, *after], {"x": (T.FLOAT, [2, channels, size, size])}, {"y": T.FLOAT}, weights)


def logits(*after: onnx.NodeProto, kind: int = T.FLOAT, vocabulary: int = 77, rows: int = 11) -> onnx.ModelProto:
    weights = {"w0": f32(vocabulary), "w": f32(24, vocabulary), "c": f32(vocabulary), "one": i64(1), "zero": i64(0)}
    return net([N("Gemm", ["x", "w", "c"], ["t"]), *after], {"x": (T.FLOAT, [rows, 24])}, {"y": kind}, weights)


BN = N("BatchNormalization", ["t0", "g", "c", "c", "v"], ["t1"])
MODELS = {
    "conv, norm, relu, pool": lambda: image(BN, N("Relu", ["t1"], ["t"]), N("MaxPool", ["t"], ["y"], kernel_shape=[2, 2], strides=[2, 2])),
    "stem": lambda: image(N("MaxPool", ["t0"], ["y"], **WINDOW), channels=3, kernel=7, stride=2, size=19),
    "average": lambda: image(N("AveragePool", ["t0"], ["y"], **WINDOW)),
    "average with pads": lambda: image(N("Relu", ["t0"], ["t"]), N("AveragePool", ["t"], ["y"], count_include_pad=1, **WINDOW)),
    "places of maxima": lambda: image(N("MaxPool", ["t0"], ["z", "y0"], **WINDOW), N("Cast", ["y0"], ["y"], to=T.FLOAT)),
    "residual, mean": lambda: image(
        N("Add", ["t0", "r"], ["t1"]), N("Relu", ["t1"], ["t"]), N("GlobalAveragePool", ["t"], ["y"]), kernel=1, channels=16
    ),
    "global maximum": lambda: image(N("GlobalMaxPool", ["t0"], ["y"])),
    "argmax": lambda: logits(N("ArgMax", ["t"], ["y"], axis=1, keepdims=0), kind=T.INT64),
    "argmin": lambda: logits(N("ArgMin", ["t"], ["y"], axis=1, keepdims=1), kind=T.INT64, vocabulary=300),
    "log-sum-exp": lambda: logits(N("ReduceLogSumExp", ["t", "one"], ["y"], keepdims=0), vocabulary=300),
    "maximum": lambda: logits(N("Tanh", ["t"], ["u"]), N("ReduceMax", ["u", "one"], ["y"])),
    "sum": lambda: logits(N("Relu", ["t"], ["u"]), N("ReduceSum", ["u", "one"], ["y"])),
    "product": lambda: logits(N("Tanh", ["t"], ["u"]), N("ReduceProd", ["u", "one"], ["y"]), vocabulary=33),
    "norm": lambda: logits(N("ReduceL2", ["t", "one"], ["y"])),
    "layer norm": lambda: logits(N("LayerNormalization", ["t", "w0", "c"], ["y"]), vocabulary=40),
    "mean square norm": lambda: logits(
        N("Mul", ["t", "t"], ["t2"]), N("ReduceMean", ["t2", "one"], ["m"]), N("Sqrt", ["m"], ["s"]), N("Div", ["t", "s"], ["y"]),
        vocabulary=33,
    ),
    "softmax": lambda: logits(N("Softmax", ["t"], ["y"], axis=1), vocabulary=64),
    "mean over rows": lambda: logits(N("ReduceMean", ["t", "zero"], ["y"]), rows=43),
}  # fmt: skip


@cache
def fuse(name: str) -> tuple[Case, Graph]:
    """A model's case with its contraction inside the reduction that reads it, and the graph before."""
    path = FOLDER / f"contraction {list(MODELS).index(name)}.onnx"
    path.write_bytes(MODELS[name]().SerializeToString())
    lifted = lift(path)
    graph = simplify(lifted.graph)
    (move,) = RULE.find(graph)
    assert isinstance(move, Move), move
    new = simplify(RULE.apply(graph, move))
    feeds = random_feeds(graph, 3)
    weights = {t: read_weight(lifted.model, w, graph.tensors[t], constants=lifted.constants) for t, w in graph.weights.items()}
    return Case(path, new, feeds, weights, interp.run(graph, {**feeds, **weights}, wide=True)), graph


@pytest.mark.parametrize("name", MODELS)
def test_values_and_dependences_stay(name: str) -> None:
    c, graph = fuse(name)
    assert len(c.graph.ops) < len(graph.ops)
    laws.check(c.graph)
    assert same(graph, c.graph, {**c.feeds, **c.weights}, name) == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_one_kernel_with_a_product_in_tiles(name: str) -> None:
    c, _ = fuse(name)
    have = {**c.feeds, **c.weights}
    for i, op in enumerate(c.graph.ops):
        if isinstance(op, Block) and op.inner:
            source = generate(c.graph, kernel_of(c.graph, i)).source
            assert "tl.dot(" in source and kernel_form(c.graph, kernel_of(c.graph, i)).kind == "folded"
        have.update(zip(op.outs, run_kernel(c.graph, i, have), strict=True))
    for t in c.graph.outputs:
        compare(have[t], c.expected[t], c.graph.tensors[t].dtype)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["1", "2", "3", "2x2"])
def test_any_plan_on_the_cpu(name: str, mesh: str) -> None:
    """Cut along map dimensions and along reduced ones, on the target that runs operators."""
    c, _ = fuse(name)
    for seed in range(1 if mesh in ("1", "2") else 2):
        plan = random_plan(c.graph, mesh_of(mesh), random.Random(f"{name} {mesh} {seed}"))
        program = lower(plan)
        certificate.check(plan.annotated(), program, places=plan.places)
        found, _ = execute(c.graph, program, c)
        assert_same(found, c.expected, c.graph, (name, mesh, seed))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["conv, norm, relu, pool", "residual, mean", "argmax", "log-sum-exp", "layer norm"])
def test_blocks_and_states_on_triton(name: str) -> None:
    """A part of the reduced dimensions gives partial states; merged and finished they are the result."""
    c, _ = fuse(name)
    at = next(i for i, op in enumerate(c.graph.ops) if isinstance(op, Block) and op.inner)
    op, values = c.graph.ops[at], {**c.feeds, **c.weights}
    assert isinstance(op, Block) and op.monoid
    n = len(op.dims)
    halves = [[(0, d.size) for d in op.space] for _ in range(2)]
    d = op.reduce[0].size
    halves[0][n], halves[1][n] = (0, d // 2), (d // 2, d)
    states = [run_kernel(c.graph, at, values, mode="partial", block=tuple(h)) for h in halves]
    merged = interp.Arrays(c.graph, wide=False).merge(
        op.monoid, tuple(e.dtype for e in op.body), *([np.asarray(f) for f in s] for s in states)
    )
    whole = run_kernel(c.graph, at, values, mode="finish", states=merged)
    want = interp.run(c.graph, values, wide=True)
    for t, a in zip(op.outs, whole, strict=True):
        if t in want:
            compare(a, want[t], c.graph.tensors[t].dtype)
    box = tuple((min(1, d.size - 1), d.size) for d in op.dims) + tuple((0, d.size) for d in op.space[n:])
    found = kernel_form(c.graph, replace(kernel_of(c.graph, at), block=box, outs=(box[:n],) * len(op.outs)))
    assert found.folded is not None and (found.folded.row is not None) == (name == "layer norm")
    part = run_kernel(c.graph, at, values, block=box, extra=1)
    full = run_kernel(c.graph, at, values)
    for a, b, t in zip(part, full, op.outs, strict=True):
        compare(a, b[tuple(slice(lo, hi) for lo, hi in box[:n])], c.graph.tensors[t].dtype)


def columns(dtype: str, monoid: str, body: str, then: str, kind: str = "", rows: int = 19, n: int = 72) -> str:
    """A reduction of logits, with a bias; rows of the weights are multiples of 16 bytes."""
    return f"""graph g input x: {dtype}[{rows}, 64] input w: {dtype}[64, {n}] input c: {dtype}[{n}]
        y: {kind or dtype}[{rows}] = op [i: {rows} | n: {n} {monoid}] reads x[i, m], w[m, n], c[n]
          let [m: 64 sum] cast(x, f32) * cast(w, f32) body {body} then {then}
        output y"""


CASES = {
    "argmax": columns("f16", "argmax", "let0 + cast(c, f32), index(n)", "acc1", "i64"),
    "logsumexp": columns("bf16", "logsumexp", "let0 + cast(c, f32), 1.0", "log(acc1) + acc0", "f32"),
    "moments": columns("f16", "moments", "1.0, let0, 0.0", "acc2 / acc0", "f32"),
    "max": columns("f16", "max", "max(let0, cast(c, f32))", "acc0", "f32"),
    "sum and maximum": columns("f16", "sum.max", "let0, abs(let0)", "acc0 / acc1", "f32"),
    "pool": """graph g input x: f16[2, 32, 9, 11] input k: f16[24, 32, 3, 3]
        y: f32[2, 24, 5, 6] = op [b: 2, o: 24, p: 5, q: 6 | e: 2 max, f: 2 max]
          reads x[b, c, 2*p + e + r - 1, 2*q + f + s - 1] else 0.0, k[o, c, r, s]
          let [c: 32 sum, r: 3 sum, s: 3 sum] cast(x, f32) * cast(k, f32) body let0
        output y""",
    "mean": """graph g input x: f16[3, 32, 8, 8] input k: f16[72, 32] input r: f16[3, 72, 8, 8]
        y: f32[3, 72] = op [b: 3, o: 72 | h: 8 sum, w: 8 sum] reads x[b, c, h, w], k[o, c], r[b, o, h, w]
          let [c: 32 sum] cast(x, f32) * cast(k, f32) body max(let0 + cast(r, f32), 0.0) then acc0 / 64.0
        output y""",
    "layer norm": """graph g input x: f16[3, 21, 64] input w: f16[64, 72] input g: f16[72] input r: f16[3, 21, 72]
        y: f16[3, 21, 72] = op [b: 3, i: 21, j: 72 | n: 72 moments.sum] reads x[b, i, m], w[m, n], g[j], r[b, i, j], s = r[b, i, n]
          let [m: 64 sum] cast(x, f32) * cast(w, f32)
          body 1.0, let0 + cast(s, f32), 0.0, where(eq(index(n), index(j)), let0 + cast(s, f32), 0.0)
          then cast((((acc3 - acc1) / sqrt((acc2 / acc0))) * cast(g, f32)) + cast(r, f32), f16)
        output y""",
    "norm of rounded rows": """graph g input x: bf16[21, 64] input w: bf16[64, 72]
        y: bf16[21, 72] = op [i: 21, j: 72 | n: 72 moments.sum] reads x[i, m], w[m, n]
          let [m: 64 sum] cast(x, f32) * cast(w, f32)
          body 1.0, cast(cast(let0, bf16), f32), 0.0, where(eq(index(n), index(j)), cast(cast(let0, bf16), f32), 0.0)
          then cast((cast(cast(acc3, bf16), f32) - acc1) / sqrt(acc2 / acc0), bf16)
        output y""",
    "taps and columns": """graph g input x: f16[4, 20, 3, 32] input w: f16[32, 80]
        y: f32[4, 20] = op [b: 4, i: 20 | t: 3 max, n: 80 max] reads x[b, i, t, m], w[m, n]
          let [m: 32 sum] cast(x, f32) * cast(w, f32) body let0
        output y""",
}
FORMS = {
    "plain": KernelConfig(bm=16, bn=16, bk=16),
    "wide": KernelConfig(bm=32, bn=64, bk=32),
    "descriptors": KernelConfig(bm=16, bn=32, bk=16, descriptors=True),
    "parts": KernelConfig(bm=16, bn=16, bk=16, split_k=4),
    "packed": KernelConfig(bm=16, bn=32, bk=16, packed=True),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_knob_gives_the_same(case: str, form: str) -> None:
    check(CASES[case], config=FORMS[form])


def test_forms_are_what_they_say() -> None:
    made = {f: generate(g := parse(CASES["argmax"]), kernel_of(g), FORMS[f]) for f in FORMS}
    assert "x_desc.load(" in made["descriptors"].source and len(made["parts"].passes) == 2 and len(made["plain"].passes) == 1
    pool = parse(CASES["pool"])
    assert len(generate(pool, kernel_of(pool), FORMS["packed"]).passes) > 1


def test_parts_fill_the_chip_where_rows_do_not() -> None:
    """A vocabulary is gone through by many programs, in parts that divide it, and merged by a second pass."""
    graph = parse(columns("f16", "argmax", "let0, index(n)", "acc1", "i64", rows=16, n=50257))
    found = kernel_form(graph, kernel_of(graph))
    config = default_config(found)
    assert config.split_k == 29 and 50257 % 29 == 0
    wide = parse(columns("f16", "max", "let0", "acc0", "f32", rows=32768, n=256))
    assert default_config(kernel_form(wide, kernel_of(wide))).split_k == 1
    assert all(k.bm * k.bn <= 128 * 128 for k in candidates(found) if k.descriptors)  # two fields are folded: fewer lanes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("monoid", ["max", "logsumexp", "argmax"])
def test_rows_without_a_number_or_without_anything(monoid: str) -> None:
    """A NaN wins, infinities count, and a row of minus infinity stays one, whatever the lanes past the end hold."""
    body = {"max": "let0 + c", "logsumexp": "let0 + c, 1.0", "argmax": "let0 + c, index(n)"}[monoid]
    then = {"max": "acc0", "logsumexp": "acc0 + log(acc1)", "argmax": "acc1"}[monoid]
    text = f"""graph g input x: f32[6, 20] input w: f32[20, 70] input c: f32[6, 70]
        y: {"i64" if monoid == "argmax" else "f32"}[6] = op [i: 6 | n: 70 {monoid}] reads x[i, m], w[m, n], c[i, n]
          let [m: 20 sum] x * w body {body} then {then} output y"""
    rng = np.random.default_rng(4)
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in parse(text).tensors.values() if t.name != "y"}
    values["c"][1, 68] = np.nan
    values["c"][2] = -np.inf
    values["c"][3, 5] = np.inf
    values["x"][4, 3] = np.nan
    values["c"][5, [10, 60]] = np.nan
    found = check(text, values)["y"]
    if monoid == "argmax":
        assert list(found[[1, 3, 4, 5]]) == [68, 5, 0, 10]
    else:
        assert np.isnan(found[[1, 4, 5]]).all() and found[3] == np.inf and not np.isfinite(found[2])


def test_what_pads_of_a_pool_are() -> None:
    """Minus infinity to a maximum even where all values are negative and where a product would be infinite there."""
    text = """graph g
        input x: f32[1, 2, 4, 4]
        input k: f32[16, 2, 1, 1]
        t: f32[1, 16, 4, 4] = op [b: 1, o: 16, h: 4, w: 4 | c: 2 sum] reads x[b, c, h, w], k[o, c, 0, 0] body x * k then acc0 + 5.0
        y: f32[1, 16, 3, 3] = op [b: 1, c: 16, h: 3, w: 3 | r: 3 max, s: 3 max]
          reads t[b, c, 2*h + r - 2, 2*w + s - 2] else -inf body t output y"""
    graph = parse(text)
    new = RULE.apply(graph, Move("fuse_contraction", "y", (("tensor", "t"),)))
    values = {"x": -np.ones((1, 2, 4, 4), np.float32) * 9, "k": np.ones((16, 2, 1, 1), np.float32)}
    (got,) = run_kernel(new, 0, values)
    np.testing.assert_array_equal(got, np.full((1, 16, 3, 3), -13.0, np.float32))


def refusal(
    reads: str, op: str = "y: f32[6] = op [i: 6 | n: 40 max] reads {} body t", outputs: str = "y", more: str = ""
) -> str:
    graph = parse(f"""graph g input x: f32[6, 9] input w: f32[9, 40]
        t: f32[6, 40] = op [i: 6, n: 40 | m: 9 sum] reads x[i, m], w[m, n] body x * w
        {op.format(reads)} {more} output {outputs}""")
    return " ".join(str(r) for r in RULE.find(graph) if isinstance(r, Refusal))


def test_refusals() -> None:
    assert refusal("t[i, n]") == ""
    assert "needed elsewhere (e.g. it is an output" in refusal("t[i, n]", outputs="y, t")
    another = "z: f32[6, 40] = op [i: 6, j: 40] reads t[i, j] body exp(t)"
    assert "needed elsewhere (e.g. 2 operations" in refusal("t[i, n]", outputs="y, z", more=another)
    rows = "y: f32[6, 40] = op [i: 6, j: 40 | n: 40 max] reads {} body t then u - acc0"
    assert refusal("t[i, n], u = t[i, j]", rows) == ""
    assert "used again after the reduction: an element is not read at its own" in refusal("t[i, n], u = t[i, 39 - j]", rows)
    both = rows.replace("u - acc0", "(u - v) - acc0")
    assert "at their own place alone" in refusal("t[i, n], u = t[i, j], v = t[0, j]", both)
    assert "2 projections" in refusal("t[i, n], u = t[5 - i, n]", "y: f32[6] = op [i: 6 | n: 40 max] reads {} body t + u")
    wide = "y: f32[6, 7] = op [i: 6, j: 7 | n: 40 max] reads {} body t + cast(index(j), f32)"
    assert "does not vary along 'j': it would be computed for each (e.g. 7 times)" in refusal("t[i, n]", wide)
    scan = "y: f32[6, 40] = op [i: 6, j: 40 | n: 40 sum] reads {} body t"
    assert "only a plain reduction" in refusal("t[i, n] when j - n >= 0 else 0.0", scan)
    assert "would grow too large" in refusal(
        "t[i, n]", f"y: f32[6] = op [i: 6 | n: 40 max] reads {{}} body {'tanh(' * 125}t{')' * 125}"
    )
    assert "split already" in refusal("t[i, n]", "y: f32[6] = op [i: 6 | n: 40 max] reads {} body t split n/2 loop")


def test_rows_of_more_columns_than_a_tile_keep_their_kernel() -> None:
    def rows(n: int) -> str:
        graph = parse(f"""graph g input x: f16[512, 64] input w: f16[64, {n}]
            t: f16[512, {n}] = op [i: 512, n: {n} | m: 64 sum] reads x[i, m], w[m, n] body cast(x, f32) * cast(w, f32)
              then cast(acc0, f16)
            y: f16[512, {n}] = op [i: 512, j: {n} | n: {n} moments] reads t[i, n], u = t[i, j] body 1.0, cast(t, f32), 0.0
              then cast(cast(u, f32) - acc1, f16) output y""")
        (found,) = RULE.find(graph)
        if isinstance(found, Refusal):
            return found.reason
        new = fused(graph, GPU)[0]
        widths = {k.bn for k in candidates(kernel_form(new, kernel_of(new)))}
        return f"{len(new.ops)} kernel, {widths}"

    assert rows(256) == "1 kernel, {256}" and rows(100) == "1 kernel, {128}"
    assert "a row of 257 is more than a tile holds" in rows(257)


def test_a_depthwise_convolution_is_no_matrix() -> None:
    graph = parse("""graph g input x: f32[1, 8, 8, 8] input k: f32[8, 3, 3]
        t: f32[1, 8, 6, 6] = op [b: 1, o: 8, h: 6, w: 6 | r: 3 sum, s: 3 sum] reads x[b, o, h + r, w + s], k[o, r, s] body x * k
        y: f32[1, 8] = op [b: 1, o: 8 | h: 6 sum, w: 6 sum] reads t[b, o, h, w] body t output y""")
    (found,) = RULE.find(graph)
    assert isinstance(found, Refusal) and "would be no matrices" in found.reason
    with pytest.raises(TapestryError, match="would be no matrices"):
        RULE.apply(graph, Move("fuse_contraction", "y", (("tensor", "t"),)))
    with pytest.raises(TapestryError, match="not written by an operation"):
        RULE.apply(graph, Move("fuse_contraction", "y", (("tensor", "x"),)))


def behind(window: int, batch: int, dtype: str = "f16", channels: int = 64, size: int = 56) -> Graph:
    """A maximum pool of stride 2 behind a convolution of as many channels as it has filters."""
    pad, out = window // 2, size // 2
    return parse(f"""graph g input x: {dtype}[{batch}, {channels}, {size}, {size}] input k: {dtype}[{channels}, {channels}, 3, 3]
        t: {dtype}[{batch}, {channels}, {size}, {size}] = op [b: {batch}, o: {channels}, h: {size}, w: {size} | c: {channels} sum, r: 3 sum, s: 3 sum]
          reads x[b, c, h + r - 1, w + s - 1] else 0.0, k[o, c, r, s] body cast(x, f32) * cast(k, f32) then cast(max(acc0, 0.0), {dtype})
        y: {dtype}[{batch}, {channels}, {out}, {out}] = op [b: {batch}, c: {channels}, h: {out}, w: {out} | r: {window} max, s: {window} max]
          reads t[b, c, 2*h + r - {pad}, 2*w + s - {pad}] else -inf body t output y""")


def chosen(graph: Graph, machine: Machine = GPU) -> list[str]:
    return [m.rule for m in fused(graph, machine)[1]]


def test_windows_that_tile_are_fused_and_overlapping_ones_where_it_pays() -> None:
    """2 x 2 windows compute nothing twice; 3 x 3 windows of stride 2 compute 2.25 times as much: a launch pays for few FLOPs."""
    assert chosen(behind(2, 8)) == ["fuse_contraction"]
    assert chosen(behind(3, 1, channels=16)) == ["fuse_contraction"]
    assert chosen(behind(3, 64, channels=256)) == []
    assert chosen(behind(2, 8), CPU) == [] == chosen(behind(3, 1, channels=16), CPU)
    new, _ = fused(behind(3, 1, channels=16), GPU)
    (op,) = new.ops
    assert isinstance(op, Block) and (roles := folded_roles(op)) is not None
    assert not roles.folds and {d.name for d in roles.taps} == {"r", "s"}


def test_few_rows_are_not_gone_through_by_a_handful_of_programs() -> None:
    """A prime number of columns is in no equal parts: one program per tile of rows would leave the device idle."""

    def reduced(columns: int) -> list[str]:
        return chosen(
            parse(f"""graph g input x: f16[16, 512] input w: f16[512, {columns}]
            t: f16[16, {columns}] = op [i: 16, n: {columns} | m: 512 sum] reads x[i, m], w[m, n] body cast(x, f32) * cast(w, f32)
              then cast(acc0, f16)
            y: i64[16] = op [i: 16 | n: {columns} argmax] reads t[i, n] body t, index(n) then acc1 output y""")
        )

    assert reduced(50261) == []  # a prime
    assert reduced(131072) == ["fuse_contraction"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_every_shape_has_a_tile(target: str, precision: str) -> None:
    """Rows of any width, and states beside every lane of a product, whatever the matrix unit's least height."""
    norms = [CASES["layer norm"].replace("72", str(n)).replace("21", str(m)) for n in (33, 64, 96, 256) for m in (2, 500)]
    taps = (
        CASES["pool"]
        .replace(" max", " argmax")
        .replace("body let0", "body let0, index(2*p + e)")
        .replace("y: f32", "u: f32[2, 24, 5, 6], y: i64")
    )
    for text in (*norms, *(t.replace("f16", "f32") for t in norms), taps, taps.replace("24", "640").replace("f16", "f32")):
        graph = parse(text)
        found = kernel_form(graph, kernel_of(graph), precision)
        assert found.kind == "folded" and list(candidates(found, target)), (text, target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("again", ["cast(u, f64)", "cast(u, f32)", "u"])
def test_what_is_kept_of_a_row_is_not_rounded_more(dtype: str, again: str) -> None:
    graph = parse(f"""graph g input x: {dtype}[64, 32] input w: {dtype}[32, 72]
        t: {dtype}[64, 72] = op [i: 64, n: 72 | m: 32 sum] reads x[i, m], w[m, n] body cast(x, f64) * cast(w, f64) then cast(acc0, {dtype})
        y: {dtype}[64, 72] = op [i: 64, j: 72 | n: 72 moments] reads t[i, n], u = t[i, j] body f64(1.0), cast(t, f64), f64(0.0)
          then cast({again}, {dtype}) * cast(acc1, {dtype}) output y""")
    (move,) = RULE.find(graph)
    assert isinstance(move, Move), move
    after = apply_moves(graph, [move])
    assert after.log is not None and prove_step(after.log)


def test_a_fusion_is_left_out_by_name() -> None:
    graph = behind(2, 8)
    assert chosen(graph) == ["fuse_contraction"] and fused(graph, GPU, frozenset({"fuse_contraction"})) == (graph, [])
