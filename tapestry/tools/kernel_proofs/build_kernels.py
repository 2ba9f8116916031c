"""The kernels of a build as a proof takes them: source, launches, which buffer is behind each parameter; their proofs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tapestry.build import store
from tapestry.codegen import kernel_sources
from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.torch_cpu.c import print_c
from tapestry.codegen.torch_cpu.c.c_calls import CpuKernel
from tapestry.codegen.torch_cpu.views import View
from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.errors import LawError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.states import state_box
from tapestry.plugins import entry_points as plugins
from tapestry.tools.kernel_proofs import contract_trials, kernel_text
from tapestry.tools.kernel_proofs.contract_trials import contract_texts_of, sums_text_of
from tapestry.tools.kernel_proofs.kernel_proofs import COMPARED, Evidence, prove, weakest
from tapestry.tools.kernel_proofs.kernel_text import Argument, At, Buffer, KernelLaunch, KernelText, block_of
from tapestry.tools.kernel_proofs.terms import Unsupported


def prove_kernels(folder: Path, report: Callable[[int, int], None] = lambda done, count: None) -> list[dict[str, str]]:
    """Prove the sources of a build's kernels against their operations; a row for each.

    Raises:
        BuildError: the build does not read; LawError: a kernel is not its operation.
    """
    build, _ = store.read(folder)
    graph, rows = build.plan.graph, _prove_cpu(build, report) if build.target == "torch-cpu" else _of_plugin(build)
    made = kernel_sources.named_kernels(graph, build.program, build.target, build.precision, build.knobs)
    for done, (name, (kernel, one)) in enumerate(made.items()):
        report(done, len(made))
        file = folder / "kernels" / name
        if not file.is_file():
            raise LawError("kernels", f"there is no '{name}'", where=str(folder))
        shown = prove(graph, kernel, kernel_text_of(graph, kernel, one, name, file.read_text()))
        rows.append({"kernel": name, "form": one.kind, "addresses": shown.addresses, "value": shown.value, "why": shown.why})
    return rows


def _prove_cpu(build: store.Build, report: Callable[[int, int], None]) -> list[dict[str, str]]:
    """What the CPU target runs for each kernel of a build, and by what that was shown to be its operation."""
    graph, rows = build.plan.graph, list[dict[str, str]]()
    found, _ = kernel_sources.kernels_of_steps(graph, build.program, every=True)
    for done, kernel in enumerate(found.values()):
        report(done, len(found))
        name = f"cpu/{graph.ops[kernel.op].outs[0]}.{done}"
        torch_alone = ProvableKernel("torch operators", why="in canonical blocks") if build.exact else None
        made = torch_alone or cpu_kernel_of(graph, kernel, name)
        shown = weakest([prove(graph, kernel, t) for t in made.texts]) or Evidence(COMPARED, COMPARED, made.why)
        value = shown.value
        if made.ours and value != COMPARED:
            value = f"contract by {value}, kept on {sum(map(contract_trials.checked, made.ours))} instances"
        rows.append({"kernel": name, "form": made.form, "addresses": shown.addresses, "value": value, "why": shown.why})
    return rows


def _of_plugin(build: store.Build) -> list[dict[str, str]]:
    """What a target of another package runs, of which nothing is proved; none of a build for another target."""
    by = plugins.brought_by("targets", build.target)
    why = f"kernels of the plug-in {by}, which nobody here has seen"
    row = {"kernel": f"{build.target}/*", "form": "plug-in", "addresses": COMPARED, "value": COMPARED, "why": why}
    return [row] if by else []


def kernel_text_of(graph: Graph, kernel: Kernel, made: TritonKernel, name: str, source: str) -> KernelText:
    """A kernel as a run launches it, with a source of its name: what is generated, or what a build has."""
    op = block_of(graph, kernel)
    first = len(made.args) - len(kernel.outs)
    names = [f"buffer {k}" for k in range(len(made.args) + len(made.scratch))]
    same: dict[tuple[str, Box | None], str] = {}
    for k, p in enumerate(made.reads):  # equal parts of one tensor: one buffer, through whichever parameter
        names[k] = same.setdefault((op.reads[p].tensor, kernel.ins[p]), names[k])
    states, outs = names[len(made.reads) : first], names[first : len(made.args)]
    types = [e.dtype for e in op.body] if kernel.mode == "partial" else [graph.tensors[t].dtype for t in op.outs]
    buffers = {names[k]: _read_buffer(graph, op, kernel, p) for k, p in enumerate(made.reads)}
    for k, n in enumerate(states):
        buffers[n] = Buffer(op.body[k].dtype, size(state_box(op, k, kernel.outs[0])))
    buffers |= {n: Buffer(dtype, size(box)) for n, dtype, box in zip(outs, types, kernel.outs, strict=True)}
    buffers |= {names[len(made.args) + k]: Buffer(dtype, n, True) for k, (dtype, n) in enumerate(made.scratch)}
    return KernelText(
        name=name, source=source, launches=tuple(_launch(p, names) for p in made.launches), buffers=buffers,
        reads={p: names[k] for k, p in enumerate(made.reads)}, outs=tuple(outs), states=tuple(states),
    )  # fmt: skip


def _read_buffer(graph: Graph, op: Block, kernel: Kernel, p: int) -> Buffer:
    box = kernel.ins[p]
    assert box is not None
    return Buffer(graph.tensors[op.reads[p].tensor].dtype, size(box))


def _launch(one: Pass, names: list[str]) -> KernelLaunch:
    params: dict[str, Argument] = {}
    for parameter, k in zip(one.params, one.takes, strict=True):
        d = one.descriptors.get(parameter)
        params[parameter] = names[k] if d is None else kernel_text.Box(names[k], d.shape, d.strides, d.block)
    return KernelLaunch(function=one.function, grid=one.grid, params=params)


@dataclass(frozen=True, slots=True)
class ProvableKernel:
    """What the CPU target runs for a kernel: ``form`` is what it is, ``texts`` what of it can be proved, all of them.

    Attributes:
        ours: kernels in `codegen.torch_cpu.native` whose contracts ``texts`` have; none where it is all of the source.
        why: why there is none.
    """

    form: str
    texts: tuple[KernelText, ...] = ()
    ours: tuple[str, ...] = ()
    why: str = ""


def cpu_kernel_of(graph: Graph, kernel: Kernel, name: str) -> ProvableKernel:
    """A kernel as the CPU target runs it in one thread: a function in C, a call of one of ours, or operators of torch."""
    if not isinstance(op := graph.ops[kernel.op], Block):
        return ProvableKernel(by := kernels.node_library(op, graph), why=f"{by} runs the node as the model has it")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _cpu_kernel(graph, kernel, kernels.build(graph, kernel), name)
    except Unsupported as e:
        return ProvableKernel("kernel in C", why=str(e))
    finally:
        torch.set_num_threads(threads)


def _cpu_kernel(graph: Graph, kernel: Kernel, run: CpuKernel, name: str) -> ProvableKernel:
    packs, run = run.packs, run.packed
    merged = bool(run.parts) and not run.bind
    run = run.parts[0] if merged else run
    if any(isinstance(x, View) for p in packs.values() for x in p.key):
        return ProvableKernel("kernel in C", why="a convolution on views of its buffers")
    if run.bind and not run.functions:
        texts, ours = contract_texts_of(graph, kernel, run.parts or (run,), name, packs)
        return ProvableKernel(", ".join(ours) + ", added by torch to what is given" * merged, texts, ours)
    if run.functions and len(packs) > 1 and not run.reads:
        text = sums_text_of(graph, kernel, run, run.functions[0], name, packs)
        return ProvableKernel("tapestry_several", (text,), ("tapestry_conv", "tapestry_several"))
    if run.functions and run.reads:
        return ProvableKernel("generated C", (generated_text_of(graph, kernel, run, name),))
    if run.functions:
        why = "several functions, or one on views of the buffers, which are not read together"
        return ProvableKernel("generated C", why=why)
    return ProvableKernel("torch operators", why="operators of torch are not read")


def generated_text_of(graph: Graph, kernel: Kernel, run: CpuKernel, name: str) -> KernelText:
    """A function in C as the CPU target calls it: rows of numbers in, and the output's, row-major."""
    op = block_of(graph, kernel)
    names = {p: f"buffer {k}" for k, p in enumerate(run.reads)}
    buffers = {n: _read_buffer(graph, op, kernel, p) for p, n in names.items()}
    outs = {"y" if len(op.outs) == 1 else f"y{k}": t for k, t in enumerate(op.outs)}
    buffers |= {y: Buffer(graph.tensors[t].dtype, size(kernel.outs[0])) for y, t in outs.items()}
    given: dict[str, Argument] = {"sizes": run.sizes or (0,), "p": tuple(At(n) for n in buffers)}
    return KernelText(
        name=name, source=print_c.source(run.functions[0]), launches=(KernelLaunch(function=run.functions[0], params=given),),
        buffers=buffers, reads=names, outs=tuple(outs), language="c",
    )  # fmt: skip
