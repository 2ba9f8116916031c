"""Generated Triton kernels: every primitive, random numbers, and what the source looks like."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; ahead-of-time tests run in processes of their own

from pathlib import Path

import numpy as np
import pytest
import torch

from tapestry.codegen.blocks.lowered import unavailable
from tapestry.codegen.triton.emit.source import generate, kernel_key
from tapestry.codegen.triton.run.launcher import launch, load
from tapestry.errors import BuildError, TapestryError
from tapestry.ir.expr import PRIMITIVES
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.kernel import Kernel
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import numpy_dtype
from tapestry.verify import interp
from tests.support.triton_kernels import (
    TOLERANCE,
    check,
    fresh,
    kernel_of,
    poisoned_lanes,  # noqa: F401  (a fixture for every test here)
    run_kernel,
    source_of,
)

FLOAT_FUNCTIONS = [f for f, p in PRIMITIVES.items() if p.arity == 1 and p.result == "float"] + ["neg", "abs", "sign"]
UNIT = {"asin", "acos", "atanh"}


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_float_functions(dtype: str) -> None:
    """Every function of one float, where it is easy and where it is not, against numpy in float64."""
    x = np.concatenate([np.linspace(-6, 6, 41), [0.0, 1e-6, -1e-6, 1e-3, 0.5, 1.5, -2.5, np.inf, -np.inf, np.nan, 70.0, -70.0]])
    outs = ", ".join(f"y_{f}: {dtype}[{len(x)}]" for f in FLOAT_FUNCTIONS)
    text = f"""graph g input x: {dtype}[{len(x)}] {outs} = op [i: {len(x)}] reads x[i]
        body {", ".join(f"{f}(x)" for f in FLOAT_FUNCTIONS)} output {", ".join(f"y_{f}" for f in FLOAT_FUNCTIONS)}"""
    graph = parse(text)
    x = x.astype(np.float32).astype(np.float64)
    got = run_kernel(graph, 0, {"x": x})
    for f, y in zip(FLOAT_FUNCTIONS, got, strict=True):
        with np.errstate(all="ignore"):
            want = interp.NUMPY[f](x)
        tol = {"f32": 1e-6, "f64": 5e-15}[dtype] * (8 if f in ("sinh", "cosh", "exp", "expm1") else 1)
        np.testing.assert_allclose(y.astype(np.float64), want, rtol=tol, atol=1e-300, equal_nan=True, err_msg=f)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_functions_of_16_bits(dtype: str) -> None:
    """To the last bit that 16 have, near zero and where the formula changes."""
    x = np.concatenate(
        [np.linspace(-6, 6, 101), np.logspace(-4, 0, 60), [0.0, 0.0999, 0.1001, -0.1, np.inf, -np.inf, np.nan, 70.0]]
    )
    x = x.astype(numpy_dtype(dtype))
    text = f"""graph g input x: {dtype}[{len(x)}] y: f32[{len(x)}] = op [i: {len(x)}] reads x[i]
        body cast(tanh(x), f32) output y"""
    (got,) = run_kernel(parse(text), 0, {"x": x})
    np.testing.assert_allclose(got, np.tanh(x.astype(np.float64)), rtol=2e-6, atol=1e-300, equal_nan=True)


def test_pow() -> None:
    base = [-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, np.inf, -np.inf, np.nan]
    power = [-3.0, -2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 7.0, np.inf, -np.inf, np.nan]
    x, y = (a.ravel().astype(np.float32) for a in np.meshgrid(base, power))
    text = f"""graph g input x: f32[{len(x)}] input y: f32[{len(x)}]
        z: f32[{len(x)}], q: f32[{len(x)}] = op [i: {len(x)}] reads x[i], y[i] body pow(x, y), pow(x, 2.0) output z, q"""
    check(text, {"x": x, "y": y})
    check("""graph g input x: f64[40] input s: f64[] y: f64[40], z: f64[40] = op [i: 40] reads x[i], s[]
        body pow(abs(x), f64(0.75)), where(and(gt(s, f64(0.0)), gt(x, f64(0.0))), pow(x, s), x) output y, z""")
    whole_numbers = {"x": np.arange(1.0, 41.0), "y": np.arange(40.0) % 9}
    text = "graph g input x: f64[40] input y: f64[40] z: f64[40] = op [i: 40] reads x[i], y[i] body pow(x, y) output z"
    got = check(text, whole_numbers)["z"]
    np.testing.assert_array_equal(got, whole_numbers["x"] ** whole_numbers["y"])
    a, b = (v.ravel().astype(np.int64) for v in np.meshgrid([-3, -1, 0, 1, 2, 10], [0, 1, 2, 5, 18]))
    text = f"graph g input x: i64[{len(a)}] input y: i64[{len(a)}] z: i64[{len(a)}] = op [i: {len(a)}]"
    check(text + " reads x[i], y[i] body pow(x, y) output z", {"x": a, "y": b})


@pytest.mark.parametrize("dtype", ["i32", "i64", "i8", "u8", "f32"])
def test_division_and_remainders(dtype: str) -> None:
    values = np.arange(0 if dtype[0] == "u" else -7, 8).astype(numpy_dtype(dtype))
    if dtype != "f32":  # the lowest integer has no opposite, and over 0 the result is 0
        values = np.append(values, np.iinfo(numpy_dtype(dtype)).min)
    x, y = (a.ravel() for a in np.meshgrid(values, values if dtype != "f32" else values[values != 0]))
    n = len(x)
    outs = ", ".join(f"o{i}: {dtype}[{n}]" for i in range(9))
    three = "3.0" if dtype == "f32" else f"{dtype}(3)"
    check(
        f"""graph g input x: {dtype}[{n}] input y: {dtype}[{n}] {outs} = op [i: {n}] reads x[i], y[i]
        body x / y, mod(x, y), fmod(x, y), min(x, y), max(x, y), sign(x), x / {three}, mod(x, {three}), fmod({three}, y)
        output {", ".join(f"o{i}" for i in range(9))}""",
        {"x": x, "y": y},
    )


def test_bits_booleans_and_casts() -> None:
    check("""graph g input x: u32[13] input s: u32[13] input p: bool[13] input q: bool[13] input f: f32[13]
        a: u32[13], b: u32[13], c: u32[13], d: bool[13], e: bool[13], h: i32[13], k: f16[13], l: bool[13], m: f64[13],
        n: i64[13] = op [i: 13] reads x[i], s[i], p[i], q[i], f[i]
        body shl(x, s), shr(x, s), xor(x, not(s)), xor(p, not(q)), eq(p, q), cast((f * 10.0), i32), cast(f, f16), cast(f, bool),
             cast(x, f64), (cast(p, i64) + cast(q, i64))
        output a, b, c, d, e, h, k, l, m, n""")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64", "i16", "i64", "u8"])
def test_dtypes(dtype: str) -> None:
    check(f"""graph g input x: {dtype}[5, 7] input y: {dtype}[7] z: {dtype}[5, 7] = op [i: 5, j: 7]
        reads x[i, j], y[j] body (x * y) + {dtype}({"0.1" if dtype in TOLERANCE else "3"}) output z""")


def test_literals_have_the_dtype_of_the_graph() -> None:
    """A bare Python literal is f32 or i32 to Triton where nothing says otherwise."""
    dtypes = ["f64", "f32", "f16", "i64", "i32", "i8", "u8", "u64"]
    values = {d: ("0.1", "-inf") if d in TOLERANCE else ("100", "3") for d in dtypes} | {"u64": ("18446744073709551615", "1")}
    ins = " ".join(f"input x_{d}: {d}[5]" for d in dtypes)
    outs = ", ".join(f"a_{d}: {d}[5], b_{d}: {d}[5], c_{d}: {d}[5]" for d in dtypes)
    reads = ", ".join(f"x_{d}[i]" for d in dtypes)
    body = ", ".join(
        f"{d}({v}), where(gt(index(i), 2), {d}({v}), {d}({w})), max(x_{d}, {d}({w}))" for d, (v, w) in values.items()
    )
    names = ", ".join(f"{n}_{d}" for d in dtypes for n in "abc")
    check(f"graph g {ins} {outs} = op [i: 5] reads {reads} body {body} output {names}")
    check("""graph g input p: bool[5] y: bool[5], z: bool[5] = op [i: 5] reads p[i]
        body where(p, false, true), and(p, eq(1, 1)) output y, z""")


def test_nothing_to_reduce_gives_the_identity() -> None:
    for monoid, want in (("sum", 0.0), ("max", -np.inf), ("prod", 1.0)):
        text = f"graph g input x: f32[3, 0] y: f32[3] = op [i: 3 | j: 0 {monoid}] reads x[i, j] body x then acc0 output y"
        graph = parse(text)
        k = Kernel(op=0, mode="full", block=((0, 3), (0, 0)), ins=(((0, 3), (0, 0)),), outs=(((0, 3),),))
        out = fresh(((0, 3),), "f32")
        launch(generate(graph, k), [torch.zeros(3, 0), out])
        np.testing.assert_array_equal(out.numpy(), want)


KNOWN = [  # counter index, draw, stream and key -> the four words (Random123's known answers)
    (0, 0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (-1, 0xFFFFFFFF, 0xFFFFFFFF, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (0x85A308D3_243F6A88, 0x13198A2E, 0x03707344, 0x299F31D0_A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("index", "draw", "stream", "key", "words"), KNOWN)
def test_philox_known_answers(index: int, draw: int, stream: int, key: int, words: str) -> None:
    signed = index - (1 << 64) if index >= 1 << 63 else index
    text = f"""graph g input c: i64[1] y: i64[4] = op [i: 4] reads c[0]
        body philox({key if key >= 0 else f"i64({key})"}, {stream}, {draw}, index(i), c) output y"""
    (y,) = run_kernel(parse(text), 0, {"c": np.array([signed])})
    assert " ".join(f"{v:08x}" for v in y) == words


def test_random_bits_do_not_depend_on_the_block() -> None:
    text = """graph g u: f32[9, 11] = op [i: 9, j: 11]
        body cast(shr(philox(987654321987, 3, 1, 0, index(11*i + j)), 8), f32) * 0.000000059604644775390625 output u"""
    graph = parse(text)
    want = interp.run(graph, {})["u"]
    (full,) = run_kernel(graph, 0, {})
    np.testing.assert_array_equal(full, want)
    assert full.min() >= 0 and full.max() < 1 and len(np.unique(full)) == full.size
    (part,) = run_kernel(graph, 0, {}, block=((4, 9), (3, 11)))
    np.testing.assert_array_equal(part, want[4:9, 3:11])


def test_no_masks_where_nothing_can_be_outside() -> None:
    text = "graph g input x: f32[64, 64] y: f32[64, 64] = op [i: 64, j: 64] reads x[i, j] body exp(x) output y"
    assert "mask" not in source_of(text)


def test_shared_parts_are_computed_once() -> None:
    source = source_of("graph g input x: f32[8] y: f32[8] = op [i: 8] reads x[i] body exp(x) * (exp(x) + 1.0) output y")
    assert source.count("tl.exp(") == 1


def test_indices_past_31_bits_are_wide() -> None:
    big = "graph g input x: f32[65536, 65536] y: f32[65536, 65536] = op [i: 65536, j: 65536] reads x[i, j] body exp(x) output y"
    assert "tl.int64" in source_of(big)
    assert "tl.int64" not in source_of(big.replace("65536", "64"))
    index = "graph g y: i64[64] = op [i: 64] body index(100000000*i) output y"
    assert "program_id(0).to(tl.int64)" in source_of(index)
    check(index)


def test_names_that_python_or_triton_has_taken() -> None:
    check("""graph g input "tanh": f32[3] input "x/lambda": f32[3] input tl: f32[3] input "1.weight": f32[3]
        "onnx::pid": f32[3] = op [range: 3] reads a = "tanh"[range], b = "x/lambda"[range], tl[range], c = "1.weight"[range]
        body (tanh(a) + b) + (tl * c) from "for" output "onnx::pid" """)


def test_equal_operations_share_a_key_and_others_do_not() -> None:
    text = """graph g input x: f32[8, 5] input w: f32[8, 5]
        y: f32[8, 5] = op [i: 8, j: 5] reads x[i, j] body exp(x)
        z: f32[8, 5] = op [i: 8, j: 5] reads w[i, j] body exp(w)
        q: f32[8, 5] = op [i: 8, j: 5] reads w[i, j] body log(w)
        n: i64[8, 5] = op [i: 8, j: 5] body index(5*i + j)
        output y, z, q, n"""
    graph = parse(text)
    keys = [kernel_key(graph, kernel_of(graph, i)) for i in range(4)]
    assert keys[0] == keys[1] != keys[2]

    def upper(at: int) -> Kernel:
        box = ((4, 8), (0, 5))
        return Kernel(op=at, mode="full", block=box, ins=(box,) * len(graph.ops[at].inputs), outs=(box,))

    def lower(at: int) -> Kernel:
        box = ((0, 4), (0, 5))
        return Kernel(op=at, mode="full", block=box, ins=(box,) * len(graph.ops[at].inputs), outs=(box,))

    assert kernel_key(graph, upper(0)) == kernel_key(graph, lower(1)) != keys[0]
    assert kernel_key(graph, upper(3)) != kernel_key(graph, lower(3)), "an index is global, so its origin matters"


def test_opaque_operations_are_refused_with_the_reason() -> None:
    x = parse("graph g input x: f32[3] y: f32[3] = op [i: 3] reads x[i] body x output y")
    op = Opaque(
        outs=("y",), ins=("x",), kind="NonZero", node=b"", opsets=(("", 21),), why="its output's size depends on values",
        in_axes=((),), out_axes=((),), source=("/nz",),
    )  # fmt: skip
    graph = Graph(name="g", tensors=x.tensors, ops=(op, *x.ops), inputs=("x",), outputs=("y",))
    assert "NonZero" in unavailable(graph, 0) and "depends on values" in unavailable(graph, 0)
    assert unavailable(graph, 1) == ""
    with pytest.raises(TapestryError, match="NonZero"):
        generate(graph, Kernel(op=0, mode="full", block=(), ins=(((0, 3),),), outs=(((0, 3),),)))


def test_a_kernel_file_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse("graph g input x: f32[3] y: f32[3] = op [i: 3] reads x[i] body x + 41.5 output y")
    tk = generate(graph, kernel_of(graph))
    load(tk, tmp_path)
    [path] = tmp_path.glob("*.py")
    path.write_text("raise SystemExit")
    monkeypatch.setitem(load.__globals__, "_FUNCTIONS", {})
    with pytest.raises(BuildError, match="hash"):
        load(tk, tmp_path)


def test_the_interpreter_rounds_to_bf16_as_a_gpu_does() -> None:
    text = "graph g\n input x: f32[1030]\n y: bf16[1030] = op [i: 1030] reads x[i] body cast(x, bf16)\n output y"
    x = np.random.default_rng(0).standard_normal(1030).astype(np.float32)
    x[:7] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, np.float32(1) + np.float32(2**-8)]
    (found,) = run_kernel(parse(text), 0, {"x": x})
    want = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(found.astype(np.float32), want)
