"""Our kernels in C against their contracts, both compiled: on small instances whose numbers are exact, for every edge.

All values are small integers (or what a sum of them cannot round), so that results are the same to the bit. Around each output
are cells that nobody may write.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES, tensor_of
from tapestry.codegen.torch_cpu.c import conv_c, print_c
from tapestry.codegen.torch_cpu.c.c_calls import CCall, CpuKernel
from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, Kernel, shape, size
from tapestry.tools.kernel_proofs.kernel_text import Argument, At, Buffer, KernelLaunch, KernelText, Value, block_of
from tapestry.tools.kernel_proofs.terms import Unsupported

Tensor = torch.Tensor
Array = np.ndarray[Any, Any]


# Calls of our own kernels in C as a proof takes them: the kernel's contract, and what of it a build's call says.
#
# A contract (`native/contracts`) is the kernel in plain loops. It is proved against the operation with the sizes, strides and
# addresses of the call; that the kernel keeps it is shown by `contract_trials`.


FOLDER = Path(native.__file__).parent / "contracts"
MOST_NUMBERED = 1 << 26  # cells of a weight whose packing is looked at


@dataclass(frozen=True, slots=True)
class Contract:
    """Where the contract of a kernel is: file, function, and what its parameters get of a call."""

    file: str
    function: str
    params: tuple[str, ...]

    @property
    def source(self) -> str:
        """The text of its file."""
        return (FOLDER / self.file).read_text()


ROWS, PIXELS, HEADS = (0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3)
ORDERS = (ROWS, PIXELS, HEADS)  # in which inputs of four axes lie: row-major, channels of a pixel, heads of a row side by side
STRUCTS = {"c": "Conv", "t": "Taps", "b": "Buffers"}
TAPS = ("feature", "channel", "row", "column")
_CONV, _WINDOWS = ("c", "t", "b"), ("c", "b")
CONTRACTS = {
    "tapestry_conv": Contract("convolutions.c", "contract_conv", _CONV),
    "tapestry_winograd": Contract("convolutions.c", "contract_conv", _CONV),
    "tapestry_planes": Contract("convolutions.c", "contract_planes", _CONV),
    "tapestry_depthwise": Contract("convolutions.c", "contract_depthwise", _CONV),
    "tapestry_max_pool": Contract("convolutions.c", "contract_max_pool", _WINDOWS),
    "tapestry_mean": Contract("convolutions.c", "contract_mean", _WINDOWS),
    "tapestry_rms_norm": Contract("norms.c", "contract_rms_norm", ("r", "b")),
    "tapestry_attention": Contract("attentions.c", "contract_attention", ("a", "h")),
    "tapestry_attend": Contract("attentions.c", "contract_attention", ("a", "h")),  # where all keys count
}


@dataclass(frozen=True, slots=True)
class Bound:
    """Tensors that a kernel's call is bound to: by name the tensor, its box and type; and the buffer of each read.

    Attributes:
        packed: what stands for packed weights, by the buffer's name.
        weights: strides (feature, channel, row, column) of packed weights in the buffers as the model has them, by name.
    """

    tensors: dict[str, tuple[Tensor, Box, str]]
    reads: dict[int, str]
    packed: dict[str, Tensor]
    weights: dict[str, tuple[int, ...]]
    ins: list[Tensor | None]

    def outs(self, graph: Graph, kernel: Kernel, runs: Sequence[CpuKernel]) -> list[Tensor]:
        """Memory of the outputs ``y``, ``y1``, …, each over as many elements as a part of the kernel writes."""
        op, out = graph.ops[kernel.op], list[Tensor]()
        for k, (run, box) in enumerate(zip(runs, kernel.outs, strict=True)):
            out.append(torch.empty(run.memory[0][0]))
            array = run.arrays[0](out[k])
            if array.shape != shape(box):
                raise Unsupported("a state that does not vary along all dimensions")
            self.tensors[out_name(k)] = (array, box, graph.tensors[op.outs[k]].dtype)
        return out

    def buffers(self) -> dict[str, Buffer]:
        """The tensors as buffers, in the order in which their cells lie."""
        return {n: Buffer(dtype, size(box), strides=x.stride()) for n, (x, box, dtype) in self.tensors.items()}

    def at(self, address: int | None) -> At | None:
        """The place that an address is of.

        Raises:
            KeyError: it is in no buffer.
        """
        if address is None:
            return None
        for n, x in self.packed.items():
            if address == x.data_ptr():
                return At(n)
        for n, (x, _, _) in self.tensors.items():
            first, count = x.data_ptr(), x.untyped_storage().nbytes()
            if n not in self.packed and first <= address < first + max(count, 1):
                return At(n, (address - first) // x.element_size())
        raise KeyError(address)

    def fields(self, struct: Any) -> dict[str, Value]:
        """What a struct has: numbers, and addresses as places in buffers; those of none that is known are left out."""
        out: dict[str, Value] = {}
        for name, kind, *_ in struct._fields_:
            value: Any = getattr(struct, name)
            with contextlib.suppress(KeyError):
                several = kind is not ctypes.c_void_p and issubclass(kind, ctypes.Array)
                out[name] = self.at(value) if kind is ctypes.c_void_p else tuple(value) if several else value
        return out


def out_name(k: int) -> str:
    """The name of an output's buffer."""
    return f"y{k or ''}"


def bound(graph: Graph, kernel: Kernel, packs: Mapping[int, Any], order: tuple[int, ...] = ROWS) -> Bound:
    """Inputs whose four axes, if they have as many, lie in some order; weights as `dense` packs them."""
    op = block_of(graph, kernel)
    out, same = Bound({}, {}, {}, {}, []), dict[tuple[str, Box], str]()
    for p, (r, box) in enumerate(zip(op.reads, kernel.ins, strict=True)):
        if box is None:
            out.ins.append(None)
            continue
        name = out.reads[p] = same.setdefault((r.tensor, box), f"buffer {p}")
        dtype = graph.tensors[r.tensor].dtype
        if name not in out.tensors:
            own = order if len(box) == len(order) and p not in packs else tuple(range(len(box)))
            laid = torch.empty([shape(box)[k] for k in own], dtype=TORCH_DTYPES.get(dtype, torch.float32))
            made = laid.permute([own.index(k) for k in range(len(box))])
            out.tensors[name] = (made, box, dtype)
        if p in packs:
            out.packed[name], out.weights[name] = torch.empty(1), weight_strides(box, packs[p])
        out.ins.append(out.packed.get(name, out.tensors[name][0]))
    return out


def contract_texts_of(
    graph: Graph, kernel: Kernel, runs: Sequence[CpuKernel], name: str, packs: Mapping[int, Any]
) -> tuple[tuple[KernelText, ...], tuple[str, ...]]:  # fmt: skip
    """The contracts of a kernel's calls, one for each output, and the names of our kernels: for each way in which images lie.

    Args:
        packs: how weights are packed, by read.

    Raises:
        Unsupported: a kernel has no contract, or torch moves an input before.
    """
    texts, ours = list[KernelText](), list[str]()
    for order in ORDERS:
        given = bound(graph, kernel, packs, order)
        memory = given.outs(graph, kernel, runs)
        calls = [one_call(run, given, m) for run, m in zip(runs, memory, strict=True)]
        if not all(c.fixed for c in calls):
            continue
        text = _contracts_of_contract_texts(runs, calls, given, name if order == ROWS else f"{name}, inputs laid {order}")
        if all((text.launches, text.buffers) != (t.launches, t.buffers) for t in texts):
            texts.append(text)
            ours += [c.function.__name__ for c in calls]
    if not texts:
        raise Unsupported("torch moves an input before the kernel reads it")
    return tuple(texts), tuple(dict.fromkeys(ours))


def _contracts_of_contract_texts(runs: Sequence[CpuKernel], calls: Sequence[CCall], given: Bound, name: str) -> KernelText:
    found = [contract(c.function.__name__) for c in calls]
    names = [(f, {p: p if len(runs) == 1 else f"{p}{k}" for p in f.params}) for k, f in enumerate(found)]
    params = {n: v for (f, own), c in zip(names, calls, strict=True) for n, v in arguments(f, own, c, given).items()}
    source, function = "".join(dict.fromkeys(f.source for f in found)), found[0].function
    if len(runs) > 1:
        function = "together"
        lines = (f"    {f.function}({', '.join(own.values())});\n" for f, own in names)
        said = ", ".join(f"const {STRUCTS[p]} *{n}" for _, own in names for p, n in own.items())
        source = f"{source}void together({said}) {{\n{''.join(lines)}}}\n"
    return KernelText(
        name=name, source=source, launches=(KernelLaunch(function=function, params=params),), buffers=given.buffers(),
        reads=given.reads, outs=tuple(map(out_name, range(len(runs)))), language="c",
    )  # fmt: skip


def one_call(run: CpuKernel, given: Bound, memory: Tensor) -> CCall:
    """The call of a kernel on tensors.

    Raises:
        Unsupported: it is several.
    """
    assert run.bind
    call = run.bind(given.ins, [memory])
    if not isinstance(call, CCall):
        raise Unsupported("several calls one after another, which are not read together")
    return call


def contract(ours: str) -> Contract:
    """The contract of a kernel.

    Raises:
        Unsupported: it has none.
    """
    if ours not in CONTRACTS:
        raise Unsupported(f"'{ours}' has no contract")
    return CONTRACTS[ours]


def arguments(of: Contract, names: Mapping[str, str], call: CCall, given: Bound) -> dict[str, Argument]:
    """What the parameters of a contract get of a call."""
    structs: dict[str, Argument] = {of.params[0]: given.fields(call.sizes), of.params[-1]: given.fields(call.buffers)}
    if "t" in of.params:
        w = given.at(call.buffers.w)
        assert isinstance(w, At)
        structs["t"] = dict[str, Value](zip(TAPS, given.weights[w.buffer], strict=True))
    return {names[p]: structs[p] for p in of.params}


def sums_text_of(graph: Graph, kernel: Kernel, run: CpuKernel, then: str, name: str, packs: Mapping[int, Any]) -> KernelText:
    """The contract of products of the same rows, each to memory of its own, and what is computed of all of their cells.

    Args:
        then: the name of that function (`print_c`).
    """
    given = bound(graph, kernel, packs)
    call = one_call(run, given, given.outs(graph, kernel, [run])[0])
    if not call.fixed:
        raise Unsupported("torch moves an input before the kernel reads it")
    buffers, launches = given.buffers(), list[KernelLaunch]()
    sizes, of = given.fields(call.sizes.sum), contract("tapestry_conv")
    for k in range(call.sizes.sums):
        buffers[f"sum{k}"] = Buffer("f32", run.memory[0][0], True)
        w, bias = given.at(call.buffers.w[k]), given.at(call.buffers.bias[k])
        assert isinstance(w, At)
        taps: dict[str, Value] = dict(zip(TAPS, given.weights[w.buffer], strict=True))
        places: dict[str, Value] = {"x": given.at(call.buffers.x), "w": w, "bias": bias, "residual": None, "y": At(f"sum{k}")}
        launches.append(KernelLaunch(function=of.function, params={"c": sizes, "t": taps, "b": places}))
    cells = (*(At(f"sum{k}") for k in range(call.sizes.sums)), At("y"))
    launches.append(KernelLaunch(function=then, params={"sizes": (run.memory[0][0],), "p": cells}))
    return KernelText(
        name=name, source=print_c.source(then) + of.source, launches=tuple(launches), buffers=buffers, reads=given.reads,
        outs=("y",), language="c",
    )  # fmt: skip


def weight_strides(box: Box, pack: Any) -> tuple[int, ...]:
    """Strides by feature, channel, row and column of a weight that is packed (a `dense.Pack`), in its buffer.

    Raises:
        Unsupported: features or what is summed do not step evenly, or what is packed is something else.
    """
    key, run = pack.key, pack.run
    if key[0] in ("taps", "winograd") or key == ("panels",):
        _, c, h, w = shape(box)
        return c * h * w, h * w, w, 1
    if key[0] != "panels":
        raise Unsupported("a product by oneDNN, as torch has it")
    take, extents, turn = run.args[0], list[int](run.args[1]), list[int](run.args[2])
    if take != tuple(slice(0, n) for n in shape(box)):
        raise Unsupported("a part of a weight, packed")
    steps = [prod(extents[k + 1 :]) for k in range(len(extents))]
    inner = turn[1:]
    if any(steps[a] != steps[b] * extents[b] for a, b in itertools.pairwise(inner)):
        raise Unsupported("what is summed does not step evenly in the weight")
    depth = prod(extents[k] for k in inner)
    _check_packing(run, shape(box), (extents[turn[0]], depth), (steps[turn[0]], steps[inner[-1]]))
    return steps[turn[0]], steps[inner[-1]], 0, 0


def _check_packing(
    pack: functools.partial[Tensor], extents: Sequence[int], matrix: tuple[int, int], steps: tuple[int, int]
) -> None:
    """Look at every cell of a packed weight, by number: it is the one that the strides say."""
    cells = prod(extents)
    if cells > MOST_NUMBERED:
        raise Unsupported("a weight that is too large to look at how it is packed")
    numbered = torch.arange(cells, dtype=torch.int32).view(torch.float32)
    wanted = conv_c.pack_panels(numbered.as_strided(matrix, steps))
    if not torch.equal(pack(numbered.view(*extents)).view(torch.int32), wanted.view(torch.int32)):
        raise LawError("kernel_reads", "a weight is packed in another order than its strides", where="the packing")


GUARD = 64  # floats before and behind an output
CANARY = np.float32(12345678.0)
ZEROS = np.zeros(1 << 14, np.float32)


class Taps(ctypes.Structure):
    """``Taps`` of contracts/convolutions.c."""

    _fields_ = [(name, ctypes.c_int64) for name in TAPS]


@dataclass(frozen=True, slots=True)
class Instance:
    """One call: structs of sizes and of addresses (the output's apart), and how many floats the output has.

    Attributes:
        taps: strides of the weight that the contract is given, whose address is ``plain``.
        wanted: of what has no contract of its own, what it computes by those of others (the library of contracts).
        kept: arrays that addresses point to.
    """

    sizes: Any
    buffers: Any
    out: str
    cells: int
    taps: Taps | None = None
    plain: int = 0
    kept: tuple[Any, ...] = field(default=())
    wanted: Callable[[Any], Array] | None = None


@functools.cache
def checked(kernel: str) -> int:
    """On how many instances a kernel is what its contract says.

    Raises:
        LawError: it is not; TapestryError: there is no compiler.
    """
    lib, contracts = native.library(), _contracts()
    if lib is None or contracts is None:
        raise TapestryError("kernels in C cannot be compiled", where=kernel, hint="install a C compiler")
    count = 0
    for one in _INSTANCES[kernel](np.random.default_rng(0)):
        count += 1
        _compare(kernel, count, one, getattr(lib, kernel), contracts)
    return count


def _contracts() -> Any:
    files = sorted(FOLDER.glob("*.c")) + sorted(FOLDER.parent.glob("*.h"))
    try:
        return ctypes.CDLL(str(native.compiled(files, (*native.FLAGS, "-ffp-contract=off", "-lm"))))
    except OSError:
        return None


def _compare(kernel: str, number: int, one: Instance, run: Any, contracts: Any) -> None:
    results = [np.full(one.cells + 2 * GUARD, CANARY, np.float32) for _ in range(2)]
    setattr(one.buffers, one.out, results[0].ctypes.data + 4 * GUARD)
    run(ctypes.byref(one.sizes), ctypes.byref(one.buffers))
    if one.wanted:
        results[1][GUARD:-GUARD] = one.wanted(contracts)
    else:
        setattr(one.buffers, one.out, results[1].ctypes.data + 4 * GUARD)
        _by_contract(kernel, one, contracts)
    same = (results[0] == results[1]) | (np.isnan(results[0]) & np.isnan(results[1]))
    if not same.all():
        at = int(np.flatnonzero(~same)[0])
        says = {n: getattr(one.sizes, n) for n, *_ in one.sizes._fields_}
        sizes = ", ".join(f"{n} {v}" for n, v in says.items() if isinstance(v, int | float))
        raise LawError(
            "kernel_contract", f"cell {at - GUARD} is not what the contract says", where=f"{kernel}, instance {number}",
            why=f"{results[0][at]:.6g}, not {results[1][at]:.6g}; {sizes}",
        )  # fmt: skip


def _by_contract(kernel: str, one: Instance, contracts: Any) -> None:
    contract = getattr(contracts, CONTRACTS[kernel].function)
    given = [one.sizes, one.buffers]
    if one.taps is not None:
        one.buffers.w = one.plain
        given.insert(1, one.taps)
    contract(*map(ctypes.byref, given))


def _numbers(rng: np.random.Generator, n: int, scale: int = 1) -> Array:
    return (rng.integers(-3, 4, n) * scale).astype(np.float32)


def _one_of(rng: np.random.Generator, *values: float) -> float:
    return values[int(rng.integers(0, len(values)))]


def _lanes() -> int:
    lib: Any = native.library()
    return lib.tapestry_lanes()


# convolutions
LARGE = ((513, 7, (3, 5)), (1025, 19, (2, 3)), (600, 5, (16, 15)), (64, 9, (13, 17)), (3, 4, (90, 93)))
"""Channels, features, and rows and columns of the output."""


def _convolutions(kernel: str, rng: np.random.Generator) -> Iterator[Instance]:
    lanes = _lanes()
    if kernel == "tapestry_winograd":
        for f, c, _ in itertools.product((1, 2, 3, 5), (1, 2, 4), range(6)):
            yield _convolution(kernel, rng, c * lanes, f * lanes, 3, (1, 1), (1, 1))
        return
    several = kernel != "tapestry_depthwise"
    for features in (*range(1, 2 * lanes + 2), 3 * lanes, 4 * lanes - 1, 4 * lanes + 1, 5 * lanes + 3):
        for _ in range(3):
            channels = int(rng.integers(1, lanes + 3)) if several else features
            if kernel == "tapestry_planes":
                channels = int(rng.integers(2, conv_c.MOST_PLANES + 1))
            stride, dilation = (tuple(int(v) for v in rng.integers(1, 4, 2)) for _ in range(2))
            yield _convolution(kernel, rng, channels, features, 0, stride, dilation)
    if kernel == "tapestry_conv":
        for channels, features, size in LARGE:
            yield _convolution(kernel, rng, channels, features, 1, (1, 1), (1, 1), size)
    if kernel == "tapestry_planes":
        yield _convolution(kernel, rng, 3, 8, 3, (2, 2), (1, 1), (70, 75))


def _convolution(
    kernel: str, rng: np.random.Generator, channels: int, features: int, window: int, stride: tuple[int, ...],
    dilation: tuple[int, ...], out: tuple[int, int] | None = None,
) -> Instance:  # fmt: skip
    """A convolution of drawn sizes, with or without each part of an epilogue; rows and images may have gaps between them."""
    depthwise, planes = kernel == "tapestry_depthwise", kernel == "tapestry_planes"
    tall, wide = (window, window) if window else (int(v) for v in rng.integers(1, 4, 2))
    images = int(rng.integers(1, 3))
    out_h, out_w = out or tuple(int(v) for v in rng.integers(1, 12, 2))
    axes = list(zip((out_h, out_w), stride, (tall, wide), dilation, strict=True))
    pads = [int(rng.integers(0, (k - 1) * d + 2)) for _, _, k, d in axes]
    ends = [int(rng.integers(0, (k - 1) * d + 1)) for _, _, k, d in axes]
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in axes]
    in_h, in_w = (max(1, n - p - e) for n, p, e in zip(reach, pads, ends, strict=True))
    image, row, pixel = _strides(rng, planes, channels, in_h, in_w)
    x = _numbers(rng, images * image)
    weight = _numbers(rng, features * (1 if depthwise else channels) * tall * wide, 4 if kernel == "tapestry_winograd" else 1)
    shaped = tensor_of(weight).reshape(features, 1 if depthwise else channels, tall, wide)
    pack = {"tapestry_winograd": conv_c.pack_winograd, "tapestry_depthwise": conv_c.pack_depthwise}
    packed = pack.get(kernel, conv_c.pack_convolution)(shaped)
    bias = _numbers(rng, features) if rng.integers(0, 2) else None
    y = (out_h * out_w * features, out_w * features, features)
    residual = _numbers(rng, images * y[0]) if rng.integers(0, 2) else None
    clamp = (1, -4.0, _one_of(rng, 6.0, np.inf)) if rng.integers(0, 2) else (0, 0.0, 0.0)
    extents = (images, channels, features, in_h, in_w, out_h, out_w, tall, wide)
    sizes = native.Conv(*extents, *stride, *pads, *dilation, image, row, pixel, *y, *y, *clamp)
    kept = (x, weight, packed, bias, residual)
    places = [None if a is None else a.ctypes.data for a in (bias, residual)]
    buffers = native.Buffers(x.ctypes.data, packed.data_ptr(), *places, ZEROS.ctypes.data, None)
    depth = shaped.shape[1] * tall * wide
    return Instance(sizes, buffers, "y", images * y[0], Taps(depth, tall * wide, wide, 1), weight.ctypes.data, kept)


def _strides(rng: np.random.Generator, planes: bool, channels: int, in_h: int, in_w: int) -> tuple[int, int, int]:
    """Of an image, a row and a pixel (of ``planes`` a plane), with gaps between them or without."""
    gap = int(rng.integers(0, 3)) * int(rng.integers(0, 2))
    if planes:
        return channels * (in_h * in_w + gap), in_w, in_h * in_w + gap
    row = in_w * (channels + gap) + gap
    return in_h * row + gap, row, channels + gap


def _windows(kernel: str, rng: np.random.Generator) -> Iterator[Instance]:
    """Maxima over windows, and means of images."""
    lanes = _lanes()
    for channels in (*range(1, 2 * lanes + 2), 5 * lanes + 3):
        for _ in range(3):
            stride, dilation = (tuple(int(v) for v in rng.integers(1, 4, 2)) for _ in range(2))
            one = _convolution("tapestry_depthwise", rng, channels, channels, 0, stride, dilation)
            sizes, buffers = one.sizes, one.buffers
            buffers.bias = buffers.residual = None
            if kernel == "tapestry_max_pool":
                sizes.clamped = 0
                yield Instance(sizes, buffers, "y", one.cells, kept=one.kept)
            else:
                sizes.high = _one_of(rng, 1.0, 3.0, sizes.in_h * sizes.in_w)
                yield Instance(sizes, buffers, "y", sizes.images * channels, kept=one.kept)


# products
_THEN = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.POINTER(ctypes.c_float)))


@_THEN
def _then(cells: Any, arrays: Any) -> None:
    """The last of three arrays is the first less twice the second."""
    a, b, y = (np.ctypeslib.as_array(arrays[k], (cells[0],)) for k in range(3))
    y[:] = a - 2 * b


def _products(rng: np.random.Generator) -> Iterator[Instance]:
    lanes = _lanes()
    sizes = [(int(rng.integers(1, 20)), n) for n in (*range(1, 2 * lanes + 2), 5 * lanes + 3)]
    for rows, features in (*sizes, (2100, 70), (4099, 33)):
        yield _product_instance(rng, rows, int(rng.integers(1, 12)), features)


def _product_instance(rng: np.random.Generator, rows: int, depth: int, features: int) -> Instance:
    """Two products of the same rows, the first with a bias, and what `_then` makes of them."""
    x, bias = _numbers(rng, rows * depth), _numbers(rng, features)
    weights = [_numbers(rng, features * depth) for _ in range(2)]
    packed = [conv_c.pack_panels(tensor_of(w).reshape(features, depth)) for w in weights]
    ones, each = (1, 1), rows * features
    sum_ = native.Conv(
        1, depth, features, 1, rows, 1, rows, *ones, *ones, 0, 0, *ones, rows * depth, rows * depth, depth,
        each, each, features, each, each, features, 0, 0.0, 0.0,
    )  # fmt: skip
    pointers = ctypes.c_void_p * native.MOST_SUMS
    addresses = pointers(*(w.data_ptr() for w in packed)), pointers(bias.ctypes.data)
    sizes = native.Several(sum_, 2, ctypes.cast(_then, ctypes.c_void_p))

    def wanted(contracts: Any) -> Array:
        sums = [np.zeros(each, np.float32) for _ in range(2)]
        for w, b, y in zip(weights, (bias.ctypes.data, None), sums, strict=True):
            buffers = native.Buffers(x.ctypes.data, w.ctypes.data, b, None, None, y.ctypes.data)
            contracts.contract_conv(ctypes.byref(sum_), ctypes.byref(Taps(depth, 1, 0, 0)), ctypes.byref(buffers))
        return sums[0] - 2 * sums[1]

    return Instance(sizes, native.Products(x.ctypes.data, *addresses, None), "y", each, kept=(x, bias, packed), wanted=wanted)


# rows
def _rms_norms(rng: np.random.Generator) -> Iterator[Instance]:
    lanes = _lanes()
    for width in (*range(1, 3 * lanes + 2), 8 * lanes + 1, 1000):
        rows = int(rng.integers(1, 5))
        x, scale = _numbers(rng, rows * width), _numbers(rng, width)
        buffers = native.RowBuffers(x.ctypes.data, scale.ctypes.data, None)
        yield Instance(native.Rows(rows, width, float(width), 0.5), buffers, "y", rows * width, kept=(x, scale))


# attention
def _attentions(rng: np.random.Generator) -> Iterator[Instance]:
    """Scores are multiples of 128: of those that are not the greatest, exp is 0 to all digits."""
    lanes = _lanes()
    for keys in (*range(1, 2 * lanes + 2), 5 * lanes + 3):
        for depth in (1, int(rng.integers(2, lanes)), lanes, int(rng.integers(lanes + 1, 2 * lanes + 2))):
            yield _attention(rng, keys, depth, int(_one_of(rng, 1, 3, 47, 48, 49)))


def _attention(rng: np.random.Generator, keys: int, depth: int, rows: int) -> Instance:
    outer, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    inner = int(rng.integers(1, 2 * group + 2))  # a device may have a part of the last group
    shared = -(-inner // group)
    gap = int(rng.integers(0, 3))

    def heads(n: int, of: int) -> tuple[Array, tuple[int, int, int]]:
        step = depth + gap
        return rng.integers(-1, 2, outer * of * n * step + gap).astype(np.float32), (of * n * step, n * step, step)

    (q, q_at), (k, k_at), (v, v_at) = heads(rows, inner), heads(keys, shared), heads(keys, shared)
    own = tuple(int(b) for b in rng.integers(0, 2, 4))  # along which axes the bias varies
    extents = [n if b else 1 for n, b in zip((outer, inner, rows, keys), own, strict=True)]
    mask = (rng.integers(-2, 3, extents) * 128).astype(np.float32)
    normal = int(rng.integers(1, 4))
    if normal > 1:
        mask[rng.random(mask.shape) < 0.3] = -np.inf
        mask[:, :, 0] = -np.inf
    steps = tuple(s // 4 if b else 0 for s, b in zip(mask.strides, own, strict=True))
    masked = bool(rng.integers(0, 3)) or normal > 1
    other = _numbers(rng, depth) if normal == 2 and rng.integers(0, 2) else None
    out = (rows * inner * depth, depth, inner * depth)
    three = ctypes.c_int64 * 3
    sizes = native.Attention(
        outer, inner, group, rows, keys, depth, three(*q_at), three(*k_at), three(*v_at),
        (ctypes.c_int64 * 4)(*(steps if masked else (0, 0, 0, 0))), three(*out), three(0, 0, 1), normal, 128.0,
    )  # fmt: skip
    places = (q.ctypes.data, k.ctypes.data, v.ctypes.data, mask.ctypes.data if masked else None)
    buffers = native.Heads(*places, None, None, None, None if other is None else other.ctypes.data)
    return Instance(sizes, buffers, "out", outer * out[0], kept=(q, k, v, mask, other))


_INSTANCES: dict[str, Any] = {
    **{n: functools.partial(_convolutions, n) for n, contract in CONTRACTS.items() if contract.params == _CONV},
    **{n: functools.partial(_windows, n) for n in ("tapestry_max_pool", "tapestry_mean")},
    "tapestry_rms_norm": _rms_norms,
    "tapestry_attention": _attentions,
    "tapestry_attend": _attentions,
    "tapestry_several": _products,
}
