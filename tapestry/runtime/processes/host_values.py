"""Values of the host (text, sequences, maps, optionals, arrays of unknown shape) as bytes, to travel between processes.

JSON, with the data of arrays as base64: reading it executes nothing.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import msgspec
import numpy as np

from tapestry.errors import TapestryError
from tapestry.onnx_eval.value_kinds import is_map, is_sequence


def encode(value: Any) -> bytes:
    """An array, text, a sequence, a map of numbers or names to values, or ``None``, as bytes."""
    return msgspec.json.encode(_json_value(value))


def decode(data: bytes) -> Any:
    """What was encoded.

    Raises:
        TapestryError: these bytes are no value.
    """
    try:
        return _value(msgspec.json.decode(data))
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as e:
        raise TapestryError(f"a value of the host does not read: {e}") from None


def _json_value(value: Any) -> Any:
    if value is None:
        return None
    if is_sequence(value):
        return [_json_value(v) for v in value]
    if is_map(value):
        return {
            "keys": [k if isinstance(k, str) else int(k) for k in value],
            "values": [_json_value(v) for v in value.values()],
        }
    a = np.asarray(value)
    if a.dtype.kind in "OUS":
        items = [v.decode() if isinstance(v, bytes) else str(v) for v in a.ravel().tolist()]
        return {"shape": a.shape, "text": items}
    return {"shape": a.shape, "dtype": a.dtype.name, "data": b64encode(np.ascontiguousarray(a).tobytes()).decode()}


def _value(plain: Any) -> Any:
    if plain is None:
        return None
    if is_sequence(plain):
        return [_value(v) for v in plain]
    if "keys" in plain:
        return dict(zip(plain["keys"], map(_value, plain["values"]), strict=True))
    if "text" in plain:
        return np.array(plain["text"], object).reshape(plain["shape"])
    return np.frombuffer(b64decode(plain["data"]), np.dtype(plain["dtype"])).reshape(plain["shape"]).copy()
