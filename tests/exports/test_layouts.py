"""``dtensor``, ``jax`` and ``json``: read by torch's DTensor on two ranks, by JAX where it is installed, and against the plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tapestry
from tapestry import cli
from tapestry.interop.placement import held
from tapestry.ir.program import Launch
from tapestry.plugins import offered
from tapestry.tools.exports import formats, layouts
from tapestry.tools.exports.nodes.onnx_nodes import NotExpressible
from tapestry.viz.tool_kinds import ExportFormat
from tests.support.small_models import save
from tests.support.two_hosts import free_port

NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x))) + x
"""
RANK = (
    NET
    + """
import json, os, sys
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
def placed(names):
    return [Shard(int(n[6:-1])) if n.startswith("Shard") else Replicate() for n in names]
said = json.loads(open(sys.argv[1]).read())
data = torch.load(sys.argv[2], weights_only=True)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", tuple(said["mesh"]["shape"]), mesh_dim_names=tuple(said["mesh"]["dim_names"]))
net = Net()
net.load_state_dict(data["weights"])
for name, p in list(net.named_parameters()):
    part, _, own = name.rpartition(".")
    net.get_submodule(part).register_parameter(own, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, placed(said["parameters"][name]))))
x = distribute_tensor(data["x"], mesh, placed(said["inputs"]["x"]))
y = net(x).redistribute(mesh, placed(next(iter(said["outputs"].values()))))
mine = [net.up.weight.to_local().shape, y.to_local().shape]
whole = y.full_tensor()
if dist.get_rank() == 0:
    torch.save({"y": whole, "mine": mine}, sys.argv[3])
dist.destroy_process_group()
"""
)


def built(tmp_path: Path, *more: str) -> Path:
    space: dict = {}
    exec(NET, space)
    torch.manual_seed(0)
    net, x = space["Net"](), torch.randn(4, 8)
    torch.save({"weights": net.state_dict(), "x": x, "y": net(x).detach()}, tmp_path / "data.pt")
    program = torch.export.export(net, (x,))
    c = tapestry.compile(program, mesh={"tp": 2}, layouts=["x:replicated", *more], pins=["up:out=tp", "down:in=tp"])
    c.save(tmp_path / "build")
    return tmp_path / "build"


@pytest.mark.slow
def test_dtensor_runs_with_the_placements(tmp_path):
    build = built(tmp_path)
    document = formats.export(build, "dtensor", tmp_path / "d.json")
    assert document["extra_bytes"] == 0
    said = json.loads((tmp_path / "d.json").read_text())
    assert said["parameters"]["up.weight"] == ["Shard(0)"] and said["parameters"]["down.weight"] == ["Shard(1)"]
    (tmp_path / "rank.py").write_text(RANK)
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given = [str(tmp_path / n) for n in ("d.json", "data.pt", "out.pt")]
    ranks = [
        subprocess.Popen([sys.executable, str(tmp_path / "rank.py"), *given], env={**env, "RANK": str(r)}) for r in range(2)
    ]
    assert [r.wait(100) for r in ranks] == [0, 0]
    got, want = torch.load(tmp_path / "out.pt"), torch.load(tmp_path / "data.pt")["y"]
    assert list(got["mine"][0]) == [8, 8]  # half of up's rows
    torch.testing.assert_close(got["y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_jax_takes_the_specs(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # (read when jax begins)
    jax = pytest.importorskip("jax")
    if jax.device_count() < 2:
        pytest.skip("one device; set XLA_FLAGS=--xla_force_host_platform_device_count=2")
    formats.export(built(tmp_path), "jax", tmp_path / "j.json")
    said, data = json.loads((tmp_path / "j.json").read_text()), torch.load(tmp_path / "data.pt")
    P, names = jax.sharding.PartitionSpec, said["mesh"]["axis_names"]
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]).reshape(said["mesh"]["axis_sizes"]), names)
    put = lambda name, kind, a: jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*map(_spec, said[kind][name]))))  # noqa: E731
    w = {n: put(n, "parameters", a.numpy()) for n, a in data["weights"].items()}
    assert w["up.weight"].addressable_shards[0].data.shape == (8, 8)

    def net(x, w):
        h = jax.nn.gelu(x @ w["up.weight"].T + w["up.bias"], approximate=False)
        return h @ w["down.weight"].T + w["down.bias"] + x

    out = jax.sharding.NamedSharding(mesh, P(*map(_spec, next(iter(said["outputs"].values())))))
    run = jax.jit(net, out_shardings=out).lower(put("x", "inputs", data["x"].numpy()), w).compile()
    assert len(re.findall(r"all-reduce\(", run.as_text())) == 1  # what Megatron moves, and nothing else
    np.testing.assert_allclose(run(put("x", "inputs", data["x"].numpy()), w), data["y"], rtol=1e-5, atol=1e-5)


def _spec(entry):
    return tuple(entry) if isinstance(entry, list) else entry


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mlp", "conv_chain", "attention", "norms", "residual"])
def test_json_says_what_every_device_holds(name, tmp_path):
    c = tapestry.compile(save(name), mesh="2x2")
    layouts.export_json(c.build, tmp_path / "p.json")
    said, program = json.loads((tmp_path / "p.json").read_text()), c.build.program
    mesh = c.build.plan.mesh
    assert said["schema"] == layouts.SCHEMA and len(said["operations"]) == len(c.build.plan.graph.ops)
    found = {t["name"]: list(t["held"]) for t in said["tensors"]}
    for b in program.buffers.values():
        if b.field is None:
            shape = c.build.plan.graph.tensors[b.tensor].shape
            whole = [
                held(tuple(h["layout"]), shape, mesh)
                if h["layout"] is not None
                else tuple(tuple(map(tuple, x)) for x in h["boxes"])
                for h in found[b.tensor]
            ]
            assert b.boxes in whole


def test_an_uneven_part_has_no_place_but_the_nearest(tmp_path):
    c = tapestry.compile(save("mlp"), mesh="2", layouts="y:0=2@d0")  # 7 rows on 2 devices
    with pytest.raises(NotExpressible, match=r"'\w+'.*\n.*because: device 0 holds .*\n.*--nearest: \d+ bytes more"):
        layouts.export_places(c.build, tmp_path / "d.json", "dtensor", nearest_will_do=False)
    done = layouts.export_places(c.build, tmp_path / "d.json", "dtensor", nearest_will_do=True)
    said = json.loads((tmp_path / "d.json").read_text())
    assert said["outputs"]["y"] == ["Shard(0)"] and done["extra"]["y"] == 5 * 4  # DTensor's parts are 4 and 3, ours 3 and 4
    layouts.export_places(c.build, tmp_path / "j.json", "jax", nearest_will_do=True)
    said = json.loads((tmp_path / "j.json").read_text())
    assert said["outputs"]["y"] == ["d0", None] and said["padded"]["y"] == [8, 5]  # jit takes no uneven ends
    assert said["extra"]["y"] == 2 * 5 * 4


def test_what_is_moved_before_an_operation_is_said_of_it(tmp_path):
    c = tapestry.compile(save("mlp"), mesh={"tp": 2}, layouts=["x:replicated", "y:replicated", "w2:0=2@tp", "w1:0=2@tp"])
    found = layouts.places(c.build, "jax", nearest_will_do=True)
    moved = {
        (k, b.tensor): b.boxes
        for s in c.build.program.steps if isinstance(s, Launch)
        for k, b in ((s.op, c.build.program.buffers[n]) for n in s.ins if n)
        if b.field is None and b.boxes != held(found.first[b.tensor], c.build.plan.graph.tensors[b.tensor].shape, c.build.plan.mesh)
    }  # fmt: skip
    assert found.reads and moved == {
        at: held(layout, c.build.plan.graph.tensors[at[1]].shape, c.build.plan.mesh) for at, layout in found.reads.items()
    }


def test_the_commands_formats_are_those_of_the_table(tmp_path, capsys):
    assert tuple(formats.FORMATS) == offered(ExportFormat)
    tapestry.compile(save("mlp"), mesh="1").save(tmp_path / "build")
    assert cli.main(["export", str(tmp_path / "build"), "--format", "json", "--nearest", "-o", str(tmp_path / "p.json")]) == 2
    assert "as it is, or not at all" in capsys.readouterr().err
    for form in ("json", "jax", "dtensor", "onnx-fused", "onnx-ranks"):
        assert cli.main(["export", str(tmp_path / "build"), "--format", form, "-o", str(tmp_path / form), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["format"] == form
