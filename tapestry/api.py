"""The Python interface: ``tapestry.compile``, ``tapestry.load``, and what they return."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, cast

import numpy as np

from tapestry import flags
from tapestry.build import sized_builds, store
from tapestry.build.sized_builds import SizedBuild
from tapestry.errors import BuildError, TapestryError, unusable
from tapestry.ir.graph import Opaque
from tapestry.ir.many_sizes.size_formula import Sizes, formula_of, text_of
from tapestry.ir.types import DTYPES, Array, Tensor
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.plugins import tool
from tapestry.runtime.feeds import random_feeds
from tapestry.runtime.session import MakeExecutor, Result, Session, Slices, as_torch, has_torch, largest_constant, shapes_of
from tapestry.runtime.sized_sessions import SizedSessions
from tapestry.system.quoting import printable

if TYPE_CHECKING:  # a build is loaded and run without the compiler
    from tapestry.frontends.choices import Choices, Opened
    from tapestry.runtime.target_protocol import Progress, Target
    from tapestry.verify.model.model_values import ModelFile
    from tapestry.viz.tool_kinds import Page

Values = Mapping[str, Any]
"""Inputs or outputs by name: arrays, and lists and dictionaries for what is no tensor."""


@dataclass(frozen=True, slots=True, repr=False)
class Port:
    """What an input or an output is: sizes are numbers or follow from symbols; of no tensor, ``dtype`` is its ONNX type."""

    dtype: str
    shape: tuple[int | str, ...]

    def __repr__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


P = ParamSpec("P")
R = TypeVar("R")


def _of_build(method: Callable[Concatenate[Compiled, P], R]) -> Callable[Concatenate[Compiled, P], R]:
    """What the files of a build make a method raise is said of the build: nobody has verified it."""

    @wraps(method)
    def held(self: Compiled, *args: P.args, **named: P.kwargs) -> R:
        if not self.folder:
            return method(self, *args, **named)
        with unusable(self.folder):
            return method(self, *args, **named)

    return held


@dataclass(slots=True, eq=False, repr=False)
class Compiled:
    """A verified plan: run it, read it, check it, save it.

    Attributes:
        printed: the IR after each pass that was named for it.
        libraries: on a GPU, whether products may run in the vendor's library; to be set before the first run.
        source: the model as it was given, which keeps its files where they are of our making.
        folder: where it was loaded from.
        sized: the plans for all sizes, where there is more than one; ``build`` is the first region's, at the sizes at which it
            was made.
    """

    build: store.Build
    constants: Mapping[str, bytes]
    kernels: Mapping[str, str]
    laws: Mapping[str, int]
    rewrites: bytes = b""
    evidence: Sequence[Mapping[str, Any]] = ()
    printed: Mapping[str, str] = field(default_factory=dict[str, str])
    libraries: bool = False
    source: Opened | None = None
    sized: SizedBuild | None = None
    folder: str = ""
    _session: Session | None = field(default=None, init=False)
    _sizes: SizedSessions | None = field(default=None, init=False)

    def __copy__(self) -> Compiled:
        return replace(self)  # without its session, which would hold two runs in one memory

    def __deepcopy__(self, memo: object) -> Compiled:
        return replace(self)  # nothing else of it changes

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: the files that `save` writes. Those of the model are among them where it has none of its own."""
        with tempfile.TemporaryDirectory(prefix="tapestry-pickle-") as place:
            self.save(folder := Path(place) / "build")
            files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        return _unpickled, (files, self.source is not None and self.source.owned, self.printed, self.libraries)

    @property
    def report(self) -> Mapping[str, Any]:
        """The document that ``tapestry compile --json`` prints."""
        return self.build.report

    @_of_build
    def explain(self, *, why: bool = False, critical: bool = False, every: bool = False) -> str:
        """The plan as a person reads it; the arguments are those of `viz.explain.explain`."""
        from tapestry.viz.explain import explain

        return explain(self.build, why=why, critical=critical, every=every)

    @_of_build
    def view(self, other: Compiled | None = None) -> Page:
        """The plan as a page: shown in a notebook, or ``.save("plan.html")``, ``.open()``; with another plan beside it."""
        from tapestry.viz.tool_kinds import Pages

        return tool(Pages).view([(c.build, c.laws, c.evidence, c.rewrites) for c in (self, other) if c is not None])

    @_of_build
    def __repr__(self) -> str:
        r, mesh = self.report, ", ".join(f"{a.name}={a.size}" for a in self.build.plan.mesh)
        from tapestry.viz.format import duration, human

        peak, name = human(max(self.build.peak_bytes)), Path(self.build.model).name
        found = f"objective {duration(r['objective_s'])}, gap {r['gap']:.2%}, at most {peak} on a device"
        return f"<tapestry plan of {name}: {r['ops']} operations over {mesh or 'one device'}, {found}, for {self.build.target}>"

    @property
    @_of_build
    def placements(self) -> dict[str, dict[str, int]]:
        """For each tensor that is cut where it is first held, by the author's name: mesh axis to the axis of it that is cut."""
        from tapestry.viz.explain import placed

        return placed(self.build.plan, self.build.program)

    @property
    @_of_build
    def transfers(self) -> list[dict[str, Any]]:
        """What devices send each other, in order: kind, tensor, bytes, when (simulated) and for how long."""
        from tapestry.viz.explain import document

        return document(self.build)["steps"]

    @property
    @_of_build
    def memory(self) -> dict[str, Any]:
        """Peak bytes per device, when and where the fullest one has it, and what lies there then."""
        from tapestry.viz.explain import document

        return document(self.build)["memory"]

    @_of_build
    def check(self, feeds: Values | None = None) -> dict[str, Any]:
        """Run (on random inputs if none are given) and compare with onnxruntime: what ``tapestry run --check --json`` says."""
        given = self.random_feeds() if feeds is None else self._by_name(feeds)
        return run_checked(self.at_inputs(given), given, check=True)[1]

    @_of_build
    def verify(self) -> dict[str, int]:
        """Every law checked once more, from the files that `save` writes: how often, by law.

        Raises:
            LawError: one is broken.
        """
        from tapestry.compiler import saved_build

        with tempfile.TemporaryDirectory(prefix="tapestry-verify-") as place:
            self.save(Path(place) / "build", bundle=False)
            return saved_build.verify_build(Path(place) / "build")[1]

    @_of_build
    def export(
        self,
        output: str | Path,
        format: str = "onnx",
        *,
        nearest: bool = False,
        copy_data: bool = False,
        into: str | Path | None = None,
        configuration: str = "tapestry",
    ) -> dict[str, Any]:
        """Write the plan in a format of ``tapestry export``, by default the annotated model; says what was written.

        Args:
            nearest: whether the nearest plan that the format can say will do.
            into: an annotated file of the same model, whose configurations are kept beside this one.

        Raises:
            TapestryError: it cannot be written there, or the format cannot say the plan.
        """
        from tapestry.viz import tool_kinds

        asked = tool_kinds.Asked(
            build=self.build,
            constants=b"".join(self.constants.values()),
            rewrites=self.rewrites,
            target=Path(output),
            nearest=nearest,
            copy=copy_data,
            into=None if into is None else Path(into),
            configuration=configuration,
        )
        return tool_kinds.write(format, asked)

    def save(self, folder: str | Path, *, bundle: bool | None = None) -> None:
        """Write a build directory, in one step.

        Args:
            bundle: whether the model and its weights are copied into it; by default where the model had no file of its own.
        """
        bundle = self.source is not None and self.source.owned if bundle is None else bundle
        files: Sequence[str] = ()
        if bundle:
            from tapestry.frontends.choices import files_of

            files = files_of(Path(self.build.model))
        parts = (self.build, self.constants, self.kernels, self.laws, self.rewrites, self.evidence, files)
        store.write(Path(folder), *parts, more=sized_builds.files_of(self.sized) if self.sized else {})

    @_of_build
    def at(self, sizes: Mapping[str, Any]) -> Compiled:
        """The plan at one size of each symbol that has several: formulas are evaluated, and kernels bound when it first runs.

        Raises:
            TapestryError: it is not for these sizes.
        """
        return self._at(self.sizes(sizes))

    def sizes(self, given: Mapping[str, Any]) -> Sizes:
        """Sizes by symbol as the plans of all sizes know them.

        Raises:
            TapestryError: the build is for one size, or not for these.
        """
        if self.sized is None:
            raise TapestryError("the build is for one size", where=self.build.model, hint="compile with --shape SYMBOL=1..64")
        return self.sized.held(self.sized.named(given))

    @_of_build
    def at_inputs(self, feeds: Values) -> Compiled:
        """The plan at the sizes of some inputs; of a build for one size the build itself.

        Raises:
            TapestryError: it is not for these sizes, or the inputs contradict each other.
        """
        return self if self.sized is None else self._at(self.sized.sizes_of(shapes_of(feeds)))

    @_of_build
    def prepare(self) -> None:
        """Compile the kernels of all sizes, and load the weights, before the first run does."""
        self._sessions().prepare()

    def _sessions(self) -> SizedSessions:
        assert self.sized is not None
        if self._sizes is None:
            from tapestry.sizes.sized_opener import SizedOpener

            self._sizes = SizedSessions(self.sized, SizedOpener())
        return self._sizes

    def _at(self, sizes: tuple[int, ...]) -> Compiled:
        session = self._sessions().at(sizes)
        out = self._of_region(session.build.report["at_sizes"]["region"], session.build)
        out._session = session
        return out

    @_of_build
    def planned(self, sizes: Sizes) -> Compiled:
        """The plan at sizes of the symbols that have several, in order; nothing is loaded.

        Raises:
            TapestryError: it is not for these sizes.
        """
        assert self.sized is not None
        return self._of_region(*self.sized.at(sizes))

    def _of_region(self, k: int, build: store.Build) -> Compiled:
        assert self.sized is not None
        parts = (build, self.sized.regions[k].derived, self.kernels, self.laws, self.rewrites, self.evidence)
        return Compiled(*parts, folder=self.folder)

    @property
    @_of_build
    def session(self) -> Session:
        """The plan with its weights loaded."""
        if self._session is None:
            self._session = open_session(self.build, b"".join(self.constants.values()), libraries=self.libraries)
        return self._session

    @_of_build
    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name, like an onnxruntime session: arrays, and lists for sequences; torch's tensors (on the CPU) where an
        input is one."""
        given = self._by_name(feeds)
        build = self if self.sized is None else self.at_inputs(given)
        outs = (build._session or build.session).run(given).outputs
        return {n: as_torch(a) for n, a in outs.items()} if any(map(has_torch, feeds.values())) else outs

    @_of_build
    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run on inputs in the order of `inputs`, or by name: one output alone, several in a tuple; by name where the module
        gives them so."""
        names = self.build.plan.graph.inputs
        if len(args) > len(names):
            what = f"{len(args)} inputs, and the model has {len(names)}"
            raise TapestryError(what, hint=f"the inputs are {', '.join(names)}")
        if twice := [n for n in names[: len(args)] if n in named]:
            raise TapestryError(f"input '{twice[0]}' is given twice", hint="by its place or by its name")
        outs = self.run({**dict(zip(names, args, strict=False)), **named})
        return outs if self.report.get("by_name") else next(iter(outs.values())) if len(outs) == 1 else tuple(outs.values())

    @property
    @_of_build
    def inputs(self) -> dict[str, Port]:
        """What the plan takes, by name and in order."""
        return self._ports(self.build.plan.graph.inputs)

    @property
    @_of_build
    def outputs(self) -> dict[str, Port]:
        """What the plan gives, by name and in order."""
        return self._ports(self.build.plan.graph.outputs)

    def _ports(self, names: Sequence[str]) -> dict[str, Port]:
        symbols = self.sized.symbols if self.sized else ()
        tensors = (self.sized.regions[0].plan.graph if self.sized else self.build.plan.graph).tensors

        def one(t: Tensor) -> Port:
            sizes = (int(n) if formula_of(n) is None else text_of(n, symbols) for n in t.shape)
            return Port(t.about.partition("[")[0] if t.on_host else DTYPES[t.dtype][1], tuple(sizes))

        return {n: one(tensors[n]) for n in names}

    def _by_name(self, feeds: Values) -> Values:
        if not isinstance(cast(object, feeds), Mapping):
            first = next(iter(self.build.plan.graph.inputs), "x")
            raise TapestryError(f"inputs are given by name, not as a {type(feeds).__name__}", hint=f"run({{'{first}': …}})")
        return {printable(n): a for n, a in feeds.items()}

    @_of_build
    def random_feeds(self, seed: int = 0) -> dict[str, Any]:
        """Random inputs that the model accepts."""
        return random_feeds(self.build.plan.graph, seed)


def compile(model: Any, *example_inputs: Any, **choices: Unpack[Choices]) -> Compiled:
    """Compile a model into a verified plan for a mesh of devices.

    Args:
        model: the path of an ONNX file (or of IR text, ``.tap``), its bytes, an ``onnx.ModelProto``, an ``onnx_ir.Model``, a
            ``torch.export.ExportedProgram``, or a torch module. A module on the meta device is planned without its weights.
        example_inputs: of a torch module: one tuple (or mapping by name) of its arguments, here or as a keyword.
        choices: ``mesh="2x4"``, ``topology="h100"``, ``memory="16GiB"``, …: all are in `tapestry.frontends.choices.Choices`.

    Raises:
        TapestryError: with what, where, why and what to try.
    """
    began = time.perf_counter()
    from tapestry.frontends import compiling

    done, source, sized = compiling.planned(model, compiling.with_inputs(choices, example_inputs), began)
    build = done.build
    if source.named:
        build = replace(build, report={**build.report, "by_name": True})
    parts = (build, done.constants, done.kernels, done.laws, done.rewrites, done.evidence, done.printed)
    return Compiled(*parts, source=source, sized=sized)


def from_pretrained(
    folder: str | Path, *, example_inputs: Any = None, batch: int = 1, sequence: int = 128, **options: Any
) -> Compiled:
    """Compile a transformers checkpoint folder (``config.json`` and safetensors files), whose weights stay where they are.

    Args:
        example_inputs: as the model takes them; by default tokens of ``batch`` × ``sequence``, or ``batch`` images.
        options: of `compile`.

    Raises:
        TapestryError: transformers is missing, or the folder is none of its checkpoints; says which file.
    """
    from tapestry.frontends import checkpoint

    return compile(checkpoint.opened(Path(folder), example_inputs, batch, sequence), **options)


def load(folder: str | Path, model: str | Path | None = None) -> Compiled:
    """A saved plan, after checking every file against its hash; ``model`` is where its model is, if not where it was.

    Raises:
        BuildError: it is not a build directory, or not what its hashes say.
    """
    with unusable(str(folder)):
        build, laws = store.read(Path(folder), None if model is None else Path(model))
        data = (Path(folder) / "constants.bin").read_bytes()
        if largest_constant(build) != len(data):
            raise BuildError("constants.bin has another size than the plan says", where=str(folder))
        constants = {t: data[o : o + n] for t, (o, n) in build.constants.items()}
        kernels = {p.name: p.read_text() for p in sorted((Path(folder) / "kernels").glob("*.py"))}
        rewrites = store.contents(Path(folder) / store.REWRITES)
        evidence = build.report.get("certificate", {}).get("evidence", ())
        return Compiled(
            build,
            constants,
            kernels,
            laws,
            rewrites,
            evidence,
            sized=sized_builds.read_sizes(Path(folder), build),
            folder=str(folder),
        )


def _unpickled(files: Mapping[str, bytes], owned: bool, printed: Mapping[str, str], libraries: bool) -> Compiled:
    from tapestry.frontends.choices import Opened

    folder = Path(tempfile.mkdtemp(prefix="tapestry-model-")) / "build"
    place = Opened(folder, owned=True)  # goes with the object whose model lies there, otherwise now
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return replace(load(folder), printed=printed, libraries=libraries, source=place if owned else None)


def open_session(
    build: store.Build,
    constants: bytes,
    *,
    weights: Slices | None = None,
    make: MakeExecutor[Target] | None = None,
    libraries: bool = False,
) -> Session:
    """A session of a build on its target.

    Args:
        weights: gives slices from elsewhere than the model's files.
        make: the executor, where it is a rank's and moves arrays itself; by default the target's own.
        libraries: on a GPU, whether products may run in the vendor's library.
    """
    flags.before_torch()
    from tapestry.runtime.one_process.logical_devices import LocalExecutor
    from tapestry.verify.certificate import check_memory

    check_memory(build.plan, build.program)
    if build.target.startswith("triton"):
        return _triton_session(build, constants, weights, make, libraries)
    from tapestry.codegen.torch_cpu import TorchCpu
    from tapestry.runtime.plugin_target import PluginTarget

    if libraries:
        raise TapestryError("there is no library to choose", where="--library", hint="compile with --target triton:sm90")
    target: Target = TorchCpu() if build.target == "torch-cpu" else PluginTarget(build.target)
    return Session(build, constants, target, make or LocalExecutor, weights)


def _triton_session(
    build: store.Build, constants: bytes, weights: Slices | None, make: MakeExecutor[Target] | None, libraries: bool
) -> Session:
    """A session on a GPU, or in Triton's interpreter; a rank gets kernels on arrays, not bound ones."""
    from tapestry.codegen.triton.run.device_target import TritonTarget
    from tapestry.codegen.triton.run.local_gpu import find_device
    from tapestry.codegen.triton.run.tuned import chip_name, local_cache
    from tapestry.codegen.triton.task.chips import plain
    from tapestry.runtime.one_process.gpu_devices import GpuExecutor

    device = find_device()
    if make is not None:
        return Session(build, constants, TritonTarget(device, target=build.target, precision=build.precision), make, weights)
    cache = local_cache(flags.cache_folder(), device, build.precision)
    knobs = build.knobs if chip_name(device, build.target) == plain(build.target) else dict[str, Mapping[str, Any]]()
    target = TritonTarget(device, cache, libraries=libraries, target=build.target, precision=build.precision, knobs=knobs)
    return Session(build, constants, target, GpuExecutor, weights, target.host)  # which copies from the host, once


def tune(
    folder: str | Path,
    *,
    libraries: bool = False,
    again: bool = False,
    time_limit: float = 600.0,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Measure the kernels of a saved plan on this machine's GPU; what wins is used by every later run of such a kernel here.

    Args:
        libraries: also measure the vendor's library for products; it is used by runs that ask for it.
        again: also kernels that the cache has.
        time_limit: seconds; kernels beyond it keep the model's choice.

    Returns:
        A row for each kernel; ``passed`` is false where a kernel's default, or all of its candidates, computed wrong values.

    Raises:
        TapestryError: there is no GPU, or the interpreter is on.
    """
    from tapestry.codegen.triton.run import tune as tuner
    from tapestry.codegen.triton.run.local_gpu import find_device
    from tapestry.codegen.triton.run.tuned import local_cache

    build, _ = store.read(Path(folder))
    device = find_device()
    cache = local_cache(flags.cache_folder(), device, build.precision)
    if cache is None:
        raise TapestryError("tuning needs a GPU: the interpreter's times say nothing", hint="unset TRITON_INTERPRET")
    how = tuner.How(
        device=device,
        timer=tuner.cuda_timer(device),
        candidates=tuner.local_candidates(device, build.precision),
        precision=build.precision,
        libraries=libraries,
        limit=time_limit,
        again=again,
        seed=seed,
    )
    rows = tuner.tune(build.plan.graph, build.program, cache, how, progress)
    passed = not any(r.get("wrong") for r in rows)
    return {"device": cache.device, "triton": cache.version, "cache": str(cache.folder), "kernels": rows, "passed": passed}


def run_checked(
    compiled: Compiled, feeds: Values, *, check: bool, progress: Progress = lambda done, total: None
) -> tuple[Result, dict[str, Any]]:
    """Run; the document is what ``tapestry run --json`` prints.

    ``check`` runs as often as it takes to see every way in which the executor runs: their bits must be the same.
    """
    checked = compiled.session.checked(feeds)
    feeds = {n: a.value if isinstance(a, HostValue) else a for n, a in checked.items()}  # as the reference takes them
    result, executor = compiled.session.compute(checked, progress), compiled.session.executor
    document = judged(compiled, feeds, result, check=check)
    for k in range(1, executor.ways if check else 1):
        outs = compiled.session.compute(checked).outputs
        if differ := [n for n, a in result.outputs.items() if not _same_bits(a, outs[n])]:
            document |= {"passed": False, "reason": f"run {k + 1} gave other bits than the first one for {', '.join(differ)}"}
            break
    return result, document | executor.described()


def _same_bits(a: Any, b: Any) -> bool:
    """Of two values of an output; values of the host are compared as values."""
    if is_array(a) and is_array(b) and a.dtype != object:
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    from tapestry.verify import model_outputs

    return model_outputs.compare_outputs(a, b, 0.0).passed


def judged(compiled: Compiled, feeds: Values, result: Result, *, check: bool) -> dict[str, Any]:
    """What a run gave and used, held against the plan and, with ``check``, the reference."""
    document = compared(compiled, feeds, result.outputs, check=check) | {
        "peak_bytes": result.measured.peak,
        "packed_bytes": result.measured.packed,
        "transfers": [{"kind": k, "count": c, "bytes": b} for k, (c, b) in result.measured.transfers.items()],
        "seconds": result.seconds,
    }
    planned = list(compiled.build.peak_bytes)
    if result.measured.peak != planned:
        document["passed"] = False
        document["reason"] = f"peak bytes {result.measured.peak} are not the plan's {planned}"
    return document


def compared(compiled: Compiled, feeds: Values, outs: Values, *, check: bool) -> dict[str, Any]:
    """Outputs described and, with ``check``, held against the reference: ``outputs, reference, passed``."""
    rows = {n: {**_described(a), "max_abs_err": None, "rel_err": None} for n, a in outs.items()}
    document: dict[str, Any] = {"outputs": rows, "reference": None, "passed": True}
    if check:
        from tapestry.compiler import model_evidence
        from tapestry.lift.file.structure import TEXT
        from tapestry.verify import model_outputs

        allowed, model = model_outputs.tolerances(compiled.build.plan.graph), Path(compiled.build.model)
        if model.suffix == TEXT:
            _check(None, feeds, outs, allowed, document, ("tapestry.verify.interp", model_evidence.text_outputs(model, feeds)))
            return document
        _check(model_evidence.model_file(model)[0], feeds, outs, allowed, document)
        _ask_again(compiled, feeds, document)
    return document


def _ask_again(compiled: Compiled, feeds: Values, document: dict[str, Any]) -> None:
    """Opaque nodes that both sides gave to one library are asked of another one; those that none runs are named."""
    graph = compiled.build.plan.graph
    if not any(isinstance(op, Opaque) for op in graph.ops):
        return
    from tapestry.compiler import model_evidence

    again = model_evidence.second_opinions(graph, Path(compiled.build.model), compiled.constants, feeds, document["reference"])
    document["opaque"] = again
    if again["differ"]:
        document["passed"] = False
        document["reason"] = f"another evaluator gives other values for {', '.join(again['differ'])}"


def _described(a: Any) -> dict[str, Any]:
    """Shape and dtype of an output; of a sequence or a map, how many elements, and none of an empty optional."""
    if not isinstance(a, np.ndarray):
        kind = "none" if a is None else "map" if isinstance(a, dict) else "sequence"
        return {"shape": None if a is None else [len(cast("Sized", a))], "dtype": kind}
    array = cast("Array", a)
    return {"shape": list(array.shape), "dtype": "string" if array.dtype == object else array.dtype.name}


def _check(
    model: ModelFile | None,
    feeds: Values,
    outs: Values,
    allowed: Mapping[str, float],
    document: dict[str, Any],
    reference: tuple[str, Values] | None = None,
) -> None:
    """Compare with the reference. Where that fails, ask how far each is from the exact values, and say so."""
    from tapestry.verify import model_outputs

    document["reference"], expected = reference or model_outputs.reference(cast("ModelFile", model), feeds)
    exact: dict[str, Any] | None = None
    for name, a in outs.items():
        difference = model_outputs.compare_outputs(a, expected[name], allowed.get(name, 0.0))
        row, passed = document["outputs"][name], difference.passed
        row.update(max_abs_err=difference.max_abs_err, rel_err=difference.rel_err)
        if not passed and document["reference"] == "onnxruntime" and model:
            exact = model_outputs.exact(model, feeds, list(expected)) if exact is None else exact
            if name in exact:
                passed, row["reference_spread"] = model_outputs.settle(a, expected[name], exact[name], allowed.get(name, 0.0))
            if not row.get("reference_spread"):  # where one library alone runs the model, or most of it
                row["reference_spread"] = model_outputs.sensitivity(model, feeds, expected)[name]
                near = min(row["reference_spread"], model_outputs.SPREAD_LIMIT)
                passed |= model_outputs.compare_outputs(a, expected[name], near).passed
        document["passed"] = document["passed"] and passed
