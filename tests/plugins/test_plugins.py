"""Plug-ins of other packages: each example of examples/plugins does its work, and what is missing or broken is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from onnx import parser, save

import tapestry
from tapestry.build import store
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import LawError, ModelError, PluginError, TapestryError
from tapestry.plugins import entry_points
from tapestry.tools.kernel_proofs.build_kernels import prove_kernels
from tapestry.verify import certificate
from tests.support.command_line import document, run
from tests.support.plugins.plugin_packages import EXAMPLES, Installer

PRODUCTS = """<ir_version: 9, opset_import: ["" : 17]>
g (float[64, 32] x, float[32, 48] w, float[48, 16] v) => (float[64, 16] y) { h = MatMul(x, w)  e = Exp(h)  y = MatMul(e, v) }"""
SWISH = """<ir_version: 9, opset_import: ["" : 17, "com.example" : 1]>
g (float[6, 8] x, float[8] s) => (float[6, 8] y) {
  [first] h = com.example.RMSNorm <epsilon = 0.01> (x, s)  [second] y = com.example.Swish <beta = 1.5> (h) }"""
ROWS = """graph g
input x: f64[8, 20]
y: f64[8] = op [i: 8 | k: 20 maxcount]
  reads x[i, k]
  body x, f64(1.0)
  then acc1
output y
"""


def model(folder: Path, text: str) -> Path:
    """A model file of a text."""
    path = folder / ("g.tap" if text.startswith("graph") else "m.onnx")
    if path.suffix == ".tap":
        path.write_text(text)
    else:
        save(parser.parse_model(text), path)
    return path


def parts(rows: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    return [(r["kind"], r["name"], r["package"]) for r in rows]


def said(evidence) -> str:
    return " ".join(f"{r['plugin']['package']} {r['plugin']['version']}" for r in evidence if r["kind"] == "plug-in")


# each kind


@pytest.mark.slow
def test_a_target(tmp_path: Path, installer: Installer) -> None:
    installer.example("numpy_target")
    import numpy_target

    calls: list[tuple[int, ...]] = []
    plain = numpy_target.np.matmul
    installer.monkeypatch.setattr(numpy_target.np, "matmul", lambda a, b: calls.append(a.shape) or plain(a, b))
    path = model(tmp_path, PRODUCTS)
    want = tapestry.compile(path, devices=2)
    plan = tapestry.compile(path, devices=2, target="numpy")
    feeds = want.random_feeds()
    np.testing.assert_allclose(plan.run(feeds)["y"], want.run(feeds)["y"], rtol=1e-4)
    assert len(calls) == 2, "a launch of the first product on each device"
    assert parts(plan.report["plugins"]) == [("targets", "numpy", "tapestry-numpy-target")]
    plan.save(tmp_path / "build")
    _, _, evidence = verify_build(tmp_path / "build")
    assert "tapestry-numpy-target 1.0" in said(evidence)
    (row,) = [r for r in prove_kernels(tmp_path / "build") if r["form"] == "plug-in"]
    assert row["value"] == "compared only" and "tapestry-numpy-target" in row["why"]


def test_a_monoid(tmp_path: Path, installer: Installer) -> None:
    installer.example("maxcount_monoid")
    plan = tapestry.compile(model(tmp_path, ROWS), devices=4, pins="y:k=4@d0")
    x = np.random.default_rng(0).integers(0, 4, (8, 20)).astype(float)
    assert plan.run({"x": x})["y"].tolist() == (x == x.max(axis=1, keepdims=True)).sum(axis=1).tolist()
    assert plan.laws["monoid"] > 1000
    assert parts(plan.report["plugins"]) == [("monoids", "maxcount", "tapestry-maxcount")]
    plan.save(tmp_path / "build")
    build, laws, evidence = verify_build(tmp_path / "build")
    assert laws["monoid"] == plan.laws["monoid"] and "tapestry-maxcount 1.0" in said(evidence)
    assert "monoid" not in certificate.check(build.plan.annotated(), build.program) or laws["monoid"]


WRONG = """
from tapestry.ir.expr import call
from tapestry.ir.monoid import Monoid, number
ODD = Monoid(name="odd", fields=("v",), zero=lambda d: (number(0, d[0]),), combine=lambda a, b: ({},), commutative={})
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("merge", "commutes", "law"),
    [
        ('call("sub", a[0], b[0])', False, "(xy)z = x(yz)"),
        ('call("mul", a[0], b[0])', True, "x1 = x"),
        ('call("where", call("eq", b[0], number(0, b[0].dtype)), a[0], b[0])', True, "xy = yx"),  # the last one that is not 0
    ],
)
def test_a_monoid_that_is_none(tmp_path: Path, installer: Installer, merge: str, commutes: bool, law: str) -> None:
    installer.module("odd_monoid", WRONG.format(merge, commutes), {"tapestry.monoids": {"odd": "odd_monoid:ODD"}})
    text = ROWS.replace("maxcount", "odd").replace(", f64(1.0)", "").replace("  then acc1\n", "")
    with pytest.raises(LawError, match="monoid") as e:
        tapestry.compile(model(tmp_path, text), devices=2)
    assert law in e.value.what


def test_the_last_of_all_is_a_monoid_in_order(tmp_path: Path, installer: Installer) -> None:
    merge = 'call("where", call("eq", b[0], number(0, b[0].dtype)), a[0], b[0])'
    installer.module("odd_monoid", WRONG.format(merge, False), {"tapestry.monoids": {"odd": "odd_monoid:ODD"}})
    text = ROWS.replace("maxcount", "odd").replace(", f64(1.0)", "").replace("  then acc1\n", "")
    plan = tapestry.compile(model(tmp_path, text), devices=4, pins="y:k=4@d0")
    x = np.random.default_rng(1).integers(0, 3, (8, 20)).astype(float)
    want = [next((v for v in row[::-1] if v), 0.0) for row in x.tolist()]
    assert plan.run({"x": x})["y"].tolist() == want


def test_a_topology(tmp_path: Path, installer: Installer) -> None:
    installer.example("two_racks_topology")
    plan = tapestry.compile(model(tmp_path, PRODUCTS), topology="two-racks")
    assert [(a.name, a.size) for a in plan.build.plan.mesh] == [("rack", 2), ("device", 4)]
    assert plan.report["topology"]["name"] == "two-racks" and parts(plan.report["plugins"])[0][0] == "topologies"
    plan.save(tmp_path / "build")
    installer.monkeypatch.setenv("TAPESTRY_PLUGINS", "0")
    verify_build(tmp_path / "build")  # its figures are in the build
    with pytest.raises(TapestryError, match="not a topology"):
        tapestry.compile(model(tmp_path, PRODUCTS), topology="two-racks")


def test_operators(tmp_path: Path, installer: Installer) -> None:
    path = model(tmp_path, SWISH)
    with pytest.raises(ModelError, match="unknown operator domain"):
        tapestry.compile(path, devices=2)
    installer.example("swish_operator")
    x, s = (np.random.default_rng(k).standard_normal(n).astype(np.float32) for k, n in enumerate([(6, 8), 8]))
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.01) * s
    plan = tapestry.compile(path, devices=2)
    np.testing.assert_allclose(plan.run({"x": x, "s": s})["y"], h / (1 + np.exp(-1.5 * h)), rtol=1e-5, atol=1e-6)
    assert plan.report["ops"] < 5, "written out and fused like any function"
    assert [n for _, n, _ in parts(plan.report["plugins"])] == ["com.example.RMSNorm", "com.example.Swish"]
    assert {op.source[-1] for op in plan.build.plan.graph.ops} <= {"first", "second"}
    plan.save(tmp_path / "build")
    _, laws, evidence = verify_build(tmp_path / "build")
    assert laws["model"] > 0 and evidence[0]["kind"] == "sampled cells" and "tapestry-swish 1.0" in said(evidence)
    np.save(tmp_path / "x.npy", x)
    done = document("run", tmp_path / "build", "--check", "--input", f"x={tmp_path / 'x.npy'}")
    assert done["passed"] and done["reference"] == "onnxruntime"
    seen = document("doctor", path)
    assert len(seen["plugins"]) == 2 and not seen["unsupported"]


def test_a_definition_that_fails_is_its_packages_fault(tmp_path: Path, installer: Installer) -> None:
    source = "def swish(b): return b('Mul', b.ins[0], b.nothing)\ndef rms_norm(b): return 3\n"
    of = {"com.example.Swish": "odd_ops:swish", "com.example.RMSNorm": "odd_ops:rms_norm"}
    installer.module("odd_ops", source, {"tapestry.operators": of})
    with pytest.raises(PluginError, match=r"odd_ops 0\.1"):
        tapestry.compile(model(tmp_path, SWISH), devices=2)


def test_rules(tmp_path: Path, installer: Installer) -> None:
    from tapestry.rewrites import RULES
    from tapestry.rewrites.equations import rule_texts

    installer.monkeypatch.setattr(rule_texts, "_BROUGHT", {})
    installer.example("factor_rules")
    graph = tmp_path / "g.tap"
    graph.write_text(
        "graph g\ninput x: f32[4, 6]\ninput c: f32[4]\ny: f32[4] = op [i: 4 | k: 6 sum]\n  reads x[i, k], c[i]\n"
        "  body x * c\noutput y\n"
    )
    try:
        done = document("opt", graph, "--rules", "factor", "-r", "shared_factor@y")
        assert done["graph"].count(" = op ") == 2
        plan = tapestry.compile(graph, devices=2, rules="factor")
        assert parts(plan.report["plugins"]) == [("rules", "factor", "tapestry-factor-rules")]
    finally:
        RULES.pop("shared_factor", None)


# what is missing or broken


def test_a_build_says_what_it_needs(tmp_path: Path, installer: Installer, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("numpy_target", "swish_operator"):
        installer.example(name)
    tapestry.compile(model(tmp_path, SWISH), devices=2, target="numpy").save(tmp_path / "build")
    status, _, err = run("run", tmp_path / "build")
    assert status == 0, err
    installer.monkeypatch.setenv("TAPESTRY_PLUGINS", "0")
    for command in ("run", "verify", "explain"):
        status, out, _ = run(command, tmp_path / "build", "--json")
        found = json.loads(out)
        assert status == 2 and found["kind"] == "PluginError" and "TAPESTRY_PLUGINS=0" in found["why"], command
        assert "'numpy' (tapestry.targets) of tapestry-numpy-target 1.0" in found["what"]
    installer.monkeypatch.delenv("TAPESTRY_PLUGINS")
    installer.monkeypatch.syspath_prepend(tmp_path)
    info = next((tmp_path / "packages" / "site").glob("tapestry_numpy*"))
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("1.0", "1.1"))
    entry_points._scanned.cache_clear()
    with caplog.at_level(logging.WARNING):
        store.read(tmp_path / "build")
    assert "made with tapestry-numpy-target 1.0" in caplog.text


def test_a_build_names_no_code(tmp_path: Path, installer: Installer) -> None:
    installer.example("numpy_target")
    tapestry.compile(model(tmp_path, PRODUCTS), devices=2, target="numpy").save(tmp_path / "build")
    text = (tmp_path / "build" / "plan.json").read_text()
    assert "numpy_target:" not in text and "NumpyTarget" not in text


BROKEN = {
    "raises": ("raise RuntimeError('no such device')", "no such device"),
    "ends": ("raise SystemExit(3)", "SystemExit"),
    "lacks": ("", "ThisIsNot"),
    "needs": ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", BROKEN)
def test_what_does_not_load_is_named_and_stops_nothing_else(tmp_path: Path, installer: Installer, how: str) -> None:
    source, why = BROKEN[how]
    installer.module("broken_pack", source + "\n", {"tapestry.targets": {"broken": "broken_pack:ThisIsNot"}})
    path = model(tmp_path, PRODUCTS)
    assert tapestry.compile(path, devices=2).report["plugins"] == []  # nobody asked for it
    status, out, _ = run("compile", path, "-o", tmp_path / "b", "--devices", "2", "--target", "broken", "--json")
    found = json.loads(out)
    assert status == 2 and "broken_pack 0.1" in found["what"] and why in found["why"]
    status, out, _ = run("--version", "-v")
    assert status == 0 and "broken_pack 0.1" in out and why in out


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("make = 3", "nothing that can be called"),
        ("make = object", "has no device, kernel"),
        ("class make:\n    def __init__(self): 1 / 0", "division by zero"),
        ("def make(): raise SystemExit(4)", "SystemExit"),
    ],
)
def test_a_target_that_is_none(tmp_path: Path, installer: Installer, source: str, why: str) -> None:
    installer.module("odd_target", source + "\n", {"tapestry.targets": {"odd": "odd_target:make"}})
    with pytest.raises(PluginError, match=r"odd_target 0\.1") as e:
        tapestry.compile(model(tmp_path, PRODUCTS), devices=2, target="odd")
    assert why in e.value.why


@pytest.mark.parametrize(
    "source", ["None", "{'name': 'maxcount'}", "__import__('tapestry.ir.monoid').ir.monoid.MONOIDS['sum']"]
)
def test_what_is_no_monoid(tmp_path: Path, installer: Installer, source: str) -> None:
    installer.module("odd_monoid", f"M = {source}\n", {"tapestry.monoids": {"maxcount": "odd_monoid:M"}})
    with pytest.raises(TapestryError, match=r"odd_monoid 0\.1"):
        tapestry.compile(model(tmp_path, ROWS))


SHORT = """
from numpy_target import NumpyTarget
class Short(NumpyTarget):
    def kernel(self, graph, kernel):
        run = super().kernel(graph, kernel)
        return lambda ins, states: [{} for a in run(ins, states)]
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("result", ["a[:1]", "a.double()", "a.t().contiguous().t()", "1 / 0"])
def test_results_of_another_shape_or_type_are_refused(tmp_path: Path, installer: Installer, result: str) -> None:
    installer.example("numpy_target")
    installer.module("short_target", SHORT.format(result), {"tapestry.targets": {"short": "short_target:Short"}})
    plan = tapestry.compile(model(tmp_path, PRODUCTS), devices=2, target="short")
    with pytest.raises(PluginError, match=r"short_target 0\.1"):
        plan.run(plan.random_feeds())


def test_two_packages_with_one_name(tmp_path: Path, installer: Installer) -> None:
    for package in ("pack_one", "pack_two"):
        installer.module(package, "make = object\n", {"tapestry.targets": {"same": f"{package}:make"}})
    status, out, _ = run(
        "compile", model(tmp_path, PRODUCTS), "-o", tmp_path / "b", "--devices", "2", "--target", "same", "--json"
    )
    found = json.loads(out)
    assert status == 2 and "pack_one 0.1" in found["why"] and "pack_two 0.1" in found["why"]


def test_damaged_metadata_is_named_and_stops_nothing(installer: Installer, caplog: pytest.LogCaptureFixture) -> None:
    installer.example("maxcount_monoid")
    installer.metadata("damaged", "1", {})
    file = next((installer.folder / "site").glob("damaged*")) / "entry_points.txt"
    file.write_bytes(b"[tapestry.targets]\n\xff\xfe\n")
    entry_points._scanned.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert entry_points.has("monoids", "maxcount")
    assert "damaged" in caplog.text


def test_own_names_come_first(installer: Installer) -> None:
    installer.module(
        "taker", "raise RuntimeError\n", {"tapestry.monoids": {"sum": "taker:x"}, "tapestry.topologies": {"cpu": "taker:x"}}
    )
    from tapestry.ir.monoid import MONOIDS

    assert MONOIDS["sum"].fields == ("value",)
    status, out, _ = run("--version", "-v")
    assert status == 0 and out.count("not used: Tapestry's own has this name") == 2


def test_version_lists_what_there_is(installer: Installer) -> None:
    examples = sorted(p.name for p in EXAMPLES.iterdir() if p.is_dir())
    for name in examples:
        installer.example(name)
    status, out, _ = run("--version", "-v")
    assert status == 0 and out.count(": loads\n") == len(examples) + 1  # two operators are of one package
    assert {line.split("'")[0].strip() for line in out.splitlines() if "'" in line} == {
        f"tapestry.{k}" for k in entry_points.KINDS
    }
    installer.monkeypatch.setenv("TAPESTRY_PLUGINS", "0")
    assert "plug-ins: none" in run("--version", "-v")[1]
    assert run("--version")[1].count("\n") == 1
