"""``tapestry compare``: our plan beside somebody else's, and what that one should change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from bench.doors.onnx_folders import FAST
from tests.support.command_line import document, run
from tests.support.programs.decoder_net import decoder
from tests.support.small_models import N, f32, net

LAYER = "model.layers.*."
STYLES = {f"{LAYER}self_attn.{n}_proj": "colwise" for n in "qkv"} | {f"{LAYER}self_attn.o_proj": "rowwise"}
STYLES |= {f"{LAYER}mlp.up_proj": "colwise", f"{LAYER}mlp.down_proj": "rowwise"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder, a machine with fast links, and plans."""
    at = tmp_path_factory.mktemp("compare")
    onnx.save(onnx.shape_inference.infer_shapes(decoder()), at / "m.onnx")
    (at / "fast.json").write_text(json.dumps(FAST))
    (at / "tp.json").write_text(json.dumps(STYLES))
    (at / "late.json").write_text(json.dumps({**STYLES, "lm_head": "colwise"}))
    (at / "odd.json").write_text(json.dumps({**STYLES, f"{LAYER}mlp.down_proj": "colwise"}))
    (at / "pins.txt").write_text("# all by hand\nlayers.*.mlp.up_proj:in=tp\nlm_head:replicated\n")
    (at / "placed.json").write_text(json.dumps({"m.model.embed_tokens.weight": ["Shard(1)"]}))
    return at


def compared(folder: Path, what: object, *more: object) -> dict:
    """The document."""
    at = ("--mesh", "tp=2", "--topology", folder / "fast.json")
    return document("compare", folder / "m.onnx", "--with", what, *(more or at))


@pytest.mark.parametrize("what", ["megatron", "sequence", "tp.json", "pins.txt", "placed.json"])
def test_what_people_would_do_is_no_faster_and_its_changes_keep_their_promise(folder: Path, what: str):
    found = compared(folder, folder / what if "." in what else what)
    assert found["ours"]["objective_s"] <= found["theirs"]["objective_s"] * (1 + 1e-9)
    assert found["pins"] or found["layouts"]
    at = {"mesh": {"tp": 2}, "topology": str(folder / "fast.json"), "layouts": found["layouts"]}
    for row in found["changes"]:
        pins = [p for p in found["pins"] if p != row["instead_of"]] + row["pins"]
        changed = tapestry.compile(folder / "m.onnx", pins=pins, **at).report["objective_s"]
        assert found["theirs"]["objective_s"] - changed == pytest.approx(row["gain_s"], rel=0.1)


def test_megatron_is_the_plan_that_its_styles_say(folder: Path):
    by_idea, by_file = (compared(folder, w) for w in ("megatron", folder / "tp.json"))
    assert by_idea["theirs"] == by_file["theirs"]
    assert by_file["notes"] == ["proved: it computes the model"]


def folded(shared: bool) -> onnx.ModelProto:
    """A model as torch's exporter writes it: weights have lost their names, nodes say their modules."""
    rng, names = np.random.default_rng(0), ("up", "down")
    weights = {"val_0": rng.normal(size=(16, 32)), "val_1": rng.normal(size=(32, 16)), "val_2": rng.normal(size=16)}
    nodes = [N("MatMul", ["x", "val_0"], ["h"], "a"), N("Relu", ["h"], ["r"], "r"), N("MatMul", ["r", "val_1"], ["s"], "b")]
    nodes += [N("Add", ["s", "val_2"], ["t"], "c"), N("Add", ["t", "val_2"] if shared else ["t", "x"], ["y"], "d")]
    for node, module in zip(nodes, (names[0], names[0], names[1], names[1], "norm"), strict=True):
        at = node.metadata_props.add()
        at.key, at.value = "pkg.torch.onnx.name_scopes", str(["", "net.0", f"net.0.{module}", "linear"])
    model = net(nodes, {"x": (T.FLOAT, [6, 16])}, {"y": T.FLOAT}, {k: w.astype(np.float32) for k, w in weights.items()})
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize(
    ("styles", "shared", "status", "what"),
    [
        ({"net.*.up": "colwise", "net.*.down": "rowwise"}, False, 0, "proved: it computes the model"),
        ({"net.*.up": "colwise", "net.*.down": "colwise"}, False, 2, "cannot run it on its parts"),
        ({"net.*.up": "colwise", "net.*.down": "rowwise"}, True, 0, "modules of several styles share a parameter"),
    ],
)
def test_modules_are_known_by_their_nodes(styles: dict, shared: bool, status: int, what: str, folder: Path, tmp_path: Path):
    onnx.save(folded(shared), tmp_path / "m.onnx")
    (tmp_path / "tp.json").write_text(json.dumps(styles))
    at = ("--mesh", "tp=2", "--topology", folder / "fast.json")
    found = run("compare", tmp_path / "m.onnx", "--with", tmp_path / "tp.json", *at)
    assert found[0] == status and what in found[1 if status == 0 else 2]


def test_biases_and_residuals_leave_pairs(tmp_path: Path):
    nodes = [N("MatMul", ["x", "w"], ["a"], "up"), N("Add", ["a", "b"], ["h"], "bias"), N("Relu", ["h"], ["r"], "r")]
    nodes += [N("MatMul", ["r", "v"], ["d"], "down"), N("Add", ["d", "x"], ["y"], "add")]
    weights = {"w": f32(16, 32), "b": f32(32), "v": f32(32, 16)}
    onnx.save(net(nodes, {"x": (T.FLOAT, [6, 16])}, {"y": T.FLOAT}, weights), tmp_path / "m.onnx")
    found = document("compare", tmp_path / "m.onnx", "--with", "megatron", "--mesh", "tp=2", "--topology", "cpu")
    assert {p.partition(":")[2] for p in found["pins"]} == {"n=tp", "m=tp"}


@pytest.mark.parametrize(("what", "cell"), [("late.json", "y[0, 0, 0] is"), ("odd.json", "cannot run it on its parts")])
def test_a_plan_that_computes_something_else_is_refused(folder: Path, what: str, cell: str):
    status, _, said = run("compare", folder / "m.onnx", "--with", folder / what, "--mesh", "tp=2", "--topology", "h100")
    assert status == 2 and cell in said


def test_annotations_and_what_is_nothing(folder: Path):
    same = compared(folder, folder / "m.onnx")
    assert same["diff"]["same"] and not same["changes"]
    for what, said in (("alpa", "one of megatron"), ("fsdp", "no input has 2 cells along axis 0")):
        status, _, text = run("compare", folder / "m.onnx", "--with", what, "--mesh", "tp=2")
        assert status == 2 and said in text


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"a": ["Shard"]}', b'{"a": ["Shard(0)", "Shard(1)"]}', b"[", b"{}"])
def test_a_file_that_is_no_plan_is_refused(content: bytes, folder: Path, tmp_path: Path):
    (tmp_path / "plan.json").write_bytes(content)
    status, _, said = run("compare", folder / "m.onnx", "--with", tmp_path / "plan.json", "--mesh", "tp=2")
    assert status == 2 and said.startswith("tapestry compare:") and "Traceback" not in said
