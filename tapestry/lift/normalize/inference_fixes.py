"""Where onnx's shape inference is wrong, the node is written so that there is nothing to be wrong about.

Pooling with ``ceil_mode``: inference counts a last window that begins in the padding. onnxruntime, torch and the
specification's text leave it out; the node gets explicit padding. STFT: inference takes an absent ``onesided`` for 0,
the specification's default is 1. Resize by a scale that is a little less than was meant (5 cells by
1.4): inference multiplies in float64 and finds 6, onnxruntime and the exporters multiply in float32 and find 7.
ConvTranspose with ``auto_pad`` or ``output_shape``: inference adds ``output_padding`` to the size that is asked for, and
finds nothing where an axis becomes shorter; the node gets explicit padding. Attention that shows its scores over a cache:
inference counts the cache's keys only where the node has the output for all keys.
And where constants would not fold (a Split of sizes, a CastLike), the node is written so that they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from tapestry.lift.file.protos import AFTER, attributes, is_standard, replace_nodes, set_attributes, static_shape, subgraphs
from tapestry.lift.file.weight_data import stored_tensors
from tapestry.lift.normalize.inference import infer_shapes

RESIZES = ("Resize", "Upsample")
POOLS = ("MaxPool", "AveragePool", "LpPool")
MISINFERRED = frozenset({*POOLS, *RESIZES, "STFT", "ConvTranspose"})


def rewrite_misinferred(model: ModelProto) -> bool:
    """Rewrite the nodes whose output size onnx would get wrong, and tell whether any was; sizes must be bound."""
    sides = [n for n in model.graph.node if n.op_type == "STFT" and "onesided" not in attributes(n)]
    for node in sides:
        set_attributes(node, onesided=1)
    return any([_rewrite_pools(model), _rewrite_transposed(model), bool(sides)])


def forget_sizes(declared: ModelProto) -> None:
    """Forget what the file declares, which may be what onnx wrongly inferred."""
    del declared.graph.value_info[:]
    for o in declared.graph.output:
        if o.type.HasField("tensor_type"):
            o.type.tensor_type.ClearField("shape")


def name_cache(node: NodeProto) -> None:
    """Give an Attention that shows its scores over a cache names for all keys and values (passes take unused ones away)."""
    if is_standard(node, "Attention") and len(node.output) > 3 and len(node.input) > 5:
        for k in (1, 2):
            if not node.output[k] and node.output[3] and node.input[3 + k]:
                node.output[k] = f"{node.output[3]}/present{k}"


def pad_loops(graph: GraphProto) -> None:
    """Give Loops back the name of no condition: onnxscript cuts absent inputs off, and onnx's inference counts on two."""
    for node in graph.node:
        if node.op_type == "Loop":
            node.input.extend([""] * (2 - len(node.input)))
        for inner in subgraphs(node):
            pad_loops(inner)


def _rewrite_pools(model: ModelProto) -> bool:
    """Write out the padding of every pool with ``ceil_mode`` whose last window begins in it."""
    changed = False
    for node in (n for n in model.graph.node if is_standard(n, *POOLS)):
        given = attributes(node)
        if not given.get("ceil_mode", 0) or given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b""):
            continue
        size = _spatial(model, node.input[0])  # anew for each: the node before may have changed it
        if size is not None and len(given.get("kernel_shape", ())) == len(size):
            changed |= _pad_pool(node, given, size)
    return changed


def _rewrite_transposed(model: ModelProto) -> bool:
    """Write out the padding of every ConvTranspose that has ``auto_pad`` or ``output_shape``."""
    changed = False
    for node in (n for n in model.graph.node if is_standard(n, "ConvTranspose")):
        given = attributes(node)
        if given.get("auto_pad", b"NOTSET") not in (b"SAME_UPPER", b"SAME_LOWER") and "output_shape" not in given:
            continue
        size, kernel = _spatial(model, node.input[0]), _spatial(model, node.input[1])
        if size is not None and kernel is not None and len(size) == len(kernel):
            changed |= _pad_transposed(node, given, size, kernel)
    return changed


def _pad_transposed(node: NodeProto, given: dict[str, Any], size: list[int], kernel: list[int]) -> bool:
    """Give a ConvTranspose the pads that its other attributes come to.

    The size becomes ``output_shape``, or the input's times stride, or what there is where that is less (as onnxruntime and
    inference have it); what is over goes to both sides, an odd cell to the end with SAME_UPPER.
    """
    rank = len(size)
    stride, dilation = (list(given.get(k, [1] * rank)) for k in ("strides", "dilations"))
    extra = list(given.get("output_padding", [0] * rank))
    wanted = list(given.get("output_shape", [n * s for n, s in zip(size, stride, strict=False)]))[-rank:]
    if any(len(v) != rank for v in (stride, dilation, extra, wanted)):
        return False
    before: list[int] = []
    after: list[int] = []
    for a in range(rank):
        total = stride[a] * (size[a] - 1) + extra[a] + dilation[a] * (kernel[a] - 1) + 1 - wanted[a]
        extra[a] += max(-total, 0) if "output_shape" in given else 0
        less = max(total, 0) // 2
        more = max(total, 0) - less
        upper = given.get("auto_pad") == b"SAME_UPPER"
        before.append(less if upper else more)
        after.append(more if upper else less)
    set_attributes(node, auto_pad=None, output_shape=None, pads=[*before, *after], output_padding=extra)
    return True


def _spatial(model: ModelProto, name: str) -> list[int] | None:
    """The spatial sizes of a value (those behind batch and channels), if they are known."""
    stored = next((t for t in model.graph.initializer if t.name == name), None)
    if stored is not None:
        return list(stored.dims)[2:]
    graph = infer_shapes(model).graph
    shape = static_shape({v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output)}.get(name))
    return None if shape is None else shape[2:]


def _pad_pool(node: NodeProto, given: dict[str, Any], size: list[int]) -> bool:
    """Give a pool the pads at which it has no window that begins in the padding; whether it had one."""
    rank = len(size)
    stride, dilation = (given.get(k, [1] * rank) for k in ("strides", "dilations"))
    pads = list(given.get("pads", [0] * 2 * rank))
    after: list[int] = []
    wrong = False
    for a in range(rank):
        reach = dilation[a] * (given["kernel_shape"][a] - 1) + 1
        windows = -(-(size[a] + pads[a] + pads[rank + a] - reach) // stride[a]) + 1
        if (windows - 1) * stride[a] >= size[a] + pads[a]:
            windows, wrong = windows - 1, True
        after.append(max((windows - 1) * stride[a] + reach - size[a] - pads[a], 0))
    if wrong:
        set_attributes(node, ceil_mode=None, **{"pads": [*pads[:rank], *after], AFTER: pads[rank:]})
    return wrong


def rewrite_scales(model: ModelProto, types: Mapping[str, TypeProto], version: int) -> bool:
    """Have a Resize by known scales give the sizes that float32 gives, and tell whether one had to be written anew. It is the
    first one that has to be: the types behind it are then others.

    With opset 11 the node gets the sizes themselves, before that scales that are greater by what rounding took away.
    """
    nodes = [n for n in model.graph.node if is_standard(n, *RESIZES)]
    constants = stored_tensors(model) if nodes else {}
    return any(_rewrite_scale(model, n, types, constants, version) for n in nodes)


def _rewrite_scale(
    model: ModelProto, node: NodeProto, types: Mapping[str, TypeProto], constants: Mapping[str, TensorProto], version: int
) -> bool:
    given = attributes(node)
    modern = node.op_type == "Resize" and version >= 11
    at = 2 if modern else 1
    dims = types.get(node.input[0], TypeProto()).tensor_type.shape.dim
    axes: list[int] = [a + len(dims) if a < 0 else a for a in given.get("axes", range(len(dims)))]
    if len(node.input) > at and node.input[at] in constants:
        scales = numpy_helper.to_array(constants[node.input[at]])
    else:
        scales = np.array(given.get("scales", []), np.float32)
    crops = given.get("coordinate_transformation_mode") == b"tf_crop_and_resize"
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


def plain_casts(model: ModelProto, types: Mapping[str, TypeProto]) -> bool:
    """Write every CastLike as the Cast that it is, once the type of its second input is known; tell whether there was any.

    onnxscript would drop ``saturate``, and what only gives its type would be read.
    """
    changed = False
    for node in model.graph.node:
        if is_standard(node, "CastLike") and (to := types.get(node.input[1], TypeProto()).tensor_type.elem_type):
            set_attributes(node, to=to)
            node.op_type, changed = "Cast", True
            node.input.pop()
    return changed


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
    if changed:
        replace_nodes(model.graph, nodes)
    return changed


def _pieces(node: NodeProto, types: Mapping[str, TypeProto]) -> list[int] | None:
    """Lengths of what a Split of a list of integers gives; None of any other node."""
    sizes = [_length(types.get(o)) for o in node.output] if is_standard(node, "Split") else [None]
    stated = [n for n in sizes if n is not None]
    return stated if len(stated) == len(sizes) and _length(types.get(node.input[0])) == sum(stated) else None


def _length(type_: TypeProto | None) -> int | None:
    """Of a list of 64-bit integers; None of anything else."""
    shape = static_shape(type_) or []
    return shape[0] if type_ is not None and type_.tensor_type.elem_type == TensorProto.INT64 and len(shape) == 1 else None


def _slice(node: NodeProto, out: str, start: int, end: int, version: int) -> list[NodeProto]:
    name = f"{node.name}/{out}"
    if version < 10:
        made = [onnx.helper.make_node("Slice", node.input[:1], [out], name, starts=[start], ends=[end], axes=[0])]
    else:
        values = [onnx.helper.make_tensor(f"{out}/{k}", TensorProto.INT64, [1], [v]) for k, v in (("from", start), ("to", end))]
        made = [onnx.helper.make_node("Constant", [], [v.name], v.name, value=v) for v in values]
        made.append(onnx.helper.make_node("Slice", [node.input[0], *(v.name for v in values)], [out], name))
    for m in made:
        m.metadata_props.extend(node.metadata_props)
    return made
