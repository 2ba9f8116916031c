"""Plans that the checker refuses, and models whose names are written to do harm."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry.build import store
from tapestry.build.atomic import write_text
from tapestry.errors import TapestryError
from tapestry.ir.program import Launch
from tapestry.tools.viewer import build_data, saved
from tests.support.small_models import f32, net
from tests.support.viewer import chromium, viewed

SIZES = ((1280, 860), (390, 844))
needs_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium: apt-get install chromium")
EVIL = "</script><script>window.harm=1</script><img src=x onerror=window.harm=2>'\""


@needs_browser
@pytest.mark.parametrize("size", SIZES, ids=lambda size: size[0])
def test_a_refused_plan_opens_at_its_witness(size, tmp_path):
    onnx.save(viewed.halo(), tmp_path / "m.onnx")
    made = tapestry.compile(tmp_path / "m.onnx", devices=4, topology="cpu", pins=viewed.HALO_PINS)
    at = made.build.plan.graph.find("conv2")
    steps = list(made.build.program.steps)
    k = next(k for k, s in enumerate(steps) if isinstance(s, Launch) and s.op == at)
    launch = steps[k]
    block = list(launch.blocks[1])
    block[2] = (8, 17)  # a row more than device 1 was given the halo for
    steps[k] = replace(launch, blocks=(launch.blocks[0], tuple(block), *launch.blocks[2:]))
    broken = replace(made.build, program=replace(made.build.program, steps=tuple(steps)))
    refused = build_data.refusal(broken)
    assert refused is not None
    assert (refused["law"], refused["op"], refused["step"], refused["device"]) == ("access_preserved", at, k, 1)
    assert refused["tensor"] == "r" and refused["cell"][2] == 17
    write_text(tmp_path / "p.html", saved.of_sources([build_data.Source(build=broken, name="broken", laws=made.laws)]))
    with chromium.browser() as tab:
        tab.size = size
        tab.open(tmp_path / "p.html")
        assert refused["what"] in tab.text(".refused") and refused["why"] in tab.text(".refused")
        cell = "[" + ", ".join(f"{v}:{v + 1}" for v in refused["cell"]) + "]"
        assert f"cell {cell}" in tab.text(".refused button")
        tab.click(".refused button")
        assert tab.text("h2") == "conv2"
        assert tab.errors == []


@needs_browser
@pytest.mark.parametrize("size", SIZES, ids=lambda size: size[0])
def test_names_are_only_ever_text(size, tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", f"w{EVIL}"], [f"h{EVIL}"], name=f"n{EVIL}"),
        helper.make_node("Relu", [f"h{EVIL}"], ["y"]),
    ]
    onnx.save(net(nodes, {"x": (T.FLOAT, (8, 8))}, {"y": T.FLOAT}, {f"w{EVIL}": f32(8, 8)}), tmp_path / "m.onnx")
    page = tapestry.compile(tmp_path / "m.onnx", devices=2, topology="cpu").view()
    assert EVIL not in page.html and "window.harm" not in page.html
    page.save(tmp_path / "p.html")
    with chromium.browser() as tab:
        tab.size = size
        tab.open(tmp_path / "p.html")
        for name in ("space", "tensors", "choices", "kernel", "rewrites", "certificate"):
            tab.click(f"[data-tab={name}]")
        assert EVIL in tab.text("h2") or EVIL in tab.js("document.body.textContent")
        assert tab.js("window.harm ?? null") is None
        assert tab.count("img") == 0 and tab.errors == []


def test_a_page_of_a_build_that_is_none_is_refused(tmp_path):
    with pytest.raises(TapestryError, match="not a build directory"):
        saved.page([tmp_path])


def test_a_trace_of_another_plan_is_refused(tmp_path):
    onnx.save(viewed.causal(), tmp_path / "m.onnx")
    tapestry.compile(tmp_path / "m.onnx", devices=2, topology="cpu").save(tmp_path / "b")
    build = store.read(tmp_path / "b")[0]
    for text, says in (
        ("{}", "not the trace"),
        ('{"otherData": {"steps": [{"step": 1}]}}', "not the trace"),
        ("[", "not the trace"),
    ):
        (tmp_path / "t").write_text(text)
        with pytest.raises(TapestryError, match=says):
            saved.measured(tmp_path / "t", build)
    (tmp_path / "t").write_text(
        '{"otherData": {"steps": [{"step": 999, "what": "", "estimated_s": 1, "measured_s": 1, "waited_s": 0}]}}'
    )
    with pytest.raises(TapestryError, match="another plan"):
        saved.measured(tmp_path / "t", build)
