"""Layers that repeat are translated once, and the file is the one that torch's exporter writes of all of them."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

import tapestry
from tapestry.frontends import torch_export
from tapestry.frontends.torch_export import folded


class Layer(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8, eps), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) * mask


class Net(nn.Module):
    def __init__(self, layers: list[nn.Module], *, every: bool = False, head: bool = True) -> None:
        super().__init__()
        self.layers, self.head, self.every = nn.ModuleList(layers), nn.Linear(8, 3) if head else nn.Identity(), every

    def forward(self, x: torch.Tensor):
        mask, seen = (x > 0).float(), []
        for layer in self.layers:
            x = layer(x, mask)
            seen.append(x)
        return (self.head(x), *seen) if self.every else self.head(x)


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def nodes(path) -> list:
    """What a file has, but for the names of nodes and values inside of layers."""
    model = onnx.load(path, load_external_data=False)
    weights = {w.name for w in model.graph.initializer}
    said = [
        (n.op_type, [i for i in n.input if i in weights], [a.SerializeToString() for a in n.attribute],
         [p.value.rsplit(",", 1)[0] for p in n.metadata_props if p.key.endswith("name_scopes")])
        for n in model.graph.node
    ]  # fmt: skip
    return [said, sorted(weights), [o.name for o in model.graph.output]]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("head", [True, False])
def test_the_file_is_that_of_all_layers(head, tmp_path, monkeypatch):
    torch.manual_seed(0)
    net = Net([Layer() for _ in range(7)], head=head).eval()
    program = torch_export.exported(net, (X,))
    fewer = folded(program)
    assert fewer is not None and fewer.numbers == tuple(range(7)) and "layers.4.up.weight" in fewer.parameters
    for name, once in (("once", folded), ("each", lambda program: None)):
        monkeypatch.setattr(torch_export, "folded", once)
        (tmp_path / name).mkdir()
        torch_export.write_onnx(program, tmp_path / name / "m.onnx")
    assert nodes(tmp_path / "once" / "m.onnx") == nodes(tmp_path / "each" / "m.onnx")
    (found,) = tapestry.compile(tmp_path / "once" / "m.onnx").run({"x": X.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(found), net(X).detach())


def shared() -> list[nn.Module]:
    layers: list[nn.Module] = [Layer() for _ in range(7)]
    layers[5].up.weight = layers[2].up.weight
    return layers


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("net", "folds"),
    [
        (Net([Layer()] * 7), True),
        (Net([Layer() for _ in range(4)]), False),
        (Net([*(Layer() for _ in range(5)), Layer(1e-3), Layer()]), False),
        (Net([Layer() for _ in range(7)], every=True), False),
        (Net(shared()), False),
    ],
    ids=["one layer seven times", "few", "one of another kind", "each one's result is read", "a weight of another layer's"],
)
def test_other_layers_are_folded_only_where_they_are_copies(net, folds):
    program = torch_export.exported(net, (X,))
    assert (folded(program) is not None) == folds
    (found, *_) = tapestry.compile(program).run({"x": X.numpy()}).values()
    want = net.eval()(X)
    torch.testing.assert_close(torch.from_numpy(found), (want[0] if isinstance(want, tuple) else want).detach())


class Wired(nn.Module):
    """Equal layers, of which each reads something beside the result of the layer before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Layer() for _ in range(7)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for _ in range(1 + (self.kind == "twice")):
            for k, layer in enumerate(self.layers):
                extra, last = x, seen[-1]
                if self.kind == "second":  # what the second layer gave is read by all behind it
                    extra = seen[min(k, 2)]
                elif self.kind == "beside":  # layers behind the second one stand beside each other
                    last = seen[min(k, 2)]
                elif self.kind in ("weight 2", "weight 3"):
                    extra = self.layers[min(k, int(self.kind[-1]))].norm.weight
                seen.append(layer(last, extra))
        return seen[-1]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["first", "second", "beside", "weight 2", "weight 3", "twice"])
def test_layers_that_all_read_one_layers_value_are_not_folded_as_a_chain(kind):
    torch.manual_seed(0)
    net = Wired(kind).eval()
    for layer in net.layers:
        nn.init.uniform_(layer.norm.weight, -1, 1)
    program = torch_export.exported(net, (X,))
    assert (folded(program) is not None) == (kind == "first")
    (found,) = tapestry.compile(program).run({"x": X.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(found), net(X).detach())
