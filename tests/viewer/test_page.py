"""The page in a real browser: every picture clicked by a script, and what it then says held to `explain` and to the plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import tapestry
from tapestry.build import store
from tapestry.build.atomic import write_text
from tapestry.ir import space
from tapestry.ir.kernel import size
from tapestry.tools.viewer import saved
from tapestry.viz import build_diff, explain
from tapestry.viz.format import duration, human, signed
from tests.support.viewer import chromium, viewed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]
SIZES = ((1280, 860), (390, 844))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Builds, their pages, and a trace that says that every step takes twice as long as estimated."""
    at = tmp_path_factory.mktemp("views")
    onnx.save(viewed.halo(), at / "halo.onnx")
    onnx.save(viewed.causal(), at / "causal.onnx")
    options = {"devices": 4, "topology": "cpu"}
    tapestry.compile(at / "halo.onnx", pins=viewed.HALO_PINS, pareto=True, **options).save(at / "halo")
    tapestry.compile(at / "halo.onnx", **options).save(at / "free")
    tapestry.compile(at / "causal.onnx", pins=["attention:b1=4@d0"], **options).save(at / "causal")
    rows = explain.schedule(store.read(at / "halo")[0]).timed
    steps = [
        {"step": t.step, "what": "a step", "estimated_s": t.seconds, "measured_s": 2 * t.seconds, "waited_s": 0.0} for t in rows
    ]
    (at / "trace.json").write_text(json.dumps({"otherData": {"steps": steps}}))
    for name, builds, trace in (
        ("halo", ["halo"], at / "trace.json"),
        ("two", ["halo", "free"], None),
        ("causal", ["causal"], None),
    ):
        write_text(at / f"{name}.html", saved.page([at / b for b in builds], trace))
    return at


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Tab]:
    with chromium.browser() as t:
        yield t


@pytest.fixture(params=SIZES, ids=lambda size_: size_[0])
def tab(browser, request) -> chromium.Tab:
    """The tab, at a size of the window: every test is one at each of them."""
    browser.size = request.param
    return browser


@pytest.fixture(scope="module")
def built(folder):
    build = store.read(folder / "halo")[0]
    return build, explain.document(build, why=True)


@pytest.fixture(autouse=True)
def silent(tab):
    """No error, no warning, nothing loaded but the page itself."""
    tab.errors.clear()
    tab.asked.clear()
    yield
    assert tab.errors == []
    assert all(u.startswith(("file:", "about:", "blob:")) for u in tab.asked)


def number(build, node: str) -> int:
    return build.plan.graph.find(node)


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overflows(folder, tab, dark):
    width, height = tab.size
    tab.open(folder / "halo.html", dark=dark)
    for name in ("graph", "space", "tensors", "choices", "kernel", "rewrites", "certificate", "lanes"):
        tab.js(f"document.querySelector('[data-tab={name}]').click()")
        assert tab.js("document.documentElement.scrollWidth") <= width, name
        assert tab.js("document.documentElement.scrollHeight") <= height, name
    assert tab.js("document.documentElement.dataset.theme") == ("dark" if dark else "light")


def test_graph_folds_and_opens_in_place(folder, tab, built):
    build, facts = built
    tab.open(folder / "halo.html")
    assert "▸ layer ×7" in tab.text(".group")
    assert tab.count(".op") == len(build.plan.graph.ops) - 14
    tab.click(".group .name")
    assert tab.text(".frame-name") == "▾ layer 1 of 7"
    assert tab.text(".group .name") == "▸ layer ×6"
    halo = next(r for r in facts["steps"] if r["kind"] == "halo")
    assert f"halo {human(halo['bytes'])}" in list(
        tab.js("[...document.querySelectorAll('.edge.moved .edge-name')].map(e => e.textContent)")
    )
    assert any(
        f"halo: {halo['bytes']:,} bytes on the wire" in t
        for t in tab.js("[...document.querySelectorAll('.edge title')].map(e => e.textContent)")
    )
    cuts = {r["split"] for r in facts["operations"]}
    assert all(f"{c} " in tab.text(".legend") for c in cuts if c != "none")
    tab.click(".frame-name")
    assert "▸ layer ×7" in tab.text(".group")


def test_every_edge_has_the_bytes_of_its_step(folder, tab, built):
    _build, facts = built
    tab.open(folder / "halo.html")
    moved = tab.js(
        "[...document.querySelectorAll('.edge.moved title')].map(e => Number(/: ([\\d,]+) bytes/.exec(e.textContent)[1].replaceAll(',', '')))"
    )
    wanted = [r["bytes"] for r in facts["steps"] if r["kind"] in ("halo", "all_gather")]
    assert sorted(moved) == sorted(wanted)


def test_a_tile_lights_up_what_it_reads(folder, tab, built):
    build, facts = built
    at = number(build, "conv2")
    tab.open(folder / "halo.html", f"op={at}")
    tab.click(".tile[data-device='1']")
    tab.key("Escape")
    tab.key("]")
    tab.key("]")
    op, graph = build.plan.graph.ops[at], build.plan.graph
    step = next(s for s in build.program.steps if getattr(s, "op", None) == at and hasattr(s, "blocks"))
    hull = space.access(op, op.reads[0], graph.tensors["r"].shape).image(step.blocks[1]).hull()
    shown = "[" + ", ".join(f"{a}:{b}" for a, b in hull) + "]"
    said = tab.text(".operand[data-tensor=r]")
    assert f"reads {shown}, {human(size(hull) * 4)}" in said
    held = next(b for b in build.program.buffers.values() if b.tensor == "r" and b.name == "r").boxes[1]
    assert f"{size(hull) - size(held):,} cells from others (halo)" in said
    assert tab.count(".operand[data-tensor=r] .halo") == 1 and "grey: padding" in said
    assert f"block {'×'.join(map(str, facts['operations'][at]['block']))}" in tab.text(".words")


def test_a_point_lights_up_its_cells(folder, tab, built):
    at = number(built[0], "conv2")
    tab.open(folder / "halo.html", f"op={at}")
    tab.hover("[data-face]", 0.5, 0.5)
    tab.wait("document.querySelector('.operand[data-tensor=r] .cell')")
    assert "54 cell(s)" in tab.text(".operand[data-tensor=r]")  # 6 channels, 3 by 3
    tab.hover("[data-face]", 0.015, 0.015)
    tab.wait("document.querySelector('.operand[data-tensor=r] .cell.pad')")
    assert "24 cell(s), 30 outside: 0.0" in tab.text(".operand[data-tensor=r]")  # a corner sees 2 by 2 of them


def test_a_causal_mask_is_grey(folder, tab):
    tab.open(folder / "causal.html", "at=0.0.5.0.0.0")
    assert tab.count("svg[data-name=index-space] .skip") == 15  # rows of 16 that see less than all
    said = tab.text(".operand[data-tensor=k]")
    assert "48 cell(s), 80 left out by a guard" in said  # 6 of 16 keys, 8 wide


def test_reductions_are_trees(folder, tab, built):
    build, facts = built
    at = number(build, "layers.0.down_proj")
    tab.open(folder / "halo.html", f"op={at}")
    row = next(r for r in facts["steps"] if r["op"] == at and r["kind"] == "all_reduce")
    assert f"{row['bytes']:,} bytes on the wire" in tab.text(".tree figcaption")
    assert tab.count(".tree .leaf") == row["group"] and tab.count(".tree .joint") == row["group"] - 1


def test_tensors_and_the_matrix(folder, tab, built):
    build, facts = built
    at = number(build, "conv2")
    tab.open(folder / "halo.html", f"op={at}&device=1")
    tab.click("[data-tab=tensors]")
    totals = [int(x) for x in tab.js("[...document.querySelectorAll('[data-total]')].map(e => e.dataset.total)")]
    assert totals[0] == sum(r["bytes"] for r in build.report["transfers"])
    halo = next(r for r in facts["steps"] if r["kind"] == "halo")
    assert totals[1] == halo["bytes"]
    assert f"{halo['bytes']:,}" in tab.text(f"tr[data-step='{halo['step']}']")
    assert "from 0" in tab.text(".tensor[data-tensor=r]") and "from 2" in tab.text(".tensor[data-tensor=r]")


def test_lanes_are_the_simulation(folder, tab, built):
    build, facts = built
    tab.open(folder / "halo.html")
    sim = facts["simulated"]
    busiest = sim["compute_s"].index(max(sim["compute_s"]))
    computes, sends = duration(sim["compute_s"][busiest]), duration(sim["transfer_s"][busiest])
    words = f"simulated {duration(sim['seconds'])} · the busiest device computes for {computes} · sends for {sends}"
    assert words in tab.text("[data-lanes]")
    timed = explain.schedule(build).timed
    assert tab.count(".lanes .bar:not(.error)") == 2 * len(timed)  # two classes of devices: those at the rim, and the others
    assert human(build.peak_bytes[0]) in tab.text(".lanes svg")
    assert set(tab.js("[...document.querySelectorAll('.bar.error')].map(e => e.dataset.ratio)")) == {"2.00"}
    halo = next(r for r in facts["steps"] if r["kind"] == "halo")
    if tab.size[0] < 760:  # the lanes have a panel of their own
        tab.click("[data-tab=lanes]")
    tab.click(f".bar[data-step='{halo['step']}']")
    if tab.size[0] < 760:
        tab.click("[data-tab=space]")
    assert tab.text("h2") == "conv2"  # one cursor: the operation that it is fetched for
    assert tab.count(".op.selected[data-op='1']") == 1


def test_a_click_on_an_alternative_gives_the_pin(folder, tab, built):
    build, facts = built
    at = number(build, "layers.3.up_proj")
    tab.open(folder / "halo.html", f"op={at}")
    tab.click("[data-tab=choices]")
    best = facts["operations"][at]["next_best"]
    rows = tab.js(
        "[...document.querySelectorAll('.choices tbody tr[data-more]')].map(e => [e.children[0].textContent, e.children[1].textContent])"
    )
    assert rows[0] == [best["split"], signed(best["seconds_more"])]
    pinned = next(k for k, r in enumerate(rows) if "m/4@d0" in r[0])
    tab.click(f".choices tbody tr[data-more]:nth-child({pinned + 2}) td")
    assert tab.text(".say") == "--pin 'layers.3.up_proj:m=4@d0'"


def test_the_search_and_the_front(folder, tab, built):
    report = built[0].report
    tab.open(folder / "halo.html", "tab=choices")
    assert (
        f"objective {duration(report['objective_s'])}, lower bound {duration(report['lower_bound_s'])}, gap {report['gap']:.2%}"
        in tab.text("[data-search]")
    )
    assert tab.count("svg[data-name=search] circle") == len(report["search"]["history"]) > 0
    tab.click("svg[data-name=pareto] [data-point='0']")
    assert human(report["pareto"][0]["peak_bytes"]) in tab.text(".say")


def test_a_slider_over_rewrites(folder, tab, built):
    report = built[0].report
    tab.open(folder / "halo.html", "tab=rewrites")
    assert tab.text("[data-rewrite]").startswith(f"1 of {report['rewrites']['steps']}: ")
    seen: dict[str, int] = {}
    for _ in range(report["rewrites"]["steps"]):
        for part in tab.text("[data-facts]").partition("same results: ")[2].partition(";")[0].split(", "):
            n, _, what = part.partition(" by ")
            seen[what] = seen.get(what, 0) + int(n.replace(",", ""))
        assert tab.count("svg[data-name=rewrite-before] .step-op") > 0
        tab.click("button[title='the next one']")
    assert seen == report["rewrites"]["shown"]  # the evidence of every step, proved again, is that of the certificate


def test_kernels_beside_blocks(folder, tab, built):
    build, _ = built
    at = number(build, "conv2")
    tab.open(folder / "halo.html", f"op={at}&tab=kernel")
    name = tab.js("document.querySelector('[data-kernel]').dataset.kernel")
    source = (folder / "halo" / "kernels" / name).read_text()
    assert tab.js("[...document.querySelectorAll('[data-line]')].map(e => e.textContent).join('\\n')").split() == source.split()
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "tl.dot" in text or "tl.load" in text)
    tab.hover(f"[data-line='{line}']", 0.05)
    assert tab.count("[data-word].lit") > 0
    tab.hover("[data-word=k2]")
    lit = tab.js("[...document.querySelectorAll('[data-line].lit')].map(e => e.textContent)")
    assert lit and all("k2" in text for text in lit)


def test_the_certificate(folder, tab, built):
    laws = json.loads((folder / "halo" / "certificate.json").read_text())["laws"]
    tab.open(folder / "halo.html", "tab=certificate")
    assert int(tab.js("document.querySelector('[data-checks]').dataset.checks")) == sum(laws.values())
    for law, n in laws.items():
        assert f"{n:,}" in tab.text(f"[data-law={law}]")


def test_two_builds_beside_each_other(folder, tab):

    diff = build_diff.compare(*(store.read(folder / b)[0] for b in ("halo", "free")))
    tab.open(folder / "two.html")
    assert tab.count(".canvas svg") == 2
    assert int(tab.js("document.querySelector('[data-differ]').dataset.differ")) == len(diff["operations"])
    assert all(duration(t) in tab.text("[data-fact=objective]") for t in diff["objective_s"])
    tab.click("tr[data-op-name=d0] td")
    tab.key("b")
    assert tab.text("header [aria-pressed=true]") == "free"
    tab.click("[data-tab=space]")
    assert tab.text("h2") == "layers.0.down_proj"  # the cursor is on the same operation of the other build


def test_links_restore_the_view_and_keys_move_it(folder, tab, built):
    tab.open(folder / "halo.html", "op=2")
    third = "3" if tab.size[0] > 760 else "4"  # a narrow page has the graph as its first panel
    for key in ("j", "]", "]", "t", third):
        tab.key(key)
    tab.wait("location.hash.includes('tab=choices')")
    hash_ = tab.js("location.hash")
    assert all(x in hash_ for x in ("op=3", "device=1", "theme=dark"))
    tab.open(folder / "halo.html", hash_.removeprefix("#"))
    assert tab.text("h2") == tab.js(
        "document.querySelector('.op.selected .name')?.textContent ?? document.querySelector('h2').textContent"
    )
    assert (
        tab.js("document.documentElement.dataset.theme") == "dark" and tab.count("[data-tab=choices][aria-selected=true]") == 1
    )


def test_a_picture_is_saved_with_its_colours(folder, tab):
    tab.open(folder / "halo.html", "op=1")
    tab.js("URL.createObjectURL = (b) => (b.text().then((t) => (window.saved = t)), 'blob:x')")
    tab.js("HTMLAnchorElement.prototype.click = function () { window.called = this.download; }")
    tab.key("s")
    tab.wait("window.saved")
    assert tab.js("window.called") == "index-space.svg"
    assert (
        tab.js(
            "new DOMParser().parseFromString(window.saved, 'image/svg+xml').querySelectorAll('polygon[fill=\"rgb(0, 114, 178)\"]').length"
        )
        > 0
    )


def test_a_space_of_forms_is_a_graph_of_rewrites(folder, tab, capsys):
    """What `rules --derive` prints is what the page shows: how many forms, how deep, what was not followed, and each form."""
    from tapestry import cli

    page, asked = folder / "forms.html", ["rules", "--derive", "Linear", "--mesh", "2", "--forms", "12"]
    assert cli.main([*asked, "--json", "--view", str(page)]) == 0
    said = json.loads(capsys.readouterr().out)
    tab.open(page)
    assert tab.count(".form") == len(said["forms"]) == 12
    facts = {k: tab.text(f"[data-fact='{k}'] b") for k in ("forms", "moves, at most", "not followed", "devices")}
    pruned = ", ".join(f"{n} {why}" for why, n in said["pruned"].items())
    assert facts == {"forms": "12", "moves, at most": str(said["deepest"]), "not followed": pruned, "devices": "d0=2"}
    ends = list(
        tab.js(
            "[...document.querySelectorAll('.way:not(:has([stroke-dasharray]))')].map(e => `${e.dataset.of} ${e.dataset.form}`)"
        )
    )
    assert sorted(ends) == sorted(f"{f['of']} {f['form']}" for f in said["forms"] if f["of"] is not None)
    best = min(said["forms"], key=lambda f: (f["seconds"], f["form"]))
    assert tab.text("h2") == f"Form {best['form']}" and best["by"] in tab.text(".panel .words")
    tab.js("document.querySelector('.form[data-form=\"3\"]').dispatchEvent(new Event('click'))")
    assert tab.text("h2") == "Form 3" and said["forms"][3]["graph"].strip() in tab.text(".panel pre:last-of-type")
    assert tab.js("document.documentElement.scrollWidth") <= tab.size[0]
