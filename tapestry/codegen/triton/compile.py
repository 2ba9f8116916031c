"""Ahead-of-time compilation, without a GPU, and what the machine code says: registers, spills, shared memory, instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapestry.codegen.triton.execute import launch_options, load
from tapestry.codegen.triton.source import TritonKernel
from tapestry.errors import TapestryError

# target -> (backend, architecture, threads per warp, bytes of shared memory that one program may use)
TARGETS: dict[str, tuple[str, int | str, int, int]] = {
    "sm80": ("cuda", 80, 32, 166912),
    "sm90": ("cuda", 90, 32, 232448),
    "sm100": ("cuda", 100, 32, 232448),
    "gfx942": ("hip", "gfx942", 64, 65536),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a compiled kernel takes, as its machine code says.

    Attributes:
        registers: per thread.
        spills: bytes of stack per thread on CUDA; spilled vector and scalar registers on AMD.
        shared: bytes of shared memory per program.
        instructions: count by opcode, such as ``HGMMA``, ``LDG.128``, ``v_mfma``.
        total: number of instructions.
    """

    registers: int
    spills: int
    shared: int
    instructions: Mapping[str, int]
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """``asm`` by stage (``ttir``, ``ttgir``, ``llir``, ``ptx`` and ``cubin``, or ``amdgcn`` and ``hsaco``)."""

    name: str
    target: str
    asm: Mapping[str, str | bytes]
    resources: Resources


def compile_ahead(tk: TritonKernel, target: str) -> Compiled:
    """Compile for ``sm80``, ``sm90``, ``sm100`` or ``gfx942`` (``triton:`` in front is fine); pointers are 16-byte aligned.

    Raises:
        TapestryError: unknown target, or this process has Triton in interpreter mode.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    plain = target.removeprefix("triton:")
    if plain not in TARGETS:
        raise TapestryError(f"unknown Triton target '{target}'", hint=f"one of {', '.join(TARGETS)}")
    if knobs.runtime.interpret:
        raise TapestryError("Triton cannot compile in interpreter mode", where=tk.name, hint="unset TRITON_INTERPRET")
    backend, arch, warp, _ = TARGETS[plain]
    aligned: Any = {(i,): [["tt.divisibility", 16]] for i in range(len(tk.args))}
    source = ASTSource(fn=load(tk), signature=dict(tk.signature), constexprs={}, attrs=aligned)
    options = launch_options(tk)
    if backend == "hip":  # 64 KiB of shared memory and no asynchronous copies worth three stages
        options["num_stages"] = min(2, tk.num_stages)
    built: Any = triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)
    shared = int(built.metadata.shared)
    resources = _cuda(built.asm["cubin"], shared) if backend == "cuda" else _amd(built.asm["amdgcn"], shared)
    return Compiled(name=tk.name, target=plain, asm=dict(built.asm), resources=resources)


def _cuda(cubin: bytes, shared: int) -> Resources:
    """Resources and opcodes by the disassemblers of the Triton wheel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "--dump-resource-usage", str(path))
        listing = _tool("nvdisasm", "-c", str(path))
    # "        /*0010*/   @!P0 LDG.E.128 R4, [R2.64] ;"
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*[\w.]*)", listing, re.MULTILINE)
    counts = Counter(op.split(".")[0] for op in opcodes)
    counts += Counter(f"{op.split('.')[0]}.128" for op in opcodes if ".128" in op)
    stack = _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
    return Resources(
        registers=_number(r"REG:(\d+)", usage), spills=stack, shared=shared, instructions=dict(counts), total=len(opcodes)
    )


def _amd(listing: str, shared: int) -> Resources:
    """Resources and opcodes from the assembly text and its metadata."""
    opcodes = re.findall(r"^\s+([a-z][a-z0-9]*_[a-z0-9_]+)", listing.partition(".amdgpu_metadata")[0], re.MULTILINE)
    counts = Counter(opcodes)
    counts["v_mfma"] = sum(n for op, n in counts.items() if op.startswith("v_mfma"))
    spills = _number(r"\.vgpr_spill_count:\s*(\d+)", listing) + _number(r"\.sgpr_spill_count:\s*(\d+)", listing)
    registers = _number(r"\.vgpr_count:\s*(\d+)", listing)
    return Resources(registers=registers, spills=spills, shared=shared, instructions=dict(counts), total=len(opcodes))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _tool(name: str, *args: str) -> str:
    """Output of a disassembler shipped in the Triton wheel."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(path), *args], capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout
