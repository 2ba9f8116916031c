"""A GPU that is not there: Tapestry's own launcher and Triton's bind and launch kernels against `driver_rules.c`.

Nothing is computed. Arrays are on torch's ``meta`` device, each at an address of its own, so that models of any size fit. A broken
rule of the driver is raised as Triton raises it. One stand-in to a process: Triton keeps its driver.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tapestry import flags
from tapestry.codegen.triton.emit.source import TritonKernel
from tapestry.codegen.triton.run.launcher import triton_module
from tapestry.codegen.triton.task.chips import CHIPS, Chip
from tapestry.runtime.arrays import torch_dtype

SOURCE = Path(__file__).with_name("driver_rules.c")
META = torch.device("meta")
SPACE = 1 << 46  # bytes of addresses
GUARD = 1 << 20  # bytes that nobody owns, after every allocation


@dataclass(frozen=True, slots=True)
class Launch:
    """What the driver was asked for; a parameter that is a tensor map is the address and the bytes that it spans."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    params: tuple[int | tuple[int, int], ...]


class Memory(TorchFunctionMode):
    """``torch.empty`` on ``meta`` gives every array an address of its own, which the driver knows."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self.library, self.all, self.next = library, torch.empty(SPACE, dtype=torch.uint8, device=META), GUARD

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and torch.device(given.get("device") or "cpu").type == "meta":
            shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            return self.array(tuple(shape), given.get("dtype") or torch.float32)
        return func(*args, **given)

    def array(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new array."""
        size = torch.Size(shape).numel() * dtype.itemsize
        at, self.next = self.next, self.next + -(-(size + GUARD) // 256) * 256
        assert self.next < SPACE
        self.library.stand_in_memory(ctypes.c_ulonglong(at), ctypes.c_ulonglong(size))
        return self.all[at : at + size].view(dtype).view(tuple(shape))

    def anything(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """An array somewhere, to copy from."""
        kind = torch_dtype(dtype)
        return self.all[: torch.Size(shape).numel() * kind.itemsize].view(kind).view(tuple(shape))


@dataclass(frozen=True, slots=True)
class StandIn:
    """The driver in place, and what it was asked for."""

    library: ctypes.CDLL
    memory: Memory
    chip: Chip

    def limit_shared(self, most: int) -> None:
        """A GPU of the same kind with so many bytes of shared memory for a program."""
        major, minor = divmod(int(self.chip.arch), 10)
        self.library.stand_in_chip(major, minor, self.chip.units, most, most + 1024)
        triton_module("triton.compiler.compiler").max_shared_mem.cache_clear()

    def lines(self) -> list[list[str]]:
        """Its log, in words."""
        return [line.split(" ") for line in self.library.stand_in_log().decode().splitlines()]

    def launches(self) -> list[Launch]:
        """Every launch so far."""
        maps: dict[str, tuple[int, int]] = {}
        out: list[Launch] = []
        for kind, *rest in self.lines():
            if kind == "map":
                maps[f"map:{rest[0]}"] = int(rest[1]), int(rest[3])
            elif kind == "launch":
                x, y, z, threads, shared = map(int, rest[1:6])
                params = tuple(maps[p] if p in maps else int(p) for p in rest[6:])
                out.append(Launch(rest[0], (x, y, z), threads, shared, params))
        return out

    def broken(self) -> list[str]:
        """The rules that were broken so far."""
        return [" ".join(rest) for kind, *rest in self.lines() if kind == "broken"]

    def forget(self) -> None:
        """Begin a new log."""
        self.library.stand_in_forget()


def built() -> ctypes.CDLL:
    """The library, compiled once against the ``cuda.h`` of the Triton wheel, in place of ``libcuda.so.1``."""
    include = Path(triton_module("triton").__file__).parent / "backends" / "nvidia" / "include"
    digest = hashlib.sha256(SOURCE.read_bytes() + str(include).encode()).hexdigest()[:16]
    folder = flags.cache_folder() / "gpu-stand-in" / digest
    path = folder / "libcuda.so.1"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"new.{hashlib.sha256(str(id(folder)).encode()).hexdigest()[:8]}"
        options = ("-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1", "-o", str(new))
        subprocess.run(["cc", *options, str(SOURCE)], check=True)
        new.replace(path)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.stand_in_log.restype = ctypes.c_char_p
    return library


def install(target: str) -> StandIn:
    """Triton's driver on the stand-in, with the limits of a chip; arrays go to ``meta`` inside ``with found.memory``."""
    chip, library = CHIPS[target], built()
    assert isinstance(chip.arch, int)
    major, minor = divmod(chip.arch, 10)
    library.stand_in_chip(major, minor, chip.units, chip.shared, chip.shared_unit)
    triton_module("triton").knobs.nvidia.libcuda_path = str(Path(library._name).parent)
    nvidia = triton_module("triton.backends.nvidia.driver")
    found = nvidia.CudaDriver()
    found.get_current_device, found.set_current_device = lambda: 0, lambda device: None
    found.get_device_capability, found.get_current_stream = lambda device=0: (major, minor), lambda device: 0
    triton_module("triton.runtime").driver.set_active(found)
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    return StandIn(library, Memory(library), chip)


def expected(tk: TritonKernel, arrays: Sequence[torch.Tensor]) -> list[tuple[str, tuple[int, ...], list[int | None]]]:
    """For each launch of a kernel on arrays its function, grid, and the addresses of its buffers (``None``: scratch)."""
    known = [a.data_ptr() for a in arrays]
    return [(p.function, (*p.grid, 1, 1)[:3], [known[k] if k < len(known) else None for k in p.takes]) for p in tk.launches]
