"""Who holds what of a tensor: a sheet for every buffer of it, parts in the colours of their devices."""

from __future__ import annotations

from tapestry.errors import TapestryError
from tapestry.ir.kernel import size
from tapestry.ir.program import Reduce, Transfer, allocated, transfer_bytes
from tapestry.ir.types import itemsize
from tapestry.tools.viewer.draw import NONE, Drawing, build_of, by_box, colour, drawing, ranges, tag, words
from tapestry.tools.viewer.index_space_picture import sheet
from tapestry.viz.format import human, shape_text


def tensor(build: object, name: str) -> Drawing:
    """The picture of a tensor's buffers, in the order in which they are made.

    Raises:
        TapestryError: the build has no tensor of that name.
    """
    b = build_of(build)
    if name not in b.plan.graph.tensors:
        raise TapestryError(f"there is no tensor '{name}'", hint="tapestry explain shows their names")
    t, program = b.plan.graph.tensors[name], b.program
    made = {n: s for s in program.steps for n in allocated(s)}
    x, y, parts = 20.0, 40.0, [words(20, 20, f"{name}: {t.dtype} {shape_text(t.shape)}, {human(t.nbytes)}", class_="name")]
    for buffer in (v for v in program.buffers.values() if v.tensor == name and v.field is None):
        held = by_box(buffer.boxes)
        one = len(held) == 1
        svg, wide, tall = sheet(t.shape, [(k, NONE if one else colour(ds[0])) for k, ds in held.items()], list(held))
        step = made.get(buffer.name)
        how = step.kind if isinstance(step, Transfer | Reduce) else "computed" if hasattr(step, "op") else "loaded"
        moved = f", {human(transfer_bytes(step, program))} moved" if isinstance(step, Transfer | Reduce) else ""
        most = max(map(size, held)) * itemsize(t.dtype)
        where = f"whole on {len(next(iter(held.values())))} devices" if one else f"{len(held)} parts of at most {human(most)}"
        notes = words(0, tall + 16, f"{how}{moved}", class_="note") + words(0, tall + 30, where, class_="note")
        parts.append(tag("g", svg + notes, transform=f"translate({x:.1f} {y:.1f})"))
        x, y = (x + max(wide, 190) + 20, y) if x < 500 else (20.0, y + tall + 50)
    parts.append(words(20, y + 175, f"devices: {ranges(range(program.devices))}, in their colours", class_="note"))
    return drawing(760, y + 190, f"who holds what of {name}", parts)
