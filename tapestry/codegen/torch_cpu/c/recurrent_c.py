"""LSTM, GRU and RNN nodes in C: what inputs add to the gates is one product for all steps, and the steps are one call.

The formulas are those of the ONNX operators; gates are functions in C from expressions, as everywhere. The product with the
state is of one row for each sequence, so sequences and directions are what threads share.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from onnx import NodeProto, helper

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base.epilogue import Epilogue
from tapestry.codegen.torch_cpu.base.point_values import Run, held
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import conv_c, generated_c
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, Ins, Pack
from tapestry.codegen.torch_cpu.c.print_c import Writer
from tapestry.codegen.torch_cpu.c.thread_parts import PRODUCTS, Work
from tapestry.ir.expr import Acc, Expr, call
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.kernel import Kernel, whole

Tensor = torch.Tensor
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
PLAIN = {"hidden_size", "direction", "linear_before_reset"}
GIVEN, OWN, STATE, CELL, OTHER, PEEPHOLES, FIELDS = 0, 4, 8, 9, 10, 11, 14  # arrays of a function, as in recurrence.c


def _array(field: int) -> Expr:
    return Acc(field, "f32")


def _gate(k: int, *more: Expr, own: Expr | None = None) -> Expr:
    """What goes into gate ``k``'s activation."""
    out = call("add", _array(GIVEN + k), own or _array(OWN + k))
    for x in more:
        out = call("add", out, x)
    return out


def _functions(kind: str, peepholes: bool, resets_after: bool) -> tuple[Expr | None, Expr]:
    """(what is worked out before the last gates' products, the state)."""

    def through(p: int, cell: int) -> Sequence[Expr]:
        return [call("mul", _array(PEEPHOLES + p), _array(cell))] if peepholes else []

    if kind == "RNN":
        return None, call("tanh", _gate(0))
    if kind == "LSTM":  # gates: input, output, forget, cell; peepholes: input, output, forget
        forget, inward = call("sigmoid", _gate(2, *through(2, CELL))), call("sigmoid", _gate(0, *through(0, CELL)))
        cell = call("add", call("mul", forget, _array(CELL)), call("mul", inward, call("tanh", _gate(3))))
        out = call("sigmoid", _gate(1, *through(1, OTHER)))
        return cell, call("mul", out, call("tanh", _array(OTHER)))
    reset = call("sigmoid", _gate(1))  # gates: update, reset, hidden
    kept = call("mul", reset, _array(OWN + 2)) if resets_after else None
    new, update = call("tanh", _gate(2, own=kept)), call("sigmoid", _gate(0))
    state = call("add", call("mul", call("sub", 1, update), new), call("mul", update, _array(STATE)))
    return None if resets_after else call("mul", reset, _array(STATE)), state


def recurrent(op: Opaque, graph: Graph, kernel: Kernel, plain: Run) -> CpuKernel | Refusal:
    """A whole recurrence on packed weights, by our kernels."""
    lib: Any = native.library()
    if op.kind not in GATES or lib is None:
        return Refusal("it is no recurrence, or there is no library of ours")
    node = NodeProto.FromString(op.node)
    attributes = {a.name: v for a in node.attribute if (v := helper.get_attribute_value(a))}
    ins = [(op.ins[k] if k < len(op.ins) else "") for k in range(8)]
    if attributes.keys() - PLAIN or ins[4]:
        return Refusal("it has activations of its own, lengths, or its batch first")
    shapes = {k: graph.tensors[t].shape for k, t in enumerate(ins) if t}
    (steps, batch, depth), (ways, _, hidden) = shapes[0], shapes[2]
    own = [*filter(None, op.ins), *op.outs]
    boxes = [b for b in (*kernel.ins, *kernel.outs) if b is not None]
    fine = all(graph.tensors[t].dtype == "f32" and 0 not in graph.tensors[t].shape for t in own)
    if not fine or boxes != [whole(graph.tensors[t].shape) for t in own]:
        return Refusal("its block is a part, or of other types, or empty")
    if max(depth, hidden) > conv_c.DEEPEST:
        return Refusal("its products are of too many terms")
    kind, gates = op.kind, GATES[op.kind]
    after = bool(attributes.get("linear_before_reset", 0)) and kind == "GRU"
    early = 2 if kind == "GRU" and not after else gates
    names = [
        None if e is None else generated_c.register(Writer().cells(e, FIELDS)) for e in _functions(kind, bool(ins[7]), after)
    ]
    functions = tuple(n for n in names if n)
    if not all(generated_c.function(n) for n in functions):
        return Refusal("its functions do not compile")
    multiply = conv_c.multiply(steps * batch, gates * hidden, depth, Epilogue(bias=0 if ins[3] else None))
    if not multiply:
        return multiply
    late, cells = gates - early, steps * batch * gates * hidden
    packed = [conv_c.packed_size(g * hidden, hidden) for g in (early, late)]

    def pack_state(w: Tensor) -> Tensor:
        parts = [w[:, : early * hidden], w[:, early * hidden :]]
        return torch.cat([conv_c.pack_panels(p) for part in parts for p in part if p.numel()])

    def pack_biases(b: Tensor) -> Tensor:
        """Those that the input's product adds, then those of the state's: of a gate whose reset comes after it."""
        given, other = b[:, : gates * hidden].clone(), b[:, gates * hidden :].clone()
        inner = slice(2 * hidden, None) if after else slice(gates * hidden, None)
        given[:, : inner.start] += other[:, : inner.start]
        other[:, : inner.start] = 0
        return torch.cat([given.flatten(), other.flatten()])

    def bind(given: Ins, memory: Sequence[Tensor]) -> Calls:
        read = [held(given[k]) if k < len(given) and ins[k] else None for k in range(8)]
        x, w, r, b, _, state, cell, holes = read
        assert x is not None and w is not None and r is not None
        x, room = x.contiguous(), torch.empty(ways * cells + steps * ways * batch * hidden)
        size = w.numel() // ways
        calls = [
            multiply(x, w[d * size :], None if b is None else b[d * gates * hidden :], None, room[d * cells :])
            for d in range(ways)
        ]
        outs = iter(memory)
        shown, last, last_cell = (next(outs) if k < len(node.output) and node.output[k] else None for k in range(3))
        calls_of = [None if n is None else ctypes.cast(generated_c.function(n), ctypes.c_void_p).value for n in names]
        backwards = attributes.get("direction", b"forward") == b"reverse"
        sizes = native.Recurrence(
            steps, ways, batch, hidden, gates, early, (ctypes.c_int64 * 2)(*packed), int(backwards), *calls_of
        )
        state, cell = (None if t is None else t.contiguous() for t in (state, cell))
        biases = b[b.numel() // 2 :] if b is not None and after else None
        shown = room[ways * cells :] if shown is None else shown
        kept = (room, r, r[ways * packed[0] :], biases, holes, state, cell, shown, last, last_cell)
        at = native.Sequences(*(None if t is None else t.data_ptr() for t in kept))
        work = Work(ways * batch, steps * ways * batch * gates * hidden * hidden / PRODUCTS)
        return Calls.of(*calls, CCall(lib.tapestry_recurrence, sizes, at, kept, work))

    def array(t: str, memory: Tensor) -> Tensor:
        return memory.view(graph.tensors[t].shape)

    packs = {
        1: Pack(("inputs of gates",), lambda w: torch.cat([conv_c.pack_panels(p) for p in w])),
        2: Pack(("states of gates", early), pack_state),
        **({3: Pack(("biases of gates", after), pack_biases)} if ins[3] else {}),
    }
    on_packed = CpuKernel(
        plain=None,
        bind=bind,
        arrays=tuple(functools.partial(array, t) for t in op.outs),
        memory=tuple((graph.tensors[t].size, torch.float32) for t in op.outs),
        functions=functions,
    )
    return CpuKernel(plain=plain, packs=packs, on_packed=on_packed)
