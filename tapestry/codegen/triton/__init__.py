"""The Triton target: one generator for every block operation, from its index space alone."""

from tapestry.codegen.triton.emit.source import Pass, TritonKernel, generate, kernel_key
from tapestry.codegen.triton.kernel_config import KernelConfig, candidates, default_config
from tapestry.codegen.triton.run.launcher import launch
from tapestry.codegen.triton.run.machine_code import Compiled, compile_ahead
from tapestry.codegen.triton.task.descriptors import kernel_form
from tapestry.codegen.triton.task.lowered import unavailable
from tapestry.codegen.triton.task.tiles import KernelForm

__all__ = [
    "Compiled", "KernelConfig", "KernelForm", "Pass", "TritonKernel", "candidates", "compile_ahead", "default_config",
    "generate", "kernel_form", "kernel_key", "launch", "unavailable",
]  # fmt: skip
