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
from typing import Any, TypedDict, cast

import onnx
from onnx import ModelProto

from tapestry import pipeline
from tapestry.codegen.triton.task.primitives import CHIPS, PRECISIONS, chip_of
from tapestry.errors import TapestryError
from tapestry.lift.file.external_data import parse_place
from tapestry.lift.file.structure import TEXT, load, load_text
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
    """

    def __init__(self, path: Path, *, owned: bool = False, weights: bool = True) -> None:
        self.path, self.owned, self.weights = path, owned, weights
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
    """Keywords of `tapestry.compile`; each may be left out.

    Attributes:
        example_inputs, dynamic_shapes: of a torch module, as `torch.export.export` takes them.
        devices, mesh: ``"2x4"``, ``(2, 4)``, ``{"dp": 2, "tp": 4}`` or mesh axes; ``devices`` is the one-dimensional mesh.
        topology: a preset, a topology file, or ``auto``: this machine, as measured.
        shapes: sizes of symbolic dimensions, by symbol or by input; of a symbol also a range (``"1..64"`` or ``range(1, 65)``)
            or a list (``"128,256"``), for one build that runs all of them.
        memory: per device, as ``"16GiB"`` or bytes.
        memory_reserve: what the plan leaves free of it, as ``"8%"``, ``"2GiB"`` or bytes.
        target, precision: ``"torch-cpu"`` or ``"triton:sm90"``; of products of f32 in kernels: "ieee", "tf32x3" or "tf32".
        pins, layouts: as on the command line, one or several.
        rules, ops, without: files of your own rules and operators; rules that are left out.
        weights, sharding: False plans without external data, which may be absent; without the model's multi-device annotations.
        configuration: which of the model's device configurations, by name; by default the first for as many devices.
        accumulate: how sums of products of f16 are held, "f32" (as if it were left out) or "f16".
        assume_finite: take tests for NaN and infinities for false, such as the guard that exporters put around softmax.
        for_format: search only plans that a format of export can say: "tp-plan", "dtensor", "jax" or "onnx-ranks".
        reduce_in: how partial sums of 16-bit floats travel: "f32", or "native": each rounded to the tensor's type before.
        exact: the same bits on any number of devices (docs/exact.md).
        pareto: also the front of latency against memory.
        time_limit: seconds for the search, 0 or more (by default only work is limited); the plan is verified in any case.
        seed: of the model's own random operators.
        resume: a build directory to go on from: the plan is never worse, and its bound holds if the problem is the same.
        interrupt: once it is set, by a signal handler or a thread, the search ends with the best plan so far.
        stages, micro_batches: pipeline stages, and parts of the batch that follow each other; ``"auto"``: where that is better.
        stage_at: the nodes at which stages end, one or several; with commas, several of one stage.
        max_devices, objective, limits: as on the command line: how many devices, and what is minimised beside seconds.
        state: ``"auto"`` or ``"past=present,…"``: caches that a `Session` keeps on the devices (`runtime.kept_state`).
        print_after: passes (`pipeline.PASSES`) whose IR goes into ``printed``.
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
    reduce_in: str
    assume_finite: bool
    for_format: str | None
    exact: bool
    pareto: bool
    time_limit: float | None
    seed: int
    resume: str | Path | None
    interrupt: threading.Event | None
    stages: int | str
    micro_batches: int | str
    stage_at: str | Sequence[str]
    max_devices: int | None
    objective: str | None
    limits: str | Sequence[str]
    state: str | None
    print_after: Sequence[str]
    progress: pipeline.Report
    found: Found


KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "mesh": ((str, Mapping, Sequence), '"2x4", (2, 4) or {"dp": 2, "tp": 4}'),
    "topology": ((str, Path), '"h100", or a file'),
    "shapes": ((Mapping,), '{"batch": 8}'),
    "memory": ((int, str), '"16GiB", or bytes'),
    "memory_reserve": ((int, str), '"8%", "2GiB", or bytes'),
    "target": ((str,), '"torch-cpu" or "triton:sm90"'),
    "precision": ((str,), "ieee, tf32x3 or tf32"),
    "pins": ((str,), '"layers.*.up_proj:out=tp", or a list of pins'),
    "layouts": ((str,), '"x:0=4@d0", or a list of layouts'),
    "rules": ((str, Path), "a file of rules, or a list of files"),
    "ops": ((str, Path), "a file of operators, or a list of files"),
    "without": ((str,), "the name of a rule, or a list of names"),
    "time_limit": ((int, float), "seconds"),
    "seed": ((int,), "a whole number"),
    "accumulate": ((str,), "f32 or f16"),
    "reduce_in": ((str,), "f32 or native"),
    "assume_finite": ((bool,), "True or False"),
    "for_format": ((str,), "tp-plan, dtensor, jax or onnx-ranks"),
    "configuration": ((str,), "the name of a device configuration"),
    "max_devices": ((int,), "a whole number"),
    "objective": ((str,), '"seconds + 2e-3*devices"'),
    "limits": ((str,), '"energy<=5", or a list of limits'),
    "stages": ((int, str), '2, or "auto"'),
    "micro_batches": ((int, str), '2, or "auto"'),
    "stage_at": ((str,), "the name of a node, or a list of names"),
    "resume": ((str, Path), "a build directory"),
    "state": ((str,), '"auto" or "past=present,…"'),
    "print_after": ((str,), "the name of a pass, or a list of names"),
    **dict.fromkeys(("weights", "sharding", "exact", "pareto"), ((bool,), "True or False")),
    "interrupt": ((threading.Event,), "a threading.Event"),
}
"""What a keyword may be (where it is not left out), and an example."""
MANY = ("pins", "layouts", "rules", "ops", "without", "limits", "stage_at", "print_after")
ELSEWHERE = (
    "example_inputs", "dynamic_shapes", "devices", "state", "progress", "max_devices", "objective", "limits", "ops",
)  # fmt: skip  # what is no option of the pipeline


def check(given: Mapping[str, Any]) -> None:
    """Refuse what is no keyword, and values of another kind.

    Raises:
        TypeError: there is no such keyword; the nearest one is named.
        TapestryError: a value of another kind, with one that would do.
    """
    for name, value in given.items():
        if name not in Choices.__annotations__:
            near = difflib.get_close_matches(name, Choices.__annotations__, 1)
            raise TypeError(f"tapestry.compile has no argument '{name}'" + "".join(f"; did you mean '{n}'?" for n in near))
        if name not in KINDS:
            continue
        kinds, example = KINDS[name]
        items: Sequence[Any] = cast("Sequence[Any]", value) if name in MANY and isinstance(value, list | tuple) else [value]
        for x in items if value is not None or name == "target" else ():
            if not isinstance(x, kinds) or (isinstance(x, bool) and bool not in kinds):
                raise TapestryError(f"{x!r} is a {type(x).__name__}", where=f"tapestry.compile, {name}", hint=example)
    _check_target(given.get("target", "torch-cpu"), given.get("precision", "ieee"))


def options(source: Opened, given: Choices) -> pipeline.Options:
    """The pipeline's options of a model that is opened."""
    out: dict[str, Any] = {k: v for k, v in given.items() if v is not None and k not in ELSEWHERE}
    for name in ("pins", "layouts", "without", "stage_at", "print_after"):
        out[name] = several(given, name)
    out |= {k: str(v) for k, v in out.items() if k in ("memory", "memory_reserve", "topology", "stages", "micro_batches")}
    out["rules"] = [Path(r) for r in several(given, "rules")]
    out["mesh"] = pipeline.mesh_of(given.get("devices"), given.get("mesh"))
    out["shapes"], out["resume"] = given.get("shapes") or {}, Path(r) if (r := given.get("resume")) else None
    out["weights"] = out.get("weights", True) and source.weights
    out["interrupt"] = given.get("interrupt") or threading.Event()
    return pipeline.Options(model=source.path, **out)


def several(given: Choices, name: str) -> list[Any]:
    """What may be given alone or in a list, of one keyword."""
    value: Any = cast("Mapping[str, Any]", given).get(name)
    return [] if value is None else [value] if isinstance(value, str | Path) else list(value)


def _check_target(target: str, precision: str) -> None:
    if target != "torch-cpu" and not target.startswith("triton") and not plugins.has("targets", target):
        known = ", ".join(("torch-cpu", *(f"triton:{c}" for c in CHIPS), *plugins.names("targets")))
        raise TapestryError(f"there is no target '{target}'", hint=f"one of {known}")
    chip_of(target)
    if precision not in PRECISIONS:
        raise TapestryError(f"unknown precision '{precision}'", hint=f"one of {', '.join(PRECISIONS)}")
