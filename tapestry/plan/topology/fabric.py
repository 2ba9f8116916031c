"""What a topology is: devices, and fabrics that join the devices which differ in one digit of their number.

Costs of communication follow the alpha-beta model (Hockney 1994): a message of n bytes takes ``alpha + beta * n`` seconds on a
link. Device numbers are row-major over the mesh; a fabric joins all devices that agree but for ``number // stride % size``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import isfinite, isqrt
from typing import Any

import numpy as np

from tapestry.errors import TapestryError
from tapestry.interop import instance_map
from tapestry.interop.instance_map import InstanceMap
from tapestry.ir.plan import Mesh, MeshAxis, device_count

# What `tapestry calibrate` measured, in topology files and builds: rates by class of kernel, and times of backend calls.


CLASSES = (
    "contraction", "convolution", "unfolded", "attention", "scored", "computed", "row", "softmax", "map", "gather", "opaque",
)  # fmt: skip
PRODUCTS = CLASSES[:6]  # whose rates are of products
LIKE = {
    "unfolded": "convolution", "attention": "contraction", "scored": "attention", "computed": "contraction", "softmax": "row",
}  # fmt: skip
"""What stands for classes that older calibrations did not tell apart."""
CALLS = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "batch_isend_irecv",
)  # fmt: skip
AGREE, BUSY = 0.15, 0.1  # what two rounds may differ by, and others take of the cores, where figures are sure
MAX_POINTS, MAX_TABLES, MAX_GROUP = 1024, 1024, 4096


@dataclass(frozen=True, slots=True)
class KernelRates:
    """A kernel of one class takes ``launch + work / rate + bytes / bandwidth`` seconds."""

    launch: float
    rate: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds of one backend call in groups of ``group`` ranks, all groups of the mesh at once.

    Attributes:
        points: (bytes, seconds), bytes rising and seconds not falling. The bytes are those of the larger of the two buffers
            that a rank hands to the call; of ``batch_isend_irecv`` what a rank sends to the ``group - 1`` others together.
        stride: how far apart neighbours of a group are in numbers of devices; 0: it does not matter.
    """

    call: str
    group: int
    points: tuple[tuple[int, float], ...]
    stride: int = 0

    def seconds(self, nbytes: float) -> float:
        """Straight lines between the points; the first one's time below it, the last slope above the last one."""
        x, y = [n for n, _ in self.points], [s for _, s in self.points]
        if nbytes <= x[-1]:
            return float(np.interp(nbytes, x, y))
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else y[-1] / max(x[-1], 1)
        return y[-1] + slope * (nbytes - x[-1])


def read_figures(data: Mapping[str, Any]) -> dict[str, float]:
    """How sure the measured figures of a document are, as far as it says so (`runtime.calibration.automatic`)."""
    said: Mapping[str, Any] = data.get("measured", {})
    found = {k: float(said[k]) for k in ("when", "rounds", "agreement", "others") if said.get(k) is not None}
    if not all(isfinite(x) and x >= 0 for x in found.values()):
        raise ValueError("numbers of 'measured' must be finite and ≥ 0")
    return found if {"when", "others"} <= found.keys() else {}


def doubtful(figures: Mapping[str, float]) -> bool:
    """Whether it is worth while to measure again on an idle machine."""
    return bool(figures) and (figures.get("agreement", 1.0) > AGREE or figures["others"] > BUSY)


def read_classes(data: Mapping[str, Any]) -> dict[str, KernelRates]:
    """``device.classes`` of a file.

    Raises:
        ValueError, KeyError, TypeError: they are none.
    """
    unknown = next((k for k in data if k not in CLASSES), None)
    if unknown is not None:
        raise ValueError(f"'{unknown}' is no class of kernels: {', '.join(CLASSES)}")
    return {k: read_rates(k, v) for k, v in data.items()}


def read_rates(name: str, v: Mapping[str, Any]) -> KernelRates:
    """One class of kernels."""
    out = KernelRates(float(v["launch"]), float(v["rate"]), float(v["bandwidth"]))
    sane = all(map(isfinite, (out.launch, out.rate, out.bandwidth)))
    if not sane or out.launch < 0 or min(out.rate, out.bandwidth) <= 0:
        raise ValueError(f"class '{name}': launch must not be negative, rates must be positive")
    return out


def read_calls(data: Iterable[Mapping[str, Any]]) -> tuple[CallTimes, ...]:
    """``collectives`` of a file; times that fall as bytes grow are raised to those before.

    Raises:
        ValueError, KeyError, TypeError: they are none.
    """
    out: list[CallTimes] = []
    for v in data:
        call, group, stride = str(v["call"]), int(v["group"]), int(v.get("stride", 0))
        points = [(int(n), float(s)) for n, s in v["points"]]
        if call not in CALLS:
            raise ValueError(f"'{call}' is no call: {', '.join(CALLS)}")
        if not (2 <= group <= MAX_GROUP and 0 <= stride <= MAX_GROUP and 1 <= len(points) <= MAX_POINTS):
            raise ValueError(f"'{call}': a group of 2 to {MAX_GROUP} and 1 to {MAX_POINTS} points")
        rising = points[0][0] >= 0 and all(a < b for (a, _), (b, _) in pairwise(points))
        if not rising or not all(isfinite(s) and s >= 0 for _, s in points):
            raise ValueError(f"'{call}' in groups of {group}: bytes must rise, seconds must not be negative")
        highest = np.maximum.accumulate([s for _, s in points]).tolist()
        out.append(CallTimes(call, group, tuple((n, s) for (n, _), s in zip(points, highest, strict=True)), stride))
    if len(out) > MAX_TABLES or len({(c.call, c.group, c.stride) for c in out}) < len(out):
        raise ValueError("'collectives' say the times of a call and group twice, or of too many")
    return tuple(out)


def read_margin(data: Mapping[str, Any]) -> float:
    """``margin`` of a file; 0 where it says nothing."""
    found = float(data.get("margin", 0.0))
    if not 0 <= found <= 1:
        raise ValueError("'margin' is a share between 0 and 1")
    return found


def read_power(data: Mapping[str, Any]) -> float:
    """``power`` of a device; 1 where it says nothing."""
    found = float(data.get("power", 1.0))
    if not 1 <= found <= 64:
        raise ValueError("'power' is between 1 and 64")
    return found


def read_overlap(data: Mapping[str, Any]) -> bool:
    """``overlap`` of a file; true where it says nothing."""
    found = data.get("overlap", True)
    if not isinstance(found, bool):
        raise TypeError("'overlap' is true or false")
    return found


def classes_data(found: Mapping[str, KernelRates]) -> dict[str, dict[str, float]]:
    """`read_classes` reads it back."""
    return {k: {"launch": v.launch, "rate": v.rate, "bandwidth": v.bandwidth} for k, v in found.items()}


def calls_data(found: Iterable[CallTimes]) -> list[dict[str, Any]]:
    """`read_calls` reads it back."""
    return [
        {"call": c.call, "group": c.group, **({"stride": c.stride} if c.stride else {}), "points": [list(p) for p in c.points]}
        for c in found
    ]


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

    def call_seconds(self, call: str, group: int, nbytes: float, stride: int = 0) -> float | None:
        """Seconds of a backend call as measured (`measured_costs.CallTimes` says of which bytes); ``None`` where it was not.

        Args:
            stride: how far apart neighbours of the group are; 0, and where that stride was not measured: the slowest.
        """
        found = [c for c in self.calls if c.call == call and c.group == group]
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


def weakest(kinds: Sequence[Device]) -> Device:
    """What all of some devices have at least, and the longest time to start a kernel."""
    dtypes = dict.fromkeys(t for d in kinds for t in d.flops)
    return Device(
        power=min(d.power for d in kinds),
        reserve=min(kinds, key=lambda d: d.memory).reserve,
        memory=min(d.memory for d in kinds), bandwidth=min(d.bandwidth for d in kinds), launch=max(d.launch for d in kinds),
        vector=min(d.vector for d in kinds), host=min(d.host for d in kinds),
        host_latency=max(d.host_latency for d in kinds), flops={t: min(d.rate(t) for d in kinds) for t in dtypes},
        classes={c: _slowest([d.classes[c] for d in kinds]) for c in kinds[0].classes if all(c in d.classes for d in kinds)},
    )  # fmt: skip


def _slowest(found: Sequence[KernelRates]) -> KernelRates:
    return KernelRates(max(k.launch for k in found), min(k.rate for k in found), min(k.bandwidth for k in found))


# Messages over the wires that exist: shortest paths, and how many bytes the busiest wire carries.
#
# Routes are fixed, whatever the message: the least ``alpha + beta * REFERENCE``, ties towards fewer hops, then lower numbers.


REFERENCE = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Routes:
    """Paths of a fabric of n devices.

    Attributes:
        hops: [to, from] number of wires on the path.
        next: [to, from] the device that the path goes to first.
        wire: [to, from] the wire it takes there.
        alpha: [to, from] sum of latencies, s.
        beta: of every wire, s/B.
    """

    hops: np.ndarray
    next: np.ndarray
    wire: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray

    def busiest(self, flow: np.ndarray) -> np.ndarray:
        """Seconds that the busiest wire is busy; ``flow`` is [to, from, …] of bytes, all sent at once."""
        n = len(self.hops)
        flow = flow.reshape(n * n, -1).astype(float)
        load = np.zeros((len(self.beta), flow.shape[1]))
        hops, wire = self.hops.reshape(-1), self.wire.reshape(-1)
        onward = (np.arange(n)[:, None] * n + self.next).reshape(-1)
        for far in range(int(hops.max(initial=0)), 0, -1):
            at = np.flatnonzero(hops == far)
            np.add.at(load, wire[at], flow[at])
            if far > 1:
                np.add.at(flow, onward[at], flow[at])
        return (load * self.beta[:, None]).max(axis=0, initial=0.0)


@lru_cache(maxsize=256)
def routes(n: int, wires: tuple[Wire, ...]) -> Routes:
    """Shortest paths between all devices.

    Raises:
        TapestryError: some device cannot reach another; names the pair.
    """
    into: list[list[tuple[int, Wire]]] = [[] for _ in range(n)]
    for k, w in enumerate(wires):
        into[w.dst].append((k, w))
    hops, onward, wire = np.zeros((3, n, n), np.int64)
    out = Routes(hops, onward, wire, np.zeros((n, n)), np.array([w.beta for w in wires]))
    for end in range(n):
        _towards(end, into, out)
    return out


def _towards(end: int, into: list[list[tuple[int, Wire]]], out: Routes) -> None:
    """Dijkstra's algorithm, backwards from where the messages go."""
    known: set[int] = set()
    queue = [(0.0, 0, end, end, -1, 0.0)]
    while queue:
        cost, hops, at, onward, wire, alpha = heapq.heappop(queue)
        if at in known:
            continue
        known.add(at)
        out.hops[end, at], out.next[end, at], out.wire[end, at], out.alpha[end, at] = hops, onward, max(wire, 0), alpha
        for k, w in into[at]:
            if w.src not in known:
                heapq.heappush(queue, (cost + w.alpha + w.beta * REFERENCE, hops + 1, w.src, at, k, alpha + w.alpha))
    if len(known) < len(into):
        lost = min(set(range(len(into))) - known)
        raise TapestryError(f"device {lost} cannot reach device {end}", hint="links that join all devices, in both directions")


# Wires of the usual shapes, and of maps in the notation of the multi-device slides.


Pairs = tuple[tuple[int, int], ...]
MAX_JOINED = 1024
MAX_ROWS = 64  # of a map that only says that all are joined with all
SHAPES = ("switch", "full mesh", "ring", "one-way ring", "line", "tree", "star", "linked rings")


def pairs(shape: str, n: int, option: int) -> Pairs:
    """Directed links of a shape of n devices.

    Args:
        option: children per node of a tree (0: 2), the centre of a star, the number of linked rings (0: 2).
    """
    step = [(i, (i + 1) % n) for i in range(n)]
    match shape:
        case "full mesh":
            found = [(i, j) for i in range(n) for j in range(n)]
        case "ring":
            found = _both(step)
        case "one-way ring":
            found = step
        case "line":
            found = _both(step[:-1])
        case "tree":
            found = _both([((i - 1) // (option or 2), i) for i in range(1, n)])
        case "star":
            found = _both([(option, i) for i in range(n)])
        case "linked rings":
            found = _linked(n, option or 2)
        case _:
            raise TapestryError(f"'{shape}' is not a shape of links", hint=f"{', '.join(SHAPES)}, torus, or a map")
    return tuple(dict.fromkeys((i, j) for i, j in found if i != j))


def _both(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*found, *((j, i) for i, j in found)]


def _linked(n: int, rings: int) -> list[tuple[int, int]]:
    """Equal rings of consecutive devices; the last of each and the first of the next are linked, both ways."""
    if n % rings or n // rings < 2:
        raise TapestryError(f"{n} devices do not make {rings} rings", hint="a number of rings that divides the devices")
    size = n // rings
    inner = [(r * size + i, r * size + (i + 1) % size) for r in range(rings) for i in range(size)]
    return _both([*inner, *((r * size + size - 1, (r + 1) * size) for r in range(rings - 1))])


def wires(found: Pairs, link: Link, other: Mapping[tuple[int, int], Link]) -> tuple[Wire, ...]:
    """Wires of directed links: all alike, but for those that are given apart.

    Raises:
        TapestryError: one is given for a link that is not there.
    """
    missing = next((p for p in other if p not in found), None)
    if missing is not None:
        raise TapestryError(
            f"there is no link from {missing[0]} to {missing[1]}", hint="'links' changes links that the shape has"
        )
    return tuple(Wire(i, j, other.get((i, j), link).alpha, other.get((i, j), link).beta) for i, j in found)


def of_map(text: str) -> tuple[int, Pairs, tuple[int, ...], str, tuple[str, ...]]:
    """(devices, links, sizes if it is a torus, kind, notes) of a map such as ``{4, [[1],[2],[3],[0]]}``.

    Links are as written. Only where rows are left out (``...``), the shape that the written ones show is taken.

    Raises:
        TapestryError: it does not parse, or rows are left out of something that is not recognised.
    """
    m = instance_map.parse_instances(text)
    names = instance_map.recognise(m)
    torus = next((s for s in names if s.kind == "torus" and len(s.detail) > 1 and (m.given < m.count or not s.notes)), None)
    if torus is not None:
        return m.count, (), torus.detail, "torus", torus.notes
    if m.given < m.count:
        raise TapestryError("rows are left out of a map of no known shape", where=str(m)[:60], hint="write all rows")
    exact = [s for s in names if not s.notes]
    kind = exact[0].kind if exact else "map"
    return m.count, tuple(sorted(m.links)), (), "one-way ring" if kind == "ring" and not exact[0].two_way else kind, ()


def connections(topo: Topology, n: int) -> InstanceMap | None:
    """Which of n devices are joined, as a map; ``None`` where more than `MAX_ROWS` are all joined with all."""
    if not topo.joined:
        return None if n > MAX_ROWS else InstanceMap(n, tuple(tuple(j for j in range(n) if j != i) for i in range(n)))
    rows: list[set[int]] = [set() for _ in range(n)]
    for f in topo.joined:
        inside = [(i, j) for i in range(f.size) for j in range(f.size)] if not f.wires else [(w.src, w.dst) for w in f.wires]
        for d in range(n):
            at = d // f.stride % f.size
            rows[d] |= {d + (j - i) * f.stride for i, j in inside if i == at and i != j}
    return InstanceMap(n, tuple(tuple(sorted(r)) for r in rows))


def balanced(n: int, parts: int) -> tuple[int, ...]:
    """Up to ``parts`` factors of n, as near to each other as can be, the largest last."""
    if parts <= 1 or n <= 3:
        return (n,)
    target = round(n ** (1 / parts))
    best = max((f for f in range(2, isqrt(n) + 1) if n % f == 0 and f <= max(2, target)), default=0)
    return (n,) if best == 0 else (best, *balanced(n // best, parts - 1))
