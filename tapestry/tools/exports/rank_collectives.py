"""Transfers and merges of a program as ``DistCollective`` nodes of one rank.

A transfer is ALL_GATHER where its messages are that, else a BROADCAST for each box that is sent, to those that want it: as
many bytes as the plan's messages. A merge is ALL_REDUCE, or REDUCE_SCATTER along the first axis, or a REDUCE for each
rank's part where parts are unequal. States that refer to a centre (of a softmax) are moved to the merged one first, moments
to the merged mean. What has no such form moves more bytes than the plan does, `Exchange.extra`: merges in order
(recurrences) gather all states, and a scatter of a softmax's states needs all of the centres on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx import helper

from tapestry.ir.collective_calls import ALL_GATHER, transfer_call
from tapestry.ir.kernel import Box, intersect, shape, size
from tapestry.ir.monoid import MONOIDS, Monoid
from tapestry.ir.program import Program, Reduce, Transfer
from tapestry.ir.types import itemsize
from tapestry.tools.exports.nodes.blocks import Merge, Merging
from tapestry.tools.exports.nodes.onnx_nodes import COLLECTIVE, Nodes, NotExpressible, Value, relative
from tapestry.viz.format import together

_REDUCE = {"add": "SUM", "mul": "PROD", "max": "MAX", "min": "MIN"}
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Places:
    """Which box of an input each rank is given, and how ``program.json`` says it (``said``: it can)."""

    boxes: tuple[Box | None, ...]
    spec: list[Any]
    said: bool


@dataclass(slots=True)
class Exchange:
    """Collectives of one rank.

    Attributes:
        counts: nodes by kind; ``sent``: bytes on the wire, this rank's share of each.
        extra: bytes that this rank puts on the wire beyond what the plan does, by reason.
        described: values whose types a reader of the file must be told, since it does not know the node.
    """

    nodes: Nodes
    program: Program
    rank: int
    nearest: bool
    counts: dict[str, int] = field(default_factory=dict[str, int])
    sent: float = 0
    extra: dict[str, float] = field(default_factory=dict[str, float])
    described: list[Value] = field(default_factory=list[Value])

    def collective(self, kind: str, x: Value, group: Group, *, op: str = "NONE", root: int = -1) -> Value:
        """One node; parts are along the first axis."""
        n = len(group)
        shape = list(x.shape)
        if kind == "ALL_GATHER":
            shape[0] *= n
        if kind == "REDUCE_SCATTER":
            shape[0] //= n
        out = Value(self.nodes.fresh(f"{self.nodes.part}/{kind}"), tuple(shape), x.dtype)
        node = helper.make_node(
            COLLECTIVE,
            [self.nodes.named(x).name],
            [out.name],
            name=out.name,
            collective_operation=kind,
            reduce_op=op,
            root=root,
            nb_rank=n,
            groups=list(group),
            group_size=n,
        )
        self.nodes.keep(node)
        self.nodes.values[out.name] = out
        self.described += [x, out]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        whole = x.size * itemsize(x.dtype)  # of one rank; all together, by the algorithms that `transfer_bytes` counts
        times = {
            "ALL_REDUCE": 2 * (n - 1),
            "REDUCE_SCATTER": n - 1,
            "ALL_GATHER": n * (n - 1),
            "BROADCAST": n - 1,
            "REDUCE": n - 1,
        }[kind]
        self.sent += times * whole / n
        return out

    def costs(self, reason: str, nbytes: float, where: str) -> None:
        """More bytes than the plan's.

        Raises:
            NotExpressible: nobody asked for the nearest program.
        """
        if not self.nearest:
            raise NotExpressible(
                f"no collective does what the plan does: {reason}",
                where=f"'{where}'",
                why=f"the nearest one moves {nbytes:,.0f} bytes more from each rank",
                hint="--nearest",
            )
        self.extra[reason] = self.extra.get(reason, 0) + nbytes

    def first(self, x: Value, axis: int) -> Value:
        """An axis and the first one swapped."""
        turn = list(range(len(x.shape)))
        turn[0], turn[axis] = axis, 0
        return self.nodes.transpose(x, turn)


# transfers


def moved(x: Exchange, step: Transfer, source: Value | None) -> Value | None:
    """The buffer that a transfer fills on this rank; None where it fills none here."""
    src, dst = x.program.buffers[step.src], x.program.buffers[step.dst]
    mine, held = dst.boxes[x.rank], src.boxes[x.rank]
    call = transfer_call(step, x.program)
    pieces: dict[Box, Value] = {}
    if call.name == ALL_GATHER:
        group = next((g for g in call.groups if x.rank in g), None)
        if group is not None and source is not None and mine is not None:
            return _gathered(x, source, [src.boxes[d] for d in group], group, mine)
    else:
        for (sender, box), messages in together(step.messages, lambda m: (m.src, m.box)).items():
            members = (sender, *(m.dst for m in messages))
            if x.rank in members:
                pieces[box] = broadcast(x, source if sender == x.rank else None, held, box, members, dst.dtype)
    if mine is None:
        return None
    if not size(mine):
        return x.nodes.filled(shape(mine), 0, dst.dtype)
    if held is not None and source is not None and (common := intersect(held, mine)) is not None:
        pieces[common] = x.nodes.slice(source, relative(common, held))
    kept = {box: v for box, v in pieces.items() if intersect(box, mine) == box}
    return assembled(x.nodes, mine, kept, step.dst)


def broadcast(x: Exchange, source: Value | None, held: Box | None, box: Box, members: Sequence[int], dtype: str) -> Value:
    """A box from the first of some ranks to the others; those give an array of zeros, which is not read."""
    if source is not None and held is not None:
        given = x.nodes.slice(source, relative(box, held))
    else:
        given = x.nodes.filled(shape(box), 0, dtype)
    return x.collective("BROADCAST", x.nodes.ranked(given, 1), tuple(sorted(members)), root=members[0])


def _gathered(x: Exchange, source: Value, boxes: Sequence[Box | None], group: Group, mine: Box) -> Value:
    """Equal blocks of a group: joined along the one axis that they differ in, or each put where it belongs."""
    present = [b for b in boxes if b is not None]
    apart = [k for k in range(len(mine)) if len({b[k] for b in present}) > 1]
    joined = len(apart) == 1 and [b[apart[0]] for b in present] == sorted(b[apart[0]] for b in present)
    if joined:
        out = x.collective("ALL_GATHER", x.first(source, apart[0]), group)
        return x.first(out, apart[0])
    out = x.collective("ALL_GATHER", source, group)
    n = source.shape[0]
    rest = [(0, m) for m in source.shape[1:]]
    pieces = {b: x.nodes.slice(out, [(k * n, (k + 1) * n), *rest]) for k, b in enumerate(present)}
    return assembled(x.nodes, mine, pieces, "")


def assembled(nodes: Nodes, box: Box, pieces: dict[Box, Value], where: str) -> Value:
    """An array put together of disjoint boxes of it: cut where no box is cut, and so on.

    Raises:
        NotExpressible: there is no such cut.
    """
    pieces = {b: v for b, v in pieces.items() if size(b)}
    if box in pieces:
        v = pieces[box]
        return v if v.shape == shape(box) else nodes.reshape(v, shape(box))
    for axis, (lo, hi) in enumerate(box):
        for at in sorted({b[axis][0] for b in pieces} - {lo}):
            if any(b[axis][0] < at < b[axis][1] for b in pieces):
                continue
            halves: list[Value] = []
            for part in ((lo, at), (at, hi)):
                inner = (*box[:axis], part, *box[axis + 1 :])
                halves.append(assembled(nodes, inner, {b: v for b, v in pieces.items() if intersect(b, inner)}, where))
            return nodes.concat(halves, axis)
    raise NotExpressible("what a transfer brings does not go together", where=f"'{where}'", why=f"{len(pieces)} boxes of {box}")


# merges


def reduced(x: Exchange, step: Reduce, group: Group, monoid: str, states: Sequence[Value | None]) -> list[Value]:
    """The merged fields of one group, on this rank's own boxes."""
    fields = list[Value]()
    for k, (name, v) in enumerate(zip(step.srcs, states, strict=True)):
        known = step.known[k] if step.known else ()
        box = x.program.buffers[name].boxes[x.rank]
        assert box is not None
        if known:
            fields.append(x.nodes.filled(shape(box), known[x.rank], x.program.buffers[name].dtype))
        else:
            assert v is not None
            fields.append(x.nodes.cast(v, step.sent_as) if step.sent_as else v)
    merged = _Merge(x, step, group).merged(MONOIDS[monoid], fields)
    dtypes = [x.program.buffers[n].dtype for n in step.dsts]
    return [x.nodes.cast(v, d) for v, d in zip(merged, dtypes, strict=True)] if step.sent_as else merged


class _Merge(Merge):
    """One group's merge on one rank: fields end in the boxes of the step."""

    def __init__(self, x: Exchange, step: Reduce, group: Group) -> None:
        self.x, self.nodes, self.step, self.group = x, x.nodes, step, group

    def by(self, fn: str, x: Value, at: int, *, whole: bool = False) -> Value:
        """One field merged by a primitive; all of it, or this rank's part."""
        nodes, op = self.nodes, _REDUCE[fn]
        if self.step.known and self.step.known[at]:
            return self._known(x, at, whole)
        dtype, v = x.dtype, nodes.cast(x, "u8") if x.dtype == "bool" else x
        if whole or all(a == b for a, b in self._ends(at)):
            self._pays(at, v)
            out = self.x.collective("ALL_REDUCE", self.nodes.ranked(v, 1), self.group, op=op)
            return nodes.cast(nodes.reshape(out, v.shape), dtype)
        axis = self.axis(at)
        if axis is None:
            return nodes.cast(self._each(v, at, op), dtype)
        out = self.x.collective("REDUCE_SCATTER", self.x.first(v, axis), self.group, op=op)
        return nodes.cast(self.x.first(out, axis), dtype)

    def _known(self, v: Value, field: int, whole: bool) -> Value:
        """A count that everybody knows: the sum of the group's."""
        total = sum(self.step.known[field][d] for d in self.group)
        out = self.x.nodes.filled(v.shape, total, v.dtype)
        return out if whole else self.part(out, field)

    def _each(self, v: Value, field: int, op: str) -> Value:
        """A scatter into unequal parts, or along several axes: a REDUCE for each rank's part."""
        out, n = None, len(self.group)
        again = sum(size(dst) for _, dst in self._ends(field)) - v.size
        if again > 0:
            nbytes = (n - 1) * again * itemsize(v.dtype) / n
            self.x.costs("parts that several ranks want of one merge", nbytes, self.step.dsts[field])
        for d, (src, dst) in zip(self.group, self._ends(field), strict=True):
            mine = self.x.nodes.slice(v, relative(dst, self._ends(field)[self.group.index(self.x.rank)][0]))
            assert intersect(src, dst) == dst
            found = self.x.collective("REDUCE", self.nodes.ranked(mine, 1), self.group, op=op, root=d)
            out = self.x.nodes.reshape(found, mine.shape) if d == self.x.rank else out
        assert out is not None
        return out

    def _pays(self, field: int, v: Value) -> None:
        """An all-reduce where the plan scatters, of what all others are merged by."""
        if any(a != b for a, b in self._ends(field)):
            n, where = len(self.group), self.step.dsts[field]
            self.x.costs("an all-reduce for a reduce-scatter", (n - 1) * v.size * itemsize(v.dtype) / n, where)

    def _ends(self, field: int) -> list[tuple[Box, Box]]:
        """Where the field is before, and where it ends, on each rank of the group."""
        src, dst = (self.x.program.buffers[names[field]].boxes for names in (self.step.srcs, self.step.dsts))
        return [(a, b) for d in self.group if (a := src[d]) is not None and (b := dst[d]) is not None]

    def axis(self, field: int) -> int | None:
        """The axis along which a scatter gives equal parts in the order of the group; None where it does not."""
        ends = self._ends(field)
        first, parts = ends[0][0], [b for _, b in ends]
        if any(a != first for a, _ in ends):
            return None
        for axis in range(len(first)):
            lo, n = first[axis][0], len(parts)
            each, left = divmod(first[axis][1] - lo, n)
            wanted = [(*first[:axis], (lo + k * each, lo + (k + 1) * each), *first[axis + 1 :]) for k in range(n)]
            if not left and each and parts == wanted:
                return axis
        return None

    def part(self, v: Value, at: int) -> Value:
        """This rank's part of a field that it has all of."""
        src, dst = self._ends(at)[self.group.index(self.x.rank)]
        return self.x.nodes.slice(v, relative(dst, src)) if v.shape == shape(src) else v

    def in_order(self, monoid: Monoid, fields: Sequence[Value], at: int, *, whole: bool = False) -> list[Value]:
        """Any monoid: everybody's states, gathered and merged in the order of the group."""
        nodes, n = self.x.nodes, len(self.group)
        gathered: list[Value] = []
        for k, v in enumerate(fields):
            all_of = self.x.collective("ALL_GATHER", nodes.reshape(v, (1, *v.shape)), self.group)
            gathered.append(nodes.transpose(all_of, [*range(1, len(all_of.shape)), 0]))
            sent = v.size * itemsize(v.dtype)
            planned = (2 * (n - 1) * sent) / n if self.step.kind == "all_reduce" else (n - 1) * sent / n
            if (n - 1) * sent > planned:
                self.x.costs(f"merges of '{monoid.name}' in order", (n - 1) * sent - planned, self.step.dsts[at + k])
        rank = len(fields[0].shape)
        done = Merging(nodes, gathered[0].shape, rank).in_order(monoid, gathered)
        return [self._kept(nodes.reshape(v, v.shape[:rank]), at + k, whole) for k, v in enumerate(done)]
