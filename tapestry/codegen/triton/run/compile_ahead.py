"""Ahead-of-time compilation, without a GPU, and what the machine code says: registers, spills, shared memory, instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.run.launcher import compile_pass
from tapestry.codegen.triton.run.triton_api import interpreted, tool
from tapestry.codegen.triton.task.chips import CHIPS, plain
from tapestry.errors import TapestryError

_GLOBAL = re.compile(r"^(LDG|STG|LDGSTS|global_(?:load|store)|buffer_(?:load|store))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a compiled kernel takes, as its machine code says.

    Attributes:
        registers: per thread.
        spills: bytes of stack per thread on CUDA; spilled vector and scalar registers on AMD.
        shared: bytes of shared memory per program.
        instructions: count by opcode, such as ``HGMMA``, ``LDG.128``, ``v_mfma``.
        total: number of instructions.
        global_bytes, wide_bytes: bytes per thread that the listing's accesses of global memory move (not those by descriptors),
            and how many of these in accesses of 16 bytes.
    """

    registers: int
    spills: int
    shared: int
    instructions: Mapping[str, int]
    total: int
    global_bytes: int = 0
    wide_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """``asm`` by stage (``ttir``, ``ttgir``, ``llir``, ``ptx`` and ``cubin``, or ``amdgcn`` and ``hsaco``)."""

    name: str
    target: str
    asm: Mapping[str, str | bytes]
    resources: Resources


def compile_ahead(tk: TritonKernel, target: str) -> tuple[Compiled, ...]:
    """Compile every pass for a target of `chips.CHIPS` (``triton:`` in front is fine).

    Buffers begin at multiples of 16 bytes.

    Raises:
        TapestryError: unknown target, a kernel with descriptors for a target without, or Triton is in interpreter mode.
    """
    name = plain(target)
    if interpreted():
        raise TapestryError("Triton cannot compile in interpreter mode", where=tk.name, hint="unset TRITON_INTERPRET")
    if not CHIPS[name].descriptors and any(p.descriptors for p in tk.passes):
        raise TapestryError(
            f"{name} has no tensor descriptors", where=tk.name, why=f"generated for {tk.target}", hint="generate for the target"
        )
    return tuple(_compiled(tk, one, name) for one in tk.passes)


def _compiled(tk: TritonKernel, one: Pass, name: str) -> Compiled:
    chip = CHIPS[name]
    if chip.backend == "hip":  # 64 KiB of shared memory and no asynchronous copies worth three stages
        one = replace(one, num_stages=min(2, one.num_stages))
    built = compile_pass(tk, one, (chip.backend, chip.arch, chip.warp))
    shared = int(built.metadata.shared)
    resources = _cuda(built.asm["cubin"], shared) if chip.backend == "cuda" else _amd(built.asm["amdgcn"], shared)
    return Compiled(name=one.function, target=name, asm=dict(built.asm), resources=resources)


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
    moved = [(op, _width(op)) for op in opcodes if _GLOBAL.match(op)]
    stack = _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
    return Resources(
        registers=_number(r"REG:(\d+)", usage), spills=stack, shared=shared, instructions=dict(counts), total=len(opcodes),
        global_bytes=sum(n for _, n in moved), wide_bytes=sum(n for _, n in moved if n == 16),
    )  # fmt: skip


def _amd(listing: str, shared: int) -> Resources:
    """Resources and opcodes from the assembly text and its metadata."""
    opcodes = re.findall(r"^\s+([a-z][a-z0-9]*_[a-z0-9_]+)", listing.partition(".amdgpu_metadata")[0], re.MULTILINE)
    counts = Counter(opcodes)
    counts["v_mfma"] = sum(n for op, n in counts.items() if op.startswith("v_mfma"))
    spills = _number(r"\.vgpr_spill_count:\s*(\d+)", listing) + _number(r"\.sgpr_spill_count:\s*(\d+)", listing)
    registers = _number(r"\.vgpr_count:\s*(\d+)", listing)
    moved = [_width(op) for op in opcodes if _GLOBAL.match(op)]
    return Resources(
        registers=registers, spills=spills, shared=shared, instructions=dict(counts), total=len(opcodes),
        global_bytes=sum(moved), wide_bytes=sum(n for n in moved if n == 16),
    )  # fmt: skip


def _width(opcode: str) -> int:
    """Bytes per thread of an access: ``LDG.E.128``, ``STG.E.U16``, ``global_load_dwordx4``; 4 where nothing is said."""
    if bits := _number(r"\.(?:[US])?(8|16|64|128|256)(?:\.|$)", opcode):
        return min(16, bits // 8)
    if words := _number(r"dwordx(\d)", opcode):
        return 4 * words
    return 1 if re.search(r"(byte|_[us]?b8)", opcode) else 2 if re.search(r"(short|_[us]?b16|d16)", opcode) else 4


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _tool(name: str, *args: str) -> str:
    """Output of a disassembler shipped in the Triton wheel."""
    done = subprocess.run([str(tool(name)), *args], capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout
