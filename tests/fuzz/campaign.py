"""Many cases: counted, timed, each failure shrunk and written where it can be read and run again."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tapestry.errors import TapestryError, some
from tapestry.ir.plan import Mesh, MeshAxis
from tests.fuzz.generate.random_model import Model, random_model
from tests.fuzz.recipe import Recipe
from tests.fuzz.shrink import outcome, shrink
from tests.fuzz.trial import Failure, Prepared, Refused, attempt, draw_recipe, prepare

PLANS = 4  # recipes per model
ALONE: Mesh = (MeshAxis("d0", 1),)


@dataclass(slots=True)
class Tally:
    """What a campaign did."""

    cases: int = 0
    models: int = 0
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    free: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    families: Counter[str] = field(default_factory=Counter[str])
    operators: Counter[str] = field(default_factory=Counter[str])
    rules: Counter[str] = field(default_factory=Counter[str])
    via: Counter[str] = field(default_factory=Counter[str])
    devices: Counter[str] = field(default_factory=Counter[str])

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "passed": not self.failures, "cases": self.cases, "models": self.models, "seconds": round(self.seconds, 2),
            "failures": self.failures, "refused": dict(self.refused.most_common()), "families": dict(self.families),
            "operators": dict(self.operators.most_common()), "rules": dict(self.rules), "via": dict(self.via),
            "meshes": dict(self.devices), "free_cells": dict(self.free.most_common()),
        }  # fmt: skip


def fuzz(
    seed: int,
    count: int,
    *,
    first: int = 0,
    limit: float = float("inf"),
    output: Path | None = None,
    stop: int = 20,
    shrinking: float = 30.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tally:
    """Try cases number ``first`` to ``first + count - 1`` of a seed; case n is recipe n % `PLANS` of model n // `PLANS`.

    Args:
        limit: seconds after which no further case is begun.
        output: a folder for what failed; without it nothing is written.
        stop: different failures after which the campaign ends.
        shrinking: seconds that may go into making one failure smaller.
    """
    if count < 1 or first < 0:
        raise TapestryError(f"cases {first} to {first + count - 1}", where="--count", hint="at least one, from 0 on")
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tapestry-fuzz-") as name:
        folder, number, current = Path(name), -1, None
        for n in range(first, first + count):
            if time.monotonic() - began > limit or len(tally.failures) >= stop:
                break
            if n // PLANS != number:
                number = n // PLANS
                current = _model(f"{seed} {number}", folder, tally)
            failed = _case(current, f"{seed} {n}", tally) if current else None
            if failed:
                _count(tally, _record(n, seed, failed, folder, output, shrinking))
            tally.cases += 1
            progress(n - first + 1, count)
    tally.seconds = time.monotonic() - began
    return tally


def _model(seed: str, folder: Path, tally: Tally) -> tuple[Model, Prepared | Failure] | None:
    model = random_model(seed)
    tally.models += 1
    tally.families.update(set(model.families))
    tally.operators.update({n.op_type for n in model.nodes})
    try:
        return model, prepare(model, folder / "model.onnx")
    except Refused as e:
        tally.refused[e.message] += 1
        return None


def _case(current: tuple[Model, Prepared | Failure], seed: str, tally: Tally) -> tuple[Model, Recipe, Failure] | None:
    model, p = current
    if isinstance(p, Failure):
        return model, Recipe(mesh=ALONE), p
    recipe = draw_recipe(p, seed)
    if isinstance(recipe, Failure):
        return model, Recipe(mesh=ALONE), recipe
    tally.rules.update(m.split("@")[0] for m in recipe.moves)
    tally.via[recipe.via] += 1
    tally.devices["x".join(str(a.size) for a in recipe.mesh)] += 1
    failure = attempt(p, recipe)
    tally.free.update(p.free)
    p.free.clear()
    return (model, recipe, failure) if failure else None


def _count(tally: Tally, row: dict[str, Any]) -> None:
    """A failure like one before it (same kind, same nodes left by the shrinker) is counted with that one."""
    alike = ("kind", "what", "nodes")
    for known in tally.failures:
        if all(known[k] == row[k] for k in alike):
            known["again"].append(row["case"])
            return
    tally.failures.append(row)


def _record(
    n: int, seed: int, failed: tuple[Model, Recipe, Failure], folder: Path, output: Path | None, shrinking: float
) -> dict[str, Any]:
    model, recipe, failure = failed
    small = shrink((model, recipe), failure, folder, shrinking) if shrinking > 0 else (model, recipe)
    found = outcome(small, folder) or failure
    row: dict[str, Any] = {
        "case": n, "seed": seed, "kind": failure.kind, "what": failure.what, "detail": found.detail,
        "nodes": [x.op_type for x in small[0].nodes], "recipe": small[1].document(), "sizes": small[0].sizes, "again": [],
    }  # fmt: skip
    if output is not None:
        label = re.sub(r"\W+", "-", f"{seed}-{n}-{failure.kind}")
        row["files"] = str(write(small, output / label, row))
    return row


def write(case: tuple[Model, Recipe], place: Path, row: dict[str, Any]) -> Path:
    """A failure as files: ``model.onnx``, the values of its inputs and outputs, and ``case.json`` with recipe and seeds."""
    place.mkdir(parents=True, exist_ok=True)
    case[0].save(place / "model.onnx")
    np.savez(place / "inputs.npz", **_arrays(case[0].inputs))
    np.savez(place / "outputs.npz", **_arrays(case[0].outputs))
    (place / "case.json").write_text(json.dumps(row, indent=1) + "\n")
    return place


def _arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a .npz file can hold."""
    return {k: v for k, v in values.items() if v.dtype.name != "bfloat16"}


def text(tally: Tally) -> str:
    """As a person reads it."""
    cases = f"{some(tally.cases, 'case')} of {some(tally.models, 'model')}"
    lines = [f"{cases} in {tally.seconds:.1f} s, {len(tally.families)} families"]
    for message, n in tally.refused.most_common():
        lines.append(f"  {n:6} models refused: {message}")
    if tally.free.total():
        lines.append(f"  {tally.free.total():6,} cells judged by nobody: rounding alone makes them finite or not")
    for row in tally.failures:
        again = f", and {len(row['again'])} cases like it" if row["again"] else ""
        lines.append(f"FAILED case {row['case']} of seed {row['seed']}: {row['kind']}, {row['what']}{again}")
        lines.append(f"  {' → '.join(row['nodes'])} on {row['recipe']['mesh']} {' '.join(row['recipe']['moves'])}")
        lines += [f"  {line}" for line in row["detail"].splitlines()[-3:]]
    lines.append("no wrong answer" if not tally.failures else f"{len(tally.failures)} different failures")
    return "\n".join(lines) + "\n"
