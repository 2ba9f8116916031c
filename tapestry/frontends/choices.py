"""What `tapestry.compile` can be asked for beside the model: keywords with their meaning, and what becomes of them."""

from __future__ import annotations

import difflib
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast, get_args, get_origin, get_type_hints

import onnx
from onnx import ModelProto

from tapestry.codegen.triton.task.chips import CHIPS, PRECISIONS, chip_of
from tapestry.compiler import pipeline
from tapestry.errors import TapestryError
from tapestry.lift.file.external_data import parse_place
from tapestry.lift.file.structure import TEXT, load, load_text
from tapestry.options import DECLARED, Options, converted, many
from tapestry.plan.solver.budget import Found
from tapestry.plugins import entry_points as plugins

# Whatever a model is given as, as a file that the compiler reads: a path, bytes, ONNX and onnx-ir models, torch modules.
#
# A model that has no file gets one in a folder of its own, which goes when the plan does; `Compiled.save` takes it along.


NAME = "model.onnx"
IN_FILE = 1 << 30  # bytes of weights that a file holds itself (protobuf takes 2 GiB)
SOURCE_KINDS = "a path, bytes, onnx.ModelProto, onnx_ir.Model, torch.export.ExportedProgram, or nn.Module with example_inputs"


class Opened:
    """A model as a file.

    Attributes:
        path: the file.
        owned: whether it lies in a folder of ours, which is removed with this object.
        weights: whether its data is there; a module on the meta device has none.
        named: whether it is a torch module's that gives its outputs by name.
    """

    def __init__(self, path: Path, *, owned: bool = False, weights: bool = True, named: bool = False) -> None:
        self.path, self.owned, self.weights, self.named = path, owned, weights, named
        if owned:
            weakref.finalize(self, shutil.rmtree, path.parent, ignore_errors=True)


def opened_source(model: Any, example_inputs: Any = None, dynamic_shapes: Any = None) -> Opened:
    """A model as a file that the compiler reads.

    Args:
        example_inputs: of a torch module: its arguments (a tuple, or a mapping by name).
        dynamic_shapes: of a torch module, as `torch.export.export` takes them.

    Raises:
        TapestryError: it is no model, or example inputs are missing or given in vain.
    """
    if isinstance(model, Opened):
        return model
    is_module, is_program = _is_torch(model, "torch.nn", "Module"), _is_torch(model, "torch.export", "ExportedProgram")
    if example_inputs is not None and not is_module:
        hint = 'leave them out; other arguments have names, such as mesh="2x4" or devices=4'
        raise TapestryError("example inputs are of a torch module", where=f"a {type(model).__name__}", hint=hint)
    if isinstance(model, str | Path):
        return Opened(Path(model))
    if is_module or is_program:
        from tapestry.frontends import torch_export

        program = torch_export.exported(model, example_inputs, dynamic_shapes) if is_module else model
        folder = Path(tempfile.mkdtemp(prefix="tapestry-model-"))
        there = torch_export.write_onnx(program, folder / NAME, dynamic_shapes=dynamic_shapes)
        return Opened(folder / NAME, owned=True, weights=there, named=torch_export.returns_by_name(program))
    return _model_file(model)


def files_of(model: Path) -> list[str]:
    """The files that a model is made of, relative to its folder: its own, and those with the data of its tensors."""
    if model.suffix == TEXT:
        places = {w.file for w in load_text(model).weights.values() if w.file}
    else:
        stored = load(model).graph.initializer
        places = {parse_place(t).file for t in stored if t.data_location == onnx.TensorProto.EXTERNAL}
    return [model.name, *sorted(p for p in places if (model.parent / p).is_file())]


def _is_torch(model: Any, module: str, name: str) -> bool:
    """Whether it is of a class of torch's, which is not imported for this question."""
    return module in sys.modules and isinstance(model, getattr(sys.modules[module], name))


def _model_file(model: Any) -> Opened:
    """A file of a model that is in memory already."""
    import onnx_ir

    if not isinstance(model, bytes | ModelProto | onnx_ir.Model):
        raise TapestryError(f"a {type(model).__name__} is no model", where="tapestry.compile", hint=SOURCE_KINDS)
    path = Path(tempfile.mkdtemp(prefix="tapestry-model-")) / NAME
    out = Opened(path, owned=True)
    if isinstance(model, bytes):
        path.write_bytes(model)
    elif isinstance(model, ModelProto):
        path.write_bytes(model.SerializeToString())
    else:  # in one file where that can be: what is computed of data in the file alone is done once, when the model is read
        stored = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
        apart = any(isinstance(t, onnx_ir.ExternalTensor) for t in stored) or sum(t.nbytes for t in stored) > IN_FILE
        cast(Any, onnx_ir).save(model, path, external_data="weights.bin" if apart else None)
    return out


class Choices(TypedDict, total=False):
    """Keywords of `tapestry.compile`; each may be left out. `tapestry.options` says what each asks for.

    Attributes:
        example_inputs, dynamic_shapes: of a torch module, as `torch.export.export` takes them.
        mesh: ``"2x4"``, ``(2, 4)``, ``{"dp": 2, "tp": 4}`` or mesh axes.
        shapes: sizes by symbol or by input; of a symbol also a ``range``, or a list.
        weights, sharding: False plans without external data, which may be absent; without the model's multi-device annotations.
        interrupt: once it is set, by a signal handler or a thread, the search ends with the best plan so far.
        progress: told of every pass as it begins.
        found: told of plans as they are found: simulated seconds, and what no plan of the same form of the graph is under.
    """

    example_inputs: Any
    dynamic_shapes: Any
    devices: int | None
    mesh: pipeline.MeshLike | None
    topology: str | Path
    shapes: Mapping[str, Any] | None
    memory: int | str | None
    memory_reserve: int | str | None
    target: str
    precision: str
    pins: str | Sequence[str]
    layouts: str | Sequence[str]
    rules: str | Path | Sequence[str | Path]
    ops: str | Path | Sequence[str | Path]
    without: str | Sequence[str]
    weights: bool
    sharding: bool
    configuration: str | None
    accumulate: str | None
    reduce_in: str | None
    assume_finite: bool
    for_format: str | None
    pareto: bool
    time_limit: float | None
    seed: int
    resume: str | Path | None
    interrupt: threading.Event | None
    stages: int | str
    micro_batches: int | str
    stage_at: str | Sequence[str]
    print_after: str | Sequence[str]
    progress: pipeline.Report
    found: Found


def check_keywords(given: Mapping[str, Any]) -> None:
    """Refuse what is no keyword, and values of another kind.

    Raises:
        TypeError: there is no such keyword; the nearest one is named.
        TapestryError: a value of another kind, with one that would do.
    """
    for name, value in given.items():
        if name not in Choices.__annotations__:
            near = difflib.get_close_matches(name, Choices.__annotations__, 1)
            raise TypeError(f"tapestry.compile has no argument '{name}'" + "".join(f"; did you mean '{n}'?" for n in near))
        declared = DECLARED.get(name)
        if declared is None or not declared.metadata or name == "devices":  # (`compiler.pipeline.mesh_of`)
            continue
        kinds = kinds_of(name)
        like = "True or False" if bool in kinds else declared.metadata["like"]
        items: Sequence[Any] = cast("Sequence[Any]", value) if many(declared) and isinstance(value, list | tuple) else [value]
        for x in items if value is not None or name == "target" else ():
            if not isinstance(x, kinds) or (isinstance(x, bool) and bool not in kinds):
                raise TapestryError(f"{x!r} is a {type(x).__name__}", where=f"tapestry.compile, {name}", hint=like)
    _check_target(given.get("target", "torch-cpu"), given.get("precision", "ieee"))


def kinds_of(name: str) -> tuple[type, ...]:
    """Of which types a keyword is, or each of several."""
    hint = get_type_hints(Choices)[name]
    kinds = [get_origin(k) or k for k in get_args(hint) or (hint,)]
    if many(DECLARED[name]):
        kinds.remove(Sequence)
    return (*kinds, int) if float in kinds else tuple(kinds)


def options(source: Opened, given: Choices) -> Options:
    """The options of a model that is opened."""
    out = {k: converted(k, v) for k, v in given.items() if v is not None and k in DECLARED}
    out["mesh"] = pipeline.mesh_of(given.get("devices"), given.get("mesh"))
    out["weights"] = out.get("weights", True) and source.weights
    return Options(model=source.path, **out)


def _check_target(target: str, precision: str) -> None:
    if target != "torch-cpu" and not target.startswith("triton") and not plugins.has("targets", target):
        known = ", ".join(("torch-cpu", *(f"triton:{c}" for c in CHIPS), *plugins.names("targets")))
        raise TapestryError(f"there is no target '{target}'", hint=f"one of {known}")
    chip_of(target)
    if precision not in PRECISIONS:
        raise TapestryError(f"unknown precision '{precision}'", hint=f"one of {', '.join(PRECISIONS)}")
