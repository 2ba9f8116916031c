"""Prices of kernels make sense: more work costs no less, equal work costs the same however it is spelled, and on the GPU presets
the price is near the roofline of the kernels that are generated. Each check is shown to fail on prices that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

from tapestry.codegen.triton.kernel_work import roofline, work_of
from tapestry.codegen.triton.task.chips import PRECISIONS, chip_of, on_chip
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.ir.graph import Block, Graph
from tapestry.ir.plan import Plan, Strategy
from tapestry.ir.program import Launch
from tapestry.ir.syntax.parser import parse
from tapestry.lift import lift
from tapestry.plan.cost import compute
from tapestry.plan.cost.kernel_class import kernel_class
from tapestry.plan.lower import lower
from tapestry.plan.strategy import footprints, op_boxes
from tapestry.plan.topology import PRESETS, parse_mesh, topology
from tapestry.plan.topology.measured_costs import KernelRates
from tapestry.plan.topology.presets import CHIP_OF
from tapestry.rewrites.core.driver import simplify
from tapestry.runtime.executor import kernel_of
from tests.support.small_models import FOLDER, MODELS, N, i64, net, save

ONE, WHOLE = parse_mesh("1"), Strategy((None,), (None,))


def lifted(model: onnx.ModelProto) -> Graph:
    """A model's graph, simplified."""
    path = FOLDER / "prices.onnx"
    path.write_bytes(model.SerializeToString())
    return simplify(lift(path).graph)


def each(graph: Graph, topo) -> list[float]:
    """Seconds of every operation on one device, without launches."""
    out = []
    for op in graph.ops:
        block = op_boxes(op, WHOLE.dims, ONE)
        reads = {(t, b.tobytes()): b for _, t, b in footprints(op, graph, WHOLE, ONE)}
        final = block[:, : len(op.dims)]
        out.append(compute.seconds(op, graph, block, final, reads, topo) - topo.device.launch)
    return out


def price(model: onnx.ModelProto, preset: str) -> float:
    """Seconds of a model on one device, without launches."""
    return sum(each(lifted(model), topology(ONE, preset)))


def one(
    op: str, ins: dict[str, Sequence[int]], dtype: int = T.FLOAT, weights=None, integers=(), **attributes
) -> onnx.ModelProto:
    """A model of one node."""
    taken = {n: (T.INT64 if n in integers else dtype, list(s)) for n, s in ins.items() if n}
    return net([N(op, [*ins, *(weights or {})], ["y"], "node", **attributes)], taken, {"y": dtype}, weights)


# equal work


def product(m: int, k: int, n: int) -> dict[str, onnx.ModelProto]:
    """``x[m, k] w[k, n]`` in different words."""
    x, w = (T.FLOAT, [m, k]), (T.FLOAT, [k, n])
    y = {"y": T.FLOAT}
    return {
        "MatMul": one("MatMul", {"x": [m, k], "w": [k, n]}),
        "batch 1": one("MatMul", {"x": [1, m, k], "w": [k, n]}),
        "batch 1 of both": one("MatMul", {"x": [1, m, k], "w": [1, k, n]}),
        "batch 2 of halves": one("MatMul", {"x": [2, m // 2, k], "w": [k, n]}),
        "Einsum": one("Einsum", {"x": [m, k], "w": [k, n]}, equation="mk,kn->mn"),
        "Einsum turned": one("Einsum", {"x": [k, m], "w": [n, k]}, equation="km,nk->mn"),
        "Gemm": one("Gemm", {"x": [m, k], "w": [n, k]}, transB=1),
        "transposed": net([N("Transpose", ["x"], ["t"], "t", perm=[1, 0]), N("MatMul", ["t", "w"], ["y"], "m")], {"x": (T.FLOAT, [k, m]), "w": w}, y),
        "reshaped": net([N("Reshape", ["x", "s"], ["t"], "t"), N("MatMul", ["t", "w"], ["y"], "m")], {"x": (T.FLOAT, [1, m, k]), "w": w}, y, {"s": i64(m, k)}),
        "heads": net([N("Reshape", ["x", "s"], ["t"], "t"), N("Transpose", ["t"], ["u"], "u", perm=[0, 2, 1, 3]), N("MatMul", ["u", "w"], ["y"], "m")],
                     {"x": (T.FLOAT, [1, m, k]), "w": w}, y, {"s": i64(1, m, 1, k)}),
        "Conv": one("Conv", {"x": [1, k, m, 1], "w": [n, k, 1, 1]}),
        "Unsqueeze": net([N("Unsqueeze", ["x", "a"], ["t"], "t"), N("MatMul", ["t", "w"], ["y"], "m")], {"x": x, "w": w}, y, {"a": i64(0)}),
    }  # fmt: skip


def biased(m: int, k: int, n: int) -> dict[str, onnx.ModelProto]:
    """The same with a bias."""
    return {
        "Gemm": one("Gemm", {"x": [m, k], "w": [k, n], "b": [n]}),
        **{
            f"MatMul and Add{note}": net(
                [N("MatMul", ["x", "w"], ["t"], "m"), N("Add", ["t", "b"], ["y"], "a")],
                {"x": (T.FLOAT, shape), "w": (T.FLOAT, [k, n]), "b": (T.FLOAT, [n])}, {"y": T.FLOAT},
            )
            for note, shape in (("", [m, k]), (" at batch 1", [1, m, k]), (" at batch 2", [2, m // 2, k]))
        },
    }  # fmt: skip


def leading(op: str, rows: int, tail: Sequence[int], **attributes) -> dict[str, onnx.ModelProto]:
    """An operator of rows, with the rows as one dimension, as one behind a batch of 1, and in two halves."""
    shapes = {"rows": [rows], "batch 1": [1, rows], "batch 2": [2, rows // 2], "more ones": [1, rows, 1]}
    return {name: one(op, {"x": [*s, *tail]}, **attributes) for name, s in shapes.items()}


def lookup(table: int, rows: int, width: int) -> dict[str, onnx.ModelProto]:
    """Rows of a table by index."""
    shapes = {"rows": [rows], "batch 1": [1, rows], "batch 2": [2, rows // 2]}
    return {n: one("Gather", {"table": [table, width], "ids": s}, integers=("ids",)) for n, s in shapes.items()}


def norm(rows: int, width: int) -> dict[str, onnx.ModelProto]:
    """A layer norm."""
    return {
        name: one("LayerNormalization", {"x": [*s, width], "g": [width], "b": [width]}, axis=-1)
        for name, s in {"rows": [rows], "batch 1": [1, rows], "batch 2": [2, rows // 2]}.items()
    }


SPELLINGS: dict[str, Callable[[], dict[str, onnx.ModelProto]]] = {
    "product": lambda: product(64, 192, 320),
    "product of a vector": lambda: product(2, 512, 768),
    "product with a bias": lambda: biased(64, 192, 320),
    "softmax": lambda: leading("Softmax", 96, [256], axis=-1),
    "element by element": lambda: leading("Tanh", 96, [256]),
    "lookup": lambda: lookup(5000, 64, 128),
    "norm": lambda: norm(96, 256),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("preset", ["cpu", "h100"])
@pytest.mark.parametrize("what", SPELLINGS)
def test_equal_work_costs_the_same(what, preset):
    prices = {name: price(m, preset) for name, m in SPELLINGS[what]().items()}
    assert max(prices.values()) <= 1.1 * min(prices.values()), prices


def test_unequal_prices_are_seen(monkeypatch):
    """The mistake that once was: what is not computed at every point of a space with a batch of 1 was called layered."""
    ones = lambda op: any(d.size == 1 for d in op.dims)  # noqa: E731
    monkeypatch.setattr(compute, "layered", lambda op: ones(op) or bool(op.inner))
    monkeypatch.setattr(compute, "layered_flops", lambda op, block, final: (0 * compute.sizes(block), compute.sizes(block)))
    with pytest.raises(AssertionError):
        test_equal_work_costs_the_same("product", "cpu")
    with pytest.raises(AssertionError):
        test_equal_work_costs_the_same("lookup", "cpu")


# more work


@dataclass(frozen=True)
class Family:
    """Models by sizes, each of which may grow."""

    sizes: tuple[int, ...]
    build: Callable[..., onnx.ModelProto]


def conv(n: int, c: int, size: int, features: int, window: int) -> onnx.ModelProto:
    return one("Conv", {"x": [n, c, size, size], "w": [features, c, window, window]}, auto_pad="SAME_UPPER")


def attention(b: int, h: int, s: int, d: int) -> onnx.ModelProto:
    nodes = [N("MatMul", ["q", "k"], ["s"], "s"), N("Softmax", ["s"], ["p"], "p", axis=-1), N("MatMul", ["p", "v"], ["y"], "y")]
    ins = {"q": [b, h, s, d], "k": [b, h, d, s], "v": [b, h, s, d]}
    return net(nodes, {n: (T.FLOAT, shape) for n, shape in ins.items()}, {"y": T.FLOAT})


FAMILIES = {
    "matmul": Family((1, 64, 64, 96), lambda b, m, k, n: one("MatMul", {"x": [b, m, k], "w": [k, n]})),
    "batched matmul": Family((1, 48, 64, 96), lambda b, m, k, n: one("MatMul", {"x": [b, m, k], "w": [b, k, n]})),
    "convolution": Family((1, 3, 14, 8, 1), conv),
    "attention": Family((1, 1, 32, 16), attention),
    "softmax": Family((1, 12, 40), lambda *s: one("Softmax", {"x": s}, axis=-1)),
    "norm": Family((1, 12, 40), lambda a, b, c: one("LayerNormalization", {"x": [a, b, c], "g": [c]}, axis=-1)),
    "mean": Family((1, 12, 40), lambda *s: one("ReduceMean", {"x": s}, weights={"axes": i64(1)}, keepdims=0)),
    "argmax": Family((1, 12, 40), lambda *s: net([N("ArgMax", ["x"], ["y"], "n", axis=1)], {"x": (T.FLOAT, list(s))}, {"y": T.INT64})),
    "lookup": Family((500, 1, 16, 32), lambda v, b, s, d: one("Gather", {"t": [v, d], "ids": [b, s]}, integers=("ids",))),
    "transpose": Family((1, 12, 40), lambda *s: one("Transpose", {"x": s}, perm=[2, 0, 1])),
    "map": Family((1, 12, 40), lambda *s: one("Erf", {"x": s})),
    "pool": Family((1, 3, 16, 16), lambda *s: one("MaxPool", {"x": s}, kernel_shape=[2, 2], strides=[2, 2])),
    "scan": Family((1, 12, 40), lambda *s: one("CumSum", {"x": s}, weights={"axis": np.int64(1)})),
}  # fmt: skip


@pytest.mark.parametrize("what", FAMILIES)
def test_prices_grow_with_every_size(what, preset="h100"):
    """Each size twice as large, the others at their least: no less, and at most twice as much, or its square."""
    family = FAMILIES[what]
    least = price(family.build(*family.sizes), preset)
    for k in range(len(family.sizes)):
        now = price(family.build(*(2 * v if j == k else v for j, v in enumerate(family.sizes))), preset)
        assert least <= now <= 1.1 * 4 * least, (k, least, now)


def test_prices_that_fall_are_seen(monkeypatch):
    monkeypatch.setattr(compute, "sizes", lambda boxes: 10**9 // np.prod(boxes[..., 1] - boxes[..., 0], axis=-1))
    with pytest.raises(AssertionError):
        test_prices_grow_with_every_size("map")


def test_only_cells_that_are_read_are_paid():
    """A product with every second row and column reads a quarter; a diagonal its diagonal."""
    topo = topology(ONE, "h100")
    every, second = (one("Conv", {"x": [1, 64, n, n], "w": [8, 64, 1, 1]}, strides=[s, s]) for n, s in ((64, 1), (128, 2)))
    assert price(second, "h100") == pytest.approx(price(every, "h100"))
    whole = net([N("Slice", ["x", "a", "b", "c", "d"], ["s"], "s"), N("Exp", ["s"], ["y"], "e")], {"x": (T.FLOAT, [4096, 1024])},
                {"y": T.FLOAT}, {"a": i64(0), "b": i64(4096), "c": i64(0), "d": i64(8)})  # fmt: skip
    assert sum(each(lifted(whole), topo)) == pytest.approx(price(one("Exp", {"x": [512, 1024]}), "h100"))


def test_opaque_nodes_pay_for_all_that_they_write():
    """Results of any size, whatever the node can be cut along."""
    few, many = (
        lifted(net([N("TopK", ["x", "k"], ["t", "i"], "top")], {"x": (T.FLOAT, [1, 4096])}, {"t": T.FLOAT, "i": T.INT64}, {"k": i64(k)}))
        for k in (1, 4001)
    )  # fmt: skip
    assert {kernel_class(op) for op in many.ops} == {"opaque"}
    topo = topology(ONE, "cpu")
    assert sum(each(many, topo)) - sum(each(few, topo)) >= 4000 * (4 + 8) / topo.device.bandwidth


# near the roofline

FACTOR = (
    1.35  # a norm of three terms, of which the roofline takes the largest, at the same rates: 3 ** (1 / 4) where all are equal
)


@cache
def large(name: str) -> Graph:
    """Models whose kernels are large enough to be none but their work."""
    built = {
        "product": lambda: one("MatMul", {"x": [1, 512, 1024], "w": [1024, 2048]}),
        "half": lambda: one("MatMul", {"x": [1, 512, 1024], "w": [1024, 2048]}, T.BFLOAT16),
        "heads": lambda: product(512, 1024, 512)["heads"],
        "vector": lambda: one("MatMul", {"x": [1, 1, 4096], "w": [4096, 4096]}, T.FLOAT16),
        "conv": lambda: conv(1, 64, 56, 64, 3),
        "attention": lambda: attention(1, 12, 512, 64),
        "softmax": lambda: one("Softmax", {"x": [1, 4096, 1024]}, axis=-1),
        "norm": lambda: norm(4096, 1024)["batch 1"],
        "lookup": lambda: one("Gather", {"t": [50257, 768], "ids": [1, 512]}, integers=("ids",)),
        "map": lambda: one("Add", {"x": [1, 4096, 1024], "b": [1024]}),
        "turn": lambda: one("Transpose", {"x": [1, 4096, 1024]}, perm=[2, 0, 1]),
        "mean": lambda: one("ReduceMean", {"x": [1, 4096, 1024]}, weights={"axes": i64(2)}, keepdims=0),
    }[name]  # fmt: skip
    return lifted(built())


LARGE = ("product", "half", "heads", "vector", "conv", "attention", "softmax", "norm", "lookup", "map", "turn", "mean")


@pytest.mark.parametrize("preset", ["h100", "h200", "a100-pcie"])
@pytest.mark.parametrize("name", LARGE)
def test_prices_are_near_the_roofline_of_the_kernels(name, preset):
    """Of every kernel, by the report's own FLOPs and bytes, in every precision of f32."""
    for precision in PRECISIONS:
        near(name, preset, precision)


def near(name, preset, precision):
    graph, chip, topo = large(name), chip_of(CHIP_OF[preset], preset), topology(ONE, preset, precision=precision)
    program = lower(Plan(graph=graph, mesh=ONE, strategies=tuple(WHOLE for _ in graph.ops)))
    seconds = each(graph, topo)
    for step in program.steps:
        if isinstance(step, Launch):
            kernel = kernel_of(step, 0, program)
            form = on_chip(kernel_form(graph, kernel, precision), chip)
            least = roofline(work_of(graph, kernel, form), form, chip)
            most = np.inf if name == "attention" and topo.device.classes else FACTOR * least  # of those, times are fitted
            assert least * 0.95 <= seconds[step.op] <= most, (name, graph.ops[step.op].outs, seconds[step.op], least)


def test_prices_far_from_the_roofline_are_seen(monkeypatch):
    monkeypatch.setattr(compute, "selection", lambda op: None)  # a lookup as a sum over the whole table
    with pytest.raises(AssertionError):
        test_prices_are_near_the_roofline_of_the_kernels("lookup", "h100")


# classes

CLASSES = {
    "mlp": {"contraction"}, "conv_chain": {"convolution"}, "attention": {"contraction"}, "gathers": {"gather"},
    "norms": {"row"}, "opaques": {"opaque"},
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_models_have_kernels_of_the_class_that_they_are_of(name):
    assert name in MODELS
    found = {kernel_class(op) for op in simplify(lift(save(name)).graph).ops}
    assert found >= CLASSES[name]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_measured_class_has_prices_of_its_own(preset):
    """Rates of one class change the kernels of that class alone; equal rates change nothing."""
    topo = topology(ONE, preset)
    graph = lifted(one("Softmax", {"x": [64, 512]}, axis=-1))
    dots = lifted(one("MatMul", {"x": [64, 512], "w": [512, 64]}))
    assert {kernel_class(op) for op in graph.ops} == {"softmax"} and {kernel_class(op) for op in dots.ops} == {"contraction"}
    same = {"softmax": KernelRates(topo.device.launch, topo.device.vector, topo.device.bandwidth)}
    slow = {"softmax": KernelRates(topo.device.launch, topo.device.vector / 2, topo.device.bandwidth / 2)}
    of = lambda g, classes: each(g, replace(topo, device=replace(topo.device, classes=classes)))  # noqa: E731
    assert of(graph, same) == pytest.approx(each(graph, topo))
    assert of(graph, slow) == pytest.approx([2 * s for s in each(graph, topo)])
    assert of(dots, slow) == each(dots, topo)
    assert all(isinstance(op, Block) for op in graph.ops)


def test_what_a_causal_mask_leaves_out_costs_nothing():
    graph = parse("""graph g input q: f32[9, 4] input k: f32[7, 4] input v: f32[7, 4]
      y: f32[9, 4] = op [i: 9, x: 4 | n: 7 softsum] reads v[n, x], q[i, m], k[n, m] let [m: 4 sum] q * k
        body where(ge(index(i - n + 2), 0), let0, f32(-inf)), 1.0, v then acc2 / acc1 output y""")
    op, rng = graph.ops[0], np.random.default_rng(0)
    for _ in range(200):
        (i0, i1), (n0, n1) = (sorted(rng.choice(size + 1, 2, replace=False)) for size in (9, 7))
        block = np.array([[[i0, i1], [0, 4], [n0, n1], [0, 4]]])
        seen = [i - n + 2 >= 0 for i in range(i0, i1) for n in range(n0, n1)]
        assert compute._visible(op, block)[0] == pytest.approx(np.mean(seen))
