"""From a model and the choices of `tapestry.compile` to its plan: of one size or several, of given devices or as many as pay.

A module of its own, so that loading and running a build imports no compiler.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from tapestry.build.sized_builds import SizedBuild
from tapestry.compiler import pipeline
from tapestry.errors import TapestryError
from tapestry.frontends.choices import Choices, Opened, check_keywords, opened_source, options
from tapestry.lift.own_operators import load_operators
from tapestry.options import several
from tapestry.plan.topology.presets import CHIP_OF
from tapestry.sizes.sized_compile import asked as asked_sizes
from tapestry.sizes.sized_compile import compile_sizes

log = logging.getLogger("tapestry")


def with_inputs(choices: Choices, positional: tuple[Any, ...]) -> Choices:
    """The choices, with example inputs that were given without their name.

    Raises:
        TapestryError: there are several arguments without a name, or example inputs are given twice.
    """
    if not positional:
        return choices
    given, *more = positional
    if more:
        what = f"a model and {len(positional)} arguments without a name"
        hint = 'tapestry.compile(module, (x, y)): example inputs in one tuple; all else by name, such as mesh="2x4"'
        raise TapestryError(what, where="tapestry.compile", hint=hint)
    if "example_inputs" in choices:
        hint = "the second argument or the keyword"
        raise TapestryError("example inputs are given twice", where="tapestry.compile", hint=hint)
    return {**choices, "example_inputs": given}


def planned(model: Any, choices: Choices, began: float) -> tuple[pipeline.Compiled, Opened, SizedBuild | None]:
    """The plan, the model's file, and the plans of all sizes where there are several; ``began`` is when it was asked for.

    Raises:
        TapestryError: with what, where, why and what to try.
    """
    check_keywords(choices)
    load_operators(*map(Path, several(choices.get("ops"))))
    source = opened_source(model, choices.get("example_inputs"), choices.get("dynamic_shapes"))
    progress = choices.get("progress", lambda phase, name: None)
    asked = replace(options(source, choices), began=began)
    if (chip := CHIP_OF.get(asked.topology)) and asked.target == "torch-cpu":
        log.warning("planned for %s, with kernels for torch-cpu: target triton:%s makes the GPU's", asked.topology, chip)
    sizes = asked_sizes(source.path, asked.shapes)
    if sizes is None:
        return pipeline.compile_model(asked, progress), source, None
    done = compile_sizes(asked, sizes, progress)
    return done.first, source, done.sized
