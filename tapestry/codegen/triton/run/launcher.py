"""Launching a compiled kernel directly: compiled once for its buffers, then one call of Triton's launcher with fixed arguments.

``kernel[grid](…)`` works out types, alignments and a cache key at every call, 9 to 11 us; the launcher alone takes about 5 us,
and a captured CUDA graph none. In the interpreter nothing is compiled, and the ordinary launch is bound instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, cast

import torch

from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.run.interpreter import corrected
from tapestry.errors import BuildError, TapestryError
from tapestry.ir.types import itemsize

Tensor = torch.Tensor


# What is used of the ``triton`` package, which has no type stubs. It is imported at first use: that takes a second.


Architecture = tuple[str, int | str, int]  # Triton's backend, architecture and threads per warp
MOST_REGISTERS = 255  # of a thread
ALIGNMENT = 16  # bytes: of pointers that 128-bit accesses may start at


def triton_module(name: str) -> Any:
    """A module of Triton by its full name."""
    return import_module(name)


def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    return bool(triton_module("triton").knobs.runtime.interpret)


def driver() -> Any:
    """The driver of the current GPU."""
    return triton_module("triton.runtime").driver.active


def give_room() -> None:
    """Let kernels that this thread launches have memory for descriptors that their programs make, from torch's allocator."""

    def room(size: int, alignment: int, stream: int | None) -> Any:
        torch = import_module("torch")
        return torch.empty(size, dtype=torch.int8, device="cuda")

    triton_module("triton").set_allocator(room)


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
    source = triton_module("triton.compiler").ASTSource(fn=function, signature=dict(signature), constexprs={}, attrs=attributes)
    return triton_module("triton").compile(source, target=_gpu_target(target), options=dict(options))


def _gpu_target(architecture: Architecture) -> Any:
    return triton_module("triton.backends.compiler").GPUTarget(*architecture)


class _ByThread(io.TextIOBase):
    """Standard output while several threads compile: what a thread prints that has ``parts.said`` is kept there."""

    def __init__(self, otherwise: TextIO) -> None:
        self.otherwise, self.parts = otherwise, threading.local()

    def write(self, text: str, /) -> int:
        """Keep it, or print it."""
        said = getattr(self.parts, "said", None)
        return (self.otherwise if said is None else said).write(text)

    def flush(self) -> None:
        """Of what is printed."""
        self.otherwise.flush()


Assembled = tuple[Any, str]  # a compiled pass, and what the assembler printed of it (``ptxas -v``)


def assemble_all(passes: Sequence[tuple[TritonKernel, Pass]], architecture: Architecture) -> list[Assembled | Exception]:
    """Compile several passes beside each other, each once, and keep what the assembler says of them, which Triton throws away.

    What Triton has in its cache already is assembled again, by the command that Triton runs.
    """
    nvidia, here = triton_module("triton").knobs.nvidia, _ByThread(sys.stdout)

    def work(tk: TritonKernel, one: Pass) -> Assembled | Exception:
        here.parts.said = io.StringIO()
        try:
            built = compile_pass(tk, one, architecture)
            if architecture[0] == "cuda" and not here.parts.said.getvalue():
                backend = triton_module("triton.compiler").make_backend(_gpu_target(architecture))
                backend.make_cubin(built.asm["ptx"], {}, backend.parse_options({"enable_fp_fusion": False}), architecture[1])
        except Exception as e:  # whatever a pass of Triton's, or the assembler, stumbles over
            return e
        return built, here.parts.said.getvalue()

    for tk, one in passes:
        load(tk, one=one)  # modules are imported one after another
    with nvidia.scope(), redirect_stdout(cast("TextIO", here)), ThreadPoolExecutor(os.cpu_count()) as pool:
        nvidia.dump_ptxas_log = True
        return list(pool.map(work, *zip(*passes, strict=True))) if passes else []


def tool(name: str) -> Path:
    """A disassembler that is shipped in the Triton wheel."""
    return Path(triton_module("triton").__file__).parent / "backends" / "nvidia" / "bin" / name


# Running generated kernels: on a CUDA or HIP device, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).


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
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    _FUNCTIONS[digest] = loaded
    return getattr(loaded, function)


def launch(
    tk: TritonKernel,
    arrays: Sequence[torch.Tensor],
    between: Sequence[torch.Tensor] | None = None,
    passes: Sequence[Pass] | None = None,
) -> None:
    """Run a kernel on contiguous buffers, in the order of ``tk.args``; outputs are written in place.

    Args:
        between: what lives between the passes; new buffers by default.
        passes: some of them.

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
    buffers = [*(aligned(a) for a in arrays), *(scratch(tk, arrays[-1].device) if between is None else between)]
    for one in tk.launches if passes is None else passes:
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
        descriptor = triton_module("triton.tools.tensor_descriptor").TensorDescriptor
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
    limit = {"maxnreg": one.registers} if one.registers < MOST_REGISTERS else {}
    return {"num_warps": one.num_warps, "num_stages": one.num_stages, "enable_fp_fusion": False, **limit}


def _own_folder() -> Path:
    if not _FOLDER:
        _FOLDER.append(tempfile.TemporaryDirectory(prefix="tapestry-triton-"))
    return Path(_FOLDER[0].name)


Call = Callable[[], None]
Shared = dict[tuple[int, str], "list[torch.Tensor]"]
_COMPILED: dict[tuple[object, ...], Any] = {}


def done_once(tk: TritonKernel, fixed: Collection[int]) -> tuple[list[Pass], int]:
    """The passes of a kernel that need not be run again where some of its arguments never change (by their places in
    ``tk.args``): copies of weights in another order. With the bytes that they leave between the passes."""
    last = len(tk.args)
    found = [p for p in tk.launches[:-1] if all(k in fixed or k >= last for k in p.takes)]
    left = {k - last for p in found for k in p.takes if k >= last}
    return found, sum(n * itemsize(d) for k, (d, n) in enumerate(tk.scratch) if k in left)


def bind(tk: TritonKernel, arrays: Sequence[torch.Tensor], shared: Shared | None = None, fixed: Collection[int] = ()) -> Call:
    """A function that launches a kernel on these buffers (in the order of ``tk.args``), on the stream that is current then.

    Compiling and loading happen here, so that the function may be called while a CUDA graph is captured. ``shared`` keeps what
    lives between a kernel's passes, for all functions that are bound with it and so must not run at the same time. What depends
    on ``fixed`` arguments alone is done here, once (`done_once`).

    Raises:
        TapestryError: the kernel needs more than the GPU has. Called with arrays on the CPU, the function raises one without
            Triton's interpreter.
    """
    assert len(arrays) == len(tk.args), f"{tk.name} takes {tk.args}"
    assert all(a.is_contiguous() for a in arrays), "buffers are row-major"
    if not tk.launches:
        return lambda: None
    held = tuple(arrays)
    once, device = done_once(tk, fixed)[0], held[0].device
    later = [one for one in tk.launches if one not in once]
    if interpreted() or device.type == "cpu":
        kept = scratch(tk, device) if once else None
        launch(tk, held, kept, once)
        return lambda: launch(tk, held, kept, later)
    buffers = (*held, *_between(tk, device, {} if shared is None or once else shared))
    for one in once:
        _bound(tk, one, buffers)()
    calls = tuple(_bound(tk, one, buffers) for one in later)

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
    room = int(loaded.metadata.global_scratch_size)  # for descriptors that programs make
    values = arguments(one, buffers)  # pointers as numbers: the launcher asks the driver about anything else
    values = [v if p in one.descriptors else v.data_ptr() for p, v in zip(one.params, values, strict=True)]

    def call(keep: tuple[torch.Tensor, ...] = taken) -> None:
        if room:
            give_room()
        run(x, y, z, stream(device), function, packed, None, None, None, *values)

    return call


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
        except triton_module("triton.runtime.errors").OutOfResources as e:
            raise TapestryError("the kernel needs more than this GPU has", where=tk.name, why=str(e)) from None
        _COMPILED[key] = built
    return _COMPILED[key]


def first_line(e: BaseException) -> str:
    """What an error says, in a line."""
    return (str(e).strip().splitlines() or [""])[0][:200] or type(e).__name__
