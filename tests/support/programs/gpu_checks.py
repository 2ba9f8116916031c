"""Checks of the GPU runtime, each in a process of its own: Triton decides when it is imported whether it interprets.

    python -m tests.support.programs.gpu_checks NAME [cpu|cuda]

On the CPU (``TRITON_INTERPRET=1``) the same code runs as on a GPU, but for capture and the compiled launcher.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from functools import partial
from itertools import permutations

if __name__ == "__main__" and sys.argv[2:] != ["cuda"]:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from tapestry import api
from tapestry.codegen.kernel_sources import distinct_kernels
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.run import launcher, library
from tapestry.codegen.triton.run.device_target import TritonTarget
from tapestry.codegen.triton.run.local_gpu import find_device
from tapestry.codegen.triton.run.tune import How, choose, measure, random_data, wrong
from tapestry.codegen.triton.run.tuned import Choice
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.plan import Plan
from tapestry.ir.program import Program
from tapestry.ir.syntax.parser import parse
from tapestry.plan.lower import lower
from tapestry.runtime.one_process.gpu_devices import GpuExecutor
from tapestry.runtime.session import Session
from tests.support.small_models import Case, assert_same, case, execute, mesh_of, peak, planned_transfers, random_plan, save

HERE = find_device()
MODELS = (
    "conv_chain",
    "mlp",
    "norms",
    "attention",
    "views",
    "halves",
    "bfloats",
    "integers",
    "opaques",
    "reductions",
    "branches",
    "noise",
    "gathers",
)


def machine(c: Case, plan: Plan, program: Program) -> GpuExecutor:
    return GpuExecutor(plan.graph, program, TritonTarget(HERE), source(c.weights), plan.streamed)


def source(arrays: dict[str, np.ndarray]):
    return lambda t, box: from_numpy(np.array(arrays[t][tuple(slice(lo, hi) for lo, hi in box)]))


def outputs(found: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {t: np.array(to_numpy(a)) for t, a in found.items()}


def check_models() -> None:
    """Random plans of small models: results, peak and transfers; three runs, of which the last ones are replayed on a GPU."""
    for name in MODELS:
        for mesh in ("1", "3", "2x2"):
            c = case(name)
            plan = random_plan(c.graph, mesh_of(mesh), random.Random(f"{name} {mesh}"))
            program = lower(plan)
            m = machine(c, plan, program)
            nothing = {t: np.zeros_like(a) for t, a in c.feeds.items()}
            for feeds in (c.feeds, nothing, c.feeds):
                found, measured = m.run(source(feeds))
            assert_same(outputs(found), c.expected, c.graph, (name, mesh))
            assert measured.peak == peak(program), (name, mesh)
            assert measured.transfers == planned_transfers(program), (name, mesh)
            assert all(a >= p for a, p in zip(m.arena_bytes, measured.peak, strict=True))
            if HERE.type == "cuda" and name != "opaques":
                assert m.described()["gpu"]["graphs"] and not any("capture failed" in r for r in m.reasons), (name, m.reasons)


def check_streamed() -> None:
    """Streamed weights are read at every use, and say so."""
    c = case("mlp")
    big = frozenset(t for t, a in c.weights.items() if a.size > 8)
    plan = random_plan(c.graph, mesh_of("2"), random.Random(0), layouts=0.0)
    plan = Plan(graph=plan.graph, mesh=plan.mesh, strategies=plan.strategies, inputs={}, outputs={}, streamed=big)
    m = machine(c, plan, lower(plan))
    for _ in range(3):
        found, measured = m.run(source(c.feeds))
    assert_same(outputs(found), c.expected, c.graph)
    assert measured.peak == peak(lower(plan))
    assert any("streamed" in reason for reason in m.reasons)


PRODUCT = """graph g
    input x: {0}[2, 37, 48]
    input w: {0}[48, 40]
    input b: {0}[40]
    y: {0}[2, 37, 40] = op [b: 2, i: 37, n: 40 | m: 48 sum] reads x[b, i, m], w[m, n], b[n] body x * w then (acc0 + b) * b
    output y"""


def kernel_of(graph: Graph, mode: str = "full") -> Kernel:
    op = graph.ops[0]
    assert isinstance(op, Block)
    outs = tuple(whole(graph.tensors[t].shape) for t in op.outs)
    return Kernel(
        op=0,
        mode=mode,
        block=whole(tuple(d.size for d in op.space)),
        ins=tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads),
        outs=outs,
    )


def check_library() -> None:
    """A product by the library and a generated epilogue give what the generated kernel gives."""
    for dtype in ("f32", "f16", "bf16"):
        for text in (
            PRODUCT,
            PRODUCT.replace(" then (acc0 + b) * b", ""),
            PRODUCT.replace("w[m, n]", "w[n, m]").replace("[48, 40]", "[40, 48]"),
        ):
            graph = parse(text.format(dtype))
            kernel = kernel_of(graph)
            data = random_data(graph, kernel, HERE, 3)
            call = library.bind_library(graph, kernel, data.ins, data.outs)
            assert call is not None
            call()
            assert not wrong(data), (dtype, text)
    assert (
        library.bind_library(
            g := parse("graph g\n input x: f32[4]\n y: f32[4] = op [i: 4] reads x[i] body x * x\n output y"),
            kernel_of(g),
            [],
            [],
        )
        is None
    )


def check_tune() -> None:
    """The tuner with a timer of our own: the fastest right candidate wins, wrong and broken ones are refused, all is cached."""
    graph = parse(PRODUCT.format("f32"))
    kernel = kernel_of(graph)
    times = iter([2.0, 1.5, 1.0, 0.5])
    wanted = (KernelConfig(), KernelConfig(bm=32, bn=32), KernelConfig(bm=33), KernelConfig(bm=16, bn=16))
    trials = measure(
        graph, kernel, How(device=HERE, timer=lambda call: next(times), candidates=lambda g, k: wanted, libraries=True)
    )
    assert [bool(t.refused) for t in trials] == [False, False, True, False, False] and trials[-1].config is None
    choice, numbers = choose(trials)
    assert choice.config == KernelConfig(bm=16, bn=16) and numbers["default_seconds"] == 2.0 and len(numbers["refused"]) == 1
    data = random_data(graph, kernel, HERE, 0)
    data.outs[0].copy_(data.expected[0])
    assert not wrong(data)
    data.outs[0].view(-1)[5] += 1e-2
    assert "off by" in wrong(data)
    data.outs[0].view(-1)[5] = float("nan")
    assert wrong(data)


SIDE_BY_SIDE = """graph g input x: f16[{m}, 128] input u: f16[128, {n}] input v: f16[128, {n}] input a: f16[{n}]
    p: f16[{m}, {n}], q: f16[{m}, {n}] = op [i: {m}, n: {n} | m: 128 sums2] reads x[i, m], u[m, n], v[m, n], a[n]
      body cast(x, f32) * cast(u, f32), cast(x, f32) * cast(v, f32)
      then cast(acc0, f16) + a, cast(acc1, f16) * f16(0.5)
    output p, q"""
ATTENTION = """graph g input q: {d}[2, {k}, 64] input k: {d}[2, {k}, 64] input v: {d}[2, {k}, 64]
    y: {d}[2, {k}, 64] = op [b: 2, i: {k}, e: 64 | n: {k} softsum] reads q[b, i, m], k[b, n, m], v[b, n, e]
      let [m: 64 sum] cast(q, f32) * cast(k, f32) body {score}, 1.0, cast(v, f32) then cast((acc2 / acc1), {d})
    output y"""
CAUSAL = "where(ge(index(i - n), 0), (let0 * 0.125), f32(-inf))"
PADDED = "(let0 * 0.125) + where(ge(index(n), 150), 0.0, f32(-3.3895313892515355e38))"
LOSS = """graph g input x: bf16[37, {n}] input t: i64[37]
    y: f32[37] = op [i: 37 | n: {n} logsumexp.sum] reads x[i, n], t[i]
      body cast(x, f32), 1.0, where(eq(t, index(n)), cast(x, f32), 0.0) then log(acc1) + (acc0 - acc2)
    output y"""


def check_forms() -> None:
    """Ways to write a kernel that real models have, by descriptors and by pointers: sums in tiles of their own, a causal mask
    before the loop, a mask of the least numbers, a cross-entropy."""
    tiles = [KernelConfig(bm=64, bn=64, bk=64, descriptors=d, apart=True) for d in (False, True)]
    streams = [KernelConfig(bm=64, bn=n, descriptors=d) for n in (64, 32) for d in (False, True)]
    wanted = [(SIDE_BY_SIDE.format(m=m, n=n), tiles) for m, n in ((256, 192), (77, 72))]
    wanted += [
        (ATTENTION.format(d=d, k=k, score=s), streams) for d in ("f16", "bf16") for k in (256, 203) for s in (CAUSAL, PADDED)
    ]
    wanted += [(LOSS.format(n=n), [KernelConfig(cols=1024), KernelConfig(rows=4, cols=256)]) for n in (1024, 1001)]
    for text, configs in wanted:
        graph, how = parse(text), How(device=HERE, timer=lambda call: 1.0, candidates=lambda g, k, configs=configs: configs)
        refused = [f"{t.config}: {t.refused}" for t in measure(graph, kernel_of(graph), how) if t.refused]
        assert not refused, (text, refused)


def check_rng() -> None:
    """Random numbers are the CPU target's, bit for bit, however each operation is cut."""
    c = case("noise")
    alone = random_plan(c.graph, mesh_of("1"), random.Random(0), layouts=0.0)
    expected, _ = execute(c.graph, lower(alone), c)
    for k, mesh in enumerate(("1", "2", "3", "2x2", "4", "5", "3", "2x2")):
        plan = random_plan(c.graph, mesh_of(mesh), random.Random(f"rng {k}"))
        found, _ = machine(c, plan, lower(plan)).run(source(c.feeds))
        for t, a in outputs(found).items():
            assert a.dtype == expected[t].dtype and a.tobytes() == expected[t].tobytes(), (t, mesh, k)


def check_host() -> None:
    """Inputs and weights go from the host to where they are used, and nowhere between."""
    compiled = api.compile(save("mlp"), target="triton:sm90", time_limit=1)
    there = compiled.session.run(compiled.random_feeds())
    TritonTarget.from_numpy = None  # type: ignore[assignment]
    again = api.open_session(compiled.build, b"".join(compiled.constants.values())).run(compiled.random_feeds())
    assert all(np.array_equal(a, again.outputs[n]) for n, a in there.outputs.items())


def check_once() -> None:
    """Weights in another order are made when kernels are bound; runs after that only read them."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    w = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float16)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT16, (1, 16, 8, 8)) for n in "xy")
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(w, "w")])
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), f"{folder}/m.onnx")
        compiled = api.compile(f"{folder}/m.onnx", target="triton:sm90", time_limit=1)
        plan = compiled.build.plan
        (kernel, _), *_ = distinct_kernels(plan.graph, compiled.build.program).values()
        assert kernel_form(plan.graph, kernel).packed is not None
        packed = KernelConfig(bm=16, bn=16, bk=16, packed=True)
        given = partial(Choice, config=packed)
        target, passes, run = TritonTarget(HERE, tuned=lambda graph, kernel: given()), list[int](), launcher.launch
        launcher.launch = lambda tk, arrays, between=None, some=None: (passes.append(len(some)), run(tk, arrays, between, some))
        session = Session(compiled.build, b"", target, GpuExecutor, source=target.host)
        feeds = compiled.random_feeds()
        outs = [session.run(feeds).outputs["y"] for _ in range(2)]
    assert passes == ([1, 2, 2] if HERE.type == "cpu" else []), passes
    assert session.executor.described()["gpu"]["copied_weights_bytes"] == [w.nbytes]
    wanted = torch.conv2d(torch.from_numpy(feeds["x"]).double(), torch.from_numpy(w).double(), padding=1)
    assert all(np.abs(o - wanted.numpy()).max() < 2e-2 for o in outs) and np.array_equal(*outs)


def check_merges() -> None:
    """States merged on the device are those that the CPU target merges: every monoid, NaN and infinities kept."""
    rng = np.random.default_rng(0)
    target, host = TritonTarget(HERE), TorchCpu()
    kinds = {"argmax": ("f32", "i64"), "argmin": ("f32", "i64"), "any": ("bool",), "all": ("bool",)}
    for name, monoid in MONOIDS.items():
        dtypes = kinds.get(name, ("f32",) * len(monoid.fields))
        states = [list(fields) for fields in zip(*(special(rng, d) for d in dtypes), strict=True)]
        want = host.merge(name, [[f.clone() for f in fields] for fields in states])
        have = target.merge(name, [[f.to(HERE) for f in fields] for fields in states])
        orders = permutations(states) if monoid.commutative and name not in kinds else ()  # a GPU sums in an order of its own
        for found in (have, *(host.merge(name, [[f.clone() for f in fields] for fields in o]) for o in orders)):
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5, equal_nan=True)


def special(rng: np.random.Generator, dtype: str) -> list[torch.Tensor]:
    """Random cells of three states: NaN and both infinities anywhere; of 0 and large numbers one in a cell, so that any order of
    merging gives the same."""
    if dtype == "bool":
        return [torch.from_numpy(rng.random((7, 5)) < 0.5) for _ in range(3)]
    if dtype == "i64":
        return [torch.from_numpy(rng.integers(0, 99, (7, 5))) for _ in range(3)]
    a = rng.standard_normal((3, 7, 5)).astype(np.float32)
    apart = rng.permutation(35)[:9].reshape(3, 3)
    for state, own in zip(a, apart, strict=True):
        state.flat[own] = [0.0, 1e30, -1e30]
        state.flat[rng.integers(0, 35, 3)] = [np.nan, np.inf, -np.inf]
    return list(torch.from_numpy(a))


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"]()
    print("passed")
