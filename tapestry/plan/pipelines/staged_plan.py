"""Plans with pipeline stages: each stage is a plan of its own on its own devices, and their programs are woven together.

What a stage receives is, to its own plan, an input that starts in a fixed layout. So lowering, and the search of a stage,
know nothing of stages; here that input becomes a transfer from the devices of the stage that computes the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tapestry.ir.graph import Graph, with_ops
from tapestry.ir.kernel import Box, intersect, size
from tapestry.ir.plan import Plan, Stage, device_count, on_stage
from tapestry.ir.program import Buffer, Free, Launch, Load, Message, Program, Reduce, Step, Transfer
from tapestry.plan.kinds import kind_of
from tapestry.plan.lower import lower, with_frees
from tapestry.plan.topology import Fabric, Link, Topology, fabrics
from tapestry.plan.topology.fabric import of_devices, slowest


def lower_plan(plan: Plan) -> Program:
    """The program of a plan, with stages or without."""
    return _Weaving(plan).program() if plan.stages else lower(plan)


def segment(graph: Graph, ops: Sequence[int], *, first: bool = False) -> Graph:
    """Some operations as a graph: what it lacks is an input, what others read or the graph gives back is an output.

    Args:
        first: whether this part gives back graph outputs that no operation writes.
    """
    mine = set(ops)
    chosen = tuple(graph.ops[i] for i in ops)
    made = {t for op in chosen for t in op.outs}
    wanted = {t for i, op in enumerate(graph.ops) if i not in mine for t in op.inputs} | set(graph.outputs)
    sources = (*graph.inputs, *graph.weights)
    loose = [t for t in graph.outputs if t in sources] if first else []
    read = dict.fromkeys(t for op in chosen for t in op.inputs if t not in made and t not in graph.weights)
    inputs = tuple(dict.fromkeys((*read, *(t for t in loose if t in graph.inputs))))
    outputs = (*(t for op in chosen for t in op.outs if t in wanted), *loose)
    return with_ops(replace(graph, inputs=inputs, outputs=outputs), chosen)


def stage_ops(plan: Plan, k: int) -> list[int]:
    """Operations of one stage, in the graph's order."""
    return [i for i, s in enumerate(plan.stage_of) if s == k]


def stage_plan(plan: Plan, k: int) -> Plan:
    """One stage as a plan of its own; what it receives starts in the layout of its arrival (replicated without one), and a
    layout of the whole mesh is, on its mesh, the same axes by name."""
    ops, stage = stage_ops(plan, k), plan.stages[k]
    sub = segment(plan.graph, ops, first=k == 0)
    layouts = {a.tensor: a.layout for a in plan.arrivals if a.stage == k}
    made = plan.graph.producers()
    received = {t: layouts.get(t, (None,) * len(stage.mesh)) for t in sub.inputs if t in made}
    here = {*sub.inputs, *sub.weights}, {t for i in ops for t in plan.graph.ops[i].outs}
    inputs, outputs = (
        {t: on_stage(layout, plan.mesh, stage.mesh) or () for t, layout in of.items() if t in there}
        for of, there in zip((plan.inputs, plan.outputs), here, strict=True)
    )
    return Plan(
        graph=sub,
        mesh=stage.mesh,
        strategies=tuple(plan.strategies[i] for i in ops),
        inputs={**inputs, **received},
        outputs=outputs,
        streamed=plan.streamed & set(sub.weights),
        native_sums=plan.native_sums,
    )


def stage_topology(topo: Topology, stage: Stage) -> Topology:
    """The topology of a stage's devices: the links of the mesh axes that are left, and the fabrics that join them.

    A fabric of which the stage has only a part is priced as a switch of its link.
    """
    if stage.mesh == topo.mesh:
        return topo
    names = [a.name for a in topo.mesh]
    links = tuple(topo.links[names.index(a.name)] for a in stage.mesh)
    out = replace(topo, mesh=stage.mesh, links=links, joined=_fabrics_among(topo, device_count(stage.mesh)))
    if not topo.kinds:
        return out
    return of_devices(out, topo.kinds[stage.first : stage.devices.stop])


def _fabrics_among(topo: Topology, devices: int) -> tuple[Fabric, ...]:
    """Fabrics among the first so many devices; none where they do not end at one, and mesh axes are switches of their links."""
    out: list[Fabric] = []
    for f in reversed(topo.joined):
        if f.stride >= devices:
            break
        if devices % f.stride:
            return ()
        size = min(f.size, devices // f.stride)
        out.append(f if size == f.size else Fabric(kind="switch", stride=f.stride, size=size, link=f.link))
    return tuple(reversed(out))


def link_between(topo: Topology, a: int, b: int) -> Link:
    """What a message between two devices crosses: the slowest of what joins them."""
    return slowest([f.link for f in fabrics(topo) if a // f.stride % f.size != b // f.stride % f.size])


def spread(held: Sequence[Box | None], wanted: Sequence[Box | None]) -> tuple[Message, ...]:
    """Messages from some devices to others, each cell once to each receiver, spread evenly over those that hold it.

    Blocks of ``held`` are equal (replicas) or disjoint.
    """
    holders: dict[Box, list[int]] = {}
    for d, box in enumerate(held):
        if box is not None and size(box):
            holders.setdefault(box, []).append(d)
    receivers = [d for d, box in enumerate(wanted) if box is not None]
    out: list[Message] = []
    for n, d in enumerate(receivers):
        want = wanted[d]
        assert want is not None
        for box, devices in holders.items():
            common = intersect(box, want)
            if common is not None:
                out.append(Message(devices[n * len(devices) // len(receivers)], d, common))
    return tuple(out)


@dataclass(slots=True)
class _Weaving:
    """The programs of all stages, step by step in the order of the graph's operations."""

    plan: Plan
    loads: list[Step] = field(default_factory=list[Step])
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    chunks: list[list[Step]] = field(init=False)
    renamed: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    arriving: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    arrived: list[list[Step]] = field(init=False)
    members: list[list[int]] = field(init=False)
    makers: dict[str, int] = field(init=False)
    resident: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        plan = self.plan
        self.chunks, self.arrived = [[] for _ in plan.graph.ops], [[] for _ in plan.graph.ops]
        self.members = [stage_ops(plan, k) for k in range(len(plan.stages))]
        self.makers = plan.graph.producers()

    def program(self) -> Program:
        """The whole program."""
        plan, made = self.plan, self.makers
        outputs: list[dict[str, str]] = []
        for k in range(len(plan.stages)):
            program = lower(stage_plan(plan, k))
            self.stage(k, program)
            outputs.append({t: self.renamed[k][b] for t, b in program.outputs.items()})
        for k, t in self.arriving:
            self.arrive(k, t, outputs[plan.stage_of[made[t]]][t])
        ends = {t: outputs[plan.stage_of[made[t]] if t in made else 0][t] for t in plan.graph.outputs}
        steps = self.loads + [s for pair in zip(self.arrived, self.chunks, strict=True) for chunk in pair for s in chunk]
        kept = set(ends.values()) | self.resident
        return Program(devices=plan.devices, buffers=self.buffers, steps=tuple(with_frees(steps, kept)), outputs=ends)

    def stage(self, k: int, program: Program) -> None:
        """Take over one stage's steps, each with the operation that it serves."""
        stage, ops = self.plan.stages[k], self.members[k]
        names = self.declare(k, program, stage)
        pending: list[Step] = []
        for step in program.steps:
            match step:
                case Load() if program.buffers[step.buffer].tensor in self.makers:
                    self.arriving.append((k, program.buffers[step.buffer].tensor))
                case Load() if self.fixed(program.buffers[step.buffer].tensor):
                    self.loads.append(Load(buffer=names[step.buffer]))
                case Load():
                    pending.append(Load(buffer=names[step.buffer]))
                case Transfer():
                    pending.append(self.moved(step, names, stage))
                case Launch() | Reduce():
                    self.chunks[ops[step.op]] += [*pending, self.run(step, names, stage, ops[step.op])]
                    pending = []
                case Free():
                    pass  # worked out again at the end: other stages may read a buffer later
        for step in pending:  # brings an output where it must end, right behind what makes it: later stages may read it there
            assert isinstance(step, Transfer)
            self.chunks[self.makers[self.buffers[step.dst].tensor]].append(step)

    def fixed(self, tensor: str) -> bool:
        """Whether a tensor is loaded at the beginning: weights that stay, and what is given back as it came."""
        return tensor in {*self.plan.graph.weights} - self.plan.streamed or tensor in self.plan.graph.outputs

    def declare(self, k: int, program: Program, stage: Stage) -> dict[str, str]:
        """Take over a stage's buffers; returns their names here."""
        names: dict[str, str] = {}
        for b in program.buffers.values():
            name = b.name
            while name in self.buffers:
                name += f"@{k}"
            names[b.name] = name
            self.buffers[name] = replace(b, name=name, boxes=self.placed(b.boxes, stage))
            if b.tensor in self.plan.graph.weights and b.tensor not in self.plan.streamed:
                self.resident.add(name)
        self.renamed.append(names)
        return names

    def placed(self, boxes: tuple[Box | None, ...], stage: Stage) -> tuple[Box | None, ...]:
        """Boxes of a stage's devices as boxes of all devices."""
        return (None,) * stage.first + boxes + (None,) * (self.plan.devices - stage.first - len(boxes))

    def moved(self, step: Transfer, names: dict[str, str], stage: Stage) -> Transfer:
        messages = tuple(Message(m.src + stage.first, m.dst + stage.first, m.box) for m in step.messages)
        return Transfer(kind=step.kind, src=names[step.src], dst=names[step.dst], messages=messages)

    def run(self, step: Launch | Reduce, names: dict[str, str], stage: Stage, op: int) -> Step:
        if isinstance(step, Launch):
            ins, outs, states = (tuple(names[b] if b else "" for b in x) for x in (step.ins, step.outs, step.states))
            return replace(step, op=op, blocks=self.placed(step.blocks, stage), ins=ins, outs=outs, states=states)
        groups = tuple(tuple(d + stage.first for d in g) for g in step.groups)
        srcs, dsts = (tuple(names[b] for b in x) for x in (step.srcs, step.dsts))
        before, after = (0.0,) * stage.first, (0.0,) * (self.plan.devices - stage.devices.stop)
        known = tuple((*before, *values, *after) if values else values for values in step.known)
        return replace(step, op=op, srcs=srcs, dsts=dsts, groups=groups, known=known)

    def arrive(self, k: int, tensor: str, src: str) -> None:
        """The transfer of a tensor into a stage, before whatever a later stage does next.

        Not where the tensor is first read: devices transfer in the program's order, so that what the sender has to send or
        to merge next would wait for that.
        """
        maker, stages = self.makers[tensor], self.plan.stage_of
        first = next(i for i in range(maker + 1, len(stages)) if stages[i] > stages[maker])
        dst = self.renamed[k][tensor]
        held, wanted = self.buffers[src].boxes, self.buffers[dst].boxes
        messages = spread(held, wanted)
        kind = kind_of(messages, held, wanted)
        self.arrived[first].append(Transfer(kind=kind, src=src, dst=dst, messages=messages))
