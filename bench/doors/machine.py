"""A machine for small models."""

from __future__ import annotations

from typing import Any

FAST: dict[str, Any] = {
    "device": {"memory": "1GiB", "bandwidth": 1e6, "launch": 0, "vector": 1e6, "flops": {"f32": 1e6, "other": 1e6}},
    "levels": [{"alpha": 1e-9, "beta": 1e-9}],
}
"""So slow at computing, and so fast between devices, that cutting pays."""
