"""What a topology is: devices, and fabrics that join the devices which differ in one digit of their number.

Costs of communication follow the alpha-beta model (Hockney 1994): a message of n bytes takes ``alpha + beta * n`` seconds on a
link. Device numbers are row-major over the mesh; a fabric joins all devices that agree but for ``number // stride % size``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from tapestry.ir.plan import Mesh, MeshAxis, device_count
from tapestry.plan.topology.measured_costs import LIKE, PRODUCTS, CallTimes, KernelRates

HOST, HOST_LATENCY = 1.0e10, 1e-5  # B/s and s of a load from the host, where a topology says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device: memory in bytes, bandwidth of its memory in B/s, time to start a kernel in s.

    ``flops`` gives FLOP/s of contractions by dtype ("other" for the rest), and of f32 rounded to TF32 as "tf32" where the
    device has units for it; element-wise work runs at ``vector`` FLOP/s. ``reserve``: bytes that plans leave free beside
    ``memory``.
    ``power`` says how seconds of arithmetic and of memory add up in a kernel: by their p-norm. 1: one after the other; 4: side
    by side, but that the shorter one still counts.
    Weights that are streamed come from the host at ``host`` B/s, after ``host_latency`` s for each load.
    ``classes`` gives what was measured of single classes of kernels (`measured_costs.CLASSES`), with rates of f32.
    """

    memory: int
    bandwidth: float
    launch: float
    vector: float
    flops: Mapping[str, float]
    host: float = HOST
    host_latency: float = HOST_LATENCY
    name: str = ""
    reserve: int = 0
    power: float = 1.0
    classes: Mapping[str, KernelRates] = field(default_factory=dict[str, KernelRates])

    def rate(self, dtype: str, precision: str = "ieee") -> float:
        """FLOP/s of contractions in a dtype; ``precision``: of f32, where the device tells rates apart."""
        if dtype == "f32" and precision != "ieee" and "tf32" in self.flops:
            return self.flops["tf32"] / (3 if precision == "tf32x3" else 1)  # three products
        return self.flops.get(dtype, self.flops["f32" if dtype == "tf32" and "f32" in self.flops else "other"])

    def at_precision(self, precision: str) -> Device:
        """The device with ``f32`` at the rate of a precision, in all classes of products, too."""
        rate = self.rate("f32", precision)
        scale = rate / self.rate("f32")
        classes = {k: replace(v, rate=v.rate * scale) if k in PRODUCTS else v for k, v in self.classes.items()}
        return self if scale == 1 else replace(self, flops={**self.flops, "f32": rate}, classes=classes)

    def kernel(self, kind: str, dtype: str) -> KernelRates:
        """What kernels of a class take; the common rates where neither the class nor one like it was measured. Those of
        products of another dtype than f32 are faster or slower as `flops` says."""
        heavy = kind in PRODUCTS
        found = self.classes.get(kind) or self.classes.get(LIKE.get(kind, ""))
        if found is None:
            return KernelRates(self.launch, self.rate(dtype) if heavy else self.vector, self.bandwidth)
        return replace(found, rate=found.rate * self.rate(dtype) / self.rate("f32")) if heavy else found


@dataclass(frozen=True, slots=True)
class Link:
    """Latency in s and inverse bandwidth in s/B (per device, each direction)."""

    alpha: float
    beta: float


@dataclass(frozen=True, slots=True)
class Wire:
    """A link from one coordinate of a fabric to another, in this direction only."""

    src: int
    dst: int
    alpha: float
    beta: float


def slowest(found: Sequence[Link] | Sequence[Wire]) -> Link:
    """The costs of the slowest of some links."""
    return Link(max((k.alpha for k in found), default=0.0), max((k.beta for k in found), default=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """How devices are joined that differ only in ``number // stride % size``.

    Attributes:
        kind: ``switch`` (every device has one port to it; nothing inside it is ever busy), or the name of a shape of wires.
        link: of a port, for a switch; the slowest wire otherwise.
        wires: none for a switch.
    """

    kind: str
    stride: int
    size: int
    link: Link
    wires: tuple[Wire, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A mesh of devices.

    Attributes:
        links: one per mesh axis: the slowest link along it.
        joined: fabrics that together make up the mesh, the slowest digit first; none: each mesh axis is a switch of its link.
        notes: what had to be assumed of a file, for people.
        device: every device; where they differ, what all of them have at least (and the longest launch).
        kinds: each device, where they differ; none otherwise.
        calls: measured times of backend calls.
        overlap: whether a device's transfers run beside its kernels.
        alone: a device while no other one works, where that was measured.
        margin: the share by which several devices must be predicted to beat one device: how far measured times are off.
        native_sums: whether partial sums travel in the dtype of the results (`ir.plan.Plan`).
        figures: how sure what was measured is, where that is known.
    """

    name: str
    mesh: Mesh
    links: tuple[Link, ...]
    device: Device
    joined: tuple[Fabric, ...] = ()
    notes: tuple[str, ...] = ()
    kinds: tuple[Device, ...] = ()
    calls: tuple[CallTimes, ...] = ()
    overlap: bool = True
    alone: Device | None = None
    margin: float = 0.0
    native_sums: bool = False
    figures: Mapping[str, float] = field(default_factory=dict[str, float])

    def call_seconds(self, call: str, group: int, nbytes: float, stride: int = 0, span: int = 0) -> float | None:
        """Seconds of a backend call as measured (`measured_costs.CallTimes` says of which bytes); ``None`` where it was not.

        Args:
            stride: how far apart neighbours of the group are; 0, and where that stride was not measured: the slowest.
            span: aligned devices among which the group is.
        """
        found = [c for c in self.calls if c.call == call and c.group == group and (span <= c.within or not c.within)]
        exact = [c for c in found if stride and c.stride == stride]
        return max((c.seconds(nbytes) for c in exact or found), default=None)

    def each(self, what: Callable[[Device], float]) -> np.ndarray:
        """Something of every device; one number where they are all equal."""
        return np.array([what(d) for d in self.kinds] if self.kinds else what(self.device))

    def memories(self) -> list[int]:
        """Bytes that each device has."""
        return [d.memory for d in self.kinds] or [self.device.memory] * device_count(self.mesh)

    def tightest(self, needs: Sequence[int]) -> int:
        """The device that lacks most, or has least left, of what it needs."""
        spare = [has - need for has, need in zip(self.memories(), needs, strict=True)]
        return spare.index(min(spare))

    def strain(self, needs: Sequence[int]) -> int:
        """Bytes needed, as if all devices had `device.memory`: above it exactly when some device lacks some of its own."""
        d = self.tightest(needs)
        return needs[d] - self.memories()[d] + self.device.memory


@dataclass(frozen=True, slots=True)
class Digits:
    """Mesh and fabrics on common digits of the device number.

    Attributes:
        mesh: a finer mesh: each mesh axis is split where a fabric begins or ends inside it.
        fabrics: each fabric with the axes of the finer mesh that it joins.
        axis: for each axis of the finer mesh, the mesh axis that it is part of.
    """

    mesh: Mesh
    fabrics: tuple[tuple[Fabric, tuple[int, ...]], ...]
    axis: tuple[int, ...]


def fabrics(topo: Topology) -> tuple[Fabric, ...]:
    """What joins the devices, the slowest digit first."""
    if topo.joined:
        return topo.joined
    out: list[Fabric] = []
    stride = 1
    for a, link in zip(reversed(topo.mesh), reversed(topo.links), strict=True):
        out.append(Fabric(kind="switch", stride=stride, size=a.size, link=link))
        stride *= a.size
    return tuple(reversed(out))


def digits(topo: Topology) -> Digits:
    """The finest digits that mesh axes and fabrics are made of."""
    return _fabric_digits(topo.mesh, fabrics(topo))


@lru_cache(maxsize=256)
def _fabric_digits(mesh: Mesh, joined: tuple[Fabric, ...]) -> Digits:
    ends = {1}
    for f in joined:
        ends |= {f.stride, f.stride * f.size}
    bounds: list[tuple[int, int, int]] = []  # (stride, size, mesh axis), the slowest first
    stride = 1
    for n in reversed(range(len(mesh))):
        top = stride * mesh[n].size
        inside = sorted({stride, top} | {e for e in ends if stride < e < top})
        pieces = [(lo, hi // lo, n) for lo, hi in pairwise(inside)] or [(stride, 1, n)]
        bounds, stride = [*reversed(pieces), *bounds], top
    fine = tuple(MeshAxis(f"{mesh[n].name}.{k}", size) for k, (_, size, n) in enumerate(bounds))
    of = tuple(
        (f, tuple(k for k, (s, size, _) in enumerate(bounds) if size > 1 and f.stride <= s < f.stride * f.size)) for f in joined
    )
    return Digits(fine, tuple((f, axes) for f, axes in of if axes), tuple(n for _, _, n in bounds))


def divides(mesh: Mesh, ends: tuple[int, ...]) -> bool:
    """Whether digits that end at these strides are digits of the mesh axes, too: each divides the next."""
    stride, all_ends = 1, {1, *ends}
    for a in reversed(mesh):
        stride *= a.size
        all_ends.add(stride)
    order = sorted(all_ends)
    return all(b % a == 0 for a, b in pairwise(order))


def of_devices(topo: Topology, kinds: Sequence[Device]) -> Topology:
    """The topology with one device or another at each place of the mesh."""
    alike = all(d == kinds[0] for d in kinds)
    return replace(topo, device=kinds[0] if alike else weakest(kinds), kinds=() if alike else tuple(kinds))


def weakest(kinds: Sequence[Device]) -> Device:
    """What all of some devices have at least, and the longest time to start a kernel."""
    dtypes = dict.fromkeys(t for d in kinds for t in d.flops)
    return Device(
        power=min(d.power for d in kinds),
        reserve=min(kinds, key=lambda d: d.memory).reserve,
        memory=min(d.memory for d in kinds),
        bandwidth=min(d.bandwidth for d in kinds),
        launch=max(d.launch for d in kinds),
        vector=min(d.vector for d in kinds),
        host=min(d.host for d in kinds),
        host_latency=max(d.host_latency for d in kinds),
        flops={t: min(d.rate(t) for d in kinds) for t in dtypes},
        classes={c: _slowest([d.classes[c] for d in kinds]) for c in kinds[0].classes if all(c in d.classes for d in kinds)},
    )


def _slowest(found: Sequence[KernelRates]) -> KernelRates:
    slowest = (max(k.launch for k in found), min(k.rate for k in found), min(k.bandwidth for k in found))
    return KernelRates(*slowest, max(k.head for k in found))
