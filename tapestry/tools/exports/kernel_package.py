"""A build's Triton kernels as a Python package of custom operators of torch, which needs torch and triton alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from tapestry.build import store
from tapestry.build.store import Build
from tapestry.codegen import kernel_sources
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.run import interpreter
from tapestry.codegen.triton.run.launcher import narrow_view
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, shape, size
from tapestry.ir.recognition.state import state_box
from tapestry.system.quoting import docstring
from tapestry.tools.exports.shipped import checking, launching
from tapestry.tools.exports.shipped.launching import Buffer

CASE_POINTS, CASE_BYTES, CASE_PROGRAMS = 1 << 22, 1 << 22, 512  # of a kernel that is tested: a second in the interpreter
TF32 = 2e-3  # relative, of products of f32 cut to 10 bits
TAKEN = frozenset({  # modules, names with "_" before them, and what torch's namespaces have
    "sources", "launching", "interpreter", "checking", "test_kernels", "OPERATORS",
    "corrected", "Buffer", "Kernel", "Pass", "operator", "source", "name",
})  # fmt: skip
HEAD = '''"""Kernels of {model} for {target}, each an operator of torch: ``torch.ops.{package}.NAME``, or ``{package}.NAME``.

Written by ``tapestry export --format kernels``. A kernel computes one block of an operation, of one device; what
devices send each other and merge is not here. ``pytest {package}`` runs them on stored inputs; without a GPU, with
TRITON_INTERPRET=1.
"""

from .interpreter import corrected as _corrected
from .launching import Buffer as _Buffer
from .launching import Kernel as _Kernel
from .launching import Pass as _Pass
from .launching import operator as _operator
'''
TEST = '''"""Every operator that has a stored case: {count} of {kernels}."""

from pathlib import Path

from . import OPERATORS
from .checking import ROUNDING, check_operators


def test_every_operator():
    assert check_operators(OPERATORS, Path(__file__).parent / "cases.npz", {{**ROUNDING{coarser}}}) == {count}


if __name__ == "__main__":
    test_every_operator()
    print("{count} operators, as stored")
'''


def export_kernels(build: Build, folder: Path) -> dict[str, Any]:
    """Write the package into a new folder; says which kernels it has, and which have a case in its test.

    Raises:
        TapestryError: the build is not for Triton, or the folder's name is no name of a package.
    """
    package = folder.resolve().name
    if not build.target.startswith("triton"):
        hint = "compile with --target triton:sm90"
        raise TapestryError(
            "the build has no Triton kernels", where="--format kernels", why=f"it is for {build.target}", hint=hint
        )
    if not package.isidentifier():
        raise TapestryError(
            "no name of a Python package", where=f"-o {folder}", why=f"'{package}'", hint="letters, digits and _"
        )
    graph = build.plan.graph
    made = kernel_sources.named_kernels(graph, build.program, build.target, build.precision, build.knobs)
    files: dict[str, bytes] = {"sources/__init__.py": b""}
    lines, cases, rows = list[str](), dict[str, np.ndarray[Any, Any]](), list[dict[str, Any]]()
    for k, (file, (kernel, source)) in enumerate(made.items()):
        stem = file.removesuffix(".py")
        name = f"{stem}_" if stem in TAKEN else stem
        files[f"sources/{file}"] = source.source.encode()
        buffers = _buffers(graph, kernel, source)
        case = _case(graph, kernel, source, buffers, seed=k)
        cases |= {f"{name}.{n}": data for n, data in enumerate(case)}
        lines += _written(package, name, stem, source, *buffers)
        rows.append(
            {"name": name, "form": source.kind, "inputs": len(buffers[0]), "outputs": len(buffers[1]), "case": bool(case)}
        )
    table = ", ".join(f'"{r["name"]}": ({r["name"]}, _{r["name"]})' for r in rows)
    head = HEAD.format(model=docstring(Path(build.model).name), target=build.target, package=package)
    files["__init__.py"] = "\n".join([head, *lines, f"OPERATORS = {{{table}}}", ""]).encode()
    count = sum(r["case"] for r in rows)
    coarser = f', "float32": {TF32}' if build.precision == "tf32" else ""
    files["test_kernels.py"] = TEST.format(count=count, kernels=len(rows), coarser=coarser).encode()
    for module in (launching, checking, interpreter):
        name = module.__name__.rpartition(".")[2]
        files[f"{name}.py"] = resources.files(module.__package__ or "").joinpath(f"{name}.py").read_bytes()
    stored = io.BytesIO()
    np.savez_compressed(stored, **cast("dict[str, Any]", cases))
    files["cases.npz"] = stored.getvalue()
    store.write_files(folder, files, "cases.npz")
    opaque = kernel_sources.without_kernel(graph)
    return {"folder": str(folder), "target": build.target, "kernels": rows, "cases": count, "without": opaque}


def _buffers(graph: Graph, kernel: Kernel, source: TritonKernel) -> tuple[list[Buffer], list[Buffer]]:
    """What a kernel's operator takes and gives."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    names = [n.removesuffix("_ptr") for n in source.args]
    fields = [e.dtype for e in op.body]
    reads = [(graph.tensors[op.reads[p].tensor].dtype, shape(kernel.ins[p] or ())) for p in source.reads]
    states = [(d, shape(state_box(op, k, kernel.outs[0]))) for k, d in enumerate(fields)] if kernel.mode == "finish" else []
    dtypes = fields if kernel.mode == "partial" else [graph.tensors[t].dtype for t in op.outs]
    outs = [(d, shape(b)) for d, b in zip(dtypes, kernel.outs, strict=True)]
    found = [Buffer(n, _torch_name(d), s) for n, (d, s) in zip(names, (*reads, *states, *outs), strict=True)]
    return found[: len(found) - len(outs)], found[len(found) - len(outs) :]


def _torch_name(dtype: str) -> str:
    return str(TORCH_DTYPES[dtype]).removeprefix("torch.")


def _written(
    package: str, name: str, stem: str, source: TritonKernel, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
) -> list[str]:
    """The lines that define an operator."""

    def buffers(some: Sequence[Buffer]) -> str:
        return "".join(f"_Buffer({b.name!r}, {b.dtype!r}, {b.shape!r}), " for b in some)

    scratch = [Buffer(f"scratch{k}", _torch_name(d), (n,)) for k, (d, n) in enumerate(source.scratch)]
    return [
        f"from .sources import {stem} as _source",
        "",
        f"_{name} = _Kernel(",
        f'    "{name}",',
        f"    inputs=({buffers(inputs)}),",
        f"    outputs=({buffers(outputs)}),",
        f"    scratch=({buffers(scratch)}),",
        "    passes=(",
        *(f"        {_launch(one)}," for one in source.launches),
        "    ),",
        ")",
        f'{name} = _operator("{package}", _{name}, _corrected)',
        "",
    ]


def _launch(one: Pass) -> str:
    views = {k: v for k, p in enumerate(one.params) if (v := narrow_view(one.signature[p]))}
    boxes = {k: (d.shape, d.strides, d.block) for k, p in enumerate(one.params) if (d := one.descriptors.get(p))}
    more = f", views={views}" if views else ""
    more += f", descriptors={boxes}" if boxes else ""
    sizes = f"grid={one.grid}, takes={one.takes}, num_warps={one.num_warps}, num_stages={one.num_stages}"
    return f"_Pass(_source.{one.function}, {sizes}{more})"


def _case(
    graph: Graph, kernel: Kernel, source: TritonKernel, buffers: tuple[list[Buffer], list[Buffer]], seed: int
) -> list[np.ndarray[Any, Any]]:
    """Inputs and the CPU target's results for them, as bytes; none where that would take long."""
    inputs, outputs = buffers
    held = sum(prod(b.shape) * getattr(torch, b.dtype).itemsize for b in (*inputs, *outputs))
    programs = sum(prod(p.grid) for p in source.launches)
    if max(size(kernel.block), held) > min(CASE_POINTS, CASE_BYTES) or programs > CASE_PROGRAMS:
        return []
    rng = np.random.default_rng(seed)
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    values = [_random_buffer(b, rng, state=k >= len(source.reads)) for k, b in enumerate(inputs)]
    ins: list[torch.Tensor | None] = [None] * len(op.reads)
    for p, value in zip(source.reads, values, strict=False):
        ins[p] = value
    states = values[len(source.reads) :]
    with np.errstate(all="ignore"):
        results = TorchCpu().kernel(graph, kernel)(ins, states)
    return [t.contiguous().reshape(-1).view(torch.uint8).numpy() for t in (*values, *results)]


def _random_buffer(b: Buffer, rng: np.random.Generator, *, state: bool) -> torch.Tensor:
    """Values of a buffer: indices inside of any table, states of a softmax or a variance that may be divided by."""
    dtype = getattr(torch, b.dtype)
    if not dtype.is_floating_point:
        return torch.tensor(rng.integers(0, 2, b.shape)).to(dtype)
    low, high = (0.5, 1.5) if state else (-1.0, 1.0)
    return torch.tensor(rng.uniform(low, high, b.shape)).to(dtype)
