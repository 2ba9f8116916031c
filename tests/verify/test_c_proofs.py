"""Kernels in C proved from their text, or by a contract that they keep; what is wrong in a text or a call is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import tapestry
from tapestry.cli import main
from tapestry.errors import LawError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.syntax.parser import parse
from tapestry.tools.kernel_proofs import contract_trials
from tapestry.tools.kernel_proofs.build_kernels import CpuKernel, cpu_kernel_of
from tapestry.tools.kernel_proofs.c_source import functions
from tapestry.tools.kernel_proofs.contract_trials import CONTRACTS
from tapestry.tools.kernel_proofs.kernel_proofs import COMPARED, FORM, TRIAL, prove
from tapestry.tools.kernel_proofs.terms import Unsupported
from tests.support.faults.c_edits import C_EDITS
from tests.support.small_models import save
from tests.support.triton_cases import REDUCTIONS
from tests.support.triton_kernels import kernel_of

pytest.importorskip("pycparser")
pytestmark = pytest.mark.usefixtures("c_compiler")

GENERATED = {
    "gated": """graph g
        input x: f32[50, 200]
        input y: f32[50, 200]
        z: f32[50, 200] = op [i: 50, n: 200] reads x[i, n], y[i, n] body (x - y) * sigmoid(y)
        output z""",
    "padded": """graph g
        input x: f32[50, 200]
        z: f32[54, 203] = op [i: 54, n: 203] reads x[i - 2, n - 1] else 0.0 body max(x, 0.5) + exp(x)
        output z""",
    "a part of a buffer": """graph g
        input x: f32[60, 210]
        input y: f32[50, 200]
        z: f32[50, 200] = op [i: 50, n: 200] reads x[i + 3, n + 7], y[i, n] body (x - y) * x
        output z""",
    "rows of a table": """graph g
        input t: f32[100, 64]
        input i: i64[7, 9]
        z: f32[7, 9, 64] = op [a: 7, b: 9, c: 64 | v: 100 sum] reads t[v, c], i[a, b]
          body where(eq(index(v), i), t, 0.0) then acc0
        output z""",
    "integers": """graph g
        input x: i32[50, 200]
        input y: i32[50, 200]
        z: f32[50, 200] = op [i: 50, n: 200] reads x[i, n], y[i, n] body cast(x, f32) / cast(y, f32)
        output z""",
    "sums of several": """graph g
        input x: f32[50, 4, 30]
        input y: f32[50, 4, 30]
        z: f32[50] = op [i: 50 | c: 4 sum, n: 30 sum] reads x[i, c, n], y[i, c, n] body exp(x) * y then acc0 / 120.0
        output z""",
}
CONTRACTED = {
    "convolution": """graph g
        input x: f32[2, 5, 13, 9]
        input k: f32[7, 5, 3, 3]
        input b: f32[7]
        input r: f32[2, 7, 7, 4]
        y: f32[2, 7, 7, 4] = op [b: 2, o: 7, h: 7, w: 4 | c: 5 sum, r: 3 sum, s: 3 sum]
          reads x[b, c, 2*h + r - 1, 2*w + s - 1] else 0.0, k[o, c, r, s], bias=b[o], more=r[b, o, h, w]
          body x * k then min(max(((acc0 + bias) + more), f32(-1.0)), 6.0)
        output y""",
    "depthwise": """graph g
        input x: f32[1, 6, 17, 15]
        input k: f32[6, 1, 3, 3]
        y: f32[1, 6, 17, 15] = op [b: 1, o: 6, h: 17, w: 15 | c: 1 sum, r: 3 sum, s: 3 sum]
          reads x[b, o + c, h + r - 1, w + s - 1] else 0.0, k[o, c, r, s] body x * k then max(acc0, 0.0)
        output y""",
    "linear": """graph g
        input x: f32[2, 33, 37]
        input w: f32[37, 21]
        input b: f32[21]
        y: f32[2, 33, 21] = op [k: 2, i: 33, n: 21 | m: 37 sum] reads x[k, i, m], w[m, n], b[n]
          body x * w then max((acc0 + b), 0.0)
        output y""",
    "attention": """graph g
        input q: f32[2, 70, 32]
        input k: f32[2, 70, 32]
        input v: f32[2, 70, 32]
        y: f32[2, 70, 32] = op [b: 2, i: 70, e: 32 | n: 70 softsum] reads q[b, i, d], k[b, n, d], v[b, n, e]
          let [d: 32 sum] q * k
          body let0 * 0.176776695, 1.0, v then acc2 / acc1
        output y""",
    "mean": """graph g
        input x: f32[2, 7, 5, 6]
        y: f32[2, 7] = op [b: 2, c: 7 | h: 5 sum, w: 6 sum] reads x[b, c, h, w] body x then acc0 / 30.0
        output y""",
    "root mean square": """graph g
        input x: f32[20, 48]
        input s: f32[48]
        y: f32[20, 48] = op [i: 20, c: 48 | n: 48 sum] reads x[i, n], own=x[i, c], s[c]
          body x * x then s * (own * (1.0 / sqrt((acc0 / 48.0) + 0.5)))
        output y""",
    "max pool": REDUCTIONS["max pool"],
    "two sums, one function": """graph g
        input x: f32[33, 37]
        input w: f32[37, 21]
        input v: f32[37, 21]
        y: f32[33, 21] = op [i: 33, n: 21 | m: 37 sums2] reads x[i, m], w[m, n], v[m, n]
          body x * w, x * v then (acc0 * sigmoid(acc0)) * acc1
        output y""",
    "two sums, two outputs": """graph g
        input x: f32[33, 37]
        input w: f32[37, 21]
        input v: f32[37, 21]
        y: f32[33, 21], z: f32[33, 21] = op [i: 33, n: 21 | m: 37 sums2] reads x[i, m], w[m, n], v[m, n]
          body x * w, x * v then acc0, acc1
        output y, z""",
}
CASES = {**GENERATED, **CONTRACTED}


@cache
def made(name: str) -> tuple[Graph, Kernel, CpuKernel]:
    graph = parse(CASES[name])
    kernel = kernel_of(graph)
    return graph, kernel, cpu_kernel_of(graph, kernel, "k.c")


@pytest.mark.parametrize("name", CASES)
def test_what_runs_is_proved(name: str):
    graph, kernel, of = made(name)
    assert of.texts, of.why
    assert bool(of.ours) == (name in CONTRACTED)
    for text in of.texts:
        assert prove(graph, kernel, text).value == FORM


@pytest.mark.sampled(15)
@pytest.mark.parametrize("kind", C_EDITS)
def test_a_fault_is_refused(kind: str):
    """Or the text is shown to be the operation all the same: a stride of 1 may be forgotten."""
    refused = 0
    for name in CASES:
        graph, kernel, of = made(name)
        for text in of.texts:
            wrong = C_EDITS[kind](text)
            if wrong is None:
                continue
            try:
                shown = prove(graph, kernel, wrong)
                assert shown.value in (FORM, TRIAL), (name, shown)
            except LawError as e:
                refused += 1
                assert e.law in ("kernel_writes", "kernel_reads", "kernel_value") and "k.c" in (e.where or "")
    assert refused


@pytest.mark.parametrize(
    "text", ["int x;", "#define d0 d1", "void f(void) { while (1); }", "void f(", "typedef float int64_t;"]
)
def test_what_does_not_read_is_not_proved(text: str):
    graph, kernel, of = made("gated")
    assert prove(graph, kernel, replace(of.texts[0], source=text)).value == COMPARED


def test_a_part_of_a_joined_tensor_is_proved_without_the_others():
    """The kernel is of rows that the first tensor alone has: it is not given the second one, and need not be."""
    graph = parse("""graph g
        input x: f32[40, 200]
        input y: f32[60, 200]
        z: f32[100, 200] = op [i: 100, n: 200] reads x[i, n] else 0.0, y[i - 40, n] else 0.0
          body sigmoid(where(lt(index(i), 40), x, y))
        output z""")
    part = ((0, 40), (0, 200))
    kernel = replace(kernel_of(graph), block=part, ins=(part, ((0, 0), (0, 200))), outs=(part,))
    of = cpu_kernel_of(graph, kernel, "k.c")
    assert of.texts, of.why
    assert prove(graph, kernel, of.texts[0]).value == FORM
    for kind in ("a loop's bound is one too few", "sigmoid: the sign", "an input is read from the next cell"):
        wrong = C_EDITS[kind](of.texts[0])
        assert wrong is not None
        with pytest.raises(LawError):
            prove(graph, kernel, wrong)


def test_a_norm_of_any_number_of_rows_is_not_refused():
    graph = parse("""graph g
        input x: f32[3, 50, 90]
        input s: f32[90]
        z: f32[3, 50, 90] = op [a: 3, i: 50, n: 90 | k: 90 sum] reads x[a, i, k], one=x[a, i, n], s[n]
          body x * x then one + ((one / sqrt((acc0 + 1.0))) * s)
        output z""")
    kernel = kernel_of(graph)
    of = cpu_kernel_of(graph, kernel, "k.c")
    assert len(of.texts) == 1 and prove(graph, kernel, of.texts[0]).value in (FORM, TRIAL, COMPARED)


def test_a_call_is_that_of_the_input_as_it_lies():
    """An image of few planes is read by another kernel than one whose channels are adjacent; both are proved."""
    text = CONTRACTED["convolution"].replace("5, 13, 9", "3, 13, 9").replace("7, 5, 3", "7, 3, 3").replace("c: 5", "c: 3")
    text = text.replace("2, 7, 7, 4", "2, 7, 7, 5").replace("w: 4", "w: 5")
    graph = parse(text.replace(", more=r[b, o, h, w]", "").replace("((acc0 + bias) + more)", "(acc0 + bias)"))
    kernel = kernel_of(graph)
    of = cpu_kernel_of(graph, kernel, "k.c")
    assert of.ours == ("tapestry_planes", "tapestry_conv")
    assert [prove(graph, kernel, t).value for t in of.texts] == [FORM, FORM]


@pytest.mark.parametrize("kernel", [*CONTRACTS, "tapestry_several"])
def test_kernels_keep_their_contracts(kernel: str):
    assert contract_trials.checked(kernel) >= 20  # (processors have other forms)


def test_a_kernel_that_breaks_its_contract_is_named(monkeypatch: pytest.MonkeyPatch):
    """The contract of another kernel stands for a kernel that is wrong."""
    other = replace(CONTRACTS["tapestry_conv"], function="contract_planes")
    monkeypatch.setitem(CONTRACTS, "tapestry_conv", other)
    contract_trials.checked.cache_clear()
    with pytest.raises(LawError, match="is not what the contract says") as refused:
        contract_trials.checked("tapestry_conv")
    assert refused.value.law == "kernel_contract" and "channels" in (refused.value.why or "")
    contract_trials.checked.cache_clear()


def test_verify_says_by_what_each_kernel_was_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tapestry.compile(save("conv_chain"), mesh="2", topology="cpu").save(tmp_path / "b")
    assert main(["verify", str(tmp_path / "b"), "--kernels", "--json"]) == 0
    rows = [r for r in json.loads(capsys.readouterr().out)["kernels"] if r["kernel"].startswith("cpu/")]
    assert {r["form"] for r in rows} & {"tapestry_conv", "tapestry_planes", "tapestry_conv, tapestry_planes"}
    for r in rows:
        assert (r["value"] == COMPARED) == bool(r["why"])
        assert r["value"] == COMPARED or not r["form"].startswith("tapestry_") or "instances" in r["value"]


@pytest.mark.parametrize(
    ("loop", "read"),
    [
        ("const float b = p[d0];\na0 += b;", True),
        ("a0 += p[d0] * a0;", False),  # its steps are not independent
        ("a1 += p[d0];", False),  # not what the directive names
        ("y[d0] = p[d0];\na0 += p[d0];", False),
        ("a0 = p[d0];", False),
    ],
)
def test_a_directive_lets_a_loop_only_add(loop: str, read: bool) -> None:
    text = f"""void f(const float *p, float *y) {{
double a0 = 0, a1 = 0;
#pragma omp simd reduction(+:a0)
for (int64_t d0 = 0; d0 <= 7; d0++) {{
{loop}
}}
y[0] = a0 + a1;
}}"""
    if read:
        assert list(functions(text)) == ["f"]
        return
    with pytest.raises(Unsupported, match="directive"):
        functions(text)
