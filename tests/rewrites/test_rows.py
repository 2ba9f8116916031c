"""Statistics of rows and what is made of them as one operation: softmax and norms over any axes, on every target and mesh."""

from math import prod

import numpy as np
import pytest
import torch

from tapestry.codegen.blocks.lowered import lower as task_of
from tapestry.codegen.blocks.regroup import split_groups
from tapestry.codegen.torch_cpu.c.nest_c import varied
from tapestry.codegen.torch_cpu.kernels import build
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import generate
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.plan import MeshAxis, Plan
from tapestry.ir.program import Launch
from tapestry.ir.recognition.state import row_groups, state_box
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.cost.compute import layered_flops
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tapestry.rewrites import RULES
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import Refusal
from tapestry.rewrites.core.rule_check import random_feeds, same
from tapestry.verify import certificate, interp
from tests.support.attention.attention_runs import close, run_cpu
from tests.support.small_models import Case, execute, peak
from tests.support.triton_kernels import check, run_kernel

CASES = {
    "layer norm": """graph g input x: f32[5, 37] input w: f32[37]
        a: f32[5], r: f32[5] = op [i: 5 | n: 37 moments] reads x[i, n] body 1.0, x, 0.0
          then acc1, 1.0 / sqrt((acc2 / acc0) + 0.00001)
        y: f32[5, 37] = op [i: 5, j: 37] reads x[i, j], a[i], r[i], w[j] body ((x - a) * r) * w output y""",
    "rms norm": """graph g input x: f32[3, 4, 20] input w: f32[20]
        r: f32[3, 4] = op [b: 3, i: 4 | n: 20 sum] reads x[b, i, n] body x * x then 1.0 / sqrt((acc0 / 20.0) + 0.00001)
        y: f32[3, 4, 20] = op [b: 3, i: 4, j: 20] reads x[b, i, j], r[b, i], w[j] body (x * r) * w output y""",
    "softmax": """graph g input x: f32[5, 9, 7]
        m: f32[5, 7], s: f32[5, 7] = op [i: 5, k: 7 | n: 9 logsumexp] reads x[i, n, k] body x, 1.0
        y: f32[5, 9, 7] = op [i: 5, j: 9, k: 7] reads x[i, j, k], m[i, k], s[i, k] body exp(x - m) / s output y""",
    "log-softmax": """graph g input x: f32[6, 33]
        l: f32[6] = op [i: 6 | n: 33 logsumexp] reads x[i, n] body x, 1.0 then acc0 + log(acc1)
        y: f32[6, 33] = op [i: 6, j: 33] reads x[i, j], l[i] body x - l output y""",
    "instance norm": """graph g input x: f32[2, 3, 5, 6]
        a: f32[2, 3], r: f32[2, 3] = op [b: 2, c: 3 | h: 5 moments, w: 6 moments] reads x[b, c, h, w] body 1.0, x, 0.0
          then acc1, 1.0 / sqrt((acc2 / acc0) + 0.00001)
        y: f32[2, 3, 5, 6] = op [b: 2, c: 3, h: 5, w: 6] reads x[b, c, h, w], a[b, c], r[b, c] body (x - a) * r output y""",
    "group norm": """graph g input x: f32[2, 8, 4, 5] input s: f32[8] input t: f32[8]
        a: f32[2, 4], r: f32[2, 4] = op [b: 2, g: 4 | c: 2 moments, h: 4 moments, w: 5 moments] reads x[b, 2*g + c, h, w] body 1.0, x, 0.0
          then acc1, 1.0 / sqrt((acc2 / acc0) + 0.00001)
        y: f32[2, 8, 4, 5] = op [b: 2, c: 8, h: 4, w: 5] reads x[b, c, h, w], a[b, floor((c)/2)], r[b, floor((c)/2)], s[c], t[c]
          body (((x - a) * r) * s) + t output y""",
    "group norm of flat groups": """graph g input x: f32[2, 6, 4, 5]
        a: f32[2, 3], r: f32[2, 3] = op [b: 2, g: 3 | n: 40 moments] reads x[b, 2*g + floor((n)/20), ((floor((n)/5)) mod 4), ((n) mod 5)]
          body 1.0, x, 0.0 then acc1, 1.0 / sqrt((acc2 / acc0) + 0.00001)
        y: f32[2, 6, 4, 5] = op [b: 2, c: 6, h: 4, w: 5] reads x[b, c, h, w], a[b, floor((c)/2)], r[b, floor((c)/2)]
          body (x - a) * r output y""",
    "a group of sums": """graph g input x: f32[12, 6]
        r: f32[4] = op [g: 4 | c: 3 sum, n: 6 sum] reads x[3*g + c, n] body x
        y: f32[12, 6] = op [i: 12, j: 6] reads x[i, j], r[floor((i)/3)] body x - r output y""",
}


def fused(name: str) -> Graph:
    graph = simplify(parse(CASES[name]))
    assert len(graph.ops) == 1 and isinstance(graph.ops[0], Block) and graph.ops[0].monoid, to_text(graph)
    return graph


@pytest.mark.parametrize("name", CASES)
def test_one_operation_that_says_the_same(name: str) -> None:
    before, after = parse(CASES[name]), fused(name)
    feeds = random_feeds(before, np.random.default_rng(1))
    same(before, after, feeds, name)
    close(run_cpu(after, feeds), interp.run(before, feeds, wide=True)["y"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_triton(name: str) -> None:
    text = to_text(fused(name))
    check(text)
    check(text, config=KernelConfig(rows=2, cols=16))  # rows longer than a tile
    check(text, config=KernelConfig(rows=4, cols=64))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_partial_states_of_triton(name: str) -> None:
    graph = fused(name)
    op = graph.ops[0]
    assert isinstance(op, Block)
    feeds = random_feeds(graph, np.random.default_rng(2))
    n, space = len(op.dims), whole(tuple(d.size for d in op.space))
    half = op.reduce[0].size // 2
    parts = [
        run_kernel(graph, 0, feeds, mode="partial", block=(*space[:n], cut, *space[n + 1 :]))
        for cut in ((0, half), (half, op.reduce[0].size))
    ]
    from tapestry.ir.monoid import MONOIDS

    merged = MONOIDS[op.monoid or ""].combiner(tuple(e.dtype for e in op.body))
    states = [interp.value(e, [*parts[0], *parts[1]], [], {}, False) for e in merged]
    got = run_kernel(graph, 0, feeds, mode="finish", states=states)[0]
    close(got, interp.run(graph, feeds, wide=True)["y"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_every_strategy(name: str) -> None:
    graph = fused(name)
    mesh, feeds = (MeshAxis("d0", 2), MeshAxis("d1", 2)), random_feeds(graph, np.random.default_rng(3))
    want = interp.run(graph, feeds, wide=True)
    op = graph.ops[0]
    assert isinstance(op, Block)
    for s in strategies(op, mesh):
        plan = Plan(graph=graph, mesh=mesh, strategies=(s,))
        program = lower(plan)
        certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=mesh)
        outs, measured = execute(graph, program, Case(None, graph, feeds, {}, want))  # type: ignore[arg-type]
        close(outs["y"], want["y"])
        assert measured.peak == peak(program)
        for step in program.steps:
            if isinstance(step, Launch) and step.mode == "partial":
                for k, out in enumerate(step.outs):
                    block = step.blocks[0]
                    assert block is not None
                    assert program.buffers[out].boxes[0] == state_box(op, k, block[: len(op.dims)])


@pytest.mark.parametrize("name", ["layer norm", "group norm", "group norm of flat groups"])
def test_a_row_is_loaded_once(name: str) -> None:
    graph = fused(name)
    op = graph.ops[0]
    assert isinstance(op, Block)
    block = whole(tuple(d.size for d in op.space))
    ins = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
    out = whole(graph.tensors["y"].shape)
    source = generate(graph, Kernel(op=0, mode="full", block=block, ins=ins, outs=(out,))).source.partition("def y(")[2]
    text = "".join(source.split())
    assert text.count("tl.load(x_ptr") == 1 and "tl.load(x_1_ptr" not in text and "for " not in source


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["group norm", "group norm of flat groups", "a group of sums"])
def test_blocks_of_whole_groups_and_of_parts_of_them(name: str) -> None:
    """Statistics are computed once per group where a block has whole groups, and are right where it has not."""
    graph = fused(name)
    op = graph.ops[0]
    assert isinstance(op, Block)
    at, k = next((i, row_groups(op)[d.name]) for i, d in enumerate(op.dims) if 1 < row_groups(op).get(d.name, 1) < d.size)
    feeds = random_feeds(graph, np.random.default_rng(5))
    want = interp.run(graph, feeds, wide=True)["y"]
    space, channels = whole(tuple(d.size for d in op.space)), op.dims[at].size
    for lo, hi in ((0, k), (k, channels), (1, channels), (k - 1, k + 1), (0, channels - 1)):
        block = (*space[:at], (lo, hi), *space[at + 1 :])
        ins = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
        kernel = Kernel(op=0, mode="full", block=block, ins=ins, outs=(block[: len(op.dims)],))
        task, each = split_groups(task_of(graph, kernel)), k if lo % k == hi % k == 0 else 1
        assert prod(d.size for d in task.dims if d.name in varied(task)) == op.dims[0].size ** at * (hi - lo) // each
        got = build(graph, kernel)([torch.from_numpy(feeds[r.tensor]) for r in op.reads], [])[0]
        close(got.numpy(), want.take(range(lo, hi), at))
        close(run_kernel(graph, 0, feeds, block=block)[0], want.take(range(lo, hi), at))


def test_statistics_are_priced_once_per_group() -> None:
    op = fused("group norm").ops[0]
    assert isinstance(op, Block) and row_groups(op) == {"c": 2, "h": 4, "w": 5}
    space, none = [(0, d.size) for d in op.space], np.zeros((1, 4, 2), int)
    shared, apart = (
        layered_flops(op, np.array([[space[0], c, *space[2:]]]), none)[1][0] - 2 * 4 * 5  # counts: once
        for c in ((0, 2), (1, 3))
    )
    assert 2 * shared == apart > 0


def test_refusals() -> None:
    def why(text: str) -> str:
        graph = parse(text)
        found = list(RULES["fuse_rows"].find(graph))
        assert len(found) == 1 and isinstance(found[0], Refusal)
        assert len(simplify(graph).ops) == 2
        return found[0].reason

    assert why(CASES["log-softmax"].replace("output y", "output y, l")) == "a result of the reduction is needed elsewhere"
    product = """graph g input x: f32[4, 6] input w: f32[6, 3]
        r: f32[4, 3] = op [i: 4, k: 3 | n: 6 sum] reads x[i, n], w[n, k] body x * w
        y: f32[4, 6, 3] = op [i: 4, j: 6, k: 3] reads x[i, j], r[i, k] body x - r output y"""
    assert why(product) == "the reduction uses what it reads in several rows: it is a contraction"
    groups = """graph g input x: f32[5, 6]
        r: f32[3] = op [g: 3 | c: 2 sum, n: 6 sum] reads x[2*g + c, n] else 0.0 body x
        y: f32[5, 6] = op [i: 5, j: 6] reads x[i, j], r[floor((i)/2)] body x - r output y"""
    assert why(groups).startswith("rows are not dimensions of the map or groups of one")
    assert why(groups.replace("floor((i)/2)", "((i) mod 3)")).startswith("rows are not dimensions of the map")


@pytest.mark.parametrize("out", ["f32", "bf16"])
def test_weights_that_are_rounded_more_than_their_sum_stay_rounded(out: str) -> None:
    graph = parse(f"""graph g
input s: f32[4, 5]
input v: f32[5, 2]
top: f32[4], total: f32[4] = op [i: 4 | n: 5 logsumexp]
  reads s[i, n]
  body s, 1.0
p: f32[4, 5] = op [i: 4, n: 5]
  reads s[i, n], top[i], total[i]
  body cast(cast(exp((s - top)) / total, bf16), f32)
y: {out}[4, 2] = op [i: 4, e: 2 | n: 5 sum]
  reads p[i, n], v[n, e]
  body p * v{"" if out == "f32" else " then cast(acc0, bf16)"}
output y
""")
    assert (len(simplify(graph).ops) == 1) == (out == "bf16")
