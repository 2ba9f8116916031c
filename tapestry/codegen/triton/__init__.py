"""The Triton target: one generator for every block operation, from its index space alone."""

from tapestry.codegen.triton.compile import Compiled, compile_ahead
from tapestry.codegen.triton.execute import launch
from tapestry.codegen.triton.knobs import Knobs, candidates, default_knobs
from tapestry.codegen.triton.lowered import unavailable
from tapestry.codegen.triton.operation import Operation, operation
from tapestry.codegen.triton.source import Pass, TritonKernel, generate, kernel_key

__all__ = [
    "Compiled", "Knobs", "Operation", "Pass", "TritonKernel", "candidates", "compile_ahead", "default_knobs", "generate",
    "kernel_key", "launch", "operation", "unavailable",
]  # fmt: skip
