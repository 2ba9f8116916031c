"""``torch.compile(model, backend="tapestry")``: inference on plans, one per set of sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tapestry import api
from tapestry.errors import TapestryError
from tapestry.frontends.torch_export import warn_of_training
from tapestry.runtime.session import as_torch

Key = tuple[tuple[Any, ...], ...]


class _Bound(torch.nn.Module):
    """A traced graph with its parameters bound: what is left are the inputs."""

    def __init__(self, graph: fx.GraphModule, names: Sequence[str], arguments: Sequence[Any]) -> None:
        super().__init__()
        self.graph, self.slots = graph, list[str | None]()
        for name, value in zip(names, arguments, strict=True):
            if isinstance(value, torch.nn.Parameter):
                self.register_parameter(name, value)
            self.slots.append(name if isinstance(value, torch.nn.Parameter) else None)

    def forward(self, *inputs: Any) -> Any:
        rest = iter(inputs)
        return self.graph(*(next(rest) if name is None else getattr(self, name) for name in self.slots))


def backend(graph: fx.GraphModule, _example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend's entry point: a function that plans for the sizes that it sees, once each, and runs.

    Args:
        options: of `tapestry.compile` (``torch.compile(..., options={"devices": 4})`` arrives as ``options``).
    """
    if _made_for_inference(graph):
        warn_of_training()
    names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    settings: dict[str, Any] = {"topology": "cpu"} | options.get("options", {})
    plans: dict[Key, tuple[api.Compiled, _Bound]] = {}  # with the parameters, which a key knows by identity

    def run(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
            hint = "with torch.no_grad(): model(x)"
            raise TapestryError("plans are for inference: nothing is differentiated", where="torch.compile", hint=hint)
        key = tuple(_argument_key(a) for a in arguments)
        if key not in plans:
            bound = _Bound(graph, names, arguments)
            fed = tuple(a for a, slot in zip(arguments, bound.slots, strict=True) if slot is None)
            plans[key] = api.compile(bound, example_inputs=fed, **settings), bound
        fed = [a for a in arguments if isinstance(a, torch.Tensor) and not isinstance(a, torch.nn.Parameter)]
        plan, _ = plans[key]
        return tuple(map(as_torch, plan.run(dict(zip(plan.inputs, fed, strict=True))).values()))

    return run


def _made_for_inference(graph: fx.GraphModule) -> bool:
    """Write out of a traced graph what it does in training alone, as ``eval()`` would; whether there is any."""
    found = False
    for n in graph.graph.nodes:
        normal = n.normalized_arguments(graph, normalize_to_only_use_kwargs=True) if n.op == "call_function" else None
        said: dict[str, Any] = dict(normal.kwargs if normal else n.kwargs)
        own = said.get("running_mean", 1) is None or said.get("p", 1) == 0  # the same in both modes: no statistics, no dropout
        on = {k: type(v)() for k in ("training", "train", "dropout_p", "use_input_stats") if (v := said.get(k)) and not own}
        if n.op == "call_function" and on:
            n.args, n.kwargs, found = () if normal else n.args, said | on, True
    graph.recompile()
    return found


def _argument_key(a: Any) -> tuple[Any, ...]:
    """What a plan depends on: of a parameter its very values (a change in place is counted), of an input its type."""
    if isinstance(a, torch.nn.Parameter):
        return id(a), a._version
    return (tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else (a,)
