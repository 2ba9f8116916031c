"""onnx_ir, its passes and onnxscript's optimizer, without waiting for sympy, which takes longer to load than all the rest.

They use it for sizes that are symbols; the models that come here have numbers. It is loaded when something of it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import get_ident
from types import ModuleType
from typing import Any

LIBRARIES = ("onnx_ir", "onnx_ir.passes.common", "onnxscript.optimizer")


class _Later(ModuleType):
    """Stands for a module until something of it is used; what is only named while others are imported is a function of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.importing = get_ident()

    def __getattr__(self, name: str) -> Any:
        named = self.importing == get_ident() and sys.modules.get(self.__name__) is self and not name.startswith("_")
        return self.function(name) if named else getattr(self.real(), name)

    def function(self, name: str) -> Callable[..., Any]:
        """A function that loads the module when it is called."""
        return lambda *arguments: getattr(self.real(), name)(*arguments)

    def real(self) -> ModuleType:
        """The module itself."""
        self.leave()
        return importlib.import_module(self.__name__)

    def leave(self) -> None:
        """Imports get the module itself from now on."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


@contextmanager
def _later(name: str) -> Generator[None]:
    """A module that what is imported within names is not loaded before it is used."""
    if name in sys.modules:
        yield
        return
    later = sys.modules[name] = _Later(name)
    try:
        yield
    finally:
        later.leave()


def _without_waiting() -> bool:
    """Whether the libraries can be imported while all they name of sympy are functions; else they are as if never imported."""
    before = set(sys.modules)
    try:
        with _later("sympy"):
            for name in LIBRARIES:
                importlib.import_module(name)
    except (ImportError, AttributeError, TypeError):
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("onnx_ir", "onnxscript"):
                del sys.modules[name]
        return False
    return True


WITHOUT_WAITING = _without_waiting()

import onnx_ir as ir  # noqa: E402
from onnx_ir.passes import common as passes  # noqa: E402
from onnxscript import optimizer  # noqa: E402

__all__ = ["ir", "optimizer", "passes"]
