"""The pictures of the viewer as SVG, for a page of documentation, a paper or a notebook.

``tapestry.draw.index_space(op, graph)``, ``draw.graph(build)``, ``draw.lanes(build)``, ``draw.tensor(build, name)`` and
``draw.tiles(shape, pattern)`` return a `Drawing`: text that a notebook shows as a picture and that ``save`` writes. Colours
follow the reader's light or dark scheme.
"""

from tapestry.draw.drawing import Drawing
from tapestry.draw.graph_picture import graph
from tapestry.draw.index_space_picture import index_space
from tapestry.draw.lanes_picture import lanes
from tapestry.draw.tensor_picture import tensor
from tapestry.draw.tiles_picture import tiles

__all__ = ["Drawing", "graph", "index_space", "lanes", "tensor", "tiles"]
