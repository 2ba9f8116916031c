"""The pictures of the pages, drawn from real plans: ``python -m tests.docs.pictures`` makes ``docs/images`` anew.

Drawings are text and the same everywhere: a test makes them again. Photographs of the viewer need Chromium, and differ by its fonts:
they are taken by ``--photographs``, and a test of the page says that what they show is right.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import onnx

import tapestry
from examples import layer as layer_example
from tapestry import draw
from tapestry.ir.graph import Split
from tapestry.ir.syntax.parser import parse
from tests.support.paths import ROOT
from tests.support.viewer import chromium, viewed

IMAGES = ROOT / "docs" / "images"
PHOTOGRAPHS = {
    "viewer-index-space": ("halo", "op=1&device=1&theme=light", 1280, 980),
    "viewer-alternatives": ("layer", "tab=choices&theme=light", 1280, 860),
    "viewer-tensors": ("layer", "tab=tensors&theme=dark", 1280, 860),
    "viewer-kernel": ("layer", "tab=kernel&theme=dark", 1280, 860),
    "viewer-causal": ("causal", "at=0.0.5.0.0.0&theme=light", 1280, 760),
    "viewer-compare": ("layer, free", "tab=compare&theme=light", 1280, 860),
    "viewer-phone": ("halo", "op=1&device=1&tab=space&theme=dark", 390, 844),
}


def plans(folder: Path) -> dict[str, tapestry.Compiled]:
    """The plans that are drawn: the layer of the tutorial on 2×4 devices, and those of the viewer's tests."""
    models = {"halo": viewed.halo(), "causal": viewed.causal(), "layer": layer_example.model()}
    for name, model in models.items():
        onnx.save(model, folder / f"{name}.onnx")

    def made(name: str, **options: object) -> tapestry.Compiled:
        return tapestry.compile(folder / f"{name}.onnx", topology="cpu", **options)  # type: ignore[arg-type]

    return {
        "halo": made("halo", devices=4, pins=viewed.HALO_PINS), "layer": made("layer", mesh="dp=2,tp=4"),
        "causal": made("causal", devices=4, pins=["attention:b1=4@d0"]), "free": made("layer", devices=4),
    }  # fmt: skip


def drawings(found: dict[str, tapestry.Compiled]) -> dict[str, draw.Drawing]:
    """The drawings by file name."""
    layer, halo = found["layer"], found["halo"]
    graph = parse((ROOT / "examples" / "mlp.tap").read_text())
    h = graph.ops[0]
    split = Split("n", 4, "mesh.d0")

    return {
        "tiles": draw.tiles((7, 4), "{5,1: 3,2,4,1,0}"),
        "mlp-space": draw.index_space(h, graph), "mlp-split": draw.index_space(replace(h, splits=(split,)), graph, device=1),
        "mlp-reduced": draw.index_space(replace(graph.ops[1], splits=(replace(split, dim="m"),)), graph, device=1),
        "cores": draw.index_space(replace(h, splits=(replace(split, parts=8),)), graph, device=2),
        "halo-space": draw.index_space("conv2", halo, device=1), "halo-tensor": draw.tensor(halo, "r"),
        "layer-graph": draw.graph(layer), "layer-lanes": draw.lanes(layer),
    }  # fmt: skip


def photograph(found: dict[str, tapestry.Compiled], folder: Path) -> None:
    """Photographs of the viewer, in the size of a window."""
    pages = {"layer, free": found["layer"].view(found["free"]), **{n: c.view() for n, c in found.items()}}
    with chromium.browser() as tab:
        for name, (page, hash_, width, height) in PHOTOGRAPHS.items():
            tab.open(pages[page].save(folder / "page.html"), hash_, width=width, height=height)
            tab.photograph(IMAGES / f"{name}.png")
            assert tab.errors == []


def main() -> None:
    """Draw everything anew."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = plans(Path(folder))
        for name, picture in drawings(found).items():
            picture.save(IMAGES / f"{name}.svg")
        if "--photographs" in sys.argv:
            photograph(found, Path(folder))


if __name__ == "__main__":
    main()
