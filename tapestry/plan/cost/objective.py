"""Costs beyond time: what a plan takes in seconds, devices, memory, energy and money, and objectives and limits over them.

An objective is a small expression (``seconds + 2e-3*devices``): numbers, terms, ``+ - * /``, ``min`` and ``max``. It is parsed
into Python's syntax tree, of which nothing else is let through, and never evaluated as code.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from tapestry.errors import TapestryError, similar
from tapestry.ir.plan import device_count
from tapestry.plan.topology import Device, Topology, parse_bytes
from tapestry.plugins import entry_points as plugins

TERMS = {
    "seconds": "of the plan on the planner's clock",
    "devices": "of the mesh",
    "bytes": "peak of the device that needs most",
    "energy": "joules: the watts of all devices of the mesh, for as long as the plan takes",
    "money": "the price per hour of all devices of the mesh, for as long as the plan takes",
}
LARGEST = 1e300
LONGEST = 400  # characters of an expression, so that its tree is not deep


def terms(topo: Topology, seconds: float, peak: int) -> dict[str, float]:
    """Every term of a plan that takes so long and needs so many bytes on its fullest device. All devices of the mesh count for
    all of the time, whether they compute or wait."""
    kinds = topo.kinds or (topo.device,) * device_count(topo.mesh)
    watts, price = sum(d.watts for d in kinds), sum(d.price for d in kinds)
    return {
        "seconds": seconds, "devices": float(len(kinds)), "bytes": float(peak), "energy": watts * seconds,
        "money": price * seconds / 3600,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Objective:
    """An expression over `TERMS`; smaller is better."""

    text: str
    tree: ast.expr

    @property
    def names(self) -> set[str]:
        """The terms that it has."""
        return {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n.id in TERMS}

    @property
    def rising(self) -> bool:
        """Whether it surely never falls where a term grows: then lower bounds of terms give one of it."""
        return _rises(self.tree)

    def value(self, of: Mapping[str, float]) -> float:
        """Its value; infinite where there is none (a division by zero, an overflow)."""
        try:
            found = _value(self.tree, of)
        except (ZeroDivisionError, OverflowError):
            return math.inf
        return math.inf if math.isnan(found) else found


@dataclass(frozen=True, slots=True)
class Limit:
    """A term may be at most so much."""

    term: str
    most: float

    def __str__(self) -> str:
        short = f"{self.most:g}"
        exact = str(int(self.most)) if self.term == "bytes" else short if float(short) == self.most else repr(self.most)
        return f"{self.term}<={exact}"


def objective(text: str) -> Objective:
    """An expression.

    Raises:
        TapestryError: it is none; says what is not allowed in it.
    """
    if len(text) > LONGEST:
        raise TapestryError(f"{len(text)} characters", where="--objective", hint=f"at most {LONGEST}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise TapestryError(f"'{text}' is not an expression", where="--objective", hint="seconds + 2e-3*devices") from None
    _check(tree, text)
    return Objective(text.strip(), tree)


def limits(texts: Sequence[str]) -> tuple[Limit, ...]:
    """``energy<=5``, ``bytes<=2GiB``.

    Raises:
        TapestryError: a term is unknown, or it is no limit.
    """
    out: list[Limit] = []
    for text in texts:
        m = re.fullmatch(r"\s*(\w+)\s*<=\s*(\S+)\s*", text)
        if not m:
            raise TapestryError(f"'{text}' is not a limit", where="--limit", hint="energy<=5, or bytes<=2GiB")
        _known(m.group(1), "--limit")
        try:
            most = float(parse_bytes(m.group(2))) if m.group(1) == "bytes" else float(m.group(2))
        except ValueError:
            most = math.nan
        if not 0 <= most < math.inf:
            raise TapestryError(f"'{m.group(2)}' is not a number of at least 0", where=f"--limit {text}")
        out.append(Limit(m.group(1), most))
    return tuple(out)


def needs_figures(names: set[str], topo: Topology) -> None:
    """Refuse energy or money where nothing says what devices take.

    Raises:
        TapestryError: naming the figure.
    """
    kinds = topo.kinds or (topo.device,)
    for term, key, given in (("energy", "watts", all(d.watts for d in kinds)), ("money", "price", all(d.price for d in kinds))):
        if term in names and not given:
            hint = f'"{key}" of every device, in a topology file (docs/reference/topology.md)'
            raise TapestryError(f"nothing is known of {term}", where=f"topology {topo.name}", why=f"no {key}", hint=hint)


def _known(name: str, where: str) -> None:
    if name not in TERMS:
        raise TapestryError(f"there is no term '{name}'", where=where, hint=similar(name, TERMS) or ", ".join(TERMS))


def _check(node: ast.expr, text: str) -> None:
    """Let through numbers, terms, four operators, two functions."""
    match node:
        case ast.Constant(value=int() | float() as number) if type(number) is not bool and abs(number) <= LARGEST:
            return
        case ast.Name():
            _known(node.id, "--objective")
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            _check(node.left, text)
            _check(node.right, text)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            _check(node.operand, text)
        case ast.Call(func=ast.Name(id="min" | "max"), keywords=[]) if node.args:
            for x in node.args:
                _check(x, text)
        case _:
            what = ast.get_source_segment(text.strip(), node) or text
            hint = f"numbers, {', '.join(TERMS)}, + - * / min max"
            raise TapestryError(f"'{what}' is not allowed in an objective", where="--objective", hint=hint)


def _value(node: ast.expr, of: Mapping[str, float]) -> float:
    match node:
        case ast.Name():
            return of[node.id]
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp():
            x = _value(node.operand, of)
            return -x if isinstance(node.op, ast.USub) else x
        case ast.BinOp():
            a, b = _value(node.left, of), _value(node.right, of)
            match node.op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case _:
                    return a / b
        case ast.Call(func=ast.Name(id=name)):
            return (min if name == "min" else max)(_value(x, of) for x in node.args)
        case _:
            raise AssertionError("checked when it was parsed")


def _rises(node: ast.expr) -> bool:
    """Whether an expression is nowhere negative and never falls, by its form; terms are not negative."""
    match node:
        case ast.Name():
            return True
        case ast.Constant(value=int() | float() as number):
            return number >= 0
        case ast.BinOp(op=ast.Add() | ast.Mult()):
            return _rises(node.left) and _rises(node.right)
        case ast.BinOp(op=ast.Div(), right=ast.Constant()):
            return _rises(node.left) and _value(node.right, {}) > 0
        case ast.Call():
            return all(map(_rises, node.args))
        case _:
            return False


# Cost models of other packages: seconds of a kernel by a function of theirs, in the place of the roofline (`cost.compute`).


KIND = "costs"
Model = Callable[[str, str, float, float, float, Device], float]
"""``(kernel class, dtype, contraction FLOPs, other FLOPs, bytes, device) -> seconds`` of a kernel on one device."""


def seconds_each(
    name: str, kind: str, dtype: str, work: Sequence[np.ndarray], devices: Sequence[Device]
) -> np.ndarray:  # fmt: skip
    """Seconds of every device's block.

    Args:
        kind: the kernel's class (`cost.kernel_class`); ``dtype``: that of what it multiplies.
        work: contraction FLOPs, other FLOPs and bytes, a number per device each.
        devices: every device, or the one that all are like.

    Raises:
        PluginError: there is no such model, it fails, its seconds are none, or others when it is asked again.
    """
    model: Model = plugins.get(KIND, name)
    known: dict[tuple[float, float, float, int], float] = {}
    out: list[float] = []
    for k, (heavy, light, moved) in enumerate(zip(*(w.tolist() for w in work), strict=True)):
        at = k if len(devices) > 1 else 0
        key = (heavy, light, moved, at)
        if key not in known:
            with plugins.blamed(KIND, name):
                said = model(kind, dtype, heavy, light, moved, devices[at])
                known[key] = float(said)
                again = known[key] if len(known) > 1 else float(model(kind, dtype, heavy, light, moved, devices[at]))
            if not isfinite(known[key]) or known[key] < 0 or type(said) is bool:
                raise plugins.refused(KIND, name, f"a kernel of class '{kind}' takes {said} seconds")
            if again != known[key]:
                why = f"a kernel of class '{kind}' takes {known[key]} seconds, and {again} when it is asked again"
                raise plugins.refused(KIND, name, why)
        out.append(known[key])
    return np.array(out)
