"""What the machine code of a compiled kernel says: registers, spills, instructions, its hottest loop, loads in flight."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, cast

import msgspec

from tapestry import flags
from tapestry.build.store import new_file
from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.kernel_config import predicted, roofline, work_of
from tapestry.codegen.triton.run.launcher import Assembled, assemble_all, first_line, interpreted, launch_options, tool
from tapestry.codegen.triton.task.descriptors import kernel_form
from tapestry.codegen.triton.task.lowered import points
from tapestry.codegen.triton.task.primitives import CHIPS, Chip, chip_of, plain
from tapestry.codegen.triton.task.tiles import on_chip
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.types import itemsize

_GLOBAL = re.compile(r"^(LDG|STG|LDGSTS|global_(?:load|store)|buffer_(?:load|store))")
# "        /*0010*/   @!P0 LDG.E.128 R4, [R2.64] ;"
_CUDA_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?P<if>@!?U?P\w+\s+)?(?P<op>[A-Z][A-Z0-9_]*[\w.]*)(?P<args>[^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_SPIN = 16  # instructions: a loop of fewer only waits for a barrier
MATRIX = ("UTCQMMA", "UTCIMMA", "UTCHMMA", "QGMMA", "IGMMA", "HGMMA", "QMMA", "IMMA", "HMMA", "DMMA", "v_mfma")  # fastest first
_KINDS = (
    ("matrix", re.compile("|".join(MATRIX))),
    ("spills", re.compile("LDL|STL")),
    ("global", re.compile("LDG|STG|UTMA|UBLK|ATOM|RED|LD$|ST$")),
    ("shared", re.compile("LDS|STS|LDSM|STSM|LDTM|STTM|LDT|STT")),
    ("waits", re.compile("BAR|SYNCS|DEPBAR|LDGDEPBAR|WARPGROUP|MEMBAR|FENCE|WARPSYNC|UTCBAR|CCTL|NANOSLEEP|ERRBAR|YIELD")),
    ("floats", re.compile("MUFU|F[A-Z]|H[A-Z]|D(ADD|MUL|FMA|SETP|MNMX)|I2F|F2I")),
)


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
        loop: instructions of the loop that counts: of the innermost ones the longest with matrix instructions, else the
            longest; 0 without any (and on AMD, whose listing is not taken apart).
        loop_mix: these by kind: matrix, spills, global, shared, waits, floats, other (integers, addresses, control).
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
    loop: int = 0
    loop_mix: Mapping[str, int] = field(default_factory=dict[str, int])
    thread_loads: int = 0
    messages: tuple[str, ...] = ()

    @property
    def serialized(self) -> bool:
        """Whether the assembler gave up running matrix instructions one behind the other."""
        return any("serialized" in m for m in self.messages)


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction: opcode with its modifiers, operands, and whether a predicate guards it."""

    op: str
    args: str
    guarded: bool

    @property
    def name(self) -> str:
        """The opcode alone."""
        return self.op.partition(".")[0]


def of_assembler(said: str, shared: int) -> Resources:
    """What ``ptxas -v`` says of a kernel: no instructions, which only a disassembler knows."""
    return Resources(
        registers=_number(r"Used (\d+) registers", said), spills=_number(r"(\d+) bytes spill stores", said), shared=shared,
        stack=_number(r"(\d+) bytes stack frame", said), instructions={}, total=0, messages=messages(said),
    )  # fmt: skip


def of_cuda(cubin: bytes, said: str, shared: int) -> Resources:
    """Resources and instructions of a cubin, by the disassembler of the Triton wheel and what its assembler printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = _tool("nvdisasm", "-c", str(path))
    lines, labels = read_disassembly(listing)
    counts = Counter(line.name for line in lines)
    counts += Counter(f"{line.name}.128" for line in lines if ".128" in line.op)
    moved = [_width(line.op) for line in lines if _GLOBAL.match(line.op)]
    inside = main_loop(lines, labels)
    return replace(
        of_assembler(said, shared), instructions=dict(counts), total=len(lines),
        global_bytes=sum(moved), wide_bytes=sum(n for n in moved if n == 16), loop=len(inside),
        loop_mix=dict(Counter(kind_of(line) for line in inside)), thread_loads=thread_loads(lines),
    )  # fmt: skip


def of_amd(listing: str, shared: int) -> Resources:
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


def messages(said: str) -> tuple[str, ...]:
    """The assembler's numbered warnings, each once: ``(C7515) Potential Performance Loss: … in the function 'y'``."""
    warning = r"\((C\d+)\)\s*(?:Potential Performance Loss:\s*)?(.*?)(?: in (?:the )?function.*)?$"
    found = re.findall(warning, said, re.MULTILINE)
    return tuple(dict.fromkeys(" ".join(f"{code} {text}".split()) for code, text in found))


def read_disassembly(listing: str) -> tuple[list[Line], dict[str, int]]:
    """A disassembly's instructions in order, and before which of them each label stands."""
    lines: list[Line] = []
    labels: dict[str, int] = {}
    for text in listing.splitlines():
        if m := _LABEL.match(text):
            labels[m.group(1)] = len(lines)
        elif m := _CUDA_LINE.match(text):
            lines.append(Line(m["op"], m["args"], bool(m["if"])))
    return lines, labels


def main_loop(lines: Sequence[Line], labels: Mapping[str, int]) -> Sequence[Line]:
    """The instructions of the innermost loop that counts (see `Resources`); none where there is no loop.

    A loop is what a branch on a condition goes back over; other branches back come from code that was moved out of the way.
    """
    found: list[tuple[int, int]] = []
    for at, line in enumerate(lines):
        if line.name != "BRA" or not (line.guarded or re.search(r"\bU?P\d", line.args)):
            continue
        target = re.search(r"\.L_x_\d+", line.args)
        first = labels.get(target.group(), at + 1) if target else at + 1
        if at - first >= _SPIN:
            found.append((first, at))
    inner = [(a, b) for a, b in found if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)]
    inside = [lines[a : b + 1] for a, b in inner]
    multiplying = [part for part in inside if any(kind_of(line) == "matrix" for line in part)]
    found_loops = multiplying or inside
    return max(found_loops, key=len) if found_loops else ()


def kind_of(line: Line) -> str:
    """What an instruction is for: one of the kinds of ``loop_mix``."""
    return next((kind for kind, pattern in _KINDS if pattern.match(line.name)), "other")


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


# Ahead-of-time compilation, without a GPU, and what the machine code of it says.


FORMAT = 3  # of what is kept of a compiled kernel


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
        TapestryError: unknown target, a kernel with descriptors for a target without or that Triton or its assembler fails on,
            or Triton is in interpreter mode.
        OSError, SubprocessError: there is no disassembler, or it fails.
    """
    found = _compiled([tk], target)[0]
    if isinstance(found, Exception):
        raise found
    return tuple(_looked_at(one, each, plain(target)) for one, each in zip(tk.passes, found, strict=True))


def measured(made: Sequence[TritonKernel], target: str, listing: bool = False) -> list[tuple[Resources, ...] | Exception]:
    """What every pass of each kernel takes; in the place of a kernel that cannot be compiled, why (see `compile_ahead`).

    They are compiled once on a machine, several at a time, and kept in the user's cache under the hash of all they depend on.

    Args:
        listing: count instructions, too, by a disassembler.
    """
    out: list[tuple[Resources, ...] | Exception | None] = [None] * len(made)
    for k, tk in enumerate(made):
        with suppress(OSError, msgspec.MsgspecError):
            out[k] = msgspec.json.decode(_kept(tk, target, listing).read_bytes(), type=tuple[Resources, ...])
    left = [k for k, found in enumerate(out) if found is None]
    for k, found in zip(left, _compiled([made[k] for k in left], target), strict=True):
        out[k] = found if isinstance(found, Exception) else _resources(made[k], found, target, listing)
    return cast("list[tuple[Resources, ...] | Exception]", out)


def _resources(tk: TritonKernel, found: Sequence[Assembled], target: str, listing: bool) -> tuple[Resources, ...] | Exception:
    name = plain(target)
    try:
        if listing or CHIPS[name].backend != "cuda":
            out = tuple(_looked_at(one, each, name).resources for one, each in zip(tk.passes, found, strict=True))
        else:
            out = tuple(of_assembler(said, int(built.metadata.shared)) for built, said in found)
    except (OSError, SubprocessError) as e:  # there is no disassembler, or it fails
        return e
    with suppress(OSError), new_file(_kept(tk, target, listing)) as temporary:
        temporary.write_bytes(msgspec.json.encode(out))
    return out


def _looked_at(one: Pass, assembled: Assembled, name: str) -> Compiled:
    built, said = assembled
    shared = int(built.metadata.shared)
    cuda = CHIPS[name].backend == "cuda"
    resources = of_cuda(built.asm["cubin"], said, shared) if cuda else of_amd(built.asm["amdgcn"], shared)
    return Compiled(name=one.function, target=name, asm=dict(built.asm), resources=resources)


def _compiled(made: Sequence[TritonKernel], target: str) -> list[list[Assembled] | Exception]:
    """The passes of kernels, all beside each other."""
    chip, refused = CHIPS[plain(target)], [_refusal(tk, plain(target)) for tk in made]
    if chip.backend == "hip":  # 64 KiB of shared memory and no asynchronous copies worth three stages
        made = [replace(tk, passes=tuple(replace(p, num_stages=min(2, p.num_stages)) for p in tk.passes)) for tk in made]
    todo = [(tk, one) for tk, why in zip(made, refused, strict=True) if why is None for one in tk.passes]
    found = iter(assemble_all(todo, (chip.backend, chip.arch, chip.warp)))
    return [why or _or_refused(tk, [next(found) for _ in tk.passes]) for tk, why in zip(made, refused, strict=True)]


def _refusal(tk: TritonKernel, name: str) -> TapestryError | None:
    """Why a kernel is not compiled for a target, as `compile_ahead` says."""
    if interpreted():
        return TapestryError("Triton cannot compile in interpreter mode", where=tk.name, hint="unset TRITON_INTERPRET")
    if not CHIPS[name].descriptors and any(p.descriptors for p in tk.passes):
        why = f"generated for {tk.target}"
        return TapestryError(f"{name} has no tensor descriptors", where=tk.name, why=why, hint="generate for the target")
    return None


def _or_refused(tk: TritonKernel, passes: Sequence[Assembled | Exception]) -> list[Assembled] | Exception:
    """The passes of a kernel, or what it is refused with; what this machine lacks is no fault of the kernel's."""
    bad = next((p for p in passes if isinstance(p, Exception)), None)
    if bad is None:
        return cast("list[Assembled]", [*passes])
    if isinstance(bad, OSError | SubprocessError | ModuleNotFoundError | TapestryError):
        return bad
    return TapestryError("the kernel does not compile", where=tk.name, why=f"{type(bad).__name__}: {first_line(bad)}")


def _kept(tk: TritonKernel, target: str, listing: bool) -> Path:
    """The file with what a kernel takes."""
    return flags.cache_folder() / "machine-code" / f"{_digest(tk, target, listing)}.json"


def _digest(tk: TritonKernel, target: str, listing: bool) -> str:
    """Of what the machine code and its measure depend on."""
    passes = [(p.function, sorted(launch_options(p).items()), sorted(p.signature.items())) for p in tk.passes]
    about = (FORMAT, plain(target), version("triton"), tk.source, passes, listing)
    return hashlib.sha256(repr(about).encode()).hexdigest()[:40]


# Rows of ``tapestry kernels``: what a compiled kernel takes and must do, from machine code, limits and exact footprints.


def occupancy(found: Resources, warps: int, chip: Chip) -> float:
    """Resident warps of a multiprocessor over the most that it holds: what registers, shared memory and programs leave.

    Source: CUDA Occupancy Calculator; registers are allocated per warp in units of ``chip.grain``.
    """
    each = -(-max(1, found.registers) * chip.warp // chip.grain) * chip.grain
    by_registers = chip.registers // each // warps
    by_shared = chip.shared_unit // (found.shared + 1024) if found.shared else chip.programs
    programs = min(chip.programs, chip.warps // warps, by_registers, by_shared)
    return programs * warps / chip.warps


def matrix_instruction(found: Resources) -> str:
    """The opcode that products run on; ``""`` for none."""
    return next((m for m in MATRIX if found.instructions.get(m)), "")


def rows_of(
    graph: Graph, kernel: Kernel, made: TritonKernel, stem: str, compiled: Sequence[Compiled], launches: int,
    refused: Sequence[Mapping[str, Any]] = (), gpu: str = "",
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each pass of a kernel; work and times are those of the whole kernel and stand in its last row.

    Args:
        refused: candidates that were passed over before this one.
        gpu: the card that the plan is for.
    """
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    chip = chip_of(compiled[0].target, gpu)
    found = on_chip(kernel_form(graph, kernel, made.precision), chip)
    work = work_of(graph, kernel, found)
    config = asdict(made.config)
    out: list[dict[str, Any]] = []
    copies = len(made.passes) - 1 - merges_parts(made)
    for k, (one, each) in enumerate(zip(made.passes, compiled, strict=True)):
        last = one is made.passes[-1]
        kind = "copy" if k < copies else f"{made.kind} in parts" if not last else "merge" if merges_parts(made) else made.kind
        row = {"kernel": stem if last else f"{stem}.{k}", **_machine(made, one, each.resources, chip), "kind": kind}
        row |= {
            "mode": kernel.mode,
            "nodes": list(op.source),
            "launches": launches,
            "precision": made.precision,
            "knobs": config,
        }
        if (c := found.product) is not None and kind.startswith("dot"):
            row["extents"] = [points(c.batch), points(c.m), points(c.n), points((*c.k, *c.taps))]
            row["operand"] = c.operand
        row |= {"flops": work.flops, "matrix_flops": work.matrix_flops, "bytes": work.bytes} if last else {}
        row |= {"scratch_bytes": scratch_bytes(made), "roofline_s": roofline(work, found, chip)} if last else {}
        out.append(row)
    main = out[-2 if merges_parts(made) else -1]  # what the merge of parts reads is little
    out[-1] |= {"predicted_s": predicted(work, found, chip, prod(main["grid"]), main["in_flight"]), "refused": list(refused)}
    return out


def merges_parts(made: TritonKernel) -> bool:
    """Whether the last pass merges the states that the one before it wrote."""
    return len(made.passes) > 1 and made.passes[-2].function.startswith(f"{made.name}_parts")


def _machine(made: TritonKernel, one: Pass, found: Resources, chip: Chip) -> dict[str, Any]:
    """What the machine code says."""
    wide = found.wide_bytes / found.global_bytes if found.global_bytes else 1.0
    return {
        "grid": list(one.grid), "num_warps": one.num_warps, **asdict(found), "shared_limit": chip.shared,
        "occupancy": round(occupancy(found, one.num_warps, chip), 4), "matrix": matrix_instruction(found),
        "wide_share": round(wide, 4), "descriptors": len(one.descriptors), "in_flight": in_flight(made, one, found, chip),
    }  # fmt: skip


def in_flight(made: TritonKernel, one: Pass, found: Resources, chip: Chip) -> int:
    """Bytes that all resident programs load at once: by threads, and by descriptors a stage less than there are."""
    resident = int(occupancy(found, one.num_warps, chip) * chip.warps) // one.num_warps
    names = dict(re.findall(r"^ +(\w+) = (\w+)$", made.source, re.MULTILINE))  # of what a program chose among several
    loaded = {p: one.descriptors.get(names.get(p, p)) for p in re.findall(r"\b(\w+)\.load\(", made.source)}
    boxes = sum(prod(d.block) * itemsize(d.dtype) for d in loaded.values() if d) * max(1, one.num_stages - 1)
    each = found.thread_loads * chip.warp * one.num_warps + boxes
    return min(prod(one.grid), chip.units * resident) * each


def scratch_bytes(made: TritonKernel) -> int:
    """Bytes written and read again between two passes."""
    return 2 * sum(n * itemsize(d) for d, n in made.scratch)


def summary(rows: Sequence[Mapping[str, Any]], opaque: Sequence[str], unfused: Mapping[str, Any]) -> dict[str, Any]:
    """Over one run of the model on one device: launches, bytes and roofline time, against a kernel for each ONNX node."""
    ends = [r for r in rows if "bytes" in r]
    out: dict[str, Any] = {
        "kernels": len(rows), "launches": sum(r["launches"] for r in rows),
        "bytes": sum(r["launches"] * (r["bytes"] + r["scratch_bytes"]) for r in ends),
        "flops": sum(r["launches"] * r["flops"] for r in ends),
        "roofline_s": sum(r["launches"] * r["roofline_s"] for r in ends),
        "predicted_s": sum(r["launches"] * r["predicted_s"] for r in ends),
        "spilling": [r["kernel"] for r in rows if r["spills"]],
        "serialized": [r["kernel"] for r in rows if any("serialized" in m for m in r["messages"])], "opaque": list(opaque),
    }  # fmt: skip
    if unfused:
        out |= {"unfused_kernels": unfused["kernels"], "unfused_bytes": unfused["bytes"]}
    return out
