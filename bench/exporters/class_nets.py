"""Small networks of one class of operations each, with sizes drawn by a seed: no list that kernels could be made for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Net = tuple[nn.Module, tuple[Tensor, ...]]


class Sizes(random.Random):
    """Draws sizes, usual and odd ones alike."""

    def channels(self, low: int = 16, high: int = 128, of: int = 1) -> int:
        """A multiple of `of` between bounds, of 16 in half of the draws."""
        step = 16 if self.random() < 0.5 and of <= 16 else of
        return max(step, self.randint(low, high) // step * step)

    def side(self, low: int = 14, high: int = 56) -> int:
        """The height or width of an image."""
        return self.randint(low, high)


class Function(nn.Module):
    """A function of tensors as a module, with those that have weights."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.run = nn.ModuleDict(parts), run

    def forward(self, *xs: Tensor) -> Tensor:
        """The function's value."""
        return self.run(*xs, **dict(self.parts.items()))


def _image(s: Sizes, c: int, rank: int = 2, low: int = 14, high: int = 56) -> Tensor:
    sides = [s.side(low, high) for _ in range(rank)]
    return torch.randn(1, c, *(sides if rank < 3 else [s.randint(6, 12), *sides[1:]]))


def _conv(s: Sizes, rank: int, kernel: tuple[int, ...], stride: int = 1, groups: str = "", dilation: int = 1) -> Net:
    """Three convolutions with normalization and activation; the first one has the stride."""
    make: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    norm: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1]
    few = 4 if groups == "some" else 1
    a = s.channels(32, 160 if rank < 3 else 72, few)
    b = a if groups == "depthwise" else s.channels(32, 160 if rank < 3 else 72, few)
    count = {"": 1, "some": few, "depthwise": a}[groups]
    pads = tuple(dilation * (k - 1) // 2 for k in kernel)
    layers = list[nn.Module]()
    for n, (i, o) in enumerate(((a, b), (b, a), (a, b))):
        layers += [make(i, o, kernel, stride if n == 0 else 1, pads, dilation, count, bias=False), norm(o), nn.ReLU()]
    sides = {1: (300, 900), 2: (20, 48), 3: (18, 34)}[rank]
    return nn.Sequential(*layers), (_image(s, a, rank, *sides),)


def _stem(s: Sizes, rank: int, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Net:
    make: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    c = 1 if rank == 1 else 3
    x = torch.randn(1, c, *([s.randint(8000, 16000)] if rank == 1 else [s.side(90, 200) for _ in range(2)]))
    x = x if rank < 3 else torch.randn(1, c, s.randint(8, 16), s.side(64, 112), s.side(64, 112))
    return nn.Sequential(make(c, s.channels(32, 96), kernel, stride, tuple(k // 2 for k in kernel)), nn.ReLU()), (x,)


def _residual3d(s: Sizes) -> Net:
    """Two blocks of a video network: convolutions, a sum, an activation, the mean of all places."""
    c = s.channels(32, 64)

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        for k in ("a", "b"):
            x = functional.relu(m[f"{k}2"](functional.relu(m[f"{k}1"](x))) + x)
        return x.mean((2, 3, 4))

    def part() -> nn.Module:
        return nn.Sequential(nn.Conv3d(c, c, 3, padding=1, bias=False), nn.BatchNorm3d(c))

    return Function(run, **{f"{k}{i}": part() for k in "ab" for i in (1, 2)}), (_image(s, c, 3, 14, 28),)


def _channel_norm(s: Sizes) -> Net:
    """A depthwise convolution, a norm over channels, and a perceptron on channels, twice."""
    c = s.channels(48, 128)

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        for k in ("a", "b"):
            y = m[f"{k}norm"](m[f"{k}conv"](x).permute(0, 2, 3, 1))
            x = x + m[f"{k}out"](functional.gelu(m[f"{k}in"](y))).permute(0, 3, 1, 2)
        return x

    parts = dict[str, nn.Module]()
    for k in "ab":
        parts |= {f"{k}conv": nn.Conv2d(c, c, 7, padding=3, groups=c), f"{k}norm": nn.LayerNorm(c)}
        parts |= {f"{k}in": nn.Linear(c, 4 * c), f"{k}out": nn.Linear(4 * c, c)}
    return Function(run, **parts), (_image(s, c),)


def _conv_attention(s: Sizes) -> Net:
    """Attention whose three inputs are depthwise convolutions with a norm of the image that the tokens are."""
    heads, each, h, w = s.choice((1, 3, 4)), s.choice((24, 32, 64)), s.side(12, 28), s.side(12, 28)
    c = heads * each

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        image = m["norm"](x).transpose(1, 2).reshape(1, c, h, w)
        q, k, v = (m[f"w{n}"](m[f"c{n}"](image).flatten(2).transpose(1, 2)) for n in "qkv")
        q, k, v = (t.reshape(1, -1, heads, each).transpose(1, 2) for t in (q, k, v))
        y = torch.softmax(q @ k.transpose(-1, -2) * c**-0.5, -1) @ v
        return x + m["out"](y.transpose(1, 2).reshape(1, -1, c))

    parts: dict[str, nn.Module] = {"norm": nn.LayerNorm(c), "out": nn.Linear(c, c)}
    for n, stride in (("q", 1), ("k", 2), ("v", 2)):
        conv = nn.Conv2d(c, c, 3, stride, 1, groups=c, bias=False)
        parts |= {f"c{n}": nn.Sequential(conv, nn.BatchNorm2d(c)), f"w{n}": nn.Linear(c, c)}
    return Function(run, **parts), (torch.randn(1, h * w, c),)


def _attention(s: Sizes, bias: bool) -> Net:
    """Self-attention of an encoder, with a bias on the scores or without."""
    heads, each, n = s.choice((3, 4, 6)), s.choice((16, 32, 48, 64)), s.randint(60, 260)
    c = heads * each
    table = nn.Embedding(n * n, heads)

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        q, k, v = m["qkv"](m["norm"](x)).reshape(1, n, 3, heads, each).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * each**-0.5
        if bias:
            scores = scores + m["table"].weight.reshape(n, n, heads).permute(2, 0, 1)  # type: ignore[union-attr,operator]
        return x + m["out"]((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(1, n, c))

    parts = {"norm": nn.LayerNorm(c), "qkv": nn.Linear(c, 3 * c), "out": nn.Linear(c, c)}
    return Function(run, **parts, **({"table": table} if bias else {})), (torch.randn(1, n, c),)


def _windows(s: Sizes) -> Net:
    """Attention in windows of an image that is rolled first."""
    side, count, heads, each = s.choice((5, 7, 8)), s.choice((3, 4, 5)), s.choice((2, 3)), 32
    c, n = heads * each, side * count

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        y = torch.roll(m["norm"](x), (-(side // 2), -(side // 2)), (1, 2))
        y = y.reshape(count, side, count, side, c).transpose(1, 2).reshape(count * count, side * side, c)
        q, k, v = m["qkv"](y).reshape(-1, side * side, 3, heads, each).permute(2, 0, 3, 1, 4)
        y = (torch.softmax(q @ k.transpose(-1, -2) * each**-0.5, -1) @ v).transpose(1, 2).reshape(-1, side * side, c)
        y = m["out"](y).reshape(count, count, side, side, c).transpose(1, 2).reshape(1, n, n, c)
        return x + torch.roll(y, (side // 2, side // 2), (1, 2))

    return Function(run, norm=nn.LayerNorm(c), qkv=nn.Linear(c, 3 * c), out=nn.Linear(c, c)), (torch.randn(1, n, n, c),)


def _perceptron(s: Sizes) -> Net:
    c, n = s.channels(96, 384), s.randint(40, 240)
    return nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)), (torch.randn(1, n, c),)


def _excite(s: Sizes) -> Net:
    """Inverted residuals with squeeze-and-excitation and hard-swish."""
    c = s.channels(24, 64, 8)
    wide = 4 * c

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        for k in ("a", "b"):
            y = m[f"{k}deep"](m[f"{k}in"](x))
            gate = functional.hardsigmoid(m[f"{k}up"](functional.relu(m[f"{k}down"](y.mean((2, 3), keepdim=True)))))
            x = x + m[f"{k}out"](y * gate)
        return x

    parts = dict[str, nn.Module]()
    for k in "ab":
        side = s.choice((3, 5))
        parts[f"{k}in"] = nn.Sequential(nn.Conv2d(c, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        deep = nn.Conv2d(wide, wide, side, padding=side // 2, groups=wide, bias=False)
        parts[f"{k}deep"] = nn.Sequential(deep, nn.BatchNorm2d(wide), nn.Hardswish())
        parts |= {f"{k}down": nn.Conv2d(wide, c, 1), f"{k}up": nn.Conv2d(c, wide, 1), f"{k}out": nn.Conv2d(wide, c, 1)}
    return Function(run, **parts), (_image(s, c),)


def _dense_block(s: Sizes) -> Net:
    """Norm and activation in front of convolutions whose inputs are concatenations."""
    c, grow = s.channels(32, 96), s.channels(16, 40)
    parts = dict[str, nn.Module]()
    for k in range(4):
        wide = c + k * grow
        conv = nn.Conv2d(wide, 4 * grow, 1, bias=False), nn.BatchNorm2d(4 * grow)
        last = nn.ReLU(), nn.Conv2d(4 * grow, grow, 3, padding=1, bias=False)
        parts[f"layer{k}"] = nn.Sequential(nn.BatchNorm2d(wide), nn.ReLU(), *conv, *last)

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        for k in range(4):
            x = torch.cat([x, m[f"layer{k}"](x)], 1)
        return x

    return Function(run, **parts), (_image(s, c),)


def _pooled(s: Sizes, rank: int) -> Net:
    """Maximum and mean of windows, beside each other, behind a convolution."""
    c, side = s.channels(32, 96), s.choice((2, 3))
    kinds = (nn.MaxPool2d, nn.AvgPool2d, nn.Conv2d) if rank == 2 else (nn.MaxPool3d, nn.AvgPool3d, nn.Conv3d)
    parts = {
        "conv": kinds[2](c, c, 1),
        "most": kinds[0](side, 1 + side // 3, side // 2),
        "mean": kinds[1](side, 1 + side // 3, side // 2),
    }

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        y = m["conv"](x)
        return torch.cat([m["most"](y), m["mean"](y)], 1)

    return Function(run, **parts), (_image(s, c, rank, 16, 40),)


def _resized(s: Sizes, mode: str) -> Net:
    c, scale = s.channels(16, 64), s.choice((2, 3))
    more: dict[str, Any] = {} if mode == "nearest" else {"align_corners": False}

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        return m["b"](functional.interpolate(m["a"](x), scale_factor=scale, mode=mode, **more))

    return Function(run, a=nn.Conv2d(c, c, 1), b=nn.Conv2d(c, 16, 1)), (_image(s, c, 2, 10, 30),)


def _shuffled(s: Sizes) -> Net:
    """Halves of the channels, one of them convolved, shuffled."""
    c = s.channels(48, 128, 16)
    half = c // 2

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        for k in ("a", "b"):
            one, other = x.chunk(2, 1)
            y = torch.cat([one, m[k](other)], 1)
            x = y.reshape(1, 2, half, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
        return x

    def branch() -> nn.Module:
        first = nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU()
        deep = nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False), nn.BatchNorm2d(half)
        return nn.Sequential(*first, *deep, nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU())

    return Function(run, a=branch(), b=branch()), (_image(s, c),)


def _group_norm(s: Sizes) -> Net:
    c = s.channels(32, 96, 8)
    layers = [m for _ in range(2) for m in (nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))]
    return nn.Sequential(*layers), (_image(s, c),)


def _transposed(s: Sizes) -> Net:
    c = s.channels(24, 80)
    up = nn.ConvTranspose2d(c, c, 2, 2), nn.ReLU(), nn.ConvTranspose2d(c, 24, 4, 2, 1)
    return nn.Sequential(*up), (_image(s, c, 2, 10, 28),)


def _recurrent(s: Sizes, kind: type[nn.Module]) -> Net:
    c, n = s.channels(32, 128), s.randint(20, 60)
    net = kind(c, c)
    return Function(lambda x, net: net(x)[0], net=net), (torch.randn(n, 1, c),)


def _embedded(s: Sizes) -> Net:
    c, n = s.channels(64, 256), s.randint(64, 256)

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        return m["norm"](m["words"](x) + m["places"].weight[: x.shape[1]])  # type: ignore[index]

    parts = {"words": nn.Embedding(5000, c), "places": nn.Embedding(512, c), "norm": nn.LayerNorm(c)}
    return Function(run, **parts), (torch.randint(0, 5000, (1, n)),)


def _tiny(s: Sizes) -> Net:
    """Many operations of a few cells each: what a call takes."""
    c = s.randint(8, 24)

    def run(x: Tensor, **m: nn.Module) -> Tensor:
        for k in range(12):
            x = torch.softmax(torch.tanh(m[f"l{k}"](x)), -1) * x + x.flip(-1)
        return x

    return Function(run, **{f"l{k}": nn.Linear(c, c) for k in range(12)}), (torch.randn(s.randint(2, 5), c),)


CLASSES: dict[str, Callable[[Sizes], Net]] = {
    "conv3d": lambda s: _conv(s, 3, (3, 3, 3)),
    "conv3d, stride 2": lambda s: _conv(s, 3, (3, 3, 3), 2),
    "conv3d 1x3x3": lambda s: _conv(s, 3, (1, 3, 3)),
    "conv3d 3x1x1": lambda s: _conv(s, 3, (3, 1, 1)),
    "conv3d 1x1x1": lambda s: _conv(s, 3, (1, 1, 1)),
    "conv3d, depthwise": lambda s: _conv(s, 3, (3, 3, 3), groups="depthwise"),
    "conv3d, groups": lambda s: _conv(s, 3, (3, 3, 3), groups="some"),
    "conv3d of planes": lambda s: _stem(s, 3, (3, 7, 7), (1, 2, 2)),
    "conv3d, residual": _residual3d,
    "conv2d 3x3": lambda s: _conv(s, 2, (3, 3)),
    "conv2d 3x3, stride 2": lambda s: _conv(s, 2, (3, 3), 2),
    "conv2d 5x5": lambda s: _conv(s, 2, (5, 5)),
    "conv2d 1x7": lambda s: _conv(s, 2, (1, 7)),
    "conv2d 7x1": lambda s: _conv(s, 2, (7, 1)),
    "conv2d, dilation 2": lambda s: _conv(s, 2, (3, 3), dilation=2),
    "conv2d, groups": lambda s: _conv(s, 2, (3, 3), groups="some"),
    "conv2d of planes": lambda s: _stem(s, 2, (7, 7), (2, 2)),
    "depthwise 3x3": lambda s: _conv(s, 2, (3, 3), groups="depthwise"),
    "depthwise 5x5, stride 2": lambda s: _conv(s, 2, (5, 5), 2, groups="depthwise"),
    "depthwise 7x7": lambda s: _conv(s, 2, (7, 7), groups="depthwise"),
    "conv1d 3": lambda s: _conv(s, 1, (3,), 2),
    "conv1d 31, groups": lambda s: _conv(s, 1, (31,), groups="some"),
    "conv1d of samples": lambda s: _stem(s, 1, (10,), (5,)),
    "transposed conv2d": _transposed,
    "norm of channels": _channel_norm,
    "group norm": _group_norm,
    "attention of convolutions": _conv_attention,
    "attention": lambda s: _attention(s, False),
    "attention with bias": lambda s: _attention(s, True),
    "attention in windows": _windows,
    "perceptron": _perceptron,
    "squeeze and excitation": _excite,
    "concatenations": _dense_block,
    "shuffled channels": _shuffled,
    "pooling": lambda s: _pooled(s, 2),
    "pooling of 3 axes": lambda s: _pooled(s, 3),
    "resize, nearest": lambda s: _resized(s, "nearest"),
    "resize, bilinear": lambda s: _resized(s, "bilinear"),
    "LSTM": lambda s: _recurrent(s, nn.LSTM),
    "GRU": lambda s: _recurrent(s, nn.GRU),
    "embedding": _embedded,
    "tiny": _tiny,
}  # fmt: skip
"""By name: a network of sizes drawn from a generator, and its inputs."""


def net(name: str, seed: int) -> Net:
    """A network of a class, ready to run, with statistics of its norms as training leaves them."""
    torch.manual_seed(seed)
    module, inputs = CLASSES[name](Sizes(f"{name} {seed}"))
    for m in module.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            m.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr,operator]
            m.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr,operator]
    return module.eval(), inputs
