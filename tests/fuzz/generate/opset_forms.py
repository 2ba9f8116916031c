"""A node of today's form as an earlier opset has it: counts and axes as attributes, what did not exist left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, defs, helper

from tests.fuzz.generate.evaluate import Array, Unfit, need

Attributes = dict[str, Any]
Given = list[Array | None]
Form = Callable[[int, list[str], Given, Attributes], None]
"""(opset, inputs, what those from the second on hold, attributes); inputs and attributes are changed in place."""


def _axes(opset: int, ins: list[str], given: Given, attributes: Attributes) -> None:
    del opset, ins[1:]
    need(not attributes.pop("noop_with_empty_axes", 0), "axes were never empty")
    if given:
        attributes["axes"] = _ints(given[0])


def _split(opset: int, ins: list[str], given: Given, attributes: Attributes) -> None:
    attributes.pop("num_outputs", None)
    if opset < 13:
        del ins[1:]
        if given:
            attributes["split"] = _ints(given[0])


def _pad(opset: int, ins: list[str], given: Given, attributes: Attributes) -> None:
    if opset < 11:
        del ins[1:]
        attributes["pads"] = _ints(given[0])
        if len(given) > 1:
            attributes["value"] = float(_known(given[1]).reshape(-1)[0])


def _slice(opset: int, ins: list[str], given: Given, attributes: Attributes) -> None:
    del opset, ins[1:]
    need(not (len(given) > 3 and set(_ints(given[3])) != {1}), "there were no steps")
    attributes.update(zip(("starts", "ends", "axes"), map(_ints, given[:3]), strict=False))


def _clip(opset: int, ins: list[str], given: Given, attributes: Attributes) -> None:
    del opset, ins[1:]
    attributes.update((k, float(_known(a).reshape(-1)[0])) for k, a in zip(("min", "max"), given, strict=False))


def _topk(opset: int, ins: list[str], given: Given, attributes: Attributes) -> None:
    del opset, ins[1:]
    attributes["k"] = _ints(given[0])[0]


def _resize(opset: int, ins: list[str], given: Given, attributes: Attributes) -> None:
    """Scales alone, with one way to say where cells lie; an Upsample before opset 10."""
    if opset >= 11:
        return
    scales = [float(v) for v in _known(given[1] if len(given) > 1 else None).reshape(-1)]
    mode = attributes.get("mode", b"nearest")
    if not scales or mode == b"cubic" or (opset < 10 and min(scales) < 1):
        raise Unfit("there were only scales of two modes, and an Upsample does not shrink")
    attributes.clear()
    attributes["mode"] = mode
    ins[1:] = ins[2:3] if opset >= 9 else []
    if opset < 9:
        attributes["scales"] = scales


REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
FORMS: dict[str, tuple[int, Form]] = {  # the first opset that has the form of today
    **{f"Reduce{r}": (18, _axes) for r in REDUCTIONS},
    "ReduceSum": (13, _axes), "Squeeze": (13, _axes), "Unsqueeze": (13, _axes), "Split": (18, _split), "Pad": (18, _pad),
    "Slice": (10, _slice), "Clip": (11, _clip), "TopK": (10, _topk), "Resize": (18, _resize),
}  # fmt: skip


def earlier(node: NodeProto, opset: int, constants: Mapping[str, Array]) -> NodeProto:
    """The node as an opset has it.

    Args:
        constants: what the weights hold.

    Raises:
        Unfit: it has no such node, or only for values that are known.
    """
    kind = "Upsample" if node.op_type == "Resize" and opset < 10 else node.op_type
    need(defs.has(kind, max_inclusive_version=opset), f"opset {opset} has no {kind}")
    since, form = FORMS.get(node.op_type, (0, _axes))
    attributes: Attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    ins = list(node.input)
    if opset < since:
        form(opset, ins, [constants.get(i) if i else None for i in node.input[1:]], attributes)
    schema = defs.get_schema(kind, max_inclusive_version=opset)
    if schema.deprecated or not schema.min_input <= len(ins) <= schema.max_input:
        raise Unfit(f"{kind} of opset {opset} has other inputs")
    need(not (opset < 11 and kind == "OneHot"), "places were counted from the front, which constants are held to")
    places = np.array([attributes.get("axis", 0), *attributes.get("axes", [])])
    need(not (opset < 11 and (places < 0).any()), "axes were counted from the front")
    out = helper.make_node(kind, ins, list(node.output), node.name)
    given = {a.name: a for a in node.attribute}
    for name, value in attributes.items():
        if name not in schema.attributes:
            _default(node.op_type, name, value)
        elif name in given:
            out.attribute.append(given[name])
        else:
            out.attribute.append(helper.make_attribute(name, value, attr_type=AttributeProto.INTS if value == [] else None))
    return out


def _default(op: str, name: str, value: Any) -> None:
    """That an attribute which an opset does not have is the one of every node."""
    known = defs.get_schema(op).attributes.get(name)
    if known is None or not known.default_value.type or helper.get_attribute_value(known.default_value) != value:
        raise Unfit(f"an earlier {op} has no {name}")


def _known(a: Array | None) -> Array:
    if a is None:
        raise Unfit("an attribute is a constant")
    return a


def _ints(a: Array | None) -> list[int]:
    return [int(v) for v in _known(a).reshape(-1)]
