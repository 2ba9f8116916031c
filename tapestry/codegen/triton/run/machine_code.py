"""What the machine code of a compiled kernel says: registers, spills, instructions, loads in flight."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapestry.codegen.triton.run.launcher import tool

_GLOBAL = re.compile(r"^(LDG|STG|LDGSTS|global_(?:load|store)|buffer_(?:load|store))")
# "        /*0010*/   @!P0 LDG.E.128 R4, [R2.64] ;"
_CUDA_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?P<op>[A-Z][A-Z0-9_]*[\w.]*)(?P<args>[^;]*);")
MATRIX = ("UTCQMMA", "UTCIMMA", "UTCHMMA", "QGMMA", "IGMMA", "HGMMA", "QMMA", "IMMA", "HMMA", "DMMA", "v_mfma")  # fastest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a compiled kernel takes, as its machine code says.

    Attributes:
        registers: per thread.
        spills: bytes per thread that the assembler stores for want of registers; on AMD spilled vector and scalar registers.
        stack: bytes of stack per thread: spills, and arrays of a function that indexes one.
        shared: bytes of shared memory per program.
        instructions: count by opcode, such as ``HGMMA``, ``LDG.128``, ``v_mfma``.
        total: number of instructions.
        global_bytes, wide_bytes: bytes per thread that the listing's accesses of global memory move (not those by descriptors),
            and how many of these in accesses of 16 bytes.
        thread_loads: bytes per thread of loads that are under way at once (not those by descriptors).
        messages: what the assembler warns of, such as ``C7515 … wgmma.mma_async instructions are serialized due to …``.
    """

    registers: int
    spills: int
    shared: int
    instructions: Mapping[str, int]
    total: int
    stack: int = 0
    global_bytes: int = 0
    wide_bytes: int = 0
    thread_loads: int = 0
    messages: tuple[str, ...] = ()

    @property
    def serialized(self) -> bool:
        """Whether the assembler gave up running matrix instructions one behind the other."""
        return any("serialized" in m for m in self.messages)


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction: opcode with its modifiers, and operands."""

    op: str
    args: str

    @property
    def name(self) -> str:
        """The opcode alone."""
        return self.op.partition(".")[0]


def of_assembler(said: str, shared: int) -> Resources:
    """What ``ptxas -v`` says of a kernel: no instructions, which only a disassembler knows."""
    return Resources(
        registers=_number(r"Used (\d+) registers", said),
        spills=_number(r"(\d+) bytes spill stores", said),
        shared=shared,
        stack=_number(r"(\d+) bytes stack frame", said),
        instructions={},
        total=0,
        messages=messages(said),
    )


def of_cuda(cubin: bytes, said: str, shared: int) -> Resources:
    """Resources and instructions of a cubin, by the disassembler of the Triton wheel and what its assembler printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = _tool("nvdisasm", "-c", str(path))
    lines = read_disassembly(listing)
    counts = Counter(line.name for line in lines)
    counts += Counter(f"{line.name}.128" for line in lines if ".128" in line.op)
    moved = [_width(line.op) for line in lines if _GLOBAL.match(line.op)]
    return replace(
        of_assembler(said, shared),
        instructions=dict(counts),
        total=len(lines),
        global_bytes=sum(moved),
        wide_bytes=sum(n for n in moved if n == 16),
        thread_loads=thread_loads(lines),
    )


def of_amd(listing: str, shared: int) -> Resources:
    """Resources and opcodes from the assembly text and its metadata."""
    opcodes = re.findall(r"^\s+([a-z][a-z0-9]*_[a-z0-9_]+)", listing.partition(".amdgpu_metadata")[0], re.MULTILINE)
    counts = Counter(opcodes)
    counts["v_mfma"] = sum(n for op, n in counts.items() if op.startswith("v_mfma"))
    spills = _number(r"\.vgpr_spill_count:\s*(\d+)", listing) + _number(r"\.sgpr_spill_count:\s*(\d+)", listing)
    registers = _number(r"\.vgpr_count:\s*(\d+)", listing)
    moved = [_width(op) for op in opcodes if _GLOBAL.match(op)]
    return Resources(
        registers=registers,
        spills=spills,
        shared=shared,
        instructions=dict(counts),
        total=len(opcodes),
        global_bytes=sum(moved),
        wide_bytes=sum(n for n in moved if n == 16),
    )


def messages(said: str) -> tuple[str, ...]:
    """The assembler's numbered warnings, each once: ``(C7515) Potential Performance Loss: … in the function 'y'``."""
    warning = r"\((C\d+)\)\s*(?:Potential Performance Loss:\s*)?(.*?)(?: in (?:the )?function.*)?$"
    found = re.findall(warning, said, re.MULTILINE)
    return tuple(dict.fromkeys(" ".join(f"{code} {text}".split()) for code, text in found))


def read_disassembly(listing: str) -> list[Line]:
    """A disassembly's instructions in order."""
    return [Line(m["op"], m["args"]) for text in listing.splitlines() if (m := _CUDA_LINE.match(text))]


def thread_loads(lines: Sequence[Line]) -> int:
    """The most bytes per thread under way at once, in the order of the listing.

    A load into registers is under way until something names one of them; an asynchronous copy until a wait for its group.
    """
    most = copied = 0
    waited: dict[int, int] = {}  # bytes by the number of the load
    holds: dict[int, int] = {}  # register to the load that fills it
    groups: list[int] = []
    for at, line in enumerate(lines):
        named = {holds[r] for r in map(int, re.findall(r"\bR(\d+)", line.args)) if r in holds}
        for load in named:
            waited.pop(load, None)
        holds = {r: load for r, load in holds.items() if load not in named}
        if line.name == "LDG" and (into := re.match(r"\s*(?:P\w+,\s*)?R(\d+)", line.args)):
            waited[at] = _width(line.op)
            holds.update(dict.fromkeys(range(int(into.group(1)), int(into.group(1)) + max(1, waited[at] // 4)), at))
        elif line.name == "LDGSTS":
            copied += _width(line.op)
        elif line.name == "LDGDEPBAR":
            groups, copied = [*groups, copied], 0
        elif line.name == "DEPBAR" and (left := re.search(r"SB0, 0x([0-9a-f]+)", line.args)):
            groups = groups[len(groups) - min(len(groups), int(left.group(1), 16)) :]
        most = max(most, sum(waited.values()) + copied + sum(groups))
    return most


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
