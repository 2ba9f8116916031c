"""What ``tapestry compile`` and `tapestry.compile` can be asked for: each option is declared once, as a field of `Options`.

Flags, defaults and what the keywords of Python become follow from the fields. Light, because every ``--help`` imports it.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapestry.ir.plan import Mesh
    from tapestry.plan.solver.budget import Found

TYPES = {"int": int, "float": float, "Path": Path, "str": str}


def option(flag: str, help: str, default: Any = None, *, like: str = "", **how: Any) -> Any:
    """A field with a flag; a list where its default is ``()``, and a switch to the contrary where that is a truth. In errors,
    ``like`` or else the form of its value says what Python takes; the rest is for `argparse`."""
    like = like or " or ".join(how.get("choices", ())) or how.get("metavar", "a whole number").replace("%%", "%")
    said = {"flag": flag, "like": like, "how": {"help": help, **how}}
    return field(default_factory=dict[str, Any], metadata=said) if default is dict else field(default=default, metadata=said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one compilation is asked for; a comment says who reads what is not the pipeline's. ``interrupt`` ends the search
    with the best plan so far, ``found`` is told of plans, values that are ``kept`` are computed whatever is known of them."""

    model: Path
    # fmt: off
    devices: int | None = option("--devices", "a mesh of one axis, d0", metavar="N")
    mesh: Mesh | None = option(  # noqa: RUF009 (it makes a field)
        "--mesh", "a mesh of several axes, or with names: dp=2,tp=4", metavar="2x4", like='"2x4", (2, 4) or {"dp": 2, "tp": 4}')
    max_devices: int | None = option(  # with the next two: `tools.machines`
        "--max-devices", "at most N devices; the objective decides how many", metavar="N")
    objective: str | None = option(
        "--objective", "what is minimised: seconds + 2e-3*devices; over seconds, devices, bytes, energy, money, with + - * / "
        "min max", metavar="EXPRESSION")
    limits: Sequence[str] = option(
        "--limit", "what a plan may take at most: energy<=5, money<=1e-6, bytes<=2GiB", (), nargs="+", metavar="TERM<=VALUE")
    topology: str = option(
        "--topology", "devices and links: auto (this machine, as measured), cpu, h100, h200, a100-pcie, tpu, or a file", "auto",
        metavar="FILE_OR_PRESET")
    shapes: Mapping[str, Any] = option(
        "--shape", "size of a symbol, a range 1..64 or a list 128,256 (compile), or INPUT=8x3x224x224", dict, nargs="+",
        metavar="SYMBOL=SIZE", like='{"batch": 8}')
    memory: str | None = option("--memory", "memory of a device; the plan keeps to it", metavar="16GiB")
    memory_reserve: str | None = option(
        "--memory-reserve", "what of a device's memory stays free (8%% of a GPU preset's own; 0 where --memory or a file "
        "says how much)", metavar="8%%|2GiB")
    target: str = option("--target", "torch-cpu, triton:sm90, …", "torch-cpu", like='"torch-cpu" or "triton:sm90"')
    precision: str = option("--precision", "precision of float32 products in kernels", "ieee", metavar="ieee|tf32x3|tf32")
    accumulate: str | None = option("--accumulate", "how sums of products of f16 are held (f32)", choices=("f32", "f16"))
    assume_finite: bool = option(
        "--assume-finite", "take tests for NaN and infinities (a guard around softmax, say) for false: no value is infinite "
        "or NaN", False)
    reduce_in: str = option(
        "--reduce-in", "how partial sums of 16-bit floats travel (f32); native: each rounded once to the tensor's type, as "
        "NCCL has them: of bf16 an error of about parts * 2^-9 relative to the partial sums, and f16 overflows at 65504", "f32",
        choices=("f32", "native"))
    for_format: str | None = option(
        "--for", "search only the plans that the format of export can say: tp-plan, dtensor, jax or onnx-ranks",
        metavar="FORMAT")
    pins: Sequence[str] = option(
        "--pin", "how operations are cut: conv1:h=8@d0, layers.*.up_proj:out=tp", (), nargs="+", metavar="OP:dim=parts@axis")
    layouts: Sequence[str] = option(
        "--layout", "where an input starts or an output ends: x:0=4@d0, or x:replicated", (), nargs="+",
        metavar="TENSOR:axis=parts@axis")
    state: str | None = option(  # `runtime.kept_state`
        "--state", "caches that a session keeps on the devices; without a value, those whose names pair", nargs="?",
        const="auto", metavar="PAST=PRESENT,…")
    rules: Sequence[Path] = option("--rules", "rewrite rules of your own", (), metavar="FILE")
    ops: Sequence[Path] = option(  # `lift.own_operators`
        "--ops", "operators of a domain of your own, as IR text", (), metavar="FILE")
    sharding: bool = option("--ignore-sharding", "plan without the model's own multi-device annotations", True)
    configuration: str | None = option(
        "--configuration", "which of the model's device configurations (default: the first for as many devices)",
        metavar="NAME")
    stages: str = option("--stages", "pipeline stages; 1 for none (auto: where they pay)", "auto", metavar="auto|N")
    stage_at: Sequence[str] = option(
        "--stage-at", "where stages end: each has what its node needs and no earlier stage has (A,B: several)", (), nargs="+",
        metavar="NODE")
    micro_batches: str = option("--micro-batches", "parts of the batch that follow each other", "auto", metavar="auto|M")
    without: Sequence[str] = option(
        "--without-rule", "leave a rewrite rule out, or a phase of them (algebra: the book of equations)", (), metavar="RULE")
    exact: bool = option("--exact", "the same bits on 1, 2, 3, 4, 6, 8, 12 or 24 devices", False)
    weights: bool = option("--no-weights", "take a model whose external data is not there", True)
    pareto: bool = option("--pareto", "also show the front of latency against memory", False)
    time_limit: float | None = option("--time-limit", "seconds for the search (by default: an amount of work)", metavar="S")
    resume: Path | None = option(  # noqa: RUF009
        "--resume", "go on from a build's plan and bound; BUILD may be the output", metavar="BUILD")
    seed: int = option("--seed", "seed of the model's own random operators", 0)
    print_after: Sequence[str] = option("--print-after", "the IR after a pass, which reads back", (), metavar="PASS")
    # fmt: on
    interrupt: threading.Event = field(default_factory=threading.Event)
    found: Found | None = None
    kept: frozenset[str] = frozenset()


DECLARED: Mapping[str, Field[Any]] = {f.name: f for f in fields(Options)}
FLAGS = tuple(name for name, f in DECLARED.items() if f.metadata)


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
