"""Layers that repeat in an exported program, written as ONNX once: a program without most of them is translated, and they are
copied in the file.

A layer is what ran in a module whose path ends with a number, the outermost such. Layers are folded where each is the one
before it, node by node: equal operators, constants, sizes and element types, the same values from outside, the parameters of
the same names, and results of the layer before at equal places. The translation makes of a node what its operator, arguments
and sizes say; that it did so is checked on the two last layers that are translated, and where they differ nothing is folded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, cast

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputSpec
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

KEPT = 3  # layers that are translated: the first has what all share, the others are compared
SCOPES = "pkg.torch.onnx.name_scopes"
_NUMBERED = re.compile(r"(.*)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Folded:
    """A program with `KEPT` layers of many.

    Attributes:
        path: of the layers' list; ``numbers``: of all layers in it, in order.
        parameters: weights and buffers that are left out, by name.
        outputs: what the whole program calls its results.
    """

    program: ExportedProgram
    path: str
    numbers: tuple[int, ...]
    parameters: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]


def folded(program: ExportedProgram) -> Folded | None:
    """A program without the layers that are copies of those before; None where there are none to leave out."""
    specs = {s.arg.name: s for s in program.graph_signature.input_specs}
    for path, layers in _lists(program.graph):
        numbers = tuple(layers)
        if len(numbers) < KEPT + 2:
            continue
        nodes = list(layers.values())
        same = (_same(path, specs, pair, layers) for pair in pairwise(numbers[KEPT - 1 :]))
        if all(same) and not _read_outside(program.graph, nodes[KEPT - 1 : -1], {n for layer in nodes for n in layer}):
            return _without(program, path, layers)
    return None


def _lists(graph: Graph) -> list[tuple[str, dict[int, list[Node]]]]:
    """Runs of nodes of numbered modules: the path of their list, and the nodes of each, in order."""
    found: dict[str, dict[int, list[Node]]] = {}
    twice = set[str]()  # lists of which a module runs twice: what a file's nodes are for does not say which time
    for at, nodes in groupby((n for n in graph.nodes if n.op == "call_function"), _layer):
        if at is not None and at[1] in found.get(at[0], {}):
            twice.add(at[0])
        elif at is not None:
            found.setdefault(at[0], {})[at[1]] = list(nodes)
    return [(path, layers) for path, layers in found.items() if path not in twice]


def _layer(n: Node) -> tuple[str, int] | None:
    stack: Mapping[str, tuple[str, Any]] = n.meta.get("nn_module_stack") or {}
    found = next((m for path, _ in stack.values() if (m := _NUMBERED.fullmatch(path))), None)
    return (found[1], int(found[2])) if found else None


def _same(path: str, specs: Mapping[str, InputSpec], pair: tuple[int, int], layers: Mapping[int, list[Node]]) -> bool:
    """Whether the second of two layers is what the first is, with the first in place of the one before that."""
    numbers = list(layers)
    a, b = (layers[k] for k in pair)
    before = layers[numbers[numbers.index(pair[0]) - 1]]
    places = {y: x for ours, theirs in ((before, a), (a, b)) for x, y in zip(ours, theirs, strict=False)}
    own = set(before)  # what both read there is not the same thing of each one's layer before

    def equal(x: Any, y: Any) -> bool:
        if not isinstance(x, Node) or not isinstance(y, Node):
            return type(x) is type(y) and repr(x) == repr(y)  # (0.0 == -0.0)
        if y.op != "placeholder":
            return y not in own and places.get(y, y) is x
        mine, other = specs[x.name], specs[y.name]
        if mine.target is None:
            return x is y
        named = other.target == _renumbered(mine.target, path, *pair)  # (of one layer's for all, copies would read their own)
        return named and mine.kind == other.kind and mine.persistent == other.persistent and _type(x) == _type(y)

    def one(x: Node, y: Node) -> bool:
        mine, theirs = (pytree.tree_flatten((n.args, n.kwargs)) for n in (x, y))
        leaves = zip(mine[0], theirs[0], strict=False)
        return x.target is y.target and mine[1] == theirs[1] and _type(x) == _type(y) and all(equal(*v) for v in leaves)

    return len(before) >= len(a) == len(b) and all(map(one, a, b))


def _type(n: Node) -> list[tuple[str, str, str]]:
    """Sizes and element types of what a node gives."""
    values = pytree.tree_leaves(n.meta.get("val"))
    return [
        (str(v.dtype), str(tuple(v.shape)), str(v.stride())) if isinstance(v, torch.Tensor) else (str(v), "", "")
        for v in values
    ]


def _read_outside(graph: Graph, layers: Sequence[Sequence[Node]], inside: set[Node]) -> bool:
    """Whether nodes in no layer read any of some layers."""
    some = {n for layer in layers for n in layer}
    return any(some & set(n.all_input_nodes) for n in graph.nodes if n not in inside)


def _renumbered(text: str, path: str, old: int, new: int) -> str:
    """A name below a list's item, as it is below another's."""
    return re.sub(rf"(?<![\w.]){re.escape(path)}\.{old}(?![\w])", f"{path}.{new}", text)


def _without(program: ExportedProgram, path: str, layers: Mapping[int, list[Node]]) -> Folded:
    """The program with the first layers alone; what reads the last one reads the last of those."""
    nodes = list(layers.values())
    gone = {n for layer in nodes[KEPT:] for n in layer}
    stays = dict(zip(nodes[-1], nodes[KEPT - 1], strict=True))
    signature = program.graph_signature
    live = {n for n in program.graph.nodes if n not in gone and n.op != "placeholder"}
    read = {i for n in live for i in n.all_input_nodes} | {i for i in program.graph.nodes if not i.users}
    specs = {s.arg.name: s for s in signature.input_specs}
    left = {n.name for n in program.graph.nodes if n.op == "placeholder" and n not in read and specs[n.name].target}
    graph, copies = Graph(), dict[Node, Node]()
    for n in program.graph.nodes:
        if n not in gone and n.name not in left:
            copies[n] = graph.node_copy(n, lambda i: copies[stays.get(i, i)])
    names = {old.name: copies[new].name for old, new in stays.items()}
    ends = {s.arg.name: names[s.arg.name] for s in signature.output_specs if s.arg.name in names}
    outputs = [replace(s, arg=replace(s.arg, name=ends.get(s.arg.name, s.arg.name))) for s in signature.output_specs]
    kept = [s for s in signature.input_specs if s.arg.name not in left]
    parameters = {str(specs[k].target): _data(program, str(specs[k].target)) for k in left}
    smaller = ExportedProgram(
        program.graph_module, graph, ExportGraphSignature(kept, outputs), program.state_dict,
        cast(Any, program).range_constraints, program.module_call_graph, program.example_inputs,
        program.constants, verifiers=program.verifiers,
    )  # fmt: skip
    called = tuple(map(str, program.graph_signature.user_outputs))
    return Folded(smaller, path, tuple(layers), parameters, called)


def _data(program: ExportedProgram, name: str) -> torch.Tensor:
    return cast(torch.Tensor, program.state_dict[name] if name in program.state_dict else program.constants[name])


# in the file


def unfold(model: ir.Model, f: Folded) -> bool:
    """Write the layers that were left out, behind the last one that is there; whether that one is a copy of the one before."""
    graph = model.graph
    first, last = ([n for n in graph if _in(n, f.path, k)] for k in f.numbers[KEPT - 2 : KEPT])
    made = [{v: (k, j) for k, n in enumerate(layer) for j, v in enumerate(n.outputs)} for layer in (first, last)]
    if not last or not _copies(first, last, made, f):
        return False
    taken = {v.name for n in graph for v in n.outputs} | {n.name for n in graph} | set(graph.initializers)
    own, before, behind = set(last), [list(n.outputs) for n in last], last[-1]
    for number in f.numbers[KEPT:]:
        now = list[list[ir.Value]]()
        for n in last:
            ins = [_input(graph, v, made, (before, now), f, number) for v in n.inputs]
            outs = [ir.Value(name=_fresh(f"{v.name}_{number}", taken), shape=v.shape, type=v.type) for v in n.outputs]
            said = {k: _renumbered(x, f.path, f.numbers[KEPT - 1], number) for k, x in n.metadata_props.items()}
            copy = ir.Node(
                n.domain, n.op_type, ins, list(n.attributes.values()), overload=n.overload, version=n.version, outputs=outs,
                name=_fresh(f"{n.name}_{number}", taken), metadata_props=said,
            )  # fmt: skip
            now.append(outs)
            graph.insert_after(behind, copy)
            own.add(behind := copy)
        before = now
    for v, (k, j) in made[1].items():
        for user, at in tuple(v.uses()):
            if user not in own:
                user.replace_input_with(at, before[k][j])
        for at in (at for at, out in enumerate(graph.outputs) if out is v):
            graph.outputs[at] = before[k][j]
    for v, name in zip(graph.outputs, f.outputs, strict=True) if len(set(f.outputs)) == len(graph.outputs) else ():
        v.name = name if name not in taken else v.name
    return True


def _in(n: ir.Node, path: str, number: int) -> bool:
    """Whether a node was made for a layer."""
    return f"'{path}.{number}'" in n.metadata_props.get(SCOPES, "")


def _fresh(name: str, taken: set[str | None]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


Made = list[dict[ir.Value, tuple[int, int]]]
"""Of two layers, the node and the place in its results of each value that is made there."""


def _input(
    graph: ir.Graph, v: ir.Value | None, made: Made, now: tuple[list[list[ir.Value]], list[list[ir.Value]]], f: Folded,
    number: int,
) -> ir.Value | None:  # fmt: skip
    """What a copy reads where the last layer reads a value; ``now`` are results of the layer before, and of its own."""
    if v is None:
        return None
    for values, places in zip(now, made, strict=True):
        if v in places:
            k, j = places[v]
            return values[k][j]
    name = _renumbered(v.name or "", f.path, f.numbers[KEPT - 1], number)
    if name == v.name or v.name not in graph.initializers:
        return v
    if name not in graph.initializers:
        data = TorchTensor(f.parameters[name], name=name)
        graph.register_initializer(ir.Value(name=name, shape=v.shape, type=v.type, const_value=data))
    return graph.initializers[name]


def _copies(first: Sequence[ir.Node], last: Sequence[ir.Node], made: Made, f: Folded) -> bool:
    """Whether two layers are the same nodes, each on what the other has at its place."""

    def equal(x: ir.Value | None, y: ir.Value | None) -> bool:
        if x is None or y is None or x is y:
            return x is y
        if y in made[1]:
            return made[0].get(x) == made[1][y]
        if y in made[0]:
            return x not in made[0]  # the first reads this of the layer before it
        return (y.name or "") == _renumbered(x.name or "", f.path, *f.numbers[KEPT - 2 : KEPT])

    def one(x: ir.Node, y: ir.Node) -> bool:
        types = [[(str(v.shape), str(v.type)) for v in n.outputs] for n in (x, y)]
        kinds = [
            (n.domain, n.op_type, n.overload, len(n.inputs), {k: _said(a) for k, a in n.attributes.items()}) for n in (x, y)
        ]
        return kinds[0] == kinds[1] and types[0] == types[1] and all(map(equal, x.inputs, y.inputs))

    return len(first) == len(last) and all(map(one, first, last))


def _said(a: Any) -> tuple[Any, ...]:
    """An attribute, to be compared."""
    if a.type == ir.AttributeType.TENSOR:
        return (a.type, a.value.dtype, tuple(a.value.shape), a.value.tobytes())
    return (a.type, a.value)
