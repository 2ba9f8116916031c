"""Where onnx's shape inference is wrong, the node is written so that there is nothing to be wrong about.

Pooling with ``ceil_mode``: inference counts a last window that begins in the padding. onnxruntime, torch and the
specification's text leave it out; the node gets explicit padding. STFT: inference takes an absent ``onesided`` for 0,
the specification's default is 1. Resize by a scale that is a little less than was meant (5 cells by
1.4): inference multiplies in float64 and finds 6, onnxruntime and the exporters multiply in float32 and find 7.
ConvTranspose with ``auto_pad`` or ``output_shape``: inference adds ``output_padding`` to the size that is asked for, and
finds nothing where an axis becomes shorter; the node gets explicit padding. Attention that shows its scores over a cache:
inference counts the cache's keys only where the node has the output for all keys.
And where constants would not fold (a Split of sizes), the node is written so that they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TypeProto, numpy_helper

from tapestry.lift.normalize.inference import infer_shapes

RESIZES = ("Resize", "Upsample")
POOLS = ("MaxPool", "AveragePool", "LpPool")
SETTLED = frozenset({*POOLS, *RESIZES, "STFT", "ConvTranspose"})
AFTER = "tapestry.after"  # the padding that was written in the file: what count_include_pad counts


def settle(model: ModelProto) -> bool:
    """Rewrite the nodes whose output size onnx would get wrong, and tell whether any was; sizes must be bound."""
    sides = [n for n in model.graph.node if n.op_type == "STFT" and not any(a.name == "onesided" for a in n.attribute)]
    for node in sides:
        node.attribute.append(onnx.helper.make_attribute("onesided", 1))
    return any([_settle_pools(model), _settle_transposed(model), bool(sides)])


def forget_sizes(declared: ModelProto) -> None:
    """Forget what the file declares, which may be what onnx wrongly inferred."""
    del declared.graph.value_info[:]
    for o in declared.graph.output:
        if o.type.HasField("tensor_type"):
            o.type.tensor_type.ClearField("shape")


def name_cache(node: NodeProto) -> None:
    """Give an Attention that shows its scores over a cache names for all keys and values (passes take unused ones away)."""
    if node.op_type == "Attention" and node.domain in ("", "ai.onnx") and len(node.output) > 3 and len(node.input) > 5:
        for k in (1, 2):
            if not node.output[k] and node.output[3] and node.input[3 + k]:
                node.output[k] = f"{node.output[3]}/present{k}"


def _settle_pools(model: ModelProto) -> bool:
    changed = False
    pools = [n for n in model.graph.node if n.op_type in POOLS and n.domain in ("", "ai.onnx")]
    for node in pools:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if not attributes.get("ceil_mode", 0) or attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b""):
            continue
        size = _spatial(model, node.input[0])  # anew for each: the node before may have changed it
        if size is not None and len(attributes.get("kernel_shape", ())) == len(size):
            changed |= _settle(node, attributes, size)
    return changed


def _settle_transposed(model: ModelProto) -> bool:
    """Write out the padding of every ConvTranspose that has ``auto_pad`` or ``output_shape``."""
    changed = False
    for node in model.graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        same = attributes.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER")
        if node.op_type != "ConvTranspose" or node.domain not in ("", "ai.onnx") or not (same or "output_shape" in attributes):
            continue
        size, kernel = _spatial(model, node.input[0]), _spatial(model, node.input[1])
        if size is not None and kernel is not None and len(size) == len(kernel):
            changed |= _write_padding(node, attributes, size, kernel)
    return changed


def _write_padding(node: NodeProto, attributes: dict[str, Any], size: list[int], kernel: list[int]) -> bool:
    """The size becomes ``output_shape``, or the input's times stride, or what there is where that is less (as onnxruntime and
    inference have it); what is over goes to both sides, an odd cell to the end with SAME_UPPER."""
    rank = len(size)
    stride, dilation = (list(attributes.get(k, [1] * rank)) for k in ("strides", "dilations"))
    extra = list(attributes.get("output_padding", [0] * rank))
    wanted = list(attributes.get("output_shape", [n * s for n, s in zip(size, stride, strict=False)]))[-rank:]
    if any(len(v) != rank for v in (stride, dilation, extra, wanted)):
        return False
    before, after = [], []
    for a in range(rank):
        total = stride[a] * (size[a] - 1) + extra[a] + dilation[a] * (kernel[a] - 1) + 1 - wanted[a]
        extra[a] += max(-total, 0) if "output_shape" in attributes else 0
        less = max(total, 0) // 2
        more = max(total, 0) - less
        upper = attributes.get("auto_pad") == b"SAME_UPPER"
        before.append(less if upper else more)
        after.append(more if upper else less)
    for k in reversed(range(len(node.attribute))):
        if node.attribute[k].name in ("auto_pad", "output_shape", "output_padding", "pads"):
            del node.attribute[k]
    node.attribute.append(onnx.helper.make_attribute("pads", [*before, *after]))
    node.attribute.append(onnx.helper.make_attribute("output_padding", extra))
    return True


def _spatial(model: ModelProto, name: str) -> list[int] | None:
    stored = next((t for t in model.graph.initializer if t.name == name), None)
    if stored is not None:
        return list(stored.dims)[2:]
    graph = infer_shapes(model).graph
    types: dict[str, TypeProto] = {v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output)}
    t = types.get(name, TypeProto()).tensor_type
    known = t.HasField("shape") and all(d.HasField("dim_value") for d in t.shape.dim)
    return [d.dim_value for d in t.shape.dim][2:] if known else None


def _settle(node: NodeProto, attributes: dict, size: list[int]) -> bool:
    rank = len(size)
    stride = attributes.get("strides", [1] * rank)
    dilation = attributes.get("dilations", [1] * rank)
    pads = list(attributes.get("pads", [0] * 2 * rank))
    after, wrong = [], False
    for a in range(rank):
        reach = dilation[a] * (attributes["kernel_shape"][a] - 1) + 1
        windows = -(-(size[a] + pads[a] + pads[rank + a] - reach) // stride[a]) + 1
        if (windows - 1) * stride[a] >= size[a] + pads[a]:
            windows, wrong = windows - 1, True
        after.append(max((windows - 1) * stride[a] + reach - size[a] - pads[a], 0))
    if not wrong:
        return False
    for k in reversed(range(len(node.attribute))):
        if node.attribute[k].name in ("ceil_mode", "pads"):
            del node.attribute[k]
    node.attribute.append(onnx.helper.make_attribute("pads", [*pads[:rank], *after]))
    node.attribute.append(onnx.helper.make_attribute(AFTER, pads[rank:]))
    return True


def settle_scales(model: ModelProto, types: Mapping[str, TypeProto], version: int) -> bool:
    """Have a Resize by known scales give the sizes that float32 gives, and tell whether one had to be written anew. It is the
    first one that has to be: the types behind it are then others.

    With opset 11 the node gets the sizes themselves, before that scales that are greater by what rounding took away.
    """
    nodes = [n for n in model.graph.node if n.op_type in RESIZES and n.domain in ("", "ai.onnx")]
    if not nodes:
        return False
    known = {t.name: t for t in model.graph.initializer}
    known |= {n.output[0]: a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"}
    return any(_settle_scales(model, n, types, known, version) for n in nodes)


def _settle_scales(
    model: ModelProto, node: NodeProto, types: Mapping[str, TypeProto], known: Mapping[str, onnx.TensorProto], version: int
) -> bool:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    modern = node.op_type == "Resize" and version >= 11
    at = 2 if modern else 1
    dims = types.get(node.input[0], TypeProto()).tensor_type.shape.dim
    axes: list[int] = [a + len(dims) if a < 0 else a for a in attributes.get("axes", range(len(dims)))]
    if len(node.input) > at and node.input[at] in known:
        scales = numpy_helper.to_array(known[node.input[at]])
    else:
        scales = np.array(attributes.get("scales", []), np.float32)
    crops = attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize"
    if crops or len(node.input) > 3 or scales.dtype != np.float32 or not axes or scales.shape != (len(axes),):
        return False
    if not all(0 <= a < len(dims) and dims[a].HasField("dim_value") for a in axes):
        return False
    if not ((scales > 0) & (scales < np.iinfo(np.int16).max)).all():
        return False
    size = np.array([dims[a].dim_value for a in axes])
    wanted = np.floor(size.astype(np.float32) * scales).astype(np.int64)
    if (wanted == np.floor(size * scales.astype(np.float64))).all():
        return False
    made = numpy_helper.from_array(wanted if modern else _greater(size, scales, wanted), f"{node.output[0]}/sizes")
    if modern:
        none = numpy_helper.from_array(np.zeros(0, np.float32), f"{node.output[0]}/scales")
        node.input[2] = "" if version >= 13 else none.name  # an input may not be left out before
        node.input.append(made.name)
        model.graph.initializer.extend([none] if version < 13 else [])
    elif len(node.input) > 1:
        node.input[1] = made.name
    else:
        next(a for a in node.attribute if a.name == "scales").floats[:] = numpy_helper.to_array(made).tolist()
        return True
    model.graph.initializer.append(made)
    return True


def _greater(size: np.ndarray, scales: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Scales of which the exact product too reaches the size that is wanted."""
    low = size * scales.astype(np.float64) < wanted
    return np.where(low, np.nextafter(scales, np.float32(np.inf)), scales).astype(np.float32)


def slice_sizes(model: ModelProto, types: Mapping[str, TypeProto], version: int) -> bool:
    """Write every Split of a list of integers (a shape, most often) as Slices, and tell whether there was any.

    onnxscript folds no node of several outputs: the sizes would be unknown, and all that is reshaped by them.
    """
    nodes: list[NodeProto] = []
    changed = False
    for node in model.graph.node:
        sizes = _pieces(node, types)
        changed |= sizes is not None
        if sizes is None:
            nodes.append(node)
            continue
        at = 0
        for o, n in zip(node.output, sizes, strict=True):
            nodes += _slice(node, o, at, at + n, version)
            at += n
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return changed


def _pieces(node: NodeProto, types: Mapping[str, TypeProto]) -> list[int] | None:
    """Lengths of what a Split of a list of integers gives; None of any other node."""
    if node.op_type != "Split" or node.domain not in ("", "ai.onnx"):
        return None
    sizes = [_length(types.get(o)) for o in node.output]
    known = [n for n in sizes if n is not None]
    return known if len(known) == len(sizes) and _length(types.get(node.input[0])) == sum(known) else None


def _length(type_: TypeProto | None) -> int | None:
    """Of a list of 64-bit integers; None of anything else."""
    t = type_.tensor_type if type_ is not None else TypeProto().tensor_type
    dims = t.shape.dim
    one = t.elem_type == onnx.TensorProto.INT64 and len(dims) == 1 and dims[0].HasField("dim_value")
    return dims[0].dim_value if one else None


def _slice(node: NodeProto, out: str, start: int, end: int, version: int) -> list[NodeProto]:
    name = f"{node.name}/{out}"
    if version < 10:
        made = [onnx.helper.make_node("Slice", node.input[:1], [out], name, starts=[start], ends=[end], axes=[0])]
    else:
        values = [
            onnx.helper.make_tensor(f"{out}/{k}", onnx.TensorProto.INT64, [1], [v]) for k, v in (("from", start), ("to", end))
        ]
        made = [onnx.helper.make_node("Constant", [], [v.name], v.name, value=v) for v in values]
        made.append(onnx.helper.make_node("Slice", [node.input[0], *(v.name for v in values)], [out], name))
    for m in made:
        m.metadata_props.extend(node.metadata_props)
    return made
