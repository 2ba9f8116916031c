"""How the next token is chosen from scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapestry.errors import TapestryError

Array = np.ndarray[Any, Any]
Draw = Callable[[Array], int]
"""From scores [vocabulary] to a token."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """Draws tokens by their probabilities: the same for the same seed and number of the prompt, whatever runs beside it.

    Attributes:
        temperature: scores are divided by it.
        top_k: only so many likeliest tokens may come; 0 is all.
        first: the number of a call's first prompt; the others follow.
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    first: int = 0

    def sampler(self, number: int) -> Draw:
        """What draws the tokens of one prompt of a call."""
        if not self.temperature > 0 or min(self.seed, self.top_k, self.first) < 0:
            what = f"temperature {self.temperature:g}, seed {self.seed}, top_k {self.top_k}, first {self.first}"
            raise TapestryError(what, hint="a temperature above 0, the others 0 or more")
        rng = np.random.default_rng([self.seed, self.first + number])

        def draw(scores: Array) -> int:
            x = scores.astype(np.float64) / self.temperature
            if 0 < self.top_k < len(x):
                x[x < np.partition(x, -self.top_k)[-self.top_k]] = -np.inf
            up = np.cumsum(np.exp(x - x.max()))
            return min(int((up <= rng.random() * up[-1]).sum()), len(x) - 1)

        return draw


def greedy(scores: Array) -> int:
    """The likeliest token, the first of equal ones."""
    return int(scores.argmax())


def sampler_of(name: str | Seeded) -> Callable[[int], Draw]:
    """A sampler by its name, or with settings: of each prompt by its number."""
    if isinstance(name, Seeded):
        return name.sampler
    known: dict[str, Callable[[int], Draw]] = {"greedy": lambda _: greedy, "seeded": Seeded().sampler}
    if name not in known:
        raise TapestryError(f"there is no sampler '{name}'", hint="greedy or seeded")
    return known[name]
