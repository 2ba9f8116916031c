"""The nodes of a model that are the counterpart of an operation: those between the values that both have."""
# pyright: basic

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import FLOATS, Array, numpy_dtype
from tapestry.onnx_eval.opaque_node import RANDOM, Asked
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.verify.model.model_facts import Reader
from tapestry.verify.model.model_values import ModelFile, ReferenceValues, by_name, has_body, run_node

# onnx comes without complete types


CHAIN = 64  # operations that an operation follows back at most, and nodes that are its counterpart
LITERAL = 64  # elements of a constant that tells two counterparts apart
PRODUCTS, WINDOWS = (
    frozenset({"Conv", "MatMul", "Gemm"}),
    frozenset({"MaxPool", "AveragePool", "LpPool", "ConvTranspose", "Resize"}),
)
SMALL = 1 << 16  # elements of a weight that may have other numbers


class NoCounterpart(Exception):
    """An operation has none of its own; the text says why, as a certificate counts it."""


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Nodes in the model's order, and what they read.

    Attributes:
        behind: the operations that the operation follows back.
        values: of the tensors that the operation and the nodes both read, by name, as the reference has them.
        weights: small ones that both read, and that nothing else is made of.
    """

    nodes: tuple[NodeProto, ...]
    outs: tuple[str, ...]
    behind: tuple[Block, ...]
    values: Mapping[str, Array]
    weights: Mapping[str, Array]

    @property
    def operands(self) -> dict[str, Array]:
        return {**self.values, **self.weights}

    def of_products(self) -> bool:
        """Whether what takes the reference long is a product of matrices, which it does in one."""
        return any(n.op_type in PRODUCTS for n in self.nodes) and not any(n.op_type in WINDOWS for n in self.nodes)


@dataclass(slots=True)
class Counterparts:
    """Finds and runs them."""

    graph: Graph
    model: ModelFile
    reference: ReferenceValues
    read: Reader
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    fixed: set[str] = field(init=False)
    makers: dict[str, int] = field(init=False)
    _held: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.makers = self.graph.producers()
        self.fixed = self.model.fixed()

    def known(self, name: str) -> Any:
        """A tensor's value on clean operands; None of one that is to be followed back.

        Of a constant that something was made into, and that stands for a value of the model (it was held to it): that value.
        """
        ref = self.graph.weights.get(name)
        if ref is not None and (ref.file or name not in self.model.makers or name not in self.reference.values):
            return self.read(name)
        if ref is not None or name in self.makers or name in self.reference.values:
            return self.reference.values.get(name)
        value = self._fixed(name)  # a weight that rewriting left behind
        t = self.graph.tensors[name]
        if not is_array(value) or value.shape != t.shape or value.dtype != numpy_dtype(t.dtype):
            raise NoCounterpart("of a constant that is not there")
        return value

    def given(self, name: str) -> bool:
        """Whether a tensor is followed back no further."""
        return name in self.graph.weights or name in self.reference.values or name not in self.makers

    def _behind(self, op: Block) -> tuple[Block, ...]:
        """The operations that an operation follows back to tensors that the model has."""
        found: dict[int, Block] = {}
        stack = list(op.inputs)
        while stack:
            t = stack.pop()
            if self.given(t) or self.makers[t] in found:
                continue
            maker = self.graph.ops[self.makers[t]]
            if not isinstance(maker, Block):
                raise NoCounterpart("behind an opaque node")
            found[self.makers[t]] = maker
            if len(found) >= CHAIN:
                raise NoCounterpart("of a long chain")
            stack += maker.inputs
        return tuple(found[k] for k in sorted(found))

    def of(self, op: Block) -> Counterpart:
        """The counterpart of an operation.

        Raises:
            NoCounterpart: there is none of its own, or one like it was looked at.
        """
        if any(t not in self.reference.values for t in op.outs):
            raise NoCounterpart("of no value")
        behind = self._behind(op)
        chain = [op, *behind]
        read = [t for b in chain for t in b.inputs]
        for t in read:
            if self.given(t):
                self.known(t)
        leaves = {t for t in read if t not in self.graph.weights and is_array(self.reference.values.get(t))}
        nodes = self._between(op.outs, leaves)
        used = {i for n in nodes for i in n.input} & leaves
        if not used:
            raise NoCounterpart("of constants alone")
        if not leaves <= used | self.fixed:  # the same as something that the nodes read, or else refused already
            raise NoCounterpart("of values that its nodes do not read")
        if any(n.op_type in RANDOM or has_body(n) for n in nodes):
            raise NoCounterpart("of a body or random numbers")
        key = (tuple(signature(b, self.graph) for b in chain), tuple(self._text(nodes, used)))
        if key in self.seen:
            raise NoCounterpart("like another one")
        self.seen.add(key)
        values = {t: self.reference.values[t] for t in sorted(used)}
        return Counterpart(tuple(nodes), op.outs, behind, values, self._weights(set(read), nodes))

    def _weights(self, read: set[str], nodes: list[NodeProto]) -> dict[str, Array]:
        """Weights that an operation's counterpart may be asked at other numbers of.

        None where the operation reads a constant that something was made into, or the nodes one that is made of weights.
        """
        wanted = {i for n in nodes for i in n.input if i}
        given = {t for t in read if t in self.graph.weights}
        if any(not self.graph.weights[t].file or t not in wanted or t not in self.model.initializers for t in given):
            return {}
        if any(self.model.nodes[self.model.places[i]].input for i in wanted & self.fixed if i in self.model.places):
            return {}
        found = {t: v for t in sorted(given) if self.graph.tensors[t].dtype in FLOATS and 1 < (v := self.read(t)).size <= SMALL}
        held = [self._fixed(i) for i in sorted((wanted & set(self.model.initializers)) - set(found))]
        alike = {(v.dtype.str, v.shape, v.tobytes()) for v in held if is_array(v) and v.size <= SMALL}
        keys = [(v.dtype.str, v.shape, v.tobytes()) for v in found.values()]
        return found if len(set(keys)) == len(keys) and not alike & set(keys) else {}

    def _between(self, outs: tuple[str, ...], leaves: set[str]) -> list[NodeProto]:
        """The nodes behind some values, from others."""
        found, met, stack = dict[int, None](), set[int](), [(t, False) for t in reversed(outs)]
        while stack:  # a file need not have its nodes in order
            name, done = stack.pop()
            if not name or name in leaves or name in self.fixed:
                continue
            place = self.model.places.get(name)
            if place is None or len(met) > CHAIN:
                raise NoCounterpart("of other nodes")
            if done:
                found.setdefault(place)
            elif place not in met:
                met.add(place)
                stack += [(name, True), *((i, False) for i in self.model.nodes[place].input)]
        return [self.model.nodes[k] for k in found]

    def _text(self, nodes: list[NodeProto], leaves: set[str]) -> Iterator[Any]:
        """What tells nodes apart: operators, attributes, who reads whom, small constants."""
        names: dict[str, Any] = {}
        for k, n in enumerate(nodes):
            ins = [names[i] if i in names else self._leaf(i, i in leaves, names) for i in n.input]
            names |= {o: (k, j) for j, o in enumerate(n.output)}
            yield n.domain, n.op_type, tuple(sorted(a.SerializeToString() for a in n.attribute)), tuple(ins)

    def _leaf(self, name: str, varied: bool, names: dict[str, Any]) -> Any:
        if not name:
            return None
        if varied:
            value = self.reference.values[name]
            found = ("read", len(names), value.dtype.str, value.shape)
        elif (stored := self.model.initializers.get(name)) is not None and np.prod(stored.dims, dtype=float) > LITERAL:
            found = (stored.data_type, tuple(stored.dims))
        else:
            value = self._fixed(name)
            small = is_array(value) and value.size <= LITERAL
            found = (value.dtype.str, value.shape, value.tobytes() if small else b"") if is_array(value) else repr(value)
        names[name] = found
        return found

    def _fixed(self, name: str) -> Any:
        if name not in self._held:
            found = self.reference.get(name)
            if found is None and name not in self.model.makers:
                raise NoCounterpart("of a constant that is not there")
            self._held[name] = self.reference.computed(name) if found is None else found
        return self._held[name]

    def run(
        self,
        part: Counterpart,
        operands: Mapping[str, Any],
        *,
        independent: bool = False,
        wide: bool = False,
        by: Asked | None = None,
    ) -> dict[str, Any]:
        """What the nodes give for operands, by onnxruntime or, ``independent``, by the ONNX reference evaluator; ``wide``: in
        double precision; ``by`` gets the library of each.

        Raises:
            TapestryError: no evaluator runs one of them.
        """

        def made(a: Any) -> Any:
            return a.astype(np.float64) if wide and is_array(a) and a.dtype.kind in "fV" else a

        values = {t: made(a) for t, a in operands.items()}
        for node in part.nodes:
            arrays = [None if not i else values[i] if i in values else made(self._fixed(i)) for i in node.input]
            outs = run_node(node, self.model.opsets, arrays, independent, by)
            values |= by_name(node, outs)
        return {t: values[t] for t in part.outs}

    def of_one_library(self, part: Counterpart, operands: Mapping[str, Any]) -> bool:
        """Whether only one library runs the nodes, or is right, so that all opinions on them are its own."""
        asked = list[Asked]()
        for independent in (False, True):
            asked.append(Asked())
            try:
                self.run(part, operands, independent=independent, by=asked[-1])
            except (TapestryError, ArithmeticError, ValueError, TypeError):
                return True
        return asked[0].libraries == asked[1].libraries

    def opinions(self, part: Counterpart, operands: Mapping[str, Any], slow: bool, wide: bool) -> Iterator[dict[str, Any]]:
        """What every evaluator gives that runs the nodes, each asked when it is wanted; ``slow``: the reference too, ``wide``:
        also in double precision."""
        for way in [
            {},
            *([{"independent": True}] if slow else []),
            *([{"independent": True, "wide": True}] if slow and wide else []),
        ]:
            try:
                made = self.run(part, operands, **way)
            except (TapestryError, ArithmeticError, ValueError, TypeError):
                continue
            if all(is_array(made[t]) and made[t].shape == self.graph.tensors[t].shape for t in part.outs):
                yield made
