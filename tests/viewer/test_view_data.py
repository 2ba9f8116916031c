"""What the page and the drawings are made of, held to `explain`, to the program and to isl."""

from __future__ import annotations

import gzip
import json
import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry import draw
from tapestry.ir.program import Reduce, Transfer, transfer_bytes
from tapestry.plan.alternatives import best_alternatives, priced_strategies
from tapestry.plan.requests import parse_pins
from tapestry.plan.topology import from_data
from tapestry.tools.viewer import html_page, program_tables
from tapestry.viz import explain, format
from tests.support.small_models import f32, net
from tests.support.viewer import viewed

EVIL = "</script><img src=x onerror=alert(1)>\"'&"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    at = tmp_path_factory.mktemp("data") / "halo.onnx"
    onnx.save(viewed.halo(), at)
    return tapestry.compile(at, devices=4, topology="cpu", pins=viewed.HALO_PINS)


def data_of(page: str) -> dict:
    packed = re.search(r'id="data">([^<]*)<', page)[1]
    return json.loads(gzip.decompress(b64decode(packed)))


@pytest.fixture(scope="module")
def data(made):
    return data_of(made.view().html)["builds"][0]


def test_the_page_holds_what_explain_says(made, data):
    said = explain.document(made.build, why=True)
    assert data["explain"] == html_page._json_numbers(json.loads(json.dumps(said)))
    assert data["report"] == json.loads(json.dumps(dict(made.report)))
    assert data["certificate"]["laws"] == made.laws and data["certificate"]["refused"] is None


def test_links_add_up_to_what_is_counted(made, data):
    program = made.build.program
    for s in (s for s in program.steps if isinstance(s, Transfer | Reduce)):
        assert sum(program_tables.links(s, program).values()) == pytest.approx(transfer_bytes(s, program), rel=1e-12)
    sent = [
        sum(n for *_, n in data["program"]["links"][s[5]]) for s in data["program"]["steps"] if s[0] in ("transfer", "reduce")
    ]
    assert sum(sent) == pytest.approx(sum(r["bytes"] for r in made.report["transfers"]))


def test_edges_count_every_transfer_once(made, data):
    moved = sum(n for reads in data["edges"] for _, n, *_ in reads)
    assert moved == sum(transfer_bytes(s, made.build.program) for s in made.build.program.steps if isinstance(s, Transfer))


def test_lanes_and_memory_are_the_schedule(made, data):
    timed = explain.schedule(made.build).timed
    for row, t in zip(data["lanes"]["steps"], timed, strict=True):
        for devices, begin, end in zip(data["lanes"]["classes"], row["begin"], row["end"], strict=True):
            for d in devices:
                assert (
                    (begin, end) == (pytest.approx(t.start[d]), pytest.approx(t.end[d]))
                    if begin is not None
                    else np.isnan(t.end[d])
                )
    for devices, alive in zip(data["memory"]["classes"], data["memory"]["alive"], strict=True):
        assert all(alive == explain.alive_bytes(made.build.program, d) for d in devices)


def test_layers_fold_where_they_are_alike(made):
    (fold,) = format.runs(made.build.plan)
    assert (fold.length, fold.times, fold.label) == (2, 7, "layer")
    plan = made.build.plan
    k = fold.first + 2 * fold.length  # the third layer is cut in another way: it is no part of a fold
    other = replace(plan, strategies=tuple(replace(s, dims=(None,)) if i == k else s for i, s in enumerate(plan.strategies)))
    assert all(not f.first <= k < f.first + f.length * f.times for f in format.runs(other))


@pytest.mark.slow
def test_a_fold_reads_alike(tmp_path):
    """Products of the last two results, but for one of the last and the first: it may begin a fold, and repeats nothing."""
    nodes = [helper.make_node("Tanh", ["x0"], ["x1"], name="m0")]
    nodes += [helper.make_node("MatMul", [f"x{k}", f"x{k - 1}"], [f"x{k + 1}"], name=f"m{k}") for k in range(1, 12)]
    nodes[8].input[1] = "x1"
    onnx.save(net(nodes, {"x0": (T.FLOAT, (8, 8))}, {"x12": T.FLOAT}), tmp_path / "m.onnx")
    plan = tapestry.compile(tmp_path / "m.onnx", devices=1, topology="cpu").build.plan
    odd = next(i for i, op in enumerate(plan.graph.ops) if "m8" in op.source)
    found = format.runs(plan)
    assert found and all(not f.first + f.length <= odd < f.first + f.length * f.times for f in found)


def test_alternatives_are_priced_as_explain_prices_them(made, data):
    plan, topology = made.build.plan, from_data(made.build.topology)
    best = best_alternatives(plan, topology)
    for rows, one, op in zip(priced_strategies(plan, topology), best, data["ops"], strict=True):
        assert (rows[:1] == []) == (one is None)
        if one is not None:
            assert (rows[0][0], rows[0][1]) == (one.strategy, pytest.approx(one.seconds))
            assert [t for _, t in rows] == sorted(t for _, t in rows)
        for text in (p for o in op["others"] for p in o["pins"]):
            (i,) = parse_pins([text], plan.graph, plan.mesh)  # a pin of this operation, and of no other
            assert data["ops"][i]["name"] == op["name"]


def test_nothing_of_a_model_is_markup(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", f"w{EVIL}"], ["y"], name=f"n{EVIL}")]
    onnx.save(net(nodes, {"x": (T.FLOAT, (8, 8))}, {"y": T.FLOAT}, {f"w{EVIL}": f32(8, 8)}), tmp_path / f"a{EVIL[10:14]}.onnx")
    page = tapestry.compile(next(tmp_path.glob("*.onnx")), devices=2, topology="cpu").view()
    assert "onerror" not in page.html and "default-src 'none'" in page.html and "'unsafe" not in page.html
    assert "<script" not in page._repr_html_() and 'sandbox="allow-scripts' in page._repr_html_()
    named = set(re.findall(r"https?://([\w.]+)", page.html))
    assert named <= {"www.w3.org", "github.com"}  # the namespace of SVG, and where the library comes from: nothing is loaded


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda m: draw.index_space("conv2", m, device=1), ["h: 32", "reads 2×6×10×32, 15.00 KiB"]),
        (lambda m: draw.graph(m), ["layer ×7", "halo 9.00 KiB"]),
        (lambda m: draw.lanes(m), ["simulated", "devices 0, 3", "memory 53.11 KiB"]),
        (lambda m: draw.tensor(m, "r"), ["halo, 9.00 KiB moved", "4 parts of at most 12.00 KiB"]),
    ],
)
def test_drawings_are_svg_with_the_figures(made, make, says, tmp_path):
    picture = make(made)
    root = ET.fromstring(picture)
    words = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [s for s in says if not any(s in w for w in words)] == []
    assert picture.save(tmp_path / "p.svg").read_text() == picture._repr_svg_()


def test_an_operation_alone_is_drawn_by_its_splits(made):
    plan = made.build.plan.annotated()
    op = plan.ops[plan.find("layers.0.down_proj")]
    picture = draw.index_space(op, plan, device=3)
    assert "reads 12×32, 1.50 KiB" in picture  # a quarter of the rows of the weight
    with pytest.raises(tapestry.errors.TapestryError, match="no operation"):
        draw.index_space("nothing", made)
