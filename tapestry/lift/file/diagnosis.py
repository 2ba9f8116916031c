"""What every refusal of a model says: the node with its operator, or the value's maker, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations

from onnx import ModelProto, TypeProto

from tapestry.errors import ModelError
from tapestry.lift.file.protos import model_nodes, node_name, static_shape

HINT = "look at this place of the model (netron shows it), and check it with onnx.checker.check_model; then export it again"


def complete(e: ModelError, model: ModelProto) -> ModelError:
    """The same refusal, with the operator of the node that it names and a hint, where it lacked them."""
    e.hint = e.hint or HINT
    match = re.fullmatch(r"(?:node )?'([^']*)'", e.where)
    if match and not e.where.startswith("node"):  # a value: whoever makes it
        maker = next((n for n in model_nodes(model) if match[1] in n.output), None)
        if maker is not None:
            e.where = f"node '{node_name(maker)}' ({maker.op_type}), result '{match[1]}'"
    elif match or re.fullmatch(r"[^' ]+", e.where):
        name = match[1] if match else e.where
        node = next((n for n in model_nodes(model) if node_name(n) == name), None)
        if node is not None:
            e.where = f"node '{name}' ({node.op_type})"
    return e


class Contradiction(ModelError):
    """Inputs of a node whose types do not go together; ``shapes`` are theirs, by name, as far as they are known."""

    shapes: Mapping[str, list[int]]


def contradiction(message: str, model: ModelProto, types: Mapping[str, TypeProto]) -> Contradiction:
    """What onnx's inference says of a node, with the shapes that meet there.

    Args:
        types: those that could be inferred before it.
    """
    name = re.search(r"node name: ([^)]*)\)", message) or re.search(r"input '?([^' ]+)'? of node", message)
    text = re.sub(r"\s+", " ", re.sub(r"\[\w+Error\]|Inference error\(s\):", " ", message)).strip()
    node = next((n for n in model.graph.node if name and node_name(n) == name[1]), None)
    known = {t: static_shape(types.get(t)) for t in (node.input if node else ())}
    shapes = {t: s for t, s in known.items() if s is not None}
    sizes = ", ".join(f"'{t}' is {'x'.join(map(str, s)) or 'a scalar'}" for t, s in shapes.items())
    out = Contradiction(
        "shapes or dtypes contradict each other",
        where=f"node '{name[1]}'" if name else "shape inference",
        why=f"{text[:300]}{f': {sizes}' if sizes else ''}",
        hint="check the sizes given with --shape; otherwise the model itself is at fault",
    )
    out.shapes = shapes
    return out


def name_symbols(e: Contradiction, sizes: Mapping[str, int]) -> None:
    """Say which symbol's size meets one that the model has of its own, if any does.

    Args:
        sizes: that were given or found for the symbols of the model's inputs.
    """
    for tensor, size, other in _meetings(e.shapes):
        symbol = next((s for s, n in sizes.items() if n == other), None)
        if symbol and size not in sizes.values():
            e.why += f"; {symbol} is {other}, and '{tensor}' has {size} there, whatever {symbol} is"
            e.hint = f"--shape {symbol}={size}{' or less: the file holds no more' if other > size else ''}"
            return


def _meetings(shapes: Mapping[str, list[int]]) -> Iterator[tuple[str, int, int]]:
    """(tensor, its size, another's size) along axes that broadcast onto each other and do not go together."""
    for (a, one), (b, other) in combinations(shapes.items(), 2):
        for m, n in zip(reversed(one), reversed(other), strict=False):
            if m != n and 1 not in (m, n):
                yield a, m, n
                yield b, n, m
