"""Bytes, seconds, splits and steps as a person reads them."""

from __future__ import annotations

import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tapestry.build.store import Build
from tapestry.errors import some
from tapestry.ir.author_names import operation_names, parts
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.index import dims_of
from tapestry.ir.plan import Mesh, Plan, Strategy
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Step, Transfer
from tapestry.ir.recognise import NONE, exponential, input_axes, only_sums
from tapestry.ir.syntax.printer import signature
from tapestry.plan.topology.fabric import BUSY, doubtful
from tapestry.rewrites.core.rule import Refusal

WIDTH = 80


def wrapped(line: str, indent: str = "    ") -> list[str]:
    """A line as lines of at most 80 columns; words longer than a line are cut."""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False) or [""]


def evidence_text(row: Mapping[str, Any], *, every: bool = False) -> str:
    """What was compared with what, in a sentence or two; ``every``: with all counts of the certificate."""
    if p := row.get("plugin"):
        return f"  plug-in '{p['name']}' of {p['package']} {p['version']}: {row['what']} against {row['against']}"
    n = Counter[str](row["counts"])
    counts = ", ".join(f"{k:,} {what}" for what, k in n.items() if k)
    if row["kind"] == "none":
        return "\n".join(wrapped(f"  Graph and model file: {row['why']}. Compared: {counts or 'nothing'}."))
    cells = n["cells"] + n["awkward cells"] + n["cells on awkward operands"] + n["cells on scaled operands"]
    of = f"{some(n['operations'], 'operation')}, {some(n['weights'], 'weight')}. {some(cells, 'cell')} compared; on"
    text = f"  Graph matches the model file ({row['against'].rpartition('by ')[2]}): {of} "
    text += f"{n['references differ'] + n['cells where evaluators differ']} of them two references disagree. NaN, infinities "
    text += f"and extremes tried on {some(n['on awkward operands'], 'operation')}. "
    text += f"Weights: {row['weights']}. " if "weights" in row else ""
    return "\n".join(wrapped(text + (f"Counts: {counts}; {row['power']}." if every else "-v lists all counts.")))


def kernels_text(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """By what kernels were shown to be their operations, and those of which it was not the strongest way."""
    counts = Counter((r["value"], r["addresses"]) for r in rows)
    lines = [f"  {some(n, 'kernel')}: value by {by}, addresses by {at}" for (by, at), n in counts.most_common()]
    return lines + [f"    {r['kernel']}: {r['value']}: {r['why']}" for r in rows if r["why"]]


def human(n: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < (1024 if unit == "B" else 1000) or unit == "GiB":
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.2f} {unit}"
        n /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """``12.3 µs``, ``4.56 ms``, ``7.89 s``: three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if abs(seconds) >= scale * 0.9995:
            value = seconds / scale
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    return "0 s"


def figures_text(topology: Mapping[str, Any], devices: int) -> list[str]:
    """How old and how sure measured figures are, and how to make others where that is worth while."""
    f: Mapping[str, float] = topology.get("figures", {})
    if not f:
        return []
    age = max(0, int(time.time() - f["when"]))
    n, unit = next(((age // s, unit) for s, unit in ((86400, "day"), (3600, "hour"), (60, "minute")) if age >= s), (0, ""))
    ago = f"{n} {unit}{'s' * (n > 1)} ago" if n else "just now"
    rounds = f"two rounds within {f['agreement']:.0%}" if "agreement" in f else "in one round"
    busy = f", while other work took {f['others']:.0%} of the cores" if f["others"] > BUSY else ""
    again = f"; again: tapestry calibrate --auto --processes {devices}" if doubtful(f) and topology["name"] == "auto" else ""
    return [f"measured {ago}, {rounds}{busy}{again}"]


def times(ratio: float) -> str:
    """``0.57``, ``4.3``, ``126``: two digits, and three near 1."""
    return f"{ratio:,.0f}" if ratio >= 99.5 else f"{ratio:.{3 if 0.95 <= ratio < 1.05 else 2}g}"


def count(n: float) -> str:
    """A number of FLOPs with a prefix behind it: ``1.07 G``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} "


def signed(seconds: float) -> str:
    """A duration that always has a sign."""
    return ("+" if seconds >= 0 else "−") + duration(abs(seconds))


def shape_text(extents: tuple[int, ...]) -> str:
    """``4×8`` or ``()``."""
    return "×".join(map(str, extents)) or "()"


def split_text(op: Op, s: Strategy, mesh: Mesh) -> str:
    """``h/8@d0+d1, m/4@d2 (reduce_scatter to o)`` as ``--pin`` writes it, with what becomes of partial results."""
    reduced = {d.name for d in op.reduce} if isinstance(op, Block) else set[str]()
    axes: dict[tuple[str, str], list[int]] = {}
    for a, (d, out) in enumerate(zip(s.dims, s.out, strict=True)):
        if d is not None:
            ends = "" if d not in reduced else " (all_reduce)" if out is None else f" (reduce_scatter to {op.dims[out].name})"
            axes.setdefault((d, ends), []).append(a)
    splits: list[str] = []
    for (d, ends), cut_by in axes.items():
        parts = 1
        for a in cut_by:
            parts *= mesh[a].size
        splits.append(f"{d}/{parts}@{'+'.join(mesh[a].name for a in cut_by)}{ends}")
    splits += [f"{d}/{mesh[a].size} round {mesh[a].name}" for a, d in enumerate(s.ring) if d is not None]
    return ", ".join(splits) or "none"


def split_words(op: Op, s: Strategy, mesh: Mesh) -> str:
    """What every device does of an operation, in words."""
    reduced = {d.name for d in op.reduce} if isinstance(op, Block) else set[str]()
    own = dict.fromkeys(f"'{d}'" for d in s.dims if d is not None and d not in reduced)
    partial = dict.fromkeys(
        (f"'{d}'", "an all_reduce completes" if o is None else f"a reduce_scatter along '{op.dims[o].name}' completes")
        for d, o in zip(s.dims, s.out, strict=True) if d in reduced
    )  # fmt: skip
    words = [f"computes its own part of {' and '.join(own)}"] if own else []
    words += [f"merges its own part of {d}, which {end}" for d, end in partial]
    words += [
        f"merges what comes by as blocks of '{d}' travel round {mesh[a].name}" for a, d in enumerate(s.ring) if d is not None
    ]
    idle = [a.name for a, d in zip(mesh, s.dims, strict=True) if d is None and a.size > 1]
    if not words:
        return "every device computes all of it"
    return f"each device {' and '.join(words)}" + (f"; repeated along {', '.join(idle)}" if idle else "")


def kind_text(op: Op) -> str:
    """``map``, the monoid, or which opaque node it is."""
    return (op.monoid or "map") if isinstance(op, Block) else f"opaque {op.kind}"


def step_text(step: Step, program: Program, ops: tuple[Op, ...]) -> str:
    """What one step does, in a few words."""
    match step:
        case Launch():
            return ", ".join(ops[step.op].outs) + ("" if step.mode == "full" else f" ({step.mode})")
        case Transfer():
            return f"{step.kind} of '{program.buffers[step.src].tensor}'"
        case Reduce():
            return f"{step.kind} of '{program.buffers[step.srcs[0]].tensor}'"
        case Load():
            return f"load '{step.buffer}'"
        case Free():
            return "free " + ", ".join(f"'{b}'" for b in step.buffers)


# charts

BLOCKS = " ▁▂▃▄▅▆▇█"


def columns(values: Sequence[int], width: int) -> list[int]:
    """At most ``width`` values: the largest of each of so many equal stretches, so that no peak is lost."""
    n = len(values)
    if n <= width:
        return list(values)
    return [max(values[k * n // width : (k + 1) * n // width]) for k in range(width)]


def area(values: Sequence[int], width: int = 72, height: int = 3) -> list[str]:
    """An area chart from 0 to the largest value, in lines of block characters; anything above 0 shows."""
    heights = columns(values, width)
    top = max(heights, default=0) or 1
    steps = len(BLOCKS) - 1
    levels = [0 if v <= 0 else max(1, round(v / top * height * steps)) for v in heights]
    rows = range(height - 1, -1, -1)
    return ["".join(BLOCKS[min(steps, max(0, level - row * steps))] for level in levels) for row in rows]


# What repeats in a model, said once: ``layers.*.self_attn.q_proj ×32``.
#
# Names say which operations of different layers are one another's counterparts: they differ in the numbers of layers alone.
# Where the file has no names, the structure says it: runs of operations that come again and again, equal in what they
# compute, how they are cut and what they read from one another.


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
LEAST = 4  # operations that a run must hold, so that it is worth one
WORD = re.compile(r"(?<=[@=])(\"?)([^\",{}\d][^\",{}]*)\1")  # of the text of a move: what stands behind @ and =
Reads = list[tuple[int | str, ...]]


def together(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Rows with equal keys together, in the order in which they come first."""
    out: dict[K, list[T]] = {}
    for row in rows:
        out.setdefault(key(row), []).append(row)
    return out


def template(name: str) -> str:
    """A name with ``*`` for the numbers of layers, which are those of all its parts but the last; that one's count goes."""
    *outer, last = re.split(r"([./])", name)
    outer = [re.sub(r"\d+$", "*", p) for p in outer]
    return "".join([*outer, "*" if last.isdecimal() else re.sub(r"_\d+$", "", last)])


def layer_of(name: str) -> str:
    """The layer that an operation is in: its name up to the first number that stands for itself; "" outside of layers."""
    parts = name.split(".")
    at = next((k for k, p in enumerate(parts[:-1]) if p.isdecimal()), None)
    return ".".join(parts[: at + 1]) if at is not None else ""


def listed(names: Sequence[str]) -> str:
    """Names with those alike once: ``layers.*.mlp.up ×32, lm_head``."""
    rows = together(names, template)
    return ", ".join(f"{t} ×{len(same)}" if len(same) > 1 else same[0] for t, same in rows.items())


def moves_text(moves: Sequence[str], most: int = 3) -> Iterator[str]:
    """Rewrites in the order in which they come first, equal ones of different layers once; of more than ``most`` kinds by one
    rule, those and how many follow."""
    for of_rule in together(moves, lambda m: m.partition("@")[0]).values():
        kinds = list(together(of_rule, lambda m: WORD.sub(lambda w: template(w[2]), m)).items())
        shown = kinds[: most if len(kinds) > most + 1 else None]
        yield from (f"{text} ×{len(same)}" if len(same) > 1 else same[0] for text, same in shown)
        if len(shown) < len(kinds):
            left = kinds[len(shown) :]
            yield f"{of_rule[0].partition('@')[0]}@… ×{sum(len(same) for _, same in left)}, {len(left)} kinds of places"


def refusals_text(refused: Sequence[Refusal], names: Mapping[str, str]) -> str:
    """Why rules do not apply, each reason once, and where that is so by the names of the model's author."""

    def said(text: str) -> str:
        return re.sub(r"'([^']+)'", lambda m: f"'{template(names[m[1]])}'" if m[1] in names else m[0], text)

    groups = together(refused, lambda m: (m.rule, said(m.reason), said(m.witness)))
    lines = [f"{'×':>5}  rule: why it does not apply" if groups else "no rule was refused"]
    for (rule, reason, witness), same in groups.items():
        lines += wrapped(f"{len(same):>5}  {rule}: {reason}{f' (e.g. {witness})' if witness else ''}", " " * 9)
        lines += wrapped(f"{'':7}at {listed([names.get(m.at, m.at) for m in same])}", " " * 9)
    return "\n".join(lines)


def counterparts(plan: Plan) -> list[str]:
    """For each operation what it and its counterparts in other layers are called: a name with ``*``, or, where the file names
    no part of the model, the name of the first one of them in a run.

    An operation beside a run that computes the same under a name with another count goes with those in it, in their order (a
    first layer also makes what all others read, and so is none of the run).
    """
    names, named = operation_names(plan.graph), parts(plan.graph)
    out = [template(name) if part else name for name, part in zip(names, named, strict=True)]
    if all(named):
        return out
    kinds = [(text, template(name)) for text, name in zip(signatures(plan), names, strict=True)]
    first: dict[int, str] = {}
    for run in runs(plan):
        at = range(run.first, run.first + run.length * run.times)
        first |= {i: names[run.first + (i - run.first) % run.length] for i in at if not named[i]}
    places = {kind: list(dict.fromkeys(first[i] for i in at)) for kind, at in together(first, lambda i: kinds[i]).items()}
    beside = together((i for i in range(len(out)) if not named[i] and i not in first), lambda i: kinds[i])
    for kind, at in beside.items():
        first |= {i: places[kind][k % len(places[kind])] for k, i in enumerate(at) if kind in places}
    return [first.get(i, name) for i, name in enumerate(out)]


@dataclass(frozen=True, slots=True)
class Run:
    """``times`` repetitions of ``length`` operations from number ``first`` on; ``label`` is what the repetitions are called."""

    first: int
    length: int
    times: int
    label: str


def signatures(plan: Plan) -> list[str]:
    """What each operation computes, by itself."""
    return [signature(op, plan.graph) for op in plan.graph.ops]


def runs(plan: Plan, alike: Sequence[str] | None = None) -> list[Run]:
    """Disjoint runs in program order; equal operations with other cuts are not alike."""
    kinds, layers = alike or signatures(plan), [layer_of(n) for n in operation_names(plan.graph)]
    number: dict[object, int] = {}
    keys = zip(kinds, plan.strategies, plan.stage_of or (0,) * len(kinds), strict=True)
    symbols = np.array([number.setdefault(k, len(number)) for k in keys], np.int64)
    reads = _producers_read(plan.graph)
    out: list[Run] = []
    todo = [(0, len(symbols))]
    while todo:
        low, high = todo.pop()
        best = _longest(symbols, reads, low, high)
        if best is not None:
            first, length, times = _turned(layers, reads, *best)
            out.append(Run(first, length, times, _label(layers[first : first + length])))
            todo += [(low, first), (first + length * times, high)]
    return sorted(out, key=lambda f: f.first)


def _producers_read(graph: Graph) -> Reads:
    """For each operation where it reads: the number of the operation that writes a tensor, "" for weights, an input's name."""
    makers = graph.producers()
    return [tuple(makers.get(t, "" if t in graph.weights else t) for t in op.inputs) for op in graph.ops]


def _longest(symbols: np.ndarray, reads: Reads, low: int, high: int) -> tuple[int, int, int] | None:
    """The run between two places that covers the most, of the shortest repetition."""
    best, covered = None, LEAST - 1
    part = symbols[low:high]
    for length in range(1, len(part) // 2 + 1):
        same = np.concatenate(([False], part[:-length] == part[length:], [False])).astype(np.int8)
        begins, ends = (np.flatnonzero(np.diff(same) == s) for s in (1, -1))
        for k in np.argsort(begins - ends, kind="stable")[:4].tolist():
            first, times = low + int(begins[k]), 1 + int(ends[k] - begins[k]) // length
            if times * length <= covered or times < 2:
                continue
            times = _joined_alike(reads, first, length, times)
            if times >= 2 and times * length > covered:
                best, covered = (first, length, times), times * length
    return best


def _joined_alike(reads: Reads, first: int, length: int, times: int) -> int:
    """How many repetitions read as the second one does: from the same places outside, or as far behind themselves."""
    for again in range(1, times):
        for k in range(first + again * length, first + (again + 1) * length):
            for now, then in zip(reads[k], reads[k - length], strict=True):
                if isinstance(now, str) or isinstance(then, str):
                    alike = now == then or again == 1
                else:
                    alike = now == then < first or now - then == length or (again == 1 and then < first <= now)
                if not alike:
                    return again
    return times


def _turned(layers: Sequence[str], reads: Reads, first: int, length: int, times: int) -> tuple[int, int, int]:
    """A run that begins where a layer begins by the names, if one of as many repetitions but one does."""

    def mixed(turn: int) -> int:
        return len(set(layers[first + turn : first + turn + length]) - {""})

    best = min(range(length), key=lambda turn: (mixed(turn), turn))
    if best == 0 or mixed(best) == mixed(0):
        return first, length, times
    fewer = _joined_alike(reads, first + best, length, times - 1)
    return (first + best, length, fewer) if fewer == times - 1 >= 2 else (first, length, times)


def _label(layers: Sequence[str]) -> str:
    """What the names call the repetitions, in the singular: ``layer`` of ``model.layers.3``; "block" where they say nothing."""
    words = [w for name in layers if (w := re.sub(r"[._]?\d+$|[._]?list$", "", name.rpartition(".")[0].rpartition(".")[2]))]
    word = max(sorted(set(words)), key=words.count).removesuffix("s") if words else "block"
    return word if len(word) > 1 else "layer"


# The steps of a plan with equal ones of different layers on one line: ``layers.*.self_attn.q_proj ×32``, then exceptions.
#
# Two operations are alike where they are counterparts (`folds`) and cut in the same way. Sizes may differ where names say so,
# and are shown as ranges.


Row = Mapping[str, Any]
INDENT = " " * 23


def folded(build: Build, facts: Mapping[str, Any]) -> list[str]:
    """All steps that compute or communicate, alike ones once, in the order in which they come first."""
    moved = {t["step"]: t for t in facts["steps"]}
    rows: list[Row] = []
    for i, step in enumerate(build.program.steps):
        if i in moved:
            rows.append(moved[i])
        elif isinstance(step, Launch) and step.mode != "finish":
            rows.append(facts["operations"][step.op])
    groups = together(rows, _line_key)
    total = facts["simulated"]["seconds"] or 1.0
    beside = facts["simulated"]["beside_s"]
    more = f"; {duration(beside)} of them beside others" if beside > total / 1000 else ""
    lines = [f"{'×':>5} {'share':>6} {'time':>8}  {some(len(rows), 'step')}, {len(groups)} distinct{more}"]
    for same in groups.values():
        seconds = sum(r["seconds"] for r in same)
        head = f"{len(same):>5} {seconds / total:>6.1%} {duration(seconds):>8}  "
        lines += _moved_text(head, same) if "step" in same[0] else _operation_text(head, same)
    return lines


def _line_key(row: Row) -> tuple[Any, ...]:
    """What those steps have in common that one line stands for."""
    if "step" in row:
        return "moved", template(row["name"]), row["kind"], row["group"], row["algorithm"]
    same = tuple(row["dims"]) if row["part"] else tuple(row["dims"].items())
    return "op", row["alike"], row["kind"], same, row["split"], row.get("stage")


def _moved_text(head: str, rows: Sequence[Row]) -> list[str]:
    one, sent = rows[0], sum(r["bytes"] for r in rows)
    sent_as = f", sent as {one['sent_as']}," if one["sent_as"] else ""
    how = "" if one["group"] is None else f"{sent_as} in groups of {one['group']} by {one['algorithm']}"
    return wrapped(f"{head}{one['kind']} of {template(one['name'])}{how}, {human(sent)} in all", INDENT)


def _operation_text(head: str, rows: Sequence[Row]) -> Iterator[str]:
    one = rows[0]
    split = "" if one["split"] == "none" else f"  split {one['split']}"
    dims = f"[{_dims_text(rows)}] {one['kind']}{_stage(one)}"
    yield from wrapped(f"{head}{one['alike']}{split} {dims}", INDENT)
    if not one["part"] and len(rows) == 1 and one["nodes"] not in ([], [one["name"]]):
        yield from wrapped(f"{INDENT}from {', '.join(one['nodes'])}", INDENT)
    if "opaque_because" in one:
        yield from wrapped(f"{INDENT}opaque: {one['opaque_because']}", INDENT)
    pins = dict.fromkeys(pin for row in rows for pin in row["pins"])
    if pins:
        yield from wrapped(f"{INDENT}pinned by {', '.join(pins)}", INDENT)


def _stage(row: Row) -> str:
    return f" in stage {row['stage']}" if "stage" in row else ""


def _dims_text(rows: Sequence[Row]) -> str:
    """``i: 128 sequence, n: 256..512 out``: sizes, as ranges where they differ, and better names."""
    better = rows[0]["dim_names"]
    out: list[str] = []
    for name in rows[0]["dims"]:
        sizes = [r["dims"][name] for r in rows]
        size = f"{min(sizes)}..{max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        out.append(f"{name}: {size}" + (f" {better[name]}" if name in better else ""))
    return ", ".join(out)


# What a plan is like, in a few lines: how long it takes, what of that is communication, and what its layers cut.
#
# The kind of parallelism is read off the strategies themselves. A product with a weight is cut along the weight's own output
# (by columns), along what it sums over (by rows), or along an axis that it only carries. Which axis that is follows from the
# graph, as every dimension is traced back to the axes of the inputs that it runs along: one that exponential weights are summed
# over (attention's keys) has tokens, one on which windows lie is space, the first axis of an input is its batch, and any other
# one is a sequence, too. Where several are one axis (rows and tokens as one), the batch is cut first, if it has enough rows.


NAMES = {
    "columns": "column parallel", "rows": "row parallel", "data": "data parallel", "sequence": "sequence parallel",
    "space": "spatial parallel", "other": "parallel over an axis of no input", "whole": "replicated",
}  # fmt: skip


def likeness(plan: Plan) -> list[str]:
    """What kind of plan it is along each mesh axis: ``Megatron tensor parallel over tp in 31 of 32 layers``."""
    out: list[str] = []
    carried, sources = _carried(plan.graph), _sources(plan.graph)
    for axis in plan.mesh:
        layers = _layers(plan, axis.name, carried)
        for kind, n in Counter(_kind(ways, sources) for ways in layers.values()).most_common():
            of = f" in {n} of {len(layers)} layers" if len(layers) > 1 else ""
            out.append(f"{kind} over {axis.name}{of}")
    return out


def _layers(plan: Plan, axis: str, carried: Callable[[int, str, int], str]) -> dict[str, dict[int, str]]:
    """How a mesh axis cuts the products with weights of each layer that has several devices along it; of a model without
    layers, of all of it."""
    layers: dict[str, dict[int, str]] = {}
    for i, (s, name, at) in enumerate(zip(plan.strategies, operation_names(plan.graph), plan.places, strict=True)):
        cuts = [(d, a.size) for d, a in zip(s.dims, at.mesh, strict=True) if a.name == axis and a.size > 1]
        if cuts and (weight := _weight(plan.graph.ops[i], plan.graph)):
            cut, parts = cuts[0]
            own = cut in weight and ("columns" if cut in {d.name for d in plan.graph.ops[i].dims} else "rows")
            layers.setdefault(layer_of(name), {})[i] = "whole" if cut is None else own or carried(i, cut, parts)
    return {layer: ways for layer, ways in layers.items() if layer or len(layers) == 1}


def _weight(op: Op, graph: Graph) -> frozenset[str]:
    """The dimensions of the weight that an operation is a product with; none where it is no such product."""
    if not isinstance(op, Block) or not only_sums(op.monoid):
        return frozenset[str]()
    weights = [r for r in op.reads if r.tensor in graph.weights and graph.weights[r.tensor].file and len(r.index) > 1]
    summed = {d.name for d in op.reduce}
    read = [frozenset[str]().union(*map(dims_of, r.index)) for r in weights]
    return next((dims for dims in read if dims & summed and dims - summed), frozenset[str]())


def _carried(graph: Graph) -> Callable[[int, str, int], str]:
    """What a dimension of an operation is that a product with a weight only carries, and that is cut into parts."""
    runs, tokens, windows = input_axes(graph), set[tuple[str, int]](), set[tuple[str, int]]()
    for op, along in zip(graph.ops, runs, strict=True):
        summed = {d.name for d in op.reduce} if isinstance(op, Block) else set[str]()
        if isinstance(op, Block) and exponential(op.monoid):
            tokens.update(*(along.get(d, ()) for d in summed))
        for dims in (dims_of(index) for r in op.reads for index in r.index) if isinstance(op, Block) else ():
            own, theirs = ({a for d in ds for a in along.get(d, ())} for ds in (dims & summed, dims - summed))
            windows |= own & theirs

    def kind(op: int, cut: str, parts: int) -> str:
        axes = runs[op].get(cut, NONE)
        if any(k == 0 and (t, k) not in tokens | windows and graph.tensors[t].shape[0] >= parts for t, k in axes):
            return "data"
        return "other" if not axes else "space" if axes & windows - tokens else "sequence"

    return kind


def _sources(graph: Graph) -> list[set[int]]:
    """For each operation: the products with weights that what it multiplies or sums was made of, and no other product since."""
    of: dict[str, set[int]] = {}
    out: list[set[int]] = []
    for i, op in enumerate(graph.ops):
        product = bool(_weight(op, graph))
        reads = [op.reads[k].tensor for k in op.body_reads()] if product and isinstance(op, Block) else op.inputs
        out.append(set[int]().union(*(of.get(t, ()) for t in reads)))
        of |= dict.fromkeys(op.outs, {i} if product else out[-1])
    return out


def _kind(ways: dict[int, str], sources: list[set[int]]) -> str:
    """What one layer is called in the field. Megatron-LM cuts pairs: what columns give, and nothing else, is summed by rows."""
    found = set(ways.values())
    if len(found) == 1:
        return NAMES[found.pop()]
    ends = {(ways.get(i, ""), way) for k, way in ways.items() for i in sources[k] or {-1}}
    gathered = ("columns", "columns") in ends
    if found == {"columns", "rows"} and {a for a, b in ends if b == "rows"} == {"columns"} and not gathered:
        return "Megatron tensor parallel"
    return "mixed (" + ", ".join(sorted(found)) + ")"


def beside_one_device(report: Mapping[str, Any]) -> Iterator[str]:
    """How much faster than the best plan for one device; nothing where there is none to compare with."""
    one = next((a for a in report.get("alternatives", ()) if a["name"] == "one device"), None)
    if one and one["objective_s"] and report["objective_s"]:
        ratio = one["objective_s"] / report["objective_s"]
        fast, slow = f"{times(ratio)} times as fast as", f"{times(1 / ratio)} times as long as"
        what = "no faster than" if 0.995 <= ratio < 1.005 else fast if ratio > 1 else slow
        yield f"{what} one device ({duration(one['objective_s'])}{'' if one['fits'] else ', which does not fit'})"


def speed(build: Build, simulated: Mapping[str, Any]) -> Iterator[str]:
    """How long it takes, beside one device, and memory."""
    busiest = max(range(build.plan.devices), key=lambda d: simulated["compute_s"][d])
    computes, sends, waits = (duration(simulated[k][busiest]) for k in ("compute_s", "transfer_s", "exposed_s"))
    which = "the busiest device" if build.plan.devices > 1 else "the device"
    yield f"simulated {duration(simulated['seconds'])}; {which} computes for {computes}, sends for {sends}, waits for {waits}"
    yield from beside_one_device(build.report)
    peak = max(build.peak_bytes)
    yield f"memory: at most {human(peak)} on a device, {peak / build.memory:.1%} of {human(build.memory)}"


def plan_lines(plan: Plan) -> Iterator[str]:
    """How many devices work, where some do not; the kinds of parallelism, most frequent first."""
    lines, working = likeness(plan), sum(len(s.devices) for s in {*plan.places})
    if working < plan.devices:
        lines.insert(0, f"{working} of {plan.devices} devices work{'s' * (working == 1)}, the others are idle")
    yield from (f"plan: {line}" for line in lines[:5])
    if len(lines) > 5:
        yield f"plan: … {len(lines) - 5} more kinds of layers"
