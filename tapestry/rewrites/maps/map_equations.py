"""The rules over maps that are equations, in the order in which they are tried."""

from pathlib import Path

from tapestry.rewrites.equations.registry import register_file

for _name in ("fuse_maps", "fuse_places", "select_first"):
    register_file(Path(__file__).with_name(f"{_name}.tap"))
