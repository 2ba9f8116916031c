"""``compile --assume-finite``: tests for NaN and infinities are false, and the plan says that this was the user's word."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import parser

import tapestry
from tapestry.errors import LawError
from tapestry.ir.graph import Block, Rewrite, changes
from tapestry.ir.syntax.parser import parse
from tapestry.verify.rewriting.proofs import FINITE, prove_step
from tests.support.command_line import run


class Attention(torch.nn.Module):
    """As exporters write it, with a guard for rows that see nothing."""

    def forward(self, q, k, v):
        at = torch.arange(q.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=at[None] <= at[:, None])


def plans(**choices):
    x = tuple(torch.randn(1, 2, 6, 4) for _ in range(3))
    return Attention(), x, tapestry.compile(Attention(), x, devices=2, topology="h100", **choices)


@pytest.mark.slow
def test_the_guard_around_softmax_goes_and_nothing_else_changes() -> None:
    _, _, guarded = plans()
    net, x, plan = plans(assume_finite=True)
    ops = plan.build.plan.graph.ops
    assert len(ops) < len(guarded.build.plan.graph.ops), "0 times the values is no operation any more"
    assert not any("zeros" in op.outs[0] for op in ops)
    (out,) = plan.run(dict(zip("qkv", (t.numpy() for t in x), strict=True))).values()
    np.testing.assert_allclose(out, net(*x).numpy(), rtol=1e-4, atol=1e-5)
    assert plan.report["assume_finite"]["operations"] >= 1 and "assumed to be finite" in plan.explain()
    assert "assume_finite" not in guarded.report


@pytest.mark.slow
def test_what_rests_on_it_is_counted_and_checked_again(tmp_path) -> None:
    _, _, plan = plans(assume_finite=True)
    plan.save(tmp_path / "b")
    status, said = run("verify", tmp_path / "b", "--json")[:2]
    assert status == 0 and FINITE in said


def test_more_than_tests_is_refused() -> None:
    _, _, plan = plans(assume_finite=True)
    step = next(s for s in changes(plan.build.plan.graph) if s.by == "assume_finite")
    assert prove_step(step)[FINITE]
    forged = (*step.after.ops[:-1], _other(step.after.ops[-1]))
    with pytest.raises(LawError, match="more was changed"):
        prove_step(Rewrite(step.by, step.before, _with(step.after, forged)))


def _other(op):
    from dataclasses import replace

    assert isinstance(op, Block)
    return replace(op, reads=op.reads[::-1]) if len(op.reads) > 1 else replace(op, body=op.body[::-1], source=("x",))


def _with(graph, ops):
    from dataclasses import replace

    return replace(graph, ops=ops)


@pytest.mark.parametrize("body", ["IsNaN(x)", "IsInf(x)"])
def test_tests_that_are_results_are_false(body: str) -> None:
    text = f'<ir_version: 9, opset_import: ["" : 20]> g (float[3] x) => (bool[3] y, float[3] z) {{ y = {body} a = Exp(x) z = Where(y, x, a) }}'
    plan = tapestry.compile(parser.parse_model(text), assume_finite=True)
    out = plan.run({"x": np.array([0.0, 1.0, 2.0], np.float32)})
    assert not out["y"].any()
    np.testing.assert_allclose(out["z"], np.exp([0.0, 1.0, 2.0]), rtol=1e-6)


def test_integers_are_not_concerned() -> None:
    from tapestry.verify.rewriting.footprints import assume_finite

    graph = parse("graph g input x: f32[3] y: f32[3] = op [i: 3] reads x[i] body exp(x) output y")
    assert assume_finite(graph) is graph
