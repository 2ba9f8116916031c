"""A plan as a person reads it, like SQL's EXPLAIN."""

from __future__ import annotations

from collections.abc import Iterator

from tapestry.ir.graph import Opaque
from tapestry.ir.kernel import shape
from tapestry.ir.program import Launch, Reduce, Transfer, alive_at, payload_bytes, peak_bytes, transfer_bytes
from tapestry.ir.store import Build


def explain(build: Build) -> str:
    """Every step that computes or communicates, in order, with splits, block shapes and bytes."""
    return "\n".join([*_head(build), "", *_steps(build), "", *_memory(build)]) + "\n"


def _head(build: Build) -> Iterator[str]:
    r, plan = build.report, build.plan
    mesh = ", ".join(f"{a.name}={a.size}" for a in plan.mesh) or "one device"
    yield f"{build.model}: {r['nodes']} nodes, {r['ops']} operations, {r['signatures']} distinct"
    yield f"mesh {mesh} ({build.topology['name']}), {human(build.memory)} per device"
    yield f"objective {r['objective_s'] * 1e3:.4g} ms, lower bound {r['lower_bound_s'] * 1e3:.4g} ms, gap {r['gap']:.2%}"
    for m in build.moves:
        yield f"rewritten by {m}"
    for t, layout in (*plan.inputs.items(), *plan.outputs.items()):
        cut = ", ".join(f"axis {x} over {a.name}" for a, x in zip(plan.mesh, layout, strict=True) if x is not None)
        yield f"'{t}' is fixed: {cut or 'replicated'}"


def _steps(build: Build) -> Iterator[str]:
    program, graph, mesh = build.program, build.plan.graph, build.plan.mesh
    for step in program.steps:
        match step:
            case Launch():
                op, s = graph.ops[step.op], build.plan.strategies[step.op]
                if step.mode == "finish":
                    yield f"  {op.outs[0]}: finish"
                    continue
                cuts = [f"{d}/{a.size}@{a.name}" for a, d in zip(mesh, s.dims, strict=True) if d is not None]
                dims = ", ".join(f"{d.name}: {d.size}" for d in op.space)
                block = next(b for b in step.blocks if b is not None)
                kind = f"opaque {op.kind}, {op.why}" if isinstance(op, Opaque) else op.monoid or "map"
                split = ", ".join(cuts) or "none"
                yield f"{', '.join(op.outs)} = [{dims}] {kind}  split {split}  block {shape_text(shape(block))}"
                if op.source:
                    yield f"    from {', '.join(op.source)}"
            case Transfer():
                yield f"  {step.kind} of '{program.buffers[step.src].tensor}': {human(transfer_bytes(step, program))} in all"
            case Reduce():
                name = program.buffers[step.srcs[0]].tensor
                each, total = human(payload_bytes(step, program)), human(transfer_bytes(step, program))
                yield f"  {step.kind} of '{name}' in groups of {len(step.groups[0])}: {each} per device, {total} in all"
            case _:
                pass


def _memory(build: Build) -> Iterator[str]:
    peak, at = peak_bytes(build.program)
    worst = max(range(len(peak)), key=lambda d: peak[d])
    yield f"peak memory per device: {', '.join(human(p) for p in peak)}"
    alive = alive_at(build.program, at[worst])
    for b in sorted(alive, key=lambda b: -build.program.buffers[b].nbytes(worst))[:5]:
        yield f"  on device {worst} at the peak: '{b}' {human(build.program.buffers[b].nbytes(worst))}"


def shape_text(extents: tuple[int, ...]) -> str:
    """``4×8`` or ``()``."""
    return "×".join(map(str, extents)) or "()"


def human(n: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.2f} {unit}"
        n /= 1024
    raise AssertionError
