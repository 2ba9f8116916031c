"""``shardy``: a StableHLO function with the plan's layouts in Shardy's words, for XLA to partition.

The mesh is ``sdy.mesh``, arguments and results have ``sdy.sharding``, and the result of every operation of the plan an
``sdy.sharding_constraint`` (github.com/openxla/shardy, sdy dialect). The function is the graph after every rewrite; its
arguments are the model's inputs and its weights, with their names as locations. Collectives are the partitioner's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from onnx import NodeProto, helper

from tapestry.build.store import Build, new_file
from tapestry.ir.author_names import operation_names
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.kernel import Box, shape
from tapestry.ir.plan import Layout, Mesh
from tapestry.ir.program import Reduce, Transfer, transfer_bytes
from tapestry.tools.exports.layouts import as_partition_spec, places, wrong_in_xla
from tapestry.tools.exports.onnx_files import graph_nodes
from tapestry.tools.exports.onnx_nodes import COLLECTIVE, NotExpressible, live
from tapestry.tools.exports.rank_onnx import RankFile, output_spec, said_boxes
from tapestry.tools.exports.stablehlo_nodes import Call, Direct, Ref, Text, body, bucketed, emitted, tensor_type


def export_shardy(build: Build, target: Path, *, nearest: bool) -> dict[str, Any]:
    """Write the text; returns the names of the function's arguments and results, in order, and what it costs.

    Raises:
        NotExpressible: an operation has no form in StableHLO, or a tensor no layout and the nearest is not asked for.
    """
    graph, mesh = build.plan.graph, build.plan.mesh
    for op, name in zip(graph.ops, operation_names(graph), strict=True):
        if isinstance(op, Opaque):
            raise NotExpressible(f"StableHLO cannot express the opaque node {op.kind}", where=f"'{name}'", hint="onnx-ranks")
    placed = places(build, "shardy", nearest_will_do=nearest)

    def said(t: str, layout: Layout) -> str:
        return _sharding(layout, len(graph.tensors[t].shape), mesh)

    marks, ends = ({t: said(t, layout) for t, layout in some.items()} for some in (placed.first, placed.last))
    copies = {(k, t): f"{t}/{said(t, layout)}" for (k, t), layout in placed.reads.items()}
    nodes, values = graph_nodes(graph, copies)
    kept = live(nodes.nodes, [values[t].name for t in graph.outputs])
    read = {t for op in graph.ops for t in op.inputs} | set(graph.outputs)
    given = [*graph.inputs, *(t for t in graph.weights if t in read)]
    arguments = {
        t: Ref(f"%arg{k}", placed.padded.get(t, graph.tensors[t].shape), graph.tensors[t].dtype) for k, t in enumerate(given)
    }
    text = Text(nodes.constants, nodes.values, dict(arguments))
    for t in (t for t in given if t in placed.padded):
        text.held[t] = text.placed(text.slice(arguments[t], [(0, n, 1) for n in graph.tensors[t].shape]), marks[t])
    shardings = {t: s for t, s in marks.items() if t not in arguments}
    body(text, kept, shardings | {name: said(t, placed.reads[k, t]) for (k, t), name in copies.items()})
    results = {t: text.held[t] for t in graph.outputs}
    for t in graph.outputs:  # one that is cut unevenly is filled up with zeros until its parts are equal
        if placed.padded.get(t, results[t].shape) != results[t].shape:
            results[t] = text.fill_to(text.placed(results[t], ends.get(t, "")), placed.padded[t])
    with new_file(target) as path:
        path.write_text(_module(graph, mesh, text.lines, arguments, results, (marks, ends)))
    planned = sum(transfer_bytes(s, build.program) for s in build.program.steps if isinstance(s, Transfer | Reduce))
    return {
        "file": str(target), "arguments": given, "results": list(graph.outputs),
        "constraints": sum(" sdy.sharding_constraint " in line for line in text.lines), "operations": len(text.lines),
        "plan_bytes": planned, "extra_bytes": sum(placed.extra.values()), "extra": placed.extra, "padded": placed.padded,
        "wrong_in_xla": wrong_in_xla(build, placed.read),
    }  # fmt: skip


def _sharding(layout: Layout, rank: int, mesh: Mesh) -> str:
    """``<@mesh, [{"dp", "tp"}, {}]>``: for each tensor axis the mesh axes that cut it, the major one first."""
    return _axes_of(as_partition_spec(layout, rank, mesh))


def _axes_of(spec: Sequence[Any]) -> str:
    axes = [[] if c is None else [c] if isinstance(c, str) else c for c in spec]
    return f"<@mesh, [{', '.join('{' + ', '.join(map(quoted, names)) + '}' for names in axes)}]>"


def _module(
    graph: Graph, mesh: Mesh, lines: list[str], arguments: dict[str, Ref], results: dict[str, Ref],
    shardings: tuple[dict[str, str], dict[str, str]],
) -> str:  # fmt: skip
    """The whole text; ``shardings`` are those of tensors as they begin and end."""
    marks, ends = shardings
    name, axes = quoted(graph.name or "model"), ", ".join(f"{quoted(a.name)}={a.size}" for a in mesh)
    given = [f"      {v.ssa}: {v.type}{_attribute(marks.get(t))} loc({quoted(t)})" for t, v in arguments.items()]
    ending = ", ".join(x.type + _attribute(ends.get(t)) for t, x in results.items())
    last = f"    return {', '.join(x.ssa for x in results.values())} : {', '.join(x.type for x in results.values())}"
    head = [f"module @{name} {{", f"  sdy.mesh @mesh = <[{axes}]>", "  func.func public @main("]
    return "\n".join([*head, ",\n".join(given), f"  ) -> ({ending}) {{", *lines, last, "  }", "}", ""])


def quoted(name: str) -> str:
    """A string as MLIR writes it: what is no printable ASCII by its bytes (mlir.llvm.org/docs/LangRef, string-literal)."""
    plain = (chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in name.encode())
    return f'"{"".join(plain)}"'


def _attribute(sharding: str | None) -> str:
    return "" if sharding is None else f" {{sdy.sharding = #sdy.sharding{sharding}}}"


# ``shardy-ranks``: StableHLO of what every device does, its collectives written out, in one ``sdy.manual_computation``.
#
# The nodes of `rank_onnx`, cut at the collectives. Between two collectives all devices do the same, or, where boxes or places
# differ, one of the branches of a ``stablehlo.case`` on the device's number; what one piece hands to another is as large as on
# the device that has most of it, and cut down again where it is read. XLA has nothing to choose: what moves is what the plan
# moves.
#
# An argument or result that is an even cut of its tensor is that tensor, with its ``sdy.sharding``. Any other is given in
# *parts*: along a first axis each device's own box, filled up with zeros to the largest.


Boxes = tuple[Box | None, ...]
Key = tuple[Any, ...]
AROUND = 4  # names that a choice between branches takes itself


@dataclass(frozen=True, slots=True)
class End:
    """An argument or a result.

    Attributes:
        spec: for each axis of the tensor the mesh axes that cut it; None where it is given in parts.
        names: what it is called on a device: a buffer, or an input.
    """

    tensor: str
    boxes: Boxes
    spec: list[Any] | None
    names: tuple[str, ...]

    @property
    def most(self) -> tuple[int, ...]:
        """As many cells along each axis as any device has."""
        return tuple(map(max, zip(*(shape(b) for b in self.boxes if b is not None), strict=True)))


@dataclass(slots=True)
class Piece:
    """What comes between two exchanges, and the exchange behind it: for each rank nodes, and collectives."""

    nodes: list[list[NodeProto]]
    exchanges: list[Call] = field(default_factory=list[Call])


@dataclass(frozen=True, slots=True)
class Slot:
    """A value that a piece gives, one for all ranks: the name that it has on each (or none there), and its type."""

    key: Key
    names: tuple[str | None, ...]
    shape: tuple[int, ...]
    dtype: str


def export_shardy_ranks(build: Build, target: Path, *, nearest: bool) -> dict[str, Any]:
    """Write the text; returns the function's arguments and results, in order, and what moves.

    Raises:
        NotExpressible: an operation has no form in StableHLO, or a step no collective.
    """
    ranks = [RankFile(build, rank, nearest, parts=True) for rank in range(build.program.devices)]
    for rank in ranks:
        rank.walk()
    writer = _Writer(build, ranks)
    text = writer.module()
    with new_file(target) as path:
        path.write_text(text)
    extra = {k: round(sum(r.exchange.extra.get(k, 0) for r in ranks)) for k in {k for r in ranks for k in r.exchange.extra}}
    planned = sum(transfer_bytes(s, build.program) for s in build.program.steps if isinstance(s, Transfer | Reduce))

    def told(ends: Sequence[End]) -> list[dict[str, Any]]:
        return [{"tensor": e.tensor, **({} if e.spec is not None else {"parts": e.boxes})} for e in ends]

    return {
        "file": str(target), "ranks": len(ranks), "arguments": told(writer.given), "results": told(writer.ending),
        "collectives": writer.channels, "branches": writer.branches, "operations": len(writer.text.lines),
        "plan_bytes": planned, "extra_bytes": sum(extra.values()), "extra": dict(sorted(extra.items())),
    }  # fmt: skip


class _Writer:
    """The text of one build.

    Attributes:
        at: for each rank the slots of its values, by name; ``last`` is the last piece that reads each.
        held: the slots that there are, by key.
    """

    def __init__(self, build: Build, ranks: list[RankFile]) -> None:
        self.build, self.ranks = build, ranks
        axes = [(a.name, a.size) for a in build.plan.mesh]
        self.axes = axes if prod(n for _, n in axes) == len(ranks) else [("ranks", len(ranks))]
        self.given, self.ending = list(_arguments(build, ranks)), list(_results(build, ranks))
        self.at: list[dict[str, Key]] = [{} for _ in ranks]
        self.at_start: list[dict[str, tuple[int, ...]]] = [{} for _ in ranks]
        self.held: dict[Key, Ref] = {}
        self.last: list[dict[str, int]] = []
        self.text = Text({}, {})
        self.channels = self.branches = 0

    # what is there

    def sizes(self, rank: int, name: str) -> tuple[int, ...]:
        """The shape of a rank's value."""
        given = self.at_start[rank].get(name)
        return given if given is not None else self.ranks[rank].nodes.values[name].shape

    def module(self) -> str:
        """The whole text."""
        self._begin()
        pieces = list(self._pieces())
        self.last = [_last_reads(pieces, rank, self._ends_of(rank)) for rank in range(len(self.ranks))]
        for k, piece in enumerate(pieces):
            exchanges, ranks = piece.exchanges, range(len(self.ranks))
            sent = [tuple(e.operands.get(r) for r in ranks) for e in exchanges]
            slots = [Slot(("sent", k, j), sent[j], e.shape, e.dtype) for j, e in enumerate(exchanges)]
            self._compute(k, pieces, slots)
            for j, e in enumerate(exchanges):
                self.channels += 1
                self.held["got", k, j] = emitted(self.text, e, self.held["sent", k, j], self.channels)
                for rank, name in e.results.items():
                    self.at[rank][name] = "got", k, j
        return "\n".join(self._around())

    def _begin(self) -> None:
        """Arguments as slots, and the device's number."""
        for k, end in enumerate(self.given):
            self.held["given", k] = self._own(Ref(f"%part{k}", self._local(end), self._dtype(end)), end)
            for rank, name, box in ((r, n, b) for r, b in enumerate(end.boxes) for n in end.names if b is not None):
                self.at[rank][name] = "given", k
                self.at_start[rank][name] = shape(box)
        self.number = self.text.reshape(Ref("%ids", (1,), "i32"), ())

    def _own(self, part: Ref, end: End) -> Ref:
        return part if end.spec is not None else self.text.reshape(part, end.most)

    def _dtype(self, end: End) -> str:
        return self.build.plan.graph.tensors[end.tensor].dtype

    def _local(self, end: End) -> tuple[int, ...]:
        """The shape on one device."""
        return end.most if end.spec is not None else (1, *end.most)

    # pieces

    def _pieces(self) -> Iterator[Piece]:
        """Nodes up to the next collectives of any rank, again and again."""
        each = [_by_step(r, self._ends_of(k)) for k, r in enumerate(self.ranks)]
        now = Piece([[] for _ in self.ranks])
        for at in sorted({at for found in each for at in found}):
            calls: list[Call] = []
            for rank, found in enumerate(each):
                nodes, collectives = found.get(at, ([], []))
                now.nodes[rank] += nodes
                calls += [Call.of(n, rank, self.sizes(rank, n.input[0]), self.ranks[rank].nodes.values) for n in collectives]
            if calls:
                direct = Direct([r.nodes for r in self.ranks])
                matched, same = Call.matched(calls)
                now.exchanges = bucketed(matched, direct)
                for rank, node in direct.before:
                    now.nodes[rank].append(node)
                yield now
                now = Piece([[] for _ in self.ranks])
                for rank, out, operand in same:  # the sender has what it sent
                    now.nodes[rank].append(helper.make_node("Identity", [operand], [out]))
                for rank, node in direct.after:
                    now.nodes[rank].append(node)
        yield now

    def _ends_of(self, rank: int) -> list[str]:
        """What a rank's results are called."""
        return [n for end in self.ending if end.boxes[rank] is not None for n in (self._result(rank, end),)]

    def _result(self, rank: int, end: End) -> str:
        r = self.ranks[rank]
        return r.nodes.named(r.values[end.names[0]]).name

    def _compute(self, k: int, pieces: Sequence[Piece], sent: Sequence[Slot]) -> None:
        """A piece: one text for all, or branches."""
        slots = [*self._kept(k, pieces), *sent, *(self._last() if k == len(pieces) - 1 else [])]
        if not slots:
            return
        done = [self._of_rank(rank, pieces[k].nodes[rank], slots) for rank in range(len(self.ranks))]
        kinds = list(dict.fromkeys((tuple(t.lines), tuple(outs)) for t, outs in done))
        if len(kinds) == 1:
            self.text.lines += done[0][0].lines
            self.text.count = done[0][0].count
            self.held |= {s.key: out for s, out in zip(slots, done[0][1], strict=True)}
        else:
            self._branch([kinds.index((tuple(t.lines), tuple(outs))) for t, outs in done], kinds, slots)
        for s in slots:
            for rank, name in enumerate(s.names):
                if name is not None and s.key[0] == "kept":
                    self.at[rank][name] = s.key

    def _kept(self, k: int, pieces: Sequence[Piece]) -> list[Slot]:
        """What later pieces of a rank read of this one."""
        found: dict[Key, dict[int, str]] = {}
        for rank, last in enumerate(self.last):
            for name in (o for n in pieces[k].nodes[rank] for o in n.output if last.get(o, 0) > k):
                dtype = self.ranks[rank].nodes.values[name].dtype
                found.setdefault(("kept", k, name, dtype, len(self.sizes(rank, name))), {})[rank] = name
        return [self._slot(key, [names.get(r) for r in range(len(self.ranks))], key[3]) for key, names in found.items()]

    def _last(self) -> list[Slot]:
        out = list[Slot]()
        for k, end in enumerate(self.ending):
            names = [self._result(rank, end) if b is not None else None for rank, b in enumerate(end.boxes)]
            out.append(self._slot(("end", k), names, self._dtype(end)))
        return out

    def _slot(self, key: Key, names: Sequence[str | None], dtype: str) -> Slot:
        sizes = [self.sizes(r, n) for r, n in enumerate(names) if n is not None]
        return Slot(key, tuple(names), tuple(map(max, zip(*sizes, strict=True))), dtype)

    def _of_rank(self, rank: int, nodes: Sequence[NodeProto], slots: Sequence[Slot]) -> tuple[Text, list[Ref]]:
        """What one rank does, behind what is there."""
        own = self.ranks[rank].nodes
        made = {o for n in nodes for o in n.output}
        wanted = [s.names[rank] for s in slots]
        kept = live(nodes, [n for n in wanted if n is not None])
        read = dict.fromkeys(i for n in kept for i in n.input) | dict.fromkeys(n for n in wanted if n is not None)
        text = Text(own.constants, own.values, {}, [], self.text.count + AROUND)
        for name in (n for n in read if n not in made and n in self.at[rank]):
            text.held[name] = text.slice_to(self.held[self.at[rank][name]], self.sizes(rank, name))
        body(text, kept, {})
        return text, [
            text.spread(text.number(0, s.dtype), s.shape) if n is None else text.fill_to(text.of(n), s.shape)
            for n, s in zip(wanted, slots, strict=True)
        ]

    def _branch(
        self, which: Sequence[int], kinds: Sequence[tuple[tuple[str, ...], tuple[Ref, ...]]], slots: Sequence[Slot]
    ) -> None:
        """One of several texts, by the device's number."""
        text, types = self.text, ", ".join(tensor_type(s.shape, s.dtype) for s in slots)
        at = self.number
        if list(which) != list(range(len(which))):
            table = text.line(f"stablehlo.constant dense<{list(which)}> : tensor<{len(which)}xi32>", [len(which)], "i32")
            slices = f"({table.type}, tensor<i32>) -> tensor<1xi32>"
            one = text.line(f"stablehlo.dynamic_slice {table.ssa}, {at.ssa}, sizes = [1] : {slices}", (1,), "i32")
            at = text.reshape(one, ())
        regions: list[str] = []
        for lines, outs in kinds:
            ending = f"      stablehlo.return {', '.join(o.ssa for o in outs)} : {types}"
            regions.append("\n".join(["{", *(f"  {line}" for line in lines), ending, "    }"]))
        name, n = text.fresh(), len(slots)
        head = name if n == 1 else f"{name}:{n}"
        text.lines.append(f'    {head} = "stablehlo.case"({at.ssa}) ({", ".join(regions)}) : (tensor<i32>) -> ({types})')
        outs = [Ref(name if n == 1 else f"{name}#{k}", s.shape, s.dtype) for k, s in enumerate(slots)]
        self.held |= {s.key: out for s, out in zip(slots, outs, strict=True)}
        self.branches += len(kinds)

    # around it

    def _sharding(self, end: End) -> str:
        return self._spread(len(end.most)) if end.spec is None else _axes_of(end.spec)

    def _spread(self, more: int) -> str:
        """Cut along the first of some axes over all devices."""
        return f"<@mesh, [{', '.join(['{' + self._axes() + '}', *['{}'] * more])}]>"

    def _axes(self) -> str:
        return ", ".join(quoted(name) for name, _ in self.axes)

    def _global(self, end: End) -> str:
        tensor = self.build.plan.graph.tensors[end.tensor]
        return tensor_type(tensor.shape if end.spec is not None else (len(self.ranks), *end.most), tensor.dtype)

    def _around(self) -> Iterator[str]:
        n, graph = len(self.ranks), self.build.plan.graph
        ends = [self._own_part(self.held["end", k], end) for k, end in enumerate(self.ending)]
        given = [f"      %arg{k}: {self._global(e)} {{sdy.sharding = #sdy.sharding{self._sharding(e)}}} loc({quoted(e.tensor)})"
                 for k, e in enumerate(self.given)]  # fmt: skip
        results = ", ".join(f"{self._global(e)} {{sdy.sharding = #sdy.sharding{self._sharding(e)}}}" for e in self.ending)
        yield f"module @{quoted(graph.name or 'model')} {{"
        yield f"  sdy.mesh @mesh = <[{', '.join(f'{quoted(a)}={size}' for a, size in self.axes)}]>"
        yield "  func.func public @main("
        yield ",\n".join(given)
        yield f"  ) -> ({results}) {{"
        yield f"    %numbers = stablehlo.iota dim = 0 : tensor<{n}xi32>"
        shardings = ", ".join([*map(self._sharding, self.given), self._spread(0)])
        parts = ", ".join([*(f"%part{k}: {tensor_type(self._local(e), self._dtype(e))}" for k, e in enumerate(self.given)),
                           "%ids: tensor<1xi32>"])  # fmt: skip
        named = ", ".join([*(f"%arg{k}" for k in range(len(self.given))), "%numbers"])
        count = "" if len(ends) == 1 else f":{len(ends)}"
        yield f"    %done{count} = sdy.manual_computation({named})"
        yield f"        in_shardings=[{shardings}] out_shardings=[{', '.join(map(self._sharding, self.ending))}]"
        yield f"        manual_axes={{{self._axes()}}} ({parts}) {{"
        yield from self.text.lines
        yield f"    sdy.return {', '.join(e.ssa for e in ends)} : {', '.join(e.type for e in ends)}"
        types = ", ".join([*map(self._global, self.given), f"tensor<{n}xi32>"])
        last = ", ".join(map(self._global, self.ending))
        yield f"    }} : ({types}) -> ({last})"
        names = ["%done"] if len(ends) == 1 else [f"%done#{k}" for k in range(len(ends))]
        yield f"    return {', '.join(names)} : {last}"
        yield from ("  }", "}", "")

    def _own_part(self, x: Ref, end: End) -> Ref:
        return self.text.reshape(x, self._local(end))


def _last_reads(pieces: Sequence[Piece], rank: int, results: Sequence[str]) -> dict[str, int]:
    """The last piece of a rank that reads each value; the exchange behind a piece reads before the next does."""
    out: dict[str, int] = {}
    for k, piece in enumerate(pieces):
        out |= dict.fromkeys((e.operands[rank] for e in piece.exchanges if rank in e.operands), k)
        out |= dict.fromkeys((i for n in piece.nodes[rank] for i in n.input), k)
    return out | dict.fromkeys(results, len(pieces) - 1)


def _by_step(rank: RankFile, results: Sequence[str]) -> dict[tuple[int, int], tuple[list[NodeProto], list[NodeProto]]]:
    """A rank's nodes and its collectives, by the step that they are of and how many collectives of it are before them."""
    kept = {id(n) for n in live(rank.nodes.nodes, results)}
    out: dict[tuple[int, int], tuple[list[NodeProto], list[NodeProto]]] = {}
    for step, (first, last) in enumerate(zip([0, *rank.marks], [*rank.marks, len(rank.nodes.nodes)], strict=True)):
        behind: dict[str, int] = {}
        for node in rank.nodes.nodes[first:last]:
            if id(node) not in kept:
                continue
            depth, collective = max((behind.get(i, 0) for i in node.input), default=0), node.op_type == COLLECTIVE
            behind |= dict.fromkeys(node.output, depth + collective)
            out.setdefault((step, depth), ([], []))[collective].append(node)
    return out


def _arguments(build: Build, ranks: Sequence[RankFile]) -> Iterator[End]:
    """Inputs, and every part of a weight that is loaded."""
    graph = build.plan.graph
    places = ranks[0].places
    for t in (t for t in graph.inputs if any(t in r.inputs for r in ranks)):
        yield End(t, places[t].boxes, places[t].spec if places[t].said else None, (t,))
    names: dict[tuple[str, Boxes], list[str]] = {}
    for name in dict.fromkeys(n for r in ranks for n in r.weights):
        b = build.program.buffers[name]
        names.setdefault((b.tensor, b.boxes), []).append(name)
    for (t, boxes), buffers in names.items():
        yield End(t, boxes, said_boxes(build, boxes, graph.tensors[t].shape), tuple(buffers))


def _results(build: Build, ranks: Sequence[RankFile]) -> Iterator[End]:
    for t, name in build.program.outputs.items():
        boxes = tuple(b if name in r.values else None for b, r in zip(build.program.buffers[name].boxes, ranks, strict=True))
        yield End(t, boxes, None if None in boxes else output_spec(build, t), (name,))
