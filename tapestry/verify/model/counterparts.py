# pyright: basic
# onnx comes without complete types
"""The nodes of a model that are the counterpart of an operation: those between the values that both have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.printer import signature
from tapestry.onnx_eval.opaque_node import RANDOM
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.verify.model.model_facts import Reader
from tapestry.verify.model.model_values import ModelFile, ReferenceValues, run_node, subgraphs

Array = np.ndarray[Any, Any]
SIZES = frozenset({"Shape", "Size"})  # their results are of no value's cells
CHAIN = 64  # operations that an operation follows back at most
LITERAL = 64  # elements of a constant that tells two counterparts apart


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Nodes in the model's order, and what they read.

    Attributes:
        values: of the tensors that the operation and the nodes both read, by name, as the reference has them.
        given: other tensors that the model has, which stay as they are.
    """

    nodes: tuple[NodeProto, ...]
    outs: tuple[str, ...]
    values: Mapping[str, Array]
    given: frozenset[str]


@dataclass(slots=True)
class Counterparts:
    """Finds and runs them."""

    graph: Graph
    model: ModelFile
    reference: ReferenceValues
    read: Reader
    counts: Any
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    fixed: set[str] = field(init=False)
    makers: dict[str, int] = field(init=False)
    _held: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.makers = self.graph.producers()
        self.fixed = set(self.model.initializers)
        for node in self.model.nodes:
            ins = [i for i in node.input if i]
            if node.op_type in SIZES or (
                all(i in self.fixed for i in ins) and node.op_type not in RANDOM and not any(True for _ in subgraphs(node))
            ):
                self.fixed.update(o for o in node.output if o)

    def known(self, name: str) -> Any:
        """A tensor's value on clean operands; None of one that is to be followed back."""
        return self.read(name) if name in self.graph.weights else self.reference.values.get(name)

    def behind(self, op: Block) -> list[Block]:
        """The operations that an operation follows back to tensors that the model has."""
        makers = self.makers
        found: dict[int, Block] = {}
        stack = list(op.inputs)
        while stack:
            t = stack.pop()
            if t in self.graph.weights or t in self.reference.values or makers.get(t) is None or makers[t] in found:
                continue
            maker = self.graph.ops[makers[t]]
            if isinstance(maker, Block):
                found[makers[t]] = maker
            stack += maker.inputs
        return [found[k] for k in sorted(found)]

    def of(self, op: Block) -> Counterpart | None:
        """The counterpart of an operation; None where there is none of its own, or one like it was looked at."""
        chain = [op, *self.behind(op)]
        if len(chain) > CHAIN:
            self.counts["awkward: long chains"] += 1
            return None
        read = [t for b in chain for t in b.inputs]
        leaves = {t for t in read if t not in self.graph.weights and is_array(self.reference.values.get(t))}
        nodes = self._between(op.outs, leaves)
        if nodes is None:
            self.counts["awkward: no counterpart"] += 1
            return None
        used = {i for n in nodes for i in n.input} & leaves
        if not used or any(n.op_type in RANDOM or any(True for _ in subgraphs(n)) for n in nodes):
            return None
        key = (tuple(signature(b, self.graph) for b in chain), tuple(self._text(nodes, used)))
        if key in self.seen:
            return None
        self.seen.add(key)
        values = {t: self.reference.values[t] for t in sorted(used)}
        return Counterpart(tuple(nodes), op.outs, values, frozenset({*self.reference.values, *self.graph.weights} - used))

    def _between(self, outs: tuple[str, ...], leaves: set[str]) -> list[NodeProto] | None:
        """The nodes behind some values, from others; None where these are made of more than those."""
        found, met, stack = dict[int, None](), set[int](), [(t, False) for t in reversed(outs)]
        while stack:  # a file need not have its nodes in order
            name, done = stack.pop()
            if not name or name in leaves or name in self.fixed:
                continue
            place = self.model.places.get(name)
            if place is None:
                return None
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
            self._held[name] = self.reference.computed(name) if found is None else found
        return self._held[name]

    def run(
        self, part: Counterpart, operands: Mapping[str, Any], *, independent: bool = False, wide: bool = False
    ) -> dict[str, Any]:
        """What the nodes give for operands, by onnxruntime or, ``independent``, by the ONNX reference evaluator; ``wide``: in
        double precision.

        Raises:
            TapestryError: no evaluator runs one of them.
        """

        def made(a: Any) -> Any:
            return a.astype(np.float64) if wide and is_array(a) and a.dtype.kind in "fV" else a

        values = {t: made(a) for t, a in operands.items()}
        for node in part.nodes:
            arrays = [None if not i else values[i] if i in values else made(self._fixed(i)) for i in node.input]
            outs = run_node(_nameless(node), self.model.opsets, arrays, independent)
            values.update(zip([o for o in node.output if o], outs, strict=True))
        return {t: values[t] for t in part.outs}

    def opinions(self, part: Counterpart, operands: Mapping[str, Any], slow: bool) -> Iterator[dict[str, Any]]:
        """What every evaluator gives that runs the nodes, each asked when it is wanted."""
        for way in [{}, {"independent": True}, {"independent": True, "wide": True}] if slow else [{}]:
            try:
                made = self.run(part, operands, **way)
            except (TapestryError, ArithmeticError, ValueError, TypeError):
                continue
            if all(is_array(made[t]) and made[t].shape == self.graph.tensors[t].shape for t in part.outs):
                yield made


def _nameless(node: NodeProto) -> NodeProto:
    """A node by places, so that evaluators are made once for all that are alike."""
    out = NodeProto()
    out.CopyFrom(node)
    out.ClearField("name")
    out.ClearField("doc_string")
    out.ClearField("metadata_props")
    out.input[:] = [f"i{k}" if n else "" for k, n in enumerate(node.input)]
    out.output[:] = [f"o{k}" if n else "" for k, n in enumerate(node.output)]
    return out
