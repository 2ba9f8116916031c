"""Kernels proved from their text: what the generator writes is, what is wrong in it is refused by a law that names the line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import generate
from tapestry.errors import LawError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.syntax.parser import parse
from tapestry.tools.kernel_proofs import kernel_proofs
from tapestry.tools.kernel_proofs.build_kernels import kernel_text_of
from tapestry.tools.kernel_proofs.kernel_proofs import COMPARED, FORM, prove
from tapestry.tools.kernel_proofs.kernel_text import KernelText
from tests.support.faults.kernel_edits import EDITS
from tests.support.triton_cases import CONTRACTIONS, REDUCTIONS
from tests.support.triton_kernels import kernel_of

SOFTMAX_SUM = """graph g
    input q: f32[2, 70, 32]
    input k: f32[2, 70, 32]
    input v: f32[2, 70, 32]
    y: f32[2, 70, 32] = op [b: 2, i: 70, e: 32 | n: 70 softsum] reads q[b, i, d], k[b, n, d], v[b, n, e]
      let [d: 32 sum] q * k
      body let0 * 0.176776695, 1.0, v then acc2 / acc1
    output y"""
MOMENTS = """graph g
    input x: f32[37, 300]
    y: f32[37] = op [i: 37 | n: 300 moments] reads x[i, n] body 1.0, x, 0.0 then 1.0 / sqrt((acc2 / acc0) + 0.00001)
    output y"""
GATED = """graph g
    input x: f32[50, 200]
    input y: f32[50, 200]
    z: f32[50, 200] = op [i: 50, n: 200] reads x[i, n], y[i, n] body (x - y) * sigmoid(y)
    output z"""
SIDE_BY_SIDE = """graph g
    input x: f16[100, 128] input u: f16[128, 96] input v: f16[128, 96] input a: f16[96] input b: f16[96]
    p: f16[100, 96], q: f16[100, 96] = op [i: 100, n: 96 | m: 128 sums2] reads x[i, m], u[m, n], v[m, n], a[n], b[n]
      body cast(x, f32) * cast(u, f32), cast(x, f32) * cast(v, f32)
      then cast(acc0, f16) + a, (cast(acc1, f16) + b) * f16(0.5)
    output p, q"""
CASES = {**CONTRACTIONS, **REDUCTIONS, "attention": SOFTMAX_SUM, "variance": MOMENTS, "gated": GATED}


def made(text: str, config: KernelConfig | None = None) -> tuple[Graph, Kernel, KernelText]:
    graph = parse(text)
    kernel = kernel_of(graph)
    one = generate(graph, kernel, config)
    return graph, kernel, kernel_text_of(graph, kernel, one, "k.py", one.source)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_what_is_generated_is_proved(name: str):
    shown = prove(*made(CASES[name]))
    assert shown.addresses != COMPARED or "a reduction by" in shown.why, shown.why
    if name in ("matmul, bias, relu", "batched, transposed", "conv 3x3 stride 2 pad 1", "attention", "variance", "gated"):
        assert shown.value == FORM, shown.why


BEHIND = ("matmul, bias, relu", "conv 3x3 stride 2 pad 1", "attention", "variance", "gated")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", EDITS)
def test_a_fault_in_the_text_is_refused(kind: str):
    tried = 0
    for name in BEHIND:
        graph, kernel, text = made(CASES[name])
        wrong = EDITS[kind](text)
        if wrong is not None:
            tried += 1
            with pytest.raises(LawError) as refused:
                prove(graph, kernel, wrong)
            assert refused.value.law in ("kernel_writes", "kernel_reads", "kernel_value") and "k.py" in refused.value.where
    if not tried:
        pytest.skip("no small kernel has a place for it; the benchmark's have")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("descriptors", [False, True])
def test_programs_that_choose_are_read_under_each_answer(descriptors: bool):
    """Tiles of several sums: their buffers by branches, and each sum stored in one of its own."""
    found = made(SIDE_BY_SIDE, KernelConfig(bm=32, bn=32, bk=32, descriptors=descriptors, apart=True))
    shown = prove(*found)
    assert shown.value == FORM, shown.why
    graph, kernel, text = found
    kind = "desc" if descriptors else "ptr"
    for old, new in ((f"= v_{kind}", f"= u_{kind}"), ("if which == 0", "if which == 1"), ("// 3  #", "// 2  #")):
        assert old in text.source
        with pytest.raises(LawError):
            prove(graph, kernel, replace(text, source=text.source.replace(old, new, 1)))


def test_a_read_past_the_end_is_named():
    graph, kernel, text = made(GATED)
    wrong = replace(text, source=text.source.replace("tl.load(x_ptr + ", "tl.load(x_ptr + 10000 + "))
    with pytest.raises(LawError, match=r"a read leaves .* of 10000 elements") as refused:
        prove(graph, kernel, wrong)
    assert refused.value.law == "kernel_reads" and "line" in refused.value.where and "p0" in refused.value.why


def test_what_does_not_read_is_not_proved():
    graph, kernel, text = made(GATED)
    for source in ("import os", "def gated(:", text.source.replace("tl.store", "tl.atomic_add")):
        assert prove(graph, kernel, replace(text, source=source)).value == COMPARED


def test_a_store_in_a_loop_is_one_for_each_step():
    graph, kernel, text = made(GATED)
    at = text.source.index("    tl.store(")
    wrong = replace(
        text, source=text.source[:at] + "    for k in range(0, 3):\n    " + text.source[at:].replace("\n    ", "\n        ")
    )
    with pytest.raises(LawError, match="is written 3 times"):
        prove(graph, kernel, wrong)


def test_a_read_at_one_place_outside_is_refused():
    graph, kernel, text = made(GATED)
    at = text.source.index("    tl.store(")
    wrong = replace(text, source=f"{text.source[:at]}    past = tl.load(x_ptr + 10000)\n{text.source[at:]}")
    with pytest.raises(LawError, match="a read leaves"):
        prove(graph, kernel, wrong)


def test_a_mistake_of_ours_is_not_taken_for_a_text_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise AssertionError("ours")

    given = made(GATED)
    monkeypatch.setattr(kernel_proofs, "_check_addresses", wrong)
    with pytest.raises(AssertionError, match="ours"):
        prove(*given)
