"""The torch-cpu target block by block, the tables of primitives, random numbers under any split, and the runtime's checks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.base import scalars, state_merges
from tapestry.codegen.torch_cpu.base.closures import compile_value
from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.ir.expr import PRIMITIVES, Arg, Call
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Box, Kernel, whole
from tapestry.ir.kernel import shape as extents
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.philox import philox
from tapestry.ir.plan import Plan
from tapestry.ir.recognition.state import state_box
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import numpy_dtype
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tapestry.verify import certificate, interp
from tests.support.block_buffers import buffers, dense, sub_box
from tests.support.small_models import MODELS, Case, assert_same, case, execute, mesh_of, peak, random_plan

BLOCKS = [n for n in MODELS if n not in ("opaques", "recurrent")]


# --- kernels on random blocks, with buffers larger than what they read


def values_of(c: Case) -> dict[str, np.ndarray]:
    """Every tensor of a graph, in its own precision."""
    everything = replace(c.graph, outputs=tuple(c.graph.tensors))
    return {**c.feeds, **c.weights, **interp.run(everything, {**c.feeds, **c.weights})}


def run_kernel(graph, i: int, mode: str, block: Box, values, rng: random.Random, states=()) -> list[np.ndarray]:
    op = graph.ops[i]
    points = block + whole(tuple(d.size for d in (*op.reduce, *op.inner_dims))) if mode == "finish" else block
    used = {"full": op.body_reads() | op.then_reads(), "partial": op.body_reads(), "finish": op.then_reads()}[mode]
    boxes, arrays = buffers(op, graph, points, values, rng, used)
    out = block[: len(op.dims)]
    count = len(op.body) if mode == "partial" else len(op.outs)
    outs = tuple(state_box(op, f, out) for f in range(count)) if mode == "partial" else (out,) * count
    k = Kernel(op=i, mode=mode, block=block, ins=tuple(boxes), outs=outs)
    results = TorchCpu().kernel(graph, k)(arrays, list(states))
    given = {a.data_ptr() for a in arrays if a is not None and a.numel()}
    for r, box in zip(results, outs, strict=True):
        assert tuple(r.shape) == extents(box)
        assert dense(r)
        assert r.untyped_storage().nbytes() == r.numel() * r.element_size()
        assert not r.numel() or r.data_ptr() not in given  # a result never shares an input's memory
    return [to_numpy(r) for r in results]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BLOCKS)
def test_full_blocks(name):
    c = case(name)
    values = values_of(c)
    for i, op in enumerate(c.graph.ops):
        if not isinstance(op, Block):
            continue
        for seed in range(4):
            rng = random.Random(f"{name} {i} {seed}")
            block = sub_box(whole(tuple(d.size for d in op.dims)), rng) + whole(
                tuple(d.size for d in (*op.reduce, *op.inner_dims))
            )
            found = run_kernel(c.graph, i, "full", block, values, rng)
            cells = tuple(slice(lo, hi) for lo, hi in block[: len(op.dims)])
            expected = {t: values[t][cells] for t in op.outs}
            graph = replace(
                c.graph,
                tensors={**c.graph.tensors, **{t: replace(c.graph.tensors[t], shape=a.shape) for t, a in expected.items()}},
            )
            assert_same(dict(zip(op.outs, found, strict=True)), expected, graph, (op.outs, block))


def part_of(op: Block, rng: random.Random) -> Block:
    """An operation over fewer points, as rewrites leave it behind; its tensors keep their sizes."""

    def less(dims):
        return tuple(replace(d, size=max(1, d.size - rng.choice([0, 0, 1, 2]))) for d in dims)

    inner = tuple(replace(x, dims=less(x.dims)) for x in op.inner)
    return replace(op, dims=less(op.dims), reduce=less(op.reduce), inner=inner, splits=())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BLOCKS)
def test_parts_of_operations_compute_no_more(name):
    """Fast ways are read off the projections: they must see that the operation does not cover its tensors."""
    c = case(name)
    values = values_of(c)
    for i, op in enumerate(c.graph.ops):
        if not isinstance(op, Block):
            continue
        for seed in range(4):
            part = part_of(op, random.Random(f"{name} {i} {seed}"))
            if part.space == op.space:
                continue
            shape = tuple(d.size for d in part.dims)
            tensors = {**c.graph.tensors, **{t: replace(c.graph.tensors[t], shape=shape) for t in op.outs}}
            read = tuple(dict.fromkeys(r.tensor for r in part.reads))
            graph = replace(c.graph, tensors=tensors, inputs=read, weights={}, ops=(part,), outputs=op.outs)
            points = whole(tuple(d.size for d in part.space))
            boxes = tuple(whole(tensors[r.tensor].shape) for r in part.reads)
            k = Kernel(op=0, mode="full", block=points, ins=boxes, outs=(whole(shape),) * len(op.outs))
            found = TorchCpu().kernel(graph, k)([from_numpy(np.array(values[r.tensor])) for r in part.reads], [])
            expected = interp.run(graph, {t: values[t] for t in read})
            arrays = {t: to_numpy(a) for t, a in zip(op.outs, found, strict=True)}
            for t in op.outs:  # a window all in the padding has the least value there is
                np.testing.assert_array_equal(arrays[t] == -np.inf, expected[t] == -np.inf, str(part))
            finite = [{t: np.where(a == -np.inf, a.dtype.type(0), a) for t, a in x.items()} for x in (arrays, expected)]
            assert_same(*finite, graph, part)


@pytest.mark.parametrize("name", [n for n in BLOCKS if n not in ("views", "unary")])
def test_partial_states_merge_into_the_whole(name):
    """Cut the reduced dimensions at random points, merge on the target, finish: the same as in one piece."""
    c = case(name)
    values = values_of(c)
    tried = 0
    for i, op in enumerate(c.graph.ops):
        if not isinstance(op, Block) or op.monoid is None:
            continue
        rng = random.Random(f"{name} {i}")
        outer = sub_box(whole(tuple(d.size for d in op.dims)), rng)
        first, *others = [d.size for d in (*op.reduce, *op.inner_dims)]
        cuts = sorted({0, first, *(rng.randint(0, first) for _ in range(3))})
        states = [
            [from_numpy(a) for a in run_kernel(c.graph, i, "partial", (*outer, (lo, hi), *whole(tuple(others))), values, rng)]
            for lo, hi in itertools.pairwise(cuts)
        ]
        merged = TorchCpu().merge(op.monoid, states)
        found = run_kernel(c.graph, i, "finish", outer, values, rng, merged)
        cells = tuple(slice(lo, hi) for lo, hi in outer)
        expected = {t: values[t][cells] for t in op.outs}
        graph = replace(
            c.graph, tensors={**c.graph.tensors, **{t: replace(c.graph.tensors[t], shape=a.shape) for t, a in expected.items()}}
        )
        assert_same(dict(zip(op.outs, found, strict=True)), expected, graph, (op.outs, outer, cuts))
        tried += 1
    assert tried or name in ("noise", "bfloats", "integers", "gathers")


@pytest.mark.parametrize("monoid", MONOIDS)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_merging_is_the_monoids_combine(monoid, devices):
    """The target's dense merge against the combiner, one state after another, infinities and NaNs included."""
    rng = np.random.default_rng(devices)
    m = MONOIDS[monoid]
    dtypes = {"any": ["bool"], "all": ["bool"], "argmax": ["f64", "i64"], "argmin": ["f64", "i64"]}.get(
        monoid, ["f64"] * len(m.fields)
    )
    states = []
    for d in range(devices):
        fields = []
        for k, dtype in enumerate(dtypes):
            if dtype == "bool":
                fields.append(rng.integers(0, 2, 40).astype(bool))
            elif dtype == "i64":
                fields.append(np.arange(40) * devices + d)
            else:
                x = rng.integers(-3, 4, 40) * 0.5
                if monoid in ("max", "min", "argmax", "argmin"):
                    x[:4] = [np.nan, np.inf, -np.inf, x[3]] if d % 2 else [1.0, np.nan, -np.inf, x[3]]
                fields.append(
                    np.abs(x) + (k == 0) if monoid in ("moments", "logsumexp") and k != 1 - (monoid == "logsumexp") else x
                )
        states.append([torch.from_numpy(f) for f in fields])
    expected = states[0]
    for s in states[1:]:
        expected = state_merges.combine(monoid, expected, s, tuple(dtypes))
    found = TorchCpu().merge(monoid, states)
    for f, e, dtype in zip(found, expected, dtypes, strict=True):
        assert f.dtype == e.dtype
        if dtype in ("bool", "i64"):
            assert torch.equal(f, e)
        else:
            assert torch.equal(torch.isnan(f), torch.isnan(e))
            np.testing.assert_allclose(f.nan_to_num(7.0), e.nan_to_num(7.0), rtol=1e-12, atol=1e-12)


# --- primitives


EDGES = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.25, 1e-30, 1e30, np.inf, -np.inf, np.nan], np.float64)
# (of 0 and -0 min and max may give either)
ROUNDED_ALIKE = {"add", "sub", "mul", "div", "neg", "abs", "sign", "sqrt", "floor", "ceil", "round"}


@pytest.mark.parametrize(
    "fn",
    [f for f in PRIMITIVES if f not in ("cast", "philox", "and", "or", "xor", "not", "shl", "shr", "where")],
)
@pytest.mark.parametrize("dtype", ["f64", "f32"])
def test_primitives_agree_at_the_edges(fn, dtype):
    """torch and numpy give the same value, NaN, infinity and sign of zero at every pair of awkward numbers."""
    arity = PRIMITIVES[fn].arity
    kind = {"f64": np.float64, "f32": np.float32}[dtype]
    a, b = (x.ravel() for x in np.meshgrid(EDGES.astype(kind), EDGES.astype(kind)))
    if fn in ("mod", "fmod"):  # torch's fmod gives up where the quotient is no f32
        with np.errstate(all="ignore"):
            a, b = (x[~(np.abs(a.astype(np.float64) / b) > 1e38) | np.isinf(a) | (b == 0)] for x in (a, b))
    args = [a, b][:arity]
    with np.errstate(all="ignore"):
        expected = np.asarray(interp.NUMPY[fn](*args))
    found = scalars.TABLE[fn](*(torch.from_numpy(x) for x in args)).numpy()
    assert found.dtype == (np.bool_ if PRIMITIVES[fn].result == "bool" else kind)
    if found.dtype == np.bool_:
        assert np.array_equal(found, expected)
        return
    expected = expected.astype(kind)
    assert np.array_equal(np.isnan(found), np.isnan(expected)), [
        (x, found[i], expected[i]) for i, x in enumerate(zip(*args)) if np.isnan(found[i]) != np.isnan(expected[i])
    ][:3]
    ok = ~np.isnan(expected)
    if fn in ROUNDED_ALIKE:
        np.testing.assert_array_equal(found[ok], expected[ok])
        return
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(
            found[ok], expected[ok], rtol=1e-12 if dtype == "f64" else 2e-6, atol=0 if fn not in ("sin", "cos", "tan") else 1e-6
        )


@pytest.mark.parametrize(
    "fn",
    [
        "add",
        "sub",
        "mul",
        "div",
        "mod",
        "fmod",
        "min",
        "max",
        "eq",
        "lt",
        "ge",
        "and",
        "or",
        "xor",
        "neg",
        "abs",
        "sign",
        "not",
    ],
)
@pytest.mark.parametrize("dtype", ["i64", "i32", "i8", "u8", "u16", "u32", "u64"])
def test_integer_primitives_agree(fn, dtype):
    kind = numpy_dtype(dtype)
    info = np.iinfo(kind)
    points = np.array(
        [0, 1, 2, 3, 7, 100, info.max, info.max - 1, *([-1, -2, -7, info.min + 1, info.min] if info.min else [])], object
    ).astype(kind)
    a, b = (x.ravel() for x in np.meshgrid(points, points))
    args = [a, b][: PRIMITIVES[fn].arity]
    if fn in ("neg", "abs", "sign") and dtype.startswith("u"):
        return
    with np.errstate(all="ignore"):
        expected = np.asarray(interp.NUMPY[fn](*args))
    e = Call(fn, tuple(Arg(k, dtype) for k in range(len(args))), "bool" if PRIMITIVES[fn].result == "bool" else dtype)
    found = compile_value(e, {})(dict(enumerate(torch.from_numpy(x) for x in args)), []).numpy()
    assert np.array_equal(found, expected.astype(found.dtype))


# --- scalars, empty tensors, dtypes at the border of torch


def test_arrays_keep_their_shape_and_bits():
    import ml_dtypes

    for a in (
        np.float32(2.5),
        np.zeros((0, 3), np.int8),
        np.arange(6).reshape(2, 3).T,
        np.array([1.5], ml_dtypes.bfloat16),
        np.array(True),
    ):
        a = np.asarray(a)
        back = to_numpy(from_numpy(a))
        assert back.shape == a.shape and back.dtype == a.dtype
        assert np.array_equal(back.astype(np.float64), a.astype(np.float64))


@pytest.mark.parametrize("dtype", ["u16", "u32", "u64", "i8", "f16", "bf16", "bool"])
def test_every_dtype_moves_and_is_computed_on(dtype):
    body = "x and s" if dtype == "bool" else "x + s"
    graph = (
        parse(f"""graph g
input x: {dtype}[7, 3]
input s: {dtype}[]
y: {dtype}[7, 3] = op [x0: 7, x1: 3]
  reads x[x0, x1], s[]
  body {body}
t: {dtype}[3, 7] = op [x0: 3, x1: 7]
  reads y[x1, x0]
  body y
output t
""")
        if dtype != "bool"
        else parse("""graph g
input x: bool[7, 3]
input s: bool[]
y: bool[7, 3] = op [x0: 7, x1: 3]
  reads x[x0, x1], s[]
  body and(x, s)
t: bool[3, 7] = op [x0: 3, x1: 7]
  reads y[x1, x0]
  body y
output t
""")
    )
    rng = np.random.default_rng(0)
    kind = numpy_dtype(dtype)
    feeds = {"x": rng.integers(0, 9, (7, 3)).astype(kind), "s": np.asarray(1).astype(kind)}
    c = Case(None, graph, feeds, {}, interp.run(graph, feeds))
    for mesh in ("1", "3", "2x2"):
        for seed in range(4):
            plan = random_plan(graph, mesh_of(mesh), random.Random(seed))
            program = lower(plan)
            certificate.check(plan.annotated(), program, mesh=plan.mesh)
            outs, measured = execute(graph, program, c)
            assert measured.peak == peak(program)
            assert outs["t"].dtype == kind
            assert np.array_equal(outs["t"].astype(np.float64), c.expected["t"].astype(np.float64))


@pytest.mark.parametrize("monoid", ["sum", "prod", "max", "min", "argmax"])
@pytest.mark.parametrize("dtype", ["u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"])
def test_every_dtype_reduces(dtype, monoid):
    out, body, then = (dtype, "x", "") if monoid != "argmax" else ("i64", "x, index(m)", "\n  then acc1")
    graph = parse(f"""graph g
input x: {dtype}[3, 7]
y: {out}[3] = op [i: 3 | m: 7 {monoid}]
  reads x[i, m]
  body {body}{then}
output y
""")
    feeds = {"x": np.random.default_rng(0).integers(0, 4, (3, 7)).astype(numpy_dtype(dtype))}
    c = Case(None, graph, feeds, {}, interp.run(graph, feeds))
    for s in strategies(graph.ops[0], mesh_of("3")):
        outs, _ = execute(graph, lower(Plan(graph=graph, mesh=mesh_of("3"), strategies=(s,))), c)
        assert outs["y"].dtype == c.expected["y"].dtype
        assert np.array_equal(outs["y"].astype(np.float64), c.expected["y"].astype(np.float64))


def test_a_nan_and_an_infinity_pass_through_a_split():
    graph = case("mlp").graph
    c = case("mlp")
    feeds = {"x": c.feeds["x"].copy()}
    feeds["x"][2, 1], feeds["x"][5, 0] = np.nan, np.inf
    expected = interp.run(graph, {**feeds, **c.weights})
    spoiled = np.isnan(expected["y"])
    assert spoiled[2].all() and not spoiled[0].any()
    for seed in range(6):
        plan = random_plan(graph, mesh_of("3"), random.Random(seed))
        outs, _ = execute(graph, lower(plan), Case(c.path, graph, feeds, c.weights, expected))
        assert np.array_equal(np.isnan(outs["y"]), spoiled)


# --- random numbers


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_known_answers_of_philox(key, counter, words):
    expected = [int(w, 16) for w in words.split()]
    index = np.uint64(counter[0] | counter[1] << 32)
    k = np.uint64(key[0] | key[1] << 32)
    for word in range(4):
        found = philox(k, counter[3], counter[2], word, index)
        assert found.dtype == np.int64 and int(found) == expected[word]
        fields = [
            torch.from_numpy(np.asarray(v)).reshape(1)
            for v in (k.astype(np.int64), np.int64(counter[3]), np.int64(counter[2]), np.int64(word), index.astype(np.int64))
        ]
        assert int(scalars.TABLE["philox"](*fields)[0]) == expected[word]


def test_philox_counts_in_64_bits():
    index = np.array([0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**40])
    found = philox(5, 0, 0, 0, index)
    assert len(set(found.tolist())) == len(index)
    assert (found >= 0).all() and (found < 2**32).all()


def bits(outs: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {t: a.tobytes() for t, a in outs.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", ["2", "3", "4", "8", "2x2", "2x4"])
def test_random_operators_give_the_same_bits_under_any_split(text):
    c = case("noise")
    mesh = mesh_of("1")
    alone = Plan(graph=c.graph, mesh=mesh, strategies=tuple(strategies(op, mesh)[0] for op in c.graph.ops))
    first, _ = execute(c.graph, lower(alone), c)
    assert set(first) == {"n", "u", "nl", "ul", "b", "d", "dm"}
    expected = bits(first)
    for seed in range(3):
        plan = random_plan(c.graph, mesh_of(text), random.Random(f"{text} {seed}"))
        found, _ = execute(c.graph, lower(plan), c)
        assert bits(found) == expected, seed


def test_random_operators_draw_from_their_distributions():
    c = case("noise")
    out = interp.run(c.graph, {**c.feeds, **c.weights})
    assert len(np.unique(out["n"])) == out["n"].size and len(np.unique(out["nl"])) == out["nl"].size
    assert abs(out["n"].mean()) < 0.7 and 0.5 < out["n"].std() < 1.6
    assert (out["u"] >= -2).all() and (out["u"] < 2).all() and len(np.unique(out["u"])) == out["u"].size
    assert set(np.unique(out["b"])) <= {0.0, 1.0}
    kept = out["dm"]
    assert kept.any() and not kept.all()
    np.testing.assert_allclose(out["d"], np.where(kept, c.feeds["x"] * 2, 0), rtol=1e-6)
    assert not np.array_equal(out["n"].ravel()[:24], out["nl"].ravel()[:24])  # streams differ by node
