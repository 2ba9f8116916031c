"""onnx's own backend tests, case by case, for any backend; what each operator lifts to; and cases under random splits."""

from __future__ import annotations

import os
import signal
import tempfile
import unittest
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test.runner import Runner, _normalize_tensor

from tapestry.ir.expr import Call, walk
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.plan import MeshAxis, Plan
from tapestry.ir.types import FLOATS, numpy_dtype
from tapestry.onnx_eval.ort_session import ort_session

if TYPE_CHECKING:
    from tapestry.api import Compiled

Result = tuple[str, str]  # pass, fail or skip; and why
LIMIT = 120  # seconds for one case
# inputs that models give as constants: sizes, axes, quantisation parameters
PARAMETERS = frozenset(
    {"shape", "axes", "axis", "starts", "ends", "steps", "pads", "repeats", "sizes", "scales", "roi", "k", "K", "split"}
    | {"depth", "output_shape", "dft_length", "frame_step", "frame_length", "input_shape", "image_shape", "block_shape"}
    | {"size", "constant_value", "max_output_boxes_per_class", "iou_threshold", "score_threshold", "x_scale", "target_shape"}
    | {"x_zero_point", "y_scale", "y_zero_point", "a_scale", "a_zero_point", "b_scale", "b_zero_point", "w_scale", "limit"}
    | {"w_zero_point", "min", "max", "ratio", "training_mode", "start", "delta", "num_mel_bins", "sample_rate", "values"}
    | {"lower_edge_hertz", "upper_edge_hertz"}
)
OF_OPERATOR = {"Loop": {"M", "cond"}, "ConstantOfShape": {"input"}}  # further ones whose names say less
BOUND = {"f32": 1e-5, "f64": 1e-11, "f16": 2e-3, "bf16": 2e-2}  # of the largest value: sums in another order


class OnnxRuntime(Backend):
    """onnxruntime on the CPU, as it comes."""

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """A session."""
        session = ort_session(model.SerializeToString())
        return _Rep(model, lambda feeds: session.run(None, feeds))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Only the CPU."""
        return device == "CPU"


class Reference(OnnxRuntime):
    """The evaluator of the onnx package."""

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """An evaluator."""
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(model)
        return _Rep(model, lambda feeds: evaluator.run(None, feeds))


class _Rep(BackendRep):
    def __init__(self, model: ModelProto, run: Any) -> None:
        stored = {t.name for t in model.graph.initializer}
        self.names, self._run = [i.name for i in model.graph.input if i.name not in stored], run

    def run(self, inputs: Any, **kwargs: Any) -> Any:
        """Outputs for inputs in order."""
        values = [v if v is None or isinstance(v, list) else np.asarray(v) for v in inputs]
        return self._run(dict(zip(self.names, values, strict=False)))


def tests(backend: type[Backend]) -> dict[str, tuple[str, Any]]:
    """Test name to (category, function) for every case on the CPU."""
    os.environ.setdefault("ONNX_HOME", tempfile.gettempdir() + "/tapestry-onnx-home")  # light models are unpacked there
    out: dict[str, tuple[str, Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = Runner(backend, __name__)
    for title, case in runner.test_cases.items():
        for name in vars(case):
            if name.startswith("test_") and name.endswith("_cpu"):
                category = title.removeprefix("OnnxBackend").removesuffix("ModelTest")
                out[name.removesuffix("_cpu")] = (category, getattr(case(name), name))
    return dict(sorted(out.items()))


def attempt(test: Any) -> Result:
    """Run one case."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {LIMIT} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            test()
    except unittest.SkipTest as e:
        return "skip", _short(e)
    except Exception as e:  # whatever a backend raises is a failure
        return "fail", _short(e)
    finally:
        signal.alarm(0)
    return "pass", ""


def _short(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


@cache
def node_cases() -> tuple[Any, ...]:
    """onnx's generated one-node (and expanded) cases, with model and data."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    return tuple(sorted(found, key=lambda c: c.name))


# what operators lift to


def fixed_parameters(model: ModelProto, inputs: Sequence[Any]) -> ModelProto:
    """The model of a one-node case with its parameters as constants, as exporters write them."""
    out = ModelProto()
    out.CopyFrom(model)
    node = out.graph.node[0]
    schema = onnx.defs.get_schema(node.op_type, _version(model, node.domain), node.domain)
    formal = {i: schema.inputs[min(k, len(schema.inputs) - 1)].name for k, i in enumerate(node.input) if i}
    for value, i in zip(inputs, list(out.graph.input), strict=False):
        if (
            formal.get(i.name) in PARAMETERS | OF_OPERATOR.get(node.op_type, set())
            and i.type.HasField("tensor_type")
            and value is not None
        ):
            array = np.asarray(_normalize_tensor(value))
            if array.dtype != object:
                out.graph.initializer.append(numpy_helper.from_array(array, i.name))
                out.graph.input.remove(i)
    return out


def _version(model: ModelProto, domain: str) -> int:
    return next(o.version for o in model.opset_import if o.domain in (domain, domain or "ai.onnx"))


def classify(graph: Graph) -> str:
    """``affine``: block operations alone; ``partly``: some structure or splittable dimension; ``opaque``: none."""
    opaque = [op for op in graph.ops if isinstance(op, Opaque)]
    if not opaque:
        return "affine"
    return "partly" if any(op.dims for op in opaque) or len(opaque) < len(graph.ops) else "opaque"


def operator_of(model: ModelProto) -> NodeProto | None:
    """The operator that a case is about: the only node of its model."""
    nodes = model.graph.node
    return nodes[0] if len(nodes) == 1 else None


def classes(cases: Iterable[Any]) -> dict[str, dict[str, int]]:
    """Operator to how many of its cases are affine, partly affine, opaque."""
    from tapestry.errors import TapestryError
    from tapestry.lift import lift

    table: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.onnx"
        for case in cases:
            node = operator_of(case.model)
            if node is None or case.name.endswith("_expanded"):
                continue
            path.write_bytes(fixed_parameters(case.model, case.data_sets[0][0]).SerializeToString())
            try:
                kind = classify(lift(path).graph)
            except TapestryError:
                kind = "refused"
            row = table.setdefault(f"{node.domain}::{node.op_type}".removeprefix("::"), {})
            row[kind] = row.get(kind, 0) + 1
    return dict(sorted(table.items()))


def overall(row: dict[str, int]) -> str:
    """An operator's class: of all its cases when they agree, else ``partly``."""
    kinds = set(row) - {"refused"}
    if not kinds:
        return "refused"
    return kinds.pop() if len(kinds) == 1 else "partly"


# random splits


def moves_only(graph: Graph) -> bool:
    """Whether a graph computes nothing in floating point: it moves, compares, or works on integers."""
    for op in graph.ops:
        if isinstance(op, Opaque):
            if any(graph.tensors[t].dtype in FLOATS for t in op.outs):
                return False
            continue
        calls = [x for e in (*op.body, *op.then) for x in walk(e) if isinstance(x, Call)]
        sums = op.monoid not in (None, "max", "min") and op.body[0].dtype in FLOATS
        if sums or any(c.fn != "where" and c.dtype in FLOATS for c in calls):
            return False
    return True


class Sharded:
    """One case, compiled once, to be run under any number of random plans."""

    def __init__(self, model: ModelProto, inputs: Sequence[Any]) -> None:
        from bench.support.onnx_backend import TapestryBackend
        from bench.support.random_plan import random_plan

        # for several devices, so that recurrences are lifted step by step; the plan itself is not used
        self.prepared = TapestryBackend.prepare(model, devices=2, time_limit=0.0, stages=1)
        values = [_normalize_tensor(v) for v in inputs]
        names = [i.name for i in self.prepared.inputs]
        self.feeds = {n: v if v is None or isinstance(v, list) else np.asarray(v) for n, v in zip(names, values, strict=False)}
        self.compiled = self.prepared.compiled(self.feeds)
        self.graph = self.compiled.build.plan.graph
        self.alone = self._run(random_plan(self.graph, (MeshAxis("d0", 1),), 0))
        self.exact = moves_only(self.graph)

    def _run(self, plan: Plan) -> dict[str, Any]:
        return self.under(plan).run(self.feeds)

    def under(self, plan: Plan) -> Compiled:
        """The case under a plan of its graph, checked by the verifier."""
        from tapestry.api import Compiled
        from tapestry.ir.program import peak_bytes
        from tapestry.plan.lower import lower
        from tapestry.verify import certificate

        program = lower(plan)
        certificate.check(plan.annotated(), program, mesh=plan.mesh)
        base = self.compiled
        build = replace(base.build, plan=plan, program=program, peak_bytes=tuple(peak_bytes(program)[0]))
        return Compiled(build, base.constants, {}, {})

    def weights(self) -> dict[str, Any]:
        """The graph's weights: constants, and what the model's file holds."""
        from tapestry.lift import read_weight

        graph, path = self.graph, Path(self.compiled.build.model)
        made = self.compiled.constants.items()
        constants = {n: np.frombuffer(b, numpy_dtype(graph.tensors[n].dtype)).reshape(graph.tensors[n].shape) for n, b in made}
        return {t: read_weight(path, w, graph.tensors[t], constants=constants) for t, w in graph.weights.items()}

    def split(self, devices: int, seed: int) -> int:
        """Run under a random plan, checked by the verifier, and compare; returns how many operations were really cut."""
        from bench.support.random_plan import random_plan

        plan = random_plan(self.graph, (MeshAxis("d0", devices),), seed)
        for name, a in self._run(plan).items():
            self._same(name, a)
        return sum(any(d is not None for d in s.dims) for s in plan.strategies)

    def _same(self, name: str, found: Any) -> None:
        want, t = self.alone[name], self.graph.tensors[name]
        if t.on_host:
            Runner.assert_similar_outputs([want], [found], 0.0, 0.0)
            return
        assert found.dtype == want.dtype and found.shape == want.shape, name
        bits = found.view(np.uint8) if found.ndim and found.flags.c_contiguous else found.tobytes()
        same = want.view(np.uint8) if want.ndim and want.flags.c_contiguous else want.tobytes()
        if np.array_equal(bits, same):
            return
        assert t.dtype in BOUND and not self.exact, f"'{name}' is not bit for bit what it is unsplit"
        a, b = found.astype(np.float64), want.astype(np.float64)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), err_msg=name)
        np.testing.assert_array_equal(a[~np.isfinite(b)], b[~np.isfinite(b)], err_msg=name)
        finite = np.isfinite(b)
        worst = np.abs(a[finite] - b[finite]).max(initial=0.0)
        precision = max(BOUND[x.dtype] for x in self.graph.tensors.values() if x.dtype in BOUND)
        limit = precision * max(1.0, np.abs(b[finite]).max(initial=0.0))
        assert worst <= limit, f"'{name}' is off by {worst}, the bound is {limit}"


def sharded(case: Any, seeds: int = 1) -> tuple[Result, int]:
    """A node case under random plans on 2 and 3 devices; (result, operations cut in all)."""
    cut = 0

    def test() -> None:
        nonlocal cut
        one = Sharded(case.model, case.data_sets[0][0])
        for devices in (2, 3):
            for seed in range(seeds):
                cut += one.split(devices, seed)

    return attempt(test), cut


__all__ = ["OnnxRuntime", "Reference", "Sharded", "attempt", "classes", "node_cases", "overall", "sharded", "tests"]
