"""One rank's program as torch traces it, with functional collectives, as the ONNX file that ``tapestry prove`` reads.

Ranks are exported one after another in one process under torch's fake process group; each has a graph of
``torch.ops._c10d_functional``. The collectives become ``DistCollective`` nodes, all else what torch's exporter makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from onnx.defs import OpSchema
from onnxscript import opset18, values
from torch.distributed import distributed_c10d
from torch.export import ExportedProgram

from tapestry.errors import ModelError
from tapestry.frontends.torch_export import write_onnx

NODE, DOMAIN = "DistCollective", "tapestry"
KINDS = {  # of attributes
    "collective_operation": OpSchema.AttrType.STRING,
    "reduce_op": OpSchema.AttrType.STRING,
    "root": OpSchema.AttrType.INT,
    "nb_rank": OpSchema.AttrType.INT,
    "groups": OpSchema.AttrType.INTS,
    "group_size": OpSchema.AttrType.INT,
}
TYPES = ["float", "double", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]


def write_rank(program: ExportedProgram, path: Path) -> None:
    """Write one rank's program, while the process group stands under which it was traced.

    Args:
        path: ``rank0.onnx``, ``rank1.onnx``, … in a folder of their own, and of no other model.

    Raises:
        ModelError: torch has no ONNX form of an operator, or it sends what no ``DistCollective`` does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_onnx(program, path, inline=1 << 40, translations=_translations())


def _translations() -> dict[Any, Callable[..., Any]]:
    o: Any = torch.ops._c10d_functional  # pyright: ignore[reportPrivateUsage] (the operators have no other name)
    return {
        o.all_reduce.default: _all_reduce,
        o.all_gather_into_tensor.default: _all_gather,
        o.broadcast.default: _broadcast,
        o.reduce_scatter_tensor.default: _reduce_scatter,
        o.all_to_all_single.default: _all_to_all,
        o.wait_tensor.default: _wait,
    }


def _all_reduce(x: Any, op: str, group: Any) -> Any:
    return _node(x, "ALL_REDUCE", group, op)


def _all_gather(x: Any, size: int, group: Any) -> Any:
    return _node(x, "ALL_GATHER", group)


def _reduce_scatter(x: Any, op: str, size: int, group: Any) -> Any:
    return _node(x, "REDUCE_SCATTER", group, op)


def _broadcast(x: Any, src: int, group: Any) -> Any:
    return _node(x, "BROADCAST", group, root=src)


def _wait(x: Any) -> Any:
    return cast(Any, opset18).Identity(x)


def _all_to_all(x: Any, out_sizes: Any, in_sizes: Any, group: Any) -> Any:
    if len({*out_sizes, *in_sizes}) > 1:
        raise ModelError("pieces of different sizes are not sent", where="all_to_all_single", why=f"{out_sizes}, {in_sizes}")
    return _node(x, "ALL_TO_ALL", group)


def _node(x: Any, kind: str, group: Any, op: str = "none", *, root: int | None = None) -> Any:
    """A collective of a group, by its name or the group itself."""
    found = cast(Any, distributed_c10d)._resolve_process_group(group) if isinstance(group, str) else group
    ranks = dist.get_process_group_ranks(found)
    return _operator()(
        x,
        collective_operation=kind,
        reduce_op=op.upper(),
        root=-1 if root is None else ranks[root],
        nb_rank=len(ranks),
        groups=ranks,
        group_size=len(ranks),
    )


def _operator() -> Any:
    """The node, with the schema that torch's exporter asks of every operator."""
    one = [OpSchema.FormalParameter(n, "T") for n in "xy"]
    schema = OpSchema(
        NODE,
        DOMAIN,
        1,
        inputs=one[:1],
        outputs=one[1:],
        attributes=[OpSchema.Attribute(n, k, "") for n, k in KINDS.items()],
        type_constraints=[("T", [f"tensor({t})" for t in TYPES], "")],
    )
    return values.Op(values.Opset(DOMAIN, 1), NODE, schema)
