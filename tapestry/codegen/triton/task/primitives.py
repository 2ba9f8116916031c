"""One row per scalar primitive: how Triton writes it.

Only ``triton.language`` is used, no libdevice: the kernels then run in Triton's interpreter and on every vendor alike.
f16 and bf16 are computed in f32 (`COMPUTE`). A row is a format of its arguments; the functions below choose one by dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from tapestry.codegen.blocks.operands import HALVES, compute
from tapestry.ir.types import FLOAT8, FLOATS, itemsize

TRITON_TYPES: dict[str, str] = {
    "f64": "tl.float64", "f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16", "i64": "tl.int64", "i32": "tl.int32",
    "i16": "tl.int16", "i8": "tl.int8", "u64": "tl.uint64", "u32": "tl.uint32", "u16": "tl.uint16", "u8": "tl.uint8",
    "bool": "tl.int1",
    "f8e4m3fn": "tl.float8e4nv", "f8e4m3fnuz": "tl.float8e4b8", "f8e5m2": "tl.float8e5", "f8e5m2fnuz": "tl.float8e5b16",
}  # fmt: skip
POINTERS: dict[str, str] = {
    "f64": "*fp64",
    "f32": "*fp32",
    "f16": "*fp16",
    "bf16": "*bf16",
    "i64": "*i64",
    "i32": "*i32",
    "i16": "*i16",
    "i8": "*i8",
    "u64": "*u64",
    "u32": "*u32",
    "u16": "*u16",
    "u8": "*u8",
    "bool": "*i1",
    **dict.fromkeys(FLOAT8, "*u8"),
}
"""Floats of 8 bits are bits, but for the operands of a matrix unit that takes them (`NARROW_POINTERS`)."""
NARROW_POINTERS = {"f8e4m3fn": "*fp8e4nv", "f8e4m3fnuz": "*fp8e4b8", "f8e5m2": "*fp8e5", "f8e5m2fnuz": "*fp8e5b16"}
Row = str | Callable[[str], str]  # a format of the arguments, or a function from the arguments' dtype to one


def _div(dtype: str) -> str:
    """IEEE division: Triton's ``/`` on f32 is off by up to 2 ulp, enough to move a value across a rounding boundary."""
    return {"f32": "tl.div_rn({0}, {1})", "f64": "({0} / {1})"}.get(compute(dtype), "@div_int({0}, {1})")


def _extreme(name: str, boolean: str) -> Callable[[str], str]:
    def row(dtype: str) -> str:
        if dtype == "bool":
            return boolean
        return f"tl.{name}({{0}}, {{1}}" + (", propagate_nan=tl.PropagateNan.ALL)" if dtype in FLOATS else ")")

    return row


def _sign(dtype: str) -> str:
    negative = "{0}" if dtype.startswith("u") else "tl.where({0} < 0, -1, {0})"
    return f"tl.where({{0}} > 0, 1, {negative})"


def _not(dtype: str) -> str:
    """``~`` would do, but Triton 3.6's interpreter has no unsigned one."""
    if dtype == "bool":
        return "({0} == 0)"
    return f"({{0}} ^ {(1 << 8 * itemsize(dtype)) - 1})" if dtype.startswith("u") else "({0} ^ -1)"


def _pow(dtype: str) -> str:
    kind = "float" if dtype in FLOATS else "uint" if dtype.startswith("u") else "int"
    return f"@pow_{kind}({{0}}, {{1}})"


ROWS: dict[str, Row] = {
    "add": lambda d: "({0} | {1})" if d == "bool" else "({0} + {1})", "sub": "({0} - {1})",
    "mul": lambda d: "({0} & {1})" if d == "bool" else "({0} * {1})", "div": _div,
    "mod": lambda d: "@mod({0}, {1})" if d in FLOATS else f"@{'f' * d.startswith('u')}mod_int({{0}}, {{1}})",
    "fmod": lambda d: "({0} % {1})" if d in FLOATS else "@fmod_int({0}, {1})",
    "pow": _pow,
    "min": _extreme("minimum", "({0} & {1})"), "max": _extreme("maximum", "({0} | {1})"),
    "neg": "(-{0})", "abs": lambda d: "{0}" if d == "bool" or d.startswith("u") else "tl.abs({0})", "sign": _sign,
    "exp": "tl.exp({0})", "log": "tl.log({0})", "sqrt": lambda d: "tl.sqrt({0})" if d == "f64" else "tl.sqrt_rn({0})",
    "erf": "tl.erf({0})", "tanh": lambda d: f"@tanh{'_half' * (d in HALVES)}({{0}})",
    "sin": "tl.sin({0})", "cos": "tl.cos({0})", "tan": "@tan({0})",
    "asin": "@asin({0})", "acos": "@acos({0})", "atan": "@atan({0})", "sinh": "@sinh({0})", "cosh": "@cosh({0})",
    "asinh": "@asinh({0})", "acosh": "@acosh({0})", "atanh": "@atanh({0})", "sigmoid": "@sigmoid({0})",
    "log1p": "@log1p({0})", "expm1": "@expm1({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
    "round": "@round_even({0})", "isnan": "({0} != {0})", "isinf": '(tl.abs({0}) == float("inf"))',
    "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})", "le": "({0} <= {1})", "gt": "({0} > {1})",
    "ge": "({0} >= {1})", "and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} ^ {1})", "not": _not,
    "shl": "({0} << {1})", "shr": "({0} >> {1})", "where": "tl.where({0}, {1}, {2})",
    "philox": "@philox({0}, {1}, {2}, {3}, {4})",
}  # fmt: skip
"""``@name`` is a helper of `helpers.HELPERS`, emitted into the file when used; ``cast`` is printed by `cast_text`."""


def row(fn: str, dtype: str) -> str:
    """The format for a primitive applied to arguments of a dtype."""
    found = ROWS[fn]
    return found if isinstance(found, str) else found(dtype)


def widened(text: str, source: str, target: str, native: frozenset[str]) -> str:
    """A value loaded in a dtype as one of another that holds it exactly; ``native`` are the floats of 8 bits that convert."""
    if source in FLOAT8:
        bare = f"{text}.to({TRITON_TYPES[source]}, bitcast=True)" if source in native else f"@{source}({text})"
        return bare if source not in native and target == "f16" else f"{bare}.to({TRITON_TYPES[target]})"
    return f"{text}.to({TRITON_TYPES[target]})"


def cast_text(text: str, source: str, target: str, native: frozenset[str]) -> str:
    """ONNX Cast. A cast to f16 or bf16 rounds to it and goes on in f32; one from a float of 8 bits begins there."""
    if source in FLOAT8:
        exact = widened(text, source, "f32", native)
        return f"{exact}.to(tl.float64)" if target == "f64" else exact
    if target == "bool":
        return f"({text} != 0)"
    narrow = f"{text}.to({TRITON_TYPES[target]})"
    if target not in HALVES:
        return text if compute(source) == target and source in HALVES else narrow
    return f"{narrow}.to(tl.float32)"


def literal(value: float | int | bool, dtype: str) -> str:
    """A bare literal, which takes the dtype of what it meets in an operator."""
    if dtype == "bool":
        return str(bool(value))
    if dtype not in FLOATS:
        return repr(int(value))
    text = repr(float(value))
    return f'float("{text}")' if text.strip("-") in ("inf", "nan") else text


def typed(value: float | int | bool, dtype: str) -> str:
    """A scalar of exactly the dtype that the value is computed in."""
    return f"tl.full((), {literal(value, dtype)}, {TRITON_TYPES[compute(dtype)]})"
