"""Cost models of other packages: seconds of a kernel by a function of theirs, in the place of the roofline (`cost.compute`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import numpy as np

from tapestry.plan.topology import Device
from tapestry.plugins import entry_points as plugins

KIND = "costs"
Model = Callable[[str, str, float, float, float, Device], float]
"""``(kernel class, dtype, contraction FLOPs, other FLOPs, bytes, device) -> seconds`` of a kernel on one device."""


def seconds_each(
    name: str, kind: str, dtype: str, work: Sequence[np.ndarray], devices: Sequence[Device]
) -> np.ndarray:  # fmt: skip
    """Seconds of every device's block.

    Args:
        kind: the kernel's class (`cost.kernel_class`); ``dtype``: that of what it multiplies.
        work: contraction FLOPs, other FLOPs and bytes, a number per device each.
        devices: every device, or the one that all are like.

    Raises:
        PluginError: there is no such model, it fails, its seconds are none, or others when it is asked again.
    """
    model: Model = plugins.get(KIND, name)
    known: dict[tuple[float, float, float, int], float] = {}
    out: list[float] = []
    for k, (heavy, light, moved) in enumerate(zip(*(w.tolist() for w in work), strict=True)):
        at = k if len(devices) > 1 else 0
        key = (heavy, light, moved, at)
        if key not in known:
            with plugins.blamed(KIND, name):
                said = model(kind, dtype, heavy, light, moved, devices[at])
                known[key] = float(said)
                again = known[key] if len(known) > 1 else float(model(kind, dtype, heavy, light, moved, devices[at]))
            if not isfinite(known[key]) or known[key] < 0 or type(said) is bool:
                raise plugins.refused(KIND, name, f"a kernel of class '{kind}' takes {said} seconds")
            if again != known[key]:
                why = f"a kernel of class '{kind}' takes {known[key]} seconds, and {again} when it is asked again"
                raise plugins.refused(KIND, name, why)
        out.append(known[key])
    return np.array(out)
