"""The checker of annotations: a right model passes, every fault has a message of its own, meaning comes from projections."""

import json

import numpy as np
import onnx
import pytest
import sharding_faults as faults
from command_line import run as cli  # noqa: F401

from tapestry.plan.check_sharding import check_file


def checked(m: onnx.ModelProto, folder, **shapes):
    path = folder / "m.onnx"
    path.write_bytes(m.SerializeToString())
    return check_file(path, shapes)
