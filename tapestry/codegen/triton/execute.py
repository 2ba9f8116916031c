"""Running generated kernels: on a CUDA or HIP device, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry.codegen.triton.interpreter import corrected
from tapestry.codegen.triton.source import TritonKernel
from tapestry.errors import BuildError, TapestryError

if TYPE_CHECKING:
    import torch

_FUNCTIONS: dict[str, Any] = {}
_FOLDER: list[tempfile.TemporaryDirectory[str]] = []


def load(tk: TritonKernel, folder: Path | None = None) -> Any:
    """The jitted function of a kernel, imported from a file named by the hash of its source.

    Triton reads the source of what it compiles, so there must be a file; it is written to ``folder`` (by default one of
    this process's own), and one that is there already must hold exactly these bytes.

    Raises:
        BuildError: the file's content is not the kernel's source.
    """
    data = tk.source.encode()
    digest = hashlib.sha256(data).hexdigest()
    if digest in _FUNCTIONS:
        return _FUNCTIONS[digest]
    path = (folder or _own_folder()) / f"{tk.name}_{digest[:16]}.py"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_bytes(data)
        partial.replace(path)
    if path.read_bytes() != data:
        raise BuildError("a kernel file does not hold what its name's hash says", where=str(path), hint="delete the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _FUNCTIONS[digest] = getattr(module, tk.name)
    return _FUNCTIONS[digest]


def launch(tk: TritonKernel, arrays: Sequence[torch.Tensor]) -> None:
    """Run a kernel on contiguous buffers, in the order of ``tk.args``; outputs are written in place.

    Raises:
        TapestryError: CPU tensors without Triton's interpreter.
    """
    from triton import knobs

    assert len(arrays) == len(tk.args), f"{tk.name} takes {tk.args}"
    assert all(a.is_contiguous() for a in arrays), "buffers are row-major"
    interpreted = bool(knobs.runtime.interpret)
    if not interpreted and any(a.device.type == "cpu" for a in arrays):
        raise TapestryError(
            "a Triton kernel cannot run on the CPU",
            where=tk.name,
            hint="set TRITON_INTERPRET=1 before triton is imported, or use the torch-cpu target",
        )
    if 0 in tk.grid:
        return
    if interpreted:
        with corrected():
            load(tk)[tk.grid](*arrays)
    else:
        load(tk)[tk.grid](*arrays, **launch_options(tk))


def launch_options(tk: TritonKernel) -> dict[str, Any]:
    """Compiler options: no contraction into fused multiply-adds, so that every device gives the same bits."""
    return {"num_warps": tk.num_warps, "num_stages": tk.num_stages, "enable_fp_fusion": False}


def _own_folder() -> Path:
    if not _FOLDER:
        _FOLDER.append(tempfile.TemporaryDirectory(prefix="tapestry-triton-"))
    return Path(_FOLDER[0].name)
