"""Whatever a model is given as, as a file that the compiler reads: a path, bytes, ONNX and onnx-ir models, torch modules.

A model that has no file gets one in a folder of its own, which goes when the plan does; `Compiled.save` takes it along.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any, cast

import onnx
from onnx import ModelProto

from tapestry.errors import TapestryError
from tapestry.lift.file.external_data import parse_place
from tapestry.lift.file.structure import TEXT, load, load_text

NAME = "model.onnx"
IN_FILE = 1 << 30  # bytes of weights that a file holds itself (protobuf takes 2 GiB)
KINDS = "a path, bytes, onnx.ModelProto, onnx_ir.Model, torch.export.ExportedProgram, or nn.Module with example_inputs"


class Opened:
    """A model as a file.

    Attributes:
        path: the file.
        owned: whether it lies in a folder of ours, which is removed with this object.
        weights: whether its data is there; a module on the meta device has none.
    """

    def __init__(self, path: Path, *, owned: bool = False, weights: bool = True) -> None:
        self.path, self.owned, self.weights = path, owned, weights
        if owned:
            weakref.finalize(self, shutil.rmtree, path.parent, ignore_errors=True)


def opened(model: Any, example_inputs: Any = None, dynamic_shapes: Any = None) -> Opened:
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
        from tapestry.doors import torch_export

        program = torch_export.exported(model, example_inputs, dynamic_shapes) if is_module else model
        folder = Path(tempfile.mkdtemp(prefix="tapestry-model-"))
        there = torch_export.write(program, folder / NAME, dynamic_shapes=dynamic_shapes)
        return Opened(folder / NAME, owned=True, weights=there)
    return _written(model)


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


def _written(model: Any) -> Opened:
    """A file of a model that is in memory already."""
    import onnx_ir

    if not isinstance(model, bytes | ModelProto | onnx_ir.Model):
        raise TapestryError(f"a {type(model).__name__} is no model", where="tapestry.compile", hint=KINDS)
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
