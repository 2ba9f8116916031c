"""ONNX to Graph. `lift` reads a model file, `read_weight` and `read_checked` the data behind its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tapestry.lift.file.weight_data import read_checked, read_weight

if TYPE_CHECKING:
    from tapestry.lift.onnx_to_graph import Lifted, lift

__all__ = ["Lifted", "lift", "read_checked", "read_weight"]


def __getattr__(name: str) -> Any:
    """Load the operators when a model is first lifted: running a build needs its weights alone."""
    if name in ("Lifted", "lift"):
        from tapestry.lift import onnx_to_graph

        return getattr(onnx_to_graph, name)
    raise AttributeError(name)
