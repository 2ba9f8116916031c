"""The checker of annotations: a right model passes, every fault has a message of its own, meaning comes from projections."""

import json
import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from tapestry import cli
from tapestry.interop import annotation_semantics
from tapestry.interop.placement import Placement, layout_of, placement, spec_of
from tapestry.interop.sharding_specs import (
    ShardedDim,
    ShardingSpec,
    SimpleShard,
    configuration_proto,
    configurations,
    node_configurations,
    node_proto,
)
from tapestry.ir.index import evaluate
from tapestry.lift import lift
from tapestry.plan.topology import parse_mesh
from tapestry.sharding.check_sharding import check_file
from tests.support.faults import sharding_faults as faults
from tests.support.faults.sharding_faults import N, put
from tests.support.paths import ROOT
from tests.support.small_models import net


def checked(m: onnx.ModelProto, folder, **shapes):
    path = folder / "m.onnx"
    path.write_bytes(m.SerializeToString())
    return check_file(path, shapes)


def errors(found):
    return [f for f in found if f.level == "error"]


def test_a_right_model_passes(tmp_path):
    found = checked(faults.model(), tmp_path)
    assert errors(found) == []
    assert {(f.node, f.code) for f in found} == {("total", "reduction"), ("conv", "halo"), ("down", "reduction")}
    onnx.checker.check_model(str(tmp_path / "m.onnx"))


@pytest.mark.parametrize("shapes", [{}, {"batch": 8}])
def test_symbols_may_be_bound(tmp_path, shapes):
    assert errors(checked(faults.model(), tmp_path, **shapes)) == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("what", "code", "change"), faults.FAULTS, ids=[w for w, _, _ in faults.FAULTS])
def test_every_fault_is_refused_with_its_own_message(what, code, change, tmp_path, capsys):
    m = faults.model()
    change(m)
    path = tmp_path / "m.onnx"
    path.write_bytes(m.SerializeToString())
    assert cli.main(["check-sharding", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert code in [f["code"] for f in found["errors"]], found
    row = next(f for f in found["errors"] if f["code"] == code)
    assert row["message"] and not found["passed"]


def test_faults_are_many_and_their_codes_differ():
    codes = [c for _, c, _ in faults.FAULTS]
    assert len(codes) >= 30 and len(set(codes)) >= 30


def test_the_page_for_the_next_version_names_every_code():
    """Rules that the checker has and rules that docs/sharding-next.md offers are the same."""
    source = "".join((ROOT / "tapestry" / f).read_text() for f in ("interop/annotation_rules.py", "sharding/check_sharding.py"))
    page = (ROOT / "docs" / "sharding-next.md").read_text().split("## The checker's rules")[1]
    named = set(re.findall(r"`([a-z-]+)`", page))
    given = set(re.findall(r'"(?:error|warning)", "([a-z-]+)"', source)) | {c for _, c, _ in faults.FAULTS}
    assert given <= named, given - named
    assert named <= given | {"agreement", "contraction", "reduction", "halo", "reshard"}, named - given


@pytest.mark.slow
def test_messages_of_all_faults_differ(tmp_path):
    seen = {}
    for what, code, change in faults.FAULTS:
        m = faults.model()
        change(m)
        seen[what] = next(str(f) for f in checked(m, tmp_path) if f.code == code)
    assert len(set(seen.values())) == len(seen)


def test_damaged_metadata_is_no_crash(tmp_path):
    m = faults.model()
    m.metadata_props.add(key="tapestry.shapes", value="{")
    m.metadata_props.add(key="tapestry.mesh", value="2xx")
    assert {f.code for f in errors(checked(m, tmp_path))} == {"mesh"}


def test_absurd_device_counts_are_no_trap(tmp_path):
    m = faults.model()
    m.configuration[0].num_devices = 2**31 - 1
    m.configuration[0].ClearField("device")
    put(m, "up", "w1", {}, [2**31 - 2])
    found = checked(m, tmp_path)
    assert errors(found) == [] and "many-devices" in {f.code for f in found}
    assert cli.main(["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "b"), "--shape", "batch=8"]) == 2


def test_no_annotations_is_said(tmp_path, capsys):
    m = net([N("Relu", ["x"], ["y"], "r")], {"x": (T.FLOAT, [4])}, {"y": T.FLOAT})
    (tmp_path / "m.onnx").write_bytes(m.SerializeToString())
    assert cli.main(["check-sharding", str(tmp_path / "m.onnx")]) == 0
    assert "no multi-device annotations" in capsys.readouterr().out


def test_strict_fails_on_warnings(tmp_path, capsys):
    (tmp_path / "m.onnx").write_bytes(faults.model().SerializeToString())
    assert cli.main(["check-sharding", str(tmp_path / "m.onnx"), "-q"]) == 0
    assert cli.main(["check-sharding", str(tmp_path / "m.onnx"), "-q", "--strict"]) == 1


def test_an_implied_reshard_is_a_warning(tmp_path):
    m = faults.model()
    put(m, "act", "h", {0: 4})
    put(m, "act", "r", {0: 4})
    found = checked(m, tmp_path)
    assert errors(found) == []
    assert any(f.code == "reshard" and f.node == "act" and f.tensor == "h" for f in found)


def test_inherited_specs_that_do_not_meet_are_a_reshard(tmp_path):
    m = faults.model()
    specs = faults.node(m, "skip").device_configurations[0].sharding_spec
    specs.remove(faults.spec(m, "skip", "d"))
    put(m, "down", "d", {1: 4})
    found = checked(m, tmp_path)
    assert errors(found) == []
    assert any(f.code == "agreement-inherited" for f in found)


def test_protos_survive_reading_and_writing():
    m = faults.model()
    first = faults.first(m)
    first.dim_value = 32
    faults.spec(m, "up", "h").sharded_dim[0].ClearField("axis")
    for n in m.graph.node:
        again = [node_proto(c).SerializeToString() for c in node_configurations(n)]
        assert again == [c.SerializeToString() for c in n.device_configurations]
    assert [configuration_proto(c) for c in configurations(m)] == list(m.configuration)


# what specs mean


def test_the_proposals_examples():
    """The 2×2 tensor of the proposal: cut along either axis, both, copied, and mixed."""
    one = (SimpleShard(2),)
    cases = [
        (ShardingSpec("t", (0, 1), (), (ShardedDim(0, one),)), {0: ((0, 1), (0, 2)), 1: ((1, 2), (0, 2))}),
        (ShardingSpec("t", (0, 1), (), (ShardedDim(1, one),)), {0: ((0, 2), (0, 1)), 1: ((0, 2), (1, 2))}),
        (ShardingSpec("t", (0, 1, 2, 3), (), (ShardedDim(0, one), ShardedDim(1, one))),
         {0: ((0, 1), (0, 1)), 1: ((0, 1), (1, 2)), 2: ((1, 2), (0, 1)), 3: ((1, 2), (1, 2))}),
        (ShardingSpec("t", (-1,), ((-1, (0, 1)),)), {0: ((0, 2), (0, 2)), 1: ((0, 2), (0, 2))}),
        (ShardingSpec("t", (-1, -2), ((-1, (0, 1)), (-2, (2, 3))), (ShardedDim(0, one),)),
         {0: ((0, 1), (0, 2)), 1: ((0, 1), (0, 2)), 2: ((1, 2), (0, 2)), 3: ((1, 2), (0, 2))}),
    ]  # fmt: skip
    for spec, expected in cases:
        p = placement(spec, (2, 2))
        assert {d: p.box(d) for d in p.pieces} == expected


def test_fused_axes_are_cut_where_they_were():
    """An axis of 4 × 6 whose inner part is cut in two: each device holds alternate runs of three."""
    spec = ShardingSpec("t", (0, 1), (), (ShardedDim(0, (SimpleShard(1, 4), SimpleShard(2, 6))),))
    p = placement(spec, (24,))
    cells = {d: [x for lo, hi in iv[0] for x in range(lo, hi)] for d, iv in p.pieces.items()}
    expected = np.arange(24).reshape(4, 2, 3)
    assert cells == {0: expected[:, 0].reshape(-1).tolist(), 1: expected[:, 1].reshape(-1).tolist()}
    outer = ShardingSpec("t", (0, 1), (), (ShardedDim(0, (SimpleShard(2, 4), SimpleShard(1, 6))),))
    assert placement(outer, (24,)).pieces == {0: (((0, 12),),), 1: (((12, 24),),)}


@pytest.mark.parametrize("mesh_text", ["4", "2x2", "2x3x2"])
def test_layouts_survive_as_specs(mesh_text):
    mesh = parse_mesh(mesh_text)
    for layout in np.ndindex(*(4 for _ in mesh)):
        given = tuple(None if k == 3 else k for k in layout)
        spec = spec_of("t", given, 3, mesh)
        assert layout_of(spec, (24, 13, 36), mesh) == given


def test_clash_equals_brute_force(tmp_path):
    """The classes of points against every single point, on random placements."""
    rng = np.random.default_rng(1)
    m = net(
        [N("Conv", ["x", "k"], ["c"], "conv", pads=[1, 0], strides=[2]), N("MatMul", ["a", "b"], ["d"], "mm"), N("Concat", ["a", "a2"], ["e"], "cat", axis=1)],
        {"x": (T.FLOAT, [2, 3, 7]), "a": (T.FLOAT, [4, 5]), "b": (T.FLOAT, [5, 3]), "a2": (T.FLOAT, [4, 2])}, dict.fromkeys("cde", T.FLOAT),
        {"k": np.ones((2, 3, 3), np.float32)},
    )  # fmt: skip
    (tmp_path / "m.onnx").write_bytes(m.SerializeToString())
    graph = lift(tmp_path / "m.onnx").graph
    kinds = {True: 0, False: 0}
    for trial in range(300):
        op = graph.ops[trial % len(graph.ops)]
        placed = {t: _random(graph.tensors[t].shape, rng) for t in op.inputs if rng.random() < 0.9}
        reads = [k for k, r in enumerate(op.reads) if r.tensor in placed]
        if not reads:
            continue
        found = annotation_semantics.clash(op, placed) is not None
        assert found == _brute(op, reads, placed), (op, placed)
        kinds[found] += 1
    assert min(kinds.values()) > 20


def _random(shape, rng) -> Placement:
    pieces = {}
    for d in range(3):
        if rng.random() < 0.9:
            ends = [sorted(rng.choice(n + 1, 2, replace=False)) if rng.random() < 0.3 else (0, n) for n in shape]
            pieces[d] = tuple(((int(lo), int(hi)),) for lo, hi in ends)
    return Placement(shape, pieces or {0: tuple(((0, n),) for n in shape)})


def _brute(op, reads, placed) -> bool:
    everyone = set().union(*(p.pieces for p in placed.values()))
    for point in np.ndindex(*(d.size for d in op.space)):
        env = dict(zip((d.name for d in op.space), map(int, point), strict=True))
        devices = set(everyone)
        for k in reads:
            r, p = op.reads[k], placed[op.reads[k].tensor]
            cell = [evaluate(e, env) for e in r.index]
            guards = all((evaluate(g.aff, env) >= 0) if g.op == "ge" else (evaluate(g.aff, env) == 0) for g in r.when)
            if guards and all(0 <= x < n for x, n in zip(cell, p.shape, strict=True)):
                devices &= set(annotation_semantics._holders(p, tuple(cell)))
        if not devices:
            return True
    return False


def test_checker_reads_ranks_without_declared_shapes(tmp_path):
    m = net([N("Relu", ["x"], ["h"], "a"), N("Relu", ["h"], ["y"], "b")], {"x": (T.FLOAT, [4, 4])}, {"y": T.FLOAT})
    m.ir_version = 11
    m.configuration.add(name="four", num_devices=4)
    put(m, "a", "h", {2: 4})
    assert [f.code for f in errors(checked(m, tmp_path))] == ["axis-range"]
    m.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", T.FLOAT, [4, 4]))
    put(m, "a", "h", {-1: 4})
    assert errors(checked(m, tmp_path)) == []
