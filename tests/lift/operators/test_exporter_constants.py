"""What torch's exporter writes for sizes, indices and masks that follow from the module: no operation of them stays opaque.

The functions are those whose translation (onnxscript's torch_lib, the same for torch 2.11 to 2.14) has CastLike, Shape, Range,
ConstantOfShape, SplitToSequence, GatherND or their like. Exports are as they come, without onnxscript's optimizer.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import parser
from torch.nn import functional as F

import tapestry
from tapestry.errors import ModelError
from tapestry.ir.graph import Opaque


def causal(n: int) -> torch.Tensor:
    at = torch.arange(n)
    return at[None, :] <= at[:, None]


FORMS = {
    "arange": lambda x: x + torch.arange(8),
    "arange of a size": lambda x: x + torch.arange(x.shape[1], device=x.device),
    "arange with a start": lambda x: x + torch.arange(3, 3 + x.shape[1]),
    "arange with a step": lambda x: x + torch.arange(0, 16, 2),
    "arange of floats": lambda x: x * torch.arange(0.0, 4.0, 0.5),
    "a long arange": lambda x: x.sum() + torch.arange(200).to(x.dtype),
    "masked_fill": lambda x: x.masked_fill(causal(8)[1:3], -1.0),
    "where": lambda x: torch.where(causal(8)[2:4], x, torch.full((), float("-inf"))),
    "triu": lambda x: x + torch.triu(torch.full((8, 8), 2.0), diagonal=1)[:2],
    "tril of ones": lambda x: x * torch.ones(8, 8, dtype=torch.bool).tril()[3:5],
    "full_like": lambda x: x + torch.full_like(x, 3),
    "new_zeros": lambda x: torch.cat([x, x.new_zeros(2, 3)], 1),
    "zeros_like, ones_like": lambda x: torch.cat([torch.zeros_like(x), x, torch.ones_like(x)], 0),
    "expand_as": lambda x: torch.arange(8.0).expand_as(x) * x,
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1),
    "repeat": lambda x: x.repeat(2, 3),
    "meshgrid": lambda x: x + torch.stack(torch.meshgrid(torch.arange(2.0), torch.arange(8.0), indexing="ij")).sum(0),
    "linspace": lambda x: x + torch.linspace(0, 1, 8),
    "eye": lambda x: x @ torch.eye(8),
    "one_hot": lambda x: x + F.one_hot(torch.arange(2), 8),
    "cumsum of ones": lambda x: x + torch.ones(2, 8, dtype=torch.int64).cumsum(1),
    "chunk": lambda x: torch.mul(*x.chunk(2, -1)),
    "split": lambda x: torch.cat(x.split([3, 5], 1)[::-1], 1),
    "unbind": lambda x: x.unbind(1)[-1] + x.unbind(1)[2],
    "unfold": lambda x: x.unfold(1, 4, 2),
    "select by a list": lambda x: x[:, [3, 1, 2]],
    "select by an arange": lambda x: x[:, torch.arange(7, -1, -1)],
    "a mask by an arange of pairs": lambda x: causal(8)[torch.arange(2)[:, None], torch.arange(8)] * x,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 2), 2),
    "diagonal": lambda x: x.reshape(4, 4).diagonal(),
    "roll": lambda x: x.roll(3, 1),
    "sliding window": lambda x: x.masked_fill((torch.arange(8)[None] - torch.arange(2)[:, None]).abs() > 2, 0.0),
    "clamp, lerp, addmm": lambda x: torch.addmm(x.clamp(-1, 1), x.lerp(x * 2, 0.3), torch.ones(8, 8), beta=0.5, alpha=2),
    "logarithmic buckets": lambda x: x[:, (torch.log(torch.arange(1, 9).float()) / np.log(8) * 7).long()],
    "flatten, unflatten": lambda x: x.unflatten(1, (2, 4)).flatten(0, 1),
    "group_norm": lambda x: F.group_norm(x.reshape(1, 4, 4), 2),
    "layer_norm without weights": lambda x: F.layer_norm(x, (8,)),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(
        x.reshape(1, 2, 4, 2), x.reshape(1, 2, 4, 2), x.reshape(1, 2, 4, 2), attn_mask=causal(4)
    ),
}  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", FORMS)
def test_sizes_and_masks_of_a_module_are_no_opaque_operations(name, dtype):
    torch.manual_seed(len(name))
    module, x = Net(FORMS[name]), torch.randn(2, 8).to(dtype)
    try:
        want = module(x)
    except RuntimeError as e:
        pytest.skip(f"torch itself: {e}")
    plan = tapestry.compile(module, (x,), devices=2, topology="cpu")
    assert not [op for op in plan.build.plan.graph.ops if isinstance(op, Opaque)]
    (got,) = plan.run({"x": x if dtype == torch.float32 else x.float().numpy().astype(_bf16())}).values()
    tolerance = 1e-5 if want.dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float32), want.float().numpy(), rtol=tolerance, atol=tolerance)


def _bf16() -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


ONLY_LATER_IN_BF16 = [
    "Conv(x, w)", "MaxPool<kernel_shape = [2, 2]>(x)", "AveragePool<kernel_shape = [2, 2]>(x)", "Sin(x)", "Cos(x)", "Round(x)",
    "HardSwish(x)", "Elu(x)", "Softplus(x)", "GlobalAveragePool(x)", "InstanceNormalization(x, s, s)", "ConvTranspose(x, w4)",
]  # fmt: skip


@pytest.mark.parametrize("call", ONLY_LATER_IN_BF16, ids=lambda c: c.split("(")[0].split("<")[0])
def test_an_operator_that_has_bf16_only_in_a_later_opset_takes_it(call):
    """Exporters write opset 18 or 20 with bf16 everywhere."""
    inputs = "bfloat16[2, 3, 8, 8] x, bfloat16[4, 3, 3, 3] w, bfloat16[3, 4, 2, 2] w4, bfloat16[3] s"
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> g ({inputs}) => (bfloat16[a, b, c, d] y) {{ y = {call} }}'
    )
    graph = tapestry.compile(model, devices=2, topology="cpu").build.plan.graph
    assert graph.tensors["y"].dtype == "bf16"


def test_types_that_contradict_each_other_are_still_refused_in_bf16():
    text = (
        '<ir_version: 9, opset_import: ["" : 18]> g (bfloat16[2] x, float[2] z) => (bfloat16[2] y) { s = Sin(x) y = Add(s, z) }'
    )
    with pytest.raises(ModelError, match="contradict"):
        tapestry.compile(parser.parse_model(text))
