"""Kernels bound and launched on a GPU that is not there, each check in a process of its own: Triton keeps its driver.

python -m tests.support.programs.stand_in_checks rules | fallback | models TARGET DTYPE MODEL …
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from bench.speed.kernels_static import SIZES, models
from bench.support.whole_kernels import distinct, fused_graph
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import generate, kernel_key
from tapestry.codegen.triton.run.compile_ahead import compile_ahead
from tapestry.codegen.triton.run.device_target import TritonTarget
from tapestry.codegen.triton.run.sound_choice import sound
from tapestry.codegen.triton.task.chips import CHIPS
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, shape
from tapestry.ir.plan import Plan
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import itemsize
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tapestry.plan.topology.meshes import parse_mesh
from tapestry.runtime.arrays import torch_dtype
from tapestry.runtime.one_process.gpu_devices import GpuExecutor
from tests.support.gpu_stand_in.stand_in import META, Launch, StandIn, expected, install

DOWN = """graph g input x: bf16[512, 1024] input w: bf16[1024, 512] input r: bf16[512, 512]
    y: bf16[512, 512] = op [i: 512, n: 512 | m: 1024 sum] reads x[i, m], w[m, n], r[i, n]
      body cast(x, f32) * cast(w, f32) then cast(cast(cast(acc0, bf16), f32) + cast(r, f32), bf16)
    output y"""
TOO_LARGE = KernelConfig(bm=256, bn=256, bk=128, num_warps=8, num_stages=5, descriptors=True, persistent=True)


def arrays_of(graph: Graph, kernel: Kernel, reads: tuple[int, ...]) -> tuple[list[Any], list[torch.Tensor]]:
    """New arrays for what a kernel reads (None where it is no argument) and writes."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    boxes = [(b, graph.tensors[r.tensor].dtype) for b, r in zip(kernel.ins, op.reads, strict=True)]
    made = [torch.empty(shape(b), dtype=torch_dtype(d), device=META) for b, d in boxes if b is not None]
    assert len(made) == len(boxes) and all(p < len(made) for p in reads)
    outs = [
        torch.empty(shape(b), dtype=torch_dtype(graph.tensors[t].dtype), device=META)
        for b, t in zip(kernel.outs, op.outs, strict=True)
    ]
    return made, outs


def run(there: StandIn, target: TritonTarget, graph: Graph, kernel: Kernel) -> list[Launch]:
    """One kernel bound and launched: every parameter must be what the kernel's signature wants, at its place."""
    there.forget()
    with there.memory:
        target.prepare(graph, [kernel])
        made = target.made[kernel_key(graph, kernel)]
        ins, outs = arrays_of(graph, kernel, made.reads)
        target.bind(graph, kernel, ins, [], outs)()
    made = target.made[kernel_key(graph, kernel)]
    found, chip = there.launches(), CHIPS[target.target]
    assert not there.broken(), there.broken()
    wanted = expected(made, [ins[k] for k in made.reads] + outs)
    assert len(found) == len(wanted) == len(made.launches), (found, wanted)
    for launch, one, (name, grid, addresses) in zip(found, made.launches, wanted, strict=True):
        assert (launch.kernel, launch.grid, launch.threads) == (name, grid, 32 * one.num_warps), launch
        assert launch.shared <= chip.shared, launch
        params = iter(launch.params)
        for p, address in zip(one.params, addresses, strict=True):
            value = next(params)
            if (d := one.descriptors.get(p)) is not None:
                assert isinstance(value, tuple), (launch, p)
                value, spans = value
                last = sum((n - 1) * s for n, s in zip(d.shape, d.strides, strict=True)) + 1
                assert spans == last * itemsize(d.dtype), (launch, p, d)
                given = [next(params) for _ in range(2 * len(d.shape))]
                assert given == [*d.shape, *d.strides], (launch, p, given)
            assert value % 16 == 0 and address in (None, value), (launch, p, address)
    return found


def one_kernel(text: str) -> tuple[Graph, Kernel]:
    graph = parse(text)
    ((kernel,),) = distinct(graph)
    return graph, kernel


def fallback() -> None:
    """A choice that the GPU cannot run, of the build or of the chip's model, ends nothing: another candidate is launched."""
    there = install("sm90")
    graph, kernel = one_kernel(DOWN)
    key = kernel_key(graph, kernel)
    wished = TritonTarget(META, knobs={key: asdict(TOO_LARGE)})
    run(there, wished, graph, kernel)
    assert wished.made[key] != generate(graph, kernel, TOO_LARGE, target="sm90")
    before = TritonTarget(META)
    (default,) = run(there, before, graph, kernel)
    small = default.shared - 1
    there.limit_shared(small)
    other = TritonTarget(META)
    (launch,) = run(there, other, graph, kernel)
    assert launch.shared <= small and other.made[key] != before.made[key], launch


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((n, ctypes.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def tensor_map(there: StandIn, **changes: Any) -> str:
    """The rule that the map of a 512 x 256 array of bf16 breaks with some changes; "" for none."""
    given: dict[str, Any] = {
        "type": 9, "rank": 2, "address": 1 << 20, "dim": (256, 512), "stride": (512,), "box": (64, 128), "step": (1, 1),
        "interleave": 0, "swizzle": 3, "promotion": 0, "fill": 0, "at": 0,
    }  # fmt: skip
    given |= changes
    there.forget()
    there.library.stand_in_memory(ctypes.c_ulonglong(1 << 20), ctypes.c_ulonglong(512 * 256 * 2))
    room = ctypes.create_string_buffer(512)
    base = -(-ctypes.addressof(room) // 64) * 64 + given["at"]
    dim, stride = (ctypes.c_ulonglong * 5)(*given["dim"]), (ctypes.c_ulonglong * 5)(*given["stride"])
    box, step = (ctypes.c_uint * 5)(*given["box"]), (ctypes.c_uint * 5)(*given["step"])
    numbers = (ctypes.c_void_p(given["address"]), dim, stride, box, step)
    how = (given["interleave"], given["swizzle"], given["promotion"], given["fill"])
    code = there.library.cuTensorMapEncodeTiled(ctypes.c_void_p(base), given["type"], given["rank"], *numbers, *how)
    assert bool(code) == bool(there.broken())
    return " ".join(there.broken())


def rules() -> None:
    """Every rule is seen to be broken, and a call that keeps them passes."""
    there = install("sm90")
    assert tensor_map(there) == ""
    far = {"dim": (256, 513)}
    broken = {
        "64 bytes": {"at": 16}, "data type": {"type": 40}, "rank": {"rank": 6}, "multiple of 16 bytes": {"address": (1 << 20) + 8},
        "extent 0": {"dim": (256, 0)}, "box of 257": {"box": (64, 257)}, "box of 0": {"box": (0, 1)}, "element stride": {"step": (1, 9)},
        "stride of 520": {"stride": (520,), "dim": (256, 8)}, "stride of 0": {"stride": (0,)}, "rows of a box of 8": {"box": (4, 8)},
        "swizzled in 128": {"box": (128, 8)}, "beyond the allocation": far, "in no allocation": {"address": 16}, "NaN": {"type": 1, "fill": 1},
        "swizzle 9": {"swizzle": 9}, "interleave": {"interleave": 1},
    }  # fmt: skip
    for rule, changes in broken.items():
        said = tensor_map(there, **changes)
        assert rule.replace("extent 0", "extent 0 of") in said, (rule, said)
    there.library.stand_in_chip(8, 0, 108, 166912, 167936)
    assert "sm_80 has none" in tensor_map(there)
    there.library.stand_in_chip(9, 0, 132, 232448, 233472)
    launches(there)


def launches(there: StandIn) -> None:
    """The limits of a launch, on a kernel that Triton made."""
    graph, kernel = one_kernel("graph g input x: f32[4096] y: f32[4096] = op [i: 4096] reads x[i] body exp(x) output y")
    (made,) = compile_ahead(generate(graph, kernel, target="sm90"), "sm90")
    library, module, function = there.library, ctypes.c_void_p(), ctypes.c_void_p()
    cubin = bytes(made.asm["cubin"])  # type: ignore[arg-type]
    assert library.cuModuleLoadData(ctypes.byref(module), b"\x7fELF" + bytes(200)) and "no cubin" in there.broken()[-1]
    library.stand_in_chip(10, 0, 148, 232448, 233472)
    assert library.cuModuleLoadData(ctypes.byref(module), cubin) and "for sm_90, the device is sm_100" in there.broken()[-1]
    library.stand_in_chip(9, 0, 132, 232448, 233472)
    assert library.cuModuleLoadData(ctypes.byref(module), cubin) == 0
    assert library.cuModuleGetFunction(ctypes.byref(function), module, b"z") and "no kernel z" in there.broken()[-1]
    assert library.cuModuleGetFunction(ctypes.byref(function), module, b"y") == 0
    registers = ctypes.c_int()
    assert library.cuFuncGetAttribute(ctypes.byref(registers), 4, function) == 0
    assert registers.value == made.resources.registers > 0
    room = [ctypes.c_ulonglong(16 * k) for k in range(1, 9)]
    params = (ctypes.c_void_p * 8)(*(ctypes.addressof(v) for v in room))
    good = Config(gx=4, gy=1, gz=1, bx=128, by=1, bz=1, shared=0)

    def launch(**changes: int) -> str:
        there.forget()
        for name, value in changes.items():
            setattr(good, name, value)
        code = library.cuLaunchKernelEx(ctypes.byref(good), function, params, None)
        assert bool(code) == bool(there.broken())
        return there.broken()[0] if code else ""

    assert launch() == "" and there.launches()[0].params[:2] == (16, 32)
    assert "grid of 0" in launch(gx=0) and "grid of 4 x 65536" in launch(gx=4, gy=65536)
    assert "compiled for 128" in launch(gy=1, bx=64) and "2048 threads" in launch(bx=2048)
    assert "50000 bytes of shared" in launch(bx=128, shared=50000)
    assert library.cuFuncSetAttribute(function, 8, 232449) and "at most 232448" in there.broken()[-1]
    assert library.cuFuncSetAttribute(function, 8, 60000) == 0 and launch() == ""


def whole_models(target: str, dtype: str, *names: str) -> None:
    """Lifted models at real sizes: every distinct kernel by itself, then the whole by the GPU runtime, from its arena."""
    there, device = install(target), TritonTarget(META, target=target)
    for name in names:
        make = models(name, dtype)
        assert make is not None, f"{name} is not written in {dtype}"
        graph = fused_graph(make(), SIZES.get(name, {}))
        count = sum(len(run(there, device, graph, same[0])) * len(same) for same in distinct(graph))
        assert count >= len(graph.ops), name
        executor = by_runtime(there, device, graph)
        assert not there.broken() and len(there.launches()) == count, (name, count, len(there.launches()), there.broken())
        faulty = [graph.ops[k.op].outs[0] for k, *_ in distinct(graph) if sound(graph, k, target).faults]
        print(f"{name} {dtype} {target}: {count} launches, an arena of {executor.arena_bytes[0]:,} bytes")
        print(f"faults: {len(faulty)} {' '.join(faulty)}")


def by_runtime(there: StandIn, device: TritonTarget, graph: Graph) -> GpuExecutor:
    """A run of the whole graph on one device."""

    def weights(tensor: str, box: Box) -> torch.Tensor:
        return there.memory.anything(shape(box), graph.tensors[tensor].dtype)

    there.forget()
    with there.memory:
        executor = GpuExecutor(graph, lower(one_device(graph)), device, weights)
        executor.replay()
    return executor


def one_device(graph: Graph) -> Plan:
    """The plan without a choice."""
    mesh = parse_mesh("1")
    return Plan(graph=graph, mesh=mesh, strategies=tuple(strategies(op, mesh)[0] for op in graph.ops), inputs={}, outputs={})


CHECKS: dict[str, Callable[..., None]] = {"rules": rules, "fallback": fallback, "models": whole_models}


if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
    print("passed")
