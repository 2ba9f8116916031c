"""What functions of ``triton.language`` mean, as terms."""

from __future__ import annotations

from tapestry.tools.kernel_proofs.term.term_arithmetic import Kind

KINDS = {
    **{f"float{b}": Kind("real", b) for b in (16, 32, 64)},
    "bfloat16": Kind("real", 16),
    "int1": Kind("bool", 1),
    **{f"int{b}": Kind("int", b) for b in (8, 16, 32, 64)},
    **{f"uint{b}": Kind("int", b, False) for b in (8, 16, 32, 64)},
}
REAL = ("exp", "exp2", "sqrt", "sqrt_rn", "log", "log2", "abs", "sin", "cos", "erf", "floor", "ceil")
