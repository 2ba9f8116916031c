"""Merges of states as nodes, by the monoid's structure: of one block along its axes, or of a group of ranks."""

from __future__ import annotations

ALIKE = {"and": "min", "or": "max", "mul": "min"}  # of truth values
REDUCE = {"add": "ReduceSum", "mul": "ReduceProd", "max": "ReduceMax", "min": "ReduceMin"}
