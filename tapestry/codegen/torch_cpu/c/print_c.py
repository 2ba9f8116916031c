"""Expressions of a task as C.

The text is made from the same expressions as every other target's, in the order written. A NaN goes where it goes elsewhere;
nothing is contracted or reordered.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.codegen.blocks.lowered import Access
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, walk
from tapestry.ir.index import Aff, Atom, Floor, span

TYPES = {"f32": "float", "i64": "int64_t", "i32": "int32_t", "i8": "int8_t", "u8": "uint8_t", "bool": "uint8_t"}

PRELUDE = """
#include <math.h>
#include <stdint.h>
#define INLINE static inline __attribute__((always_inline))
/* Bounds of the loop over dimension i, of which this call does one of `parts` parts where it is the one that is cut. */
#define FROM(i, low, high) (cut == i ? (low) + ((high) - (low)) * part / parts : (low))
#define TO(i, low, high) (cut == i ? (low) + ((high) - (low)) * (part + 1) / parts : (high))
INLINE float t_min(float a, float b) { return a != a || a < b ? a : b; }
INLINE float t_max(float a, float b) { return a != a || a > b ? a : b; }
/* exp: 2^n p(r), the polynomial of Cephes' expf (Moshier 1992); 2^n in two factors, so that the ends of the range are right. */
INLINE float t_exp(float x) {
    float kept = x < -104.0f ? -104.0f : x;
    kept = kept > 89.0f ? 89.0f : kept;
    float shifted = kept * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    float r = (kept - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f, p = p * r + 1.6666665459e-1f, p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    int32_t bits, low, high;
    __builtin_memcpy(&bits, &shifted, 4);
    bits -= 0x4b400000;
    low = ((bits >> 1) + 127) << 23, high = (bits - (bits >> 1) + 127) << 23;
    float a, b;
    __builtin_memcpy(&a, &low, 4), __builtin_memcpy(&b, &high, 4);
    return p * a * b;
}
INLINE float t_sigmoid(float x) { return 1.0f / (1.0f + t_exp(-x)); }
/* tanh: Cephes' tanhf (Moshier 1992). */
INLINE float t_tanh(float x) {
    float z = x * x, a = fabsf(x);
    float p = -5.70498872745e-3f * z + 2.06390887954e-2f;
    p = (p * z - 5.37397155531e-2f) * z + 1.33314422036e-1f, p = (p * z - 3.33332819422e-1f) * z * x + x;
    float far = copysignf(1.0f - 2.0f / (t_exp(a + a) + 1.0f), x);
    return a < 0.625f ? p : far;
}
/* erf: Juffa's polynomials (2018, "a faster and more accurate erff"), 1 - exp(p(|x|)) from 475/512 on. */
INLINE float t_erf(float x) {
    float a = fabsf(x), s = x * x, p = -5.96761703e-4f, q = -1.72853470e-5f * a + 3.83197126e-4f;
    p = p * s + 4.99119423e-3f, p = p * s - 2.67681349e-2f, p = p * s + 1.12819925e-1f, p = p * s - 3.76125336e-1f;
    p = p * s + 1.28379166e-1f;
    q = q * s + (-3.88396438e-3f * a + 2.42546219e-2f);
    q = q * a - 1.06777877e-1f, q = q * a - 6.34846687e-1f, q = q * a - 1.28717512e-1f;
    float far = copysignf(1.0f - t_exp(q * a - a), x);
    return a > 0.927734375f ? far : p * x + x;
}
/* log: Cephes' logf (Moshier 1992); what is too small for its exponent is scaled before. */
INLINE float t_log(float x) {
    int tiny = x < 1.17549435e-38f;
    float scaled = tiny ? x * 8388608.0f : x, m;
    int32_t bits;
    __builtin_memcpy(&bits, &scaled, 4);
    int32_t e = ((bits >> 23) & 255) - (tiny ? 149 : 126);
    bits = (bits & 0x7fffff) | 0x3f000000;
    __builtin_memcpy(&m, &bits, 4);
    int low = m < 0.707106781f;
    float n = (float)(low ? e - 1 : e);
    m = low ? m + m - 1.0f : m - 1.0f;
    float z = m * m, p = 7.0376836292e-2f * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f, p = p * m - 1.2420140846e-1f, p = p * m + 1.4249322787e-1f, p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f, p = p * m - 2.4999993993e-1f, p = p * m + 3.3333331174e-1f;
    p = p * m * z - 2.12194440e-4f * n - 0.5f * z;
    float r = m + p + 0.693359375f * n;
    float edge = x == 0.0f ? -__builtin_inff() : __builtin_nanf("");
    r = x > 0.0f ? r : edge;
    return x == __builtin_inff() ? x : r;
}
INLINE float t_square(float x) { return x * x; }
INLINE float t_cube(float x) { return x * x * x; }
INLINE float t_sign(float x) { return x != x ? x : (float)((x > 0) - (x < 0)); }
INLINE float t_mod(float a, float b) {
    float r = fmodf(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
/* What x86 gives for a number that is too large, or none: the lowest integer. */
#define WHOLE(type, name, low)                                                            \\
    INLINE type name(float x) {                                                           \\
        int fits = x >= (float)low && x < -(float)low;                                    \\
        type whole = (type)(fits ? x : 0.0f);                                             \\
        return fits ? whole : low;                                                        \\
    }
WHOLE(int32_t, t_i32, INT32_MIN)
WHOLE(int64_t, t_i64, INT64_MIN)
/* Of integers: over 0 all three are 0, and the lowest one over -1 is itself. */
INLINE int64_t i_div(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? -a : a / b; }
INLINE int64_t i_fmod(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }
INLINE int64_t i_mod(int64_t a, int64_t b) {
    int64_t r = i_fmod(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
"""

FLOAT: dict[str, str] = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})", "neg": "(-{})", "min": "t_min({}, {})",
    "max": "t_max({}, {})", "abs": "fabsf({})", "sqrt": "sqrtf({})", "exp": "t_exp({})", "sigmoid": "t_sigmoid({})",
    "sin": "sinf({})", "cos": "cosf({})", "floor": "floorf({})", "ceil": "ceilf({})",
    "round": "rintf({})", "sign": "t_sign({})", "tanh": "t_tanh({})", "erf": "t_erf({})", "log": "t_log({})",
}  # fmt: skip
LIBRARY: dict[str, str] = {  # calls, a cell at a time: torch is faster where there are many
    "tan": "tanf({})", "asin": "asinf({})", "acos": "acosf({})",
    "atan": "atanf({})", "sinh": "sinhf({})", "cosh": "coshf({})", "asinh": "asinhf({})", "acosh": "acoshf({})",
    "atanh": "atanhf({})", "log1p": "log1pf({})", "expm1": "expm1f({})", "pow": "powf({}, {})", "fmod": "fmodf({}, {})",
    "mod": "t_mod({}, {})",
}  # fmt: skip
WHOLE: dict[str, str] = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "neg": "(-{})", "div": "i_div({}, {})",
    "mod": "i_mod({}, {})", "fmod": "i_fmod({}, {})", "min": "({0} < {1} ? {0} : {1})",
    "max": "({0} > {1} ? {0} : {1})", "abs": "({0} < 0 ? -{0} : {0})",
    "sign": "(({0} > 0) - ({0} < 0))",
}  # fmt: skip
_SHORT = {fn: f"((int32_t){text})" for fn, text in WHOLE.items()}
TRUTH: dict[str, str] = {"and": "({} & {})", "or": "({} | {})", "xor": "({} ^ {})", "not": "(!{})"}
POWERS = {2.0: "t_square({0})", 3.0: "t_cube({0})"}  # as torch has them
COMPARE: dict[str, str] = {
    "eq": "({} == {})",
    "ne": "({} != {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "gt": "({} > {})",
    "ge": "({} >= {})",
    "isnan": "({0} != {0})",
}


def row(e: Call) -> str | None:
    """How a primitive is written; ``None`` for one that is not."""
    of = e.args[-1].dtype
    if e.fn == "where":
        return "({} ? {} : {})"
    if e.fn == "cast":
        if e.dtype == "bool":
            return "({} != 0)"
        if of == "f32" and e.dtype in ("i32", "i64"):
            return f"t_{e.dtype}({{}})"
        return f"(({TYPES[e.dtype]}){{}})" if e.dtype in TYPES and (e.dtype == "f32" or of != "f32") else None
    if e.fn in COMPARE:
        return COMPARE[e.fn] if of in TYPES else None
    if e.fn == "pow" and e.dtype == "f32" and isinstance(e.args[1], Const) and e.args[1].value in POWERS:
        return POWERS[e.args[1].value]
    return {"f32": FLOAT | LIBRARY, "i64": WHOLE, "i32": _SHORT, "bool": TRUTH}.get(e.dtype, {}).get(e.fn)


def written(exprs: tuple[Expr, ...], *, few: bool = False) -> bool:
    """Whether all of some expressions can be written; ``few``: for cells so few that calls of a library do not matter."""
    nodes = [x for e in exprs for x in walk(e)]
    fine = all(x.dtype in TYPES and (not isinstance(x, Call) or row(x) is not None) for x in nodes)
    return fine and (few or not any(isinstance(x, Let) or (isinstance(x, Call) and is_slow(x)) for x in nodes))


def is_slow(e: Call) -> bool:
    """Whether a primitive is a call of the library."""
    return e.dtype == "f32" and e.fn in LIBRARY and row(e) == LIBRARY[e.fn]


EACH_CELL = "for (int64_t i = sizes[0] * part / parts; i < sizes[0] * (part + 1) / parts; i++)"


@dataclass(slots=True)
class Writer:
    """Writes the expressions of a task; dimensions have the names ``d0``, ``d1``, … so that equal operations have equal text.

    Attributes:
        names: dimensions, in order.
        ranges: their extents.
        reads: by position, where cells are.
        given: sizes that a function takes as arguments, in order, where it takes them: functions of one operation at several
            sizes then have one text. Strides of 1 stay numbers.
        shifts: without those, cells by which a read is further into its buffer: steps of a recurrence then have one text.
        slots: the number of each read's buffer.
        once: what has a text of its own.
    """

    names: tuple[str, ...] = ()
    ranges: Mapping[str, int] = field(default_factory=dict[str, int])
    reads: Mapping[int, Access] = field(default_factory=dict[int, Access])
    given: list[int] | None = None
    shifts: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    slots: dict[int, int] = field(default_factory=dict[int, int])
    once: dict[Expr, str] = field(default_factory=dict[Expr, str])

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the function that was written is called with."""
        return (*(self.given or ()), *self.shifts.values())

    def sizes(self) -> ctypes.Array[ctypes.c_int64]:
        """The arguments in memory."""
        given = self.arguments
        return (ctypes.c_int64 * max(1, len(given)))(*given)

    def cells(self, value: Expr, fields: int = 0) -> str:
        """The body of a function of ``fields`` arrays of ``sizes[0]`` cells to one more: an expression over their cells, or,
        without them, of what is there."""
        lines = [f"const float *restrict p{i} = p[{i}];" for i in range(fields)]
        acc = [f"p{i}[i]" for i in range(fields)] or ["y[i]"]
        return "\n".join([*lines, f"float *y = p[{fields}];", EACH_CELL, f"y[i] = {self.expr(value, acc)};"])

    def number(self, n: int) -> str:
        """A number that follows from sizes: as it is, or as an argument."""
        if self.given is None or n == 0:
            return str(n)
        self.given.append(n)
        return f"s{len(self.given) - 1}"

    def expr(self, e: Expr, acc: Sequence[str] = ()) -> str:
        """An expression whose fields of a state have the texts ``acc``."""
        if e in self.once:
            return self.once[e]
        match e:
            case Arg():
                tests, value, other = self.guarded(e.pos)
                return f"({' && '.join(tests)} ? {value} : {literal(other)})" if tests else value
            case Const():
                return literal(e)
            case Index():
                return f"({TYPES[e.dtype]})({self._aff(e.aff)})"
            case Acc():
                return acc[e.field]
            case Call():
                pattern = row(e)
                assert pattern
                return pattern.format(*(self.expr(a, acc) for a in e.args))
            case Let():
                raise AssertionError("an inner reduction has a text of its own")

    def guarded(self, k: int) -> tuple[list[str], str, Const]:
        """(what has to hold for a cell to be read, the cell, what is there instead)."""
        a = self.reads[k]
        tests = [f"({self._aff(c.aff)}) {c.op} {self.number(c.bound)}" for c in a.checks]
        at = f"p{self.slots[k]}[{self.place(a.offset, None if tests else k)}]"
        return tests, at, Const(0 if a.other is None else a.other, a.dtype)

    def place(self, e: Aff, read: int | None = None) -> str:
        """A place in a buffer; where a read begins is an argument."""
        if self.given is not None:
            return self._aff(e, lambda n: "1" if n == 1 else self.number(n))
        if read is None or not e.const:
            return self._aff(e)
        self.shifts[read, e.const] = e.const
        return f"({self._aff(e - e.const)} + s{list(self.shifts).index((read, e.const))})"

    def _aff(self, e: Aff, number: Callable[[int], str] = str) -> str:
        terms = sorted((self._atom(atom), c) for atom, c in e.terms)
        texts = [t if (n := number(c)) == "1" else f"{n} * {t}" for t, c in terms]
        return "(" + (" + ".join([*texts, *[number(e.const)] * bool(e.const)]) or "0") + ")"

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, str):
            return f"d{self.names.index(atom)}"
        shift = -(-max(0, -span(atom.arg, self.ranges)[0]) // atom.div)  # periods that make the argument no less than 0
        arg = f"({self._aff(atom.arg)} + {shift * atom.div})"
        return f"({arg} / {atom.div} - {shift})" if isinstance(atom, Floor) else f"({arg} % {atom.div})"


def literal(e: Const) -> str:
    """A number of its dtype."""
    if e.dtype != "f32":
        if e.dtype in ("i32", "i8", "u8"):
            return f"((int32_t)INT64_C({int(e.value)}))"
        return f"INT64_C({int(e.value)})" if int(e.value) > -(2**63) else "INT64_MIN"
    x = float(np.float32(e.value))
    if math.isnan(x):
        return '__builtin_nanf("")'
    if math.isinf(x):
        return "__builtin_inff()" if x > 0 else "(-__builtin_inff())"
    return f"({x.hex()}f)"
