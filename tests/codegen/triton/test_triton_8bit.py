"""Products of 8-bit operands: floats and integers, in Triton's interpreter against the reference evaluator."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; ahead-of-time tests run in processes of their own

import itertools
import re

import numpy as np
import pytest

from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import FLOAT8, numpy_dtype
from tests.support.triton_kernels import (
    check,
    compare,
    poisoned_lanes,  # noqa: F401  (a fixture for every test here)
    random_arrays,
    run_kernel,
    source_of,
)

KINDS = sorted(FLOAT8)
TARGETS = ("sm80", "sm90", "sm100", "gfx942")


def unknown(target: str, *kinds: str) -> bool:
    """Whether this Triton's interpreter lacks a kind that the target multiplies (3.6 has none of AMD's)."""
    import triton

    return target == "gfx942" and any("fnuz" in k for k in kinds) and triton.__version__.startswith("3.6.")


def product(a: str, b: str, sizes: tuple[int, int, int] = (35, 37, 39), *, turned: bool = True, then: str = "acc0") -> str:
    m, n, k = sizes
    w = f"w: {b}[{n}, {k}]" if turned else f"w: {b}[{k}, {n}]"
    return f"""graph g input x: {a}[{m}, {k}] input {w} input s: f32[{n}]
        y: f32[{m}, {n}] = op [i: {m}, n: {n} | m: {k} sum] reads x[i, m], w[{"n, m" if turned else "m, n"}], s[n]
          body cast(x, f32) * cast(w, f32) then {then}
        output y"""


def dots(source: str) -> list[str]:
    return re.findall(r"tl\.dot\(.*\)", source)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_float_of_8_bits_is_widened_exactly(kind: str, target: str) -> None:
    """All 256 of them, NaN and infinities included, whether the chip converts them or their bits are moved."""
    if unknown(target, kind):
        pytest.skip("this Triton's interpreter has no such type")
    bits = np.arange(256, dtype=np.uint8).view(numpy_dtype(kind))
    text = f"graph g input x: {kind}[256] y: f32[256] = op [i: 256] reads x[i] body cast(x, f32) * 1.0 output y"
    (got,) = run_kernel(parse(text), 0, {"x": bits}, target=target)
    np.testing.assert_array_equal(got, bits.astype(np.float32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("a", "b"), [(a, b) for a, b in itertools.product(KINDS, KINDS) if a <= b])
def test_products_of_floats_of_8_bits(a: str, b: str) -> None:
    for target in (t for t in TARGETS if not unknown(t, a, b)):
        check(product(a, b), target=target)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (17, 64, 33), (64, 64, 128), (130, 129, 257)])
def test_sizes_and_orders(sizes: tuple[int, int, int], turned: bool) -> None:
    for kind in ("f8e4m3fn", "i8", "u8"):
        check(product(kind, kind, sizes, turned=turned, then="acc0 * s"))


def test_native_operands_stay_as_they_are() -> None:
    for kind, target, wanted in (
        ("f8e4m3fn", "sm90", True), ("f8e5m2", "sm100", True), ("f8e4m3fn", "sm80", False), ("f8e5m2", "sm80", False),
        ("f8e4m3fnuz", "gfx942", True), ("f8e4m3fn", "gfx942", False), ("f8e4m3fnuz", "sm90", False),
    ):  # fmt: skip
        source = source_of(product(kind, kind, (64, 64, 64)), target)
        assert ("max_num_imprecise_acc" in dots(source)[0]) == wanted, (kind, target)
        assert (".to(tl.float16)" in source or "= f8" in source) != wanted, source
    assert "max_num_imprecise_acc=128" in dots(source_of(product("f8e4m3fn", "f8e5m2", (256, 256, 1024))))[0]


def test_the_shorter_type_that_holds_both() -> None:
    for a, b, wanted in (("f8e5m2", "bf16", "tl.bfloat16"), ("i8", "f16", "tl.float16"), ("u8", "bf16", "tl.bfloat16")):
        text = product(a, b)
        assert wanted in source_of(text) and "ieee" in dots(source_of(text))[0]
        check(text)


# integers


def integers(a: str, b: str, za: str, zb: str, sizes: tuple[int, int, int] = (35, 37, 39), out: str = "i32") -> str:
    """Differences from zero points, multiplied and summed in i32, or in f32 where ``out`` says so."""
    m, n, k = sizes
    x, w = (f"(cast({v}, i32) - {z})" if z else f"cast({v}, i32)" for v, z in (("x", za), ("w", zb)))
    x, w = (f"cast({v}, f32)" if out == "f32" else v for v in (x, w))
    return f"""graph g input x: {a}[{m}, {k}] input w: {b}[{n}, {k}] input p: {a}[] input q: {b}[{n}] input r: {a}[{m}]
        y: {out}[{m}, {n}] = op [i: {m}, n: {n} | m: {k} sum] reads x[i, m], w[n, m], p[], q[n], r[i]
          body {x} * {w} then acc0
        output y"""


def whole_range(text: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Integers of 8 bits over all their range."""
    graph, rng = parse(text), np.random.default_rng(seed)
    made = random_arrays(graph)
    for t in graph.inputs:
        if graph.tensors[t].dtype in ("i8", "u8"):
            dtype = numpy_dtype(graph.tensors[t].dtype)
            limits = np.iinfo(dtype)
            made[t] = rng.integers(limits.min, limits.max + 1, graph.tensors[t].shape).astype(dtype)
    return made


ZEROS = ["", "i32(0)", "i32(7)", "cast(p, i32)", "cast(r, i32)"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("za", ZEROS)
@pytest.mark.parametrize("zb", ["", "i32(-3)", "cast(q, i32)"])
@pytest.mark.parametrize(("a", "b"), [("i8", "i8"), ("u8", "i8"), ("u8", "u8")])
def test_integers_are_summed_exactly(a: str, b: str, za: str, zb: str) -> None:
    zb = zb if b == "i8" or zb != "i32(-3)" else "i32(128)"
    for out in ("i32", "f32"):
        text = integers(a, b, za, zb, out=out)
        assert "out_dtype=tl.int32" in dots(source_of(text))[0], text
        check(text, whole_range(text))


def test_symmetric_zero_points_cost_nothing() -> None:
    for a, b, za, zb in (("i8", "i8", "", "i32(0)"), ("u8", "i8", "i32(128)", ""), ("u8", "u8", "i32(128)", "i32(128)")):
        assert "tl.sum" not in source_of(integers(a, b, za, zb))
    assert source_of(integers("u8", "i8", "i32(3)", "")).count("tl.sum") == 1


@pytest.mark.slow
def test_integers_that_matrix_units_cannot_sum() -> None:
    """A zero point along the reduction, one too far away, operands of 16 bits, and sums of floats that might leave i32."""
    text = integers("i8", "i8", "cast(p, i32)", "").replace("input p: i8[]", "input p: i8[39]").replace("p[],", "p[m],")
    for changed in (text, integers("i8", "i8", "i32(300)", ""), integers("i16", "i8", "", "")):
        assert not dots(source_of(changed)), changed
        check(changed, whole_range(changed))
    assert "tl.float16" in source_of(integers("i8", "i8", "", "", (32, 32, 1 << 17), "f32"))
    assert "tl.int32" in dots(source_of(integers("i8", "i8", "", "", (32, 32, (1 << 17) - 1), "f32")))[0]


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_integers_by_descriptors_and_in_parts(split: int, persistent: bool) -> None:
    config = KernelConfig(bm=64, bn=32, bk=32, descriptors=True, persistent=persistent, split_k=split)
    for text in (
        integers("i8", "i8", "i32(5)", "cast(q, i32)", (65, 70, 96)),
        integers("u8", "i8", "", "", (65, 70, 96), "f32"),
    ):
        check(text, whole_range(text), config)
    check(product("f8e4m3fn", "f8e5m2", (65, 70, 96)), config=config)


@pytest.mark.slow
def test_copies_have_k_last() -> None:
    """Matrix units take operands of 8 bits along k only: others are copied first."""
    for kind in ("f8e4m3fn", "i8", "u8"):
        text = product(kind, kind, (64, 96, 160), turned=False)
        check(text, whole_range(text) if kind[0] in "iu" else None, KernelConfig(bm=64, bn=32, bk=32, packed=True))
    graph = parse(product("f8e4m3fn", "f8e4m3fn", (4096, 4096, 4096), turned=False))
    from tapestry.codegen.triton.kernel_config import default_config
    from tapestry.codegen.triton.task.kernel_choice import kernel_form
    from tests.support.triton_kernels import kernel_of

    config = default_config(kernel_form(graph, kernel_of(graph)))
    assert config.packed and config.descriptors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["f8e4m3fn", "f8e5m2", "i8", "u8"])
@pytest.mark.parametrize("channels", [3, 18])
def test_convolutions(kind: str, channels: int) -> None:
    pad, zero = ("9", " - i32(9)") if kind[0] in "iu" else ("0.0", "")
    wide = "i32" if kind[0] in "iu" else "f32"
    text = f"""graph g input x: {kind}[2, {channels}, 9, 8] input w: {kind}[20, {channels}, 3, 3]
        y: {wide}[2, 20, 5, 4] = op [b: 2, o: 20, h: 5, w: 4 | c: {channels} sum, r: 3 sum, s: 3 sum]
          reads x[b, c, 2*h + r - 1, 2*w + s - 1] else {pad}, w[o, c, r, s]
          body (cast(x, {wide}){zero}) * cast(w, {wide}) then acc0
        output y"""
    text = text.replace("else 0.0", "else 0")
    assert dots(source_of(text))
    check(text, whole_range(text) if zero else None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["f8e4m3fn", "f8e5m2", "i8"])
def test_attention(kind: str) -> None:
    text = f"""graph g input q: {kind}[2, 4, 19, 24] input k: {kind}[2, 2, 35, 24] input v: {kind}[2, 2, 35, 24]
        y: f32[2, 4, 19, 24] = op [b: 2, h: 4, i: 19, e: 24 | n: 35 softsum]
          reads q[b, h, i, m], k[b, floor((h)/2), n, m], v[b, floor((h)/2), n, e]
          let [m: 24 sum] cast(q, f32) * cast(k, f32) body let0 * 0.01, 1.0, cast(v, f32) then acc2 / acc1
        output y"""
    first, second = dots(source_of(text))
    assert ("max_num_imprecise_acc" in first) == (kind != "i8") and "tl.float16" in second
    graph = parse(text)
    values = whole_range(text)
    from tapestry.verify import interp

    (got,) = run_kernel(graph, 0, values)
    want = interp.run(graph, values, wide=True)["y"]
    compare(got, want, "f16")  # weights are rounded to f16


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [35, 40, 60])
def test_passes_of_an_operation_with_a_long_name_have_names_of_their_own(length: int) -> None:
    """Both operands are copied into rows first; names are cut at forty letters, behind which the passes differ."""
    name = "y" * length
    text = f"""graph g input x: i8[350, 390] input w: i8[370, 390]
        {name}: i32[350, 370] = op [i: 350, n: 370 | m: 390 sum] reads x[i, m], w[n, m] body cast(x, i32) * cast(w, i32)
        output {name}"""
    graph = parse(text)
    functions = re.findall(r"^def (y\w*|pass\w*)\(", source_of(text), re.M)
    assert len(functions) == 3 == len(set(functions))
    arrays = random_arrays(graph)
    (got,) = run_kernel(graph, 0, arrays)
    np.testing.assert_array_equal(got, arrays["x"].astype(np.int32) @ arrays["w"].astype(np.int32).T)
