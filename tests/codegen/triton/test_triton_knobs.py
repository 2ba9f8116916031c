"""Every knob of a generated kernel: the same result from the interpreter, whatever the tuner turns; and the model's choices."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; ahead-of-time tests run in processes of their own

import pytest

from tapestry.codegen.triton import KernelConfig, candidates, default_config, generate, kernel_form
from tapestry.codegen.triton.task.lowered import points
from tapestry.errors import TapestryError
from tapestry.ir.syntax.parser import parse
from tests.support.triton_kernels import check, kernel_of, poisoned_lanes  # noqa: F401
from tests.support.triton_streams import PLAIN, STREAMS, attention


def matmul(dtype: str, m: int, n: int, k: int, batch: str = "", transposed: bool = False) -> str:
    lead, at = (f"{batch}, ", "b, ") if batch else ("", "")
    dims = f"b: {batch}, " if batch else ""
    w, w_at = (f"[{lead}{n}, {k}]", f"[{at}n, m]") if transposed else (f"[{lead}{k}, {n}]", f"[{at}m, n]")
    return f"""graph g input x: {dtype}[{lead}{m}, {k}] input w: {dtype}{w} input c: {dtype}[{n}]
        y: {dtype}[{lead}{m}, {n}] = op [{dims}i: {m}, n: {n} | m: {k} sum] reads x[{at}i, m], w{w_at}, c[n]
          body cast(x, f32) * cast(w, f32) then cast(max(acc0 + cast(c, f32), 0.0), {dtype})
        output y"""


FORMS = {
    "descriptors": KernelConfig(bm=64, bn=32, bk=16, descriptors=True),
    "descriptors, persistent": KernelConfig(bm=16, bn=16, bk=32, descriptors=True, persistent=True, group=2),
    "persistent": KernelConfig(bm=16, bn=16, bk=16, persistent=True, group=2),
    "split": KernelConfig(bm=16, bn=16, bk=16, split_k=4),
    "all": KernelConfig(bm=16, bn=32, bk=16, descriptors=True, persistent=True, split_k=2),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_contractions_in_every_form(form: str, dtype: str) -> None:
    """Extents that no tile divides; rows that are multiples of 16 bytes, as descriptors need them."""
    for text in (
        matmul(dtype, 37, 40, 80),
        matmul(dtype, 33, 24, 48, transposed=True),
        matmul(dtype, 21, 24, 48, batch="3"),
    ):
        source = generate(graph := parse(text), kernel_of(graph), FORMS[form]).source
        assert ("_desc" in source) == FORMS[form].descriptors
        check(text, config=FORMS[form])


def test_more_tiles_than_multiprocessors() -> None:
    """A persistent grid whose programs have several tiles, not all of them equally many."""
    text = matmul("bf16", 16 * 13, 16 * 13, 16)
    config = KernelConfig(bm=16, bn=16, bk=16, persistent=True, descriptors=True)
    made = generate(graph := parse(text), kernel_of(graph), config)
    assert made.grid == (132,) and "tl.range(first_tile, 169, 132" in made.source
    check(text, config=config)


def test_rows_that_no_descriptor_can_copy_are_loaded_by_pointers() -> None:
    for text in (matmul("bf16", 33, 21, 37), matmul("f32", 16, 16, 16)):
        made = generate(graph := parse(text), kernel_of(graph), KernelConfig(bm=16, bn=16, bk=16, descriptors=True))
        assert not made.passes[0].descriptors or "f32" in text
        check(text, config=KernelConfig(bm=16, bn=16, bk=16, descriptors=True))


def test_convolution_with_channels_last() -> None:
    text = """graph g input x: bf16[2, 7, 9, 16] input k: bf16[3, 3, 16, 24]
        y: bf16[2, 4, 5, 24] = op [b: 2, h: 4, w: 5, o: 24 | r: 3 sum, s: 3 sum, c: 16 sum]
          reads x[b, 2*h + r - 1, 2*w + s - 1, c] else 0.0, k[r, s, c, o] body cast(x, f32) * cast(k, f32)
          then cast(acc0, bf16)
        output y"""
    check(text)
    check(text, config=KernelConfig(bm=16, bn=16, bk=16))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_streaming_sums_in_every_form(name: str, descriptors: bool, parts: int) -> None:
    """Tiles of keys without a mask, with one, and never visited; keys in parts over the grid (flash-decoding)."""
    check(STREAMS[name], config=KernelConfig(bm=16, bn=16, descriptors=descriptors, split_k=parts))


def test_heads_that_share_keys_are_rows_of_one_tile_when_queries_are_few() -> None:
    graph = parse(STREAMS["one query for eight heads"])
    found = kernel_form(graph, kernel_of(graph))
    assert found.streamed is not None and points(found.streamed.rows) == 4
    many = kernel_form(g := parse(attention("bf16", PLAIN, (8, 2), (64, 96), 32)), kernel_of(g))
    assert many.streamed is not None and [d.name for d in many.streamed.rows] == ["i"]


def test_tiles_that_every_row_sees_have_no_mask() -> None:
    source = generate(graph := parse(STREAMS["causal"]), kernel_of(graph), KernelConfig(bm=16, bn=16)).source
    first, second = source.split("for n_0 in tl.range(")[1:]
    assert 'float("-inf")' not in first.split("tl.maximum")[0] and "tl.where(" in second.split("tl.maximum")[0]


SPLIT = {
    "sum": "x then acc0", "max": "x then acc0", "moments": "1.0, x, 0.0 then acc1 + sqrt(acc2 / acc0)",
    "logsumexp": "x, 1.0 then acc0 + log(acc1)", "argmax": "x, index(j) then acc0",
}  # fmt: skip


@pytest.mark.parametrize("monoid", SPLIT)
def test_reductions_in_parts_over_the_grid(monoid: str) -> None:
    text = f"""graph g input x: f32[3, 48] y: f32[3] = op [i: 3 | j: 48 {monoid}] reads x[i, j] body {SPLIT[monoid]} output y"""
    made = generate(graph := parse(text), kernel_of(graph), KernelConfig(rows=2, cols=4, split_k=4))
    assert (
        len(made.passes) == 2
        and len(made.scratch) == len(SPLIT[monoid].split(" then ")[0].split(", ")) - (monoid == "argmax") * 0
    )
    check(text, config=KernelConfig(rows=2, cols=4, split_k=4))


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32"])
def test_precision_is_named_in_the_kernel(precision: str) -> None:
    graph = parse(matmul("f32", 32, 32, 32))
    source = generate(graph, kernel_of(graph), precision=precision).source
    assert f'input_precision="{precision}"' in source and f"f32 ({precision})" in source.split("import triton")[0]
    half = parse(matmul("bf16", 32, 32, 32))
    assert 'input_precision="ieee"' in generate(half, kernel_of(half), precision=precision).source


def test_unknown_precision_and_target() -> None:
    graph = parse(matmul("f32", 32, 32, 32))
    with pytest.raises(TapestryError, match="unknown precision"):
        generate(graph, kernel_of(graph), precision="fp8")
    with pytest.raises(TapestryError, match="unknown Triton target"):
        generate(graph, kernel_of(graph), target="sm61")


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_candidates_fit_and_begin_with_the_default(target: str) -> None:
    for text in (matmul("bf16", 512, 512, 512), matmul("f32", 64, 64, 64), STREAMS["causal"], STREAMS["plain"]):
        graph = parse(text)
        found = kernel_form(graph, kernel_of(graph))
        options = list(candidates(found, target))
        assert options[0] == default_config(found, target) and len(options) == len(set(options)) > 1
        if target in ("sm80", "gfx942"):
            assert not any(k.descriptors for k in options)


CONV = """graph g input x: bf16[2, 16, 9, 7] input k: bf16[24, 16, 3, 3]
    y: bf16[2, 24, 5, 4] = op [b: 2, o: 24, h: 5, w: 4 | c: 16 sum, r: 3 sum, s: 3 sum]
      reads x[b, c, 2*h + r - 1, 2*w + s - 1] else 0.0, k[o, c, r, s] body cast(x, f32) * cast(k, f32)
      then cast(acc0, bf16)
    output y"""


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("descriptors", [False, True])
def test_operands_copied_into_rows_first(parts: int, descriptors: bool) -> None:
    """Channels in front, and rows that are no multiples of 16 bytes."""
    for text in (CONV, matmul("bf16", 33, 21, 38), matmul("f16", 17, 19, 22, transposed=True), matmul("bf16", 9, 21, 26, "2")):
        config = KernelConfig(bm=16, bn=16, bk=16, packed=True, split_k=parts, descriptors=descriptors)
        made = generate(graph := parse(text), kernel_of(graph), config)
        assert len(made.passes) > parts and len(made.scratch) == len(made.passes) - 1
        check(text, config=config)


def test_the_model_copies_operands_of_large_products_only() -> None:
    for text, wanted in ((CONV, False), (matmul("bf16", 2047, 2049, 2047), True), (matmul("bf16", 2048, 2048, 2048), False)):
        graph = parse(text)
        assert default_config(kernel_form(graph, kernel_of(graph))).packed == wanted
