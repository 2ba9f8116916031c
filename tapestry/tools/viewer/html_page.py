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
from functools import cache
from importlib import resources
from typing import Any, cast

PAGE = resources.files("tapestry.tools.viewer") / "page"
LIBRARY, LICENSE = "vendor/dagre.min.js", "vendor/dagre.LICENSE"
MODULES = (
    "elements",
    "cursor",
    "model",
    "affine",
    "layout",
    "graph",
    "tree",
    "space",
    "tensors",
    "lanes",
    "choices",
    "rewrites",
    "kernels",
    "certificate",
    "main",
)
"""In the order in which they need each other."""
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def assemble(data: dict[str, Any], title: str) -> str:
    """The page of some data: ``builds``, and the comparison of two.

    The data is compressed JSON in base64, which has no letter that HTML knows.
    """
    library, script, style = _page_file(LIBRARY), _script(), _page_file("viewer.css")
    allowed = f"script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; img-src data: blob:"
    policy = f"default-src 'none'; {allowed}"
    raw = json.dumps(_json_numbers(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    packed = base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode()
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{style}</style>",
            '<body><div id="page"></div>',
            f'<script type="application/octet-stream" id="data">{packed}</script>',
            f"<!-- {_page_file(LICENSE).strip()} -->",
            f"<script>{library}</script>",
            f"<script>{script}</script>",
            "</body></html>",
            "",
        ]
    )


@cache
def _page_file(name: str) -> str:
    return (PAGE / name).read_text("utf-8")


@cache
def _script() -> str:
    """All modules as one script, each in a function that returns what it exports."""
    parts = [_module(m, _page_file(f"{m}.js")) for m in MODULES]
    return '"use strict";(() => {\n' + "\n".join(parts) + "\n})();"


def _module(name: str, text: str) -> str:
    names = [m.group(2) for m in _EXPORT.finditer(text)]
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = \2_module;", text))
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
