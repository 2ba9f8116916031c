"""A build directory, loaded and ready to run: like an onnxruntime session, name to array."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np

from tapestry.build.store import Build
from tapestry.errors import BuildError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, slices
from tapestry.ir.program import Program
from tapestry.ir.types import DTYPES, Array, Tensor, Weight, itemsize, numpy_dtype
from tapestry.lift.file.weight_data import read_checked
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.plan.topology import from_data
from tapestry.runtime.feeds import check_indices, index_bounds

if TYPE_CHECKING:
    from tapestry.runtime.executor import Executor
    from tapestry.runtime.target_protocol import Measured, Progress, Source, Target


NO_WEIGHTS = "compile again without --no-weights, or a module whose weights are not on the meta device"
T = TypeVar("T", bound="Target")
Slices = Callable[[str, Box], Array]
"""Data of a weight: (tensor, box) to a copy."""
MakeExecutor: TypeAlias = "Callable[[Graph, Program, T, Source, frozenset[str]], Executor]"
"""(graph, program, target, weights, names of those that are streamed) to what runs the program."""


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs by name, and what the run used."""

    outputs: dict[str, Any]
    measured: Measured
    seconds: float


class ModelFiles:
    """Reads boxes of weights out of the model's files; what a box touches is checked, once."""

    def __init__(self, build: Build, honest: set[tuple[Weight, int]] | None = None) -> None:
        """``honest`` has what was checked before, and grows."""
        self.build = build
        self._honest: set[tuple[Weight, int]] = set() if honest is None else honest

    def __call__(self, tensor: str, box: Box) -> Array:
        """A copy of a box.

        Raises:
            BuildError: the weight is not what the model held when it was compiled.
        """
        graph = self.build.plan.graph
        return read_checked(Path(self.build.model), graph.weights[tensor], graph.tensors[tensor], box, self._honest)


class OnceRead:
    """Slices of weights that are read once for all builds that have them, for as long as one holds them."""

    def __init__(self) -> None:
        self._there: WeakValueDictionary[Hashable, Array] = WeakValueDictionary()
        self._honest = set[tuple[Weight, int]]()

    def of(self, build: Build) -> Slices:
        """Slices of one build's weights, which nobody may write: another build may lack them, or have others by the same
        name.
        """
        graph, source = build.plan.graph, ModelFiles(build, self._honest)

        def read(tensor: str, box: Box) -> Array:
            t = graph.tensors[tensor]
            key = graph.weights[tensor], t.dtype, t.shape, box
            found = self._there.get(key)
            if found is None:
                found = self._there[key] = source(tensor, box)
            return found

        return read


class Session:
    """Runs a build; weights are checked against their hashes, and read once (streamed ones at every use), in slices.

    ``make`` makes what runs the program; ``weights`` gives slices from elsewhere than the model's files; ``source`` makes
    arrays of inputs and weights, where that is not the target: an executor that copies them to where they go anyway.
    """

    def __init__(
        self,
        build: Build,
        constants: bytes,
        target: T,
        make: MakeExecutor[T],
        weights: Slices | None = None,
        source: Target | None = None,
    ) -> None:
        self.build, self.constants, self.target, self.source = build, constants, target, source or target
        self.slices = weights or ModelFiles(build)
        missing = [t for t, w in build.plan.graph.weights.items() if w.file and not w.sha256]
        if missing:
            raise BuildError(f"compiled without its weights ('{missing[0]}', …)", hint=NO_WEIGHTS)
        self.executor = make(build.plan.graph, build.program, target, self._weight, build.plan.streamed)
        self.bounds = tuple(index_bounds(build.plan.graph))
        tensors = [build.plan.graph.tensors[t] for t in build.plan.graph.inputs]
        self._plain = [(t.name, None if t.on_host else numpy_dtype(t.dtype), t.shape) for t in tensors]
        self.executor.room = [limit - peak for limit, peak in zip(memory_limits(build), build.peak_bytes, strict=True)]

    def _weight(self, tensor: str, box: Box) -> Any:
        """A box of a weight, copied out of the model's files."""
        t = self.build.plan.graph.tensors[tensor]
        if self.build.plan.graph.weights[tensor].file == "":
            offset, length = self.build.constants[tensor]
            data = np.frombuffer(self.constants[offset : offset + length], numpy_dtype(t.dtype)).reshape(t.shape)
            return self.source.from_numpy(np.array(data[slices(box)]))
        return self.source.from_numpy(self.slices(tensor, box))

    def run(self, feeds: Mapping[str, Any], progress: Progress = lambda done, total: None) -> Result:
        """Run once; inputs are read where they are until it returns.

        Raises:
            TapestryError: an input is missing, unknown, or of another shape or dtype, or has an index outside its table.
        """
        return self.compute(self.checked(feeds), progress)

    def checked(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, which are what the build takes.

        Raises:
            TapestryError: one is missing, unknown, or of another shape or dtype, or has an index outside its table.
        """
        if len(feeds) == len(self._plain) and all(_is_plain(feeds.get(n), d, s) for n, d, s in self._plain):
            checked = dict(feeds)
        else:
            checked = check_feeds(feeds, self.build.plan.graph)
        check_indices(checked, self.bounds)
        return checked

    def compute(
        self, checked: Mapping[str, Any], progress: Progress = lambda done, total: None, wanted: Collection[str] | None = None
    ) -> Result:
        """Run once on inputs that were checked; only outputs that are wanted are brought together."""
        graph = self.build.plan.graph
        start = time.perf_counter()
        if wanted is None and (found := self.executor.at_once(checked)):
            return Result(*found, time.perf_counter() - start)
        outs, measured = self.executor.run(_Feeds(checked, self.source), progress, wanted)
        seconds = time.perf_counter() - start
        return Result(
            {t: _row_major(self.target.to_numpy(a, graph.tensors[t].dtype)) for t, a in outs.items()}, measured, seconds
        )


@dataclass(frozen=True, slots=True)
class _Feeds:
    """Inputs on their way to the target."""

    arrays: Mapping[str, Any]
    source: Target

    def __call__(self, tensor: str, box: Box) -> Any:
        """A box as it is where its elements lie in a row, which nobody writes; else a copy."""
        value = self.arrays[tensor]
        return self.source.from_numpy(value if isinstance(value, HostValue) else value[slices(box)])


def _is_plain(value: Any, dtype: Any, shape: tuple[int, ...]) -> bool:
    """Whether an input is numpy's, of the dtype and shape that are wanted: nothing has to be said of it, or done."""
    return type(value) is np.ndarray and value.dtype == dtype and value.shape == shape


def memory_limits(build: Build) -> list[int]:
    """Bytes that each device has."""
    topo = from_data(build.topology)
    return topo.memories() if topo.kinds else [build.memory] * build.plan.devices


def _row_major(a: Any) -> Any:
    return a if not is_array(a) or a.flags.c_contiguous else a.copy(order="C")


def hold(feeds: Mapping[str, Any], graph: Graph) -> None:
    """Raise what a run with these inputs would raise before anything is computed."""
    check_indices(check_feeds(feeds, graph), index_bounds(graph))


def check_feeds(feeds: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    """The inputs, one per tensor wanted, of exactly its shape and dtype; values of the host are taken as they are."""
    wanted = [graph.tensors[t] for t in graph.inputs]
    extra = sorted(set(feeds) - {*graph.inputs})
    if extra:
        raise TapestryError(f"there is no input '{extra[0]}'", hint=f"the inputs are {', '.join(graph.inputs)}")
    out: dict[str, Any] = {}
    for t in wanted:
        if t.name not in feeds:
            raise TapestryError(f"input '{t.name}' is missing", hint=f"an array {t.dtype}{list(t.shape)}")
        if t.on_host:
            out[t.name] = HostValue(host_value(feeds[t.name], t))
            continue
        try:
            a = as_numpy(feeds[t.name])
        except (ValueError, TypeError, RuntimeError, BufferError) as e:
            raise TapestryError(f"input '{t.name}' is no array: {e}") from None
        if a.shape != t.shape or a.dtype != numpy_dtype(t.dtype):
            what = f"input '{t.name}' is {a.dtype}{list(a.shape)}, not {DTYPES[t.dtype][1]}{list(t.shape)}"
            cast_it = a.shape == t.shape and a.dtype != numpy_dtype(t.dtype)
            raise TapestryError(what, hint=f"x.astype('{DTYPES[t.dtype][1]}')" if cast_it else "an array of that shape")
        out[t.name] = a
    return out


def as_numpy(value: Any) -> Array:
    """An array of numpy's over the same memory, if that is the host's: of numpy's own, torch's, or whatever speaks DLPack."""
    if isinstance(value, np.ndarray):
        return cast(Array, value)
    if hasattr(value, "detach"):  # torch's
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        kind = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)  # what numpy lacks
        if kind is not None:
            import torch

            return tensor.view(torch.int8 if tensor.itemsize == 1 else torch.int16).numpy().view(kind)
        return tensor.numpy()
    return cast(Array, np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value))


def as_torch(value: Any) -> Any:
    """A result as torch has it, over the same memory where that may be written; what torch has no type for as it is."""
    if isinstance(value, list):
        return [as_torch(v) for v in cast("list[Any]", value)]
    import torch

    kind = getattr(torch, value.dtype.name, None) if is_array(value) else None
    if kind is None:
        return value
    bits: Any = value if value.flags.writeable else value.copy()
    if not hasattr(ml_dtypes, bits.dtype.name):
        return cast("Any", torch).from_numpy(bits)
    return cast("Any", torch).from_numpy(bits.view(f"i{bits.itemsize}")).view(kind)


def has_torch(value: Any) -> bool:
    """Whether a value is torch's tensor, or has one in it."""
    return any(map(has_torch, cast("Any", value))) if isinstance(value, list | tuple) else hasattr(value, "resolve_conj")


def shapes_of(feeds: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of inputs by name; values that are no arrays have none.

    Raises:
        TapestryError: an array cannot be read.
    """
    try:
        return {n: tuple(v.shape) if hasattr(v, "shape") else as_numpy(v).shape for n, v in feeds.items()}
    except (ValueError, TypeError, RuntimeError, BufferError) as e:
        raise TapestryError(f"an input is no array: {e}") from None


def host_value(value: Any, t: Tensor) -> Any:
    """An input that stays on the host: strings as an array of objects, a sequence as a list of arrays.

    Raises:
        TapestryError: it is a sequence where a tensor is wanted, or the other way round.
    """
    sequence, optional = "seq(" in t.about, t.about.startswith("optional(")
    if value is None and optional:
        return None
    if isinstance(value, list | tuple) != sequence or value is None:
        raise TapestryError(f"input '{t.name}' is {type(value).__name__}, not {t.about}")
    if sequence:
        return [_strings(as_numpy(v)) for v in value]
    return _strings(as_numpy(value))


def _strings(a: Array) -> Array:
    return a.astype(object) if a.dtype.kind in "US" else a


def largest_constant(build: Build) -> int:
    """Bytes that ``constants.bin`` must have."""
    sizes = [o + n for o, n in build.constants.values()]
    tensors = build.plan.graph.tensors
    bad = [t for t, (_, n) in build.constants.items() if t not in tensors or n != tensors[t].size * itemsize(tensors[t].dtype)]
    if bad:
        raise BuildError(f"constant '{bad[0]}' has another size than its tensor")
    return max(sizes, default=0)
