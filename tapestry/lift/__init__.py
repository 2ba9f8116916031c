"""ONNX to Graph. `lift` reads a model file, `read_weight` and `read_checked` the data behind its weights."""

from tapestry.lift.file.weight_data import read_checked, read_weight
from tapestry.lift.onnx_to_graph import Lifted, lift

__all__ = ["Lifted", "lift", "read_checked", "read_weight"]
