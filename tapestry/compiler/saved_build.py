"""What is done with a saved build: checking it from its files alone, and writing its kernels out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry.build import sized_builds, store
from tapestry.build.sized_builds import SizedBuild, SizedRegion
from tapestry.codegen import kernel_sources
from tapestry.compiler import build_report, model_evidence
from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.plugins import entry_points as plugins
from tapestry.runtime.session import memory_limits
from tapestry.verify import certificate, layout_laws
from tapestry.verify.many_sizes import sized_laws
from tapestry.verify.rewriting.history import first_graph
from tapestry.verify.rewriting.rewrite_log import Replayed, read, replay

if TYPE_CHECKING:
    from tapestry.lift import onnx_to_graph as lift


def verify_build(folder: Path, model: Path | None = None) -> tuple[store.Build, dict[str, int], list[model_evidence.Evidence]]:
    """Re-check a build directory from its files and its model: hashes, every law, memory, kernels, the graph, the report.

    Returns:
        what it says, the counts of checks by law, and what was compared with what.

    Raises:
        BuildError: the files are not what their hashes say; LawError: the plan breaks a law.
    """
    with plugins.taking_part() as parts:
        build, laws, evidence = _verified(folder, model)
    if build.target not in ("", "torch-cpu") and plugins.has("targets", build.target):
        parts |= dict.fromkeys([plugins.one("targets", build.target)])
    return build, laws, [*evidence, *model_evidence.plugin_evidence(parts)]


def _verified(folder: Path, model: Path | None) -> tuple[store.Build, dict[str, int], list[model_evidence.Evidence]]:
    build, _ = store.read(folder, model)
    plugins.require(build.report.get("plugins"), ("operators",), str(folder))
    plan = build.plan
    laws = certificate.check(
        plan.annotated(),
        build.program,
        limit=memory_limits(build),
        stated_peak=list(build.peak_bytes),
        places=plan.places,
        streamed=plan.streamed,
        native_sums=plan.native_sums,
    )
    laws["agreement"] += layout_laws.check_layouts(plan)
    of_model, evidence = model_evidence.compare(
        plan.graph,
        Path(build.model),
        build.model_sha256,
        constants_of(folder, build),
        lifted=partial(_lifted, folder, plan.graph),
    )
    laws |= of_model
    emitted = kernel_sources.triton_sources(plan.graph, build.program, build.target, build.precision, build.knobs)
    written = {p.name: p.read_bytes() for p in (folder / "kernels").iterdir()} if (folder / "kernels").is_dir() else {}
    for name, source in emitted.items():
        if written.get(name) != source.encode():
            raise LawError(
                "kernels", f"'{name}' is not what the plan generates", where=str(folder), why=_differs(written, name, source)
            )
    laws |= {"kernels": len(emitted), "report": build_report.check_report(build)}
    sized = sized_builds.read_sizes(folder, build)
    return build, laws, [evidence, *([] if sized is None else _check_regions(folder, sized, laws))]


def _check_regions(folder: Path, sized: SizedBuild, laws: dict[str, int]) -> list[model_evidence.Evidence]:
    """Every region of a build for several sizes: its own plan, its laws for all its sizes, and its graph held to the model at
    two more; counts are added to ``laws``.

    Raises:
        LawError: a region breaks a law, with a size, or the regions do not cover what was asked for.
    """
    from tapestry.lift import onnx_to_graph as lift

    laws["sizes"] = sized_laws.cover([r.region for r in sized.regions], sized.asked, sized.symbols)
    found: list[model_evidence.Evidence] = []
    source = lift.read_model(Path(sized.regions[0].build.model), False)
    for k, r in enumerate(sized.regions):
        where = f"region {k}: {r.region.shown(sized.symbols)}"
        if k:
            found += _verified(folder / sized_builds.REGIONS / str(k), None)[2]
        done, peaks = sized_laws.check_sizes(r.plan, r.region, sized.symbols, memory_limits(r.build))
        if r.about.get("largest_peak_bytes") != peaks:
            why = f"it says {r.about.get('largest_peak_bytes')}, they are {peaks}"
            raise LawError("report", "the largest peaks are not the plan's", where=where, why=why)
        laws["sizes"] += sum(done.values()) + _one_model(source, sized, r, where)
        for sizes in dict.fromkeys((next(iter(r.region.corners())), r.region.near(r.made_at))):
            if sizes != r.made_at:
                graph, data = r.plan.at(sizes)[0], {t: r.constants[at : at + n] for t, (at, n) in r.build.constants.items()}
                constants = model_evidence.arrays(graph, data)
                model = Path(sized.regions[0].build.model)
                counts, evidence = model_evidence.compare(graph, model, r.build.model_sha256, constants, special=False)
                laws["sizes"] += sum(counts.values())
                found.append({**evidence, "sizes": dict(zip(sized.symbols, sizes, strict=True))})
    return found


def _one_model(source: lift.ModelSource, sized: SizedBuild, r: SizedRegion, where: str) -> int:
    """The model does the same with all sizes of a region, and its shapes are those of the plan; how many sizes that is.

    Raises:
        LawError: it does not, or they are not.
    """
    from tapestry.lift.sizes import model_sizes

    same = model_sizes.same_model(source.model, sized.inputs, sized.symbols, r.region, r.made_at)
    if not all(sizes in same.region for sizes in r.region.corners()):
        raise LawError("sizes", "the model is another one at some sizes", where=where, why="; ".join(same.reasons)[:400])
    other = same.differs(r.plan.graph, r.region)
    if other is not None:
        at = ", ".join(f"{s} = {n}" for s, n in zip(sized.symbols, other[1], strict=True))
        raise LawError("sizes", f"'{other[0]}' has another shape in the model", where=where, why=f"at {at}")
    return math.prod(len(r.region.along(k)) for k in range(len(sized.symbols)))


def constants_of(folder: Path, build: store.Build) -> dict[str, np.ndarray[Any, Any]]:
    """The derived constants of a build."""
    data = (folder / "constants.bin").read_bytes()
    return model_evidence.arrays(build.plan.graph, {t: data[at : at + n] for t, (at, n) in build.constants.items()})


def replay_rewrites(folder: Path, graph: Graph) -> Replayed | None:
    """The rewrites that a build's log has, undone from the plan's graph and proved one by one; ``None`` without a log.

    Raises:
        BuildError: the log does not read; LawError: it is not of this graph, or a rewrite changes what is computed.
    """
    log = folder / store.REWRITES
    return replay(read(log.read_bytes(), str(log)), graph) if log.is_file() else None


def _lifted(folder: Path, graph: Graph) -> Graph | None:
    """The graph that a build's rewrites began with; none without a log that leads there, which its replay refuses."""
    log = folder / store.REWRITES
    try:
        return first_graph(read(log.read_bytes(), str(log)), graph) if log.is_file() else None
    except TapestryError:
        return None


def _differs(written: Mapping[str, bytes], name: str, source: str) -> str:
    """The first line in which a kernel's file is not what is generated."""
    if name not in written:
        return "there is no such file"
    there, want = written[name].decode(errors="replace").splitlines(), source.splitlines()
    at = next((k for k, (a, b) in enumerate(zip(there, want, strict=False)) if a != b), min(len(there), len(want)))
    said, right = (repr(text[at].strip()[:80]) if at < len(text) else "nothing" for text in (there, want))
    return f"line {at + 1} is {said}, not {right}"


def emit_kernels(folder: Path, output: Path, target: str, report: Callable[[int, int], None]) -> dict[str, Any]:
    """Sources, compiled objects and a resource table of a build's kernels, written in one step; returns the document. Of a
    build for this machine's processor also the C that is generated for it.

    Kernels are those that a GPU runs: as the build has them measured, else the first candidate with sound machine code.

    Raises:
        TapestryError: the target is unknown, or the output is a folder with other things in it.
    """
    from tapestry.codegen.triton.emit.source import kernel_key
    from tapestry.codegen.triton.run.compile_ahead import compile_ahead
    from tapestry.codegen.triton.run.report import rows_of, summary
    from tapestry.codegen.triton.run.sound_choice import sound

    build, _ = store.read(folder)
    graph = build.plan.graph
    counts = dict(kernel_sources.distinct_kernels(graph, build.program).values())
    knobs = build.knobs if target == build.target else dict[str, Mapping[str, Any]]()
    made = kernel_sources.named_kernels(graph, build.program, target, build.precision, knobs)
    files: dict[str, bytes] = {}
    rows: list[dict[str, Any]] = []
    for done, (name, (kernel, source)) in enumerate(made.items()):
        report(done, len(made))
        stem, refused = name.removesuffix(".py"), list[Mapping[str, Any]]()
        if kernel_key(graph, kernel) not in knobs:
            found = sound(graph, kernel, target, build.precision)
            source, refused = found.made, found.rows()
        files[name] = source.source.encode()
        compiled = compile_ahead(source, target)
        of_kernel = rows_of(graph, kernel, source, stem, compiled, counts[kernel], refused, build.topology["name"])
        for each, row in zip(compiled, of_kernel, strict=True):
            for kind, text in each.asm.items():
                files[f"{row['kernel']}.{kind}"] = text if isinstance(text, bytes) else str(text).encode()
        rows += of_kernel
    opaque = kernel_sources.without_kernel(graph)
    if build.target == "torch-cpu":
        from tapestry.codegen.torch_cpu.c import generated_c

        kernel_sources.chosen_kernels(graph, build.program, build.target)
        files |= {"kernels.c": generated_c.registered().encode()} if generated_c.registered() else {}
    model = summary(rows, list(opaque), build.report.get("unfused", {}))
    document = {"target": target, "precision": build.precision, "kernels": rows, "model": model, "opaque": opaque}
    files["resources.json"] = json.dumps(document, indent=1).encode()
    store.write_files(output, files, "resources.json")
    return document
