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
from pathlib import Path
from typing import Any, cast

import onnx_ir as ir
import torch
from onnx_ir import convenience, external_data
from onnx_ir.tensor_adapters import TorchTensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tapestry.doors.repeated_layers import folded, unfold
from tapestry.errors import ModelError, TapestryError

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
    with _inference(module), _settled(module, (values, named)), _explained(module):
        return torch.export.export(module, values, named, dynamic_shapes=dynamic_shapes, strict=False)


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


def write(
    program: ExportedProgram, path: Path, stored: Stored = lambda name, tensor: None, *, inline: int = INLINE,
    dynamic_shapes: Any = None, translations: Mapping[Any, Callable[..., Any]] | None = None,
) -> bool:  # fmt: skip
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
        for axis, size in cast("Mapping[int, Any]", axes).items() if shape is not None and isinstance(axes, Mapping) else ():
            symbol: Any = shape[axis] if shape is not None else None
            if isinstance(symbol, ir.SymbolicDim) and hasattr(size, "__name__"):
                names[symbol.value] = size.__name__
    for value in (*model.graph.inputs, *(v for node in model.graph for v in node.outputs)):
        for k, d in enumerate(value.shape or ()):
            if value.shape is not None and isinstance(d, ir.SymbolicDim) and d.value in names:
                value.shape[k] = ir.SymbolicDim(names[d.value])


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
