"""Attention however it is written: one operation, and what float64 gives."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from tapestry.ir.graph import Block
from tapestry.ir.plan import MeshAxis, Plan, Strategy
from tapestry.ir.syntax.printer import to_text
from tapestry.lift import lift, read_weight
from tapestry.plan.lower import lower
from tapestry.rewrites.core.driver import simplify
from tapestry.verify import interp
from tests.support.attention.attention_models import VARIANTS, K, S, model
from tests.support.attention.attention_runs import close
from tests.support.small_models import Case, execute


def check_one(proto: onnx.ModelProto, folder: Path) -> None:
    path = folder / "m.onnx"
    onnx.save(proto, path)
    lifted = lift(path, {})
    graph = simplify(lifted.graph)
    found = [(op.monoid, len(op.inner)) if isinstance(op, Block) else op.kind for op in graph.ops]
    assert [f for f in found if f[0] is not None] == [("softsum", 1)], to_text(graph)
    wide = [t for op in graph.ops[:-1] for t in op.outs if graph.tensors[t].size > S * K]
    assert len(found) <= 2 and not wide, to_text(graph)  # at most something small for each query or key on its own
    rng = np.random.default_rng(5)
    feeds = {}
    for i in proto.graph.input:
        shape = [d.dim_value for d in i.type.tensor_type.shape.dim]
        kind = i.type.tensor_type.elem_type
        feeds[i.name] = (
            rng.random(shape) < 0.7 if kind == onnx.TensorProto.BOOL else rng.standard_normal(shape).astype(np.float32)
        )
        if i.name == "keep":
            feeds[i.name] = (rng.random(shape) < 0.7).astype(np.float32)
    weights = {t: read_weight(lifted.model, w, graph.tensors[t], constants=lifted.constants) for t, w in graph.weights.items()}
    want = interp.run(
        lifted.graph,
        {
            **feeds,
            **{
                t: read_weight(lifted.model, w, lifted.graph.tensors[t], constants=lifted.constants)
                for t, w in lifted.graph.weights.items()
            },
        },
        wide=True,
    )["y"]
    with np.errstate(all="ignore"):
        (reference,) = ReferenceEvaluator(proto).run(None, feeds)
    np.testing.assert_allclose(want, np.asarray(reference), rtol=2e-4, atol=2e-5)
    one = (MeshAxis("d0", 1),)
    plan = Plan(graph=graph, mesh=one, strategies=tuple(Strategy((None,), (None,)) for _ in graph.ops))
    outs, _ = execute(graph, lower(plan), Case(None, graph, feeds, weights, {}))  # type: ignore[arg-type]
    close(outs["y"], want)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", VARIANTS)
def test_one_operation_within_rounding_of_float64(name: str, tmp_path: Path) -> None:
    check_one(model(name), tmp_path)


@pytest.mark.parametrize(
    "name", ["q·k·s", "softmax by hand", "normalised after the sum", "padding", "grouped heads", "operator"]
)
def test_decoding_one_query(name: str, tmp_path: Path) -> None:
    check_one(model(name, 1), tmp_path)


def test_there_are_enough_of_them() -> None:
    assert len(VARIANTS) >= 20
