"""Running generated kernels: on a CUDA or HIP device, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.run.interpreter import corrected
from tapestry.codegen.triton.run.triton_api import give_room, interpreted, module
from tapestry.errors import BuildError, TapestryError

if TYPE_CHECKING:
    import torch

_FUNCTIONS: dict[str, Any] = {}
_FOLDER: list[tempfile.TemporaryDirectory[str]] = []


def load(tk: TritonKernel, folder: Path | None = None, one: Pass | None = None) -> Any:
    """The jitted function of one of a kernel's passes (the last by default), from a file named by the hash of its source.

    Triton reads the source of what it compiles, so there must be a file; it is written to ``folder`` (by default one of
    this process's own), and one that is there already must hold exactly these bytes.

    Raises:
        BuildError: the file's content is not the kernel's source.
    """
    data = tk.source.encode()
    digest = hashlib.sha256(data).hexdigest()
    function = one.function if one is not None else tk.name
    if digest in _FUNCTIONS:
        return getattr(_FUNCTIONS[digest], function)
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
    _FUNCTIONS[digest] = module
    return getattr(module, function)


def launch(tk: TritonKernel, arrays: Sequence[torch.Tensor]) -> None:
    """Run a kernel on contiguous buffers, in the order of ``tk.args``; outputs are written in place.

    Raises:
        TapestryError: CPU tensors without Triton's interpreter.
    """
    assert len(arrays) == len(tk.args), f"{tk.name} takes {tk.args}"
    assert all(a.is_contiguous() for a in arrays), "buffers are row-major"
    on_host = interpreted()
    if not on_host and any(a.device.type == "cpu" for a in arrays):
        raise TapestryError(
            "a Triton kernel cannot run on the CPU",
            where=tk.name,
            hint="set TRITON_INTERPRET=1 before triton is imported, or use the torch-cpu target",
        )
    buffers = [*(aligned(a) for a in arrays), *scratch(tk, arrays[-1].device)]
    for one in tk.launches:
        function = load(tk, one=one)[one.grid]
        if on_host:
            with corrected():
                function(*arguments(one, buffers))
        else:
            give_room()
            function(*arguments(one, buffers), **launch_options(one))
    for given, used in zip(arrays, buffers, strict=False):
        if given is not used:
            given.copy_(used)  # an output that did not begin at a multiple of 16 bytes


def aligned(a: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one that does not begin at a multiple of 16 bytes, as kernels and descriptors expect."""
    return a if a.data_ptr() % 16 == 0 else a.clone()


def scratch(tk: TritonKernel, device: torch.device) -> list[torch.Tensor]:
    """New buffers for what lives between the passes."""
    import torch

    from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES

    return [torch.empty(n, dtype=TORCH_DTYPES[d], device=device) for d, n in tk.scratch]


def arguments(one: Pass, buffers: Sequence[torch.Tensor]) -> list[Any]:
    """The arguments of a pass: buffers as they are, or as host tensor descriptors."""
    out: list[Any] = []
    for param, at in zip(one.params, one.takes, strict=True):
        if (d := one.descriptors.get(param)) is None:
            out.append(_viewed(buffers[at], one.signature[param]))
            continue
        descriptor = module("triton.tools.tensor_descriptor").TensorDescriptor
        out.append(descriptor(_viewed(buffers[at], one.signature[param]), list(d.shape), list(d.strides), list(d.block)))
    return out


_FLOAT8 = {"fp8e4nv": "float8_e4m3fn", "fp8e4b8": "float8_e4m3fnuz", "fp8e5": "float8_e5m2", "fp8e5b16": "float8_e5m2fnuz"}


def _viewed(buffer: torch.Tensor, signature: str) -> torch.Tensor:
    """A buffer as what a parameter is declared to be: floats of 8 bits are held as bits."""
    import torch

    kind = narrow_view(signature)
    return buffer.view(getattr(torch, kind)) if kind else buffer


def narrow_view(signature: str) -> str:
    """As which type of torch's a parameter looks at its buffer, which is held as bits; "" for the buffer's own."""
    return next((kind for name, kind in _FLOAT8.items() if re.match(rf"(\*|tensordesc<){name}\b", signature)), "")


def launch_options(one: Pass) -> dict[str, Any]:
    """Compiler options: no contraction into fused multiply-adds, so that every device gives the same bits."""
    return {"num_warps": one.num_warps, "num_stages": one.num_stages, "enable_fp_fusion": False}


def _own_folder() -> Path:
    if not _FOLDER:
        _FOLDER.append(tempfile.TemporaryDirectory(prefix="tapestry-triton-"))
    return Path(_FOLDER[0].name)
