"""Which backend call carries a merge or a transfer, held to what such a call does."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest

from tapestry.ir.collective_calls import (
    ALL_GATHER,
    CALLS,
    EXCHANGE,
    REDUCE_SCATTER,
    Call,
    carrier,
    merge_calls,
    merge_phases,
    on_backend,
    reduce_op,
    transfer_call,
)
from tapestry.ir.expr import Arg, Const
from tapestry.ir.graph import Block, Dim, Opaque, Read
from tapestry.ir.index import dim
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.program import Buffer, Message, Program, Reduce, Transfer, transfer_bytes
from tapestry.ir.types import FLOATS, numpy_dtype
from tapestry.plan.lower import exchange
from tapestry.plan.strategy import tensor_boxes
from tapestry.plan.topology import parse_mesh
from tapestry.verify.interp import value

BACKEND = {"sum": np.add, "prod": np.multiply, "min": np.fmin, "max": np.fmax}  # fmin, fmax: a NaN is dropped
STATES = {"bool": [False, True], "i64": [-3, 0, 7, 2**62], "u8": [0, 3, 255], "f32": [np.inf, -np.inf, np.nan, -0.0, 0.0, 1.5]}


def reduction(monoid: str, *body: str | Const) -> Block:
    """An operation that reduces what it reads, one tensor for each field that is a dtype."""
    reads = tuple(Read(tensor=f"x{k}", index=(dim("i"), dim("r"))) for k in range(len(body)))
    fields = tuple(Arg(k, e) if isinstance(e, str) else e for k, e in enumerate(body))
    return Block(outs=("y",), dims=(Dim("i", 8),), reduce=(Dim("r", 4),), monoid=monoid, reads=reads, body=fields)


@pytest.mark.parametrize("dtype", [*STATES, "u16", "f8e4m3fn"])
@pytest.mark.parametrize("monoid", ["sum", "prod", "min", "max", "any", "all"])
def test_a_backend_reduces_only_what_it_reduces_as_the_monoid_does(monoid, dtype):
    """Pairs of any values, NaNs and infinities among them, and of integers that overflow: the same bits."""
    fn = reduce_op(reduction(monoid, dtype))
    if not fn:
        ours_alone = (dtype in FLOATS and monoid in ("min", "max")) or dtype in ("u16", "f8e4m3fn")
        assert ours_alone or (dtype == "bool") != (monoid in ("any", "all"))
        return
    combine = MONOIDS[monoid].combiner((dtype,))
    for pair in product(STATES[dtype], repeat=2):
        a, b = (np.array([v], numpy_dtype(dtype)) for v in pair)
        with np.errstate(all="ignore"):
            ours = np.asarray(value(combine[0], [a, b], [], {}, False))
            theirs = BACKEND[fn](*(v.view(np.uint8) if dtype == "bool" else v for v in (a, b)))
        np.testing.assert_array_equal(ours.view(theirs.dtype), theirs)


def test_states_of_several_fields():
    assert reduce_op(reduction("sums2", "f32", "f32")) == "sum"
    assert reduce_op(reduction("sums2", "f32", "f64")) == ""  # not one buffer
    assert reduce_op(reduction("max.sum", "f32", "f32")) == ""
    assert reduce_op(reduction("max.sum", "i32", "i32")) == ""
    assert reduce_op(reduction("softsum", "f32", "f32", "f32")) == ""
    assert reduce_op(reduction("moments", Const(1.0, "f32"), "f32", Const(0.0, "f32"))) == ""
    assert reduce_op(reduction("sums2", Const(1.0, "f64"), "f32")) == "sum"  # the count is not sent
    assert reduce_op(reduction("any", "bool")) == "max" and reduce_op(reduction("all", "bool")) == "min"


def test_an_opaque_operation_merges_nothing():
    assert reduce_op(Opaque(outs=("y",), ins=("x",), kind="Sort", node=b"", opsets=(), in_axes=((0,),), out_axes=((0,),))) == ""


def test_a_device_alone_in_its_group_sends_nothing():
    """Of any groups the bytes are those of a ring each, and of a group of one none."""
    for sizes in ((4,), (1, 1, 1, 1), (1, 3), (2, 1, 1), (2, 2)):
        ends = np.cumsum((0, *sizes)).tolist()
        groups = tuple(tuple(range(lo, hi)) for lo, hi in pairwise(ends))
        boxes = (((0, 8), (0, 3)),) * 4
        buffers = {n: Buffer(name=n, tensor="y", dtype="f32", boxes=boxes, field=0) for n in "pm"}
        step = Reduce(kind="all_reduce", op=0, srcs=("p",), dsts=("m",), groups=groups)
        program = Program(devices=4, buffers=buffers, steps=(step,), outputs={})
        assert transfer_bytes(step, program) == sum(2 * (n - 1) * 96 for n in sizes)


def test_phases_of_merges():
    assert merge_phases("all_reduce", "sum", 8, 800) == (("all_reduce", 800),)
    assert merge_phases("reduce_scatter", "sum", 8, 800) == (("reduce_scatter_tensor", 800),)
    assert merge_phases("all_reduce", "", 2, 800) == (("batch_isend_irecv", 800),)
    assert merge_phases("all_reduce", "", 8, 800) == (("batch_isend_irecv", 700),) * 2
    assert merge_phases("reduce_scatter", "", 8, 800) == (("batch_isend_irecv", 700),)


@pytest.mark.parametrize(("rows", "name"), [(8, "reduce_scatter_tensor"), (7, "batch_isend_irecv")])
def test_a_scatter_into_uneven_parts_is_an_exchange(rows, name):
    op, ends = reduction("sum", "f32"), [(k * rows // 4, (k + 1) * rows // 4) for k in range(4)]
    buffers = {
        "p": Buffer(name="p", tensor="y", dtype="f32", boxes=(((0, rows), (0, 3)),) * 4, field=0),
        "m": Buffer(name="m", tensor="y", dtype="f32", boxes=tuple((e, (0, 3)) for e in ends), field=0),
    }
    step = Reduce(kind="reduce_scatter", op=0, srcs=("p",), dsts=("m",), groups=((0, 1, 2, 3),))
    (found,) = merge_calls(step, Program(devices=4, buffers=buffers, steps=(step,), outputs={}), op)
    assert (found.name, found.nbytes) == (name, rows * 12 if name != "batch_isend_irecv" else rows * 12 * 3 // 4)


def transfers(shape, mesh):
    """Every change of layout, as a step of a program."""
    layouts = [
        c for c in product([None, *range(len(shape))], repeat=len(mesh))
        if all(prod(m.size for m, t in zip(mesh, c, strict=True) if t == i) <= n for i, n in enumerate(shape))
    ]  # fmt: skip
    for before, after in product(layouts, repeat=2):
        held, wanted = (tensor_boxes(shape, k, mesh) for k in (before, after))
        messages = exchange(held, wanted, before, mesh)
        boxes = [tuple(tuple((int(p), int(q)) for p, q in b) for b in w) for w in (held, wanted)]
        buffers = {n: Buffer(name=n, tensor="t", dtype="f32", boxes=b) for n, b in zip("sd", boxes, strict=True)}
        step = Transfer(kind="", src="s", dst="d", messages=messages)
        if messages:
            yield step, Program(devices=len(held), buffers=buffers, steps=(step,), outputs={})


def cells(box):
    return set(product(*(range(lo, hi) for lo, hi in box)))


def test_calls_of_transfers_bring_what_is_wanted():
    """Every call, carried out on sets of cells, gives each device what it wants: no more by a gather, and all pieces equal."""
    seen = Counter()
    for shape, mesh in [((8, 12), "4"), ((8, 12), "2x2"), ((6, 9), "3x2"), ((7, 5), "2x2"), ((16,), "2x2x2")]:
        for step, program in transfers(shape, parse_mesh(mesh)):
            found, held, wanted = transfer_call(step, program), program.buffers["s"].boxes, program.buffers["d"].boxes
            seen[found.name] += 1
            assert sorted(d for g in found.groups for d in g) == sorted({d for m in step.messages for d in (m.src, m.dst)})
            for g in found.groups:
                if found.name == "all_gather_into_tensor":
                    assert {4 * len(cells(held[d])) * len(g) for d in g} == {found.nbytes}
                    union = set().union(*(cells(held[d]) for d in g))
                    assert all(cells(wanted[d]) == union for d in g)
                elif found.name == "all_to_all_single":
                    pieces = {4 * len(cells(held[a]) & cells(wanted[b])) * len(g) for a in g for b in g}
                    assert pieces == {found.nbytes}
                elif found.name == "broadcast":
                    assert all(cells(wanted[d]) <= cells(held[g[0]]) for d in g[1:])
    assert seen["all_gather_into_tensor"] and seen["all_to_all_single"] and seen["batch_isend_irecv"]


@pytest.mark.parametrize(
    ("shape", "before", "after", "name", "nbytes"),
    [
        ((8, 12), (0,), (None,), "all_gather_into_tensor", 384), ((8, 12), (0,), (1,), "all_to_all_single", 96),
        ((7, 12), (0,), (None,), "batch_isend_irecv", 288), ((8, 10), (0,), (1,), "batch_isend_irecv", 72),
    ],
)  # fmt: skip
def test_calls_of_well_known_transfers(shape, before, after, name, nbytes):
    mesh = parse_mesh("4")
    held, wanted = (tensor_boxes(shape, k, mesh) for k in (before, after))
    boxes = [tuple(tuple((int(p), int(q)) for p, q in b) for b in w) for w in (held, wanted)]
    buffers = {n: Buffer(name=n, tensor="t", dtype="f32", boxes=b) for n, b in zip("sd", boxes, strict=True)}
    step = Transfer(kind="", src="s", dst="d", messages=exchange(held, wanted, before, mesh))
    found = transfer_call(step, Program(devices=4, buffers=buffers, steps=(step,), outputs={}))
    assert (found.name, found.groups) == (name, ((0, 1, 2, 3),))
    if name != "batch_isend_irecv":
        assert found.nbytes == nbytes


def test_one_device_that_gives_to_all_broadcasts():
    box = ((0, 4), (0, 4))
    buffers = {
        "s": Buffer(name="s", tensor="t", dtype="f32", boxes=(None, box, None, None)),
        "d": Buffer(name="d", tensor="t", dtype="f32", boxes=(box,) * 4),
    }
    step = Transfer(kind="broadcast", src="s", dst="d", messages=tuple(Message(1, d, box) for d in (0, 2, 3)))
    found = transfer_call(step, Program(devices=4, buffers=buffers, steps=(step,), outputs={}))
    assert (found.name, found.groups, found.nbytes) == ("broadcast", ((1, 0, 2, 3),), 64)


def test_what_carries_a_call_over_gloo_and_nccl():
    """Only what gloo emulates, or does slower than messages, is made of messages; and of the same bytes."""
    both = ((0, 1, 2), (3, 4, 5))
    for name in CALLS:
        call = Call(name, both, 600, "sum" if "reduce" in name else "")
        assert on_backend(call, "nccl") == call
        carried = on_backend(call, "gloo")
        assert carried == (Call(EXCHANGE, both, 400) if name in (ALL_GATHER, REDUCE_SCATTER) else call)
        assert carrier(name, "gloo") == carried.name and carrier(name, "nccl") == name
