"""Sparse tensors of a file as dense ones: what they are to everything behind the loader."""

from __future__ import annotations

from math import prod

import numpy as np
from onnx import AttributeProto, ModelProto, SparseTensorProto, TensorProto, numpy_helper

from tapestry.errors import ModelError
from tapestry.lift.file.external_data import check_inline, tensor_bytes
from tapestry.lift.file.protos import nested, subgraphs

MOST = 1 << 28  # bytes of all of a model's, once dense


def densify(model: ModelProto) -> None:
    """Make every sparse initializer an initializer, and every sparse constant a constant, in place.

    Raises:
        ModelError: a tensor that contradicts itself, or would be too large.
    """
    left = MOST
    for graph in [model.graph, *(g for n in nested(model.graph.node) for g in subgraphs(n))]:
        for sparse in graph.sparse_initializer:
            left -= _size(sparse, left)
            graph.initializer.append(_dense(sparse))
        graph.ClearField("sparse_initializer")
        for node in graph.node:
            for a in node.attribute:
                if node.op_type == "Constant" and a.name == "sparse_value":
                    left -= _size(a.sparse_tensor, left)
                    dense = _dense(a.sparse_tensor)
                    a.CopyFrom(AttributeProto(name="value", type=AttributeProto.TENSOR, t=dense))


def _size(sparse: SparseTensorProto, left: int) -> int:
    """Bytes of the dense tensor."""
    values = sparse.values
    if any(d < 0 for d in sparse.dims):
        raise _refused(sparse, f"its sizes are {list(sparse.dims)}")
    size = tensor_bytes(TensorProto(name=values.name, data_type=values.data_type, dims=sparse.dims))
    if size > left:
        raise _refused(sparse, f"{size:,} bytes once dense, where {MOST:,} are taken of all sparse tensors together")
    return size


def _dense(sparse: SparseTensorProto) -> TensorProto:
    values, places = sparse.values, sparse.indices
    for t in (values, places):
        if t.data_location == TensorProto.EXTERNAL:
            raise _refused(sparse, "its values lie in another file")
        check_inline(t)
    if places.data_type != TensorProto.INT64 or values.data_type == TensorProto.STRING:
        raise _refused(sparse, "its indices are not of 64 bits, or its values no numbers")
    data, where, shape = numpy_helper.to_array(values), numpy_helper.to_array(places), tuple(sparse.dims)
    try:
        if where.ndim == 2:  # a row of coordinates per value; else places in the tensor read row by row
            where = np.ravel_multi_index(tuple(where.T), shape)
        if data.shape != where.shape or (where < 0).any():
            raise ValueError
        whole = np.zeros(prod(shape), data.dtype)
        whole[where] = data
        return numpy_helper.from_array(whole.reshape(shape), values.name)
    except (ValueError, IndexError, TypeError):
        why = f"values {list(values.dims)} and indices {list(places.dims)} are not those of {list(shape)}"
        raise _refused(sparse, why) from None


def _refused(sparse: SparseTensorProto, why: str) -> ModelError:
    return ModelError("a sparse tensor cannot be read", where=f"tensor '{sparse.values.name}'", why=why, hint="store it dense")
