"""What ``tapestry compile`` and `tapestry.compile` can be asked for."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapestry.ir.plan import Mesh
from tapestry.plan.solver.budget import Found, unseen

MeshLike = str | Mesh | Sequence[int] | Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``tapestry compile`` takes; see README. ``print_after`` names passes after which the IR is printed,
    ``without`` rules (or a phase of them) that are not used, ``kept`` values that are computed whatever is known of them."""

    model: Path
    shapes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mesh: Mesh | None = None
    topology: str = "auto"
    memory: str | None = None
    memory_reserve: str | None = None
    target: str = "torch-cpu"
    precision: str = "ieee"
    accumulate: str | None = None
    reduce_in: str = "f32"
    assume_finite: bool = False
    for_format: str | None = None
    pins: Sequence[str] = ()
    layouts: Sequence[str] = ()
    rules: Sequence[Path] = ()
    weights: bool = True
    time_limit: float | None = None
    seed: int = 0
    pareto: bool = False
    sharding: bool = True
    configuration: str | None = None
    resume: Path | None = None
    exact: bool = False
    without: Sequence[str] = ()
    interrupt: threading.Event = field(default_factory=threading.Event)
    found: Found = unseen
    stages: str = "auto"
    micro_batches: str = "auto"
    stage_at: Sequence[str] = ()
    print_after: Sequence[str] = ()
    kept: frozenset[str] = frozenset()
