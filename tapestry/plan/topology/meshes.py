"""The mesh that a user asks for."""

from __future__ import annotations

import re

from tapestry.errors import TapestryError
from tapestry.ir.plan import Mesh, MeshAxis, device_count

MAX_DEVICES = 4096


def parse_mesh(text: str) -> Mesh:
    """``4``, ``2x4`` or ``dp=2,tp=4``."""
    named = (
        [i.partition("=")[::2] for i in text.split(",")]
        if "=" in text
        else [(f"d{i}", p) for i, p in enumerate(text.split("x"))]
    )
    right = all(re.fullmatch(r"[A-Za-z_]\w*", n) and re.fullmatch(r"0*[1-9][0-9]{0,5}", s) for n, s in named)
    if not right or len({n for n, _ in named}) < len(named):
        twice = next((f"{n} stands twice" for n, _ in named if [m for m, _ in named].count(n) > 1), "")
        raise TapestryError(f"'{text}' is not a mesh", where="--mesh", why=twice, hint="8, 2x4 or dp=2,tp=4")
    mesh = tuple(MeshAxis(n, int(s)) for n, s in named)
    if device_count(mesh) > MAX_DEVICES:
        raise TapestryError(f"a mesh of {device_count(mesh):,} devices", where="--mesh", hint=f"at most {MAX_DEVICES:,}")
    return mesh
