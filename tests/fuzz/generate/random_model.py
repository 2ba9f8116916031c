"""Random valid models: some families one after another on the values that are there, then outputs, symbols, a file."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnx import NodeProto, TensorProto, helper, numpy_helper

from tests.fuzz.families import (
    control_flow,
    elementwise_families,
    few_bits,
    host_shapes,
    product_families,
    reduction_families,
    sequence_families,
    view_families,
    window_families,
)
from tests.fuzz.generate.draw import Draw
from tests.fuzz.generate.evaluate import Array, model_of, onnx_type, reads
from tests.fuzz.generate.local_functions import DOMAIN, called
from tests.fuzz.generate.random_blocks import blocks
from tests.fuzz.generate.running_blocks import running

FAMILIES = {
    **elementwise_families.FAMILIES,
    **view_families.FAMILIES,
    **reduction_families.FAMILIES,
    **product_families.FAMILIES,
    **window_families.FAMILIES,
    **sequence_families.FAMILIES,
    **host_shapes.FAMILIES,
    **control_flow.FAMILIES,
    **few_bits.FAMILIES,
}
RUNNING, BLOCKS = "running", "blocks"  # the families of models that are IR text
WEIGHT = {
    "integers": 3, "matmul": 3, "conv": 3, "softmax": 2, "reduce": 2, "binary": 3, "layer_norm": 2, "reshape": 2, "pool": 2,
    "unary": 2,
}  # fmt: skip
OPSETS = (*range(7, 18), *(18, 20, 21, 22, 23) * 3, 24, 25, 26)


@dataclass(frozen=True, slots=True)
class Model:
    """A model and what its values are.

    Attributes:
        outputs: the values that independent evaluators found.
        exact: outputs that no rounding is behind.
        symbols: (input, axis) to the name of a symbolic size.
        families: those that nodes came from.
        text: the model as IR text, where no ONNX nodes say it.
        part: from which node to before which is written as a local function.
    """

    nodes: tuple[NodeProto, ...]
    inputs: Mapping[str, Array]
    weights: Mapping[str, Array]
    outputs: Mapping[str, Array]
    exact: frozenset[str]
    opset: int
    symbols: Mapping[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    families: tuple[str, ...] = ()
    text: str = ""
    part: tuple[int, int] = (0, 0)

    @property
    def sizes(self) -> dict[str, int]:
        """What the symbols stand for."""
        return {s: self.inputs[n].shape[k] for (n, k), s in self.symbols.items()}

    @property
    def given(self) -> dict[str, Array]:
        """Inputs and weights."""
        return {**self.inputs, **self.weights}

    def save(self, path: Path) -> Path:
        """Write the model as an .onnx file, or its text."""
        if self.text:
            path.write_text(self.text)
            return path
        inits = [_proto(n, a) for n, a in self.weights.items()]
        outs = {n: onnx_type(a.dtype) for n, a in self.outputs.items()}
        ranks = {n: a.ndim for n, a in self.outputs.items()}
        wrapped = called(self.nodes, *self.part, self.outputs, self.opset)
        model = model_of(wrapped[0] if wrapped else self.nodes, self.inputs, outs, self.opset, inits, self.symbols, ranks)
        if wrapped:
            model.functions.append(wrapped[1])
            model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        path.write_bytes(model.SerializeToString())
        return path


def _proto(name: str, a: Array) -> TensorProto:
    if a.dtype.name == "bfloat16":
        return helper.make_tensor(name, TensorProto.BFLOAT16, a.shape, a.tobytes(), raw=True)
    return numpy_helper.from_array(a, name)


def random_model(seed: object, most: int = 7) -> Model:
    """A model of up to ``most`` families, the same for the same seed."""
    rng = random.Random(f"model {seed}")
    kind = rng.random()
    if kind < 0.02:
        return _of_text(RUNNING, *running(rng), exact=True)
    if kind < 0.12:
        text, inputs, outs, exact = blocks(rng)
        return _of_text(BLOCKS, text, inputs, outs, exact=exact)
    names = list(FAMILIES)
    weights = [WEIGHT.get(n, 1) for n in names]
    while True:
        d = Draw(rng, rng.choice(OPSETS), zeros=rng.random() < 0.04)
        used: list[str] = []
        for name in rng.choices(names, weights, k=rng.randint(1, most)):
            if d.attempt(FAMILIES[name]):
                used.append(name)
        if d.nodes:
            return _finished(d, tuple(used))


def _of_text(family: str, text: str, inputs: dict[str, Array], outs: dict[str, Array], *, exact: bool) -> Model:
    sure = frozenset(outs if exact else ())
    return Model(nodes=(), inputs=inputs, weights={}, outputs=outs, exact=sure, opset=18, families=(family,), text=text)


def _finished(d: Draw, families: tuple[str, ...]) -> Model:
    read = {i for n in d.nodes for i in reads(n)}
    made = [o for n in d.nodes for o in n.output if o in d.values]
    outputs = [t for t in made if t not in read or d.chance(0.1)]
    outputs = outputs or made[-1:]
    symbols: dict[tuple[str, int], str] = {}
    if d.chance(0.25) and not d.zeros:
        for name, a in d.inputs.items():
            symbols |= {(name, k): f"n{n}" for k, n in enumerate(a.shape) if d.chance(0.4)}
    part = sorted(d.rng.randrange(len(d.nodes) + 1) for _ in range(2)) if d.chance(0.15) else (0, 0)
    return Model(
        part=(part[0], part[1]), nodes=tuple(d.nodes), inputs={n: a for n, a in d.inputs.items() if n in read},
        weights={n: a for n, a in d.weights.items() if n in read}, outputs={t: d.values[t].array for t in outputs},
        exact=frozenset(t for t in outputs if d.values[t].exact), opset=d.opset, families=families,
        symbols={k: s for k, s in symbols.items() if k[0] in read},
    )  # fmt: skip
