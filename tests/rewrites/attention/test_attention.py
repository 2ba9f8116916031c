"""Attention derived from its parts: found in every variant, refused where it would say something else, run in every binding."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.torch_ops import layers
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.errors import LawError, TapestryError
from tapestry.ir import laws
from tapestry.ir.expr import call
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel, cut, whole
from tapestry.ir.monoid import MONOIDS, driven, product, prove_driven, prove_rebased, rebased, register, rescale
from tapestry.ir.plan import MeshAxis, Plan, Strategy
from tapestry.ir.recognition.state import state_box, varies
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.lift import lift
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import Refusal, parse_move
from tapestry.rewrites.core.rule_check import same
from tapestry.verify import certificate, interp
from tests.support.attention.attention_cases import CASES, GUARDED, KEPT, PLAIN, attention
from tests.support.attention.attention_runs import close, feeds_of, fused, run_cpu
from tests.support.lifting import EXPORTS, SHARED, needs_shared
from tests.support.small_models import Case, execute, peak
from tests.support.triton_kernels import check


@pytest.mark.parametrize("name", CASES)
def test_every_variant_is_one_operation_that_says_the_same(name: str) -> None:
    before, after = parse(CASES[name]), fused(CASES[name])
    feeds = feeds_of(before)
    if name != "causal, empty rows are NaN":  # same() lets no NaN pass
        same(before, after, feeds, name)
    want, got = interp.run(before, feeds, wide=True)["y"], interp.run(after, feeds, wide=True)["y"]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    assert repr(parse(to_text(after)).ops) == repr(after.ops)  # repr: a NaN literal is equal to itself


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("streaming", [True, False])
def test_cpu(name: str, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fused(CASES[name])
    feeds = feeds_of(graph)
    if not streaming:
        monkeypatch.setattr(layers, "streaming", lambda *_: None)
        monkeypatch.setattr(layers, "MOST_WEIGHTS", 64)  # several blocks of keys
    close(run_cpu(graph, feeds), interp.run(graph, feeds, wide=True)["y"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_triton(name: str) -> None:
    graph = fused(CASES[name])
    check(to_text(graph), feeds_of(graph))
    check(to_text(graph), feeds_of(graph), KernelConfig(bm=16, bn=16))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("weight", [PLAIN, GUARDED])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30, -np.inf])
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_extreme_scores(weight: str, bad: float, value: float) -> None:
    """NaN and infinity in one query, minus infinity over a row of the bias: the rows they touch, and no others.

    With a value that is not finite: 0 times it is NaN in rows whose weights a guard makes 0.
    """
    text = attention("acc0 + c", reads=", c[i, n]", inputs="input c: f32[{s}, {n}]\n", weight=weight, d=8, e=8)
    before, after = parse(text), fused(text)
    feeds = feeds_of(before)
    feeds["c"][2] = bad
    feeds["c"][3, 1:] = -np.inf
    feeds["v"][1, 0, 4, 2] = value
    want = interp.run(before, feeds, wide=True)["y"]
    np.testing.assert_array_equal(np.isnan(interp.run(after, feeds, wide=True)["y"]), np.isnan(want))
    close(run_cpu(after, feeds), want)
    check(to_text(after), feeds)


def test_refusals() -> None:
    def why(text: str) -> str:
        graph = parse(text)
        laws.check(graph)
        found = list(RULES["stream_softmax"].find(graph))
        assert all(isinstance(r, Refusal) for r in found)
        assert simplify(graph).find("y") >= 0 and not any(getattr(op, "monoid", "") == "softsum" for op in simplify(graph).ops)
        return found[0].reason if isinstance(found[0], Refusal) else ""

    text = CASES["plain"]
    assert why(text.replace("output y", "output y, total")) == "the maximum or the sum of weights is needed elsewhere"
    other = text.replace("reads w[b, h, i, n]\n  body w, 1.0", "reads w[b, h, i, n]\n  body w * 2.0, 1.0")
    assert why(other) == "the softmax is over other scores than the sum"
    assert "not exponentials" in why(text.replace(PLAIN, "exp((w + top)) / total"))
    assert "not exponentials" in why(text.replace(PLAIN, "(exp((w - top)) / total) + top"))
    turned = attention(s=9).replace("top[b, h, i], total[b, h, i]", "top[b, h, n], total[b, h, n]")
    assert why(turned) == "the maximum is read along the dimension of the sum"


def test_scores_needed_elsewhere_stay_where_they_are() -> None:
    graph = simplify(parse(CASES["plain"].replace("output y", "output y, w")))
    assert [(op.monoid, len(op.inner)) for op in graph.ops if isinstance(op, Block)] == [("sum", 0), ("softsum", 0)]


@pytest.mark.parametrize("other", ["s0", "w", "m0"])
def test_chains_of_softmaxes_keep_what_is_read_twice(other: str) -> None:
    """Weights that are values as well, scores made by another softmax's sum, scores that are values."""
    layers = "".join(
        f"""m{k}: f32[7, 7] = op [i: 7, n: 7 | m: 7 sum]
  reads a = {"x" if k == 0 else f"s{k - 1}"}[i, m], b = {other.replace("0", str(k - 1)) if k else "w"}[m, n]
  body a * b
top{k}: f32[7], total{k}: f32[7] = op [i: 7 | n: 7 logsumexp]
  reads m{k}[i, n]
  body m{k}, 1.0
s{k}: f32[7, 7] = op [i: 7, n: 7]
  reads m{k}[i, n], top{k}[i], total{k}[i]
  body exp((m{k} - top{k})) / total{k}
"""
        for k in range(4)
    )
    graph = parse(f"graph g\ninput x: f32[7, 7]\ninput w: f32[7, 7]\n{layers}output s3\n")
    after = simplify(graph)
    laws.check(after)
    feeds = feeds_of(graph)
    close(interp.run(after, feeds)["s3"], interp.run(graph, feeds)["s3"])


# --- one split of the keys, four bindings

ODD = attention("where(ge(index(i - n + 3), 0), (acc0 * 0.3), f32(-inf))", s=23, n=37, d=8, e=8, b=1, kept=KEPT)
EMPTY = attention("where(ge(index(i - n - 3), 0), (acc0 * 0.3), f32(-inf))", s=23, n=37, d=8, e=12, b=1, kept=KEPT)
OPEN = attention("acc0 * 0.3", s=5, n=29, b=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", [ODD, EMPTY, OPEN], ids=["causal", "empty rows", "open"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_over_a_mesh_axis(text: str, devices: int) -> None:
    """States all-reduced: a maximum and a sum of weights for each row, not for each output cell."""
    graph = fused(text)
    op = graph.ops[0]
    assert isinstance(op, Block)
    mesh, feeds = (MeshAxis("d0", devices),), feeds_of(graph)
    plan = Plan(graph=graph, mesh=mesh, strategies=(Strategy(("n",), (None,)),))
    program = lower(plan)
    certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=mesh)
    want = interp.run(graph, feeds, wide=True)
    outs, measured = execute(graph, program, Case(None, graph, feeds, {}, want))  # type: ignore[arg-type]
    close(outs["y"], want["y"])
    rows, columns = np.prod([d.size for d in op.dims[:3]]), op.dims[3].size
    assert measured.transfers == {"all_reduce": (1, 2 * (devices - 1) * 4 * rows * (2 + columns))}


@pytest.mark.slow
@pytest.mark.parametrize("text", [ODD, EMPTY, OPEN], ids=["causal", "empty rows", "open"])
def test_every_strategy_over_a_mesh(text: str) -> None:
    graph = fused(text)
    mesh, feeds = (MeshAxis("d0", 2), MeshAxis("d1", 2)), feeds_of(graph)
    want = interp.run(graph, feeds, wide=True)
    for s in strategies(graph.ops[0], mesh):
        plan = Plan(graph=graph, mesh=mesh, strategies=(s,))
        program = lower(plan)
        certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=mesh)
        outs, measured = execute(graph, program, Case(None, graph, feeds, {}, want))  # type: ignore[arg-type]
        close(outs["y"], want["y"])
        assert measured.peak == peak(program)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", [ODD, EMPTY, OPEN], ids=["causal", "empty rows", "open"])
@pytest.mark.parametrize("parts", [2, 5])
def test_over_the_grid(text: str, parts: int) -> None:
    """Flash-decoding: the keys' parts are a dimension of the grid, the states are merged by a second kernel."""
    graph = fused(text)
    after = apply_moves(graph, [parse_move(f"split_reduce@y{{dim=n,parts={parts},fanin={parts}}}")])
    laws.check(after)
    feeds = feeds_of(graph)
    want = interp.run(graph, feeds, wide=True)["y"]
    np.testing.assert_allclose(interp.run(after, feeds, wide=True)["y"], want, rtol=1e-12, atol=1e-12)
    have = dict(feeds)
    target = TorchCpu()
    for i, op in enumerate(after.ops):
        assert isinstance(op, Block)
        ins = tuple(whole(after.tensors[r.tensor].shape) for r in op.reads)
        outs = tuple(whole(after.tensors[t].shape) for t in op.outs)
        kernel = Kernel(op=i, mode="full", block=whole(tuple(d.size for d in op.space)), ins=ins, outs=outs)
        done = target.kernel(after, kernel)([torch.from_numpy(np.array(have[r.tensor])) for r in op.reads], [])
        have.update({t: x.numpy() for t, x in zip(op.outs, done, strict=True)})
    close(have["y"], want)
    check(to_text(after), feeds)


@pytest.mark.parametrize("text", [ODD, EMPTY, OPEN], ids=["causal", "empty rows", "open"])
def test_over_time(text: str) -> None:
    """Blocks of keys come one after another; only the states stay."""
    graph = fused(text)
    op = graph.ops[0]
    assert isinstance(op, Block)
    feeds, target = feeds_of(graph), TorchCpu()
    space, n = whole(tuple(d.size for d in op.space)), len(op.dims)
    states: list[torch.Tensor] = []
    for k in range(3):
        block = (*space[:n], cut(op.reduce[0].size, 3, k), *space[n + 1 :])
        ins = tuple(whole(graph.tensors[r.tensor].shape) if i in op.body_reads() else None for i, r in enumerate(op.reads))
        outs = tuple(state_box(op, f, space[:n]) for f in range(3))
        run = target.kernel(graph, Kernel(op=0, mode="partial", block=block, ins=ins, outs=outs))
        part = run([torch.from_numpy(np.array(feeds[r.tensor])) for r in op.reads], [])
        states = target.merge("softsum", [states, part]) if states else part
    finish = Kernel(op=0, mode="finish", block=space[:n], ins=(None,) * len(op.reads), outs=(space[:n],))
    want = interp.run(graph, feeds, wide=True)["y"]
    close(target.kernel(graph, finish)([None] * len(op.reads), states)[0].numpy(), want)
    timed = apply_moves(graph, [parse_move("split@y{dim=n,parts=3,to=time}")])
    np.testing.assert_allclose(interp.run(timed, feeds, wide=True)["y"], want, rtol=1e-12, atol=1e-12)


# --- laws


def test_states_are_kept_once_along_columns() -> None:
    op = fused(ODD).ops[0]
    assert isinstance(op, Block)
    assert varies(op) == ((True, True, True, False), (True, True, True, False), (True,) * 4)[:3] or op.dims[0].size == 1
    assert state_box(op, 0, ((0, 1), (0, 4), (2, 5), (3, 8)))[3] == (0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("let [m: 8 sum]", "let [m: 8 logsumexp]"), "one known monoid of one field"),
        (("body where", "body let1 + where"), "the name of a read"),
    ],
)
def test_bad_text_is_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(TapestryError, match=message):
        parse(to_text(fused(ODD)).replace(*change))


def test_an_inner_dimension_is_never_cut_and_never_leaks() -> None:
    graph = fused(ODD)
    with pytest.raises(TapestryError, match="reduced whole inside every point"):
        apply_moves(graph, [parse_move("split@y{dim=m,parts=2,to=mesh.d0}")])
    text = to_text(graph)
    leak = parse(re.sub(r"v\[b, ([^\]]*), n, e\]", r"v[b, \1, n, m]", text))
    with pytest.raises(LawError, match="depends on a dimension of an inner reduction"):
        laws.check(leak)


def test_part_of_an_inner_reduction_is_found_out() -> None:
    """Two devices that each do half of the inner products would cover the index space, and be wrong."""
    from dataclasses import replace

    graph = fused(OPEN)
    mesh = (MeshAxis("d0", 2),)
    plan = Plan(graph=graph, mesh=mesh, strategies=(Strategy((None,), (None,)),))
    program = lower(plan)
    at = next(i for i, s in enumerate(program.steps) if type(s).__name__ == "Launch")
    launch = program.steps[at]
    halves = tuple((*b[:-1], cut(6, 2, d)) for d, b in enumerate(launch.blocks))  # type: ignore[union-attr]
    wrong = replace(program, steps=(*program.steps[:at], replace(launch, blocks=halves), *program.steps[at + 1 :]))  # type: ignore[type-var]
    with pytest.raises(LawError):
        certificate.check(plan.annotated(), wrong)


# --- actions


@pytest.mark.slow
def test_the_actions_of_composed_monoids_are_proved() -> None:
    for m in MONOIDS.values():
        m.proof()


def test_what_is_no_action_is_not_registered() -> None:
    total, top = MONOIDS["sum"], MONOIDS["max"]

    def twice(old, new, s):  # composed, it doubles the exponent
        return tuple(call("mul", x, call("exp", call("sub", old[0], call("add", new[0], new[0])))) for x in s)

    def shifted(old, new, s):  # not additive
        return tuple(call("add", x, call("sub", old[0], new[0])) for x in s)

    for wrong in (twice, shifted):
        with pytest.raises(TapestryError, match="not an action"):
            prove_rebased(top, total, wrong)
        with pytest.raises(TapestryError, match="not an action"):
            register(rebased("wrong", top, total, wrong, ("m", "s")))
    with pytest.raises(TapestryError, match="not an action"):
        prove_driven(MONOIDS["prod"], total, lambda by, s: (call("add", by[0], s[0]),))
    assert "wrong" not in MONOIDS
    prove_rebased(top, product("", total, total, total), rescale)
    assert not driven("d", MONOIDS["prod"], total, lambda by, s: (call("mul", by[0], s[0]),), ("a", "b")).commutative


# --- exports as they stand

LAYERS = {
    "bert_base": 12, "gpt2": 12, "llama_tiny": 4, "llama_tiny_opset23": 4, "qwen3_tiny": 4, "t5_small": 18, "vit_base": 12,
    "whisper_encoder": 4,
}  # fmt: skip


@pytest.mark.sampled(1)
@needs_shared
@pytest.mark.parametrize("name", LAYERS)
def test_one_operation_per_layer_of_every_export(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.onnx").write_bytes(gzip.decompress((SHARED / f"{name}.onnx.gz").read_bytes()))
    graph = simplify(lift(tmp_path / f"{name}.onnx", EXPORTS[name], weights=False).graph)
    monoids = [(op.monoid, len(op.inner)) for op in graph.ops if isinstance(op, Block)]
    assert monoids.count(("softsum", 1)) == LAYERS[name]
    assert not any(m == "logsumexp" for m, _ in monoids)
    heads = {op.dims[1].size for op in graph.ops if isinstance(op, Block) and op.monoid == "softsum"}
    repeated = [t for t in graph.tensors.values() if t.kind == "value" and len(t.shape) == 4 and t.shape[1] in heads]
    read = {r.tensor for op in graph.ops if isinstance(op, Block) and op.monoid == "softsum" for r in op.reads}
    if name.startswith(("llama", "qwen")):  # keys and values of grouped heads are read where they are
        assert sum(t.name in read and t.shape[1] in heads and t.shape[2] != t.shape[3] for t in repeated) == LAYERS[name]
