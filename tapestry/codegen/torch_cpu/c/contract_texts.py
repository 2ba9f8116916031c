"""Calls of our own kernels in C as a proof takes them: the kernel's contract, and what of it a build's call says.

A contract (`native/contracts`) is the kernel in plain loops. It is proved against the operation with the sizes, strides and
addresses of the call; that the kernel keeps it is shown by `contract_trials`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.codegen.torch_cpu.c import conv_c, generated_c
from tapestry.codegen.torch_cpu.c.c_calls import Call, Recorded
from tapestry.errors import LawError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, shape, size
from tapestry.verify.kernels.kernel_text import Argument, At, Buffer, KernelText, Launch, Value
from tapestry.verify.kernels.terms import Unsupported

Tensor = torch.Tensor
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

    def outs(self, graph: Graph, kernel: Kernel, runs: Sequence[Recorded]) -> list[Tensor]:
        """Memory of the outputs ``y``, ``y1``, …, each over as many elements as a part of the kernel writes."""
        op, out = graph.ops[kernel.op], list[Tensor]()
        for k, (run, box) in enumerate(zip(runs, kernel.outs, strict=True)):
            out.append(torch.empty(run.size))
            array = run.array(out[k])
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
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
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
    graph: Graph, kernel: Kernel, runs: Sequence[Recorded], name: str, packs: Mapping[int, Any]
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
        text = _contracts(runs, calls, given, name if order == ROWS else f"{name}, inputs laid {order}")
        if all((text.launches, text.buffers) != (t.launches, t.buffers) for t in texts):
            texts.append(text)
            ours += [c.function.__name__ for c in calls]
    if not texts:
        raise Unsupported("torch moves an input before the kernel reads it")
    return tuple(texts), tuple(dict.fromkeys(ours))


def _contracts(runs: Sequence[Recorded], calls: Sequence[Call], given: Bound, name: str) -> KernelText:
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
        name=name, source=source, launches=(Launch(function=function, params=params),), buffers=given.buffers(),
        reads=given.reads, outs=tuple(map(out_name, range(len(runs)))), language="c",
    )  # fmt: skip


def one_call(run: Recorded, given: Bound, memory: Tensor) -> Call:
    """The call of a kernel on tensors.

    Raises:
        Unsupported: it is several.
    """
    call = run.record(given.ins, memory)
    if not isinstance(call, Call):
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


def arguments(of: Contract, names: Mapping[str, str], call: Call, given: Bound) -> dict[str, Argument]:
    """What the parameters of a contract get of a call."""
    structs: dict[str, Argument] = {of.params[0]: given.fields(call.sizes), of.params[-1]: given.fields(call.buffers)}
    if "t" in of.params:
        w = given.at(call.buffers.w)
        assert isinstance(w, At)
        structs["t"] = dict[str, Value](zip(TAPS, given.weights[w.buffer], strict=True))
    return {names[p]: structs[p] for p in of.params}


def sums_text_of(graph: Graph, kernel: Kernel, run: Recorded, then: str, name: str, packs: Mapping[int, Any]) -> KernelText:
    """The contract of products of the same rows, each to memory of its own, and what is computed of all of their cells.

    Args:
        then: the name of that function (`generated_c`).
    """
    given = bound(graph, kernel, packs)
    call = one_call(run, given, given.outs(graph, kernel, [run])[0])
    if not call.fixed:
        raise Unsupported("torch moves an input before the kernel reads it")
    buffers, launches = given.buffers(), list[Launch]()
    sizes, of = given.fields(call.sizes.sum), contract("tapestry_conv")
    for k in range(call.sizes.sums):
        buffers[f"sum{k}"] = Buffer("f32", run.size, True)
        w, bias = given.at(call.buffers.w[k]), given.at(call.buffers.bias[k])
        assert isinstance(w, At)
        taps: dict[str, Value] = dict(zip(TAPS, given.weights[w.buffer], strict=True))
        places: dict[str, Value] = {"x": given.at(call.buffers.x), "w": w, "bias": bias, "residual": None, "y": At(f"sum{k}")}
        launches.append(Launch(function=of.function, params={"c": sizes, "t": taps, "b": places}))
    cells = (*(At(f"sum{k}") for k in range(call.sizes.sums)), At("y"))
    launches.append(Launch(function=then, params={"sizes": (run.size,), "p": cells}))
    return KernelText(
        name=name, source=generated_c.source(then) + of.source, launches=tuple(launches), buffers=buffers, reads=given.reads,
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
