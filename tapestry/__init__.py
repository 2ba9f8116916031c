"""Tapestry: from an ONNX model to a verified, sharded execution plan and the kernels that run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tapestry.system import interrupts

interrupts.at_start()

from tapestry import flags  # noqa: E402
from tapestry.errors import TapestryError  # noqa: E402
from tapestry.plugins import tool  # noqa: E402

if TYPE_CHECKING:
    from tapestry.api import Compiled, compile, from_pretrained, load
    from tapestry.interop.tensor_dictionary import TensorDictionary
    from tapestry.lift.own_operators import operator
    from tapestry.tools.sessions.held_session import Session

    __version__: str

__all__ = [
    "Compiled",
    "Session",
    "TapestryError",
    "TensorDictionary",
    "__version__",
    "compile",
    "from_pretrained",
    "load",
    "operator",
]

flags.before_numpy()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load the interface when it is first used: ``tapestry --help`` must not wait for torch and onnx."""
    if name in ("Compiled", "compile", "from_pretrained", "load"):
        flags.before_torch()  # which compiling imports
        from tapestry import api

        return getattr(api, name)
    if name == "operator":
        from tapestry.lift.own_operators import operator

        return operator
    if name == "Session":
        from tapestry.viz.tool_kinds import Sessions

        return tool(Sessions)
    if name == "TensorDictionary":
        from tapestry.interop.tensor_dictionary import TensorDictionary

        return TensorDictionary
    if name == "draw":
        from tapestry.viz.tool_kinds import Pictures

        return tool(Pictures)
    if name == "__version__":
        from tapestry.flags import version

        return version()
    raise AttributeError(name)
