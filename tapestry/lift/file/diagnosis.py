"""What every refusal of a model says: the node with its operator, or the value's maker, and what to do."""

from __future__ import annotations

import re

from onnx import ModelProto

from tapestry.errors import ModelError
from tapestry.lift.file.protos import model_nodes, node_name

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
