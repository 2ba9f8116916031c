"""Launching a compiled kernel directly: compiled once for its buffers, then one call of Triton's launcher with fixed arguments.

``kernel[grid](…)`` works out types, alignments and a cache key at every call, 9 to 11 us; the launcher alone takes about 5 us,
and a captured CUDA graph none. In the interpreter nothing is compiled, and the ordinary launch is bound instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.run.execute import arguments, launch, launch_options, load, scratch
from tapestry.codegen.triton.run.triton_api import ALIGNMENT, Architecture, compiled, driver, here, interpreted, module
from tapestry.errors import TapestryError

if TYPE_CHECKING:
    import torch

Call = Callable[[], None]
Shared = dict[tuple[int, str], "list[torch.Tensor]"]
_COMPILED: dict[tuple[object, ...], Any] = {}


def bind(tk: TritonKernel, arrays: Sequence[torch.Tensor], shared: Shared | None = None) -> Call:
    """A function that launches a kernel on these buffers (in the order of ``tk.args``), on the stream that is current then.

    Compiling and loading happen here, so that the function may be called while a CUDA graph is captured. ``shared`` keeps what
    lives between a kernel's passes, for all functions that are bound with it and so must not run at the same time.

    Raises:
        TapestryError: the kernel needs more than the GPU has. Called with arrays on the CPU, the function raises one without
            Triton's interpreter.
    """
    assert len(arrays) == len(tk.args), f"{tk.name} takes {tk.args}"
    assert all(a.is_contiguous() for a in arrays), "buffers are row-major"
    if not tk.launches:
        return lambda: None
    held = tuple(arrays)
    if interpreted() or held[0].device.type == "cpu":
        return lambda: launch(tk, held)
    buffers = (*held, *_between(tk, held[0].device, {} if shared is None else shared))
    calls = tuple(_bound(tk, one, buffers) for one in tk.launches)

    def call(keep: tuple[torch.Tensor, ...] = buffers) -> None:
        for each in calls:
            each()

    return calls[0] if len(calls) == 1 else call


def _between(tk: TritonKernel, device: torch.device, shared: Shared) -> list[torch.Tensor]:
    """Buffers between the passes: those of kernels bound before, where they are large enough."""
    out: list[torch.Tensor] = []
    for k, (dtype, n) in enumerate(tk.scratch):
        found = next((a for a in shared.get((k, dtype), []) if a.numel() >= n), None)
        if found is None:
            found = scratch(tk, device)[k]
            shared.setdefault((k, dtype), []).append(found)
        out.append(found[:n])
    return out


def _bound(tk: TritonKernel, one: Pass, buffers: tuple[torch.Tensor, ...]) -> Call:
    """One launch on these buffers."""
    taken = tuple(buffers[k] for k in one.takes)
    pointers = [i for i, p in enumerate(one.params) if p not in one.descriptors]
    aligned = tuple(i for i in pointers if taken[i].data_ptr() % ALIGNMENT == 0)
    device = taken[0].device.index
    loaded = _loaded(tk, one, aligned, device)
    run, function, packed = loaded.run, loaded.function, loaded.packed_metadata
    x, y, z = (*one.grid, 1, 1)[:3]
    stream = driver().get_current_stream
    values = arguments(one, buffers)  # pointers as numbers: the launcher asks the driver about anything else
    values = [v if p in one.descriptors else v.data_ptr() for p, v in zip(one.params, values, strict=True)]

    def call(keep: tuple[torch.Tensor, ...] = taken) -> None:
        run(x, y, z, stream(device), function, packed, None, None, None, *values)

    return call


def compile_all(made: Sequence[TritonKernel], architecture: Architecture, threads: int) -> None:
    """Fill Triton's own cache with kernels on aligned buffers, several at a time: its passes and ptxas run beside each other.

    A kernel that does not compile is left to `bind`, which says so.
    """
    left = [(tk, one) for tk in {tk.source: tk for tk in made}.values() for one in tk.launches]
    for tk, one in left:
        load(tk, one=one)  # modules are imported one after another
    with ThreadPoolExecutor(max(1, threads)) as pool:
        wait([pool.submit(compile_pass, tk, one, architecture) for tk, one in left])


def compile_pass(tk: TritonKernel, one: Pass, architecture: Architecture, aligned: tuple[int, ...] | None = None) -> Any:
    """A pass compiled, not loaded; ``aligned`` lists the arguments that begin at multiples of 16 bytes (default: all)."""
    which = [i for i, p in enumerate(one.params) if p not in one.descriptors] if aligned is None else aligned
    return compiled(load(tk, one=one), one.signature, which, architecture, launch_options(one))


def _loaded(tk: TritonKernel, one: Pass, aligned: tuple[int, ...], device: int) -> Any:
    """A pass as compiled for a device and loaded there; equal ones are compiled once."""
    options = tuple(sorted(launch_options(one).items()))
    key = (hashlib.sha256(tk.source.encode()).hexdigest(), one.function, options, aligned, device)
    if key not in _COMPILED:
        try:
            built = compile_pass(tk, one, here(), aligned)
        except Exception as e:  # whatever a pass of Triton's, or the assembler, stumbles over
            raise TapestryError("the kernel does not compile", where=tk.name, why=f"{type(e).__name__}: {first_line(e)}") from e
        try:
            assert built.run is not None  # loads the machine code
        except module("triton.runtime.errors").OutOfResources as e:
            raise TapestryError("the kernel needs more than this GPU has", where=tk.name, why=str(e)) from None
        _COMPILED[key] = built
    return _COMPILED[key]


def first_line(e: BaseException) -> str:
    """What an error says, in a line."""
    return (str(e).strip().splitlines() or [""])[0][:200] or type(e).__name__
