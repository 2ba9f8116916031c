"""A researcher's own monoid gets the fast kernels of the built-in one: targets look at how it is made, not at its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tapestry.codegen.torch_cpu.base import state_merges
from tapestry.codegen.torch_cpu.torch_ops import attention_torch
from tapestry.codegen.triton.emit.source import generate
from tapestry.ir.expr import Expr, call
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.monoid import MONOIDS, Action, Monoid, State, number, product, rebased, register, rescale
from tapestry.ir.recognition.exponential import Exponential, exponential
from tapestry.ir.syntax.parser import parse
from tapestry.rewrites.core.rule_check import random_feeds
from tapestry.verify import interp
from tests.support.attention.attention_runs import close, run_cpu
from tests.support.triton_kernels import poisoned_lanes, run_kernel  # noqa: F401

SUM, TWO_SUMS = MONOIDS["sum"], product("", MONOIDS["sum"], MONOIDS["sum"])


def base_two(old: State, new: State, s: State) -> State:
    """Sums of ``2**(x - old)`` as sums of ``2**(x - new)``."""
    away = call("sub", old[0], new[0])
    scale = call("exp", call("mul", away, number(math.log(2), away.dtype)))
    return tuple(call("where", call("eq", old[0], new[0]), x, call("mul", x, scale)) for x in s)


def downwards(old: State, new: State, s: State) -> State:
    """Sums of ``exp(-(x - old))`` as sums of ``exp(-(x - new))``: weights of a soft minimum."""
    scale = call("exp", call("sub", new[0], old[0]))
    return tuple(call("where", call("eq", old[0], new[0]), x, call("mul", x, scale)) for x in s)


def linear(old: State, new: State, s: State) -> State:
    """Sums of ``x - old`` for one element each, as those of ``x - new``: an action, but no weight."""
    return tuple(call("add", x, call("sub", old[0], new[0])) for x in s)


# name -> (centre, action, hidden score, rate)
OURS: dict[str, tuple[str, Action, str, float]] = {
    "pow2": ("max", base_two, "-inf", math.log(2)),
    "softmin": ("min", downwards, "inf", -1.0),
}


@pytest.fixture(params=OURS)
def ours(request: pytest.FixtureRequest) -> Iterator[str]:
    """Two monoids of one's own, with one sum and with two, registered for a test."""
    name: str = request.param
    centre, act, *_ = OURS[name]
    for made in (
        rebased(name, MONOIDS[centre], SUM, act, ("m", "s")),
        rebased(f"{name}_values", MONOIDS[centre], TWO_SUMS, act, ("m", "s", "o")),
    ):
        register(made)
    yield name
    del MONOIDS[name], MONOIDS[f"{name}_values"]


def attention(name: str, score: Callable[[str], str] = lambda hidden: "let0 * 0.5") -> Graph:
    hidden = OURS[name][2]
    return parse(f"""graph g input q: f32[2, 3, 21, 16] input k: f32[2, 3, 45, 16] input v: f32[2, 3, 45, 16] input c: f32[21, 45]
        y: f32[2, 3, 21, 16] = op [b: 2, h: 3, i: 21, e: 16 | n: 45 {name}_values]
          reads q[b, h, i, m], k[b, h, n, m], v[b, h, n, e], c[i, n]
          let [m: 16 sum] q * k
          body {score(f"f32({hidden})")}, 1.0, v then acc2 / acc1
        output y""")


SCORES: dict[str, Callable[[str], str]] = {
    "plain": lambda hidden: "let0 * 0.5",
    "causal": lambda hidden: f"where(ge(index(i - n), 0), let0 * 0.5, {hidden})",
}


def test_structure_is_seen(ours: str) -> None:
    centre, _, _, rate = OURS[ours]
    assert exponential(f"{ours}_values") == Exponential(centre, pytest.approx(rate), 2)
    assert exponential(ours, sums=1) and not exponential(ours, sums=2)
    assert state_merges.dense(ours)


def test_what_is_no_exponential_weight_is_none() -> None:
    def upwards(old: State, new: State, s: State) -> State:
        return downwards(old, new, s)  # weights above 1 for a maximum: they may overflow

    for centre, act in (("max", linear), ("max", upwards), ("min", rescale), ("sum", rescale)):
        made = Monoid(
            name="none", fields=("m", "s"), zero=MONOIDS["logsumexp"].zero, combine=MONOIDS["logsumexp"].combine,
            structure=rebased("none", MONOIDS[centre], SUM, act, ("m", "s")).structure,
        )  # fmt: skip
        MONOIDS["none"] = made
        try:
            assert exponential("none") is None
        finally:
            del MONOIDS["none"]


@pytest.mark.parametrize("score", SCORES)
def test_triton_streams_it(ours: str, score: str) -> None:
    graph = attention(ours, SCORES[score])
    op = graph.ops[0]
    assert isinstance(op, Block)
    ins = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
    block = whole(tuple(d.size for d in op.space))
    made = generate(graph, Kernel(op=0, mode="full", block=block, ins=ins, outs=(block[:4],)))
    assert made.kind == "stream" and "tl.exp2(" in made.source and f"tl.{OURS[ours][0]}imum(" in made.source
    feeds = random_feeds(graph, np.random.default_rng(3))
    (got,) = run_kernel(graph, 0, feeds)
    close(got, interp.run(graph, feeds, wide=True)["y"])


@pytest.mark.parametrize("score", SCORES)
def test_torch_streams_it(ours: str, score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = attention(ours, SCORES[score])
    op = graph.ops[0]
    assert isinstance(op, Block)
    used: list[str] = []
    kernel = attention_torch._FLASH
    monkeypatch.setattr(attention_torch, "_FLASH", lambda *a, **more: used.append("") or kernel(*a, **more))
    graph = replace(graph, ops=(replace(op, then=(*map(_and_a_half, op.then),)),))  # which no whole kernel gives
    feeds = random_feeds(graph, np.random.default_rng(4))
    close(run_cpu(graph, feeds), interp.run(graph, feeds, wide=True)["y"])
    assert used


def _and_a_half(e: Expr) -> Expr:
    return call("add", e, number(0.5, "f32"))


def test_the_whole_kernel_is_right_too(ours: str) -> None:
    graph = attention(ours)
    feeds = random_feeds(graph, np.random.default_rng(5))
    close(run_cpu(graph, feeds), interp.run(graph, feeds, wide=True)["y"])


def test_rows_are_folded_centre_first(ours: str) -> None:
    graph = parse(f"""graph g input x: f32[5, 77]
        y: f32[5] = op [i: 5 | n: 77 {ours}] reads x[i, n] body x, 1.0 then acc0 + log(acc1)
        output y""")
    op = graph.ops[0]
    assert isinstance(op, Block)
    feeds = random_feeds(graph, np.random.default_rng(6))
    want = interp.run(graph, feeds, wide=True)["y"]
    made = generate(graph, Kernel(op=0, mode="full", block=((0, 5), (0, 77)), ins=(((0, 5), (0, 77)),), outs=(((0, 5),),)))
    assert "tl.associative" not in made.source and "tl.reduce(" not in made.source
    close(run_kernel(graph, 0, feeds)[0], want)
    close(run_cpu(graph, feeds), want)
