"""ONNX to Graph. `lift` reads a model file, `read_weight` the data behind its weights."""

from tapestry.lift.model import Lifted, lift
from tapestry.lift.weights import read_weight

__all__ = ["Lifted", "lift", "read_weight"]
