"""More edits of plans, written once the checker of `tapestry.verify.model` was finished."""

from __future__ import annotations

from tests.support.faults.graph_edits import Edit

LATER: dict[str, Edit] = {}
