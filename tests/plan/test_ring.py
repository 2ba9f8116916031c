"""Ring attention: blocks of keys and values travel round a mesh axis; the same bytes as a gather, never more than two blocks."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.errors import LawError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.plan import MeshAxis, Plan, Strategy
from tapestry.ir.program import Free, Launch, Transfer
from tapestry.ir.syntax.parser import parse
from tapestry.plan import ring_attention
from tapestry.plan.lower import lower
from tapestry.plan.simulate import simulate
from tapestry.plan.strategy import strategies
from tapestry.plan.topology import parse_mesh, to_data, topology
from tapestry.verify import certificate, interp
from tests.support.attention.attention_cases import KEPT, attention
from tests.support.attention.attention_runs import close, feeds_of, fused
from tests.support.small_models import Case, N, execute, net, peak, planned_transfers

CAUSAL = attention("where(ge(index(i - n + 3), 0), (acc0 * 0.3), f32(-inf))", s=23, n=37, d=8, e=8, b=1, kept=KEPT)
EMPTY = attention("where(ge(index(i - n - 3), 0), (acc0 * 0.3), f32(-inf))", s=23, n=37, d=8, e=12, b=1, kept=KEPT)
OPEN = attention("acc0 * 0.3", s=11, n=29, b=1)
BIAS = attention("(acc0 * 0.25) + c", reads=", c[h, i, n]", inputs="input c: f32[{h}, {s}, {n}]\n", s=16, n=16, b=1)
LINEAR = """graph linear
input q: f32[2, 11, 5]
input k: f32[2, 29, 5]
input v: f32[2, 29, 7]
y: f32[2, 11, 7] = op [h: 2, i: 11, e: 7 | n: 29 sum]
  reads v[h, n, e], q[h, i, m], k[h, n, m]
  let [m: 5 sum] q * k
  body max(let0, 0.0) * v
output y
"""
TEXTS = {"causal": CAUSAL, "fully masked rows": EMPTY, "open": OPEN, "bias": BIAS}


def made(text: str, devices: int, *, turn: bool = True, extra: int = 0) -> tuple[Graph, Plan]:
    """Keys and values as they come, in parts over the axis; queries cut by it, keys travelling (or gathered)."""
    graph = fused(text)
    mesh = (MeshAxis("d0", devices), *((MeshAxis("d1", extra),) if extra else ()))
    s = Strategy(("i", "h")[: len(mesh)], (2, 1)[: len(mesh)])
    if turn:
        (s,) = ring_attention.rings(graph.ops[0], s, mesh)
    fixed = {t: (2, None)[: len(mesh)] for t in ("k", "v")}
    return graph, Plan(graph=graph, mesh=mesh, strategies=(s,), inputs=fixed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_round_a_mesh_axis(name: str, devices: int) -> None:
    graph, plan = made(TEXTS[name], devices)
    feeds = feeds_of(graph)
    program = lower(plan)
    laws = certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=plan.mesh)
    assert laws["split_partition"] > 0
    want = interp.run(graph, feeds, wide=True)
    outs, measured = execute(graph, program, Case(None, graph, feeds, {}, want))  # type: ignore[arg-type]
    close(outs["y"], want["y"])
    assert measured.peak == peak(program) and measured.transfers == planned_transfers(program)
    gathered = planned_transfers(lower(made(TEXTS[name], devices, turn=False)[1]))
    assert set(measured.transfers) == {"permute"}
    full = sum(graph.tensors[t].nbytes for t in "kv") * (devices - 1)
    assert measured.transfers["permute"] == (2 * (devices - 1), full)
    assert sum(b for _, b in gathered.values()) <= full  # a causal gather leaves out what no row of a device may see


@pytest.mark.parametrize("name", ["causal", "open"])
def test_with_another_axis_on_heads(name: str) -> None:
    graph, plan = made(TEXTS[name], 3, extra=2)
    feeds, program = feeds_of(graph), lower(plan)
    certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=plan.mesh)
    want = interp.run(graph, feeds, wide=True)
    outs, _ = execute(graph, program, Case(None, graph, feeds, {}, want))  # type: ignore[arg-type]
    close(outs["y"], want["y"])


def test_a_sum_that_nothing_follows() -> None:
    """Scores that are weights as they stand: the last block's state is the result, copied by a kernel of its own."""
    graph = parse(LINEAR)
    (op,) = graph.ops
    assert isinstance(op, Block) and op.inner and not op.lowers
    mesh = (MeshAxis("d0", 3),)
    (s,) = ring_attention.rings(op, Strategy(("i",), (1,)), mesh)
    plan = Plan(graph=graph, mesh=mesh, strategies=(s,))
    program, feeds = lower(plan), feeds_of(graph)
    certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=mesh)
    run = simulate(plan, program, topology(mesh, "cpu"))
    assert [t.mode for t in program.steps if isinstance(t, Launch)] == ["partial"] * 3 + ["finish"] and run.total > 0
    want = interp.run(graph, feeds, wide=True)
    outs, _ = execute(graph, program, Case(None, graph, feeds, {}, want))  # type: ignore[arg-type]
    close(outs["y"], want["y"])


def test_no_device_ever_holds_all_keys() -> None:
    text = attention("acc0 * 0.3", s=64, n=512, d=16, e=16, h=2, b=1)
    for devices in (4, 8):
        plain, turned = (lower(made(text, devices, turn=t)[1]) for t in (False, True))
        whole = sum(made(text, 2)[0].tensors[t].nbytes for t in "kv")
        assert max(peak(plain)) > whole
        assert max(peak(turned)) < whole * 3 / devices + max(peak(plain)) - whole


def test_a_permute_overlaps_with_the_block_before() -> None:
    text = attention("acc0 * 0.3", s=8192, n=8192, d=64, e=64, h=16, kv=16, b=1)
    topo = topology(parse_mesh("4"), "h100")
    _, plan = made(text, 4)
    program = lower(plan)
    run = simulate(plan, program, topo)
    permutes = [t for t in run.timed if isinstance(program.steps[t.step], Transfer)]
    blocks = [t for t in run.timed if isinstance(program.steps[t.step], Launch)]
    assert len(permutes) == 6 and len(blocks) == 5
    gathered = made(text, 4, turn=False)[1]
    assert run.total < simulate(gathered, lower(gathered), topo).total
    assert any(
        np.nanmin(p.start) < np.nanmax(q.end) and np.nanmax(p.end) > np.nanmin(q.start) for p in permutes for q in blocks
    )


def test_where_there_is_no_ring() -> None:
    graph = fused(OPEN)
    op, mesh = graph.ops[0], (MeshAxis("d0", 4),)
    assert isinstance(op, Block)
    assert not ring_attention.rings(op, Strategy(("n",), (None,)), mesh)  # keys are cut in space already
    assert not ring_attention.rings(op, Strategy((None,), (None,)), mesh)
    assert not ring_attention.rings(op, Strategy(("i",), (2,)), (MeshAxis("d0", 64),))  # more devices than keys
    for s in strategies(op, mesh):
        assert not s.ring


# faults


def broken(change) -> str:
    _, plan = made(CAUSAL, 4)
    program = lower(plan)
    with pytest.raises(LawError) as e:
        certificate.check(plan.annotated(), change(program), mesh=plan.mesh)
    return str(e.value)


def launches(program) -> list[int]:
    return [i for i, s in enumerate(program.steps) if isinstance(s, Launch) and s.mode == "partial"]


def with_step(program, at: int, **changes):
    steps = list(program.steps)
    steps[at] = replace(steps[at], **changes)
    return replace(program, steps=tuple(steps))


def test_a_block_that_comes_twice_is_found_out() -> None:
    def again(program):
        first, second = launches(program)[:2]
        return with_step(program, second, blocks=program.steps[first].blocks, ins=program.steps[first].ins)

    assert "written_once" in broken(again) or "split_partition" in broken(again) or "read_after_write" in broken(again)


def test_states_that_are_forgotten_are_found_out() -> None:
    def forget(program):
        return with_step(program, launches(program)[2], states=())

    assert "part of a reduction is missing" in broken(forget)


def test_states_of_one_field_for_another_are_found_out() -> None:
    def mix(program):
        at = launches(program)[1]
        a, b, c = program.steps[at].states
        return with_step(program, at, states=(b, a, c))

    assert "does not hold field" in broken(mix)


def test_a_block_from_the_wrong_neighbour_is_found_out() -> None:
    def wrong(program):
        at = next(i for i, s in enumerate(program.steps) if isinstance(s, Transfer))
        ms = program.steps[at].messages
        return with_step(program, at, messages=(replace(ms[0], src=(ms[0].src + 1) % 4), *ms[1:]))

    assert "read_after_write" in broken(wrong)


def test_a_ring_that_stops_early_is_found_out() -> None:
    """All keys of a device in its last step: right values, but not what the plan says."""

    def stop(program):
        last = launches(program)[-1]
        steps = [s for i, s in enumerate(program.steps) if i != last]
        return replace(program, steps=tuple(steps))

    assert broken(stop)


def test_states_freed_too_early_are_found_out() -> None:
    def free(program):
        at = launches(program)[1]
        gone = Free(buffers=program.steps[at].states[:1])
        return replace(program, steps=(*program.steps[:at], gone, *program.steps[at:]))

    assert "read_after_write" in broken(free)


# the choice


def layer(s: int, heads: int, width: int) -> onnx.ModelProto:
    """One attention over ``s`` positions, queries, keys and values made from one input."""
    cols = heads * width
    w = {
        n: (np.random.default_rng(i).standard_normal((cols, cols)) / cols**0.5).astype(np.float32)
        for i, n in enumerate(("wq", "wk", "wv"))
    }
    nodes = [N("MatMul", ["x", f"w{n}"], [f"{n}0"], n) for n in "qkv"]
    nodes += [N("Reshape", [f"{n}0", "heads"], [f"{n}1"]) for n in "qkv"]
    nodes += [N("Transpose", [f"{n}1"], [f"{n}2"], perm=[0, 2, 3, 1] if n == "k" else [0, 2, 1, 3]) for n in "qkv"]
    nodes += [
        N("MatMul", ["q2", "k2"], ["s0"]),
        N("Mul", ["s0", "scale"], ["s1"]),
        N("Softmax", ["s1"], ["p"], axis=-1),
        N("MatMul", ["p", "v2"], ["y"], "mix"),
    ]
    consts = {**w, "heads": np.array([0, 0, heads, width]), "scale": np.float32(width**-0.5)}
    return net(nodes, {"x": (T.FLOAT, [1, s, cols])}, {"y": T.FLOAT}, consts)


OPTIONS = {"mesh": "8", "layouts": ["x:1=8@d0", "y:2=8@d0"], "pins": ["mix:i=8@d0"]}


def kinds(report) -> set[str]:
    return {t["kind"] for t in report["transfers"]}


@pytest.mark.slow
def test_a_ring_where_the_gather_does_not_fit(tmp_path: Path) -> None:
    """Two heads over eight devices: queries are cut; what is left of the memory decides whether keys are gathered."""
    path = tmp_path / "m.onnx"
    onnx.save(layer(256, 2, 32), path)
    roomy = tapestry.compile(path, **OPTIONS)
    assert kinds(roomy.report) == {"all_gather"}
    need = max(roomy.report["peak_bytes"])
    tight = tapestry.compile(path, **OPTIONS, memory=str(need * 3 // 4))
    assert kinds(tight.report) == {"permute"} and max(tight.report["peak_bytes"]) < need // 2
    assert sum(t["bytes"] for t in tight.report["transfers"]) == sum(t["bytes"] for t in roomy.report["transfers"])
    assert tight.report["certificate"]["passed"] and tight.report["objective_s"] >= tight.report["lower_bound_s"]
    x = np.random.default_rng(0).standard_normal((1, 256, 64)).astype(np.float32)
    want = roomy.run({"x": x})["y"].astype(np.float64)
    tight.save(tmp_path / "b")
    close(tapestry.load(tmp_path / "b").run({"x": x})["y"], want)
    assert "n/8 round d0" in tight.explain() or "m/8 round d0" in tight.explain()


def beside(folder: Path) -> str:
    """A topology file: the preset of CPUs, but transfers run beside kernels."""
    cpu = to_data(topology(parse_mesh("8"), "cpu"))
    level = {"alpha": 5e-6, "beta": 1e-10}
    (folder / "beside.json").write_text(json.dumps({"device": cpu["device"], "levels": [level]}))
    return str(folder / "beside.json")


def test_a_ring_where_it_is_faster(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(layer(1024, 2, 32), path)
    ring, gather = (tapestry.compile(path, **OPTIONS, topology=t) for t in (beside(tmp_path), "cpu"))
    assert (kinds(ring.report), kinds(gather.report)) == ({"permute"}, {"all_gather"})  # (there nothing would be hidden)
    x = np.random.default_rng(0).standard_normal((1, 1024, 64)).astype(np.float32)
    close(ring.run({"x": x})["y"], gather.run({"x": x})["y"].astype(np.float64))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_over_processes(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(layer(1024, 2, 32), path)
    tapestry.compile(path, **OPTIONS, topology=beside(tmp_path)).save(tmp_path / "b")
    x = np.random.default_rng(0).standard_normal((1, 1024, 64)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    options = ["--processes", "2", "--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "out"), "--check", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tapestry", "run", str(tmp_path / "b"), *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] and {t["kind"] for t in report["transfers"]} == {"permute"}
