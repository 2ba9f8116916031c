"""``tapestry.draw``: the pictures, each from the file that draws it."""

from __future__ import annotations

from tapestry.tools.viewer.graph_picture import graph
from tapestry.tools.viewer.index_space_picture import index_space
from tapestry.tools.viewer.lanes_picture import lanes
from tapestry.tools.viewer.tensor_picture import tensor
from tapestry.tools.viewer.tiles_picture import tiles

__all__ = ["graph", "index_space", "lanes", "tensor", "tiles"]
