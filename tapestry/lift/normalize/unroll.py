"""Control flow that is known before the run, written out: Loop and Scan of few steps, If on a known condition.

What a body computes then consists of ordinary nodes, which lift like any others; where a number of steps or a condition
depends on the data the node stays, and is opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from tapestry.errors import ModelError
from tapestry.lift.file.protos import (
    SOURCE,
    WHY_NOT,
    attributes,
    is_standard,
    node_name,
    rename_captured,
    replace_nodes,
    set_attributes,
    source_of,
    standard_opset,
    static_shape,
    subgraphs,
)
from tapestry.lift.normalize.trip_count import trip_count

ENDLESS = 1 << 62  # steps: exporters write the greatest number where they mean none
STEPS = 64  # more stay a loop
NODES = 4096  # that one loop may become
GROWTH = 1 << 12  # that all loops of a graph may become together, level by level: loops inside loops multiply
MOST_STEPS = 1 << 16  # of a Loop that is lifted over all of them at once: its states exist after every one
LEVELS = 3  # of loops inside loops that are written out


Types = Mapping[str, TypeProto]
StepTypes = Callable[[NodeProto, Types, Mapping[str, TensorProto], Mapping[str, int]], Sequence[TypeProto] | str]
"""From a Scan, the types and constants of the values around it, and opsets, to the types of what a step gives, if all states of
the Scan are linear recurrences; else to the reason why they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanNode:
    """What a Scan node says, its axes counted from the front of its inputs; those of its results as they are given.

    Attributes:
        first, over: names of the states' first values and of what is scanned.
        steps: how many there are.
    """

    body: GraphProto
    first: tuple[str, ...]
    over: tuple[str, ...]
    axes: tuple[int, ...]
    back: tuple[bool, ...]
    out_axes: tuple[int, ...]
    out_back: tuple[bool, ...]
    steps: int


def read_scan(node: NodeProto, types: Types, version: int) -> ScanNode | str:
    """What a Scan node says; why it cannot be told, where it is of an older kind or has sizes that are not known."""
    if version < 9:
        return "Scan had batches before opset 9"
    given = attributes(node)
    body, scanned = given["body"], int(given["num_scan_inputs"])
    first, over = tuple(node.input[: len(node.input) - scanned]), tuple(node.input[len(node.input) - scanned :])
    shapes = [s for x in over if (s := static_shape(types.get(x)))]
    outs = len(body.output) - len(first)
    if len(shapes) < scanned or len(node.input) != len(body.input) or not over or outs < 0:
        return "the number of steps is not known"
    axes = tuple(a % len(s) for a, s in zip(given.get("scan_input_axes", [0] * scanned), shapes, strict=True))
    lengths: set[int] = {s[a] for s, a in zip(shapes, axes, strict=True)}
    if len(lengths) != 1 or 0 in lengths:
        return "it has no step"
    return ScanNode(
        body=body,
        first=first,
        over=over,
        axes=axes,
        back=tuple(map(bool, given.get("scan_input_directions", [0] * scanned))),
        out_axes=tuple(given.get("scan_output_axes", [0] * outs)),
        out_back=tuple(map(bool, given.get("scan_output_directions", [0] * outs))),
        steps=lengths.pop(),
    )


def unroll(model: ModelProto, types: Types, step_types: StepTypes, *, loops: bool) -> bool:
    """Write out the top-level graph's control flow where it is known, and tell whether any was.

    Args:
        types: of every value of the graph; sizes are bound.
        step_types: tells the loops that are linear recurrences, which stay loops.
        loops: whether Loop and Scan are written out as well; If always is.

    Raises:
        ModelError: a Loop never ends.
    """
    work = _Work(model, types, step_types)
    kinds = {"If": work.branch, **({"Loop": work.loop, "Scan": work.scan} if loops else {})}
    for node in model.graph.node:
        if is_standard(node, "Loop"):
            work.refuse_endless(node)
        write = kinds.get(node.op_type) if is_standard(node) else None
        if write is None or not write(node):
            work.nodes.append(node)
    if not work.changed:
        return False
    replace_nodes(model.graph, work.nodes)
    return True


@dataclass(slots=True)
class _Work:
    """The graph as it is rewritten."""

    model: ModelProto
    types: Types
    step_types: StepTypes
    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    changed: bool = False
    copied: int = 0  # nodes
    mark: str = ""  # in no name of the graph
    known: dict[str, NodeProto | TensorProto] = field(default_factory=dict[str, NodeProto | TensorProto])

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.known = {t.name: t for t in graph.initializer if t.data_location != TensorProto.EXTERNAL}
        self.known |= {n.output[0]: n for n in graph.node if n.op_type == "Constant"}

    @property
    def version(self) -> int:
        return standard_opset(self.model)

    def value(self, name: str) -> np.ndarray | None:
        """A small value that is known."""
        found = self.known.get(name)
        return numpy_helper.to_array(found) if isinstance(found, TensorProto) else _constant(found) if found else None

    def prefix(self, node: NodeProto) -> str:
        """What the names of a node's copies begin with."""
        if not self.mark:
            names = {o for n in self.model.graph.node for o in n.output} | set(self.types)
            self.mark = "~"
            while any(self.mark in n for n in names):
                self.mark += "~"
        return f"{next(o for o in node.output if o)}{self.mark}/"

    def shape(self, name: str) -> list[int] | None:
        """The sizes of a tensor; None where one is not known."""
        return static_shape(self.types.get(name))

    def branch(self, node: NodeProto) -> bool:
        """An If whose condition is known."""
        found = self.value(node.input[0])
        if found is None or found.size != 1:
            return False
        body = attributes(node)["then_branch" if found.reshape(-1)[0] else "else_branch"]
        if not is_movable(body):
            return False
        write = _Copies(self, node, body)
        write.rename(node.output, write.copy("", {}))
        return True

    def refuse_endless(self, node: NodeProto) -> None:
        """A Loop without a number of steps, or with the greatest, must have a condition that can become false."""
        body, steps = attributes(node)["body"], self._steps(node)
        if steps is not None and steps >= ENDLESS and self._true(body, body.output[0].name, body.input[1].name):
            where, why = f"node '{node_name(node)}' (Loop)", "its condition is always true, and no number of steps ends it"
            raise ModelError("a loop that never ends", where=where, why=why, hint="give the Loop a trip count, or a condition")

    def _steps(self, node: NodeProto) -> int | None:
        """The number of steps that a Loop is given, if it is known, and known that it begins."""
        steps = self.value(node.input[0]) if node.input[0] else np.array(ENDLESS)
        start = self.value(node.input[1]) if len(node.input) > 1 and node.input[1] else np.array(True)
        if steps is None or start is None or steps.size != 1 or start.size != 1 or not start.reshape(-1)[0]:
            return None
        return int(steps.reshape(-1)[0])

    def loop(self, node: NodeProto) -> bool:
        """A Loop of known length: (step, condition, carried…) to (condition, carried…, seen…). Its condition stays true, or
        becomes false after a number of steps that no data decide: TensorFlow's loops count so.
        """
        body, count, carried = attributes(node)["body"], self._steps(node), list(node.input[2:])
        if count is None:
            return False
        if not self._true(body, body.output[0].name, body.input[1].name):
            last = trip_count(body, [self.value(n) for n in carried], self.value, count, self.version)
            if last is None:
                return False
            count = last
        if len(body.input) != 2 + len(carried) or not all(self._tensor(n) for n in carried):
            return False
        if 0 < count <= MOST_STEPS and self._as_scan(node, body, count):
            return True
        if not self._fits(body, count):
            return False
        write = _Copies(self, node, body)
        stays = write.constant("condition", np.array(True))
        seen: list[list[str]] = []
        for t in range(count):
            place = write.constant(f"{t}/step", np.array(t, np.int64))
            found = write.copy(f"{t}/", dict(zip((i.name for i in body.input), (place, stays, *carried), strict=True)))
            carried = found[1 : 1 + len(carried)]
            seen.append(found[1 + len(carried) :])
        results = carried + [write.stack(k, [s[k] for s in seen], 0) for k in range(len(seen[0]))]
        write.rename(node.output, results)
        return True

    def scan(self, node: NodeProto) -> bool:
        """A Scan over axes of known length: (carried…, slices…) to (carried…, seen…)."""
        if self.version < 9:
            return False
        if results := self._linear(node):
            return self._typed(node, results)
        scan = read_scan(node, self.types, self.version)
        if isinstance(scan, str) or not self._fits(scan.body, scan.steps):
            return False
        carried = list(scan.first)
        out_axes = [self._from_front(a, o) for a, o in zip(scan.out_axes, node.output[len(carried) :])]
        if None in out_axes or len(out_axes) != len(scan.out_back):
            return False
        write = _Copies(self, node, scan.body)
        seen: list[list[str]] = []
        for t in range(scan.steps):
            places = [scan.steps - 1 - t if back else t for back in scan.back]
            slices = [write.slice(f"{t}/{k}", x, scan.axes[k], places[k]) for k, x in enumerate(scan.over)]
            outs = write.copy(f"{t}/", dict(zip((i.name for i in scan.body.input), (*carried, *slices), strict=True)))
            carried = outs[: len(carried)]
            seen.append(outs[len(carried) :])
        for k, axis in enumerate(out_axes):
            names = [s[k] for s in seen]
            carried.append(write.stack(k, names[::-1] if scan.out_back[k] else names, axis or 0))
        write.rename(node.output, carried)
        return True

    def _as_scan(self, node: NodeProto, body: GraphProto, count: int) -> bool:
        """A Loop whose states are linear recurrences, as a Scan over the numbers of its steps."""
        if self.version < 9:
            return False
        steps = numpy_helper.from_array(np.arange(count, dtype=np.int64), f"{self.prefix(node)}steps")
        inner = deepcopy(body)
        inner.initializer.append(numpy_helper.from_array(np.array(True), body.input[1].name))
        for ios, first in ((inner.input, body.input), (inner.output, body.output)):
            del ios[:]
            ios.extend(first[2:] if first is body.input else first[1:])
        inner.input.append(body.input[0])
        scan = onnx.helper.make_node(
            "Scan", [*node.input[2:], steps.name], node.output, name=node.name, num_scan_inputs=1, body=inner
        )
        scan.metadata_props.extend(node.metadata_props)
        found = self._linear(scan, steps)
        if found is None:
            set_attributes(node, **{WHY_NOT: attributes(scan)[WHY_NOT]})
            return False
        self.model.graph.initializer.append(steps)
        if not self._typed(scan, found):
            self.nodes.append(scan)
        self.changed = True
        return True

    def _linear(self, node: NodeProto, *more: TensorProto) -> Sequence[TypeProto] | None:
        """The types of a step's results, if its states are linear recurrences (`linear_scan`); else a note of why not."""
        known = {n: t for n, v in self.known.items() if (t := v if isinstance(v, TensorProto) else _stored(v))}
        known |= {t.name: t for t in more}
        types = {**self.types, **{t.name: onnx.helper.make_tensor_type_proto(t.data_type, t.dims) for t in more}}
        results = self.step_types(node, types, known, {o.domain: o.version for o in self.model.opset_import})
        if isinstance(results, str):
            set_attributes(node, **{WHY_NOT: results})
            return None
        return results

    def _typed(self, node: NodeProto, results: Sequence[TypeProto]) -> bool:
        """Write the types of a step's results into the body of a Scan that stays, where shape inference did not find them."""
        body = attributes(node)["body"]
        if all(self.shape(o) is not None for o in node.output if o) or all(o.type == t for o, t in zip(body.output, results)):
            return False
        for o, t in zip(body.output, results, strict=True):
            o.type.CopyFrom(t)
        self.nodes.append(node)
        self.changed = True
        return True

    def _from_front(self, axis: int, name: str) -> int | None:
        """An axis of a result, counted from the front; None where its rank is needed for that and not known."""
        shape = self.shape(name)
        return axis if axis >= 0 else axis + len(shape) if shape is not None else None

    def _tensor(self, name: str) -> bool:
        return self.types.get(name, TypeProto()).HasField("tensor_type")

    def _fits(self, body: GraphProto, count: int) -> bool:
        size = count * size_of(body)
        return is_movable(body) and 0 < count <= STEPS and size <= NODES and self.copied + size <= GROWTH

    def _true(self, body: GraphProto, name: str, given: str) -> bool:
        """Whether a value of a body is true in every step if the condition it is given is."""
        if name == given:
            return True
        maker = next((n for n in body.node if name in n.output), None)
        if maker is not None and maker.op_type in ("Identity", "Cast"):
            return self._true(body, maker.input[0], given)
        inside = next((numpy_helper.to_array(t) for t in body.initializer if t.name == name), None)
        found = inside if inside is not None else _constant(maker) if maker is not None else self.value(name)
        return found is not None and found.size == 1 and bool(found.reshape(-1)[0])


@dataclass(slots=True)
class _Copies:
    """Copies of one node's body, under names of their own."""

    work: _Work
    node: NodeProto
    body: GraphProto
    prefix: str = ""

    def __post_init__(self) -> None:
        self.prefix = self.work.prefix(self.node)
        for t in self.body.initializer:
            stored = self.work.model.graph.initializer.add()
            stored.CopyFrom(t)
            stored.name = f"{self.prefix}{t.name}"
        self.work.changed = True

    def copy(self, step: str, given: Mapping[str, str]) -> list[str]:
        """One copy of the body, with what its inputs stand for; the names of its outputs."""
        names = {t.name: f"{self.prefix}{t.name}" for t in self.body.initializer} | dict(given)
        for k, inner in enumerate(self.body.node):
            node = deepcopy(inner)
            del node.input[:]
            node.input.extend(names.get(i, i) for i in inner.input)
            for g in subgraphs(node):
                rename_captured(g, names)
            names |= {o: f"{self.prefix}{step}{o}" for o in inner.output if o}
            del node.output[:]
            node.output.extend(names[o] if o else "" for o in inner.output)
            self._add(node, f"{step}{inner.op_type}_{k}")
        return [names.get(o.name, o.name) for o in self.body.output]

    def constant(self, name: str, value: np.ndarray) -> str:
        """A constant."""
        self.work.model.graph.initializer.append(numpy_helper.from_array(value, f"{self.prefix}{name}"))
        return f"{self.prefix}{name}"

    def slice(self, name: str, x: str, axis: int, place: int) -> str:
        """One position along an axis, without the axis."""
        at, out = self.constant(f"{name}/place", np.array(place, np.int64)), f"{self.prefix}{name}/slice"
        self._add(onnx.helper.make_node("Gather", [x, at], [out], axis=axis), f"{name}/slice")
        return out

    def stack(self, k: int, names: Sequence[str], axis: int) -> str:
        """Values of the same shape side by side, along a new axis."""
        rows = [f"{self.prefix}seen{k}/{t}" for t in range(len(names))]
        old = self.work.version < 13
        at = "" if old else self.constant(f"seen{k}/axis", np.array([axis], np.int64))
        for name, row in zip(names, rows, strict=True):
            one = onnx.helper.make_node("Unsqueeze", [name] if old else [name, at], [row])
            one.attribute.extend([onnx.helper.make_attribute("axes", [axis])] if old else [])
            self._add(one, row)
        out = f"{self.prefix}seen{k}"
        self._add(onnx.helper.make_node("Concat", rows, [out], axis=axis), out)
        return out

    def rename(self, outputs: Sequence[str], found: Sequence[str]) -> None:
        """Give the node's outputs what was found for them."""
        for out, name in zip(outputs, found, strict=True):
            if out:
                self._add(onnx.helper.make_node("Identity", [name], [out]), f"to {out}")

    def _add(self, node: NodeProto, name: str) -> None:
        source = source_of(self.node)
        node.name = f"{source}/{name}"
        del node.metadata_props[:]
        node.metadata_props.add(key=SOURCE, value=source)
        self.work.nodes.append(node)
        self.work.copied += 1


def is_movable(body: GraphProto) -> bool:
    """Whether a body has nothing that cannot be moved out of it: no weights of size, no sparse ones."""
    small = sum(t.ByteSize() for t in body.initializer) + sum(a.t.ByteSize() for n in body.node for a in n.attribute) <= 1 << 16
    return small and not body.sparse_initializer and all(t.data_location != TensorProto.EXTERNAL for t in body.initializer)


def size_of(graph: GraphProto) -> int:
    return sum(1 + sum(size_of(g) for g in subgraphs(n)) for n in graph.node)


def _stored(node: NodeProto) -> TensorProto | None:
    a = node.attribute[0]
    if a.name == "value":
        return a.t
    found = _constant(node)
    return None if found is None else numpy_helper.from_array(found)


def _constant(node: NodeProto) -> np.ndarray | None:
    if node.op_type != "Constant" or len(node.attribute) != 1 or node.attribute[0].name not in ("value", "value_int"):
        return None
    value = onnx.helper.get_attribute_value(node.attribute[0])
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.array(value)
