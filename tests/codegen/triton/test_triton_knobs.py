"""Every knob of a generated kernel: the same result from the interpreter, whatever the tuner turns; and the model's choices."""

from __future__ import annotations

import os
import re
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; ahead-of-time tests run in processes of their own

import pytest

from tapestry.codegen.blocks.lowered import points
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import generate
from tapestry.codegen.triton.kernel_config import candidates, default_config
from tapestry.codegen.triton.task.chips import CHIPS
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.errors import TapestryError
from tapestry.ir.syntax.parser import parse
from tests.support.triton_kernels import check, kernel_of, poisoned_lanes  # noqa: F401
from tests.support.triton_streams import CAUSAL, PLAIN, STREAMS, attention


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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_residuals_in_every_form(form: str) -> None:
    """What every cell of a result needs besides its sum and a bias, of 16 bits by descriptor, of 32 by pointers."""
    for kind, batch in (("bf16", 1), ("f16", 3), ("f32", 2)):
        text = f"""graph g input x: f16[{batch}, 37, 80] input w: f16[80, 40] input c: f16[40] input r: {kind}[{batch}, 37, 40]
            y: f16[{batch}, 37, 40] = op [b: {batch}, i: 37, n: 40 | m: 80 sum] reads x[b, i, m], w[m, n], c[n], r[b, i, n]
              body cast(x, f32) * cast(w, f32) then cast(((acc0 + cast(c, f32)) * cast(r, f32)), f16)
            output y"""
        graph = parse(text)
        made = generate(graph, kernel_of(graph), FORMS[form])
        assert ("r_desc.load" in made.source) == (FORMS[form].descriptors and kind != "f32" and FORMS[form].split_k == 1)
        check(text, config=FORMS[form])


def siblings(rows: int, columns: int, then: str, *, reads: str = "") -> str:
    """Three products of one matrix side by side, the first two with biases."""
    w = f"[48, {columns}]"
    return f"""graph g input x: f16[{rows}, 48] input u: f16{w} input v: f16{w} input w: f16{w}
        input a: f16[{columns}] input b: f16[{columns}] input c: f16[{columns}]
        p: f16[{rows}, {columns}], q: f16[{rows}, {columns}], r: f16[{rows}, {columns}]
          = op [i: {rows}, n: {columns} | m: 48 sums3] reads x[i, m], u[m, n], v[m, n], w[m, n], a[n], b[n]{reads}
          body cast(x, f32) * cast(u, f32), cast(x, f32) * cast(v, f32), cast(x, f32) * cast(w, f32)
          then {then}
        output p, q, r"""


SIBLINGS = {
    "alike": (siblings(37, 40, "cast(acc0, f16), cast(acc1, f16), cast(acc2, f16)").replace(", a[n], b[n]", ""), "factor"),
    "a bias each": (siblings(37, 40, "cast(acc0, f16) + a, cast(acc1, f16) + b, cast(acc2, f16) + c", reads=", c[n]"), "term"),
    "one without": (siblings(37, 40, "(cast(acc0, f16) + a) * f16(0.5), cast(acc1, f16) + b, cast(acc2, f16)"), "factor"),
    "few rows": (siblings(5, 136, "cast(acc0, f16) + a, cast(acc1, f16) + b, cast(acc2, f16) + c", reads=", c[n]"), "factor"),
    "in another order": (siblings(37, 40, "cast(acc2, f16) + a, cast(acc0, f16) + b, cast(acc1, f16)"), "factor"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SIBLINGS)
@pytest.mark.parametrize("descriptors", [False, True])
def test_sums_side_by_side_have_tiles_of_their_own(name: str, descriptors: bool) -> None:
    """One loop for all of them, which calls what they differ in the same; results in branches."""
    text, common = SIBLINGS[name]
    config = KernelConfig(bm=16, bn=16, bk=16, descriptors=descriptors, apart=True, group=2)
    made = generate(graph := parse(text), kernel_of(graph), config)
    assert made.source.count("tl.dot(") == 1 and made.source.count(" else:") == 2 and f"{common}_" in made.source
    assert made.grid == (3 * -(-points(graph.ops[0].dims[:1]) // 16) * -(-points(graph.ops[0].dims[1:]) // 16),)
    check(text, config=config)


def test_only_sums_with_results_of_their_own_are_taken_apart() -> None:
    large = parse(siblings(4096, 768, "cast(acc0, f16) + a, cast(acc1, f16) + b, cast(acc2, f16)").replace("48", "768"))
    assert default_config(kernel_form(large, kernel_of(large))).apart
    gated = parse(siblings(4096, 768, "cast(acc0, f16) + a, cast(acc1 * sigmoid(acc0), f16) + b, cast(acc2, f16)"))
    assert not any(k.apart for k in candidates(kernel_form(gated, kernel_of(gated))))


def test_a_product_of_nothing_has_settings() -> None:
    empty = parse(matmul("f16", 64, 64, 64, batch="3"))
    kernel = kernel_of(empty)
    none = replace(kernel, block=((1, 1), *kernel.block[1:]), outs=(((1, 1), *kernel.outs[0][1:]),))
    for target in CHIPS:
        assert generate(empty, none, target=target).launches == ()


@pytest.mark.slow
def test_more_tiles_than_multiprocessors() -> None:
    """A persistent grid whose programs have several tiles, not all of them equally many."""
    text = matmul("bf16", 16 * 13, 16 * 13, 16)
    config = KernelConfig(bm=16, bn=16, bk=16, persistent=True, descriptors=True)
    made = generate(graph := parse(text), kernel_of(graph), config)
    assert made.grid == (132,) and "tl.range(first_tile, 169, 132" in made.source
    check(text, config=config)


@pytest.mark.slow
def test_descriptors_of_the_program_itself() -> None:
    """For loads by warps of their own; the default is what was known before, also where the model takes them for faster."""
    text = matmul("bf16", 16 * 13, 16 * 13, 16)
    config = KernelConfig(bm=16, bn=16, bk=16, persistent=True, descriptors=True, warp_specialize=True)
    made = generate(graph := parse(text), kernel_of(graph), config)
    assert not made.passes[0].descriptors and made.source.count("tl.make_tensor_descriptor(") == 3
    assert "warp_specialize=True" in made.source
    check(text, config=config)
    for m, n, k in ((4096, 4096, 4096), (4095, 4097, 1023)):
        large = parse(matmul("bf16", m, n, k))
        options = [k.warp_specialize for k in candidates(kernel_form(large, kernel_of(large)))]
        assert True in options and not options[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("score", [PLAIN, CAUSAL.format(d="")])
def test_attention_with_warps_that_load_is_tuned_first_and_no_default(score: str) -> None:
    text = attention("bf16", score, (2, 2), (70, 70), 64)
    check(text, config=KernelConfig(bm=16, bn=16, descriptors=True, warp_specialize=True, one_loop=True))
    large = parse(text.replace("70", "4096"))
    special = [k.warp_specialize for k in candidates(kernel_form(large, kernel_of(large)))]
    assert not special[0] and any(special[:4])
    small = parse(text.replace("70", "40"))  # two groups of warps have 128 rows
    assert not any(k.warp_specialize for k in candidates(kernel_form(small, kernel_of(small))))


def test_a_long_epilogue_leaves_room_for_another_program() -> None:
    """What stands behind a sum keeps matrix units waiting, unless another program of the multiprocessor has products to do."""
    after = "cast((f32(0.5) * acc0) * (f32(1.0) + erf(acc0 * f32(0.7071))), f16)"
    text = matmul("f16", 4096, 3072, 768).replace("cast(max(acc0 + cast(c, f32), 0.0), f16)", after).replace(", c[n]", "")
    k = default_config(kernel_form(g := parse(text.replace("input c: f16[3072]", "")), kernel_of(g)), "sm90")
    assert 2 * k.num_stages * (k.bm + k.bn) * k.bk * 2 <= CHIPS["sm90"].shared and k.bm * k.bn < 128 * 128, k


@pytest.mark.sampled(1)
@pytest.mark.parametrize("columns", [300, 1024])
def test_sums_beside_a_centred_state_are_folded_with_it(columns: int) -> None:
    """Cross-entropy: an exponential for each element, none for each merge of two lanes."""
    text = f"""graph g input x: bf16[37, {columns}] input t: i64[37]
        y: f32[37] = op [i: 37 | n: {columns} logsumexp.sum] reads x[i, n], t[i]
          body cast(x, f32), 1.0, where(eq(t, index(n)), cast(x, f32), 0.0)
          then log(acc1) + (acc0 - acc2)
        output y"""
    for config in (None, KernelConfig(rows=4, cols=128), KernelConfig(rows=2, cols=1024)):
        source = generate(graph := parse(text), kernel_of(graph), config).source
        assert "tl.reduce(" not in source and source.count("tl.exp2(") == 1, source
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


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_streaming_sums_in_every_form(name: str, descriptors: bool, parts: int) -> None:
    """Tiles of keys without a mask, with one, and never visited; keys in parts over the grid (flash-decoding)."""
    check(STREAMS[name], config=KernelConfig(bm=16, bn=16, descriptors=descriptors, split_k=parts))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [n for n in STREAMS if "causal" in n])
@pytest.mark.parametrize("parts", [1, 2])
def test_one_loop_over_keys_that_some_row_sees(name: str, parts: int) -> None:
    config = KernelConfig(bm=16, bn=16, descriptors=True, split_k=parts, one_loop=True)
    graph = parse(STREAMS[name])
    assert generate(graph, kernel_of(graph), config).source.count("tl.range(") == 1
    check(STREAMS[name], config=config)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("low", "first"), [("-3.3895313892515355e38", 40), ("-3.4028234663852886e38", 96), ("-65504.0", 40)])
def test_keys_that_are_added_the_least_number(dtype: str, low: str, first: int) -> None:
    """As exporters write masks: whole tiles of a row may have it, and a row that sees nothing has the mean of the values."""
    shown = f"(let0 * 0.125) + where(ge(index(n), {first}), 0.0, f32({low}))"
    text = attention(dtype, shown, (2, 2), (37, 96), 16)
    check(text, config=KernelConfig(bm=16, bn=16))
    check(text, config=KernelConfig(bm=16, bn=64))  # the last one before the loop


def test_heads_that_share_keys_are_rows_of_one_tile_when_queries_are_few() -> None:
    graph = parse(STREAMS["one query for eight heads"])
    found = kernel_form(graph, kernel_of(graph))
    assert found.streamed is not None and points(found.streamed.rows) == 4
    many = kernel_form(g := parse(attention("bf16", PLAIN, (8, 2), (64, 96), 32)), kernel_of(g))
    assert many.streamed is not None and [d.name for d in many.streamed.rows] == ["i"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mask", "shown"), [
    (CAUSAL.format(d=" + 95"), ""), (CAUSAL.format(d=" + 94"), "index_n"),
    ("where(and(and(true, ge(index(n), 0)), gt(let0, 0.0)), let0, f32(-inf))", "let0"),
    ("where(or(lt(index(n), 96), gt(let0, 0.0)), let0, f32(-inf))", ""),
])  # fmt: skip
def test_tests_of_places_that_always_hold_are_not_made(mask: str, shown: str) -> None:
    text = attention("bf16", mask, (8, 2), (3, 96), 32)
    source = generate(graph := parse(text), kernel_of(graph), KernelConfig(bm=16, bn=16)).source
    assert "True" not in source and (" >= " in source) == (shown == "index_n"), source
    check(text, config=KernelConfig(bm=16, bn=16))


def test_tiles_that_every_row_sees_have_no_mask() -> None:
    """Those that need one come first, written out; there is one loop."""
    source = generate(graph := parse(STREAMS["causal"]), kernel_of(graph), KernelConfig(bm=16, bn=16)).source
    before, after = source.split("for n_0 in tl.range(")
    masked, rest = before.split("if n_0 < n_end:")[1], after.split("top = highest")[0]
    assert "int64" not in source, "places are compared in as many bits as indices have"
    assert "tl.where(" in masked.split("tl.maximum")[0] and 'float("-inf")' not in rest.split("tl.maximum")[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "tiles"), [("", 2), (" + 3", 3), (" + 15", 2), (" + 31", 2)])
@pytest.mark.parametrize("keys", [64, 70])
def test_tiles_that_some_rows_see_are_counted(d: str, tiles: int, keys: int) -> None:
    """Of 32 rows and 16 keys: two where they begin alike, else three."""
    text = attention("f16", CAUSAL.format(d=d), (2, 2), (keys, keys), 8)
    config = KernelConfig(bm=32, bn=16)
    source = generate(graph := parse(text), kernel_of(graph), config).source
    assert source.count("if n_0 < n_end:") == tiles and "tl.range(0, n_clear, BN)" in source
    check(text, config=config)


def test_many_tiles_with_a_mask_are_not_written_out() -> None:
    text = attention("f16", CAUSAL.format(d=""), (2, 2), (70, 70), 8)
    source = generate(graph := parse(text), kernel_of(graph), KernelConfig(bm=64, bn=16)).source
    assert " if " not in source and "tl.range(0, n_end, BN)" in source
    check(text, config=KernelConfig(bm=64, bn=16))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_scores_that_are_rounded_skip_what_the_mask_hides(dtype: str) -> None:
    """ONNX's Attention rounds masked scores to 16 bits; the mask is seen through the rounding, and the factor is folded."""
    rounded = f"cast(cast({CAUSAL.format(d='')}, {dtype}), f32)"
    text = attention(dtype, rounded, (2, 1), (70, 70), 16)
    source = generate(graph := parse(text), kernel_of(graph), KernelConfig(bm=16, bn=16)).source
    assert "n_clear" in source and "0.125" not in re.sub("#.*", "", source.split("@triton.jit")[1])
    check(text, config=KernelConfig(bm=16, bn=16))
    added = attention(dtype, f"cast(cast((let0 * 0.25), {dtype}) + {dtype}(1.5), f32)", (2, 1), (33, 50), 16)
    check(added, config=KernelConfig(bm=16, bn=16))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("parts", "deep"), [(3, (75, 90, 41)), (4, (100, 120, 55))])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_the_last_part_of_a_product_may_be_short(dtype: str, parts: int, deep: tuple[int, int, int]) -> None:
    """Parts of whole tiles: the reads of the last one give zeros past the end."""
    texts = matmul(dtype, 37, 40, deep[0]), matmul(dtype, 21, 24, deep[1], batch="3")
    for text in (*texts, matmul(dtype, 33, 24, deep[2], transposed=True)):
        graph, config = parse(text), KernelConfig(bm=16, bn=16, bk=16, split_k=parts)
        assert len(generate(graph, kernel_of(graph), config).passes) == 2
        check(text, config=config)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pad", ["0.0", "1.0"])
def test_pads_in_a_short_part(pad: str) -> None:
    """A pad of ones is no zero past the end."""
    text = f"""graph g input x: f32[20, 70] input w: f32[70, 24] y: f32[20, 24] = op [i: 20, n: 24 | m: 75 sum]
        reads x[i, m - 2] else {pad}, w[m - 2, n] else {pad} body x * w then acc0 output y"""
    check(text, config=KernelConfig(bm=16, bn=16, bk=16, rows=4, cols=16, split_k=3))


@pytest.mark.parametrize("keys", [300, 1000, 4095, 4096, 4097, 32769])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32)])
def test_decoding_fills_the_chip_at_any_length(heads: tuple[int, int], keys: int) -> None:
    text = attention("bf16", PLAIN, heads, (1, keys), 128).replace("[2, ", "[1, ").replace("[b: 2,", "[b: 1,")
    made = generate(graph := parse(text), kernel_of(graph))
    assert made.grid[0] >= 128, made.config


def test_what_memory_decides_keeps_bytes_on_their_way() -> None:
    """A product with one row: programs times the tiles that each has asked for, and no program with twice another's share."""
    for n in (4096, 11008):
        text = f"""graph g input x: f16[1, 4096] input w: f16[4096, {n}] y: f16[1, {n}] = op [i: 1, n: {n} | m: 4096 sum]
            reads x[i, m], w[m, n] body cast(x, f32) * cast(w, f32) then cast(acc0, f16) output y"""
        made = generate(graph := parse(text), kernel_of(graph))
        c = made.config
        assert made.grid[0] * c.rows * c.cols * 2 * (c.num_stages - 1) >= 2.5e6 and c.rows * 2 >= 64, c
        assert f"num_stages={c.num_stages}" in made.source
    wide = parse(matmul("bf16", 16, 11008, 4096))
    assert not default_config(kernel_form(wide, kernel_of(wide))).persistent, (
        "a second program of each processor goes on meanwhile"
    )


def test_a_short_read_does_not_decide_how_tiles_lie() -> None:
    text = """graph g input x: bf16[512, 4096] input t: f32[512] y: f32[512] = op [i: 512 | j: 4096 sum]
        reads x[i, j], t[i] body cast(x, f32) * t then acc0 output y"""
    c = default_config(kernel_form(g := parse(text), kernel_of(g)))
    assert c.cols >= 512, c


@pytest.mark.parametrize("stages", [1, 3])
def test_reductions_that_load_ahead(stages: int) -> None:
    text = """graph g input x: f16[5, 100] input w: f16[100, 24] y: f32[24] = op [n: 24 | m: 100 sum]
        reads x[2, m], w[m, n] body cast(x, f32) * cast(w, f32) then acc0 output y"""
    check(text, config=KernelConfig(rows=8, cols=16, num_stages=stages))


SPLIT = {
    "sum": "x then acc0", "max": "x then acc0", "moments": "1.0, x, 0.0 then acc1 + sqrt(acc2 / acc0)",
    "logsumexp": "x, 1.0 then acc0 + log(acc1)", "argmax": "x, index(j) then acc0",
}  # fmt: skip


CENTRED = ("moments", "logsumexp")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("monoid", SPLIT)
def test_reductions_in_parts_over_the_grid(monoid: str) -> None:
    text = f"""graph g input x: f32[3, 48] y: f32[3] = op [i: 3 | j: 48 {monoid}] reads x[i, j] body {SPLIT[monoid]} output y"""
    made = generate(graph := parse(text), kernel_of(graph), KernelConfig(rows=2, cols=4, split_k=4))
    assert (
        len(made.passes) == 2
        and len(made.scratch) == len(SPLIT[monoid].split(" then ")[0].split(", ")) - (monoid == "argmax") * 0
    )
    check(text, config=KernelConfig(rows=2, cols=4, split_k=4))
    ragged = text.replace("48", "50")
    graph = parse(ragged)
    assert len(generate(graph, kernel_of(graph), KernelConfig(split_k=4)).passes) == 2 - (monoid in CENTRED)
    check(ragged, config=KernelConfig(rows=2, cols=4, split_k=4))


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


@pytest.mark.parametrize("target", CHIPS)
def test_candidates_fit_and_begin_with_the_default(target: str) -> None:
    for text in (matmul("bf16", 512, 512, 512), matmul("f32", 64, 64, 64), STREAMS["causal"], STREAMS["plain"]):
        graph = parse(text)
        found = kernel_form(graph, kernel_of(graph))
        options = list(candidates(found, target))
        assert options[0] == default_config(found, target) and len(options) == len(set(options)) > 1
        if not CHIPS[target].descriptors:
            assert not any(k.descriptors for k in options)


CONV = """graph g input x: bf16[2, 16, 9, 7] input k: bf16[24, 16, 3, 3]
    y: bf16[2, 24, 5, 4] = op [b: 2, o: 24, h: 5, w: 4 | c: 16 sum, r: 3 sum, s: 3 sum]
      reads x[b, c, 2*h + r - 1, 2*w + s - 1] else 0.0, k[o, c, r, s] body cast(x, f32) * cast(k, f32)
      then cast(acc0, bf16)
    output y"""


@pytest.mark.sampled(1)
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
