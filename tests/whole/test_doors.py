"""Every form in which a model can be given makes a plan that computes what the model computes."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from dataclasses import fields
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from torch import nn

import tapestry
from tapestry.cli.entry import command_parser
from tapestry.errors import BuildError, ModelError, TapestryError
from tapestry.frontends.choices import Choices, Opened, opened_source, options
from tapestry.options import DECLARED, FLAGS, Options, many
from tests.support.command_line import document, run
from tests.support.small_models import save


class Block(nn.Module):
    """A block of a transformer, with tied weights, a buffer and dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 2, dropout=0.3, batch_first=True)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((width,), 1.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        y = self.norm(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))


NETS = {
    "linear": (lambda: nn.Linear(5, 3), lambda: torch.randn(2, 5)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4)), lambda: torch.randn(3, 6)),
    "block": (Block, lambda: torch.randint(0, 11, (2, 5))),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)),
        lambda: torch.randn(2, 3, 8, 8),
    ),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish(), nn.AdaptiveAvgPool2d(1)), lambda: torch.randn(1, 8, 6, 6)),
    "group norm": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.GroupNorm(2, 6), nn.ELU()), lambda: torch.randn(2, 4, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), lambda: torch.randn(1, 3, 4, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1), lambda: torch.randn(2, 6, 8)),
    "decoder-only": (lambda: nn.Sequential(nn.Embedding(9, 8), nn.RMSNorm(8), nn.Linear(8, 9)), lambda: torch.randint(0, 9, (2, 4))),
    "lstm": (lambda: Last(nn.LSTM(4, 6, batch_first=True)), lambda: torch.randn(2, 3, 4)),
    "bilinear": (lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Softmax(-1)), lambda: torch.randn(1, 2, 3, 3)),
    "pooled": (lambda: nn.Sequential(nn.AvgPool2d(2), nn.Sigmoid(), nn.Flatten(), nn.LogSoftmax(-1)), lambda: torch.randn(2, 2, 4, 4)),
}  # fmt: skip


class Last(nn.Module):
    """The output of a recurrent layer, without its state."""

    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.filterwarnings("ignore:.* is in training mode")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NETS)
def test_a_module_becomes_a_plan_that_runs(name: str) -> None:
    torch.manual_seed(0)
    make, draw = NETS[name]
    module, x = make(), draw()
    build = tapestry.compile(module, example_inputs=(x,), devices=2, topology="cpu")
    (out,) = build.run({build.build.plan.graph.inputs[0]: x}).values()
    assert module.training, "the module stays in its own mode"
    np.testing.assert_allclose(out, module.eval()(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_parameters_keep_their_names_and_are_written_once() -> None:
    module, x = Block().eval(), torch.randint(0, 11, (2, 5))
    given = opened_source(module, (x,))
    stored = {t.name: t for t in onnx.load(given.path, load_external_data=False).graph.initializer}
    tied = {"embed.weight", "head.weight"}
    assert {n for n, _ in module.named_parameters()} - tied <= set(stored)
    assert len(tied & set(stored)) == 1, "tied weights are one"
    given = opened_source(nn.Linear(64, 64), (torch.randn(1, 64),))
    assert [p.stat().st_size for p in given.path.parent.glob("*.bin")] == [64 * 64 * 4]


def test_every_form_of_a_model_gives_the_same_plan() -> None:
    path = save("mlp")
    forms = [path, str(path), path.read_bytes(), onnx.load(path), onnx_ir.load(path)]
    builds = [tapestry.compile(f, devices=2, topology="cpu") for f in forms]
    feeds = builds[0].random_feeds()
    first = builds[0].run(feeds)
    for build in builds[1:]:
        assert [s.dims for s in build.build.plan.strategies] == [s.dims for s in builds[0].build.plan.strategies]
        for name, out in build.run(feeds).items():
            np.testing.assert_array_equal(out, first[name])


def test_an_exported_program_is_a_model() -> None:
    module, x = nn.Linear(4, 3), torch.randn(2, 4)
    program = torch.export.export(module, (x,))
    (out,) = tapestry.compile(program, topology="cpu").run({"input": x}).values()
    np.testing.assert_allclose(out, module(x).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_module_on_the_meta_device_is_planned_without_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    build = tapestry.compile(module, example_inputs=(torch.zeros(8, 1024),), devices=2, topology="h100")
    build.save(tmp_path / "b")
    assert sum(p.stat().st_size for p in (tmp_path / "b").rglob("*") if p.is_file()) < 1 << 20
    assert "0.weight" in build.build.plan.graph.weights
    assert run("verify", tmp_path / "b")[0] == 0
    with pytest.raises(BuildError, match=r"without its weights [^$]*not on the meta device"):
        tapestry.load(tmp_path / "b").run(build.random_feeds())


def test_a_saved_plan_of_a_module_needs_no_other_place(tmp_path: Path) -> None:
    module, x = nn.Linear(64, 48), torch.randn(2, 64)
    build = tapestry.compile(module, example_inputs=(x,), topology="cpu")
    build.save(tmp_path / "b")
    del build
    gc.collect()
    shutil.move(tmp_path / "b", tmp_path / "elsewhere")
    (out,) = tapestry.load(tmp_path / "elsewhere").run({"input": x}).values()
    np.testing.assert_allclose(out, module(x).detach().numpy(), rtol=1e-5, atol=1e-5)
    assert document("verify", tmp_path / "elsewhere")["evidence"][0]["kind"] != "none"


def test_a_bundle_with_a_changed_weight_is_refused(tmp_path: Path) -> None:
    module, x = nn.Linear(64, 48), torch.randn(2, 64)
    tapestry.compile(module, example_inputs=(x,), topology="cpu").save(tmp_path / "b")
    (data,) = (tmp_path / "b" / "model").glob("*.bin")
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(BuildError, match="has changed"):
        tapestry.load(tmp_path / "b").run({"input": x})


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (3, {}, "a int is no model"),
        (nn.Linear(2, 2), {}, "needs example inputs"),
        ("x.onnx", {"example_inputs": (1,)}, "are of a torch module"),
        ("none.tap", {}, "cannot read the model"),
        (nn.Linear(2, 2), {"example_inputs": (torch.ones(1, 3),)}, "cannot export"),
    ],
)
def test_what_is_no_model_is_said(given: object, options: dict, message: str) -> None:
    with pytest.raises(TapestryError, match=message):
        tapestry.compile(given, **options)


def test_keywords_are_the_options_that_are_declared() -> None:
    """Names, and types: a keyword takes what the pipeline's option is (of several, one as well), and every flag has a keyword."""
    own = {"example_inputs", "dynamic_shapes", "progress"}
    assert set(Choices.__annotations__) - own == {*FLAGS, "interrupt", "found"}
    for name in set(FLAGS) - {"devices"}:
        said, declared = str(Choices.__annotations__[name]), str(DECLARED[name].type)
        assert many(DECLARED[name]) == ("Sequence" in said and name != "mesh"), name
        wanted = declared.removeprefix("Sequence[").removesuffix("]").removesuffix(" | None").replace("Mesh", "MeshLike")
        assert name == "shapes" or wanted in said, name
        for bad in (2.5j, object()):
            with pytest.raises(TapestryError, match=f"tapestry.compile, {name}: ") as e:
                tapestry.compile("x.onnx", **{name: bad})
            assert e.value.hint, name


def test_what_a_command_asks_for_is_what_python_does() -> None:
    """Without any flag the options are the defaults of the table; with each flag they are what the keyword makes of the same."""
    flags = "--devices 2 --topology cpu --memory 1GiB --pareto --no-weights"
    flags += " --ignore-sharding --rules r --ops o --resume b --stage-at n --seed 3 --time-limit 1.5 --for jax"
    keywords = {
        "devices": 2, "topology": "cpu", "memory": "1GiB",
        "pareto": True, "weights": False, "sharding": False, "rules": "r", "ops": "o", "resume": "b",
        "stage_at": "n", "seed": 3, "time_limit": 1.5, "for_format": "jax",
    }  # fmt: skip

    def shown(of: Options) -> dict:
        facts = {f.name: getattr(of, f.name) for f in fields(of) if f.name not in ("interrupt", "began")}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in facts.items()}

    for words, same in (("", {}), (flags, keywords)):
        args = command_parser().parse_args(["compile", "m.onnx", "-o", "b", *words.split()])
        asked = options(Opened(Path("m.onnx")), {n: getattr(args, n) for n in FLAGS if n != "shapes"})
        assert shown(asked) == shown(options(Opened(Path("m.onnx")), same))
        assert words or shown(asked) == shown(Options(model=Path("m.onnx")))


@pytest.mark.parametrize("name", ["stage_at", "stages", "accumulate", "pareto"])
def test_keywords_of_another_kind_are_refused(name: str) -> None:
    for value in (2.5, [2.5]):
        with pytest.raises(TapestryError, match=f"tapestry.compile, {name}: .* is a (float|list)"):
            tapestry.compile("x.onnx", **{name: value})


def test_none_is_as_if_it_were_left_out(tmp_path: Path) -> None:
    (tmp_path / "m.tap").write_text(TEXT)
    nothing = dict.fromkeys(("stages", "stage_at", "pins", "sharding", "weights", "pareto"))
    plans = [tapestry.compile(tmp_path / "m.tap", topology="cpu", devices=2, **o) for o in ({}, nothing)]
    assert plans[0].report["plan_sha256"] == plans[1].report["plan_sha256"]


TEXT = """graph mlp
input x: f32[8, 12]
input w: f32[12, 6]
h: f32[8, 6] = op [i: 8, n: 6 | m: 12 sum]
  reads x[i, m], w[m, n]
  body x * w
y: f32[8, 6] = op [i: 8, n: 6]
  reads h[i, n]
  body max(h, 0.0)
output y
"""


def test_ir_text_is_compiled_run_and_checked(tmp_path: Path) -> None:
    (tmp_path / "net.tap").write_text(TEXT)
    document("compile", tmp_path / "net.tap", "-o", tmp_path / "b", "--devices", "2", "--pin", "y:i=2@d0")
    ran = document("run", tmp_path / "b", "--check")
    assert ran["reference"] == "tapestry.verify.interp"
    assert ran["passed"] and ran["outputs"]["y"]["rel_err"] < 1e-6
    assert document("verify", tmp_path / "b")["passed"]
    (tmp_path / "net.tap").write_text(TEXT.replace("max(h, 0.0)", "h"))
    assert run("verify", tmp_path / "b")[0] == 1, "another text is another model"


def test_text_that_is_no_graph_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "net.tap").write_text(TEXT.replace("w[m, n]", "w[m, q]"))
    status, _, err = run("compile", tmp_path / "net.tap", "-o", tmp_path / "b")
    assert status == 2 and "net.tap" in err


def test_torch_compile_runs_plans() -> None:
    from tapestry.torch_backend import backend

    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    fast = torch.compile(module, backend=backend, options={"devices": 2}, dynamic=False)
    with torch.no_grad():
        for rows in (3, 5):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(fast(x), module(x), rtol=1e-5, atol=1e-5)
        module[0].weight.mul_(2)
        torch.testing.assert_close(fast(x), module(x), rtol=1e-5, atol=1e-5)
        old = weakref.ref(module[0].weight)
        module[0].weight = nn.Parameter(torch.ones(8, 6))
        gc.collect()
        assert old() is not None, "plans are known by the identity of parameters: no new one may get an old one's"
        torch.testing.assert_close(fast(x), module(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(TapestryError, match="inference"):
        fast(x)


def test_the_backend_is_registered_under_its_name() -> None:
    import tomllib

    entry = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]["tapestry"]
    module, _, name = entry.partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
CHECKPOINTS = {
    "LlamaForCausalLM": {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "MistralForCausalLM": {**SMALL, "num_key_value_heads": 2},
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 50},
    "GPTNeoXForCausalLM": SMALL,
    "BertModel": SMALL,
    "ViTModel": {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 32, "patch_size": 8},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_read_where_it_lies(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**CHECKPOINTS[name])).eval()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    before = sum(p.stat().st_size for p in tmp_path.iterdir())
    build = tapestry.from_pretrained(tmp_path, sequence=5, devices=2, topology="cpu")
    main = model.main_input_name
    x = torch.randn(1, 3, 32, 32) if main == "pixel_values" else torch.randint(0, 50, (1, 5))
    out = next(iter(build.run({main: x}).values()))
    np.testing.assert_allclose(out, model(**{main: x})[0].detach().numpy(), rtol=1e-4, atol=1e-5)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < before + 400_000, "no weight is copied"
    files = {w.file for w in build.build.plan.graph.weights.values()}
    assert {p.name for p in tmp_path.glob("*.safetensors")} <= files and not any(f.endswith(".bin") for f in files)
    config = json.loads((tmp_path / "config.json").read_text())
    width = next(k for k in ("hidden_size", "n_embd") if k in config)
    (tmp_path / "config.json").write_text(json.dumps({**config, width: 32, "head_dim": 16}))
    with pytest.raises(ModelError, match="not what the module says"):
        tapestry.from_pretrained(tmp_path, sequence=5)


EXPERTS = {**SMALL, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {
    "MixtralForCausalLM": {**EXPERTS, "num_local_experts": 4},
    "OlmoeForCausalLM": {**EXPERTS, "pad_token_id": 0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ROUTED)
def test_experts_come_through_both_doors_as_transformers_has_them(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The checkpoint has a tensor for each expert, the module one for all; the module loops over what the data select."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**ROUTED[name])).eval()
    ids = torch.randint(0, 50, (2, 5))
    want = model(input_ids=ids)[0].detach().numpy()
    model = model.to(dtype)
    settings = model.config.to_dict()
    by_module = tapestry.compile(model, {"input_ids": ids}, devices=2, topology="cpu")
    assert model.config.to_dict() == settings, "its settings are as they were"
    model.save_pretrained(tmp_path)
    by_folder = tapestry.from_pretrained(tmp_path, batch=2, sequence=5, devices=2, topology="cpu")
    for plan in (by_module, by_folder):
        got = np.asarray(next(iter(plan.run({"input_ids": ids}).values())), np.float32)
        assert np.linalg.norm(got - want) <= (1e-4 if dtype == torch.float32 else 3e-2) * np.linalg.norm(want)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2)).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="not in the safetensors files"):
        tapestry.from_pretrained(tmp_path, sequence=5)


def test_what_torch_cannot_export_is_said_in_a_line() -> None:
    @torch.library.custom_op("tapestry_tests::odd", mutates_args=())
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    odd.register_fake(lambda x: torch.empty_like(x))

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return odd(x)

    with pytest.raises(ModelError, match=r"No ONNX function found for .*tapestry_tests.odd") as caught:
        tapestry.compile(Odd(), (torch.zeros(2),))
    assert "\x1b" not in str(caught.value)


@pytest.mark.slow
def test_a_view_behind_attention_exports() -> None:
    """torch's own exporter refuses it: attention's decomposition leaves other strides."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.view(2, 6, 2, 4).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 6, 8)

    x = torch.randn(2, 6, 8)
    out = tapestry.compile(Attention(), (x,)).run({"x": x})
    np.testing.assert_allclose(next(iter(out.values())), Attention()(x).numpy(), rtol=1e-4, atol=1e-5)


def test_inputs_without_names_are_refused() -> None:
    plan = tapestry.compile(nn.Linear(5, 3), example_inputs=torch.zeros(2, 5))
    with pytest.raises(TapestryError, match=r"by name, not as a Tensor\n.*try: run\(\{'input'"):
        plan.run(torch.zeros(2, 5))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="inputs are those of the module's forward"):
        tapestry.compile(nn.Linear(5, 3), example_inputs=torch.zeros(2, 4))


@pytest.mark.slow
def test_example_inputs_need_no_name() -> None:
    net, x = nn.Linear(5, 3), torch.zeros(2, 5)
    hashes = [c.report["plan_sha256"] for c in (tapestry.compile(net, (x,)), tapestry.compile(net, example_inputs=(x,)))]
    assert hashes[0] == hashes[1]
    with pytest.raises(TapestryError, match="2 arguments without a name"):
        tapestry.compile(net, x, x)
    with pytest.raises(TapestryError, match="given twice"):
        tapestry.compile(net, (x,), example_inputs=(x,))
    with pytest.raises(TapestryError, match="of a torch module"):
        tapestry.compile("x.onnx", "2x4")
