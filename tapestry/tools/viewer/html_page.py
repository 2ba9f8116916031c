"""One HTML file of data, scripts, styles and a library: nothing is loaded, and nothing that the data says is ever run.

Modules of the page are put one after another as one script, each in a function of its own. A content security policy names the
hashes of what may run, so that text of a model can neither be script nor fetch anything.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import re
import tempfile
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import msgspec

from tapestry.build import store
from tapestry.build.store import Build, new_file
from tapestry.errors import BuildError, TapestryError
from tapestry.tools.viewer import build_data
from tapestry.tools.viewer.build_data import Source
from tapestry.viz import explain

PAGE = resources.files("tapestry.tools.viewer") / "page"
LIBRARY, LICENSE = "vendor/dagre.min.js", "vendor/dagre.LICENSE"
MODULES = (
    "elements", "cursor", "model", "affine", "layout", "graph", "tree", "space", "tensors", "lanes", "choices", "rewrites",
    "kernels", "certificate", "derivations", "main",
)  # fmt: skip
"""In the order in which they need each other."""
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))|^export (\{ \w+(?:, \w+)* \};)$", re.MULTILINE)


def assemble(data: dict[str, Any], title: str) -> str:
    """The page of some data: ``builds``, and the comparison of two.

    The data is compressed JSON in base64, which has no letter that HTML knows.
    """
    library, script, style = _page_file(LIBRARY), _script(), _page_file("viewer.css")
    allowed = f"script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; img-src data: blob:"
    policy = f"default-src 'none'; {allowed}"
    raw = json.dumps(_json_numbers(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    packed = base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode()
    return "\n".join([
        "<!doctype html>", '<html lang="en">', '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<title>{html.escape(title)}</title>",
        f"<style>{style}</style>", '<body><div id="page"></div>',
        f'<script type="application/octet-stream" id="data">{packed}</script>', f"<!-- {_page_file(LICENSE).strip()} -->",
        f"<script>{library}</script>", f"<script>{script}</script>", "</body></html>", "",
    ])  # fmt: skip


@cache
def _page_file(name: str) -> str:
    return (PAGE / name).read_text("utf-8")


@cache
def _script() -> str:
    """All modules as one script, each in a function that returns what it exports."""
    parts = [_module(m, _page_file(f"{m}.js")) for m in MODULES]
    return '"use strict";(() => {\n' + "\n".join(parts) + "\n})();"


def _module(name: str, text: str) -> str:
    names = [m.group(2) or m.group(3).strip("{ };") for m in _EXPORT.finditer(text)]
    body = _EXPORT.sub(lambda m: m.group(1) or "", _IMPORT.sub(r"const \1 = \2_module;", text))
    return f"const {name}_module = (() => {{\n{body}return {{ {', '.join(names)} }};\n}})();"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json_numbers(x: Any) -> Any:
    """The data with null for numbers that JSON has not."""
    if isinstance(x, dict):
        return {str(k): _json_numbers(v) for k, v in cast("dict[Any, Any]", x).items()}
    if isinstance(x, list | tuple):
        return [_json_numbers(v) for v in cast("list[Any]", x)]
    return None if isinstance(x, float) and not math.isfinite(x) else x


# Pages of builds on disk, and of traces of their runs.


MAX_TRACE_BYTES = 1 << 30


class _Step(msgspec.Struct):
    """What the page takes of a trace's step; the file has more."""

    step: int
    what: str
    estimated_s: float
    measured_s: float
    waited_s: float


class _Steps(msgspec.Struct):
    steps: list[_Step]


class _Trace(msgspec.Struct):
    other: _Steps = msgspec.field(name="otherData")


def page(folders: Sequence[Path], trace: Path | None = None, say: build_data.Say = lambda what: None) -> str:
    """The page of one build or of two.

    Args:
        trace: of a real run of the first one.

    Raises:
        BuildError: a folder is no build; TapestryError: the trace is none of its.
    """
    sources: list[Source] = []
    names = [f.resolve().name for f in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    for folder, name in zip(folders, names, strict=True):
        build, laws = store.read(folder)
        log = folder / store.REWRITES
        rewrites = log.read_bytes() if log.is_file() else b""
        evidence = build.report.get("certificate", {}).get("evidence", ())
        real = measured(trace, build) if trace is not None and not sources else None
        sources.append(Source(build=build, name=name, laws=laws, evidence=evidence, rewrites=rewrites, measured=real))
    return of_sources(sources, say)


def of_sources(sources: Sequence[Source], say: build_data.Say = lambda what: None) -> str:
    """The page of builds in memory."""
    documents = [build_data.document(s, say) for s in sources]
    diff = None
    if len(sources) > 1:
        first, second = sources[0].build, sources[1].build
        diff = explain.compare(first, second, documents[0]["explain"], documents[1]["explain"])
    title = " and ".join(Path(s.build.model).name for s in sources)
    return assemble({"builds": documents, "diff": diff}, f"{title} · Tapestry")


def write_page(file: Path, text: str) -> None:
    """Write a page, whole or not at all."""
    with new_file(file) as temporary:
        temporary.write_text(text, "utf-8")


def measured(file: Path, build: store.Build) -> dict[str, Any]:
    """What the trace of a real run says of each step, and in all.

    Raises:
        TapestryError: the file is no trace of ``run --trace``, or of another plan.
    """
    try:
        if file.stat().st_size > MAX_TRACE_BYTES:
            raise TapestryError("the trace is too large", where=str(file))
        steps = msgspec.json.decode(file.read_bytes(), type=_Trace).other.steps
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        hint = "tapestry run --trace FILE"
        raise TapestryError("not the trace of a real run", where=str(file), why=str(e)[:200], hint=hint) from None
    if any(not 0 <= r.step < len(build.program.steps) for r in steps):
        raise BuildError("the trace is of another plan", where=str(file))
    real, estimated = sum(r.measured_s for r in steps), sum(r.estimated_s for r in steps)
    rows = [msgspec.structs.asdict(r) for r in steps]
    return {"steps": rows, "measured_s": real, "error": real / estimated - 1 if estimated else 0.0}


# Pages of builds in memory: in a notebook, in a file, in a browser.


Parts = tuple[Build, Mapping[str, int], Sequence[Mapping[str, Any]], bytes]
"""A build with the laws and the evidence of its certificate, and its log of rewrites."""


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """One HTML file that needs nothing else."""

    html: str

    def save(self, file: str | Path) -> Path:
        """Write it, whole or not at all."""
        write_page(Path(file), self.html)
        return Path(file)

    def open(self) -> Path:
        """Show it in the browser, from a temporary file."""
        with tempfile.NamedTemporaryFile("w", suffix=".html", delete=False, encoding="utf-8") as f:
            f.write(self.html)
        webbrowser.open(Path(f.name).as_uri())
        return Path(f.name)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page in a frame of its own, which can reach nothing of the notebook."""
        sandbox = "allow-scripts allow-downloads"
        frame = f'width="100%" height="760" style="border: 1px solid #ccc" sandbox="{sandbox}"'
        return f'<iframe {frame} srcdoc="{html.escape(self.html)}"></iframe>'


def titled(document: dict[str, Any], title: str) -> Page:
    """The page of other data than a build."""
    return Page(assemble(document, title))


def view(builds: Sequence[Parts]) -> Page:
    """The page of one build, or of two beside each other."""
    names = [Path(b.model).stem for b, *_ in builds]
    names = names if len(set(names)) == len(names) else [f"{n} {k + 1}" for k, n in enumerate(names)]
    return Page(of_sources([
        Source(build=b, name=n, laws=laws, evidence=evidence, rewrites=rewrites)
        for (b, laws, evidence, rewrites), n in zip(builds, names, strict=True)
    ]))  # fmt: skip
