"""Launching a compiled kernel directly: compiled once for its buffers, then one call of Triton's launcher with fixed arguments.

``kernel[grid](…)`` works out types, alignments and a cache key at every call, 9 to 11 us; the launcher alone takes about 5 us,
and a captured CUDA graph none. In the interpreter nothing is compiled, and the ordinary launch is bound instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tapestry.codegen.triton.execute import launch, launch_options, load
from tapestry.codegen.triton.source import TritonKernel
from tapestry.errors import TapestryError

if TYPE_CHECKING:
    import torch

Call = Callable[[], None]
_COMPILED: dict[tuple[object, ...], Any] = {}
_ALIGNED = 16  # bytes: of pointers that 128-bit accesses may start at


def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def bind(tk: TritonKernel, arrays: Sequence[torch.Tensor]) -> Call:
    """A function that launches a kernel on these buffers (in the order of ``tk.args``), on the stream that is current then.

    Compiling and loading happen here, so that the function may be called while a CUDA graph is captured.

    Raises:
        TapestryError: the kernel needs more than the GPU has. Called with arrays on the CPU, the function raises one without
            Triton's interpreter.
    """
    assert len(arrays) == len(tk.args), f"{tk.name} takes {tk.args}"
    assert all(a.is_contiguous() for a in arrays), "buffers are row-major"
    if 0 in tk.grid:
        return lambda: None
    held = tuple(arrays)
    if interpreted() or held[0].device.type == "cpu":
        return lambda: launch(tk, held)
    from triton.runtime import driver

    aligned = tuple(i for i, a in enumerate(held) if a.data_ptr() % _ALIGNED == 0)
    device = held[0].device.index
    compiled = _compiled(tk, aligned, device)
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = (*tk.grid, 1, 1)[:3]
    stream = driver.active.get_current_stream
    pointers = tuple(a.data_ptr() for a in held)  # as numbers: the launcher asks the driver about anything else

    def call(keep: tuple[torch.Tensor, ...] = held) -> None:
        run(x, y, z, stream(device), function, packed, None, None, None, *pointers)

    return call


def _compiled(tk: TritonKernel, aligned: tuple[int, ...], device: int) -> Any:
    """The kernel as compiled for a device and loaded there; equal ones are compiled once."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources

    options = launch_options(tk)
    key = (hashlib.sha256(tk.source.encode()).hexdigest(), tuple(sorted(options.items())), aligned, device)
    if key not in _COMPILED:
        attributes: Any = {(i,): [["tt.divisibility", _ALIGNED]] for i in aligned}
        source = ASTSource(fn=load(tk), signature=dict(tk.signature), constexprs={}, attrs=attributes)
        built: Any = triton.compile(source, target=driver.active.get_current_target(), options=options)
        try:
            assert built.run is not None  # loads the machine code
        except OutOfResources as e:
            raise TapestryError("the kernel needs more than this GPU has", where=tk.name, why=str(e)) from None
        _COMPILED[key] = built
    return _COMPILED[key]
