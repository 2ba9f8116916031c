"""What is used of the ``triton`` package, which has no type stubs. It is imported at first use: that takes a second."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

Architecture = tuple[str, int | str, int]  # Triton's backend, architecture and threads per warp
ALIGNMENT = 16  # bytes: of pointers that 128-bit accesses may start at


def module(name: str) -> Any:
    """A module of Triton by its full name."""
    return import_module(name)


def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    return bool(module("triton").knobs.runtime.interpret)


def driver() -> Any:
    """The driver of the current GPU."""
    return module("triton.runtime").driver.active


def here() -> Architecture:
    """The architecture of the current GPU."""
    target = driver().get_current_target()
    return target.backend, target.arch, target.warp_size


def shared_memory() -> int:
    """Bytes of shared memory that one program may use on the current GPU."""
    return int(driver().utils.get_device_properties(driver().get_current_device())["max_shared_mem"])


def compiled(
    function: Any, signature: Mapping[str, str], aligned: Iterable[int], target: Architecture, options: Mapping[str, Any]
) -> Any:
    """A jitted function compiled for a target; ``aligned`` lists the arguments that begin at multiples of 16 bytes."""
    attributes = {(i,): [["tt.divisibility", ALIGNMENT]] for i in aligned}
    source = module("triton.compiler").ASTSource(fn=function, signature=dict(signature), constexprs={}, attrs=attributes)
    gpu = module("triton.backends.compiler").GPUTarget(*target)
    return module("triton").compile(source, target=gpu, options=dict(options))


def assembled(ptx: str, target: Architecture) -> str:
    """What Triton's assembler prints of a kernel (``-v``), by the command that Triton runs, which throws it away."""
    nvidia, said = module("triton").knobs.nvidia, io.StringIO()
    backend = module("triton.compiler").make_backend(module("triton.backends.compiler").GPUTarget(*target))
    with nvidia.scope(), redirect_stdout(said):
        nvidia.dump_ptxas_log = True
        backend.make_cubin(ptx, {}, backend.parse_options({"enable_fp_fusion": False}), target[1])
    return said.getvalue()


def tool(name: str) -> Path:
    """A disassembler that is shipped in the Triton wheel."""
    return Path(module("triton").__file__).parent / "backends" / "nvidia" / "bin" / name
