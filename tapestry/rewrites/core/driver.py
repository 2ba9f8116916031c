"""The one driver of rewrites: whatever applies rules to a graph does it through these functions.

Each phase of the compiler asks for the rules of its own (`Rule.phase`): `simplify` runs those that always help, the others are
choices, which something else judges: a price before the search (`plan.alternatives`), the best plan of the rewritten graph
(`plan.structural_search`), or the memory that there is (`plan.memory`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tapestry.errors import LawError, TapestryError, similar, some
from tapestry.ir.graph import Graph, Op, Opaque, Rewrite
from tapestry.rewrites.core.rule import Accept, Draft, MatchRule, Move, Phase, Rule, left_out, own_rules, rule_named, rule_table
from tapestry.verify.rewriting.proofs import UNPROVED, prove_step

# The one place through which every rewrite of a graph goes: it is logged there, and a user's rule is proved there.
#
# What changed is found by comparing the graphs, whatever the rule says of itself; `verify.rewriting` proves it. The compiler
# proves the log of the graph that it chose in its pass ``verify``.


def apply_moves(graph: Graph, moves: Iterable[Move]) -> Graph:
    """The graph after some moves, one after another.

    Raises:
        TapestryError: one is not legal; LawError: a user's rule does not say the same there.
    """
    for move in moves:
        rule = rule_named(move.rule)
        if rule is None:
            hint = similar(move.rule, sorted(rule_table())) or "`tapestry rules` lists them"
            raise TapestryError(f"no rule named '{move.rule}'", hint=hint)
        if left_out(rule.name, (move.at,)):
            raise TapestryError("the rule is left out there: its proof failed", where=str(move))
        graph = logged(rule, graph, rule.apply(graph, move), str(move))
    return graph


def apply_each_legal(graph: Graph, moves: Sequence[Move]) -> tuple[Graph, list[Move]]:
    """The graph after all moves that are still legal after the ones before, and those moves; of one rule in a row, in one pass.

    Raises:
        LawError: a user's rule does not say the same at one place.
    """
    rule = rule_named(moves[0].rule) if moves else None
    if len(moves) > 1 and isinstance(rule, MatchRule) and rule.built_in and not rule.at_once:
        after, done = rule.apply_legal(graph, moves)
        return logged(rule, graph, after, rule.name), done
    done = list[Move]()
    for move in moves:
        try:
            graph = apply_moves(graph, [move])
        except LawError:  # a user's rule is wrong
            raise
        except TapestryError:
            continue
        done.append(move)
    return graph, done


def swept(rule: Rule, graph: Graph) -> Graph:
    """The graph after every move that a rule finds.

    Raises:
        LawError: a user's rule does not say the same somewhere.
    """
    return graph if left_out(rule.name, ()) else logged(rule, graph, rule.sweep(graph), rule.name)


def chosen(rule: MatchRule, graph: Graph, accept: Accept | None = None) -> tuple[Graph, list[Move]]:
    """The graph after every move of a rule that is accepted, and those moves."""
    after, moves = rule.choose(graph, accept)
    return logged(rule, graph, after, rule.name), moves


def logged(rule: Rule, before: Graph, after: Graph, by: str) -> Graph:
    """A graph that a rule made of another one, with that in its log; what a user's rule made is proved.

    Raises:
        LawError: the interface is another one, or a user's rule does not say the same.
    """
    if after is before:
        return before
    if (before.inputs, before.outputs) != (after.inputs, after.outputs):
        raise LawError("access_unchanged", "the graph has other inputs or outputs than before", where=by)
    pairs = [(t, before.tensors.get(t), after.tensors[t]) for t in (*after.inputs, *after.weights)]
    pairs += [(t, before.weights.get(t), w) for t, w in after.weights.items()]
    other = next((t for t, was, now in pairs if was is not now and was != now), None)
    if other is not None:
        raise LawError("access_unchanged", f"'{other}' is another tensor, or other bytes, than before", where=by)
    if after.ops == before.ops:
        return replace(after, log=before.log)
    step = Rewrite(by, before, after, rule.exact)
    if not rule.built_in and (n := prove_step(step)[UNPROVED]):
        raise LawError("rewrites", f"{some(n, 'result')} of a rule that is not the package's own cannot be proved", where=by)
    return replace(after, log=step)


# What rules see of an operation, as a number: operations of equal numbers are matched once, in whatever graph or layer.
#
# A *cone* is an operation with those that it is made of, so many of them along a path, without the names of tensors.


Cone = tuple[object, ...]


@dataclass(slots=True)
class Cones:
    """Numbers of operations, and at which cones which rules have nothing to do; for many graphs."""

    _looks: dict[int, tuple[Op, int]] = field(default_factory=dict[int, tuple[Op, int]])  # by identity, which it keeps
    _numbers: dict[object, int] = field(default_factory=dict[object, int])
    _idle: dict[str, set[Cone]] = field(default_factory=dict[str, set[Cone]])
    _last: tuple[Graph, Draft] | None = None
    _every: dict[int, list[Cone]] = field(default_factory=dict[int, list[Cone]])  # the cones of the last graph, by reach

    def look(self, op: Op) -> int:
        """A number for all of an operation but names of tensors and nodes."""
        found = self._looks.get(id(op))
        if found is None:
            found = op, self._numbers.setdefault(_bare(op), len(self._numbers))
            self._looks[id(op)] = found
        return found[1]

    def at(self, draft: Draft, op: Op, reach: int) -> tuple[Cone, list[str]]:
        """The cone of an operation, and its tensors in the order in which the cone has them."""
        names, parts, layer = dict[str, int](), list[object](), [op]
        for depth in range(reach + 1):
            makers = dict[str, Op]()
            for o in layer:
                parts.append(self.look(o))
                for t in (*_tensors_read(o), *o.outs):
                    if t in names:
                        parts.append(names[t])
                        continue
                    names[t] = len(names)
                    x, inside = draft.tensors.get(t), t not in op.outs and (depth < reach or t in o.outs)
                    maker = draft.maker(t) if inside else None
                    parts.append((x and (x.dtype, x.shape), maker is not None, inside and draft.only_reader(t) is not None))
                    if maker is not None and maker is not o:
                        makers.setdefault(maker.outs[0], maker)
            layer = list(makers.values())
        return tuple(parts), list(names)

    def key(self, graph: Graph) -> Cone:
        """A graph with the names of its tensors, without those of its nodes."""
        return tuple((self.look(op), *_tensors_read(op), *op.outs) for op in graph.ops)

    def draft(self, graph: Graph) -> Draft:
        """A graph as rules read it; the last one is kept."""
        if self._last is None or self._last[0] is not graph:
            self._last = graph, Draft(graph)
            self._every.clear()
        return self._last[1]

    def idle(self, rule: Rule, graph: Graph) -> bool:
        """Whether a rule is known to change nothing in a graph."""
        known = self._idle.get(rule.name)
        return known is not None and known.issuperset(self._cones(rule, graph))

    def note_idle(self, rule: Rule, graph: Graph) -> None:
        """Remember that a rule changed nothing in a graph."""
        if isinstance(rule, MatchRule) and rule.reach is not None:
            self._idle.setdefault(rule.name, set()).update(self._cones(rule, graph))

    def _cones(self, rule: Rule, graph: Graph) -> list[Cone]:
        draft, reach = self.draft(graph), (rule.reach if isinstance(rule, MatchRule) else None) or 0
        if reach not in self._every:
            self._every[reach] = [self.at(draft, op, reach)[0] for op in graph.ops]
        return self._every[reach]


def _tensors_read(op: Op) -> tuple[str, ...]:
    return op.ins if isinstance(op, Opaque) else tuple(r.tensor for r in op.reads)


def _bare(op: Op) -> object:
    if isinstance(op, Opaque):
        return replace(op, outs=(), ins=(), source=(), why="")
    reads = tuple((r.index, r.when, r.other) for r in op.reads)
    return op.dims, op.reduce, op.monoid, reads, op.body, op.then, op.inner, op.splits, len(op.outs)


OPTIONAL = ("fuse_rows", "stream_softmax")
"""Rules that never cost a launch or a byte on one device, but tie operations to one cut on several."""
_WITHOUT, _NONE = "without", frozenset[str]()
SIMPLIFIED = "simplified"  # ``simplified@graph`` among moves: the graph was simplified in between


def rules_of(phase: Phase) -> list[Rule]:
    """The rules of a phase, in the order in which they were registered."""
    table = rule_table() if phase in ("algebra", "request") else own_rules()  # (the book has no others)
    return [r for r in table.values() if r.phase == phase]


def simplify(
    graph: Graph, limit: int = 12, *, disabled: frozenset[str] = _NONE, accept: Accept | None = None, cones: Cones | None = None
) -> Graph:
    """Apply every rule of the phase ``simplify`` until none changes the graph (each sweep is one linear pass).

    The rules only remove operations, views from reads, or both, so that the rounds end; ``limit`` is a guard for rules
    that a user adds, ``disabled`` has names of rules that are left out, ``accept`` refuses single moves. With
    ``cones``, what is known of other graphs is not looked at again.
    """
    rules = [r for r in rules_of("simplify") if r.name not in disabled]
    unchanged = 0  # rules in a row that did nothing
    for rule in (r for _ in range(limit) for r in rules):
        before, known = graph, cones is not None and cones.idle(rule, graph)
        if not known:
            graph = chosen(rule, graph, accept)[0] if accept and isinstance(rule, MatchRule) else swept(rule, graph)
        same = graph is before or graph.ops == before.ops
        unchanged = unchanged + 1 if same else 0
        if same and cones is not None and not known:
            cones.note_idle(rule, graph)
        if unchanged == len(rules):
            break
    return graph


def rule_names(given: Iterable[str]) -> frozenset[str]:
    """Rules by name, or all of a phase by the phase's name.

    Raises:
        TapestryError: there is neither a rule nor a phase of that name.
    """
    out = set[str]()
    for name in given:
        found = {r.name for r in rule_table().values() if name in (r.name, r.phase)}
        if not found:
            hint = (
                similar(name, sorted({*rule_table(), *(r.phase for r in rule_table().values())}))
                or "`tapestry rules` lists them"
            )
            raise TapestryError(f"no rule or phase named '{name}'", where="--without-rule", hint=hint)
        out |= found
    return frozenset(out)


def apply_legal(graph: Graph, moves: Iterable[Move], disabled: frozenset[str] = _NONE) -> tuple[Graph, list[Move]]:
    """The graph after all moves that are still legal after the ones before, and those moves."""
    done: list[Move] = []
    for name, group in itertools.groupby(moves, lambda m: m.rule):
        some = list(group)
        if name == SIMPLIFIED:
            graph = simplify(graph, disabled=disabled)
        else:
            graph, some = apply_each_legal(graph, some)
        done += some
    return graph, done


def replay(graph: Graph, moves: Iterable[Move]) -> Graph:
    """The graph after moves that an earlier search accepted; ``graph`` is simplified without the rules that they disable.

    Raises:
        TapestryError: one of them does not apply.
    """
    moves = list(moves)
    disabled, moves = disabled_by(moves), applied(moves)
    for m in moves:
        if m.rule == SIMPLIFIED or graph.find(m.at) < 0:  # the move is of a simplified graph
            graph = simplify(graph, disabled=disabled)
        graph = graph if m.rule == SIMPLIFIED else apply_moves(graph, [m])
    return simplify(graph, disabled=disabled) if moves else graph


def without(rule: str) -> Move:
    """What stands in a list of moves for a simplification that was left out from the beginning: ``without@fuse_rows``."""
    return Move(_WITHOUT, rule)


def disabled_by(moves: Iterable[Move]) -> frozenset[str]:
    """Rules that a list of moves leaves out."""
    return frozenset(m.at for m in moves if m.rule == _WITHOUT)


def applied(moves: Iterable[Move]) -> list[Move]:
    """The moves of a list that are applied to the simplified graph: all others."""
    return [m for m in moves if m.rule != _WITHOUT]
