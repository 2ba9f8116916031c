"""Triton source of the primitives that ``triton.language`` lacks; the generator copies those a kernel uses into its file.

Each works on f32 and f64 tensors of any shape (those that end in ``int`` on integers). A literal takes the dtype of the
tensor it meets, but two literals that meet in ``tl.where`` are f32: one branch must be a tensor.
"""

from __future__ import annotations

import re

HELPERS: dict[str, str] = {
    "div_int": '''
def div_int(x, y):
    """Quotient towards zero; over 0 it is 0."""
    return x // (y + (y == 0)) * (y != 0)
''',
    "fmod_int": '''
def fmod_int(x, y):
    """Remainder with the sign of the dividend; over 0 it is 0."""
    return x % (y + (y == 0))
''',
    "mod_int": '''
def mod_int(x, y):
    """Remainder with the sign of the divisor; over 0 it is 0."""
    r = fmod_int(x, y)
    return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)
''',
    "mod": '''
def mod(x, y):
    """Remainder with the sign of the divisor."""
    r = x % y
    return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)
''',
    "round_even": '''
def round_even(x):
    """Nearest integer, halves to even."""
    low = tl.floor(x)
    rest = x - low
    half = low * 0.5
    up = (rest > 0.5) | ((rest == 0.5) & (tl.floor(half) != half))
    return tl.where(up, low + 1.0, low)
''',
    "expm1": '''
def expm1(x):
    """exp(x) - 1 without cancellation (Kahan): an error in exp cancels out of (u - 1) / log(u)."""
    u = tl.exp(x)
    small = (u - 1.0) * x / tl.log(u)
    return tl.where(u == 1.0, x, tl.where((x > 32.0) | (x < -40.0), u - 1.0, small))
''',
    "log1p": '''
def log1p(x):
    """log(1 + x) without cancellation (Kahan)."""
    u = x + 1.0
    small = tl.log(u) * x / (u - 1.0)
    return tl.where(u == 1.0, x, tl.where(tl.abs(u) == float("inf"), tl.log(u), small))
''',
    "sigmoid": """
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
""",
    "tanh": '''
def tanh(x):
    """(1 - e) / (1 + e) with e = exp(-2 |x|)."""
    m = expm1(-2.0 * tl.abs(x))
    y = -m / (m + 2.0)
    return tl.where(x < 0, -y, tl.where(x == 0, x, y))
''',
    "tanh_half": '''
def tanh_half(x):
    """1 - 2 / (1 + exp(2 |x|)), and three terms of the series where that cancels: far nearer than 16 bits can tell."""
    a = tl.abs(x)
    z = x * x
    near = x * (1.0 + z * (z * 0.13333333333333333 - 0.3333333333333333))
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * a))
    return tl.where(a < 0.1, near, tl.where(x < 0, -far, far))
''',
    "sinh": """
def sinh(x):
    a = tl.abs(x)
    m = expm1(a)
    h = tl.exp(0.5 * a)
    y = tl.where(a > 20.0, 0.5 * h * h, 0.5 * (m + m / (m + 1.0)))
    return tl.where(x < 0, -y, y)
""",
    "cosh": '''
def cosh(x):
    """exp(|x|/2) squared, so that the result overflows only where it must."""
    h = tl.exp(0.5 * tl.abs(x))
    return 0.5 * h * h + 0.5 / h / h
''',
    "tan": """
def tan(x):
    return tl.sin(x) / tl.cos(x)
""",
    "asinh": """
def asinh(x):
    a = tl.abs(x)
    near = log1p(a + a * a / (1.0 + tl.sqrt(a * a + 1.0)))
    y = tl.where(a > 268435456.0, tl.log(a) + 0.6931471805599453, near)
    return tl.where(x < 0, -y, y)
""",
    "acosh": """
def acosh(x):
    t = x - 1.0
    y = tl.where(x > 268435456.0, tl.log(x) + 0.6931471805599453, log1p(t + tl.sqrt(t * (t + 2.0))))
    return tl.where(x < 1.0, float("nan"), y)
""",
    "atanh": """
def atanh(x):
    a = tl.abs(x)
    y = 0.5 * log1p(2.0 * a / (1.0 - a))
    return tl.where(x < 0, -y, y)
""",
    "atan": '''
def atan(x):
    """Rational approximation after Cephes (Moshier), for arguments reduced to [-0.66, 0.66]."""
    a = tl.abs(x)
    far = a > 2.414213562373095
    near = a <= 0.66
    r = tl.where(far, -1.0 / a, tl.where(near, a, (a - 1.0) / (a + 1.0)))
    z = r * r
    p = (((-0.8750608600031904 * z - 16.157537187333652) * z - 75.00855792314705) * z - 122.88666844901361) * z
    q = ((((z + 24.858464901423062) * z + 165.02700983169885) * z + 432.88106049129027) * z + 485.3903996359137) * z
    y = r + r * z * (p - 64.85021904942025) / (q + 194.5506571482614)
    y = y + tl.where(far, 1.5707963267948966, tl.where(near, 0.0 * r, 0.7853981633974483))
    return tl.where(x < 0, -y, y)
''',
    "asin": """
def asin(x):
    return atan(x / tl.sqrt((1.0 - x) * (1.0 + x)))
""",
    "acos": '''
def acos(x):
    """2 atan(sqrt((1 - x) / (1 + x))): no cancellation near 1."""
    return 2.0 * atan(tl.sqrt((1.0 - x) / (1.0 + x)))
''',
    "pow_float": '''
def pow_float(x, y):
    """x ** y in f64 with the special cases of C's pow; small whole powers by squaring, which keeps whole results whole."""
    base = x.to(tl.float64)
    power = y.to(tl.float64)
    a = tl.abs(base)
    size = tl.where(a == 1.0, 1.0, tl.exp2(power * tl.log2(a)))
    whole = tl.floor(power) == power
    small = whole & (tl.abs(power) < 64)
    left = tl.where(small, tl.abs(power), 0.0).to(tl.int32)
    chain = tl.where(left >= 0, 1.0, a)
    factor = a
    for _ in tl.static_range(6):
        chain = tl.where((left & 1) == 1, chain * factor, chain)
        factor = factor * factor
        left = left >> 1
    size = tl.where(small, tl.where(power < 0, 1.0 / chain, chain), size)
    odd = whole & (tl.floor(power * 0.5) != power * 0.5)
    below = (base < 0) | ((base == 0) & (1.0 / base < 0))
    signed = tl.where(below & odd, -size, tl.where((base < 0) & (whole == 0) & (a != float("inf")), float("nan"), size))
    return tl.where((power == 0) | (base == 1.0), 1.0, signed).to(x.dtype)
''',
    "pow_int": '''
def pow_int(x, y):
    """Integer power by squaring, wrapping around; 1 / x**-y, truncated, for a negative exponent."""
    left = tl.where(y < 0, -y, y)
    left = tl.where(left > 63, 62 + (left & 1), left)
    out = x * 0 + 1
    base = x
    for _ in tl.static_range(6):
        out = tl.where((left & 1) == 1, out * base, out)
        base = base * base
        left = left >> 1
    flipped = tl.where((out == 1) | (out == -1), out, 0)
    return tl.where(y < 0, flipped, out)
''',
    "pow_uint": '''
def pow_uint(x, y):
    """Unsigned power by squaring, wrapping around."""
    left = tl.where(y > 63, 62 + (y & 1), y)
    out = x * 0 + 1
    base = x
    for _ in tl.static_range(6):
        out = tl.where((left & 1) == 1, out * base, out)
        base = base * base
        left = left >> 1
    return out
''',
    "philox": '''
def philox(key, stream, draw, word, index):
    """Output word of Philox4x32-10 (Salmon et al., SC'11) with counter (index lo, index hi, draw, stream)."""
    c0 = index.to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    c2 = draw.to(tl.uint32)
    c3 = stream.to(tl.uint32)
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = c0 * 0xD2511F53
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    out = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    return out.to(tl.int64)
''',
    "f8e4m3fn": '''
def f8e4m3fn(bits):
    """A float of 8 bits (4 of exponent, no infinities) as f16: in its place its exponent is 8 too small."""
    wide = bits.to(tl.uint16)
    value = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
''',
    "f8e4m3fnuz": '''
def f8e4m3fnuz(bits):
    """A float of 8 bits (4 of exponent, no infinities, no -0) as f16: in its place its exponent is 7 too small."""
    wide = bits.to(tl.uint16)
    value = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 128.0
    return tl.where(wide == 0x80, float("nan"), value)
''',
    "f8e5m2": '''
def f8e5m2(bits):
    """A float of 8 bits (5 of exponent) as f16: its upper half."""
    return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
''',
    "f8e5m2fnuz": '''
def f8e5m2fnuz(bits):
    """A float of 8 bits (5 of exponent, no infinities, no -0) as f16: its exponent is one too large."""
    wide = bits.to(tl.uint16)
    top = (wide & 0x7C) == 0x7C
    whole = (wide << 8).to(tl.float16, bitcast=True) * 0.5
    less = ((wide << 8) ^ 0x4000).to(tl.float16, bitcast=True)
    value = tl.where(top, less * 32768.0, whole)
    return tl.where(wide == 0x80, float("nan"), value)
''',
}


def sources(names: set[str]) -> list[str]:
    """Source of some helpers and of those they call, callees first."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        for callee in sorted(set(re.findall(r"(?<![.\w])(\w+)\(", HELPERS[name])) & set(HELPERS) - {name}):
            visit(callee)
        order.append(name)

    for n in sorted(names):
        visit(n)
    return ["@triton.jit" + HELPERS[n].rstrip() for n in order]
