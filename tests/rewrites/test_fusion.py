"""Fusions that are choices: what they are worth, that they change nothing, and how many kernels are left of a layer."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from onnx import TensorProto as T

from bench.speed import inductor
from tapestry.codegen.blocks.lowered import unavailable
from tapestry.ir import laws
from tapestry.ir.graph import Block, Graph, Guard
from tapestry.ir.index import const, dim
from tapestry.ir.recognition.contraction import products
from tapestry.ir.syntax.parser import parse
from tapestry.lift import lift, read_weight
from tapestry.plan.fusion import Machine, fused, seconds
from tapestry.plan.lower import lower
from tapestry.plan.topology.presets import SOURCES
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import Move, Refusal
from tapestry.rewrites.core.rule_check import same_dependences, same_values
from tapestry.rewrites.core.tile_footprint import implied, loaded, recomputed, tile_of
from tapestry.runtime.feeds import random_feeds
from tapestry.verify import certificate, interp
from tests.support.small_models import MODELS as SMALL
from tests.support.small_models import Case, N, assert_same, execute, f32, i64, mesh_of, net, random_plan, save
from tests.support.triton_kernels import compare, run_kernel

GPU = Machine(device=SOURCES["h100"].device, eager=False)
CPU = Machine(device=SOURCES["cpu"].device, eager=True)
HEADS, GROUPS, HEAD, SEQ, BATCH = 4, 2, 6, 7, 2
WIDTH = HEADS * HEAD


def norm(x: str, out: str, weight: str) -> list:
    """An RMS norm as exporters write it out."""
    return [
        N("Mul", [x, x], [f"{out}2"]), N("ReduceMean", [f"{out}2", "last"], [f"{out}m"], keepdims=1),
        N("Add", [f"{out}m", "eps"], [f"{out}e"]), N("Sqrt", [f"{out}e"], [f"{out}s"]), N("Div", ["one", f"{out}s"], [f"{out}r"]),
        N("Mul", [x, f"{out}r"], [f"{out}x"]), N("Mul", [f"{out}x", weight], [out]),
    ]  # fmt: skip


def rope(x: str, out: str) -> list:
    """Rotary embedding with its halves swapped by slices, a sign and a concatenation."""
    return [
        N("Slice", [x, "zero", "half", "axis"], [f"{out}a"]), N("Slice", [x, "half", "end", "axis"], [f"{out}b"]),
        N("Neg", [f"{out}b"], [f"{out}n"]), N("Concat", [f"{out}n", f"{out}a"], [f"{out}h"], axis=-1),
        N("Mul", [x, "cos"], [f"{out}c"]), N("Mul", [f"{out}h", "sin"], [f"{out}s"]), N("Add", [f"{out}c", f"{out}s"], [out]),
    ]  # fmt: skip


def heads(x: str, out: str, shape: str) -> list:
    return [N("Reshape", [x, shape], [f"{out}r"]), N("Transpose", [f"{out}r"], [out], perm=[0, 2, 1, 3])]


def layer(x: str, y: str, p: str, groups: int) -> list:
    """One decoder layer: grouped attention with rotary embeddings and a causal mask, and SwiGLU."""
    repeat = [] if groups == HEADS else [
        node for t in ("k", "v")
        for node in (N("Unsqueeze", [f"{p}{t}h", "two"], [f"{p}{t}u"]), N("Expand", [f"{p}{t}u", "wide"], [f"{p}{t}w"]),
                     N("Reshape", [f"{p}{t}w", "back"], [f"{p}{t}f"]))
    ]  # fmt: skip
    k, v = (f"{p}{t}{'h' if groups == HEADS else 'f'}" for t in ("k", "v"))
    return [
        *norm(x, f"{p}pre", "g1"),
        *(N("MatMul", [f"{p}pre", w], [f"{p}{t}"]) for t, w in (("q", "wq"), ("k0", "wk"), ("v", "wv"))),
        *heads(f"{p}q", f"{p}qh", "qshape"), *heads(f"{p}k0", f"{p}kk", "kshape"), *heads(f"{p}v", f"{p}vh", "kshape"),
        *rope(f"{p}qh", f"{p}qr"), *rope(f"{p}kk", f"{p}kh"), *repeat,
        N("Transpose", [k], [f"{p}kt"], perm=[0, 1, 3, 2]), N("MatMul", [f"{p}qr", f"{p}kt"], [f"{p}s"]),
        N("Mul", [f"{p}s", "scale"], [f"{p}ss"]), N("Add", [f"{p}ss", "mask"], [f"{p}sm"]),
        N("Softmax", [f"{p}sm"], [f"{p}p"], axis=-1), N("MatMul", [f"{p}p", v], [f"{p}o"]),
        N("Transpose", [f"{p}o"], [f"{p}ot"], perm=[0, 2, 1, 3]), N("Reshape", [f"{p}ot", "flat"], [f"{p}of"]),
        N("MatMul", [f"{p}of", "wo"], [f"{p}op"]), N("Add", [x, f"{p}op"], [f"{p}x1"]), *norm(f"{p}x1", f"{p}post", "g2"),
        N("MatMul", [f"{p}post", "w1"], [f"{p}g"]), N("Sigmoid", [f"{p}g"], [f"{p}gs"]), N("Mul", [f"{p}g", f"{p}gs"], [f"{p}gg"]),
        N("MatMul", [f"{p}post", "w2"], [f"{p}u"]), N("Mul", [f"{p}gg", f"{p}u"], [f"{p}gu"]),
        N("MatMul", [f"{p}gu", "w3"], [f"{p}d"]), N("Add", [f"{p}x1", f"{p}d"], [y]),
    ]  # fmt: skip


def decoder(groups: int):
    width = groups * HEAD
    weights = {
        "wq": f32(WIDTH, WIDTH), "wk": f32(WIDTH, width), "wv": f32(WIDTH, width), "wo": f32(WIDTH, WIDTH),
        "w1": f32(WIDTH, 20), "w2": f32(WIDTH, 20), "w3": f32(20, WIDTH), "g1": f32(WIDTH), "g2": f32(WIDTH),
        "last": i64(-1), "eps": np.float32(1e-6), "one": np.float32(1), "scale": np.float32(HEAD**-0.5), "zero": i64(0),
        "half": i64(HEAD // 2), "end": i64(HEAD), "axis": i64(-1), "two": i64(2), "flat": i64(BATCH, SEQ, WIDTH),
        "qshape": i64(BATCH, SEQ, HEADS, HEAD), "kshape": i64(BATCH, SEQ, groups, HEAD),
        "wide": i64(BATCH, groups, HEADS // groups, SEQ, HEAD), "back": i64(BATCH, HEADS, SEQ, HEAD),
    }  # fmt: skip
    ins = {"x": (T.FLOAT, [BATCH, SEQ, WIDTH]), "pos": (T.FLOAT, [SEQ, HEAD]), "keep": (T.BOOL, [SEQ, SEQ])}
    prelude = [
        N("Cos", ["pos"], ["cos"]), N("Sin", ["pos"], ["sin"]), N("Where", ["keep", "none", "low"], ["mask"]),
        *layer("x", "h", "a_", groups), *layer("h", "y", "b_", groups),
    ]  # fmt: skip
    return net(prelude, ins, {"y": T.FLOAT}, {**weights, "none": np.float32(0), "low": np.float32(-1e9)})


DECODERS = {"decoder_grouped": GROUPS, "decoder": HEADS}


@cache
def decoded(name: str) -> tuple[Case, Graph, list[Move]]:
    """A decoder's case with the fused graph of a GPU in place of its own, the graph before, and the moves between."""
    SMALL.setdefault(name, lambda: decoder(DECODERS[name]))
    path = save(name)
    del SMALL[name]  # others run over all models
    lifted = lift(path)
    graph = simplify(lifted.graph)
    feeds = random_feeds(graph, 3)
    feeds["keep"] = np.tril(np.ones((SEQ, SEQ), bool))
    feeds["pos"] = np.arange(SEQ * HEAD, dtype=np.float32).reshape(SEQ, HEAD) * 0.1
    weights = {t: read_weight(lifted.model, w, graph.tensors[t], constants=lifted.constants) for t, w in graph.weights.items()}
    new, moves = fused(graph, GPU)
    return Case(path, new, feeds, weights, interp.run(graph, {**feeds, **weights}, wide=True)), graph, moves


def layer_kernels(graph: Graph) -> int:
    at = [i for i, op in enumerate(graph.ops) if isinstance(op, Block) and op.monoid == "softsum"]
    assert len(at) == 2
    return at[1] - at[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_layer_is_at_most_eight_kernels(name: str) -> None:
    c, before, _ = decoded(name)
    assert layer_kernels(before) > 10
    assert layer_kernels(c.graph) <= 8 - (name == "decoder")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DECODERS)
def test_fusions_change_nothing_and_replay(name: str) -> None:
    c, before, moves = decoded(name)
    laws.check(c.graph)
    values = {**c.feeds, **c.weights}
    same_values(before, c.graph, {t: a for t, a in values.items() if t in c.graph.tensors}, name)
    assert {repr(op) for op in simplify(apply_moves(before, moves)).ops} == {repr(op) for op in c.graph.ops}
    one = replace(before, outputs=("h",))
    small = simplify(fused(simplify(one), GPU)[0])
    assert same_dependences(simplify(one), small, name) == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DECODERS)
def test_fused_kernels_run_on_triton(name: str) -> None:
    c, _, _ = decoded(name)
    want = interp.run(replace(c.graph, outputs=tuple(c.graph.tensors)), {**c.feeds, **c.weights}, wide=True)
    have = {**c.feeds, **c.weights}
    for i, op in enumerate(c.graph.ops):
        assert not unavailable(c.graph, i)
        have.update(zip(op.outs, run_kernel(c.graph, i, have), strict=True))
        for t in op.outs:
            compare(have[t], want[t], c.graph.tensors[t].dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("mesh", ["1", "3", "2x2"])
def test_fused_graphs_run_under_any_plan(name: str, mesh: str) -> None:
    c, _, _ = decoded(name)
    for seed in range(3):
        rng = random.Random(f"{name} {mesh} {seed}")
        plan = random_plan(c.graph, mesh_of(mesh), rng)
        program = lower(plan)
        certificate.check(plan.annotated(), program, places=plan.places)
        found, _ = execute(c.graph, program, c)
        assert_same(found, c.expected, c.graph, (name, mesh, seed))


def test_a_cpu_that_runs_operators_leaves_attention_alone() -> None:
    """What attention computes before its product is written and read again there: nothing would be saved."""
    _, before, _ = decoded("decoder")
    moves = fused(before, CPU)[1]
    rotated = {op.outs[0] for op in before.ops if isinstance(op, Block) and op.outs[0].endswith(("_qr", "_kh"))}
    assert any(m.rule == "fuse_sums" for m in moves)
    assert not {m.at for m in moves if m.rule == "inline_map"} & rotated


def test_long_sequences_rotate_keys_once() -> None:
    """Every tile of queries would rotate the keys again: a kernel of its own is cheaper, for the queries it is not."""

    def kernels(rows: int, keys: int) -> list[str]:
        rotated = "\n".join(
            f"""{t}r: f32[16, {n}, 64] = op [h: 16, i: {n}, e: 64]
              reads {t}[h, i, e], c[i, e], s[i, e], m = {t}[h, i, ((e + 32) mod 64)]
              body ({t} * c) + (m * s)""" for t, n in (("q", rows), ("k", keys))
        )  # fmt: skip
        graph = parse(f"""graph g
            input q: f32[16, {rows}, 64]
            input k: f32[16, {keys}, 64]
            input v: f32[16, {keys}, 64]
            input c: f32[{keys}, 64]
            input s: f32[{keys}, 64]
            {rotated}
            y: f32[16, {rows}, 64] = op [b: 16, i: {rows}, e: 64 | n: {keys} softsum]
              reads v[b, n, e], qr[b, i, m], kr[b, n, m]
              let [m: 64 sum] qr * kr
              body let0, 1.0, v
              then acc2 / acc1
            output y""")
        return [m.at for m in fused(graph, GPU)[1]]

    assert kernels(4096, 4096) == ["qr"]
    assert kernels(1, 4096) == ["qr", "kr"]


@pytest.mark.parametrize(("fn", "kept"), [("cos", False), ("neg", True)])
def test_what_takes_many_instructions_is_not_computed_for_every_head(fn: str, kept: bool) -> None:
    """A table of angles that all heads share: its cosines are read, its negatives made again."""
    graph = parse(f"""graph g
        input x: f16[32, 2048, 128]
        input a: f16[2048, 128]
        c: f16[2048, 128] = op [i: 2048, m: 128] reads a[i, m] body {fn}(a)
        y: f16[32, 2048, 128] = op [b: 32, i: 2048, m: 128] reads x[b, i, m], c[i, m] body x * c
        output y""")
    assert [m.at for m in fused(graph, GPU)[1]] == ["c"] * kept


TILED = """graph g
    input x: f32[8, 300, 32]
    input w: f32[32, 256]
    k: f32[8, 300, 32] = op [h: 8, i: 300, e: 32] reads x[h, i, e] body exp(x)
    y: f32[16, 300, 256] = op [b: 16, i: 300, n: 256 | e: 32 sum]
      reads k[floor((b)/2), i, e], w[e, n]
      body k * w
    output y
"""


def test_recomputation_is_counted_over_tiles() -> None:
    graph = parse(TILED)
    op = graph.ops[1]
    assert isinstance(op, Block)
    assert tile_of(op) == {"b": 1, "i": 128, "n": 128, "e": 32}
    assert recomputed(op, op.reads[:1], (8, 300, 32)) == 4  # two heads of each group, two tiles of columns
    whole = {d.name: d.size for d in op.space}
    assert recomputed(op, op.reads[:1], (8, 300, 32), whole) == 1


@pytest.mark.parametrize(
    "index, extent", [("i", 50), ("2*i + 3", 110), ("floor((i)/3)", 20), ("((i) mod 7)", 7), ("i - 4", 50)]
)
def test_loads_are_what_tiles_touch(index: str, extent: int) -> None:
    """Against counting cells tile by tile."""
    guard = " else 0.0" if index == "i - 4" else ""
    graph = parse(f"""graph g input x: f32[{extent}, 3]
        y: f32[50, 3] = op [i: 50, j: 3] reads x[{index}, j]{guard} body x output y""")
    op = graph.ops[0]
    assert isinstance(op, Block)
    at = {"i": lambda i: i, "2*i + 3": lambda i: 2 * i + 3, "floor((i)/3)": lambda i: i // 3, "((i) mod 7)": lambda i: i % 7}
    at["i - 4"] = lambda i: i - 4
    for tile in (4, 8, 50):
        cells = 0
        for first in range(0, 50, tile):
            touched = [at[index](i) for i in range(first, min(50, first + tile))]
            touched = [c for c in touched if 0 <= c < extent]
            cells += (max(touched) + 1 - min(touched)) * 3 if touched else 0
        assert loaded(op, op.reads[0], (extent, 3), {"i": tile, "j": 3}) == cells


def test_conditions_are_implied_by_others() -> None:
    op = parse("graph g input x: f32[9] y: f32[9] = op [i: 9] reads x[i] body x output y").ops[0]
    assert isinstance(op, Block)
    low = Guard(const(3) - dim("i"), "ge")
    assert implied(op, [low], Guard(const(4) - dim("i"), "ge"))
    assert not implied(op, [low], Guard(const(2) - dim("i"), "ge"))
    assert implied(op, [low, Guard(dim("i") - 3, "ge")], Guard(dim("i") - 3, "eq"))
    assert not implied(op, [low], Guard(dim("i") - 3, "eq"))


def refusals(rule: str, text: str) -> str:
    return " ".join(str(r) for r in RULES[rule].find(parse(text)) if isinstance(r, Refusal))


def test_what_is_not_inlined() -> None:
    def after(op: str, more: str = "") -> str:
        return refusals(
            "inline_map", f"graph g input x: f32[9] {more} t: f32[9] = op [i: 9] reads x[i] body exp(x) {op} output y"
        )

    assert "windows" in after(
        "y: f32[7] = op [i: 7 | r: 3 sum] reads t[i + r], w[r] body t * w", "input w: f32[3]"
    ) and "3 times" not in after("y: f32[9] = op [i: 9] reads t[i] body t + t")
    assert "running state" in after("y: f32[9] = op [i: 9 | j: 9 sum] reads t[j] when i - j >= 0 else 0.0 body t")
    assert "as a table" in after(
        "y: f32[4] = op [i: 4 | v: 9 sum] reads n[i], t[v] body where(eq(n, index(v)), t, 0.0)", "input n: i64[4]"
    )
    assert "more than once" in after("y: f32[9] = op [i: 9 | j: 9 max] reads t[j], u = t[i] body t then u - acc0")


def test_a_value_of_its_own_outside_the_map_stays() -> None:
    """The reader looks past the map's cells: it finds what it named, whatever the map would give there."""
    graph = parse("""graph g
        input x: f32[4]
        t: f32[4] = op [i: 4] reads x[i] body exp(x)
        y: f32[8] = op [i: 8] reads t[i - 2] else -7.0, u = t[i - 2] else -7.0 body where(lt(index(i), 5), t, u + 1.0)
        output y""")
    new = RULES["inline_map"].apply(graph, Move("inline_map", "t"))
    feeds = {"x": np.array([np.nan, 1, 2, 3], np.float32)}
    old, got = interp.run(graph, feeds)["y"], interp.run(new, feeds)["y"]
    np.testing.assert_array_equal(old, got)
    assert list(got[[0, 1, 6, 7]]) == [-7, -7, -6, -6]


def side_by_side(between: str = "", second: str = "x[i, m], v[m, n]", then: str = "acc0") -> str:
    return f"""graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input v: f32[6, 3]
        a: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum] reads x[i, m], w[m, n] body x * w
        {between}
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum] reads {second} body {"x * v" if "v[" in second else "x * c"} then {then}
        output y, a"""


def test_what_is_not_put_side_by_side() -> None:
    late = "c: f32[6, 3] = op [m: 6, n: 3] reads v[m, n], a[0, n] body v + a"
    assert "between the two" in refusals("fuse_sums", side_by_side(late, "x[i, m], c[m, n]"))
    assert "other points" in refusals("fuse_sums", side_by_side("", "x[i, m], v[m, n], a[i, 0]", "acc0 + a"))
    assert "no factor" in refusals("fuse_sums", side_by_side("", "x[i, 5 - m], v[m, n]"))
    assert refusals("fuse_sums", side_by_side()) == ""


def test_a_result_that_others_need_is_still_written() -> None:
    graph = parse(side_by_side("", "x[i, m], v[m, n], a[i, n]", "a + acc0"))
    (move,) = RULES["fuse_sums"].find(graph)
    assert isinstance(move, Move)
    (op,) = RULES["fuse_sums"].apply(graph, move).ops
    assert isinstance(op, Block)
    assert (op.outs, op.monoid, len(products(op) or ())) == (("a", "y"), "sums2", 2)


def test_a_fusion_is_taken_only_where_it_saves_time() -> None:
    graph = parse(TILED)
    new = RULES["inline_map"].apply(graph, Move("inline_map", "k"))
    apart = sum(seconds(graph, op, GPU) for op in graph.ops if isinstance(op, Block))
    assert (seconds(new, new.ops[0], GPU) < apart) == bool(fused(graph, GPU)[1])  # type: ignore[arg-type]


def test_the_peer_computes_the_same_graph() -> None:
    """The torch module that `bench fusion` hands to Inductor, node by node, against the interpreter; and how calls are counted."""
    c, _, _ = decoded("decoder_grouped")
    model = inductor.folded(c.path, {})
    stored = {i.name for i in model.graph.input} - {*c.feeds}
    module = inductor.Module(model, {n: c.weights[n] for n in stored})
    got = module(*(torch.from_numpy(c.feeds[n]) for n in module.feeds))
    compare(got[0].numpy(), c.expected["y"], "f32")
    text = "def call(self, args):\n    cpp_fused_add_0(buf0)\n    extern_kernels.mm(a, b, out=buf1)\n    buf2 = torch.ops.mkl._mkl_linear.default(a)\n"
    assert inductor.calls(text + "    buf3 = reinterpret_tensor(buf2)\n") == (
        1, {"extern_kernels.mm": 1, "torch.ops.mkl._mkl_linear.default": 1},
    )  # fmt: skip


def test_what_weights_alone_decide_is_not_computed_again_on_cpus() -> None:
    """A table that a model writes down as a formula stays a table: a run finds it done."""
    graph = parse("""graph g
input x: f32[8, 16]
weight a: f32[16] at "" 0 64 "" ""
weight b: f32[32] at "" 64 128 "" ""
t: f32[16, 32] = op [i: 16, n: 32]
  reads a[i], b[n]
  body sin((a * b)) + cos((a + b))
y: f32[8, 32] = op [m: 8, n: 32 | i: 16 sum]
  reads x[m, i], t[i, n]
  body x * t
output y""")
    assert [op.outs[0] for op in fused(graph, CPU)[0].ops] == ["t", "y"]
