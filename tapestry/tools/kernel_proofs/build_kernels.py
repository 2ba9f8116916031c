"""The kernels of a build as a proof takes them: source, launches, which buffer is behind each parameter; their proofs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tapestry.build import store
from tapestry.codegen import kernel_sources
from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.errors import LawError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.recognition.state import state_box
from tapestry.plugins import entry_points as plugins
from tapestry.tools.kernel_proofs import kernel_text
from tapestry.tools.kernel_proofs.kernel_proofs import COMPARED, prove
from tapestry.tools.kernel_proofs.kernel_text import Argument, Buffer, KernelLaunch, KernelText, block_of


def prove_kernels(folder: Path, report: Callable[[int, int], None] = lambda done, count: None) -> list[dict[str, str]]:
    """Prove the sources of a build's kernels against their operations; a row for each.

    Raises:
        BuildError: the build does not read; LawError: a kernel is not its operation.
    """
    build, _ = store.read(folder)
    graph, rows = build.plan.graph, _of_cpu(build) if build.target == "torch-cpu" else _of_plugin(build)
    made = kernel_sources.named_kernels(graph, build.program, build.target, build.precision, build.knobs)
    for done, (name, (kernel, one)) in enumerate(made.items()):
        report(done, len(made))
        file = folder / "kernels" / name
        if not file.is_file():
            raise LawError("kernels", f"there is no '{name}'", where=str(folder))
        shown = prove(graph, kernel, kernel_text_of(graph, kernel, one, name, file.read_text()))
        rows.append({"kernel": name, "form": one.kind, "addresses": shown.addresses, "value": shown.value, "why": shown.why})
    return rows


def _of_cpu(build: store.Build) -> list[dict[str, str]]:
    """What the CPU target runs for each kernel of a build, of which nothing is proved."""
    graph, rows = build.plan.graph, list[dict[str, str]]()
    found, _ = kernel_sources.kernels_of_steps(graph, build.program, every=True)
    for k, kernel in enumerate(found.values()):
        form, why = "C or torch", "kernels in C and operators of torch are not proved"
        if not isinstance(op := graph.ops[kernel.op], Block):
            form = kernels.node_library(op, graph)
            why = f"{form} runs the node as the model has it"
        row = {"kernel": f"cpu/{op.outs[0]}.{k}", "form": form, "addresses": COMPARED, "value": COMPARED, "why": why}
        rows.append(row)
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
        name=name,
        source=source,
        launches=tuple(_launch(p, names) for p in made.launches),
        buffers=buffers,
        reads={p: names[k] for k, p in enumerate(made.reads)},
        outs=tuple(outs),
        states=tuple(states),
    )


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
