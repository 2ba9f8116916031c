"""The comparison of a plan's graph with its model file: what it runs on, what it says where it cannot be made."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from tapestry.errors import LawError, ModelError, TapestryError, refusing
from tapestry.ir.graph import Graph
from tapestry.ir.types import FLOATS, Array, numpy_dtype
from tapestry.lift.file.protos import EARLY, standard_opset
from tapestry.lift.file.structure import TEXT, file_bytes, load, load_text
from tapestry.lift.file.weight_data import read_weight
from tapestry.lift.operators.contrib import microsoft
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.plugins.entry_points import Plugin
from tapestry.runtime.feeds import random_feeds
from tapestry.verify import interp
from tapestry.verify.model import model_laws, second_opinion
from tapestry.verify.model.model_values import ModelFile, WrongSizes, subgraphs, with_bodies

Evidence = dict[str, Any]
POINTS = 1 << 37  # index points of a graph whose model is still run
QUICKLY = 1 << 34  # where a plan has just been made
BYTES = 1 << 32  # of weights and values
STEPS = 1 << 12  # of a Loop that is run
ZEROS = "whole numbers 0"


def compare(
    graph: Graph,
    model: Path,
    sha256: str,
    constants: Mapping[str, Array],
    *,
    points: int = POINTS,
    special: bool = True,
    lifted: Callable[[], Graph | None] = lambda: None,
) -> tuple[dict[str, int], Evidence]:
    """Hold a graph to its model file; returns counts of checks, by law, and the evidence for a certificate.

    Args:
        constants: data of the derived constants.
        points: a graph of more index points is compared in names, weights and attributes alone.
        special: run once more on infinities and the like.
        lifted: makes the graph that rewrites began with; none where there were none.

    Raises:
        LawError: the graph is not the model's, or the file is another one than the plan was made of.
    """
    if why := _without(model, sha256):
        return {"model": 0}, _no_evidence(why)
    with refusing(ModelError, "the plan's model cannot be read", str(model), "compile it again"):
        file, early = model_file(model)
    absent = _absent(file.proto, model.parent)
    too_big = _too_big(graph, points) or _too_long(file)
    drawn = {} if too_big else _random_weights(absent, graph)
    file.given = drawn

    def read(name: str) -> Array:
        return (
            drawn[name] if name in drawn else read_weight(model, graph.weights[name], graph.tensors[name], constants=constants)
        )

    if too_big:
        done = model_laws.facts(graph, file, read)
        evidence = _no_evidence(f"{too_big}: operations not compared by value") | {"counts": dict(done)}
    else:
        own = lifted() if special else None
        large = own is not None and bool(_too_big(own, points))
        done, evidence = _by_value(graph, file, read, special, None if large else own, operands=not large)
    if early:
        evidence["written as"] = "opset 7, by the compiler, which is not compared"
    if drawn:
        evidence["weights"] = f"{len(drawn)} without data were drawn at random"
    return {"model": sum(n for what, n in done.items() if what in COUNTED)}, evidence


def _without(model: Path, sha256: str) -> str:
    """Why there is nothing to compare a graph with; "" where there is.

    Raises:
        LawError: the file is another one than the plan was made of.
    """
    try:
        found = hashlib.sha256(file_bytes(model)).hexdigest()
    except (OSError, ValueError, ModelError):
        return "model not present: graph not compared"
    if found != sha256:
        why = f"its SHA-256 is {found}"
        raise LawError("model", "the model file is not the one that the plan was made of", where=str(model), why=why)
    return "the model is the graph itself, as text; the log of rewrites begins with it" if model.suffix == TEXT else ""


COUNTED = ("inputs and outputs", "weights", "constants", "operations", "opaque nodes")


def _by_value(
    graph: Graph, file: ModelFile, read: Any, special: bool, lifted: Graph | None, *, operands: bool
) -> tuple[Mapping[str, int], Evidence]:
    """The comparison on the first inputs that a reference takes and that mean something to the model.

    Numbers drawn at random may be none that an operator has a meaning for (lengths beyond the sequence, places between
    classes): then evaluators differ from each other. Where they do, and there alone, the graph is asked again on numbers of
    0 and 1, and refused if it differs on those as well.
    """
    why, differs, sizes = "", None, None
    for inputs, feeds in _feeds(graph).items():
        if differs and inputs == ZEROS:  # too little to prove anything by
            break
        try:
            compared = model_laws.check(graph, file, feeds, read, special=special, lifted=lifted, operands=operands)
        except model_laws.Disputed as e:
            differs = differs or e
        except LawError:
            raise
        except TapestryError as e:
            why = why or " ".join(f"{e.where}: {e.what}; {e.why}".split()).strip(":; ")
            sizes = e if isinstance(e, WrongSizes) else None
        else:
            disputed = {"disputed": " ".join(f"{differs.what}; {differs.why}".split())} if differs else {}
            return compared.counts, compared.evidence() | {"inputs": inputs} | disputed
    if differs:
        raise differs
    if sizes:
        hint = "check the sizes given with --shape; a symbol that was not given may have been taken for another one"
        raise ModelError("onnxruntime refuses the model at these sizes", where=sizes.where, why=sizes.why, hint=hint)
    done = model_laws.facts(graph, file, read)
    return done, _no_evidence(f"{why or 'no values for its inputs'}: operations not compared by value") | {"counts": dict(done)}


def text_outputs(model: Path, feeds: Mapping[str, Any]) -> dict[str, Array]:
    """What a graph of IR text gives, by the evaluator that only follows its definitions."""
    graph = load_text(model)
    data = {t: read_weight(model, w, graph.tensors[t]) for t, w in graph.weights.items()}
    return interp.run(graph, {**feeds, **data})


def model_file(model: Path) -> tuple[ModelFile, bool]:
    """A model as evaluators are to run it: with the operators of plug-ins as their packages define them, and those of early
    opsets as later ones write them; whether there were such."""
    proto = load(model)
    microsoft.define(proto, vendor=False)
    if standard_opset(proto) >= EARLY:
        return ModelFile(proto, model.parent), False
    from tapestry.lift.normalize.opset_six import upgrade

    return ModelFile(proto, model.parent), upgrade(proto)


def second_opinions(
    graph: Graph, model: Path, constants: Mapping[str, bytes], feeds: Mapping[str, Any], reference: str
) -> dict[str, Any]:
    """Opaque nodes that a run and its reference give to one library, asked of another (`verify.model.awkward_operands`)."""
    held = arrays(graph, constants)

    def read(name: str) -> Array:
        return read_weight(model, graph.weights[name], graph.tensors[name], constants=held)

    return second_opinion.second_opinions(graph, model_file(model)[0], feeds, read, reference)


def arrays(graph: Graph, constants: Mapping[str, bytes]) -> dict[str, Array]:
    """The derived constants of a graph, from their bytes."""
    tensors = graph.tensors
    return {t: np.frombuffer(b, numpy_dtype(tensors[t].dtype)).reshape(tensors[t].shape) for t, b in constants.items()}


OF_PLUGINS = {
    "targets": ("what the kernels compute", "nothing: of its results the shapes and types are looked at"),
    "costs": ("the seconds of kernels", "nothing: they decide which plan is made, and not what it computes"),
    "monoids": ("the merges", "the laws of a monoid, on states that the graph's operations make"),
    "topologies": ("devices and links", "nothing: they decide which plan is made, and not what it computes"),
    "operators": ("the operator", "nothing: its definition says what it is"),
    "rules": ("rewrites", "every place where they were applied, region before and after"),
}


def plugin_evidence(parts: Iterable[Plugin]) -> list[Evidence]:
    """Which plug-ins took part, and what each of them was held to."""
    rows: list[Evidence] = []
    for p in sorted(parts):
        what, against = OF_PLUGINS[p.kind]
        rows.append({"kind": "plug-in", "what": what, "against": against, "counts": {}, "plugin": p.data()})
    return rows


def _no_evidence(why: str) -> Evidence:
    return {"kind": "none", "what": "the graph's operations", "against": "the model file", "why": why, "counts": {}}


def _feeds(graph: Graph) -> dict[str, dict[str, Any]]:
    """Inputs by what they are, the most telling first."""
    try:
        first = random_feeds(graph, 0)
    except TapestryError:
        return {}
    rng = np.random.default_rng(0)

    def small(a: Array, most: int, kinds: str) -> Array:
        return rng.integers(0, most + 1, a.size).reshape(a.shape).astype(a.dtype) if a.dtype.kind in kinds else a

    def drawn(most: int, kinds: str) -> dict[str, Any]:
        return {n: small(a, most, kinds) if is_array(a) else a for n, a in first.items()}

    return {"random": first, "whole numbers 0 or 1": drawn(1, "iu"), "all 0 or 1": drawn(1, "iuf"), ZEROS: drawn(0, "iu")}


def _too_big(graph: Graph, points: int) -> str:
    """Why a model is not run; "" if it is."""
    work = sum(math.prod(d.size for d in op.space) for op in graph.ops)
    held = sum(t.nbytes for t in graph.tensors.values())
    if work > points:
        return f"{work:,} index points, and {points:,} are run"
    return f"{held:,} bytes of weights and values, and {BYTES:,} are run" if held > BYTES else ""


def _too_long(file: ModelFile) -> str:
    """Why a model might not end soon; "" if each of its Loops, none in a body, says so by a constant."""
    if any(n.op_type == "Loop" for n in with_bodies(n for node in file.nodes for g in subgraphs(node) for n in g.node)):
        return "a Loop in a body"
    for node in (n for n in file.nodes if n.op_type == "Loop"):
        steps = file.constant(node.input[0])
        if steps is None or steps.size != 1 or int(steps.item()) > STEPS:
            return f"a Loop of more than {STEPS:,} steps, or of a number that depends on values"
    return ""


def _absent(proto: ModelProto, folder: Path) -> list[TensorProto]:
    """Initializers whose files are not there."""
    out: list[TensorProto] = []
    for t in proto.graph.initializer:
        if t.data_location == TensorProto.EXTERNAL:
            location = next((e.value for e in t.external_data if e.key == "location"), "")
            if not (folder / location).is_file():
                out.append(t)
    return out


def _random_weights(absent: list[TensorProto], graph: Graph) -> dict[str, Array]:
    """Random data in the place of what is not there, of a scale at which layers keep the size of what goes through them."""
    rng = np.random.default_rng(0)
    out: dict[str, Array] = {}
    for t in absent:
        shape, dtype = tuple(t.dims), helper.tensor_dtype_to_np_dtype(t.data_type)
        known = graph.tensors.get(t.name)
        if known is not None and numpy_dtype(known.dtype) != dtype:
            continue
        if known is None or known.dtype in FLOATS:
            scale = 1 / math.sqrt(max(1, math.prod(shape[:-1]) if len(shape) == 2 else math.prod(shape[1:])))
            out[t.name] = (rng.standard_normal(shape) * (scale if len(shape) > 1 else 0.1) + (len(shape) == 1) * 0.5).astype(
                dtype
            )
        else:
            out[t.name] = rng.integers(0, 100, shape).astype(dtype)
    return out
