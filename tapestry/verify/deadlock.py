"""Whether the messages of a program can block: every rank's script of exchanges, and a simulation that is harsher than any
network.

In an exchange a rank posts all its sends and receives for one step and does not go on before its partners have posted
theirs: no message is buffered (MPI calls such programs *safe*), and messages between two ranks match in the order in which
they are posted, tags or no tags. A collective of the backend stands here as the exchange that it replaces: both meet all of a
group, in one order on all ranks. What gets through here gets through gloo and NCCL. The scripts are worked out from the
program alone, by rules of their own; `tests/verify/test_deadlock.py` puts them in the order in which the runtime posts, and
holds what it really posts against them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tapestry.errors import LawError
from tapestry.ir.kernel import Box, size
from tapestry.ir.program import Program, Reduce, Transfer
from tapestry.ir.types import itemsize

LAW = "no_deadlock"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank posts at once: bytes to and from each partner, at a step and a part of it."""

    tag: tuple[int, int]
    sends: dict[int, int]
    receives: dict[int, int]

    @property
    def partners(self) -> set[int]:
        """Ranks that it takes."""
        return self.sends.keys() | self.receives.keys()


Script = Sequence[Exchange]
Flow = dict[tuple[int, int], int]  # (sender, receiver) -> bytes


def simulate(scripts: Sequence[Script]) -> int:
    """Run the scripts against each other; returns how many pairs of partners met, and one
    for each device that comes to the end of its steps.

    Raises:
        LawError: ranks wait for each other, or two ranks mean different messages.
    """
    at, left = [0] * len(scripts), [0] * len(scripts)
    waiting: dict[tuple[int, int], Exchange] = {}
    enter = list(range(len(scripts)))
    met = 0
    while enter:
        r = enter.pop()
        if at[r] == len(scripts[r]):
            continue
        mine = scripts[r][at[r]]
        for p in mine.partners:
            if not 0 <= p < len(scripts) or p == r:
                raise LawError(LAW, f"rank {r} exchanges with rank {p}", where=f"step {mine.tag[0]}")
            theirs = waiting.pop((p, r), None)
            if theirs is None:
                waiting[r, p] = mine
                left[r] += 1
                continue
            _agree(r, mine, p, theirs)
            met += 1
            left[p] -= 1
            if left[p] == 0:
                at[p] += 1
                enter.append(p)
        if left[r] == 0:
            at[r] += 1
            enter.append(r)
    stuck = next((r for r, n in enumerate(at) if n < len(scripts[r])), None)
    if stuck is not None:
        raise LawError(LAW, "ranks wait for each other", why=_chain(stuck, scripts, at, waiting))
    return met


def _agree(r: int, mine: Exchange, p: int, theirs: Exchange) -> None:
    sent = (mine.sends.get(p, 0), theirs.sends.get(r, 0))
    expected = (theirs.receives.get(r, 0), mine.receives.get(p, 0))
    if mine.tag != theirs.tag or sent != expected:
        raise LawError(
            LAW,
            f"ranks {min(r, p)} and {max(r, p)} mean different messages",
            where=f"steps {mine.tag} and {theirs.tag}",
            why=f"sent {sent} bytes, expected {expected}",
        )


def _chain(stuck: int, scripts: Sequence[Script], at: list[int], waiting: dict[tuple[int, int], Exchange]) -> str:
    """Who waits for whom, until a rank comes again or has ended."""
    told: list[str] = []
    seen: set[int] = set()
    r: int | None = stuck
    while r is not None and r not in seen:
        seen.add(r)
        p = min((q for a, q in waiting if a == r), default=None)
        told.append(f"rank {r} ended" if p is None else f"rank {r} at step {scripts[r][at[r]].tag[0]} waits for rank {p}")
        r = p
    return "; ".join(told)


def post(out: list[list[Exchange]], tag: tuple[int, int], flow: Flow, owner: list[int]) -> None:
    pairs: Flow = defaultdict(int)
    for (src, dst), nbytes in flow.items():
        if owner[src] != owner[dst]:
            pairs[owner[src], owner[dst]] += nbytes
    sends: dict[int, dict[int, int]] = defaultdict(dict)
    receives: dict[int, dict[int, int]] = defaultdict(dict)
    for (src, dst), nbytes in pairs.items():
        sends[src][dst], receives[dst][src] = nbytes, nbytes
    for r in sorted(sends.keys() | receives.keys()):
        out[r].append(Exchange(tag, sends.get(r, {}), receives.get(r, {})))


def flows(step: Transfer | Reduce, program: Program) -> Iterator[Flow]:
    """Bytes between devices in each part of a step."""
    if isinstance(step, Transfer):
        width, flow = itemsize(program.buffers[step.dst].dtype), defaultdict[tuple[int, int], int](int)
        for m in step.messages:
            flow[m.src, m.dst] += size(m.box) * width
        yield flow
        return
    yield dict(merged_flow(step, program, there=True))
    if step.kind == "all_reduce":
        yield dict(merged_flow(step, program, there=False))


def merged_flow(step: Reduce, program: Program, there: bool) -> Iterator[tuple[tuple[int, int], int]]:
    """States on their way to who merges them, or merged ones on their way back.

    In an all-reduce of three and more, the k-th of n devices merges rows k·N/n to (k+1)·N/n of the N that all fields have
    in common.
    """
    sent = set(step.sent)
    for g in step.groups:
        fields = [(program.buffers[s], program.buffers[d]) for s, d in zip(step.srcs, step.dsts, strict=True)]
        boxes = [_there(d.boxes[g[0]]) for _, d in fields]
        shared = _common(boxes)
        rows = size(boxes[0][:shared])
        whole = step.kind != "all_reduce" or len(g) <= 2
        for k, r in enumerate(g) if there or not whole else ():
            nbytes = 0
            for s, d in fields:
                box = _there(d.boxes[r])
                if s.name in sent:
                    part = size(box) if whole else ((k + 1) * rows // len(g) - k * rows // len(g)) * size(box[shared:])
                    nbytes += part * itemsize(s.dtype)
            for e in g:
                if e != r:
                    yield ((e, r) if there else (r, e)), nbytes


def _common(boxes: list[Box]) -> int:
    """Leading axes on which all boxes agree."""
    n = 0
    while all(len(b) > n and b[n] == boxes[0][n] for b in boxes):
        n += 1
    return n


def _there(box: Box | None) -> Box:
    assert box is not None
    return box


def check(program: Program) -> int:
    """Simulate every distinct exchange of a program on all its devices; returns how many pairs of partners met.

    All ranks post the exchanges of one list (`exchanges`) in its order, each those that concern it, and wait only for what they
    have posted. So when all exchanges before are through, the first one left can begin on all its ranks, and it is enough that
    each kind of exchange, alone, gets through.

    Raises:
        LawError: one does not.
    """
    seen: set[object] = set()
    met = program.devices
    for i, step in enumerate(program.steps):
        if isinstance(step, Transfer):
            key: object = (step.messages, program.buffers[step.dst].dtype)
        elif isinstance(step, Reduce):
            boxes = tuple(program.buffers[d].boxes for d in step.dsts)
            key = (step.kind, step.groups, boxes, tuple(program.buffers[s].dtype for s in step.srcs), len(step.sent))
        else:
            continue
        if key in seen:
            continue
        seen.add(key)
        out: list[list[Exchange]] = [[] for _ in range(program.devices)]
        for part, flow in enumerate(flows(step, program)):
            odd = next((ends for ends in flow if ends[0] == ends[1]), None)
            if odd is not None:
                raise LawError(LAW, f"device {odd[0]} sends to itself", where=f"step {i}")
            post(out, (i, part), flow, list(range(program.devices)))
        met += simulate(out)
    return met
