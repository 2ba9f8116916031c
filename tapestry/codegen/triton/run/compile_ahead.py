"""Ahead-of-time compilation, without a GPU, and what the machine code of it says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from subprocess import SubprocessError

from tapestry import flags
from tapestry.build.atomic import new_file
from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.run.execute import launch_options
from tapestry.codegen.triton.run.launcher import compile_pass, first_line
from tapestry.codegen.triton.run.machine_code import Resources, of_amd, of_cuda
from tapestry.codegen.triton.run.triton_api import assembled, interpreted
from tapestry.codegen.triton.task.chips import CHIPS, plain
from tapestry.errors import TapestryError

FORMAT = 1  # of what is kept of a compiled kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """``asm`` by stage (``ttir``, ``ttgir``, ``llir``, ``ptx`` and ``cubin``, or ``amdgcn`` and ``hsaco``)."""

    name: str
    target: str
    asm: Mapping[str, str | bytes]
    resources: Resources


def compile_ahead(tk: TritonKernel, target: str) -> tuple[Compiled, ...]:
    """Compile every pass for ``sm80``, ``sm90``, ``sm100`` or ``gfx942`` (``triton:`` in front is fine).

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
    if chip.backend == "cuda":
        resources = of_cuda(built.asm["cubin"], assembled(built.asm["ptx"], (chip.backend, chip.arch, chip.warp)), shared)
    else:
        resources = of_amd(built.asm["amdgcn"], shared)
    return Compiled(name=one.function, target=name, asm=dict(built.asm), resources=resources)


def measured(tk: TritonKernel, target: str) -> tuple[Resources, ...]:
    """What every pass takes: compiled once on this machine, and kept in the user's cache under the hash of all it depends on.

    Raises:
        TapestryError: as `compile_ahead`, and for a kernel that Triton or its assembler fails on.
        OSError, SubprocessError: there are no disassemblers, or they fail.
    """
    path = flags.cache_folder() / "machine-code" / f"{_digest(tk, target)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_bytes())
        return tuple(Resources(**{**r, "messages": tuple(r["messages"])}) for r in kept["passes"])
    try:
        found = tuple(c.resources for c in compile_ahead(tk, target))
    except (TapestryError, OSError, SubprocessError):
        raise
    except Exception as e:  # whatever a pass of Triton's, or the assembler, stumbles over
        raise TapestryError("the kernel does not compile", where=tk.name, why=f"{type(e).__name__}: {first_line(e)}") from None
    with suppress(OSError), new_file(path) as temporary:
        temporary.write_text(json.dumps({"kernel": tk.name, "target": target, "passes": [asdict(r) for r in found]}))
    return found


def _digest(tk: TritonKernel, target: str) -> str:
    """Of what the machine code and its measure depend on."""
    passes = [(p.function, sorted(launch_options(p).items()), sorted(p.signature.items())) for p in tk.passes]
    about = (FORMAT, plain(target), version("triton"), tk.source, passes)
    return hashlib.sha256(repr(about).encode()).hexdigest()[:40]
