"""The Triton target: one generator for every block operation, from its index space alone."""

from tapestry.codegen.triton.emit.source import Pass, TritonKernel, generate, kernel_key
from tapestry.codegen.triton.model.config_fields import KernelConfig
from tapestry.codegen.triton.model.kernel_config import candidates, default_config
from tapestry.codegen.triton.run.compile_ahead import Compiled, compile_ahead
from tapestry.codegen.triton.run.execute import launch
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.codegen.triton.task.kernel_form import KernelForm
from tapestry.codegen.triton.task.lowered import unavailable

__all__ = [
    "Compiled", "KernelConfig", "KernelForm", "Pass", "TritonKernel", "candidates", "compile_ahead", "default_config",
    "generate", "kernel_form", "kernel_key", "launch", "unavailable",
]  # fmt: skip
