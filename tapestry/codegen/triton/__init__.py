"""The Triton target: one generator for every block operation, from its index space alone."""

from tapestry.codegen.triton.compile import Compiled, compile_ahead
from tapestry.codegen.triton.execute import launch
from tapestry.codegen.triton.lowered import unavailable
from tapestry.codegen.triton.source import TritonKernel, generate, kernel_key
from tapestry.codegen.triton.tiles import Knobs

__all__ = ["Compiled", "Knobs", "TritonKernel", "compile_ahead", "generate", "kernel_key", "launch", "unavailable"]
