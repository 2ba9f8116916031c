"""What `compile` refuses of annotations that contradict nothing: tiles on no instance, and placements that no mesh can say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onnx import ModelProto

from tapestry.errors import TapestryError
from tapestry.interop import sharding_specs
from tapestry.interop.annotation_rules import Context, Finding, spec_rules
from tapestry.interop.placement import layout_of
from tapestry.interop.sharding_specs import ShardingSpec
from tapestry.sharding.annotations import Annotations, read, staged
from tapestry.sharding.file_mesh import mesh, parts_alone


def unkept(path: Path, model: ModelProto, context: Context) -> Iterator[Finding]:
    """Findings of every configuration, or of the tilings; for files whose annotations have no structural error."""
    for c in sharding_specs.configurations(model) or (None,):
        try:
            a, _ = read(path, None, c.name if c else None)
            if a is not None and staged(a) is None:
                yield from _placements(a, context, ours=c is None)
        except TapestryError as e:
            yield Finding("warning", "not-kept", "", "", f"compile refuses this: {e.what}{f' ({e.where})' if e.where else ''}")


def _placements(a: Annotations, context: Context, *, ours: bool) -> Iterator[Finding]:
    over = mesh(a)
    given = [
        *((a.writer[t], s) for t, s in a.outs.items()),
        *((n, s) for (n, _), s in a.reads.items()),
        *(("", s) for t, s in a.values.items() if t not in a.outs),
    ]
    for node, s in given:
        assert s.tensor is not None
        wrong = next((m for level, _, m in spec_rules(s, a.devices, context) if level == "error"), None) if ours else None
        if wrong is not None:
            yield Finding("error", "tile-pattern", node, s.tensor, wrong)
        elif not _said(s) and layout_of(*parts_alone(s), over) is None:
            sizes = "x".join(str(x.size) for x in over)
            why = f"mesh {sizes}, with one order of devices for all tensors, cannot put its parts on {list(s.devices)}"
            text = f"compile refuses this: {why}"
            yield Finding("warning", "not-kept", node, s.tensor, text)


def _said(s: ShardingSpec) -> bool:
    """Whether a result is computed with its axes apart, which lifting alone can tell."""
    return any(len(d.shards) > 1 for d in s.dims)
