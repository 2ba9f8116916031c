"""Faults put into the text of a kernel, or into its launch: each gives the kernel with one, or None where it has no place for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace

from tapestry.tools.kernel_proofs.kernel_text import KernelText

Edit = Callable[[KernelText], KernelText | None]
EDITS: dict[str, Edit] = {}


def edit(fn: Edit) -> Edit:
    """Register a kind of fault."""
    EDITS[fn.__name__] = fn
    return fn


def _put(text: KernelText, pattern: str, by: str | Callable[[re.Match[str]], str], *, every: bool = False) -> KernelText | None:
    """The last function's text with a pattern replaced."""
    at = text.source.rindex("@triton.jit")
    head, body = text.source[:at], text.source[at:]
    made, count = re.subn(pattern, by, body, count=0 if every else 1, flags=re.MULTILINE)
    return replace(text, source=head + made) if count and made != body else None


def _steps(text: KernelText) -> bool:
    """Whether a loop over tiles takes more than one step."""
    sizes = {n: int(v) for n, v in re.findall(r"^    (\w+): tl\.constexpr = (\d+)", text.source, re.MULTILINE)}
    return any(int(n) > sizes.get(b, 1) for n, b in re.findall(r"in (?:tl\.)?range\(0, (\d+), (\w+)\):", text.source))


@edit
def bound_one_too_many(t: KernelText) -> KernelText | None:
    """A tile's bound is off by one, upwards."""
    return _put(t, r"^( +\w+_in = \w+ < )(\d+)$", lambda m: f"{m[1]}{int(m[2]) + 1}")


@edit
def bound_one_too_few(t: KernelText) -> KernelText | None:
    """A tile's bound is off by one, downwards."""
    return _put(t, r"^( +\w+_in = \w+ < )(\d+)$", lambda m: f"{m[1]}{int(m[2]) - 1}")


@edit
def remainder_forgotten(t: KernelText) -> KernelText | None:
    """A store has no mask: lanes past the end write."""
    return _put(t, r"^( +tl\.store\(.*), mask=[^\n]*\)$", r"\1)")


@edit
def wrong_stride(t: KernelText) -> KernelText | None:
    """A stride is too long by one; of an address, not of an edge, which may be far from where it is asked."""
    return _put(t, r"^( +(?!\w*_edge)\w+ = \w+ \* )(\d+)$", lambda m: f"{m[1]}{int(m[2]) + 1}")


@edit
def strides_exchanged(t: KernelText) -> KernelText | None:
    """Two strides change places."""
    found = re.findall(r"^ +\w+ = \w+ \* (\d+)$", t.source, re.MULTILINE)
    other = next((n for n in found if n != found[0]), None)
    if other is None:
        return None
    swap = {found[0]: other, other: found[0]}
    return _put(t, r"^( +\w+ = \w+ \* )(\d+)$", lambda m: m[1] + swap.get(m[2], m[2]), every=True)


@edit
def accumulator_begins_at_one(t: KernelText) -> KernelText | None:
    """An accumulator is not cleared. (A softmax's first step multiplies it by 0.)"""
    if "tl.exp2" in t.source:
        return None
    return _put(t, r"^( +acc\w* = )tl\.zeros\(([^)]*\)), tl\.float32\)", r"\1tl.full(\2, 1.0, tl.float32)")


@edit
def accumulator_lost(t: KernelText) -> KernelText | None:
    """A step of a loop forgets those before it."""
    return _put(t, r"^( {8}acc = tl\.dot\(\w+, \w+), acc,", r"\1,") if _steps(t) else None


@edit
def wrong_other(t: KernelText) -> KernelText | None:
    """Masked lanes of a product's operands are one."""
    if "tl.dot" not in t.source or "tl.where" in t.source:
        return None
    return _put(t, r"other=0\.0", "other=1.0", every=True)


@edit
def maximum_for_sum(t: KernelText) -> KernelText | None:
    """A row is folded by its maximum."""
    return _put(t, r"tl\.sum\((acc\w*|tl\.where\([^\n]*\)|\w+ \* \w+), axis=1\)", r"tl.max(\1, axis=1)")


@edit
def epilogue_missing(t: KernelText) -> KernelText | None:
    """The accumulator is stored as it is."""
    for node in ast.walk(ast.parse(t.source)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.store") or isinstance(node.args[1], ast.Name):
            continue
        value = ast.get_source_segment(t.source, node.args[1]) or ""
        if re.search(r"\bacc\b(?!\[)", value):
            at = t.source.rindex(value)
            return replace(t, source=t.source[:at] + "acc" + t.source[at + len(value) :])
    return None


@edit
def subtraction_turned(t: KernelText) -> KernelText | None:
    """The operands of a subtraction change places."""
    return _put(t, r"^( +(?:v\w* = |tl\.store)[^\n]*\()(\w+) - (\w+(?:\[[^\]]*\])?)\)", r"\1\3 - \2)")


@edit
def wrong_program_axis(t: KernelText) -> KernelText | None:
    """Programs ask for their place along another axis of the grid."""
    return _put(t, r"tl\.program_id\(0\)", "tl.program_id(1)") if t.launches[-1].grid[0] > 1 else None


@edit
def grid_short_by_one(t: KernelText) -> KernelText | None:
    """One program is not launched."""
    last = t.launches[-1]
    if "tl.range(first_tile" in t.source:
        return None  # a persistent kernel's programs may be any number
    return replace(t, launches=(*t.launches[:-1], replace(last, grid=(last.grid[0] - 1, *last.grid[1:]))))


@edit
def first_tile_skipped(t: KernelText) -> KernelText | None:
    """A loop begins at its second tile."""
    return _put(t, r"in range\(0, (\d+), (\w+)\):", r"in range(\2, \1, \2):") if _steps(t) else None


@edit
def every_second_tile(t: KernelText) -> KernelText | None:
    """A loop's step is twice as long."""
    return _put(t, r"in range\(0, (\d+), (\w+)\):", r"in range(0, \1, 2 * \2):") if _steps(t) else None


@edit
def tiles_overlap(t: KernelText) -> KernelText | None:
    """Neighbouring tiles share a lane."""
    if t.launches[-1].grid[0] == 1:
        return None
    return _put(t, r"= pid \* (BLOCK|ROWS)(?= \+ tl)", r"= pid * (\1 - 1)")


@edit
def load_shifted(t: KernelText) -> KernelText | None:
    """A read is one element late."""
    return _put(t, r"tl\.load\((\s*)(\w+_ptr) \+ ", r"tl.load(\1\2 + 1 + ")


@edit
def store_shifted(t: KernelText) -> KernelText | None:
    """A write is one element late."""
    return _put(t, r"tl\.store\((\s*)(\w+_ptr) \+ ", r"tl.store(\1\2 + 1 + ")


@edit
def operands_from_each_other(t: KernelText) -> KernelText | None:
    """The two operands of a product are read from each other's buffers."""
    names = re.findall(r"tl\.load\(\s*(\w+_ptr)", t.source[t.source.rindex("@triton.jit") :])
    if "tl.dot" not in t.source or len(set(names)) < 2:
        return None
    a, b = dict.fromkeys(names[:2]) if names[0] != names[1] else (names[0], next(n for n in names if n != names[0]))
    swap = {a: b, b: a}
    return _put(t, r"(tl\.load\(\s*)(\w+_ptr)", lambda m: m[1] + swap.get(m[2], m[2]), every=True)


@edit
def wrong_constant(t: KernelText) -> KernelText | None:
    """A constant is a hundredth too large."""
    return _put(
        t,
        r"tl\.full\(\(\), (\d+\.\d+(?:e-?\d+)?), tl\.float32\)",
        lambda m: f"tl.full((), {float(m[1]) * 1.01 + 0.001}, tl.float32)",
    )


@edit
def guard_never_asked(t: KernelText) -> KernelText | None:
    """A padded read is not masked."""
    return _put(t, r",\n +mask=[^\n]*edge[^\n]*,\n +other=0\.0,\n", ",\n")


@edit
def padding_a_cell_too_wide(t: KernelText) -> KernelText | None:
    """An edge of a padded read is a cell off."""
    if "tl.where" in t.source:
        return None  # which may not look at what is read there
    return _put(t, r"(_edge\w* >= )(\d+)", lambda m: f"{m[1]}{int(m[2]) - 1}")


@edit
def wrong_modulus(t: KernelText) -> KernelText | None:
    """A position is taken apart by a wrong extent."""
    return _put(t, r"^( +(?!pid)\w+ = \(?\w+ % )(\d+)(\)?)$", lambda m: f"{m[1]}{int(m[2]) + 1}{m[3]}")


@edit
def minimum_for_maximum(t: KernelText) -> KernelText | None:
    """A cut-off works the other way."""
    return _put(t, r"tl\.maximum\((acc|product|\w+ \+ acc|acc \+ \w+), 0\.0", r"tl.minimum(\1, 0.0")


@edit
def wrong_temperature(t: KernelText) -> KernelText | None:
    """Exponents of a softmax are too small."""
    return _put(t, r"1\.4426950408889634", "1.4", every=True)


@edit
def states_not_moved(t: KernelText) -> KernelText | None:
    """The sum of weights is not moved to the new centre."""
    return _put(t, r"total \* scale \+", "total +") if _steps(t) else None


@edit
def product_becomes_sum(t: KernelText) -> KernelText | None:
    """Two factors are added."""
    return _put(t, r"^( +tl\.store\(\w+_ptr \+ [^,\n]*(?:\[[^\]]*\][^,\n]*)*, \(?\w+) \* ", r"\1 + ")


@edit
def gathered_row_off_by_one(t: KernelText) -> KernelText | None:
    """A gather takes the row after the one asked for."""
    return _put(t, r"^( +v\w* = tl\.where\(inside\w*, v\w*)(, 0\)\.to\(tl\.int32\))$", r"\1 + 1\2")
