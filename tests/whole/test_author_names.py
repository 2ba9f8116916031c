"""Operations, weights and dimensions are called as the model's author calls them, and pins and layouts take these names."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import onnx
import pytest
import torch
from torch import nn

import tapestry
from tapestry.errors import PlanError
from tapestry.ir.graph import Graph, Names
from tapestry.ir.provenance import dim_names, matches, operation_names, parts, tensor_names, weight_names
from tapestry.lift import lift
from tapestry.plan.requests import parse_layouts, parse_pins
from tapestry.plan.topology import parse_mesh
from tapestry.rewrites.core.driver import simplify
from tests.support.lifting import build, data, node


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        b, s, _ = x.shape
        q, k, v = (p(y).view(b, s, 2, 8).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, 16)
        x = x + self.o_proj(y)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@cache
def built(pins: tuple[str, ...] = (), mesh: str = "tp=2") -> tapestry.Compiled:
    torch.manual_seed(0)
    dim = torch.export.Dim
    shapes = {"input_ids": {0: dim("batch"), 1: dim("sequence")}}
    return tapestry.compile(
        Model(), example_inputs={"input_ids": torch.zeros((2, 6), dtype=torch.int64)}, dynamic_shapes=shapes,
        shapes={"batch": 2, "sequence": 6}, mesh=mesh, topology="h100", pins=pins,
    )  # fmt: skip


def graph() -> Graph:
    return built().build.plan.graph


def test_names_are_the_modules_own() -> None:
    names = operation_names(graph())
    assert len(set(names)) == len(names)
    for k in range(3):
        for part in ("q_proj", "o_proj", "up", "down", "norm"):
            assert f"layers.{k}.{part}" in names
    assert {"embed", "head"} <= set(names)
    assert all(parts(graph())), "every operation belongs to a module"
    assert names == operation_names(graph()), "stable"


def test_dimensions_are_the_files_and_the_fields() -> None:
    g = graph()
    up = g.ops[operation_names(g).index("layers.1.up")]
    assert set(dim_names(up, g).values()) == {"batch", "sequence", "out", "in"}
    attention = next(op for op in g.ops if "softsum" in str(getattr(op, "monoid", "")))
    assert {"heads", "key"} <= set(dim_names(attention, g).values())


def test_names_survive_a_saved_build(tmp_path) -> None:
    built().save(tmp_path / "b")
    again = tapestry.load(tmp_path / "b").build.plan.graph
    assert operation_names(again) == operation_names(graph())
    assert again.names.axes["input_ids"] == ("batch", "sequence")


@pytest.mark.slow
def test_a_pattern_pins_every_layer() -> None:
    pins = ("layers.*.q_proj:out=tp", "layers.*.up:out=tp", "layers.*.down:in=tp", "head:sequence=2@tp")
    plan = built(pins).build.plan
    names = operation_names(plan.graph)
    cut = dict(zip(names, (s.dims[0] for s in plan.strategies), strict=True))
    for k in range(3):
        assert (cut[f"layers.{k}.up"], cut[f"layers.{k}.down"]) == ("n", "m")
        q = plan.graph.ops[names.index(f"layers.{k}.q_proj")]
        assert dim_names(q, plan.graph)[cut[f"layers.{k}.q_proj"] or ""] == "out"
    assert cut["head"] == "i"


def test_names_of_nodes_and_tensors_stay_pins() -> None:
    g = simplify(lift(built().build.model, {"batch": 2, "sequence": 6}).graph)
    i = operation_names(g).index("layers.0.up")
    for name in (*g.ops[i].outs, g.ops[i].source[0], "layers.0.up"):
        assert i in parse_pins([f"{name}:n=2@tp"], g, parse_mesh("tp=2"))


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("layers.*.q_porj:out=tp", "there is no operation"),
        ("layers.0.q_proj:outs=tp", "or out"),
        ("layers.0.q_proj:out=dp", "no mesh axis 'dp'"),
        ("layers.0.q_proj:out=4@tp", "4 parts over mesh axis"),
        ("layers.0.q_proj:out", "is not a pin"),
    ],
)
def test_wrong_names_are_answered_with_right_ones(pin: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_pins([pin], graph(), parse_mesh("tp=2"))


def test_layouts_take_parameters_symbols_and_patterns() -> None:
    g, mesh = graph(), parse_mesh("tp=2")
    inputs, _ = parse_layouts(["input_ids:batch=tp", "layers.*.q_proj.weight:0=2@tp"], g, mesh)
    assert inputs == {"input_ids": (0,), **{f"layers.{k}.q_proj.weight": (0,) for k in range(3)}}
    with pytest.raises(PlanError, match="not axis=parts@axis"):
        parse_layouts(["input_ids:rows=tp"], g, mesh)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.up", "model.layers.12.up", True),
        ("layers.*.up", "layers.1.mlp.up", False),
        ("layers.**.up", "layers.1.mlp.up", True),
        ("up", "layers.1.up", True),
        ("p", "layers.1.up", False),
        ("node_linear_*", "node_linear_7", True),
        ("a.b", "axb", False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


@pytest.mark.parametrize("text", ["[1, 2]", "['a'", "__import__('os').abort()", "[" * 9000, "{}", "[]"])
def test_hostile_metadata_is_no_name(tmp_path, text: str) -> None:
    made = node("Relu", "x", "y")
    made.name = "act"
    made.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=text)
    onnx.save(build([made], {"x": data(2, 4)}, ["y"]), tmp_path / "m.onnx")
    g = lift(tmp_path / "m.onnx").graph
    assert g.names.scopes == {} and operation_names(g) == ("act",)


def test_older_exports_say_it_in_node_names(tmp_path) -> None:
    nodes = [node("MatMul", "x anonymous_1", "h"), node("Relu", "h", "r"), node("MatMul", "r anonymous_2", "y")]
    for n, name in zip(nodes, ("/layers.0/layers.0.1/fc/MatMul", "/act/Relu", "/out/MatMul_1"), strict=True):
        n.name = name
    weights = {"anonymous_1": data(4, 6), "anonymous_2": data(6, 3)}
    onnx.save(build(nodes, {"x": data(2, 4)}, ["y"], weights), tmp_path / "m.onnx")
    g = simplify(lift(tmp_path / "m.onnx").graph)
    assert operation_names(g) == ("layers.0.1.fc", "out")
    assert weight_names(g) == {"anonymous_1": "layers.0.1.fc.weight", "anonymous_2": "out.weight"}
    assert tensor_names(g)["anonymous_2"] == "out.weight"


@pytest.mark.slow
def test_a_weight_that_layers_share_names_none_of_them() -> None:
    """Exporters merge equal weights of different layers: the first one's name says nothing of the second."""
    g = graph()
    shared = replace(g, names=Names(), ops=tuple(replace(op, source=()) for op in g.ops))
    assert "layers.0.up" in operation_names(shared), "a weight with one reader does"
    op = shared.ops[operation_names(shared).index("layers.0.up")]
    twice = replace(shared, ops=(*shared.ops, replace(op, outs=tuple(f"{t}.again" for t in op.outs))))
    assert "layers.0.up" not in operation_names(twice)


@pytest.mark.slow
def test_explain_says_what_the_plan_is_like_and_folds_layers() -> None:
    pins = tuple(f"layers.*.{p}:out=tp" for p in ("q_proj", "k_proj", "v_proj", "up"))
    pins += ("layers.*.o_proj:in=tp", "layers.0.down:in=tp", "layers.1.down:in=tp", "layers.2.down:out=tp")
    text = built(pins).explain()
    assert "Megatron tensor parallel over tp in 2 of 3 layers" in text, "the third cuts both of a pair by columns"
    assert "mixed (columns, rows) over tp in 1 of 3 layers" in text
    assert max(map(len, text.splitlines())) <= 80
    head, _, body = text.partition("\n\n")
    assert len(head.splitlines()) <= 20 + 8, "eight of them are pins"
    rows = [line.split() for line in body.splitlines()]
    assert ["3", "layers.*.up"] in [[r[0], r[4]] for r in rows if len(r) > 4]
    downs = [(r[0], r[6]) for r in rows if len(r) > 6 and r[4] == "layers.*.down"]
    assert downs == [("2", "m/2@tp"), ("1", "n/2@tp")], "the exception has a line of its own"
    assert built(pins).explain(every=True).count("layers.") > text.count("layers.")
