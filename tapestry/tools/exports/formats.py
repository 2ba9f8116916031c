"""What `tapestry export` writes: a table of formats."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapestry.build import store
from tapestry.build.atomic import write_json
from tapestry.errors import BuildError, TapestryError, some
from tapestry.interop.sharding_specs import OURS
from tapestry.ir.plan import Strategy
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.sharding import export_sharding
from tapestry.tools.exports import fused_onnx, ir_text, kernel_package, layouts, rank_onnx, tp_plan
from tapestry.verify.rewriting import history, rewrite_log
from tapestry.viz.tool_kinds import Asked, ExportFormat, write

INDENTED: dict[str, Any] = {
    "initial_indent": "  ",
    "subsequent_indent": "    ",
    "break_long_words": False,
    "break_on_hyphens": False,
}


def _placed(plan: PricedPlan, form: str) -> Sequence[tuple[Strategy, ...]]:
    layouts.places(plan, form, nearest_will_do=False)
    return [plan.plan.strategies]


def export(
    folder: Path,
    form: str,
    target: Path,
    *,
    nearest: bool = False,
    copy: bool = False,
    into: Path | None = None,
    configuration: str = OURS,
) -> dict[str, Any]:
    """Write a build that is stored in a format.

    Raises:
        TapestryError: it cannot be written there; NotExpressible: the format cannot say the plan.
    """
    build, _ = store.read(folder)
    constants = store.contents(folder / "constants.bin")
    if len(constants) != max((o + n for o, n in build.constants.values()), default=0):
        raise BuildError("constants.bin has another size than the plan says", where=str(folder))
    asked = Asked(
        build=build,
        constants=constants,
        rewrites=store.contents(folder / store.REWRITES),
        target=target,
        nearest=nearest,
        copy=copy,
        into=into,
        configuration=configuration,
    )
    return write(form, asked)


def text(document: dict[str, Any]) -> list[str]:
    """What was written, in lines."""
    return FORMATS[document["format"]].text(document)


def _annotated(d: dict[str, Any]) -> list[str]:
    return [
        f"{d['model']}: {d['specs']} sharding specs over {d['devices']} devices, IR version {d['ir_version']}",
        f"  results of the plan that have an ONNX name: {d['outputs']} of {d['tensors']}",
        f"  cut reductions, completed as the nodes' 'tapestry.partial' says: {d['partial']}",
        *([f"  configurations: {', '.join(d['configurations'])}"] if len(d["configurations"]) > 1 else []),
    ]


def _ranks(d: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{n} {kind}" for kind, n in d["by_kind"].items()) or "none"
    return [
        f"{d['folder']}: {some(d['ranks'], 'file')}, {some(max(d['nodes']), 'node')}; collectives of rank 0: {kinds}",
        f"  bytes moved: {d['bytes']:,}, by the plan {d['plan_bytes']:,}",
        *(f"  {n:,} bytes more: {why}" for why, n in d["extra"].items()),
        *textwrap.wrap(
            f"every rank is given all of {', '.join(d['whole_inputs'])}" if d["whole_inputs"] else "", 78, **INDENTED
        ),
    ]


def _styles(d: dict[str, Any]) -> list[str]:
    left = f"; {', '.join(d['left_out'])}: not said" if d["left_out"] else ""
    return [
        f"{d['file']}: {some(len(d['styles']), 'style')} for {d['ranks']} ranks along {d['axis']}{left}",
        *(f"  {p}: {style}" for p, style in d["styles"].items()),
        f"  bytes moved: {d['bytes']:,}, by the plan {d['plan_bytes']:,}",
        *([f"  run otherwise than in the plan: {some(len(d['different']), 'operation')}"] if d["different"] else []),
    ]


def _placement_lines(d: dict[str, Any]) -> list[str]:
    kinds = ("parameters", "constants", "inputs", "outputs", "activations")
    counts = ", ".join(f"{d[k]} {k}" for k in kinds if d[k])
    return [f"{d['file']}: {counts}", *(f"  {n:,} bytes more are held of '{t}'" for t, n in d["extra"].items())]


def _kernels(d: dict[str, Any]) -> list[str]:
    return [
        f"{d['folder']}: {len(d['kernels'])} kernels for {d['target']}, {d['cases']} of them with a case in test_kernels.py",
        *(f"  no kernel for {node}: {why}" for node, why in d["without"].items()),
    ]


def _text_of_ir(d: dict[str, Any]) -> list[str]:
    """What was written; and what `tapestry compile` would not find beside it."""
    lines = [f"{d['file']}: {d['operations']} operations"]
    if d["beside"]:
        lines += textwrap.wrap(f"reads weights from, beside it: {', '.join(d['beside'])}", 80, **INDENTED)
    if d["absent"]:
        lines += textwrap.wrap(f"not there: {', '.join(d['absent'])}; --copy-data brings them", 80, **INDENTED)
    return lines


def _history(a: Asked) -> dict[str, Any]:
    """The rewrites behind the plan's graph, with the graph that they begin with."""
    if not a.rewrites:
        raise TapestryError("the build has no log of rewrites", where="--format history", hint="compile the model again")
    document = history.to_document(rewrite_log.read(a.rewrites, store.REWRITES), a.build.plan.graph)
    write_json(a.target, document)
    return {"file": str(a.target), "steps": len(document["steps"]), "end_sha256": document["end_sha256"]}


FORMATS: dict[str, ExportFormat] = {
    "onnx": ExportFormat(
        "the model with the plan as multi-device annotations",
        lambda a: export_sharding.export(a.build, a.target, copy=a.copy, into=a.into, configuration=a.configuration),
        _annotated,
    ),
    "onnx-ranks": ExportFormat(
        "a folder with an ONNX file for each rank, collectives as nodes",
        lambda a: rank_onnx.export_ranks(a.build, a.constants, a.target, nearest=a.nearest), _ranks, rank_onnx.language,
        nearest=True, folder=True,
    ),
    "onnx-fused": ExportFormat(
        "the graph after every rewrite as plain ONNX for one device",
        lambda a: fused_onnx.export_fused(a.build, a.constants, a.target),
        lambda d: [f"{d['model']}: {d['nodes']} nodes for {d['operations']} operations, weights in {d['data']}"],
    ),
    "tp-plan": ExportFormat(
        "transformers' base_model_tp_plan: a style for each linear layer and table",
        lambda a: tp_plan.export_tp_plan(a.build, a.target, nearest=a.nearest), _styles, tp_plan.language, tp_plan.said,
        nearest=True,
    ),
    "dtensor": ExportFormat(
        "placements of torch.distributed.tensor for every parameter, input, output and activation",
        lambda a: layouts.export_places(a.build, a.target, "dtensor", nearest_will_do=a.nearest), _placement_lines,
        layouts.language, lambda plan: _placed(plan, "dtensor"), nearest=True,
    ),
    "jax": ExportFormat(
        "a PartitionSpec for every parameter, input, output and activation",
        lambda a: layouts.export_places(a.build, a.target, "jax", nearest_will_do=a.nearest), _placement_lines,
        layouts.language, lambda plan: _placed(plan, "jax"), nearest=True,
    ),
    "json": ExportFormat(
        "the layout of every tensor, and what every operation cuts",
        lambda a: layouts.export_json(a.build, a.target),
        lambda d: [f"{d['file']}: {d['tensors']} tensors, {d['operations']} operations, {d['plan_bytes']:,} bytes moved"],
    ),
    "kernels": ExportFormat(
        "the Triton kernels as a Python package of torch's custom operators, which needs torch and triton alone",
        lambda a: kernel_package.export_kernels(a.build, a.target), _kernels, folder=True,
    ),
    "ir": ExportFormat(
        "the plan's graph: IR text (.tap), or a JSON document",
        lambda a: ir_text.export_ir(a.build, a.constants, a.target, copy=a.copy), _text_of_ir,
    ),
    "history": ExportFormat(
        "the rewrites from the lifted graph to the plan's, for tapestry opt --replay", _history,
        lambda d: [f"{d['file']}: {some(d['steps'], 'rewrite')} to the graph of SHA-256 {d['end_sha256']}"],
    ),
}  # fmt: skip
