"""Faults for the plan checker: real plans, and each kind of damage that a program can have, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tapestry.ir.plan import Plan
from tapestry.ir.program import Free, Launch, Load, Message, Program, Reduce, Transfer, allocated
from tapestry.ir.types import itemsize
from tapestry.plan.strategy import strategies
from tests.support.small_models import peak

Edit = tuple[Program, dict[str, Any]]
Fault = Callable[[Plan, Program], "list[tuple[Plan, Program, dict[str, Any]]]"]
FAULTS: dict[str, tuple[set[str], Fault]] = {}


def fault(*laws: str) -> Callable[[Fault], Fault]:
    """Register a fault; ``laws`` are those that may speak up."""

    def put(f: Fault) -> Fault:
        FAULTS[f.__name__] = (set(laws), f)
        return f

    return put


def with_steps(p: Program, steps: Any) -> Program:
    return replace(p, steps=tuple(steps))


def with_buffer(p: Program, name: str, **changes: Any) -> Program:
    return replace(p, buffers={**p.buffers, name: replace(p.buffers[name], **changes)})


def positions(p: Program, kind: type) -> list[int]:
    return [i for i, s in enumerate(p.steps) if isinstance(s, kind)]


def put(p: Program, i: int, *steps: Any) -> Program:
    return with_steps(p, [*p.steps[:i], *steps, *p.steps[i + 1 :]])


@fault("read_after_write")
def transfer_dropped(plan, p):
    return [(plan, put(p, i), {}) for i in positions(p, Transfer)]


@fault("read_after_write")
def load_dropped(plan, p):
    return [(plan, put(p, i), {}) for i in positions(p, Load)]


@fault("read_after_write", "split_partition", "written_once")
def launch_dropped(plan, p):
    return [(plan, put(p, i), {}) for i in positions(p, Launch)]


@fault("read_after_write")
def message_dropped(plan, p):
    return [
        (plan, put(p, i, replace(p.steps[i], messages=p.steps[i].messages[1:])), {})
        for i in positions(p, Transfer) if p.steps[i].messages
    ]  # fmt: skip


@fault("written_once")
def message_sent_twice(plan, p):
    return [
        (plan, put(p, i, replace(p.steps[i], messages=(*p.steps[i].messages, p.steps[i].messages[-1]))), {})
        for i in positions(p, Transfer) if p.steps[i].messages
    ]  # fmt: skip


@fault("read_after_write", "written_once")
def message_shifted_by_a_row(plan, p):
    out = []
    for i in positions(p, Transfer):
        s = p.steps[i]
        for n, m in enumerate(s.messages[:2]):
            for axis in range(len(m.box)):
                for by in (-1, 1):
                    box = tuple((lo + by, hi + by) if a == axis else (lo, hi) for a, (lo, hi) in enumerate(m.box))
                    moved = (*s.messages[:n], replace(m, box=box), *s.messages[n + 1 :])
                    out.append((plan, put(p, i, replace(s, messages=moved)), {}))
    return out


@fault("read_after_write", "written_once")
def message_to_the_wrong_device(plan, p):
    out = []
    for i in positions(p, Transfer):
        s = p.steps[i]
        if s.messages:
            m = s.messages[0]
            other = next(d for d in range(p.devices) if d not in (m.src, m.dst)) if p.devices > 2 else m.src
            out.append((plan, put(p, i, replace(s, messages=(replace(m, dst=other), *s.messages[1:]))), {}))
    return out


@fault("agreement")
def message_to_no_device(plan, p):
    return [
        (plan, put(p, i, replace(s, messages=(Message(s.messages[0].src, bad, s.messages[0].box), *s.messages[1:]))), {})
        for i in positions(p, Transfer) for s in [p.steps[i]] if s.messages for bad in (-1, p.devices, s.messages[0].src)
    ]  # fmt: skip


@fault("read_after_write")
def message_from_one_that_lacks_it(plan, p):
    out = []
    for i in positions(p, Transfer):
        s, boxes = p.steps[i], p.buffers[p.steps[i].src].boxes
        for m in s.messages[:1]:
            wrong = [d for d in range(p.devices) if d != m.dst and boxes[d] != boxes[m.src]]
            out += [(plan, put(p, i, replace(s, messages=(replace(m, src=wrong[0]), *s.messages[1:]))), {})] if wrong else []
    return out


@fault("read_after_write")
def transfer_before_its_producer(plan, p):
    out = []
    for i in positions(p, Transfer):
        made = next(k for k, s in enumerate(p.steps) if p.steps[i].src in allocated(s))
        steps = [s for k, s in enumerate(p.steps) if k != i]
        out.append((plan, with_steps(p, [*steps[:made], p.steps[i], *steps[made:]]), {}))
    return out


def _blocks(p: Program, change: Callable[[Any, int], Any]) -> list[Program]:
    out = []
    for i in positions(p, Launch):
        s = p.steps[i]
        for d, block in enumerate(s.blocks):
            for axis in range(len(block or ())):
                new = change(block, axis)
                if new is not None and new != block:
                    out.append(put(p, i, replace(s, blocks=(*s.blocks[:d], new, *s.blocks[d + 1 :]))))
    return out


def _axis(block: Any, axis: int, lo: int, hi: int) -> Any:
    return tuple((a + lo, b + hi) if k == axis else (a, b) for k, (a, b) in enumerate(block))


@fault("split_partition", "written_once", "access_preserved", "read_after_write")
def block_enlarged(plan, p):
    return [(plan, q, {}) for q in _blocks(p, lambda b, a: _axis(b, a, 0, 1))]


@fault("split_partition", "written_once", "access_preserved", "read_after_write")
def block_overlaps_the_one_before(plan, p):
    return [(plan, q, {}) for q in _blocks(p, lambda b, a: _axis(b, a, -1, 0))]


@fault("split_partition", "written_once", "read_after_write")
def block_smaller(plan, p):
    return [(plan, q, {}) for q in _blocks(p, lambda b, a: _axis(b, a, 0, -1))]


@fault("split_partition", "written_once", "read_after_write")
def block_missing(plan, p):
    return [(plan, put(p, i, replace(s, blocks=(None, *s.blocks[1:]))), {}) for i in positions(p, Launch) for s in [p.steps[i]]]


@fault("split_partition", "written_once", "access_preserved")
def block_and_buffer_overlap(plan, p):
    """Two devices compute the same cells and nobody the others, with buffers to match."""
    out = []
    for i in positions(p, Launch):
        s = p.steps[i]
        if s.mode == "full" and s.blocks[0] != s.blocks[1]:
            q = put(p, i, replace(s, blocks=(s.blocks[1], *s.blocks[1:])))
            for b in s.outs:
                boxes = p.buffers[b].boxes
                q = with_buffer(q, b, boxes=(boxes[1], *boxes[1:]))
            out.append((plan, q, {}))
    return out


@fault("written_once")
def reduce_twice_into_one_buffer(plan, p):
    return [(plan, put(p, i, p.steps[i], p.steps[i]), {}) for i in positions(p, Reduce)]


@fault("written_once", "read_after_write", "agreement")
def reduce_of_what_is_reduced(plan, p):
    out = []
    for i in positions(p, Reduce):
        s, q = p.steps[i], p
        names = tuple(f"{b}.again" for b in s.dsts)
        for b, n in zip(s.dsts, names, strict=True):
            q = replace(q, buffers={**q.buffers, n: replace(q.buffers[b], name=n)})
        out.append((plan, put(q, i, s, replace(s, kind="all_reduce", srcs=s.dsts, dsts=names)), {}))
    return out


@fault("written_once", "read_after_write")
def reduce_without_a_member(plan, p):
    out = []
    for i in positions(p, Reduce):
        g = p.steps[i].groups
        out.append((plan, put(p, i, replace(p.steps[i], groups=(g[0][1:], *g[1:]))), {}))
        out.append((plan, put(p, i, replace(p.steps[i], groups=(g[0][1:], g[0][:1], *g[1:]))), {}))
    return out


@fault("written_once")
def reduce_with_a_member_twice(plan, p):
    return [
        (plan, put(p, i, replace(p.steps[i], groups=((*g[0], g[0][0]), *g[1:]))), {})
        for i in positions(p, Reduce) for g in [p.steps[i].groups]
    ]  # fmt: skip


@fault("written_once", "agreement", "read_after_write")
def reduce_dropped(plan, p):
    return [(plan, put(p, i), {}) for i in positions(p, Reduce)]


@fault("agreement")
def reduce_of_another_kind(plan, p):
    return [(plan, put(p, i, replace(p.steps[i], kind=k)), {}) for i in positions(p, Reduce) for k in ("broadcast", "")]


@fault("agreement", "read_after_write")
def reduce_for_another_operation(plan, p):
    return [
        (plan, put(p, i, replace(p.steps[i], op=n)), {})
        for i in positions(p, Reduce) for n in (-1, len(plan.graph.ops), p.steps[i].op - 1, p.steps[i].op + 1)
    ]  # fmt: skip


@fault("read_after_write")
def finish_before_reduce(plan, p):
    out = []
    for i in positions(p, Launch):
        if p.steps[i].mode == "finish":
            made = next(k for k, s in enumerate(p.steps) if p.steps[i].states[0] in allocated(s))
            steps = [s for k, s in enumerate(p.steps) if k != i]
            out.append((plan, with_steps(p, [*steps[:made], p.steps[i], *steps[made:]]), {}))
    return out


@fault("written_once", "read_after_write", "agreement")
def finish_of_unmerged_states(plan, p):
    out = []
    for i in positions(p, Launch):
        s = p.steps[i]
        if s.mode == "finish":
            merge = next(k for k in positions(p, Reduce) if p.steps[k].dsts == s.states)
            steps = [x for x in put(p, i, replace(s, states=p.steps[merge].srcs)).steps if not isinstance(x, Free)]
            out.append((plan, with_steps(p, steps), {}))
    return out


@fault("read_after_write", "agreement")
def fields_swapped(plan, p):
    return [
        (plan, put(p, i, replace(p.steps[i], states=p.steps[i].states[::-1])), {})
        for i in positions(p, Launch) if len(p.steps[i].states) > 1
    ]  # fmt: skip


@fault("split_partition")
def partial_launched_as_full(plan, p):
    return [
        (plan, put(p, i, replace(p.steps[i], mode="full")), {}) for i in positions(p, Launch) if p.steps[i].mode == "partial"
    ]


@fault("agreement", "written_once", "split_partition")
def full_launched_as_partial(plan, p):
    return [
        (plan, put(p, i, replace(p.steps[i], mode="partial")), {}) for i in positions(p, Launch) if p.steps[i].mode == "full"
    ]


@fault("read_after_write")
def freed_early(plan, p):
    out = []
    for i, s in enumerate(p.steps):
        for b in allocated(s):
            uses = [k for k, u in enumerate(p.steps) if b in _reads(u)]
            if uses or b in p.outputs.values():
                steps = [
                    x
                    if not (isinstance(x, Free) and b in x.buffers)
                    else replace(x, buffers=tuple(n for n in x.buffers if n != b))
                    for x in p.steps
                ]
                out.append((plan, with_steps(p, [*steps[: i + 1], Free(buffers=(b,)), *steps[i + 1 :]]), {}))
    return out


def _reads(s: Any) -> tuple[str, ...]:
    match s:
        case Launch():
            return tuple(b for b in (*s.ins, *s.states) if b)
        case Transfer():
            return (s.src,)
        case Reduce():
            return s.srcs
    return ()


@fault("read_after_write")
def freed_twice(plan, p):
    return [(plan, put(p, i, p.steps[i], p.steps[i]), {}) for i in positions(p, Free)]


@fault("memory")
def never_freed(plan, p):
    return [(plan, with_steps(p, [s for s in p.steps if not isinstance(s, Free)]), {})]


@fault("access_preserved", "read_after_write", "written_once", "agreement")
def loaded_slice_moved(plan, p):
    """A weight's or an input's slice starts a cell late (or ends a cell early) on one device that reads all of it."""
    out = []
    for i in positions(p, Load):
        b = p.buffers[p.steps[i].buffer]
        for axis, (lo, hi) in enumerate(b.boxes[0]):
            for change in ((lo + 1, hi), (lo, hi - 1), (lo + 1, hi + 1)):
                box = tuple(change if k == axis else x for k, x in enumerate(b.boxes[0]))
                out.append((plan, with_buffer(p, b.name, boxes=(box, *b.boxes[1:])), {}))
    return out


@fault("read_after_write")
def output_missing(plan, p):
    return [(plan, replace(p, outputs={k: v for k, v in p.outputs.items() if k != t}), {}) for t in p.outputs]


@fault("read_after_write", "written_once")
def output_from_another_buffer(plan, p):
    return [
        (plan, replace(p, outputs={**p.outputs, t: b}), {})
        for t in p.outputs
        for b in p.buffers
        if p.buffers[b].tensor != t or p.buffers[b].field is not None
    ]


@fault("read_after_write")
def output_freed(plan, p):
    return [(plan, with_steps(p, [*p.steps, Free(buffers=(b,))]), {}) for b in p.outputs.values()]


@fault("read_after_write")
def kernel_given_another_tensor(plan, p):
    out = []
    for i in positions(p, Launch):
        s = p.steps[i]
        for k, b in enumerate(s.ins):
            alive = {n for x in p.steps[:i] for n in allocated(x)}
            other = next((n for n in sorted(alive) if b and p.buffers[n].tensor != p.buffers[b].tensor), None)
            if other:
                out.append((plan, put(p, i, replace(s, ins=(*s.ins[:k], other, *s.ins[k + 1 :]))), {}))
            if b:
                out.append((plan, put(p, i, replace(s, ins=(*s.ins[:k], "", *s.ins[k + 1 :]))), {}))
                out.append((plan, put(p, i, replace(s, ins=(*s.ins[:k], "no such buffer", *s.ins[k + 1 :]))), {}))
    return out


@fault("agreement")
def kernel_with_another_number_of_reads(plan, p):
    return [
        (plan, put(p, i, replace(s, ins=ins)), {})
        for i in positions(p, Launch)
        for s in [p.steps[i]]
        for ins in ([s.ins[:-1]] if s.ins else []) + [(*s.ins, "one more")]
    ]


@fault("agreement")
def kernel_writes_another_buffer(plan, p):
    out = []
    for i in positions(p, Launch):
        later = [b for s in p.steps[i + 1 :] for b in allocated(s)]
        out += (
            [(plan, put(p, i, replace(p.steps[i], outs=(later[-1], *p.steps[i].outs[1:]))), {})]
            if later and later[-1] not in p.steps[i].outs
            else []
        )
    return out


@fault("agreement")
def operation_does_not_exist(plan, p):
    return [(plan, put(p, i, replace(p.steps[i], op=n)), {}) for i in positions(p, Launch) for n in (-1, len(plan.graph.ops))]


@fault("agreement")
def dtype_of_a_buffer_changed(plan, p):
    """To one of the same size, so that memory alone would not tell."""
    same = {4: {"f32": "i32", "i32": "f32"}, 8: {"i64": "f64", "f64": "i64"}, 2: {}, 1: {}}
    return [
        (plan, with_buffer(p, n, dtype=same[itemsize(b.dtype)][b.dtype]), {})
        for n, b in p.buffers.items() if b.dtype in same[itemsize(b.dtype)]
    ]  # fmt: skip


@fault("agreement", "written_once", "access_preserved", "read_after_write", "split_partition")
def boxes_beyond_the_tensor(plan, p):
    out = []
    for n, b in p.buffers.items():
        shape = plan.graph.tensors[b.tensor].shape
        for axis in range(len(shape)):
            box = tuple((lo, shape[axis] + 1) if k == axis else (lo, hi) for k, (lo, hi) in enumerate(b.boxes[0]))
            out.append((plan, with_buffer(p, n, boxes=(box, *b.boxes[1:])), {}))
    return out


@fault("agreement", "written_once", "access_preserved", "read_after_write", "split_partition")
def boxes_of_another_rank_or_number(plan, p):
    out = []
    for n, b in p.buffers.items():
        for boxes in (
            (b.boxes[0][1:], *b.boxes[1:]),
            ((*b.boxes[0], (0, 1)), *b.boxes[1:]),
            b.boxes[:-1],
            (*b.boxes, b.boxes[0]),
            (None, *b.boxes[1:]),
        ):
            if boxes != b.boxes:
                out.append((plan, with_buffer(p, n, boxes=boxes), {}))
    return out


@fault("agreement", "read_after_write")
def buffer_of_another_tensor(plan, p):
    out = []
    for n, b in p.buffers.items():
        shape = plan.graph.tensors[b.tensor].shape
        other = [
            t
            for t, x in plan.graph.tensors.items()
            if t != b.tensor and x.shape == shape and x.dtype == plan.graph.tensors[b.tensor].dtype
        ]
        out += [(plan, with_buffer(p, n, tensor=other[0]), {})] if other else []
        out.append((plan, with_buffer(p, n, tensor="no such tensor"), {}))
    return out


@fault("memory")
def stated_peak_wrong(plan, p):
    right = peak(p)
    return [
        (plan, p, {"stated_peak": [v + by if d == at else v for d, v in enumerate(right)]})
        for at in range(p.devices)
        for by in (-1, 1)
    ]


@fault("memory")
def memory_exceeded(plan, p):
    return [(plan, p, {"limit": max(peak(p)) - 1})]


@fault("split_partition")
def strategy_contradicts_the_program(plan, p):
    """The plan says that an operation is cut otherwise than the program cuts it."""
    out = []
    for i, op in enumerate(plan.graph.ops):
        for s in strategies(op, plan.mesh):
            if s.dims != plan.strategies[i].dims:
                out.append((replace(plan, strategies=(*plan.strategies[:i], s, *plan.strategies[i + 1 :])), p, {}))
    return out
