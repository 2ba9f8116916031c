"""What ``tapestry compile`` and `tapestry.compile` can be asked for: each option is declared once, as a field of `Options`.

Flags, defaults and what the keywords of Python become follow from the fields. Light, because every ``--help`` imports it.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapestry.ir.plan import Mesh

TYPES = {"int": int, "float": float, "Path": Path, "str": str}


def option(flag: str, help: str, default: Any = None, *, like: str = "", **how: Any) -> Any:
    """A field with a flag; a list where its default is ``()``, and a switch to the contrary where that is a truth. In errors,
    ``like`` or else the form of its value says what Python takes; the rest is for `argparse`."""
    like = like or " or ".join(how.get("choices", ())) or how.get("metavar", "a whole number")
    said = {"flag": flag, "like": like, "how": {"help": help, **how}}
    return field(default_factory=dict[str, Any], metadata=said) if default is dict else field(default=default, metadata=said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one compilation is asked for; a comment says who reads what is not the pipeline's. ``interrupt`` ends the search
    with the best plan so far, ``found`` is told of plans, values that are ``kept`` are computed whatever is known of them,
    ``began`` is when on the clock of `time.perf_counter`."""

    model: Path
    # fmt: off
    devices: int | None = option("--devices", "number of devices, as a mesh of one axis (d0)", metavar="N")
    mesh: Mesh | None = option(  # noqa: RUF009 (it makes a field)
        "--mesh", "devices as a grid of several axes, or with names: dp=2,tp=4", metavar="2x4",
        like='"2x4", (2, 4) or {"dp": 2, "tp": 4}')
    topology: str = option(
        "--topology", "devices and links: auto (this machine as measured, a GPU target's card), cpu, h100, h200, tpu, … or a "
        "file", "auto", metavar="FILE_OR_PRESET")
    shapes: Mapping[str, Any] = option(
        "--shape", "size of a symbol (compile: also a range 1..64 or list 128,256), or of an input: x=8x3x224x224", dict,
        nargs="+", metavar="SYMBOL=SIZE", like='{"batch": 8}')
    memory: str | None = option("--memory", "memory of each device: a hard limit", metavar="16GiB")
    memory_reserve: str | None = option(
        "--memory-reserve", "memory of each device that stays free (default: 8%% for GPU presets; 0 if --memory or a file "
        "gives the memory)", metavar="8%|2GiB")
    target: str = option("--target", "torch-cpu, or a GPU: triton:sm90, …", "torch-cpu", like='"torch-cpu" or "triton:sm90"')
    precision: str = option("--precision", "precision of float32 products in kernels", "ieee", metavar="ieee|tf32x3|tf32")
    accumulate: str | None = option("--accumulate", "type that sums products of f16 (f32)", choices=("f32", "f16"))
    assume_finite: bool = option(
        "--assume-finite", "assume that no value is NaN or infinite, and drop the model's tests for that (such as a guard "
        "around softmax)", False)
    reduce_in: str | None = option(
        "--reduce-in", "type in which partial sums of 16-bit floats travel (default: native for GPU presets, else f32); "
        "native: each is rounded once to the tensor's type, as with NCCL: an error of about parts * 2^-9 of the sums for bf16; "
        "f16 overflows at 65504", choices=("f32", "native"))
    for_format: str | None = option(
        "--for", "search only plans that this export format can express: tp-plan, dtensor, jax or onnx-ranks",
        metavar="FORMAT")
    pins: Sequence[str] = option(
        "--pin", "fix how to cut operations: conv1:h=8@d0, layers.*.up_proj:out=tp", (), nargs="+", metavar="OP:dim=parts@axis")
    layouts: Sequence[str] = option(
        "--layout", "fix where an input starts or an output ends: x:0=4@d0, or x:replicated", (), nargs="+",
        metavar="TENSOR:axis=parts@axis")
    rules: Sequence[Path] = option(
        "--rules", "a file of your own rewrite rules; algebra: the book of equations, which is not tried unasked", (),
        metavar="FILE")
    ops: Sequence[Path] = option(  # `lift.own_operators`
        "--ops", "a file of your own operators, as IR text", (), metavar="FILE")
    sharding: bool = option("--ignore-sharding", "ignore the multi-device annotations in the model", True)
    configuration: str | None = option(
        "--configuration", "device configuration of the model to use (default: the first with the right number of devices)",
        metavar="NAME")
    stages: str = option("--stages", "pipeline stages; 1: none; auto: only where they pay", "auto", metavar="auto|N")
    stage_at: Sequence[str] = option(
        "--stage-at", "nodes at which stages end: each has what its node needs and no earlier stage has (A,B: several)", (),
        nargs="+", metavar="NODE")
    micro_batches: str = option("--micro-batches", "parts of the batch, run one after another", "auto", metavar="auto|M")
    without: Sequence[str] = option(
        "--without-rule", "leave out a rewrite rule, or a phase of rules", (), metavar="RULE")
    weights: bool = option("--no-weights", "accept a model whose external data is missing", True)
    pareto: bool = option("--pareto", "also list the best plans for latency against memory", False)
    time_limit: float | None = option("--time-limit", "seconds for the search (default: a fixed amount of work)", metavar="S")
    resume: Path | None = option(  # noqa: RUF009
        "--resume", "continue from the plan and bound of an earlier build, which may be the output itself", metavar="BUILD")
    seed: int = option("--seed", "seed of the model's own random operators", 0)
    print_after: Sequence[str] = option("--print-after", "print the IR after a pass; it can be read back", (), metavar="PASS")
    # fmt: on
    interrupt: threading.Event = field(default_factory=threading.Event)
    found: Callable[[float, float], None] | None = None
    began: float = field(default_factory=time.perf_counter)
    kept: frozenset[str] = frozenset()


DECLARED: Mapping[str, Field[Any]] = {f.name: f for f in fields(Options)}
FLAGS = tuple(name for name, f in DECLARED.items() if f.metadata)


_KEYWORDS = {f.metadata["flag"]: f for f in DECLARED.values() if f.metadata}
_VALUE = r"[^\s;()]*(?:[=:@<\d]|auto|native|torch-cpu|[A-Z]{3,})[^\s;()]*(?<![.,:'])"
_FLAG = re.compile(rf"(?<![\w-])(--[a-z]+(?:-[a-z]+)*)(?: ({_VALUE}))?")


def in_python(text: str) -> str:
    """What is said of flags, said of keywords: ``--shape batch=8`` is ``shapes={"batch": 8}``."""

    def one(m: re.Match[str]) -> str:
        f, value = _KEYWORDS.get(m[1]), m[2] or ""
        if f is None:
            return m[0]
        if isinstance(f.default, bool):
            return f"{f.name}={not f.default}{value and ' '}{value}"
        key, _, size = value.rpartition("=")
        quoted = [v if v.isdigit() else f'"{v}"' for v in (size, value)]
        if f.name == "shapes":
            return f'shapes={{"{key}": {quoted[0]}}}' if key else f"shapes{value and ' '}{value}"
        return f"{f.name}={quoted[1]}" if value else f.name

    return _FLAG.sub(one, text)


def flags(p: argparse.ArgumentParser, *names: str) -> None:
    """The flags of some options, or of all."""
    for f in (DECLARED[name] for name in names or FLAGS):
        how = dict(f.metadata["how"])
        if isinstance(f.default, bool):
            how |= {"action": "store_const", "const": not f.default, "default": f.default}
        elif many(f) or f.name == "shapes":
            how |= {"action": "extend" if "nargs" in how else "append", "default": [], "type": _type(f)}
        else:
            how |= {"default": f.default, "type": _type(f)}
        p.add_argument(f.metadata["flag"], dest=f.name, **how)


def many(f: Field[Any]) -> bool:
    """Whether an option takes several values."""
    return str(f.type).startswith("Sequence")


def _type(f: Field[Any]) -> type | None:
    return TYPES.get(str(f.type).removesuffix(" | None").removeprefix("Sequence[").removesuffix("]"))


def several(value: Any) -> list[Any]:
    """What may be given alone or in a list."""
    return [] if value is None else [value] if isinstance(value, str | Path) else list(value)


def converted(name: str, value: Any) -> Any:
    """A keyword of Python as `Options` has it: what is text or a path there may be given as something else."""
    f = DECLARED[name]
    kind = _type(f)
    if many(f):
        return [Path(v) for v in several(value)] if kind is Path else several(value)
    return kind(value) if kind in (str, Path) else value
