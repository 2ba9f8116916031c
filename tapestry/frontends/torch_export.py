"""torch modules to ONNX files: exported without being run, every parameter under its own name and written once.

Modules on the meta device are exported as well: their weights have a place, and no data.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast

import onnx_ir as ir
import torch
from onnx_ir import convenience, external_data
from onnx_ir.tensor_adapters import TorchTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputSpec
from torch.fx import Graph, Node
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree

from tapestry.errors import ModelError, TapestryError

# Layers that repeat in an exported program, written as ONNX once: a program without most of them is translated, and they are
# copied in the file.
#
# A layer is what ran in a module whose path ends with a number, the outermost such. Layers are folded where each is the one
# before it, node by node: equal operators, constants, sizes and element types, the same values from outside, the parameters of
# the same names, and results of the layer before at equal places. The translation makes of a node what its operator, arguments
# and sizes say; that it did so is checked on the two last layers that are translated, and where they differ nothing is folded.


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
        same = (_equal_layers(path, specs, pair, layers) for pair in pairwise(numbers[KEPT - 1 :]))
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


def _equal_layers(path: str, specs: Mapping[str, InputSpec], pair: tuple[int, int], layers: Mapping[int, list[Node]]) -> bool:
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
        return named and mine.kind == other.kind and mine.persistent == other.persistent and _given_types(x) == _given_types(y)

    def one(x: Node, y: Node) -> bool:
        mine, theirs = (pytree.tree_flatten((n.args, n.kwargs)) for n in (x, y))
        leaves = zip(mine[0], theirs[0], strict=False)
        return (
            x.target is y.target
            and mine[1] == theirs[1]
            and _given_types(x) == _given_types(y)
            and all(equal(*v) for v in leaves)
        )

    return len(before) >= len(a) == len(b) and all(map(one, a, b))


def _given_types(n: Node) -> list[tuple[str, str, str]]:
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
        program.graph_module,
        graph,
        ExportGraphSignature(kept, outputs),
        program.state_dict,
        cast(Any, program).range_constraints,
        program.module_call_graph,
        program.example_inputs,
        program.constants,
        verifiers=program.verifiers,
    )
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
                n.domain,
                n.op_type,
                ins,
                list(n.attributes.values()),
                overload=n.overload,
                version=n.version,
                outputs=outs,
                name=_fresh(f"{n.name}_{number}", taken),
                metadata_props=said,
            )
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
    graph: ir.Graph,
    v: ir.Value | None,
    made: Made,
    now: tuple[list[list[ir.Value]], list[list[ir.Value]]],
    f: Folded,
    number: int,
) -> ir.Value | None:
    """What a copy reads where the last layer reads a value; ``now`` are results of the layer before, and of its own."""
    if v is None:
        return None
    for results, places in zip(now, made, strict=True):
        if v in places:
            k, j = places[v]
            return results[k][j]
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
            (n.domain, n.op_type, n.overload, len(n.inputs), {k: _attribute_text(a) for k, a in n.attributes.items()})
            for n in (x, y)
        ]
        return kinds[0] == kinds[1] and types[0] == types[1] and all(map(equal, x.inputs, y.inputs))

    return len(first) == len(last) and all(map(one, first, last))


def _attribute_text(a: Any) -> tuple[Any, ...]:
    """An attribute, to be compared."""
    if a.type == ir.AttributeType.TENSOR:
        return (a.type, a.value.dtype, tuple(a.value.shape), a.value.tobytes())
    return (a.type, a.value)


INLINE = 1024  # bytes up to which a tensor stays in the ONNX file
ABSENT = "absent.bin"
LONG = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node", "namespace")  # what nobody reads here
Stored = Callable[[str, ir.TensorProtocol], "ir.ExternalTensor | torch.Tensor | None"]
"""Where a weight's data is: in a file beside the model, in another tensor, or nowhere but in the tensor itself."""


def exported(module: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any = None) -> ExportedProgram:
    """A module as a graph, in inference mode, on the device where its parameters are.

    Args:
        example_inputs: positional arguments in a tuple (one tensor may stand alone), or all arguments by name.

    Raises:
        TapestryError: no inputs are given; ModelError: torch cannot export the module.
    """
    if example_inputs is None:
        hint = "tapestry.compile(module, example_inputs=(x,))"
        raise TapestryError("a torch module needs example inputs", where=type(module).__name__, hint=hint)
    named = dict(cast("Mapping[str, Any]", example_inputs)) if isinstance(example_inputs, Mapping) else dict[str, Any]()
    alone = not isinstance(example_inputs, Mapping | tuple | list)
    values: tuple[Any, ...] = () if named else (example_inputs,) if alone else tuple(cast("Sequence[Any]", example_inputs))
    first = next(iter(module.parameters()), None)
    if first is not None and first.is_meta:
        values, named = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (values, named))
    if any(map(_differs_in_training, module.modules())):
        warn_of_training(type(module).__name__)
    with _inference(module), _settled(module, (values, named)), _explained(module):
        return torch.export.export(module, values, named, dynamic_shapes=dynamic_shapes, strict=False)


def warn_of_training(what: str = "the module") -> None:
    """Say that a module is not compiled in the mode that it is in."""
    text = "is in training mode and is compiled as in eval(): without dropout, batch norm by its running statistics"
    warnings.warn(f"{what} {text}; call .eval() first if that is meant", UserWarning, stacklevel=2)


_DROPPING = (_DropoutNd, torch.nn.MultiheadAttention, torch.nn.RNNBase)


def _differs_in_training(m: torch.nn.Module) -> bool:
    """Whether a module, without those in it, computes something else in training, the mode that it is in."""
    if not m.training or not type(m).__module__.startswith("torch.nn."):
        return m.training and "training" in getattr(getattr(type(m).forward, "__code__", None), "co_names", ())
    rates = getattr(m, "p", 0.0), getattr(m, "dropout", 0.0)
    dropped = any(isinstance(p, int | float) and p > 0 for p in rates) and isinstance(m, _DROPPING)
    return dropped or getattr(m, "running_mean", None) is not None


@contextmanager
def _inference(module: torch.nn.Module) -> Generator[None]:
    """A module without dropout; afterwards every part of it is in the mode that it was in."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, training in modes:
            m.training = training


@contextmanager
def _settled(module: torch.nn.Module, inputs: Any) -> Generator[None]:
    """transformers' settings that a graph needs, for the time of the export: no cache among the results, unless one is given;
    and experts as products of the weights that the route selects, not as loops over what the data select."""
    cached = any("Cache" in type(x).__name__ for x in pytree.tree_leaves(inputs, is_leaf=lambda x: "Cache" in type(x).__name__))
    wanted = {"_experts_implementation": "batched_mm"} | ({} if cached else {"use_cache": False})
    configs = {id(c): c for c in (getattr(m, "config", None) for m in module.modules()) if c is not None}
    before = [(c, k, getattr(c, k)) for c in configs.values() for k in wanted if getattr(c, k, None) is not None]
    for config, key, _ in before:
        setattr(config, key, wanted[key])
    try:
        yield
    finally:
        for config, key, value in before:
            setattr(config, key, value)


@contextmanager
def _explained(what: object) -> Generator[None]:
    """What torch says of a module that it cannot export, in one line; its warnings are about itself.

    Objects in cycles are not looked for meanwhile: an export makes millions of objects that stay, and looking through all of
    them again and again takes a third of its time.
    """
    collects = gc.isenabled()
    gc.disable()
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)  # torchvision may be absent
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except TapestryError:
            raise
        except Exception as e:  # (torch raises classes of its own, of no common base)
            where = type(what).__name__
            raise ModelError("torch cannot export the module", where=where, why=_reason(e), hint=_hint(e)) from None
        finally:
            if collects:
                gc.enable()


def _reason(e: BaseException) -> str:
    """The line that says what is wrong: torch puts it behind advice and a list of causes, the first of them last."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", s).strip() for s in str(e).splitlines()]
    at = next((k + 1 for k, s in enumerate(lines) if "Exception summary" in s), 0)
    said = next((s for s in lines[at:] if s), type(e).__name__)
    return re.sub(r"^<class '[\w.]*'>: ", "", said)


def _hint(e: BaseException) -> str:
    text = str(e)
    if "Cache'> in output" in text:
        return "call it with use_cache=False (model.config.use_cache = False)"
    if "No ONNX function found" in text:
        return "write this operator as ordinary tensor operations, or give an ONNX file in which it is expanded"
    if "You must specify exactly one of" in text or "decoder_input" in text:
        return 'example_inputs={"input_ids": ids, "decoder_input_ids": ids} for a model of an encoder and a decoder'
    return "inputs are those of the module's forward; branches on data cannot be exported (torch.export.export says more)"


def write_onnx(
    program: ExportedProgram,
    path: Path,
    stored: Stored = lambda name, tensor: None,
    *,
    inline: int = INLINE,
    dynamic_shapes: Any = None,
    translations: Mapping[Any, Callable[..., Any]] | None = None,
) -> bool:
    """Write an exported program as ONNX; weights of more than ``inline`` bytes go to one file beside it, each once.

    Args:
        translations: what becomes of operators that torch's exporter does not know.

    Returns:
        whether all its data is there.

    Raises:
        ModelError: torch has no ONNX form of an operator.
    """
    with _explained(program):
        model = _translated(program, translations or {})
    for node in model.graph:
        for key in LONG:  # nine tenths of the file
            node.metadata_props.pop(key, None)
    _name_symbols(model, dynamic_shapes)
    _name_outputs(model, program)
    _tie(model)
    own: list[ir.Value] = []
    absent = 0
    for value in model.graph.initializers.values():
        tensor, name = value.const_value, value.name or ""
        raw = getattr(tensor, "raw", None)
        if tensor is None or not isinstance(raw, torch.Tensor):
            continue
        place = stored(name, tensor)
        if isinstance(place, torch.Tensor):
            value.const_value = TorchTensor(place, name=name)
        elif place is not None:
            value.const_value = place
            continue
        elif raw.is_meta:
            value.const_value = placed(tensor, name, ABSENT, absent)
            absent += raw.nbytes
            continue
        if raw.nbytes > inline:
            own.append(value)
    _store_apart(own, path.parent)
    cast(Any, ir).save(model, path)
    return not absent


def _store_apart(values: Sequence[ir.Value], folder: Path) -> None:
    """Write weights to one file, whose name is made of what is where in it: exports of the same layout may share it."""
    layout = repr([(v.name, v.shape, v.dtype) for v in values]).encode()
    data = f"tapestry-{hashlib.sha256(layout).hexdigest()[:12]}.bin"
    tensors = [v.const_value for v in values if v.const_value is not None]
    written: list[ir.ExternalTensor] = cast(Any, external_data).convert_tensors_to_external(tensors, folder, data)
    for value, kept in zip(values, written, strict=True):
        value.const_value = kept


def _translated(program: ExportedProgram, translations: Mapping[Any, Callable[..., Any]]) -> ir.Model:
    """The program in ONNX's operators; layers that repeat are translated once, but where operators are the caller's own."""

    def whole(p: ExportedProgram) -> ir.Model:
        options = {"optimize": False, "verbose": False, "custom_translation_table": dict(translations)}
        try:
            return cast(Any, torch.onnx).export(p, dynamo=True, **options).model
        except torch.onnx.OnnxExporterError as e:
            if "Cannot view a tensor" not in str(e) or not _copied_before_views(p):
                raise
            return cast(Any, torch.onnx).export(p, dynamo=True, **options).model

    fewer = None if translations else folded(program)
    if fewer is not None and unfold(model := whole(fewer.program), fewer):
        return model
    return whole(program)


def _copied_before_views(program: ExportedProgram) -> bool:
    """Lay tensors out in order before they are viewed; whether any is.

    Attention's decomposition leaves other strides than attention itself, and a view that is right behind the one is refused
    behind the other. A copy is nothing in ONNX.
    """
    aten, graph = torch.ops.aten, program.graph
    views = [n for n in graph.nodes if n.target in (aten.view.default, aten.reshape.default)]
    for view in views:
        with graph.inserting_before(view):
            copy = graph.call_function(aten.clone.default, (view.args[0],), {"memory_format": torch.contiguous_format})
        copy.meta = {k: v for k, v in view.args[0].meta.items() if k != "nn_module_stack"}
        view.args = (copy, *view.args[1:])
    return bool(views)


def placed(tensor: ir.TensorProtocol, name: str, file: str, offset: int) -> ir.ExternalTensor:
    """A weight's place in a file beside the model."""
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(file, offset, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir=".")


def _name_symbols(model: ir.Model, dynamic_shapes: Any) -> None:
    """Sizes get the names that the user gave them (`torch.export.Dim`), which an exported program does not keep."""
    named = {v.name: v for v in model.graph.inputs}
    by_name = isinstance(dynamic_shapes, Mapping)
    given = cast("Mapping[Any, Any]", dynamic_shapes) if by_name else dict(zip(named, dynamic_shapes or (), strict=False))
    names: dict[str | None, str] = {}
    for name, axes in given.items():
        shape = named[name].shape if name in named else None
        pairs = cast("Any", axes.items() if isinstance(axes, Mapping) else enumerate(axes or ()))
        for axis, size in pairs if shape is not None else ():
            symbol: Any = cast("Any", shape)[axis] if axis in range(len(shape or ())) else None
            if isinstance(symbol, ir.SymbolicDim) and hasattr(size, "__name__"):
                names[symbol.value] = size.__name__
    for value in (*model.graph.inputs, *(v for node in model.graph for v in node.outputs)):
        for k, d in enumerate(value.shape or ()):
            if value.shape is not None and isinstance(d, ir.SymbolicDim) and d.value in names:
                value.shape[k] = ir.SymbolicDim(names[d.value])


def returns_by_name(program: ExportedProgram) -> bool:
    """Whether the module gives its outputs by name, in a dictionary or an object of that kind."""
    kind = program.call_spec.out_spec.type if program.call_spec.out_spec else None
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _name_outputs(model: ir.Model, program: ExportedProgram) -> None:
    """Outputs get the names under which the module gives them; those without are ``output``, or ``output_0`` and so on."""
    graph, spec = model.graph, program.call_spec.out_spec
    given = program.graph_signature.user_outputs
    named = [n for n, o in zip(_output_names(spec, ""), given, strict=False) if o is not None] if spec else []
    if len(named) != len(graph.outputs):
        return
    made = dict.fromkeys(v for node in graph for v in node.outputs)
    taken = {v.name for v in graph.inputs} | set(graph.initializers) | set(named)
    for v in (v for v in made if v not in graph.outputs):
        v.name = _fresh(v.name or "value", taken)
    taken -= set(named) - {v.name for v in graph.inputs} - set(graph.initializers)
    for k, (v, name) in enumerate(zip(tuple(graph.outputs), named, strict=True)):
        if v not in made:  # an input or a weight as it is, or an output that is given twice
            copy = ir.node("Identity", [v], outputs=[ir.Value(shape=v.shape, type=v.type)])
            graph.append(copy)
            graph.outputs[k] = copy.outputs[0]
        made.pop(v, None)
        graph.outputs[k].name = _fresh(f"output_{name}" if name in taken else name, taken)


def _output_names(spec: pytree.TreeSpec, path: str) -> Generator[str]:
    """A name for each leaf: the keys that lead to it."""
    if spec.is_leaf():
        yield path or "output"
        return
    said: Any = cast("Any", spec).context  # keys, a named tuple's class, or keys among others
    some: list[Any] = [said, *(cast("Any", said) if isinstance(said, list | tuple) else ())]
    found: list[Any] = [getattr(c, "_fields", c) for c in some]
    fit: list[Any] = [c for c in found if isinstance(c, list | tuple) and len(cast("Any", c)) == spec.num_children]
    keys = fit[0] if fit else None
    for k, child in enumerate(spec.children()):
        key = str(keys[k]) if keys else str(k) if path else f"output_{k}"
        yield from _output_names(child, f"{path}_{key}" if path else key)


def _tie(model: ir.Model) -> None:
    """Parameters that are the same memory are one weight, under one of their names."""
    first: dict[tuple[Any, ...], ir.Value] = {}
    for name, value in list(model.graph.initializers.items()):
        raw = getattr(value.const_value, "raw", None)
        if not isinstance(raw, torch.Tensor) or value.is_graph_output():
            continue
        key = (
            raw.untyped_storage()._cdata,  # pyright: ignore[reportPrivateUsage]
            raw.storage_offset(),
            tuple(raw.shape),
            raw.stride(),
            raw.dtype,
        )
        same = first.setdefault(key, value)
        if same is not value:
            convenience.replace_all_uses_with(value, same)
            del model.graph.initializers[name]
