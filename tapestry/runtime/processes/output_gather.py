"""Outputs on their way to rank 0: each block from the first device that has it, values of the host as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tapestry.ir.kernel import Box, shape
from tapestry.ir.types import HOST
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.runtime.processes import host_values
from tapestry.runtime.processes.step_messages import Array, Memory, Parcels

if TYPE_CHECKING:
    from tapestry.runtime.processes.distributed import RankMachine


def outputs(machine: RankMachine, memory: Memory) -> dict[str, Array]:
    """Every output on rank 0, nothing on the others; counted as ``gathered``, apart from the program's bytes."""
    wire, before = machine.wire, machine.wire.payload
    arrays, hosted = _arrays(machine, memory), _hosted(machine, memory)
    wire.payload, wire.gathered = before, wire.gathered + wire.payload - before
    return {t: arrays[t] if t in arrays else hosted[t] for t in machine.program.outputs} if wire.rank == 0 else {}


def _holders(machine: RankMachine, name: str) -> dict[Box, int]:
    """The first device that has each block of a buffer."""
    boxes = machine.program.buffers[name].boxes
    return {box: d for d, box in reversed(list(enumerate(boxes))) if box is not None}


def _arrays(machine: RankMachine, memory: Memory) -> dict[str, Array]:
    program, mine = machine.program, machine.wire.rank
    parcels = Parcels(machine.wire, machine.owner, len(program.steps))
    blocks = {t: _holders(machine, b) for t, b in program.outputs.items() if program.buffers[b].dtype != HOST}
    for t, holders in blocks.items():
        name = program.outputs[t]
        for box, d in holders.items():
            if mine in (0, machine.owner[d]):
                take = lambda d=d, n=name: memory[d][n]  # noqa: E731
                parcels.carry(f"{t} {box}", d, machine.owner.index(0), shape(box), machine.dtypes[name], take)
    came = parcels.go()()
    out: dict[str, Array] = {}
    for t, holders in blocks.items() if mine == 0 else ():
        whole = tuple((0, n) for n in machine.graph.tensors[t].shape)
        dtype = program.buffers[program.outputs[t]].dtype
        out[t] = machine.target.assemble(whole, dtype, [(b, came[f"{t} {b}"]) for b in holders])
    return out


def _hosted(machine: RankMachine, memory: Memory) -> dict[str, Array]:
    """Values of the host: first how many bytes each has, then the bytes."""
    program, out = machine.program, dict[str, Array]()
    for t, name in program.outputs.items():
        if program.buffers[name].dtype != HOST:
            continue
        source = min(_holders(machine, name).values())
        if machine.owner[source] == 0:
            out |= {t: memory[source][name]} if machine.wire.rank == 0 else {}
            continue
        here = machine.owner[source] == machine.wire.rank
        data = host_values.encode(memory[source][name].value) if here else b""
        size = _one(machine, f"{t} size", source, (1,), torch.int64, torch.tensor([len(data)]))
        whole = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        n = int(size[0]) if size is not None else len(data)
        came = _one(machine, t, source, (n,), torch.uint8, whole)
        if came is not None:
            out[t] = HostValue(host_values.decode(came.cpu().numpy().tobytes()))
    return out


def _one(
    machine: RankMachine, what: str, source: int, extents: tuple[int, ...], dtype: torch.dtype, data: torch.Tensor
) -> torch.Tensor | None:
    """One array from a device to rank 0, which gets it; the others get nothing."""
    parcels = Parcels(machine.wire, machine.owner, len(machine.program.steps))
    if machine.wire.rank in (0, machine.owner[source]):
        parcels.carry(what, source, machine.owner.index(0), extents, dtype, lambda: data)
    came = parcels.go()()
    return came.get(what) if machine.wire.rank == 0 else None
