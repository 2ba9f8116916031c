"""The Triton target: one generator for every block operation, from its index space alone."""

from tapestry.codegen.triton.emit.source import Pass, TritonKernel, generate, kernel_key
from tapestry.codegen.triton.model.kernel_config import Knobs, candidates, default_knobs
from tapestry.codegen.triton.run.compile_ahead import Compiled, compile_ahead
from tapestry.codegen.triton.run.execute import launch
from tapestry.codegen.triton.task.kernel_kind import Operation, operation
from tapestry.codegen.triton.task.lowered import unavailable

__all__ = [
    "Compiled", "Knobs", "Operation", "Pass", "TritonKernel", "candidates", "compile_ahead", "default_knobs", "generate",
    "kernel_key", "launch", "operation", "unavailable",
]  # fmt: skip
