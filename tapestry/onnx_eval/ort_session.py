"""Sessions of onnxruntime on the CPU, of which we want values and not speed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

NO_ENTRIES: Mapping[str, str] = MappingProxyType({})
DIVIDES_BY_EXTENTS = frozenset({"Einsum"})


def ends_process(operators: Iterable[str], sizes: Iterable[int]) -> bool:
    """Whether onnxruntime may divide by a size of 0, which ends the process: it does in an Einsum of nothing."""
    return not DIVIDES_BY_EXTENTS.isdisjoint(operators) and 0 in sizes


def ort_session(
    model: Path | str | bytes, *, optimized: bool = True, threads: int = 0, entries: Mapping[str, str] = NO_ENTRIES
) -> Any:
    """A session that prints nothing and whose threads sleep while they wait: by default they spin, each on a core of its own.

    Args:
        optimized: nodes may be fused and moved.
        threads: how many compute an operator; 0: as many as there are cores.
        entries: further settings, as onnxruntime names them.
    """
    ort: Any = importlib.import_module("onnxruntime")  # (it has no types)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    given = str(model) if isinstance(model, Path) else model
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
