"""A transformers checkpoint folder as a model: the configuration says the architecture, weights stay in the safetensors files.

The ONNX file is written into the folder, beside the data that it refers to, under a name made of its content; a rank then maps
the slices that it needs out of the checkpoint's own files. Parameters that transformers makes of several tensors (the weights
of all experts in one) are written to a file of their own beside it. Nothing of the checkpoint is executed: the architecture is
transformers' own, never code from the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch.overrides import TorchFunctionMode

from tapestry.errors import ModelError, TapestryError, refusing
from tapestry.frontends import torch_export
from tapestry.frontends.choices import Opened

MAX_HEADER = 100 << 20  # bytes; the format's own limit
DTYPES = {"F64": "DOUBLE", "F32": "FLOAT", "F16": "FLOAT16", "BF16": "BFLOAT16", "I64": "INT64", "I32": "INT32", "BOOL": "BOOL"}
Places = dict[str, tuple[Path, Mapping[str, Any], int]]
"""For tensors of safetensors files by name: the file, what its header says, and where the data begins."""


class _Unfilled(TorchFunctionMode):
    """Parameters, which modules make by `torch.empty`, get no memory; buffers are computed as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def opened(folder: Path, example_inputs: Any = None, batch: int = 1, sequence: int = 128) -> Opened:
    """The model of a checkpoint folder, as an ONNX file in that folder.

    Args:
        example_inputs: as `nn.Module` takes them; by default tokens of ``batch`` × ``sequence``, or ``batch`` images.

    Raises:
        TapestryError: transformers is missing, or inputs that cannot be guessed; ModelError: a file is missing or damaged.
    """
    module = architecture(folder)
    places = _renamed(module, _tensor_files(folder))
    real = {n: b.clone() for n, b in module.named_buffers() if not b.is_meta}
    tied = dict(module.named_parameters(remove_duplicate=False))
    own = {**tied, **dict(module.named_buffers())}
    converted = [n for n, p in places.items() if n in own and _torch_type(p[1]) != own[n].dtype]
    places = {n: p for n, p in places.items() if n not in converted}
    known = {id(tied[n]): n for n in places if n in tied}
    absent = [n for n, p in tied.items() if id(p) not in known]
    merged = _merged_tensors(folder, module, list(dict.fromkeys([*absent, *converted])))
    inputs = _guessed(module, batch, sequence) if example_inputs is None else example_inputs
    program = torch_export.exported(module.to("meta"), inputs)

    def stored(name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor | torch.Tensor | None:
        there = name if name in places else known.get(id(tied.get(name)), "")
        return _external(name, tensor, *places[there]) if there else merged.get(name, real.get(name))

    with tempfile.TemporaryDirectory(dir=folder, prefix=".tapestry-") as temporary:
        path = Path(temporary) / "model.onnx"
        if not torch_export.write_onnx(program, path, stored, inline=torch_export.INLINE if merged else MAX_HEADER):
            why = "a constant of its own is computed where the checkpoint says nothing"
            raise ModelError("the checkpoint does not hold all of the model", where=str(folder), why=why)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        final = folder / f"tapestry-{digest}.onnx"
        for data in path.parent.glob("*.bin"):
            data.replace(folder / data.name)
        path.replace(final)
    return Opened(final, named=torch_export.returns_by_name(program))


def architecture(folder: Path) -> torch.nn.Module:
    """The module that a checkpoint is of, without memory for its parameters.

    Raises:
        TapestryError: transformers is not installed; ModelError: the configuration names no architecture of transformers'.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        hint = "a folder with config.json and safetensors; names of the hub are not fetched (huggingface-cli download does)"
        raise ModelError("not a checkpoint folder: no config.json", where=str(folder), hint=hint)
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise TapestryError("transformers is not installed", where=str(folder), hint="pip install transformers") from None
    with refusing(ModelError, "transformers cannot read the configuration", str(config_file), "save_pretrained writes one"):
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    names = [n for n in config.architectures or () if isinstance(getattr(transformers, n, None), type)]
    if not names:
        why = f"config.json names {config.architectures or 'none'}"
        raise ModelError("the architecture is none of transformers'", where=str(config_file), why=why)
    config.use_cache = False
    with _Unfilled():
        module: torch.nn.Module = getattr(transformers, names[0])._from_config(config, dtype=config.dtype or torch.float32)
    return module.eval()


def _merged_tensors(folder: Path, module: torch.nn.Module, missing: list[str]) -> dict[str, torch.Tensor]:
    """Tensors that the files do not have under that name, or have in another type, as transformers makes them of what is there:
    it loads the model once for that.

    Raises:
        ModelError: transformers has not got them either.
    """
    if not missing:
        return {}
    options = {"local_files_only": True, "dtype": next(module.parameters()).dtype, "output_loading_info": True}
    hint = "load it with transformers, and give tapestry.compile the module"
    kind: Any = type(module)
    with refusing(ModelError, "transformers cannot load the checkpoint", str(folder), hint), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, said = kind.from_pretrained(folder, **options)
    absent: set[str] = {*said["missing_keys"], *(k[0] for k in said["mismatched_keys"])}.intersection(missing)
    if absent:
        why = f"{len(absent)} parameters are not in the safetensors files, '{min(absent)}' first"
        raise ModelError("the checkpoint has other names than the module", where=str(folder), why=why, hint=hint)
    own: dict[str, torch.Tensor] = {**dict(loaded.named_parameters(remove_duplicate=False)), **dict(loaded.named_buffers())}
    return {n: own[n].detach() for n in missing}


def _renamed(module: torch.nn.Module, places: Places) -> Places:
    """Places by the module's names, where transformers loads the tensors of its checkpoints under other ones; tensors that it
    would also change are left out."""
    try:
        mapping, loading = (import_module(f"transformers.{m}") for m in ("conversion_mapping", "core_model_loading"))
    except ImportError:  # transformers 4 renames nothing
        return places
    found: list[Any] = mapping.get_model_conversion_mapping(module)
    sides = [[m for m in found if isinstance(m, loading.WeightRenaming) == renames] for renames in (True, False)]
    prefix, names = getattr(module, "base_model_prefix", ""), dict(module.named_parameters(remove_duplicate=False))
    renamed = {n: loading.rename_source_key(n, *sides, prefix, names) for n in places}
    return {new: places[n] for n, (new, changed) in renamed.items() if changed is None}


def _tensor_files(folder: Path) -> Places:
    """For each tensor of the safetensors files: the file, what its header says, and where the data begins."""
    out: Places = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_symlink():
            hint = "a folder of plain files: hf download MODEL --local-dir FOLDER"
            raise ModelError("weights behind a link are not read", where=str(path), hint=hint)
        with path.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if not 2 <= size <= MAX_HEADER:
                raise ModelError("not a safetensors file", where=str(path), why=f"its header would be {size:,} bytes")
            try:
                header: dict[str, Any] = json.loads(f.read(size))
            except ValueError as e:
                raise ModelError("not a safetensors file", where=str(path), why=str(e)) from None
        out |= {n: (path, entry, 8 + size) for n, entry in header.items() if n != "__metadata__"}
    if not out:
        raise ModelError("no safetensors files", where=str(folder), hint="save_pretrained writes them")
    return out


def _torch_type(entry: Mapping[str, Any]) -> torch.dtype | None:
    """A tensor's type in torch, as a header of a safetensors file says it."""
    return getattr(torch, DTYPES.get(entry["dtype"], "none").lower(), None)


def _external(name: str, tensor: ir.TensorProtocol, path: Path, entry: Mapping[str, Any], base: int) -> ir.ExternalTensor:
    """A weight where the checkpoint has it.

    Raises:
        ModelError: it is of another shape or type than the module's.
    """
    lo, hi = entry["data_offsets"]
    shape = list(tensor.shape.numpy())
    if shape != entry["shape"] or tensor.dtype.name != DTYPES.get(entry["dtype"]) or hi - lo != tensor.nbytes:
        why = f"the file has {entry['dtype']}{entry['shape']}, the module {tensor.dtype}{shape}"
        raise ModelError("the weight is not what the module says", where=f"'{name}' in {path.name}", why=why)
    return torch_export.placed(tensor, name, path.name, base + lo)


def _guessed(module: Any, batch: int, sequence: int) -> dict[str, Any]:
    """Inputs by the model's main input.

    Raises:
        TapestryError: it is neither tokens nor images.
    """
    main, config = module.main_input_name, module.config
    if main == "input_ids":
        return {main: torch.zeros((batch, sequence), dtype=torch.int64)}
    size = getattr(config, "image_size", None)
    if main == "pixel_values" and isinstance(size, int) and math.isfinite(size):
        return {main: torch.zeros((batch, getattr(config, "num_channels", 3), size, size))}
    hint = "tapestry.from_pretrained(folder, example_inputs={...})"
    raise TapestryError(f"the sizes of '{main}' are not in the configuration", where="config.json", hint=hint)
