"""The published JSON Schemas (draft 2020-12), made of the types by which the documents are read."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from tapestry.build.store import PlanData
from tapestry.ir.syntax.ir_document import GraphData
from tapestry.verify.rewriting.history import HistoryData
from tests.support.paths import ROOT

SCHEMAS: dict[str, tuple[type, str]] = {
    "plan": (PlanData, "plan.json of a build directory"),
    "ir": (GraphData, "a graph of the IR"),
    "history": (HistoryData, "the rewrites from the lifted graph to a plan's"),
}


def file_of(name: str) -> Path:
    """Where a schema is published."""
    return ROOT / "docs" / "reference" / f"{name}.schema.json"


def schema(name: str) -> str:
    """A schema, as its file has it."""
    kind, title = SCHEMAS[name]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"tapestry:{name}.schema.json", "title": title}
    return json.dumps({**head, **msgspec.json.schema(kind)}, indent=1) + "\n"
