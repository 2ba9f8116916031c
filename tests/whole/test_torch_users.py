"""What users of torch expect of a plan: their types, their names, calls, sizes, and errors in Python's words."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import tapestry
from tapestry.errors import TapestryError
from tapestry.options import in_python
from tapestry.torch_backend import backend
from tests.support.command_line import run
from tests.support.small_models import save

HERE = {"devices": 2, "topology": "cpu"}
X = torch.linspace(-2, 2, 128).reshape(8, 16)
Moments = namedtuple("Moments", "mean spread")


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(16, 8).to(dtype).eval()


class Returns(nn.Module):
    """A module that gives what a function makes of its input."""

    def __init__(self, give) -> None:
        super().__init__()
        self.give = give

    def forward(self, x: torch.Tensor) -> object:
        return self.give(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_element_types_come_and_go_through_torch(dtype: torch.dtype) -> None:
    module, x = linear(dtype), X.to(dtype)
    with torch.no_grad():
        want, got = module(x), torch.compile(module, backend=backend)(x)
        torch.testing.assert_close(got, want)
    plan = tapestry.compile(module, (x,), **HERE)
    torch.testing.assert_close(plan(x), want)
    assert plan.check({"input": x})["passed"]


def test_types_that_numpy_lacks_keep_their_bits() -> None:
    bits = torch.tensor([0x7FC1, 0x7F81, -62, 0x3F80], dtype=torch.int16)  # NaNs with payloads of both kinds, and 1
    got = tapestry.compile(Returns(torch.clone), (bits.view(torch.bfloat16),), topology="cpu")(bits.view(torch.bfloat16))
    assert got.view(torch.int16).tolist() == bits.tolist()
    small = X[:2].to(torch.float8_e4m3fn)
    same, wide = tapestry.compile(Returns(lambda x: (x, x.float() * 2)), (small,), topology="cpu")(small)
    assert same.dtype == torch.float8_e4m3fn and torch.equal(same.float(), small.float())
    assert torch.equal(wide, small.float() * 2)


def test_results_are_of_the_kind_of_the_inputs() -> None:
    module = linear()
    plan = tapestry.compile(module, (X,), **HERE)
    assert isinstance(plan.run({"input": X.numpy()})["output"], np.ndarray)
    assert isinstance(plan.run({"input": X})["output"], torch.Tensor)
    torch.testing.assert_close(plan(X), module(X).detach())
    torch.testing.assert_close(plan(input=X), module(X).detach())


NESTED = {
    "tensor": (lambda x: x + 1, ["output"]),
    "tuple": (lambda x: (x + 1, x, x + 1), ["output_0", "output_1", "output_2"]),
    "dict": (lambda x: {"logits": x + 1, "loss": x.mean()}, ["logits", "loss"]),
    "ordered": (lambda x: OrderedDict(b=x + 1, a=x * 2), ["b", "a"]),
    "named tuple": (lambda x: Moments(x.mean(0), x.std(0)), ["mean", "spread"]),
    "nested": (lambda x: {"a": {"b": x + 1}, "a_b": [x * 2, x * 3]}, ["a_b", "a_b_0", "a_b_1"]),
    "the input": (lambda x: {"x": x, "add": x * 2 + 1}, ["output_x", "add"]),
    "twice": (lambda x: dict.fromkeys("pq", x + 1), ["p", "q"]),
    "names inside": (lambda x: {"mul": (x * 2) + 1, "add": x * 3}, ["mul", "add"]),
    "none": (lambda x: {"loss": None, "logits": x * 2}, ["logits"]),
    "equal names": (lambda x: {"a": {"b": x + 1}, "a_b": x * 2}, ["a_b", "output_a_b"]),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NESTED)
def test_outputs_have_the_names_that_the_module_gives_them(name: str, tmp_path: Path) -> None:
    give, names = NESTED[name]
    plan = tapestry.compile(Returns(give), (X,), topology="cpu")
    leaves = [v for v in torch.utils._pytree.tree_leaves(give(X)) if v is not None]
    assert list(plan.outputs) == names
    got = plan(X)
    plan.save(tmp_path / "b")
    again = tapestry.load(tmp_path / "b")(X)
    for outs in (got, again):
        if isinstance(give(X), dict):
            assert list(outs) == names
            outs = tuple(outs.values())
        for a, b in zip(outs if isinstance(outs, tuple) else (outs,), leaves, strict=True):
            torch.testing.assert_close(a, b)


def test_calls_that_do_not_fit_are_refused_in_words() -> None:
    plan = tapestry.compile(linear(), (X,), **HERE)
    for args, named, message in (
        ((X, X), {}, "2 inputs, and the model has 1"),
        ((X,), {"input": X}, "'input' is given twice"),
        ((), {}, "'input' is missing"),
        ((X,), {"y": X}, "no input 'y'"),
    ):
        with pytest.raises(TapestryError, match=message):
            plan(*args, **named)
    with pytest.raises(TapestryError, match="by name, not as a list"):
        plan.check([X])  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_build_for_many_sizes_takes_torch_at_each() -> None:
    module, sizes = linear(), ({0: Dim("batch")},)
    program = torch.export.export(module, (X,), dynamic_shapes=sizes)
    for model, given in ((module, (X,)), (program, None)):
        for said in (sizes, {"input": (Dim("batch"), None)}):
            plan = tapestry.compile(model, example_inputs=given, dynamic_shapes=said, shapes={"batch": "1..64"}, **HERE)
            assert str(plan.inputs) == "{'input': float32[batch, 16]}" and str(plan.outputs) == "{'output': float32[batch, 8]}"
            torch.testing.assert_close(plan(X[:3]), module(X[:3]).detach())
    assert plan.check({"input": X[:7]})["passed"] and plan.check()["passed"]
    with pytest.raises(
        TapestryError, match=r"outside the build's range 1\.\.64\n  try: compile with shapes=\{.batch.: .1\.\.70.\}"
    ):
        plan(torch.zeros(70, 16))
    with pytest.raises(TapestryError, match=r"shapes: 'batch' is no symbol [^$]*give its dynamic_shapes too"):
        tapestry.compile(program, shapes={"batch": "1..64"}, **HERE)


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("module", "differs"),
    [
        (nn.Sequential(nn.Linear(16, 8), nn.Dropout()), True),
        (nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)), True),
        (Own(), True),
        (nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.0), nn.LayerNorm(8)), False),
        (nn.InstanceNorm1d(8), False),
    ],
)
@pytest.mark.parametrize("by_torch", [False, True])
def test_a_module_in_training_is_compiled_as_in_eval_and_that_is_said(module: nn.Module, differs: bool, by_torch: bool) -> None:
    torch.compiler.reset()
    module.train()
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        got = torch.compile(module, backend=backend)(X) if by_torch else tapestry.compile(module, (X,), topology="cpu")(X)
    told = [w for w in said if "is in training mode and is compiled as in eval()" in str(w.message)]
    assert len(told) == differs
    with torch.no_grad():
        torch.testing.assert_close(got, module.eval()(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tapestry.compile(module, (X,), topology="cpu")


def test_the_public_names_are_listed() -> None:
    assert set(tapestry.__all__) <= set(dir(tapestry))


@pytest.mark.parametrize(
    ("flags", "keywords"),
    [
        ("compile with --shape batch=1..64", 'compile with shapes={"batch": "1..64"}'),
        ("--shape n=8 or less", 'shapes={"n": 8} or less'),
        ("check the sizes given with --shape; else", "check the sizes given with shapes; else"),
        ("more memory (--memory; a bare number is bytes)", "more memory (memory; a bare number is bytes)"),
        ("--devices 4, or another --mesh", "devices=4, or another mesh"),
        ("compile with --target triton:sm90", 'compile with target="triton:sm90"'),
        ("--ignore-sharding plans without it", "sharding=False plans without it"),
        ("without --pareto and --no-weights", "without pareto=True and weights=False"),
        ("--without-rule", "without"),
        ("tapestry run BUILD --trace FILE", "tapestry run BUILD --trace FILE"),
        ("--stages auto, or a number", 'stages="auto", or a number'),
    ],
)
def test_flags_become_keywords(flags: str, keywords: str) -> None:
    assert in_python(flags) == keywords


def test_errors_speak_the_language_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(TapestryError) as e:
        tapestry.compile(save("mlp"), shapes={"xx": "4x4"})
    assert "shapes" in str(e.value) and "--shape" not in str(e.value)
    assert "--shape" in run("compile", save("mlp"), "-o", tmp_path / "b", "--shape", "xx=4x4")[2]


@pytest.mark.slow
def test_a_gpu_without_its_kernels_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for topology, target, told in (("h100", "torch-cpu", 1), ("h100", "triton:sm90", 0), ("cpu", "torch-cpu", 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tapestry"):
            tapestry.compile(save("mlp"), topology=topology, target=target)
        assert sum("with kernels for torch-cpu" in r.getMessage() for r in caplog.records) == told
