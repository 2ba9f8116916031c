"""A model whose tensors carry tilings, run as the slides write it: infer shapes, broadcast or all-gather, tile again.

The slides' rule looks at the patterns alone. Where those of a node's inputs and output are equal, every instance runs the
node on its own tiles. That is right for element-wise operations and wrong for others (a MatMul whose inputs are both cut
along the columns), which is found by running the node whole as well. Where they differ, every instance gets all of every
input and keeps its tile of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from tapestry.errors import ModelError
from tapestry.interop import tile_metadata
from tapestry.interop.sharding_specs import name_of
from tapestry.interop.tensor_dictionary import TensorDictionary
from tapestry.interop.tile_changes import naive
from tapestry.interop.tile_patterns import Tiling
from tapestry.lift.file.structure import load
from tapestry.onnx_eval.reference_evaluator import reference_evaluator


@dataclass(frozen=True, slots=True)
class Step:
    """What the slides' evaluation does before a node.

    Attributes:
        moves: (tensor, kind, bytes) of every input that travels.
        wrong: whether instances that run the node on their own tiles get other values than the node has.
    """

    node: str
    op_type: str
    moves: tuple[tuple[str, str, int], ...]
    wrong: bool

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(n for _, _, n in self.moves)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The steps of a run, the model's outputs, and the tilings that were used."""

    steps: tuple[Step, ...]
    outputs: Mapping[str, np.ndarray]
    tilings: Mapping[str, Tiling]


def evaluated(path: Path, feeds: Mapping[str, Any]) -> Evaluation:
    """Run a model's nodes one after another on tensor dictionaries.

    A tensor without a tiling is whole on every instance; inputs and weights start where they are to be, and cost nothing.

    Raises:
        ModelError: a node is outside of what the ONNX reference runs; TapestryError: a tiling does not fit.
    """
    model = load(path)
    tilings = tile_metadata.read(model)
    topology = tile_metadata.read_topology(model)
    count = topology.count if topology else 1 + max([0, *(i for t in tilings.values() for i in t.instances)])
    everywhere = Tiling((1,), tuple(range(count)))
    values: dict[str, np.ndarray] = {t.name: _array(t, path) for t in model.graph.initializer} | dict(feeds)
    steps: list[Step] = []
    for node in model.graph.node:
        step, outs = _node_step(node, model, values, tilings, everywhere)
        steps.append(step)
        values |= outs
    return Evaluation(tuple(steps), {o.name: values[o.name] for o in model.graph.output}, tilings)


def _array(t: Any, path: Path) -> np.ndarray:
    return numpy_helper.to_array(t, str(path.absolute().parent))


def _node_step(
    node: NodeProto, model: ModelProto, values: Mapping[str, np.ndarray], tilings: Mapping[str, Tiling], everywhere: Tiling
) -> tuple[Step, dict[str, np.ndarray]]:
    ins = [t for t in dict.fromkeys(node.input) if t]
    whole = _run(node, model, {t: values[t] for t in ins})
    after = tilings.get(node.output[0], everywhere)
    out_tiles = after.tiles(whole[node.output[0]].shape)
    cut = [t for t in ins if tilings.get(t, everywhere).count > 1]
    if cut and all(
        tilings[t].pattern == after.pattern and set(tilings[t].tiles(values[t].shape)) == set(out_tiles) for t in cut
    ):
        return Step(name_of(node), node.op_type, (), not _local(node, model, values, tilings, after, whole)), whole
    moves: list[tuple[str, str, int]] = []
    for t in ins:
        before = tilings.get(t, everywhere)
        change = naive(before, Tiling((1,), tuple(out_tiles)), values[t].shape)
        if change.cells():
            moves.append((t, change.kind + (" + tile" if after.count > 1 else ""), change.cells() * values[t].itemsize))
    return Step(name_of(node), node.op_type, tuple(moves), False), whole


def _local(
    node: NodeProto,
    model: ModelProto,
    values: Mapping[str, np.ndarray],
    tilings: Mapping[str, Tiling],
    after: Tiling,
    whole: Mapping[str, np.ndarray],
) -> bool:
    """Whether instances get their tiles of the outputs from their own tiles of the inputs."""
    out = node.output[0]
    tiled = {t: TensorDictionary(values[t], g) for t, g in tilings.items() if t in node.input and g.count > 1}
    for i, wanted in TensorDictionary(whole[out], after).extract().items():
        try:
            mine = _run(node, model, {t: tiled[t][i] if t in tiled else values[t] for t in node.input if t})[out]
        except ModelError:  # the tiles' sizes do not go together
            return False
        if mine.shape != wanted.shape or not np.allclose(mine, wanted, rtol=1e-4, atol=1e-5, equal_nan=True):
            return False
    return True


def _run(node: NodeProto, model: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    opsets = {o.domain: o.version for o in model.opset_import}
    try:
        found = reference_evaluator(node, opsets=opsets).run(None, dict(feeds))
    except Exception as e:
        raise ModelError(
            "the ONNX reference does not run the node", where=f"node '{name_of(node)}'", why=str(e)[:200]
        ) from None
    return {o: np.asarray(a) for o, a in zip(node.output, found, strict=True) if o}
