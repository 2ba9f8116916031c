"""More faults for the plan checker: of streamed weights, pipeline stages, layouts, and of the plan beside the program."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tapestry.ir.graph import Block
from tapestry.ir.plan import Stage
from tapestry.ir.program import Free, Launch, Load, Reduce, Transfer, allocated
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tests.support.faults.plan_faults import Fault, positions, put, with_buffer, with_steps

MORE: dict[str, tuple[set[str], Fault]] = {}


def fault(*laws: str) -> Callable[[Fault], Fault]:
    """Register a fault; ``laws`` are those that may speak up."""

    def put_in(f: Fault) -> Fault:
        MORE[f.__name__] = (set(laws), f)
        return f

    return put_in


# streamed weights (plans that have some)


def _streamed_loads(plan, p):
    return [i for i in positions(p, Load) if p.buffers[p.steps[i].buffer].tensor in plan.streamed]


@fault("read_after_write", "memory")
def streamed_weight_freed_before_its_use(plan, p):
    out = []
    for i in _streamed_loads(plan, p):
        b = p.steps[i].buffer
        uses = [k for k, s in enumerate(p.steps) if isinstance(s, Launch) and b in s.ins]
        frees = [k for k, s in enumerate(p.steps) if isinstance(s, Free) and b in s.buffers]
        if uses and frees:
            less = [
                replace(s, buffers=tuple(n for n in s.buffers if n != b)) if k in frees else s for k, s in enumerate(p.steps)
            ]
            out.append((plan, with_steps(p, [*less[: uses[0]], Free(buffers=(b,)), *less[uses[0] :]]), {}))
    return out


@fault("memory")
def streamed_weight_kept(plan, p):
    """It is never freed: the stated peak is then a lie (where it was freed before the peak)."""
    out = []
    for i in _streamed_loads(plan, p):
        b = p.steps[i].buffer
        steps = [replace(s, buffers=tuple(n for n in s.buffers if n != b)) if isinstance(s, Free) else s for s in p.steps]
        wrong = with_steps(p, steps)
        if peaks(wrong) != peaks(p):
            out.append((plan, wrong, {}))
    return out


@fault("read_after_write")
def freed_weight_is_not_streamed(plan, p):
    """The plan does not say that a weight is loaded for every use, and the program frees it."""
    freed = {p.buffers[b].tensor for s in p.steps if isinstance(s, Free) for b in s.buffers} & plan.streamed
    return [(replace(plan, streamed=plan.streamed - {t}), p, {"streamed": plan.streamed - {t}}) for t in sorted(freed)]


@fault("agreement")
def streamed_is_no_weight(plan, p):
    return [(plan, p, {"streamed": plan.streamed | {t}}) for t in (*plan.graph.inputs[:1], "no such tensor")]


@fault("read_after_write")
def resident_weight_freed(plan, p):
    out = []
    for i in positions(p, Load):
        b = p.buffers[p.steps[i].buffer]
        if b.tensor in plan.graph.weights and b.tensor not in plan.streamed:
            out.append((plan, with_steps(p, [*p.steps, Free(buffers=(b.name,))]), {}))
    return out


# pipeline stages (plans that have some)


@fault("split_partition")
def operation_on_the_devices_of_another_stage(plan, p):
    """The plan says that an operation belongs to another stage than the program runs it on."""
    out = []
    for i in range(len(plan.stage_of)):
        for k, stage in enumerate(plan.stages):
            if k != plan.stage_of[i] and stage.devices != plan.stages[plan.stage_of[i]].devices:
                places = (*plan.places[:i], stage, *plan.places[i + 1 :])
                out.append((plan, p, {"places": places}))
    return out


@fault("split_partition")
def stages_overlap(plan, p):
    out = []
    for stage in plan.stages:
        for by in (-1, 1):
            moved = Stage(stage.first + by, stage.mesh)
            out.append((plan, p, {"places": tuple(moved if s == stage else s for s in plan.places)}))
    return out if len(plan.stages) > 1 else []


@fault("split_partition")
def operation_also_on_a_device_outside_its_stage(plan, p):
    out = []
    for i in positions(p, Launch):
        s, stage = p.steps[i], plan.stage(p.steps[i].op) if plan.stages else None
        outside = next((d for d in range(p.devices) if stage and d not in stage.devices), None)
        if outside is None or s.mode != "full" or not s.ins:
            continue
        inside, q = stage.devices.start, p
        names = {*s.outs, *(b for b in s.ins if b)}
        if any(not isinstance(x, Load | Launch) for x in p.steps if names & set(allocated(x))):
            continue
        for b in names:
            boxes = list(p.buffers[b].boxes)
            boxes[outside] = boxes[inside]
            q = with_buffer(q, b, boxes=tuple(boxes))
        blocks = list(s.blocks)
        blocks[outside] = blocks[inside]
        out.append((plan, put(q, i, replace(s, blocks=tuple(blocks))), {}))
    return out


# the plan and the program contradict each other


@fault("split_partition", "access_preserved", "read_after_write", "agreement", "written_once")
def program_of_another_plan(plan, p):
    """A legal program, but of a plan with other strategies."""
    if plan.stages:
        return []
    out = []
    for seed in range(4):
        rng = random.Random(seed)
        chosen = tuple(rng.choice(strategies(op, plan.mesh)) for op in plan.graph.ops)
        if [s.dims for s in chosen] != [s.dims for s in plan.strategies]:
            other = lower(replace(plan, strategies=chosen, inputs={}, outputs={}, streamed=frozenset()))
            out.append((plan, other, {"stated_peak": None, "streamed": frozenset()}))
    return out


@fault("ssa", "read_after_write", "agreement", "written_once", "split_partition", "access_preserved")
def operations_of_the_graph_reordered(plan, p):
    out = []
    for i, op in enumerate(plan.graph.ops[:-1]):
        if set(op.outs) & set(plan.graph.ops[i + 1].inputs):
            ops = (*plan.graph.ops[:i], plan.graph.ops[i + 1], op, *plan.graph.ops[i + 2 :])
            out.append((replace(plan, graph=replace(plan.graph, ops=ops)), p, {}))
    return out


@fault("reads_inside", "access_preserved", "agreement")
def projection_shifted_in_the_graph(plan, p):
    """An operation of the plan reads a cell further on than the program's buffers hold, or than there is."""
    out = []
    for i, op in enumerate(plan.graph.ops):
        if isinstance(op, Block):
            for k, r in enumerate(op.reads):
                if r.index and not r.when and r.other is None:
                    index = (r.index[0] + plan.graph.tensors[r.tensor].shape[0], *r.index[1:])
                    reads = (*op.reads[:k], replace(r, index=index), *op.reads[k + 1 :])
                    graph = replace(plan.graph, ops=(*plan.graph.ops[:i], replace(op, reads=reads), *plan.graph.ops[i + 1 :]))
                    out.append((replace(plan, graph=graph), p, {}))
    return out


@fault("agreement", "read_after_write", "written_once", "split_partition")
def monoid_with_other_states(plan, p):
    """A reduction of the plan merges by a monoid of another number of fields."""
    out = []
    for i, op in enumerate(plan.graph.ops):
        if isinstance(op, Block) and op.monoid is not None:
            other = "moments" if len(op.body) != 3 else "sum"
            graph = replace(plan.graph, ops=(*plan.graph.ops[:i], replace(op, monoid=other), *plan.graph.ops[i + 1 :]))
            out.append((replace(plan, graph=graph), p, {}))
    return out


@fault("no_deadlock", "agreement", "written_once", "read_after_write")
def message_to_oneself(plan, p):
    return [
        (plan, put(p, i, replace(s, messages=(replace(s.messages[0], dst=s.messages[0].src), *s.messages[1:]))), {})
        for i in positions(p, Transfer) for s in [p.steps[i]] if s.messages
    ]  # fmt: skip


@fault("read_after_write", "agreement")
def counts_of_a_merge_wrong(plan, p):
    """A field of the states that is not sent, because it is known, is off by one on one device."""
    out = []
    for i in positions(p, Reduce):
        known = p.steps[i].known
        for k, values in enumerate(known):
            if values:
                changed = (*known[:k], (values[0] + 1.0, *values[1:]), *known[k + 1 :])
                out.append((plan, put(p, i, replace(p.steps[i], known=changed)), {}))
    return out


def peaks(p) -> list[int]:
    """Peak bytes per device."""
    from tapestry.ir.program import peak_bytes

    return peak_bytes(p)[0]


@fault("agreement")
def launch_of_no_mode(plan, p):
    return [(plan, put(p, i, replace(p.steps[i], mode="whole")), {}) for i in positions(p, Launch)]


@fault("agreement")
def launch_on_too_few_devices(plan, p):
    return [(plan, put(p, i, replace(p.steps[i], blocks=p.steps[i].blocks[:-1])), {}) for i in positions(p, Launch)]


@fault("agreement")
def reduce_of_an_operation_that_is_not_there(plan, p):
    ops = (-1, len(plan.graph.ops))
    return [(plan, put(p, i, replace(p.steps[i], op=op)), {}) for i in positions(p, Reduce) for op in ops]


@fault("agreement")
def reduce_of_no_kind(plan, p):
    return [(plan, put(p, i, replace(p.steps[i], kind="all_gather")), {}) for i in positions(p, Reduce)]


@fault("agreement", "read_after_write")
def states_of_a_launch_exchanged(plan, p):
    """A kernel that finishes is given the fields of its states in another order."""
    launches = [i for i in positions(p, Launch) if len(set(p.steps[i].states)) > 1]
    return [(plan, put(p, i, replace(p.steps[i], states=p.steps[i].states[::-1])), {}) for i in launches]


@fault("agreement")
def states_of_a_launch_one_short(plan, p):
    launches = [i for i in positions(p, Launch) if p.steps[i].states]
    return [(plan, put(p, i, replace(p.steps[i], states=p.steps[i].states[:-1])), {}) for i in launches]


@fault("agreement", "read_after_write")
def counts_known_of_too_few_devices(plan, p):
    """The values of a field that is not sent are given for all devices but one."""
    out = []
    for i in positions(p, Reduce):
        known = p.steps[i].known
        if any(known):
            short = tuple(v[:-1] for v in known)
            out.append((plan, put(p, i, replace(p.steps[i], known=short)), {}))
    return out
