"""State that stays on the devices between the steps of a session: caches of keys and values, which a step reads and appends to.

A cache is an input (its past) and an output (its present) of a model, where the present is the past with the step's own cells
behind it. A build has caches of a fixed capacity: the past is as long as may ever be needed, cells that are not filled yet are
excluded by the model's own mask, and positions are given. Two facts make that right, and both are asked of the model:

- present = concat(past, new) along one axis: read off the model's graph;
- a past with empty places, masked, gives what a past without them gives: no graph says that, so the model is run both ways by
  onnxruntime, at two fills. That is a measurement, not a proof, and the build says so.

Rows of a batch may be filled differently where a row gives the same among others of another fill: measured as well (``rows``).
"""

# pyright: basic
# onnx comes without complete types
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx

from tapestry.build.store import Cache
from tapestry.errors import BuildError, ModelError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.types import Tensor, numpy_dtype
from tapestry.runtime.feeds import random_feeds
from tapestry.verify import interp

AUTO = "auto"
MASK, POSITIONS = "attention_mask", "position_ids"  # as exporters of transformers and optimum name them
ROWS = "rows"  # what is measured of rows of different fills
TOLERANCE = 1e-4  # relative: masked cells weigh exactly nothing, what is left is the order of sums
UNLIKE = 1e9  # of results that have no distance
Array = np.ndarray[Any, Any]


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a build keeps: its caches, the input that masks them, and by how much empty places changed results at which fill.

    ``rows`` is not a fill: there, rows of several were in one batch.
    """

    caches: tuple[Cache, ...]
    mask: str
    measured: dict[str, float]

    @property
    def capacity(self) -> int:
        """Cells along the axis that grows."""
        return self.caches[0].capacity

    @property
    def new(self) -> int:
        """How many a step appends."""
        return self.caches[0].new

    @property
    def apart(self) -> str:
        """Why rows cannot be filled differently; nothing where they can."""
        if ROWS not in self.measured:
            return "the rows of a batch are not the first axis of every cache, or of less than three cells"
        found = self.measured[ROWS]
        return "" if found <= TOLERANCE else f"a row changes by {found:.2g} of its size with the past of another one"


def established(asked: str, model: Path, graph: Graph) -> State:
    """The state of a build, after holding it to the model.

    Args:
        asked: ``auto``, or pairs ``past=present,…``.

    Raises:
        TapestryError: a pair is no cache, or the model's mask cannot express empty places; and why.
    """
    pairs = _paired(graph) if asked == AUTO else _asked(asked, graph)
    caches = tuple(appended(model, graph, pairs))
    if len({(c.capacity, c.new) for c in caches}) > 1:
        raise TapestryError("the caches have different sizes", where="--state", why=f"{caches[0]}, {caches[-1]}")
    return State(caches, _mask(graph, caches[0]), _masked(model, graph, caches))


def read_state(report: Mapping[str, Any], graph: Graph) -> State | None:
    """What a build's report says of its state; ``None`` where it keeps none.

    Raises:
        BuildError: it contradicts the build's graph.
    """
    if "state" not in report:
        return None
    try:
        state = msgspec.convert(report["state"], State)
        shapes = [(graph.tensors[c.past], graph.tensors[c.present], c) for c in state.caches]
        good = shapes and all(_fits(past, present, c) and c.past in graph.inputs for past, present, c in shapes)
    except (msgspec.MsgspecError, KeyError) as e:
        raise BuildError(f"the build's state does not read: {e}") from None
    if not good or len({(c.capacity, c.new) for c in state.caches}) > 1 or state.mask not in graph.inputs:
        raise BuildError("the build's state is not that of its graph")
    return state


def _fits(past: Tensor, present: Tensor, c: Cache) -> bool:
    """Whether the shapes are those of a cache."""
    if not 0 <= c.axis < len(past.shape) or past.dtype != present.dtype or past.on_host:
        return False
    grown = list(past.shape)
    grown[c.axis] += c.new
    return past.shape[c.axis] == c.capacity and tuple(grown) == present.shape and c.new > 0


def _paired(graph: Graph) -> list[tuple[str, str]]:
    """Inputs and outputs whose names pair as exporters of transformers and optimum write them."""
    found: list[tuple[str, str]] = []
    for name in graph.inputs:
        names = [name.replace(a, "present", 1) for a in ("past_key_values", "past") if a in name]
        present = next((p for p in names if p in graph.outputs), None)
        found += [(name, present)] if present else []
    if not found:
        raise TapestryError(
            "no input and output pair as a cache's do", where="--state", why=f"the inputs are {', '.join(graph.inputs)}"[:500],
            hint="--state PAST=PRESENT,…",
        )  # fmt: skip
    return found


def _asked(text: str, graph: Graph) -> list[tuple[str, str]]:
    """``past=present,…``."""
    out: list[tuple[str, str]] = []
    for item in text.split(","):
        past, eq, present = item.partition("=")
        if not eq or past not in graph.inputs or present not in graph.outputs:
            what = f"'{item}' is not input=output"
            raise TapestryError(
                what, where="--state", hint=f"inputs {', '.join(graph.inputs)}; outputs {', '.join(graph.outputs)}"
            )
        out.append((past, present))
    return out


def appended(model: Path, graph: Graph, pairs: Sequence[tuple[str, str]]) -> list[Cache]:
    """The caches, each shown to be ``present = concat(past, new)`` by the model's own node.

    Raises:
        TapestryError: a present is made in another way.
    """
    proto = onnx.load(model, load_external_data=False)
    maker = {o: n for n in proto.graph.node for o in n.output}

    def source(name: str) -> str:
        while name in maker and maker[name].op_type == "Identity" and not maker[name].domain:
            name = maker[name].input[0]
        return name

    out: list[Cache] = []
    for past, present in pairs:
        node = maker.get(source(present))
        plain = node is not None and node.op_type == "Concat" and not node.domain and len(node.input) == 2
        if node is None or not plain or source(node.input[0]) != past:
            made = "an input" if node is None else f"{node.op_type}({', '.join(node.input)})"
            raise TapestryError(
                f"'{present}' is not '{past}' with new cells behind it", where=f"node '{node.name if node else present}'",
                why=f"it is {made}, not Concat({past}, new)", hint="a model whose caches grow by Concat",
            )  # fmt: skip
        axis, before, after = next(a.i for a in node.attribute if a.name == "axis"), graph.tensors[past], graph.tensors[present]
        axis %= len(before.shape)
        cache = Cache(past, present, axis, before.shape[axis], after.shape[axis] - before.shape[axis])
        if not _fits(before, after, cache):
            raise TapestryError(
                f"'{past}' has no place for what is new", where="--state", why=f"{before.shape} to {after.shape}"
            )
        out.append(cache)
    return out


def _mask(graph: Graph, cache: Cache) -> str:
    """The input that says which cells count: one number per row and cell of the past and the step."""
    t, total = graph.tensors[MASK] if MASK in graph.inputs else None, cache.capacity + cache.new
    if t is None or t.on_host or len(t.shape) != 2 or t.shape[1] != total or np.issubdtype(numpy_dtype(t.dtype), np.inexact):
        there = f"it is {t.dtype}{list(t.shape)}" if t else "there is none"
        raise TapestryError(
            "a cache with empty places needs a mask", where="--state",
            why=f"'{MASK}' is to be integers or booleans [batch, {total}]: {there}",
            hint=f"an export with {MASK} over past and new tokens; --shape for its size",
        )  # fmt: skip
    return MASK


def _masked(model: Path, graph: Graph, caches: Sequence[Cache]) -> dict[str, float]:
    """How far results with empty places are from those without, by fill.

    Raises:
        TapestryError: too far, or the model does not run with a shorter past.
    """
    out: dict[str, float] = {}
    pairs: list[tuple[int, dict[str, Array], Mapping[str, Array]]] = []
    for fill in sorted({1, caches[0].capacity - 1} - {0, caches[0].capacity}):
        short, full = _both(graph, caches, fill)
        try:
            expected, found = (interp.reference(model, f)[1] for f in (short, full))
        except ModelError as e:
            why = f"with a past of {fill} cells: {e.what}"
            raise TapestryError("the model does not run with a shorter past", where="--state", why=why[:1000]) from None
        pairs.append((fill, full, expected))
        worst, name = max((_apart(expected[n], found[n], n, caches, fill), n) for n in graph.outputs)
        out[str(fill)] = worst
        if not worst <= TOLERANCE:
            raise TapestryError(
                f"empty places in the caches change '{name}'", where="--state",
                why=f"by {worst:.2g} of its size with {fill} of {caches[0].capacity} cells filled: the model takes positions "
                "or masks from the length of its past, or its mask does not reach every layer",
                hint=f"an export with {POSITIONS} and {MASK} as inputs",
            )  # fmt: skip
    batch = graph.tensors[MASK].shape[0]
    if len(pairs) > 1 and batch > 1 and all(c.axis and graph.tensors[c.past].shape[0] == batch for c in caches):
        out[ROWS] = _by_row(model, graph, caches, pairs, batch)
    return out


def _by_row(
    model: Path, graph: Graph, caches: Sequence[Cache], pairs: Sequence[tuple[int, dict[str, Array], Mapping[str, Array]]],
    batch: int,
) -> float:  # fmt: skip
    """How far rows are from what they are among rows of their own fill, where their neighbours have another one."""
    mixed = {n: a.copy() for n, a in pairs[0][1].items()}
    for n, a in pairs[1][1].items():
        if a.shape[:1] == (batch,):
            mixed[n][1::2] = a[1::2]
    found = interp.reference(model, mixed)[1]
    outs = [n for n in graph.outputs if graph.tensors[n].shape[:1] == (batch,)]
    apart = [
        _apart(expected[n][r : r + 1], found[n][r : r + 1], n, caches, fill)
        for r in range(batch) for fill, _, expected in [pairs[r % 2]] for n in outs
    ]  # fmt: skip
    return float(np.nan_to_num(apart, nan=UNLIKE, posinf=UNLIKE).max())


def _both(graph: Graph, caches: Sequence[Cache], fill: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """The same step, on a past of so many cells, and on one of full capacity where the others are masked rubbish."""
    full = random_feeds(graph, 0)
    capacity, new = caches[0].capacity, caches[0].new
    if POSITIONS in full:
        shape = graph.tensors[POSITIONS].shape
        full[POSITIONS] = np.broadcast_to(fill + np.arange(shape[-1]), shape).astype(full[POSITIONS].dtype)
    mask = np.ones_like(full[MASK])
    mask[:, fill:capacity] = 0
    full[MASK] = mask
    short = dict(full)
    for c in caches:
        full[c.past] = full[c.past].copy()
        filled = [slice(None)] * full[c.past].ndim
        filled[c.axis] = slice(0, fill)
        short[c.past] = np.ascontiguousarray(full[c.past][tuple(filled)])
        filled[c.axis] = slice(fill, None)
        full[c.past][tuple(filled)] *= 100  # rubbish that would be seen
    short[MASK] = np.ones((mask.shape[0], fill + new), mask.dtype)
    return short, full


def _apart(a: Array, b: Array, name: str, caches: Sequence[Cache], fill: int) -> float:
    """Relative distance of an output; of a present, of what is new in it."""
    cache = next((c for c in caches if c.present == name), None)
    if cache is not None:
        a, b = (np.take(x, range(n, n + cache.new), cache.axis) for x, n in ((a, fill), (b, cache.capacity)))
    if a.shape != b.shape:
        return float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-30))
