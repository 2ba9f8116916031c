"""Binding of symbolic input dimensions: by symbol, by input, and by what follows from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from onnx import ModelProto, ValueInfoProto

from tapestry.errors import ModelError

Given = Mapping[str, int | str | Sequence[int]]


def dims_of(value: ValueInfoProto) -> list[int | str]:
    """Dimensions of a declared tensor: sizes, and symbols for the rest (``input[axis]`` for an anonymous one)."""
    out: list[int | str] = []
    for k, d in enumerate(value.type.tensor_type.shape.dim):
        out.append(d.dim_value if d.HasField("dim_value") else d.dim_param or f"{value.name}[{k}]")
    return out


def bind(inputs: Mapping[str, Sequence[int | str]], given: Given) -> dict[str, int]:
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
            there = f"symbols: {', '.join(sorted(symbols)) or 'none, all sizes are fixed'}; inputs: {', '.join(sorted(inputs))}"
            close = get_close_matches(name, [*symbols, *inputs], 1)
            raise ModelError(
                "unknown name in --shape",
                where=f"'{name}'",
                why=there,
                hint=f"--shape {close[0]}={value}" if close else "--shape with one of these names",
            )
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
            "sizes are integers of at least 0",
            where=f"--shape {name}={value}",
            hint=f"for example --shape {name}=8 or {name}=8x3x224x224",
        )
    return sizes


def _set(env: dict[str, int], symbol: str, size: int, by: str) -> None:
    if env.setdefault(symbol, size) != size:
        raise ModelError("--shape contradicts itself", where=f"'{by}'", why=f"{symbol} is both {env[symbol]} and {size}")


def unbound(inputs: Mapping[str, list[int | str]], env: Mapping[str, int]) -> None:
    """Raise a ModelError that lists every symbol whose size is not known, where it occurs, and an example."""
    where: dict[str, list[str]] = {}
    for name, dims in inputs.items():
        for axis, d in enumerate(dims):
            if isinstance(d, str) and d not in env:
                where.setdefault(d, []).append(f"{name}[{axis}]")
    if not where:
        return
    listing = "; ".join(s if places == [s] else f"{s} in {', '.join(places)}" for s, places in where.items())
    example = " ".join(f"--shape {s}={8 if k == 0 else 128}" for k, s in enumerate(where) if "[" not in s)
    example += f"; or --shape {next(iter(where))}={next(iter(env))}, if they are always the same" if example and env else ""
    first = next(iter(where.values()))[0].rpartition("[")[0]
    by_input = f"--shape {first}={'x'.join('8' if isinstance(d, str) else str(d) for d in inputs[first])}"
    what = f"the size of {' and of '.join(where)} is not given{', and does not follow from the others' if env else ''}"
    raise ModelError(what, where="inputs", why=listing, hint=example or by_input)


def rewrite_file(model: ModelProto, env: Mapping[str, int]) -> None:
    """Put sizes in the place of symbols, in inputs, outputs and declared values."""
    for group in (model.graph.input, model.graph.output, model.graph.value_info):
        for value in group:
            if not value.type.HasField("tensor_type"):
                continue
            for k, d in enumerate(value.type.tensor_type.shape.dim):
                symbol = d.dim_param or f"{value.name}[{k}]"
                if not d.HasField("dim_value") and symbol in env:
                    d.dim_value = env[symbol]
