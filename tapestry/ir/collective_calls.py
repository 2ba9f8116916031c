"""Which call of torch.distributed carries a step of a Program: one description, read by the cost model and by the engine.

A merge of partial states is the backend's own ``all_reduce`` or ``reduce_scatter_tensor`` where that gives what our monoid
gives; otherwise states travel by ``batch_isend_irecv`` and the monoid merges them, in the order of the group. The backend may

- add and multiply integers (they wrap, in any order) and floats. A float sum of two devices has one order; of more, the
  rounding depends on the backend's algorithm, so the last bits may differ from those of one process;
- take the least and greatest of integers, and "and" and "or" of booleans as the least and greatest of bytes;
- not take the least or greatest of floats: a NaN must win, and backends drop it. Nor merge states of several fields that are
  not all merged in one way (softmax, moments, argmax, recurrences).

A transfer is ``all_gather_into_tensor``, ``all_to_all_single`` or ``broadcast`` where its messages are exactly that, in
pieces of one size; anything else (halos, permutations, uneven pieces) is ``batch_isend_irecv``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tapestry.ir.graph import Block, Op
from tapestry.ir.kernel import Box, shape, size
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Monoid, Product
from tapestry.ir.program import Message, Program, Reduce, Transfer
from tapestry.ir.recognition.state import counted
from tapestry.ir.types import FLOATS, itemsize

ALL_REDUCE = "all_reduce"
REDUCE_SCATTER = "reduce_scatter_tensor"
ALL_GATHER = "all_gather_into_tensor"
ALL_TO_ALL = "all_to_all_single"
BROADCAST = "broadcast"
EXCHANGE = "batch_isend_irecv"
CALLS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, EXCHANGE)

CARRIED = frozenset({"f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8"})  # dtypes that gloo and NCCL both reduce


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the backend, made by every device of every group.

    Attributes:
        name: of `CALLS`.
        groups: devices that call together, in the order of the call's pieces; of a broadcast the sender first.
        nbytes: the largest buffer of one device: what goes in, but for a gather what comes out; of an exchange what a device
            receives from all others together.
        op: ``sum``, ``prod``, ``min`` or ``max`` for a reduction by the backend.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    nbytes: int
    op: str = ""


def on_backend(call: Call, backend: str) -> Call:
    """The call that ``gloo`` or ``nccl`` really makes; see `carrier`."""
    if carrier(call.name, backend) == call.name:
        return call
    n = len(call.groups[0])
    return Call(EXCHANGE, call.groups, call.nbytes * (n - 1) // n)


def carrier(name: str, backend: str) -> str:
    """What carries a call over ``gloo`` or ``nccl``.

    gloo's reduce-scatter is an all-reduce of which most is thrown away, and its gather is a ring that takes 1.7 times as long
    as messages between all pairs on 2 ranks, and 3 times as long on 4 (1 MiB): both are exchanges there. `calibrate` measures
    what carries a call under the call's name, so prices need not know of it.
    """
    return EXCHANGE if backend == "gloo" and name in (ALL_GATHER, REDUCE_SCATTER) else name


@lru_cache(maxsize=1 << 12)
def reduce_op(op: Op) -> str:
    """The backend's reduction that merges an operation's states as its monoid does; "" where the monoid must do it.

    Fields that count, and so are not sent, do not matter.
    """
    if not isinstance(op, Block) or op.monoid is None:
        return ""
    known = counted(op)
    found = {(fn, op.body[k].dtype) for k, fn in enumerate(_primitives(MONOIDS[op.monoid])) if k not in known}
    if len(found) != 1:
        return ""
    ((fn, dtype),) = found
    if dtype == "bool":
        return {"and": "min", "or": "max"}.get(fn, "")
    if dtype not in CARRIED or (dtype in FLOATS and fn in ("min", "max")):
        return ""
    return {"add": "sum", "mul": "prod", "min": "min", "max": "max"}.get(fn, "")


def _primitives(monoid: Monoid) -> tuple[str, ...]:
    """For each field of a monoid the primitive that merges it by itself; "" where there is none."""
    match monoid.structure:
        case ByPrimitive(fn):
            return (fn,)
        case Product(parts):
            return tuple(fn for p in parts for fn in _primitives(p))
        case _:
            return ("",) * len(monoid.fields)


def merge_phases(kind: str, op: str, group: int, nbytes: int) -> tuple[tuple[str, int], ...]:
    """(call, bytes as in `Call`) of every phase of a merge.

    Args:
        kind: ``all_reduce`` or ``reduce_scatter``, as in a `Reduce`.
        op: of `reduce_op`.
        group: number of devices that merge.
        nbytes: of states that one device sends.
    """
    if op:
        return ((ALL_REDUCE if kind == "all_reduce" else REDUCE_SCATTER, nbytes),)
    if kind == "all_reduce" and group == 2:  # whole states both ways: as many bytes as in parts, and one phase less
        return ((EXCHANGE, nbytes),)
    parts = (EXCHANGE, nbytes * (group - 1) // group)
    return (parts, parts) if kind == "all_reduce" else (parts,)


def merge_calls(step: Reduce, program: Program, op: Op) -> tuple[Call, ...]:
    """The calls of a reduction, one per phase; a scatter into uneven parts, or of fields not cut alike, is an exchange."""
    fn = reduce_op(op)
    if step.kind != "all_reduce" and not all(_even(step, program, g) for g in step.groups):
        fn = ""
    sent = [program.buffers[b] for b in step.sent]
    most = max((int(sum(step.nbytes(b)[d] for b in sent)) for g in step.groups for d in g[:1]), default=0)
    phases = merge_phases(step.kind, fn, len(step.groups[0]), most)
    return tuple(Call(name, step.groups, nbytes, fn) for name, nbytes in phases)


def _even(step: Reduce, program: Program, group: tuple[int, ...]) -> bool:
    """Whether every field that is sent ends in parts of one size, which together are all of it."""
    pairs = [(program.buffers[s], program.buffers[d]) for s, d in zip(step.srcs, step.dsts, strict=True) if s in step.sent]
    return all(
        len({b and shape(b) for b in (dst.boxes[d] for d in group)}) == 1
        and src.nbytes(group[0]) == len(group) * dst.nbytes(group[0])
        for src, dst in pairs
    )


def transfer_call(step: Transfer, program: Program) -> Call:
    """The call that carries a transfer's messages; of uneven ones the bytes of the device that receives most."""
    src, dst = program.buffers[step.src], program.buffers[step.dst]
    groups = _joined_messages(step.messages)
    width, inside = itemsize(dst.dtype), [_Messages(g, src.boxes, dst.boxes, m) for g, m in groups.items()]
    if len({len(g) for g in groups}) == 1 and len({m.piece for m in inside}) == 1:
        n, piece = len(inside[0].group), inside[0].piece * width
        if all(m.broadcasts for m in inside):
            return Call(BROADCAST, tuple(m.from_sender for m in inside), piece)
        if piece and all(m.gathers for m in inside):
            return Call(ALL_GATHER, tuple(groups), n * piece)
        if piece and all(m.swaps for m in inside):
            return Call(ALL_TO_ALL, tuple(groups), n * piece)
    received = dict.fromkeys((d for g in groups for d in g), 0)
    for m in step.messages:
        received[m.dst] += size(m.box) * width
    return Call(EXCHANGE, tuple(groups), max(received.values(), default=0))


def _joined_messages(messages: Sequence[Message]) -> dict[tuple[int, ...], list[Message]]:
    """Messages by the devices that they join, directly or through others."""
    root: dict[int, int] = {}

    def find(d: int) -> int:
        while root.setdefault(d, d) != d:
            root[d] = d = root[root[d]]
        return d

    for m in messages:
        a, b = find(m.src), find(m.dst)
        root[max(a, b)] = min(a, b)
    members, mine = dict[int, list[int]](), dict[int, list[Message]]()
    for d in sorted(root):
        members.setdefault(find(d), []).append(d)
    for m in messages:
        mine.setdefault(find(m.src), []).append(m)
    return {tuple(members[r]): mine[r] for r in members}


@dataclass(frozen=True, slots=True)
class _Messages:
    """What devices that are joined send each other."""

    group: tuple[int, ...]
    held: tuple[Box | None, ...]
    wanted: tuple[Box | None, ...]
    messages: list[Message]

    @property
    def piece(self) -> int:
        """Cells of every message; 0 where they differ."""
        found = {size(m.box) for m in self.messages}
        return found.pop() if len(found) == 1 else 0

    @property
    def from_sender(self) -> tuple[int, ...]:
        """The group with the first message's sender at its head."""
        first = self.messages[0].src
        return (first, *(d for d in self.group if d != first))

    @property
    def broadcasts(self) -> bool:
        """Whether one device sends one box, which is all that the others want, to at least two."""
        senders, boxes = {m.src for m in self.messages}, {m.box for m in self.messages}
        return len(senders) == len(boxes) == 1 < len(self.messages) == len(self.group) - 1 and all(
            self.wanted[m.dst] == m.box for m in self.messages
        )

    @property
    def complete(self) -> bool:
        """Whether everybody sends one piece to everybody else."""
        return len({(m.src, m.dst) for m in self.messages}) == len(self.messages) == len(self.group) * (len(self.group) - 1)

    @property
    def gathers(self) -> bool:
        """Whether everybody ends with exactly the blocks of all, each of them sent whole."""
        return self.complete and all(
            m.box == self.held[m.src] and size(self.wanted[m.dst] or ()) == len(self.group) * self.piece for m in self.messages
        )

    @property
    def swaps(self) -> bool:
        """Whether everybody's block is cut into one equal piece for each, the device's own among them."""
        return self.complete and all(size(self.held[d] or ()) == len(self.group) * self.piece for d in self.group)
