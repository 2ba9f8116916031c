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

from tapestry.errors import some
from tapestry.ir.graph import Block, Graph, Op, reduced_names
from tapestry.ir.plan import Mesh, Plan, Strategy
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Step, Transfer
from tapestry.ir.provenance import operation_names, parts
from tapestry.ir.syntax.printer import signature
from tapestry.plan.topology.measured_costs import BUSY, doubtful
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
    reduced = reduced_names(op)
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
    reduced = reduced_names(op)
    own = dict.fromkeys(f"'{d}'" for d in s.dims if d is not None and d not in reduced)
    partial = dict.fromkeys(
        (f"'{d}'", "an all_reduce completes" if o is None else f"a reduce_scatter along '{op.dims[o].name}' completes")
        for d, o in zip(s.dims, s.out, strict=True)
        if d in reduced
    )
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
