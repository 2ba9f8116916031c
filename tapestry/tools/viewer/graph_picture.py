"""The graph of a plan, folded by repeated structure, in layers; the width of an edge is what travels on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tapestry.build.store import Build
from tapestry.ir.provenance import operation_names
from tapestry.tools.viewer import program_tables
from tapestry.tools.viewer.draw import Drawing, build_of, card, drawing, short, tag, tail, words
from tapestry.tools.viewer.lanes_picture import split_colours
from tapestry.viz import format
from tapestry.viz.format import human, kind_text, split_text

WIDE, TALL, GAP, LEVEL = 170.0, 40.0, 22.0, 86.0


@dataclass(slots=True)
class _Node:
    """A box of the picture: an operation or a fold; ``colours`` are of what is cut in it."""

    name: str
    note: str
    colours: list[str]
    level: int = 0
    x: float = 0.0
    ins: dict[int, tuple[float, set[str]]] = field(default_factory=dict[int, tuple[float, set[str]]])


def graph(build: object) -> Drawing:
    """The picture of a build's graph; bytes are those on the wire, all senders together and all repetitions of a fold."""
    b = build_of(build)
    nodes = _nodes(b)
    rows: dict[int, list[int]] = {}
    for k, n in enumerate(nodes):
        n.level = 1 + max((nodes[j].level for j in n.ins if j < k), default=-1)
        rows.setdefault(n.level, []).append(k)
    for level in sorted(rows):  # each beside what it reads
        rows[level].sort(key=lambda k: sum(nodes[j].x for j in nodes[k].ins) / max(1, len(nodes[k].ins)))
        left = -(len(rows[level]) - 1) * (WIDE + GAP) / 2
        for at, k in enumerate(rows[level]):
            nodes[k].x = left + at * (WIDE + GAP)
    most = max((moved for n in nodes for moved, _ in n.ins.values()), default=0) or 1
    wide = max(map(len, rows.values())) * (WIDE + GAP) + 40
    edges = [(nodes[j], n, moved, kinds) for n in nodes for j, (moved, kinds) in n.ins.items()]
    parts = [p for e in edges for p in _edge(*e, most, wide / 2)]
    for n in nodes:
        at = wide / 2 + n.x - WIDE / 2, n.level * LEVEL + 10
        parts += card(*at, (WIDE, TALL), tail(n.name, 20), short(n.note, 25), n.colours)
    return drawing(wide, len(rows) * LEVEL + 10, f"the graph of {b.plan.graph.name}", parts)


def _nodes(build: Build) -> list[_Node]:
    """Operations and runs of them in program order, with what they read from which."""
    plan, colours = build.plan, split_colours(build.plan)
    node_of = list(range(len(plan.graph.ops)))
    runs = {f.first: f for f in format.runs(plan)}
    names = operation_names(plan.graph)
    nodes: list[_Node] = []
    i = 0
    while i < len(plan.graph.ops):
        f = runs.get(i)
        count = f.length * f.times if f else 1
        node_of[i : i + count] = [len(nodes)] * count
        op = plan.graph.ops[i]
        if f:
            nodes.append(_Node(f"{f.label} ×{f.times}", f"{f.length} operations each", colours[i : i + f.length]))
        else:
            cut = split_text(op, plan.strategies[i], plan.stage(i).mesh)
            nodes.append(_Node(names[i], f"{kind_text(op)} · {'not cut' if cut == 'none' else cut}", [colours[i]]))
        i += count
    makers = plan.graph.producers()
    for i, reads in enumerate(program_tables.edges(build.program)):
        for t, moved, kind, _, _ in reads:
            if t in makers and node_of[makers[t]] != node_of[i]:
                n, kinds = nodes[node_of[i]].ins.get(node_of[makers[t]], (0.0, set[str]()))
                nodes[node_of[i]].ins[node_of[makers[t]]] = (n + moved, kinds | ({kind} if kind else set()))
    return nodes


def _edge(a: _Node, b: _Node, moved: float, kinds: set[str], most: float, middle: float) -> list[str]:
    (x0, y0), (x1, y1) = (middle + a.x, a.level * LEVEL + 10 + TALL), (middle + b.x, b.level * LEVEL + 10)
    bend = 0.0 if b.level - a.level < 2 or abs(x1 - x0) > 1 else WIDE / 2 + 16  # past what stands between
    half = (y0 + y1) / 2
    path = f"M{x0:.1f},{y0:.1f}C{x0 + bend:.1f},{half:.1f} {x1 + bend:.1f},{half:.1f} {x1:.1f},{y1:.1f}"
    width = 1.0 if not kinds else 1.5 + 6 * (moved / most) ** 0.5
    out = [tag("path", d=path, class_="moved" if kinds else "edge", stroke_width=width)]
    if kinds:
        said = f"{', '.join(sorted(kinds))} {human(moved)}"
        out.append(words((x0 + x1) / 2 + bend * 0.75 + 8, half + 4, said, class_="note"))
    return out
