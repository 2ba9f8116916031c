"""Plans that are asked for in the words of a format: the search leaves out what it cannot say, and the export writes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import tapestry
from tapestry.errors import TapestryError
from tests.support.two_hosts import free_port

FORMATS = ("dtensor", "jax", "onnx-ranks")


class Decoder(torch.nn.Module):
    """Attention over four heads, and a feed-forward part, on a sequence."""

    def __init__(self, wide: int = 64) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(wide, wide, bias=False) for _ in range(4))
        self.up, self.down, self.norm = (
            torch.nn.Linear(wide, 4 * wide),
            torch.nn.Linear(4 * wide, wide),
            torch.nn.LayerNorm(wide),
        )

    def forward(self, x):
        q, k, v = (f(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))


class Images(torch.nn.Module):
    """Two convolutions of images of 30 rows: cut along them, parts have halos and are unequal."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1, stride=2)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


CASES = {"decoder": (Decoder(512), (1, 512, 512)), "images": (Images(), (1, 3, 510, 512))}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_asked_for_in_a_format_is_written_in_it(case, form, tmp_path):
    net, shape = CASES[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    program = torch.export.export(net, (x,))
    free = tapestry.compile(program, devices=4, topology="h100", weights=True)
    made = tapestry.compile(program, devices=4, topology="h100", for_format=form)
    assert made.report["for_format"] == form
    assert any(d for s in made.build.plan.strategies for d in s.dims)
    done = made.export(tmp_path / "out", form)
    assert form == "onnx-ranks" or done["extra_bytes"] == 0
    assert made.report["objective_s"] >= free.report["lower_bound_s"] * (1 - 1e-9)
    name = next(iter(made.build.plan.graph.inputs))
    got = made.run({name: x.numpy()})
    np.testing.assert_allclose(next(iter(got.values())), net(x).detach().numpy(), rtol=2e-4, atol=2e-4)


def test_a_free_plan_of_these_cannot_be_said(tmp_path):
    """Otherwise the cases above show nothing."""
    net, shape = CASES["images"]
    made = tapestry.compile(torch.export.export(net, (torch.zeros(shape),)), devices=4, topology="h100")
    with pytest.raises(TapestryError, match="has no place"):
        made.export(tmp_path / "out", "dtensor")


def tensor_parallel(tmp_path, **more):
    net, shape = CASES["decoder"]
    program = torch.export.export(net, (torch.zeros(shape),))
    return tapestry.compile(program, topology="h100", **more)


@pytest.mark.slow
def test_styles_where_the_best_plan_cuts_the_sequence(tmp_path):
    free = tensor_parallel(tmp_path, devices=2)
    with pytest.raises(TapestryError, match=r"no tp_plan style|nothing for a tp_plan"):
        free.export(tmp_path / "free.json", "tp-plan")
    made = tensor_parallel(tmp_path, devices=2, for_format="tp-plan")
    done = made.export(tmp_path / "plan.json", "tp-plan")
    assert done["bytes"] == done["plan_bytes"] and not done["different"]
    assert json.loads((tmp_path / "plan.json").read_text()) == dict.fromkeys(("down", "o"), "rowwise") | dict.fromkeys(
        ("k", "q", "up", "v"), "colwise"
    )
    assert all(len(set(made.build.program.buffers[b].boxes)) == 1 for b in made.build.program.outputs.values())
    made.save(tmp_path / "build")
    assert tapestry.load(tmp_path / "build").report["for_format"] == "tp-plan"


def test_what_cannot_be_asked_for(tmp_path):
    with pytest.raises(TapestryError, match="one axis"):
        tensor_parallel(tmp_path, mesh={"dp": 2, "tp": 2}, for_format="tp-plan")
    with pytest.raises(TapestryError, match="no plan can be asked for in format 'json'"):
        tensor_parallel(tmp_path, devices=2, for_format="json")
    with pytest.raises(TapestryError, match="does not pay"):
        net = torch.nn.Sequential(torch.nn.Linear(8, 8))
        tapestry.compile(torch.export.export(net, (torch.zeros(4, 8),)), devices=2, topology="h100", for_format="tp-plan")


RANK = """
import json, sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
dist.init_process_group("gloo")
plan = json.loads(open(sys.argv[2]).read())
cut = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(tp_size=2, tp_plan=plan))
x = torch.arange(24).reshape(2, 12)
with torch.no_grad():
    got = cut(x).logits
    if dist.get_rank() == 0:
        assert list(cut.model.layers[0].mlp.gate_proj.weight.to_local().shape) == [2048, 1024]
        torch.testing.assert_close(got, AutoModelForCausalLM.from_pretrained(sys.argv[1])(x).logits, rtol=1e-4, atol=1e-4)
dist.barrier()
"""


@pytest.mark.slow
def test_transformers_5_16_takes_the_plan(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.16")
    pytest.importorskip("accelerate")
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 512,
    }
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "checkpoint")
    x = {"input_ids": torch.zeros(2, 512, dtype=torch.int64)}
    made = tapestry.from_pretrained(tmp_path / "checkpoint", devices=2, topology="h100", example_inputs=x, for_format="tp-plan")
    made.export(tmp_path / "plan.json", "tp-plan")
    (tmp_path / "rank.py").write_text(RANK)
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    asked = [sys.executable, tmp_path / "rank.py", tmp_path / "checkpoint", tmp_path / "plan.json"]
    ranks = [subprocess.Popen(asked, env={**env, "RANK": str(r)}) for r in range(2)]
    assert [r.wait(200) for r in ranks] == [0, 0]
