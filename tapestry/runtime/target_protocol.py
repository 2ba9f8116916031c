"""What the runtime asks of a target, and what it gives to one: protocols, which a code generator implements without importing
them.

`Target` is all that a new target needs. Three more protocols are optional; the runtime looks whether they are there:
`PackableKernel` (a kernel that likes its weights in another layout), `RecordingTarget` (kernels that can be bound to fixed
addresses on the CPU) and `BindingTarget` (kernels that are bound to buffers on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, Kernel

if TYPE_CHECKING:
    from tapestry.ir.graph import Graph
    from tapestry.ir.kernel import Box, Kernel


Array = Any


"""A ``torch.Tensor``, or an `onnx_eval.opaque_node.HostValue` where the dtype is ``"host"``."""

Run = Callable[[Sequence[Array | None], Sequence[Array]], list[Array]]
"""A kernel: ``(ins, states) -> outs``.

``ins`` has one array per read of the operation (per input of an opaque one), of the shape of the box in ``Kernel.ins``, and
``None`` where that has none. ``states`` has one array per field for a kernel of mode ``finish`` (and of mode ``partial`` where
other parts of the reduction have been merged before), of the shapes of ``Kernel.outs``; otherwise it is empty. ``outs`` are
new, contiguous arrays of the shapes of ``Kernel.outs``, one per output (per field in mode ``partial``). A kernel neither writes
nor keeps its arguments, and gives no view of them back.
"""

Source = Callable[[str, "Box"], Array]
"""Data of a weight or a graph input: (tensor, box) to a new array of the target."""

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


class Target(Protocol):
    """A code generator, as the runtime sees it: kernels, merges of partial states, and the way to numpy and back.

    Arrays are torch tensors on `device`, row-major, of exactly the box that the Program says. The dtypes of the IR are torch's
    of the same name; types that are only stored (``ir.types.STORED``: 8-bit floats, 4-bit integers, …) are held as ``uint8``,
    one element per byte. A value of the host is a `HostValue` and is on no device. The runtime owns every array: it allocates
    what transfers and merges fill, frees what a kernel returned, slices and copies. A target keeps no reference to one.

    A mistake in a program is the compiler's (an ``AssertionError``); `TapestryError` is for what the user can mend: a device
    that is missing, or a kernel that needs more than it has.
    """

    @property
    def device(self) -> torch.device:
        """Where arrays live."""
        ...

    def kernel(self, graph: Graph, kernel: Kernel) -> Run:
        """A function that computes one block of ``graph.ops[kernel.op]``.

        It is called once per launch when a build is loaded, so all that depends on shapes is worked out here; the function is
        then called at every run. See `Run` for what it takes and gives.
        """
        ...

    def merge(self, monoid: str, states: Sequence[Sequence[Array]]) -> list[Array]:
        """Merge partial states of a reduction, in the order given, which matters where the monoid does not commute.

        Args:
            monoid: a name of `ir.monoid.MONOIDS`.
            states: for each device, one array per field; a field has the same shape and dtype on all devices. They are only
                read.

        Returns:
            One new array per field, of that shape and dtype.
        """
        ...

    def from_numpy(self, array: Any) -> Array:
        """An array on `device` with the elements of a numpy array, which it may share; a `HostValue` as it is."""
        ...

    def to_numpy(self, array: Array, dtype: str) -> Any:
        """The other way: a numpy array of the IR's ``dtype``, or the value inside a `HostValue`."""
        ...


class Pack(Protocol):
    """How one weight is packed; packs with equal keys make equal copies."""

    @property
    def key(self) -> Hashable:
        """What the copy depends on, beside the weight."""
        ...

    @property
    def run(self) -> Callable[[Array], Array]:
        """From the weight as the Program holds it to the packed one."""
        ...

    def suits(self, weight: Array) -> bool:
        """Whether a kernel that reads this weight packed computes what it does on the weight as it is."""
        ...


@runtime_checkable
class PackableKernel(Protocol):
    """A kernel (it is called like any `Run`) that may read weights in a layout of its own, packed once when they are loaded."""

    @property
    def packs(self) -> Mapping[int, Pack]:
        """Reads, by position, that may be packed."""
        ...

    @property
    def packed(self) -> Run:
        """The kernel that takes all of `packs` packed."""
        ...


class Call(Protocol):
    """A kernel with what it works on."""

    def run(self) -> None:
        """Compute."""
        ...


class Recorder(Protocol):
    """A kernel that can write into given memory: flat tensors, as many elements as the output has."""

    @property
    def arrays(self) -> Sequence[Callable[[Array], Array]]:
        """For each output, the function from its memory to the array that readers take (a view of it)."""
        ...

    def bind(self, ins: Sequence[Array | None], memory: Sequence[Array]) -> Call:
        """The call for some inputs and memory for each output."""
        ...


class Given(Protocol):
    """The copy of an array, wherever it is, to one that stays where it is."""

    @property
    def call(self) -> Call:
        """What copies."""
        ...

    def of(self, x: Array) -> Array:
        """Take it from an array from now on; what has to stay until it is copied."""
        ...


class WholeRun(Protocol):
    """A run that is nothing but calls: a function from the inputs to the outputs, numpy's arrays by name.

    Attributes:
        moved: inputs and outputs that the calls read and write where the caller has them; the memory meant for them is unused.
    """

    moved: Collection[str]

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run once."""
        ...


@runtime_checkable
class RecordingTarget(Protocol):
    """A target whose kernels can be bound to fixed addresses on the CPU (`runtime.one_process.static_schedule`).

    Recorders and calls that are handed in are the target's own, which it has made before.
    """

    def recorders(self, runs: Mapping[int, Run]) -> Mapping[int, Recorder]:
        """A program's kernels (by step) as such that write where they are told: those that can, where that pays."""
        ...

    def scratch(self, room: int) -> Any:
        """Memory that calls share for what they copy, of so many bytes at most: ``nbytes`` by now."""
        ...

    def bind(self, recorder: Recorder, ins: Sequence[Array | None], memory: Sequence[Array], scratch: Any) -> Call | None:
        """The call of a recorder that may run again on new data in the same arrays; ``None`` where there is none."""
        ...

    def given(self, to: Array) -> Given | None:
        """Copies to an array; ``None`` where it has no cells."""
        ...

    def at_once(
        self, given: Sequence[tuple[str, Any]], calls: Sequence[Call], ends: Mapping[str, tuple[Array, Any]]
    ) -> WholeRun | None:
        """A run that is nothing but calls.

        Args:
            given: by the inputs' names, copies of them to memory that nothing else has; they are among the calls.
            ends: outputs in memory that nothing else has, with numpy's types.

        Returns:
            ``None`` where an output cannot be copied by a call.
        """
        ...

    def batch(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Calls one after another, as one function."""
        ...

    def described(self) -> dict[str, Any]:
        """What there is to say of where calls run, for the JSON of ``run``."""
        ...


class BindingTarget(Target, Protocol):
    """A target whose kernels are launched on buffers of fixed addresses (`runtime.one_process.gpu_devices`).

    Attributes:
        kept: bytes that bound functions hold beyond the buffers: ``fixed`` inputs in another order.
    """

    kept: int

    def prepare(self, graph: Graph, kernels: Sequence[Kernel]) -> None:
        """Compile all that is going to be bound, several kernels at a time."""
        ...

    def bind(
        self,
        graph: Graph,
        kernel: Kernel,
        ins: Sequence[Array | None],
        states: Sequence[Array],
        outs: Sequence[Array],
        fixed: Collection[int] = (),
    ) -> Callable[[], None]:
        """A function that computes one block from these buffers into ``outs``; it may be captured in a CUDA graph.

        Args:
            fixed: the inputs that are there already and never change.
        """
        ...

    def runs_on_host(self, graph: Graph, op: int) -> str:
        """Why an operation has no kernel to bind, and `kernel` computes it on the host; "" where it has one."""
        ...

    def merges_on_host(self, fields: Sequence[Array]) -> str:
        """Why `merge` takes such states to the host; "" where it does not."""
        ...


@dataclass(slots=True)
class Measured:
    """What a run really used: peak bytes of buffers per device, and (count, bytes) per kind of transfer.

    ``packed`` is what packed weights, and results of launches of weights alone, take beyond the plan's buffers while they stay
    loaded; ``gaps`` what buffers with positions of their own (`runtime.one_process.static_schedule`) take beyond its peak.
    """

    peak: list[int]
    transfers: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    packed: list[int] = field(default_factory=list[int])
    gaps: list[int] = field(default_factory=list[int])

    def sent(self, kind: str, nbytes: int) -> None:
        """Count one transfer."""
        count, total = self.transfers.get(kind, (0, 0))
        self.transfers[kind] = (count + 1, total + nbytes)
