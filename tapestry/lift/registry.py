"""Which function lifts which operator.

A lifter takes one node and emits operations to its builder. It raises `Declined` for an attribute or a data-dependent input
that it has no affine form for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import NodeProto

from tapestry.lift.builder import Node

Lifter = Callable[[Node], None]


class Declined(Exception):
    """A lifter has no affine form for a node, which becomes opaque then."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A lifter for one operator from one opset version on."""

    since: int
    lifter: Lifter


LIFTERS: dict[tuple[str, str], list[Entry]] = {}


def lifts(*ops: str, since: int = 1, domain: str = "") -> Callable[[Lifter], Lifter]:
    """Register a lifter for operators, from an opset version on."""

    def add(lifter: Lifter) -> Lifter:
        for op in ops:
            entries = LIFTERS.setdefault((domain, op), [])
            entries.append(Entry(since, lifter))
            entries.sort(key=lambda e: -e.since)
        return lifter

    return add


def find(node: NodeProto, version: int) -> Lifter | None:
    """The lifter for a node at an opset version; the newest one that is not newer."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return next((e.lifter for e in LIFTERS.get((domain, node.op_type), ()) if e.since <= version), None)
