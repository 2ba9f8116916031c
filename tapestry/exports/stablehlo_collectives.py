"""The collectives of all ranks, matched with each other, as operations of StableHLO that every device takes part in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnx import NodeProto, helper

from tapestry.exports.onnx_blocks.onnx_nodes import Nodes, Value
from tapestry.exports.stablehlo_nodes import Ref, Text, tensor_type
from tapestry.ir.types import FLOATS

_NODE = {"SUM": "Add", "PROD": "Mul", "MAX": "Max", "MIN": "Min"}
_BODY = {"SUM": "add", "PROD": "multiply", "MAX": "maximum", "MIN": "minimum"}


@dataclass(frozen=True, slots=True)
class Message:
    """A box from one rank to another."""

    source: int
    target: int
    operand: str
    result: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Call:
    """A collective of a group: on one rank (as it is read), or, matched, on all of them."""

    kind: str
    op: str
    root: int
    group: tuple[int, ...]
    operands: dict[int, str]
    results: dict[int, str]
    shape: tuple[int, ...]
    ending: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, node: NodeProto, rank: int, shape: tuple[int, ...], values: Mapping[str, Value]) -> Call:
        """A node of a rank."""
        a: dict[str, Any] = {x.name: helper.get_attribute_value(x) for x in node.attribute}
        (x,), (y,) = node.input, node.output
        kind, op = (a[k].decode() for k in ("collective_operation", "reduce_op"))
        out = values[y]
        return cls(kind, op, a["root"], tuple(a["groups"]), {rank: x}, {rank: y}, shape, out.shape, out.dtype)

    @staticmethod
    def matched(calls: Sequence[Call]) -> tuple[list[Call | Message], list[tuple[int, str, str]]]:
        """Calls of all ranks as one for each group, broadcasts as messages; and what senders have themselves: the rank, and the
        names of the result and of what it gave."""
        found: dict[tuple[Any, ...], Call] = {}
        seen: Counter[tuple[Any, ...]] = Counter()
        for c in calls:
            ((rank, _),) = c.operands.items()
            own = (c.kind, c.op, c.root, c.group, rank)
            key = (*own[:-1], seen[own])
            seen[own] += 1
            first = found.setdefault(key, c)
            if first is not c:
                assert first.shape == c.shape and first.dtype == c.dtype, f"ranks disagree on {c}"
                first.operands.update(c.operands)
                first.results.update(c.results)
        out: list[Call | Message] = []
        same: list[tuple[int, str, str]] = []
        for c in found.values():
            assert set(c.operands) == set(c.group), f"not all ranks take part in {c}"
            if c.kind != "BROADCAST":
                out.append(c)
                continue
            out += [Message(c.root, d, c.operands[c.root], c.results[d], c.shape, c.dtype) for d in c.group if d != c.root]
            same.append((c.root, c.results[c.root], c.operands[c.root]))
        return out, same


@dataclass(slots=True)
class Direct:
    """A collective as messages: what ranks compute before them, and behind.

    A reduction to one rank is everybody's part sent there and merged in the order of the group; a scatter is one for each rank.
    As many bytes as the collective's.
    """

    ranks: Sequence[Nodes]
    before: list[tuple[int, NodeProto]] = field(default_factory=list[tuple[int, NodeProto]])
    after: list[tuple[int, NodeProto]] = field(default_factory=list[tuple[int, NodeProto]])

    def messages(self, c: Call) -> list[Message]:
        """Of one call."""
        if c.kind == "REDUCE":
            return self._merged(c, c.root, c.operands, c.shape)
        if c.kind == "REDUCE_SCATTER":
            out = list[Message]()
            n = c.ending[0]
            for k, root in enumerate(c.group):
                mine = {d: self._sliced(d, c.operands[d], k * n, (k + 1) * n, c) for d in c.group}
                out += self._merged(c, root, mine, c.ending)
            return out
        out = list[Message]()
        for root in c.group:
            parts = {d: self._value(root, f"{c.results[root]}/from {d}", c.shape, c.dtype) for d in c.group if d != root}
            out += [Message(d, root, c.operands[d], name, c.shape, c.dtype) for d, name in parts.items()]
            names = [c.operands[d] if d == root else parts[d] for d in c.group]
            self.after.append((root, helper.make_node("Concat", names, [c.results[root]], axis=0)))
        return out

    def _value(self, rank: int, base: str, shape: Sequence[int], dtype: str) -> str:
        nodes = self.ranks[rank]
        name = nodes.fresh(base)
        nodes.values[name] = Value(name, tuple(shape), dtype)
        return name

    def _sliced(self, rank: int, name: str, lo: int, hi: int, c: Call) -> str:
        out = self._value(rank, f"{name}/{lo}", c.ending, c.dtype)
        where = [self.ranks[rank].numbers([n]).name for n in (lo, hi, 0, 1)]
        self.before.append((rank, helper.make_node("Slice", [name, *where], [out])))
        return out

    def _merged(self, c: Call, root: int, operands: Mapping[int, str], shape: tuple[int, ...]) -> list[Message]:
        out = list[Message]()
        so_far = ""
        for d in c.group:
            name = operands[d]
            if d != root:
                name = self._value(root, f"{c.results[root]}/from {d}", shape, c.dtype)
                out.append(Message(d, root, operands[d], name, shape, c.dtype))
            if so_far:
                last = d == c.group[-1]
                both = c.results[root] if last else self._value(root, f"{c.results[root]}/to {d}", shape, c.dtype)
                self.after.append((root, helper.make_node(_NODE[c.op], [so_far, name], [both])))
                name = both
            so_far = name
        return out


@dataclass(frozen=True, slots=True)
class Exchange:
    """One operation of the text.

    Attributes:
        operands, results: names on each rank.
    """

    kind: str
    op: str
    groups: list[list[int]]
    operands: tuple[str | None, ...]
    results: tuple[str | None, ...]
    shape: tuple[int, ...]
    ending: tuple[int, ...]
    dtype: str


def bucketed(calls: Sequence[Call | Message], direct: Direct) -> list[Exchange]:
    """Calls that one operation can do together: messages of one shape, no rank twice a sender or a receiver; groups apart.

    XLA has no reduction to one rank, and gathers and scatters of all ranks in groups of one size only: the others are messages.
    """
    ranks = len(direct.ranks)
    sent: list[Call | Message] = []
    for pack in _packed([c for c in calls if isinstance(c, Call)]):
        for c in (c for c in pack if isinstance(c, Call)):
            sent += [c] if _covers(pack, ranks) else direct.messages(c)
    return [_exchange(p, ranks) for p in _packed([*(c for c in calls if isinstance(c, Message)), *sent])]


def _packed(calls: Sequence[Call | Message]) -> list[list[Call | Message]]:
    packs: list[list[Call | Message]] = []
    for c in calls:
        pack = next((p for p in packs if all(_together(c, other) for other in p)), None)
        if pack is None:
            packs.append([c])
        else:
            pack.append(c)
    return packs


def _covers(pack: Sequence[Call | Message], ranks: int) -> bool:
    groups = [c.group for c in pack if isinstance(c, Call)]
    kinds = {c.kind for c in pack if isinstance(c, Call)}
    even = sum(map(len, groups)) == ranks and len(set(map(len, groups))) == 1
    return kinds == {"ALL_REDUCE"} or ("REDUCE" not in kinds and even)


def _together(a: Call | Message, b: Call | Message) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if isinstance(a, Message) or isinstance(b, Message):
        return isinstance(a, Message) and isinstance(b, Message) and a.source != b.source and a.target != b.target
    return a.kind == b.kind and a.op == b.op and set(a.group).isdisjoint(b.group)


def _exchange(pack: Sequence[Call | Message], ranks: int) -> Exchange:
    first = pack[0]
    if isinstance(first, Message):
        messages = [m for m in pack if isinstance(m, Message)]
        gives, gets = {m.source: m.operand for m in messages}, {m.target: m.result for m in messages}
        pairs = [[m.source, m.target] for m in messages]
        return Exchange("PERMUTE", "", pairs, _all(gives, ranks), _all(gets, ranks), first.shape, first.shape, first.dtype)
    done = [c for c in pack if isinstance(c, Call)]
    gives, gets = {r: n for c in done for r, n in c.operands.items()}, {r: n for c in done for r, n in c.results.items()}
    groups = [list(c.group) for c in done]
    if first.kind == "ALL_REDUCE":
        groups += [[r] for r in range(ranks) if r not in gives]
    return Exchange(first.kind, first.op, groups, _all(gives, ranks), _all(gets, ranks), first.shape, first.ending, first.dtype)


def _all(names: Mapping[int, str], ranks: int) -> tuple[str | None, ...]:
    return tuple(names.get(r) for r in range(ranks))


def emitted(text: Text, e: Exchange, x: Ref, channel: int) -> Ref:
    """The operation; the greatest or least of floats is that of `Text.ranked`, since XLA's all-reduce on CPUs loses a NaN."""
    if e.op in ("MAX", "MIN") and e.dtype in FLOATS:
        ranks = text.ranked(x, last=e.op == "MAX")
        return text.of_ranks(_emitted(text, replace(e, dtype=ranks.dtype), ranks, channel), e.dtype)
    return _emitted(text, e, x, channel)


def _emitted(text: Text, e: Exchange, x: Ref, channel: int) -> Ref:
    handle = f"channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 1>"
    types = f"({x.type}) -> {tensor_type(e.ending, e.dtype)}"
    if e.kind == "PERMUTE":
        how = f"{handle}, source_target_pairs = dense<{e.groups}> : tensor<{len(e.groups)}x2xi64>"
        return text.line(f'"stablehlo.collective_permute"({x.ssa}) <{{{how}}}> : {types}', e.ending, e.dtype)
    most = max(map(len, e.groups))
    rows = [[*g, *[-1] * (most - len(g))] for g in e.groups]
    how = f"{handle}, replica_groups = dense<{rows}> : tensor<{len(rows)}x{most}xi64>, use_global_device_ids"
    if e.kind == "ALL_GATHER":
        return text.line(f'"stablehlo.all_gather"({x.ssa}) <{{all_gather_dim = 0 : i64, {how}}}> : {types}', e.ending, e.dtype)
    name, more = ("all_reduce", "") if e.kind == "ALL_REDUCE" else ("reduce_scatter", "scatter_dimension = 0 : i64, ")
    one, two, three, cell = text.fresh(), text.fresh(), text.fresh(), tensor_type((), e.dtype)
    region = (
        f"^bb0({one}: {cell}, {two}: {cell}): {three} = stablehlo.{_BODY[e.op]} {one}, {two} : {cell} "
        f"stablehlo.return {three} : {cell}"
    )
    return text.line(f'"stablehlo.{name}"({x.ssa}) <{{{more}{how}}}> ({{ {region} }}) : {types}', e.ending, e.dtype)
