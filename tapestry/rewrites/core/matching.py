"""Rules over one operation, or over an operation and a second one: all that a rule needs follows from its ``match``.

``match`` looks at one place and says what would take the place of what (`Match`), why it is not legal though somebody might
expect it (`Refusal`), or nothing. ``find`` asks it everywhere, ``apply`` where a move says, ``sweep`` everywhere in one
pass that goes on with what it made, and ``choose`` does so where a price falls. All four are written once, in `MatchRule`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph, Op, with_ops
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.rule import Move, Param, Refusal, Rule, left_out

Accept = Callable[[Sequence[Op], Sequence[Op]], bool]
"""Whether some operations, in the order of the graph, are worth replacing by others."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a rule does at one place.

    Attributes:
        ops: for each position in the graph that changes, the operations that stand there then; none where it becomes empty.
        tensors: those that are new.
    """

    ops: Mapping[int, tuple[Op, ...]]
    tensors: tuple[Tensor, ...] = field(default=())


Params = tuple[tuple[str, Param], ...]
Candidate = tuple[Params, Match]
"""What one move of a rule does, with the parameters of the move."""


class Draft:
    """A graph while it is rewritten.

    Positions are those of the graph at the beginning; what takes the place of an operation has its position.

    Attributes:
        tensors: the graph's and new ones.
        makers, readers: of each tensor, positions of the operation that writes it and of those that read it, in order.
        memo: what a rule notes of the operations that it passed (they are passed in order), for those after them.
    """

    def __init__(self, graph: Graph, *, live: bool = False) -> None:
        """With ``live`` an operation whose result nobody needs does not count as a reader."""
        self.outputs = frozenset(graph.outputs)
        self.tensors = dict(graph.tensors)
        self.makers: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.memo: dict[object, str] = {}
        self._graph = graph
        self._dead = _dead(graph) if live else frozenset[int]()
        self._parts: list[tuple[Op, ...]] = [(op,) for op in graph.ops]
        for i, op in enumerate(graph.ops):
            for t in op.outs:
                self.makers[t] = i
            for t in op.inputs if i not in self._dead else ():
                self.readers.setdefault(t, []).append(i)

    def op(self, at: int) -> Op | None:
        """The operation at a position (of several the last); ``None`` where there is none any more."""
        return self._parts[at][-1] if at >= 0 and self._parts[at] else None

    def ops(self, at: int) -> tuple[Op, ...]:
        """All operations at a position."""
        return self._parts[at]

    def block(self, at: int) -> Block | None:
        """The block operation at a position; ``None`` where there is none."""
        op = self.op(at)
        return op if isinstance(op, Block) else None

    def maker(self, tensor: str) -> Block | None:
        """The block operation that writes a tensor."""
        at = self.makers.get(tensor, -1)
        made = next((op for op in self._parts[at] if tensor in op.outs), None) if at >= 0 else None
        return made if isinstance(made, Block) else None

    def readers_of(self, tensor: str) -> list[int]:
        """Positions of the operations that read a tensor."""
        return self.readers.get(tensor, [])

    def only_reader(self, tensor: str) -> int | None:
        """Position of the one operation that reads a tensor; ``None`` where there are others or it is an output."""
        where = self.readers_of(tensor)
        if len(where) != 1 or tensor in self.outputs or sum(tensor in op.inputs for op in self._parts[where[0]]) != 1:
            return None
        return where[0]

    def put(self, match: Match) -> None:
        """Do what a match says."""
        self.tensors |= {t.name: t for t in match.tensors}
        for at in match.ops:
            self._set(at, ())
        for at, ops in match.ops.items():
            self._set(at, ops)

    def _set(self, at: int, ops: tuple[Op, ...]) -> None:
        for t in {t for op in self._parts[at] for t in op.inputs} if at not in self._dead else ():
            self.readers[t].remove(at)
        for t in {t for op in self._parts[at] for t in op.outs}:
            del self.makers[t]
        self._parts[at] = ops
        for t in {t for op in ops for t in op.inputs} if at not in self._dead else ():
            insort(self.readers.setdefault(t, []), at)
        self.makers |= {t: at for op in ops for t in op.outs}

    def graph(self, *, reorder: bool = False) -> Graph | None:
        """The graph that it is now; with ``reorder``, operations may have to move, and ``None`` if no order is right."""
        gone = {t for op in self._graph.ops for t in op.outs} - self.makers.keys()
        ops = list[Op]()
        for at, part in enumerate(self._parts):
            if at in self._dead and any(gone & set(op.inputs) for op in part):
                gone |= {t for op in part for t in op.outs}
            else:
                ops += part
        done = ordered(ops) if reorder else ops
        return with_ops(self._graph, tuple(done), tuple(self.tensors.values())) if len(done) == len(ops) else None


def _dead(graph: Graph) -> frozenset[int]:
    """Positions of the operations whose results nobody needs."""
    needed, dead = set(graph.outputs), list[int]()
    for i in range(len(graph.ops) - 1, -1, -1):
        if needed & set(graph.ops[i].outs):
            needed |= set(graph.ops[i].inputs)
        else:
            dead.append(i)
    return frozenset(dead)


def ordered(ops: Sequence[Op]) -> list[Op]:
    """The operations in the order given as far as everything is made before it is read; fewer where that cannot be."""
    makers = {t: i for i, op in enumerate(ops) for t in op.outs}
    behind = [{makers[t] for t in op.inputs if t in makers} for op in ops]
    missing = [len(b) for b in behind]
    readers: dict[int, list[int]] = {}
    for i, b in enumerate(behind):
        for m in b:
            readers.setdefault(m, []).append(i)
    ready, out = [i for i, n in enumerate(missing) if n == 0], list[Op]()
    heapq.heapify(ready)
    while ready:
        i = heapq.heappop(ready)
        out.append(ops[i])
        for r in readers.get(i, ()):
            missing[r] -= 1
            if not missing[r]:
                heapq.heappush(ready, r)
    return out


class MatchRule(Rule):
    """A rule of which `candidates` says everything: what its subclasses `OpRule`, `PairRule` and `Equation` share.

    Attributes:
        nothing: the error of a move where the rule has nothing to say.
        at_once: whether a sweep matches the graph as it was, and then does all that does not overlap, in whatever order is
            right; otherwise it goes on with what it made.
        live: whether an operation whose result nobody needs does not count as a reader.
        backwards: whether a sweep begins at the end.
        again: whether a sweep looks at a position anew after a move there, until none is left.
    """

    nothing: ClassVar[str] = "the rule does not apply there"
    at_once: ClassVar[bool] = False
    live: ClassVar[bool] = False
    backwards: ClassVar[bool] = False
    again: ClassVar[bool] = False

    @property
    def reach(self) -> int | None:
        """How far before an operation `candidates` looks, in operations along a path, and nowhere else (whether one of them
        has a single reader counts as part of it); ``None`` where that is not said."""
        return None

    def candidates(self, draft: Draft, at: int, move: Move | None) -> Iterator[Candidate | Refusal]:
        """What the rule may do with the operation at a position: everything, or what one move asks for.

        The caller may carry out a candidate before it asks for the next one.
        """
        raise NotImplementedError

    def _offered(self, draft: Draft, at: int, move: Move | None) -> Iterator[Candidate | Refusal]:
        for found in self.candidates(draft, at, move):
            if isinstance(found, Refusal) or not left_out(
                self.name, (t for o in found[1].ops.values() for x in o for t in x.outs)
            ):
                yield found

    def named(self, op: Op) -> str:
        """The tensor by which a move names an operation."""
        return op.outs[0]

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Every place where the rule applies, and refusals where a user might expect it to."""
        draft = Draft(graph, live=self.live)
        for at in range(len(graph.ops)):
            yield from self.found(draft, at)

    def found(self, draft: Draft, at: int) -> Iterator[Move | Refusal]:
        """Where the rule applies, and refusals, at one position of a graph that is not rewritten meanwhile."""
        op, given = draft.ops(at)[-1], set[Params]()
        for result in self._offered(draft, at, None):
            if isinstance(result, Refusal):
                yield replace(result, rule=self.name, at=self.named(op))
            elif result[0] not in given:
                given.add(result[0])
                yield Move(self.name, self.named(op), result[0])

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph after one move.

        Raises:
            TapestryError: the move is not legal here; the message is the refusal's.
        """
        draft, at = Draft(graph, live=self.live), graph.find(move.at)
        if at < 0:
            raise TapestryError(f"no operation writes '{move.at}'", where=str(move))
        results = list(self._offered(draft, at, move))
        match = next((r[1] for r in results if not isinstance(r, Refusal)), None)
        refusal = next((r for r in results if isinstance(r, Refusal)), None)
        if match is None and refusal is not None:
            raise TapestryError(refusal.reason, where=str(move), why=refusal.witness)
        if match is not None:
            draft.put(match)
        after = draft.graph(reorder=self.at_once) if match is not None else None
        if after is None:
            raise TapestryError(self.nothing, where=str(move))
        return after

    def apply_legal(self, graph: Graph, moves: Iterable[Move]) -> tuple[Graph, list[Move]]:
        """The graph after those of its moves that are legal after the ones before, in one pass, and these moves."""
        draft, done = Draft(graph, live=self.live), list[Move]()
        for move in moves:
            at = draft.makers.get(move.at, -1)
            if at >= 0 and move.at not in draft.ops(at)[-1].outs:  # an earlier move put another operation behind it
                draft = Draft(draft.graph() or graph, live=self.live)
                at = draft.makers[move.at]
            found = (
                next((r[1] for r in self._offered(draft, at, move) if not isinstance(r, Refusal)), None) if at >= 0 else None
            )
            if found is not None:
                draft.put(found)
                done.append(move)
        return (draft.graph() or graph) if done else graph, done

    def sweep(self, graph: Graph) -> Graph:
        """The graph after every move that the rule finds, in one pass."""
        return self.choose(graph)[0]

    def choose(self, graph: Graph, accept: Accept | None = None) -> tuple[Graph, list[Move]]:
        """The graph after every move that is accepted, in one pass, and those moves."""
        draft, moves, matches = Draft(graph, live=self.live), list[Move](), list[Match]()
        taken = set[int]()
        positions = range(len(graph.ops))
        for at in reversed(positions) if self.backwards else positions:
            results = self._offered(draft, at, None)
            while (result := next(results, None)) is not None:
                op = draft.op(at)
                if op is None or isinstance(result, Refusal) or taken & result[1].ops.keys():
                    continue
                params, match = result
                if accept is not None and not accept(*_before_and_after(draft, match)):
                    continue
                moves.append(Move(self.name, self.named(op), params))
                matches.append(match)
                if self.at_once:
                    taken |= match.ops.keys()
                    continue
                draft.put(match)
                results = self._offered(draft, at, None) if self.again else results
        if not moves:
            return graph, moves
        if not self.at_once:
            return draft.graph() or graph, moves
        for match in matches:
            draft.put(match)
        after = draft.graph(reorder=True)
        if after is None:  # two of them need each other crosswise
            draft, moves = Draft(graph, live=self.live), moves[:1]
            draft.put(matches[0])
            after = draft.graph(reorder=True)
        assert after is not None
        return after, moves


def _before_and_after(draft: Draft, match: Match) -> tuple[list[Op], list[Op]]:
    where = sorted(match.ops)
    return [op for at in where for op in draft.ops(at)], [op for at in where for op in match.ops[at]]


class OpRule(MatchRule):
    """A rule over one operation; everything follows from `match`."""

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """What the rule does with the operation at a position; a refusal (see `refuse`) where somebody might expect it to
        do something; ``None`` where nobody would."""
        raise NotImplementedError

    def candidates(self, draft: Draft, at: int, move: Move | None) -> Iterator[Candidate | Refusal]:
        """The one match at a position."""
        result = self.match(draft, at) if draft.op(at) is not None else None
        if result is not None:
            yield ((), result) if isinstance(result, Match) else result


class PairRule(MatchRule):
    """A rule over an operation and a second one, mostly the producer of a tensor that it reads; everything follows from
    `match`.

    Attributes:
        second: the parameter of a move that names a result of the second operation.
    """

    second: ClassVar[str] = "tensor"

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """What the rule does with the operations at two positions, as in `OpRule`."""
        raise NotImplementedError

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """Results of the operations that may be the second one, in the order in which they are tried: of those that make
        what a block operation reads."""
        op = draft.op(at)
        return op.inputs if isinstance(op, Block) else ()

    def candidates(self, draft: Draft, at: int, move: Move | None) -> Iterator[Candidate | Refusal]:
        """The matches with each partner, or with the one that a move names."""
        for second in list(self.partners(draft, at)) if move is None else [move.text(self.second)]:
            other = draft.makers.get(second, -1)
            result = self.match(draft, at, other) if 0 <= other != at and draft.op(at) is not None else None
            if result is not None:
                yield (((self.second, second),), result) if isinstance(result, Match) else result
