"""Running states: recognised from projections, linear on every target, cut into blocks whose totals alone travel."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import tapestry
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.errors import LawError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, whole
from tapestry.ir.program import Transfer
from tapestry.ir.recognition.running_state import as_scan
from tapestry.ir.syntax.parser import parse
from tapestry.plan.cost.compute import work
from tapestry.plan.search.planner import search
from tapestry.plan.strategy import Pin
from tapestry.plan.topology import parse_mesh, topology
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import parse_move
from tapestry.rewrites.core.rule_check import RuleCase, check_rule, same_values
from tapestry.verify import certificate, interp
from tests.support.lifting import agree, build, data, evaluate, lift_model, node
from tests.support.scan_cases import FIELDS, GUARDS, running
from tests.support.triton_kernels import compare, footprint, from_torch, random_arrays, run_kernel, to_torch


def blocked(text: str, parts: int) -> Graph:
    return apply_moves(parse(text), [parse_move(f"block_scan@y0{{parts={parts}}}")])


def on_cpu(graph: Graph, at: int, values: dict[str, np.ndarray], block: Box, mode: str) -> list[np.ndarray]:
    """One kernel of the CPU target on buffers that hold no more than its footprint."""
    op = graph.ops[at]
    assert isinstance(op, Block)
    used = op.body_reads() | (op.then_reads() if mode == "full" else frozenset())
    ins = tuple(footprint(graph, op, p, block, 0) if p in used else None for p in range(len(op.reads)))
    outs = (block[: len(op.dims)],) * (len(op.body) if mode == "partial" else len(op.outs))
    run = TorchCpu().kernel(graph, Kernel(op=at, mode=mode, block=block, ins=ins, outs=outs))
    held = [
        None if b is None else to_torch(values[r.tensor][tuple(slice(*s) for s in b)], graph.tensors[r.tensor].dtype)
        for r, b in zip(op.reads, ins, strict=True)
    ]
    return [from_torch(t) for t in run(held, [])]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("monoid", sorted(FIELDS))
@pytest.mark.parametrize("way", sorted(GUARDS))
@pytest.mark.parametrize("segment", [0, 4])
def test_both_targets_give_what_the_interpreter_gives(monoid: str, way: str, segment: int) -> None:
    """In whole, on blocks of the places (also across segments), and as states over a part of the elements."""
    graph = blocked(running(monoid, GUARDS[way], first=True), 3) if segment else parse(running(monoid, GUARDS[way]))
    at = len(graph.ops) - 1
    op = graph.ops[at]
    assert isinstance(op, Block)
    found = as_scan(op)
    assert (
        found
        and found.segment == (segment or 11)
        and found.shift == ("- 1" in GUARDS[way])
        and found.sign == (1 if way in ("up to", "before") else -1)
    )
    values = random_arrays(graph)
    for k in range(at):
        outs = replace(graph, ops=graph.ops[: k + 1], outputs=graph.ops[k].outs)
        values |= interp.run(outs, {n: values[n] for n in graph.inputs}, wide=False)
    want = interp.run(graph, {n: values[n] for n in graph.inputs}, wide=True)
    box = whole(tuple(d.size for d in op.space))
    along = next(i for i, d in enumerate(op.space) if d.name == "i")
    for places in ((0, 11), (0, 4), (3, 9), (8, 11)):
        block = (*box[:along], places, *box[along + 1 :])
        cut = tuple(slice(*places) if i == along else slice(None) for i in range(len(op.dims)))
        for run in (lambda b: on_cpu(graph, at, values, b, "full"), lambda b: run_kernel(graph, at, values, block=b)):
            for t, a in zip(op.outs, run(block), strict=True):
                compare(a, want[t][cut], graph.tensors[t].dtype)
    for part in ((0, 2), (1, box[-1][1])):
        block = (*box[:-1], part)
        a, b = on_cpu(graph, at, values, block, "partial"), run_kernel(graph, at, values, block=block, mode="partial")
        for x, y, e in zip(a, b, op.body, strict=True):
            compare(y, x, e.dtype)


@pytest.mark.parametrize("way", sorted(GUARDS))
def test_states_that_are_not_the_result_yet_have_every_place(way: str) -> None:
    """Sums of f16 in f32: the guard alone makes a state vary along the scanned axis."""
    graph = parse(f"""
graph g
input x: f16[3, 5]
y: f16[3, 5] = op [a: 3, i: 5 | j: 5 sum]
  reads x[a, j] when {GUARDS[way]} >= 0 else 0.0
  body cast(x, f32)
  then cast(acc0, f16)
output y
""")
    values = random_arrays(graph)
    for part in ((0, 1), (0, 3), (4, 5)):
        block = ((0, 3), (0, 5), part)
        want = on_cpu(graph, 0, values, block, "partial")[0]
        compare(run_kernel(graph, 0, values, block=block, mode="partial")[0], want, "f32")
        x = values["x"].astype(np.float64)
        sums = [sum((x[:, j] for j in range(*part) if eval(GUARDS[way], {"i": i, "j": j}) >= 0), np.zeros(3)) for i in range(5)]
        compare(want, np.stack(sums, axis=1), "f32")


@pytest.mark.slow
def test_a_scan_longer_than_a_tile_carries_its_state() -> None:
    from tapestry.codegen.triton.config_fields import KernelConfig

    for guard in GUARDS.values():
        graph = parse(running("affine", guard, size=37))
        values = {n: a * 0.9 for n, a in random_arrays(graph).items()}
        want = interp.run(graph, values)
        for t, a in zip(("y0", "y1"), run_kernel(graph, 0, values, config=KernelConfig(rows=4, cols=8)), strict=True):
            compare(a, want[t], "f64")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("monoid", sorted(FIELDS))
@pytest.mark.parametrize("way", sorted(GUARDS))
def test_blocks_keep_the_laws(monoid: str, way: str) -> None:
    """Equal dependences and values, ragged blocks too; the affine maps do not commute."""
    case = RuleCase(
        before=running(monoid, GUARDS[way], size=7),
        moves=("block_scan@y0{parts=2}", "block_scan@y0{parts=3}", "block_scan@y0{parts=7}"),
    )
    check_rule(RULES["block_scan"], case, np.random.default_rng(1))


def test_what_is_not_a_scan() -> None:
    text = running("sum", "i - j")
    for wrong in ("i - j - 2", "2*i - j", "i + j - 4"):
        assert as_scan(parse(text.replace("i - j >= 0", f"{wrong} >= 0")).ops[0]) is None
    assert as_scan(parse(text.replace("else 0.0", "else 1.0")).ops[0]) is None  # not the identity of a sum
    assert as_scan(parse(text.replace("body x0", "body exp(x0)")).ops[0]) is None  # exp(0) is not either
    assert (
        as_scan(parse(text.replace("x0[a, j, c]", "x0[a, floor((i + j)/2), c]")).ops[0]) is None
    )  # another element at each place
    refused = [str(r) for r in RULES["block_scan"].find(blocked(text, 3)) if "y0:" in str(r)]
    assert refused == ["block_scan@y0: it runs in blocks already (e.g. it starts again every 4 points of 'i')"]


def test_a_reader_in_another_shape_leaves_the_scan_a_scan() -> None:
    graph = parse("""graph g
input x: f32[12]
t: f32[12] = op [i: 12 | j: 12 sum]
  reads x[j] when i - j >= 0 else 0.0
  body x
y: f32[3, 4] = op [a: 3, b: 4]
  reads t[4*a + b]
  body tanh(t)
output y
""")
    assert any(as_scan(op) for op in simplify(graph).ops)


# ONNX


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_cumsum_is_onnxruntimes(axis: int, exclusive: int, reverse: int, tmp_path: Path) -> None:
    n = node("CumSum", "x a", exclusive=exclusive, reverse=reverse)
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        x = (data(3, 6, 2) * 9).astype(dtype)
        graph = agree(n, {"x": x}, ["y"], {"a": np.array(axis)}, folder=tmp_path)
        assert as_scan(graph.ops[0])
    x = data(3, 6, 2)
    x[0, 2, 0], x[1, 3, 1], x[1, 4, 1], x[2, 1, 0] = np.nan, np.inf, -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        agree(n, {"x": x}, ["y"], {"a": np.array(axis)}, folder=tmp_path)


@pytest.mark.slow
def test_half_precision_sums_in_f32(tmp_path: Path) -> None:
    x = np.full(4096, 1.0, np.float16)
    got = evaluate(lift_model(build([node("CumSum", "x a")], {"x": x}, ["y"], {"a": np.array(0)}), tmp_path), {"x": x})["y"]
    assert got.dtype == np.float16 and got[-1] == 4096  # f16 alone stops at 2048


# plans


def model(tmp_path: Path, *shape: int, **attributes: int) -> Path:
    path = tmp_path / "cumsum.onnx"
    onnx.save(build([node("CumSum", "x a", **attributes)], {"x": data(*shape)}, ["y"], {"a": np.array(0)}), path)
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("attributes", [{}, {"reverse": 1}, {"exclusive": 1}])
def test_only_totals_travel(attributes: dict[str, int], tmp_path: Path) -> None:
    built = tapestry.compile(
        model(tmp_path, 512, 1024, **attributes), devices=8, layouts=["x:0=8@d0", "y:0=8@d0"], topology="a100-pcie"
    )
    assert built.report["moves"] == ["block_scan@y{parts=8}"]
    assert (
        sum(t["bytes"] for t in built.report["transfers"]) <= 7 * 8 * 1024 * 4
    )  # the totals, scattered or sent to later blocks
    x = data(512, 1024, seed=3)
    want = np.cumsum(x[::-1] if "reverse" in attributes else x, axis=0, dtype=np.float64)
    want = want[::-1] if "reverse" in attributes else want - x if "exclusive" in attributes else want
    np.testing.assert_allclose(built.run({"x": x})["y"], want, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_work_is_linear(tmp_path: Path) -> None:
    n = 1 << 20  # squared, this would take hours
    built = tapestry.compile(model(tmp_path, n), devices=4)
    x = data(n)
    start = time.perf_counter()
    got = built.run({"x": x})["y"]
    assert time.perf_counter() - start < 20
    np.testing.assert_allclose(got, np.cumsum(x, dtype=np.float64), rtol=1e-3, atol=0.5)
    op = parse(running("sum", "i - j", size=100)).ops[0]
    assert work(op, np.array([[(0, 5), (0, 100), (0, 3), (0, 100)]])).tolist() == [1500]


def test_a_plan_that_leaves_out_a_total_is_refused() -> None:
    text = running("affine", "i - j", size=16, first=True).replace("5, 3]", "64, 256]").replace("a: 5, c: 3", "a: 64, c: 256")
    graph = blocked(text, 4)
    found = search(
        graph,
        topology(parse_mesh("4"), "a100-pcie"),
        pins={1: (Pin("k", 0),)},
        inputs={"x0": (0,), "x1": (0,)},
        outputs={"y0": (0,), "y1": (0,)},
    )
    certificate.check(found.plan.annotated(), found.program, mesh=found.plan.mesh)
    faults = 0
    for i, step in enumerate(found.program.steps):
        for k in range(len(step.messages) if isinstance(step, Transfer) else 0):
            assert isinstance(step, Transfer)
            less = replace(step, messages=step.messages[:k] + step.messages[k + 1 :])
            broken = replace(found.program, steps=(*found.program.steps[:i], less, *found.program.steps[i + 1 :]))
            with pytest.raises(LawError, match="lacks cells"):
                certificate.check(found.plan.annotated(), broken, mesh=found.plan.mesh)
            faults += 1
    assert faults


def test_values_survive_simplification() -> None:
    for way, guard in GUARDS.items():
        graph = blocked(running("sum", guard, size=12), 4)
        same_values(graph, simplify(graph), {n: a.astype(np.float64) for n, a in random_arrays(graph).items()}, way)
