"""Ahead-of-time compilation, without a GPU, and what the machine code of it says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from subprocess import SubprocessError
from typing import cast

import msgspec

from tapestry import flags
from tapestry.build.atomic import new_file
from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.run.launcher import Assembled, assemble_all, first_line, interpreted, launch_options
from tapestry.codegen.triton.run.machine_code import Resources, of_amd, of_assembler, of_cuda
from tapestry.codegen.triton.task.chips import CHIPS, plain
from tapestry.errors import TapestryError

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
