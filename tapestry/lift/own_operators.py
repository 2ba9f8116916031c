"""Operators of the user's own domain: a file of IR text, or a Python function, says the graph that a node stands for.

The graph takes the node's place where a model is lifted, and the verifier's interpreter of it is the reference for the node.
Nothing of it comes from a model or a plan. The grammar of the files is in docs/howto/operator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TypeProto

from tapestry.errors import LawError, ModelError, TapestryError
from tapestry.ir import laws
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import DTYPES, HOST, Tensor, numpy_dtype
from tapestry.lift.builder import DTYPE_OF, Node, tensor_of
from tapestry.lift.file.protos import MICROSOFT, STANDARD, node_name, static_shape
from tapestry.lift.operator_files import File, Number, Template
from tapestry.lift.registry import LIFTERS, Entry
from tapestry.onnx_eval import own_nodes
from tapestry.verify import interp


def read_operators(text: str, file: str) -> list[Template]:
    """The definitions of a file.

    Raises:
        TextError: with the line and what was expected.
    """
    reader, out = File(text, file), list[Template]()
    while reader.next.kind != "end":
        out.append(reader.template())
    return out


Define = Callable[[Sequence[Tensor], Mapping[str, Number]], "Graph | str"]
"""The graph of a node by its inputs' types and its attributes, or why there is none for these."""
_CODES = {name: code for code, name in DTYPE_OF.items()}
_NAMES = {numpy_dtype(name): name for name in DTYPES if name != HOST}


@dataclass(slots=True)
class OwnOperator:
    """An operator: its definitions, of which the first that fits a node's inputs counts, and where each was read."""

    domain: str
    name: str
    definitions: list[Define] = field(default_factory=list[Define])
    files: list[str] = field(default_factory=list[str])

    def graph(self, inputs: Sequence[Tensor], attributes: Mapping[str, Any], where: str) -> Graph:
        """The graph for some inputs, its laws checked.

        Raises:
            ModelError: no definition fits; TapestryError: one that does is wrong.
        """
        odd = next((a for a, v in attributes.items() if type(v) not in (int, float)), None)
        if odd is not None:
            raise ModelError("attributes of operators of one's own are numbers", where=where, why=f"'{odd}' is none")
        why: list[str] = []
        for define, file in zip(self.definitions, self.files, strict=True):
            found = define(inputs, attributes)
            if isinstance(found, Graph):
                _check(found, inputs, file)
                return found
            why.append(f"{file}: {found}")
        hint = "a definition for these inputs as well"
        raise ModelError(f"no definition of {self.domain}.{self.name} fits", where=where, why="; ".join(why), hint=hint)

    def lift(self, n: Node) -> None:
        """The graph's operations in the place of a node."""
        inputs = [n.tensor(k) for k in range(_given(n.proto, n.where))]
        graph = self.graph(inputs, _attributes(n.proto), n.where)
        _check_outputs(graph, n.proto, n.where)
        outs = dict(zip(graph.outputs, n.outs, strict=False))
        names = dict(zip(graph.inputs, (t.name for t in inputs), strict=True))
        names |= {t: outs.get(t) or n.temp(t) for op in graph.ops for t in op.outs}
        for op in graph.ops:
            assert isinstance(op, Block)
            reads = tuple(replace(r, tensor=names[r.tensor]) for r in op.reads)
            new = replace(op, outs=tuple(names[t] for t in op.outs), reads=reads, source=(n.source,))
            n.b.emit(new, [replace(graph.tensors[t], name=names[t]) for t in op.outs])

    def evaluate(self, node: NodeProto, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of a node for some arrays, by the verifier's interpreter."""
        given = [np.asarray(a) for a in arrays[: _given(node, node_name(node))]]
        inputs = [Tensor(name=f"in{k}", dtype=_NAMES[a.dtype], shape=a.shape) for k, a in enumerate(given)]
        graph = self.graph(inputs, _attributes(node), f"node '{node_name(node)}'")
        values = interp.run(graph, dict(zip(graph.inputs, given, strict=True)))
        return tuple(values[t] for t in graph.outputs[: len(node.output)])


OWN: dict[tuple[str, str], OwnOperator] = {}


def operator(domain: str, name: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """A decorator: a function gives the IR text of an operator's graph.

    The function takes the inputs as tensors (``dtype``, ``shape``), then the node's attributes by name. It is in force in this
    process, in the place of what was there for the operator. Its text has an ``input`` for each of the node's, in their order.

    Raises:
        TapestryError: the domain is not the user's own.
    """

    def add(function: Callable[..., str]) -> Callable[..., str]:
        file = getattr(function, "__qualname__", repr(function))

        def define(inputs: Sequence[Tensor], attributes: Mapping[str, Number]) -> Graph | str:
            try:
                signature(function).bind(*inputs, **attributes)
            except TypeError as e:
                return str(e)
            return parse(function(*inputs, **attributes), file)

        _put(domain, name, [define], [file])
        return function

    return add


def load_operators(*paths: Path) -> None:
    """The operators of some files, in the place of what was there for them.

    Raises:
        TapestryError: one does not read or parse, or an operator is not of the user's own domain.
    """
    found: dict[tuple[str, str], tuple[list[Define], list[str]]] = {}
    for path in paths:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise TapestryError("operators cannot be read", where=str(path), why=str(e)) from None
        for template in read_operators(text, str(path)):
            definitions, files = found.setdefault((template.domain, template.name), ([], []))
            definitions.append(template.define)
            files.append(str(path))
    for key, (definitions, files) in found.items():
        _put(*key, definitions, files)


def own_types(model: ModelProto, types: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Types of results of own operators that ``types`` lacks, where the inputs' are known.

    Raises:
        ModelError: no definition fits a node; TapestryError: one that does is wrong.
    """
    out: dict[str, TypeProto] = {}
    for node in model.graph.node if OWN else ():
        own = OWN.get((node.domain, node.op_type))
        if own is None:
            continue
        where = f"node '{node_name(node)}' ({node.op_type})"
        given = [types.get(i, TypeProto()) for i in node.input[: _given(node, where)]]
        open_ = any(o and static_shape(types.get(o, TypeProto())) is None for o in node.output)
        if not open_ or any(static_shape(t) is None for t in given):
            continue
        inputs = [tensor_of(i, t) for i, t in zip(node.input, given, strict=False)]
        graph = own.graph(inputs, _attributes(node), where)
        _check_outputs(graph, node, where)
        for o, t in zip(node.output, (graph.tensors[t] for t in graph.outputs), strict=False):
            out |= {o: onnx.helper.make_tensor_type_proto(_CODES[t.dtype], t.shape)} if o else {}
    return out


def _put(domain: str, name: str, definitions: list[Define], files: list[str]) -> None:
    if domain in {*STANDARD, MICROSOFT, *(s.domain for s in onnx.defs.get_all_schemas())} or domain.startswith("tapestry."):
        hint = 'operator "com.example" …'
        raise TapestryError(f"'{domain}' is not a domain of your own", where=f"{files[0]}, {name}", hint=hint)
    own = OwnOperator(domain, name, definitions, files)
    OWN[domain, name] = own
    LIFTERS[domain, name] = [Entry(1, own.lift)]
    own_nodes.EVALUATORS[domain, name] = own.evaluate


def _given(node: NodeProto, where: str) -> int:
    """How many inputs a node has: those that it leaves out are its last."""
    count = max((k + 1 for k, i in enumerate(node.input) if i), default=0)
    if not all(node.input[:count]):
        hint = "another operator of one's own, for fewer inputs"
        raise ModelError("an input is left out before another one", where=where, hint=hint)
    return count


def _attributes(node: NodeProto) -> dict[str, Any]:
    named = (a for a in node.attribute if not a.name.startswith("tapestry."))
    return {a.name: onnx.helper.get_attribute_value(a) for a in named}


def _check(graph: Graph, inputs: Sequence[Tensor], file: str) -> None:
    """The graph is of blocks alone, over these inputs, and keeps the laws."""
    wanted = [(t.dtype, t.shape) for t in inputs]
    got = [(graph.tensors[t].dtype, graph.tensors[t].shape) for t in graph.inputs]
    if wanted != got:
        raise TapestryError("the graph is of other inputs than the node", where=file, why=f"{got}, the node has {wanted}")
    written = {t for op in graph.ops for t in op.outs}
    lost = next((t for t in graph.outputs if t not in written), None)
    if graph.weights or lost is not None or any(not isinstance(op, Block) for op in graph.ops):
        why = f"no operation writes its output '{lost}'" if lost is not None else "it has weights, or opaque operations"
        raise TapestryError("an operator's graph is of block operations over its inputs", where=file, why=why)
    try:
        laws.check(graph)
    except LawError as e:
        raise TapestryError("the operator breaks a law", where=f"{file}, {e.where}", why=f"{e.what} {e.why}".strip()) from None


def _check_outputs(graph: Graph, node: NodeProto, where: str) -> None:
    if len(node.output) > len(graph.outputs):
        why = f"it has {len(node.output)}, its definition {len(graph.outputs)}"
        raise ModelError("the node has too many outputs", where=where, why=why)
