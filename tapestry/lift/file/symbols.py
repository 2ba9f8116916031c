"""Binding of symbolic input dimensions: by symbol, by input, and by unification of symbols that must be equal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from onnx import ModelProto, ValueInfoProto

from tapestry.errors import ModelError

log = logging.getLogger(__name__)
Given = Mapping[str, int | str | Sequence[int]]
COMPANIONS = ("mask", "token_type", "segment", "position_ids")  # inputs that go along with another one, axis by axis
PROBES = 24  # shape inferences spent on guessing at most


def dims_of(value: ValueInfoProto) -> list[int | str]:
    """Dimensions of a declared tensor: sizes, and symbols for the rest (``input[axis]`` for an anonymous one)."""
    out: list[int | str] = []
    for k, d in enumerate(value.type.tensor_type.shape.dim):
        out.append(d.dim_value if d.HasField("dim_value") else d.dim_param or f"{value.name}[{k}]")
    return out


def bind(inputs: Mapping[str, list[int | str]], given: Given) -> dict[str, int]:
    """Symbol values from the user's ``shapes``.

    Raises:
        ModelError: unknown name, not an integer of at least 0, or a contradiction.
    """
    symbols = {s for dims in inputs.values() for s in dims if isinstance(s, str)}
    env: dict[str, int] = {}
    for name, value in given.items():
        sizes = _sizes(name, value)
        if name in symbols and len(sizes) == 1:
            _set(env, name, sizes[0], name)
        elif name in inputs:
            dims = inputs[name]
            if len(sizes) != len(dims):
                raise ModelError("wrong rank in --shape", where=f"input '{name}'", why=f"got {sizes}, the model has {dims}")
            for size, d in zip(sizes, dims, strict=True):
                if isinstance(d, str):
                    _set(env, d, size, name)
                elif d != size:
                    raise ModelError("--shape contradicts the model", where=f"input '{name}'", why=f"got {sizes}, has {dims}")
        else:
            close = get_close_matches(name, [*symbols, *inputs], 1)
            raise ModelError(
                "unknown name in --shape", where=f"'{name}'",
                why=f"the symbols are {sorted(symbols) or 'none'}, the inputs {sorted(inputs)}",
                hint=f"--shape {close[0]}={value}" if close else "--shape with one of these names",
            )  # fmt: skip
    return env


def _sizes(name: str, value: int | str | Sequence[int]) -> list[int]:
    parts: Sequence[int | str] = [value] if isinstance(value, int) else value
    if isinstance(value, str):
        parts = value.lower().replace(",", "x").split("x")
    try:
        sizes = [int(p) for p in parts]
    except (TypeError, ValueError):
        sizes = [-1]
    if any(s < 0 for s in sizes):  # 0 is a size too: the first step of a decoder has a past without positions
        raise ModelError(
            "sizes are integers of at least 0", where=f"--shape {name}={value}",
            hint=f"for example --shape {name}=8 or {name}=8x3x224x224",
        )  # fmt: skip
    return sizes


def _set(env: dict[str, int], symbol: str, size: int, by: str) -> None:
    if env.setdefault(symbol, size) != size:
        raise ModelError("--shape contradicts itself", where=f"'{by}'", why=f"{symbol} is both {env[symbol]} and {size}")


def unify(
    inputs: Mapping[str, list[int | str]], env: dict[str, int], consistent: Callable[[Mapping[str, int]], bool]
) -> dict[str, str]:
    """Equate unbound symbols with bound ones, updating ``env``; returns what was equated with what.

    First the axes of masks and the like with those of the input they go along with, if shape inference agrees; then any
    symbol for which inference accepts a bound symbol's value and rejects its successor: it must be equal.
    """
    pairs = {s: t for s, t in _companions(inputs, env).items() if t in env}
    if pairs and consistent({**env, **{s: env[t] for s, t in pairs.items()}}):
        env.update({s: env[t] for s, t in pairs.items()})
    else:
        pairs = {}
    budget = PROBES
    for s in dict.fromkeys(d for dims in inputs.values() for d in dims if isinstance(d, str) and d not in env):
        for t in [t for t in env if t not in pairs]:
            budget -= 2
            if budget >= 0 and consistent({**env, s: env[t]}) and not consistent({**env, s: env[t] + 1}):
                env[s] = env[t]
                pairs[s] = t
                break
    for s, t in pairs.items():
        log.info("symbol %s = %s (%d): they must be equal", s, t, env[s])
    return pairs


def _companions(inputs: Mapping[str, list[int | str]], env: Mapping[str, int]) -> dict[str, str]:
    out: dict[str, str] = {}
    for name, dims in inputs.items():
        if not any(c in name.lower() for c in COMPANIONS):
            continue
        others = [n for n in inputs if n != name and len(inputs[n]) == len(dims)]
        others = [n for n in others if not any(c in n.lower() for c in COMPANIONS)]
        if not others:
            continue
        prefix = {n: sum(1 for a, b in zip(n.split("_"), name.split("_"), strict=False) if a == b) for n in others}
        best = max(others, key=lambda n: (prefix[n], -list(inputs).index(n)))
        for mine, theirs in zip(dims, inputs[best], strict=True):
            if isinstance(mine, str) and mine not in env and isinstance(theirs, str) and mine != theirs:
                out[mine] = theirs
    return out


def unbound(inputs: Mapping[str, list[int | str]], env: Mapping[str, int]) -> None:
    """Raise a ModelError that lists every symbol without a value, where it occurs, and an example."""
    where: dict[str, list[str]] = {}
    for name, dims in inputs.items():
        for axis, d in enumerate(dims):
            if isinstance(d, str) and d not in env:
                where.setdefault(d, []).append(f"{name}[{axis}]")
    if not where:
        return
    listing = "; ".join(s if places == [s] else f"{s} in {', '.join(places)}" for s, places in where.items())
    example = " ".join(f"--shape {s}={8 if k == 0 else 128}" for k, s in enumerate(where) if "[" not in s)
    first = next(iter(where.values()))[0].rpartition("[")[0]
    by_input = f"--shape {first}={'x'.join('8' if isinstance(d, str) else str(d) for d in inputs[first])}"
    raise ModelError("symbolic dimensions without a size", where="inputs", why=listing, hint=example or by_input)


def rewrite(model: ModelProto, env: Mapping[str, int]) -> None:
    """Put sizes in the place of symbols, in inputs, outputs and declared values."""
    for group in (model.graph.input, model.graph.output, model.graph.value_info):
        for value in group:
            if not value.type.HasField("tensor_type"):
                continue
            for k, d in enumerate(value.type.tensor_type.shape.dim):
                symbol = d.dim_param or f"{value.name}[{k}]"
                if not d.HasField("dim_value") and symbol in env:
                    d.dim_value = env[symbol]
