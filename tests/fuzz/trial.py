"""One case: a model under a recipe, through every stage, against the values that independent evaluators found."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tapestry import api, flags
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Plan
from tapestry.ir.program import Program, Reduce, Transfer, peak_bytes, transfer_bytes
from tapestry.ir.syntax.parser import parse
from tapestry.lift import Lifted, lift, read_weight
from tapestry.plan.pipelines.staged_plan import lower_plan
from tapestry.plan.search.planner import search
from tapestry.plan.topology import topology
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.outputs import paths
from tapestry.runtime.target_protocol import Measured, Target
from tapestry.verify import certificate
from tests.fuzz import awkward
from tests.fuzz.generate.evaluate import Array, Unfit, is_float, replay
from tests.fuzz.generate.random_model import Model
from tests.fuzz.recipe import Recipe, devices, planned, random_recipe, rewritten

TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "float16": 1e-2, "bfloat16": 4e-2}
AWKWARD = 0.15  # of the cases run a second time, with infinities and NaNs
SHAKES = 4  # replays with noise
TURNS = 24  # those of a whole number behind a float, one of which must give a value that differs
SPREAD = 8.0  # a result may be this many times as far from the float64 one as noise moves it


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong: ``kind`` is "wrong", "law", "crash", "refused", "peak" or "bytes"; ``what`` stays the same while
    the case is shrunk, ``detail`` need not."""

    kind: str
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Refused(Exception):
    """The model is refused by the loader with a message: no wrong answer, but counted."""

    message: str


class Referee(NamedTuple):
    """Of an output: the float64 replay, how far noise moves finite cells, and `_kinds`, -1 where replays differ."""

    value: Array
    spread: float
    kinds: Array


@dataclass(slots=True)
class Prepared:
    """A model on disk, lifted; shared by the recipes that are tried on it. ``free`` counts cells that replays do not settle."""

    model: Model
    path: Path
    lifted: Lifted
    data: dict[str, Array]
    referee: dict[str, Referee] = field(default_factory=dict[str, Referee])
    turned: list[str] = field(default_factory=list[str])
    free: Counter[str] = field(default_factory=Counter[str])


def prepare(model: Model, path: Path) -> Prepared | Failure:
    """Write and lift a model.

    Raises:
        Refused: the loader says why it does not take it.
    """
    try:
        model.save(path)
        lifted = Lifted(graph=parse(model.text), model=path, constants={}, nodes=0) if model.text else lift(path, model.sizes)
        weights = lifted.graph.weights.items()
        data = {t: read_weight(lifted.model, w, lifted.graph.tensors[t], constants=lifted.constants) for t, w in weights}
    except TapestryError as e:
        cause = e.__cause__ or e
        if isinstance(cause, LawError):
            return Failure("law", cause.law, str(e))
        if not isinstance(cause, TapestryError):  # (these models are valid)
            return _crash(cause)
        raise Refused(f"{e.what} ({_operator(e.where)})") from None
    except Exception as e:
        return _crash(e)
    return Prepared(model, path, lifted, data)


def _operator(where: str) -> str:
    return where[where.rfind("(") + 1 : -1] if where.endswith(")") else where.split("'", maxsplit=1)[0].strip()


def _crash(e: BaseException) -> Failure:
    frames = traceback.extract_tb(e.__traceback__)
    own = next((f for f in reversed(frames) if "tapestry" in f.filename and "/fuzz/" not in f.filename), frames[-1])
    return Failure(
        "crash", f"{type(e).__name__} in {Path(own.filename).name}:{own.name}", "".join(traceback.format_exception(e))
    )


def draw_recipe(p: Prepared, seed: object) -> Recipe | Failure:
    """Any recipe for a model; the rules that offer its moves are under test as well."""
    try:
        recipe = random_recipe(p.lifted.graph, random.Random(f"recipe {seed}"))[0]
        rng = random.Random(f"cells {seed}")
        recipe = replace(recipe, cells=awkward.draw(p.lifted.graph, rng) if rng.random() < AWKWARD else ())
        return replace(recipe, via="search") if p.model.text and recipe.via in ("build", "processes") else recipe
    except LawError as e:
        return Failure("law", e.law, str(e))
    except Exception as e:
        return _crash(e)


def attempt(p: Prepared, recipe: Recipe, *, lenient: bool = False) -> Failure | None:
    """Run one case through every stage; ``None`` when all is well."""
    try:
        if recipe.via in ("build", "processes"):
            return _through_files(p, recipe)
        graph = rewritten(p.lifted.graph, recipe, lenient=lenient)
        plan, program = _plan(graph, recipe)
        peak = peak_bytes(program)[0]
        certificate.check(plan.annotated(), program, stated_peak=peak, places=plan.places, streamed=plan.streamed)
        target = _generated() if recipe.via == "triton" and flags.interprets() else TorchCpu()
        outs, measured = execute(plan, program, p.model.inputs, p.data, target)
        return judge(p, outs) or _used(program, measured) or _awkward(p, recipe, (plan, program), target)
    except LawError as e:
        return Failure("law", e.law, str(e))
    except TapestryError as e:
        return Failure("refused", e.what, str(e))
    except Exception as e:
        return _crash(e)


def _plan(graph: Graph, recipe: Recipe) -> tuple[Plan, Program]:
    if recipe.via == "search":
        plan = planned(graph, recipe)
        found = search(graph, topology(recipe.mesh, "cpu"), inputs=plan.inputs, outputs=plan.outputs, time_limit=5.0)
        return found.plan, found.program
    plan = planned(graph, recipe)
    return plan, lower_plan(plan)


def _awkward(p: Prepared, recipe: Recipe, planned: tuple[Plan, Program], target: Target) -> Failure | None:
    """The same plan on inputs that hold infinities and NaNs; nothing is said where the interpreter does not run on them."""
    if not recipe.cells:
        return None
    given = awkward.put(p.model.inputs, recipe.cells)
    try:
        expected = awkward.wanted(p.lifted.graph, {**given, **p.data})
    except TapestryError:  # a shape or a position that comes of data
        return None
    outs, _ = execute(*planned, given, p.data, target)
    policy = {"unseen": awkward.masks(planned[0].graph), "reordered": bool(recipe.moves)}
    wrong = awkward.differs(outs, expected, **policy)
    if wrong:
        steady = awkward.steadier(p.lifted.graph, {**given, **p.data}, expected)
        wrong = awkward.differs(outs, steady, **policy)
    return Failure("wrong", "awkward values", wrong) if wrong else None


def _generated() -> Target:
    """Generated kernels, in Triton's interpreter."""
    from tapestry.codegen.triton.run.device_target import TritonTarget

    return TritonTarget()


def execute(
    plan: Plan, program: Program, feeds: Mapping[str, Array], weights: Mapping[str, Array], target: Target
) -> tuple[dict[str, Array], Measured]:
    """Run a program on logical devices."""

    def source(arrays: Mapping[str, Array]) -> Callable[[str, Any], Any]:
        return lambda t, box: from_numpy(np.array(arrays[t][tuple(slice(lo, hi) for lo, hi in box)]))

    executor = LocalExecutor(plan.graph, program, target, source(weights), plan.streamed)
    outs, measured = executor.run(source(feeds))
    return {t: np.array(to_numpy(a, plan.graph.tensors[t].dtype)) for t, a in outs.items()}, measured


def _through_files(p: Prepared, recipe: Recipe) -> Failure | None:
    with tempfile.TemporaryDirectory(dir=p.path.parent) as folder:
        api.compile(p.path, mesh=recipe.mesh, topology="cpu", shapes=p.model.sizes, time_limit=5.0).save(Path(folder) / "b")
        if recipe.via == "processes":
            return _on_processes(p, Path(folder), devices(recipe))
        loaded = api.load(Path(folder) / "b")
        feeds = {t: p.model.inputs[t] for t in loaded.build.plan.graph.inputs}
        result, document = api.run_checked(loaded, feeds, check=False)
        if not document["passed"]:
            return Failure("peak", "measured bytes", str(document.get("reason")))
    return judge(p, result.outputs)


def _on_processes(p: Prepared, folder: Path, count: int) -> Failure | None:
    """The command that runs a build on several processes, and what it writes."""
    argv = [sys.executable, "-m", "tapestry", "run", str(folder / "b"), "--processes", str(count)]
    argv += ["--output", str(folder / "o"), "--threads", "1", "--timeout", "120", "-q"]
    for name, a in p.model.inputs.items():
        np.save(folder / f"{name}.npy", a)
        argv += ["--input", f"{name}={folder / name}.npy"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    if done.returncode:
        return Failure("crash", "processes", done.stderr[-3000:])
    outs: dict[str, Array] = {}
    for (name, want), path in zip(p.model.outputs.items(), paths(folder / "o", p.model.outputs), strict=True):
        a = np.load(path)
        outs[name] = a.view(want.dtype) if a.dtype.kind == "V" else a  # (a .npy file knows no bfloat16)
    return judge(p, outs)


def _used(program: Program, measured: Measured) -> Failure | None:
    """The peak and every transfer are what the program says, byte for byte."""
    if measured.peak != peak_bytes(program)[0]:
        return Failure("peak", "measured bytes", f"{measured.peak}, planned {peak_bytes(program)[0]}")
    wanted: dict[str, tuple[int, int]] = {}
    for s in program.steps:
        if isinstance(s, Transfer | Reduce):
            count, total = wanted.get(s.kind, (0, 0))
            wanted[s.kind] = (count + 1, total + transfer_bytes(s, program))
    if wanted != measured.transfers:
        return Failure("bytes", "measured transfers", f"{measured.transfers}, planned {wanted}")
    return None


# comparison


def judge(p: Prepared, outs: Mapping[str, Array]) -> Failure | None:
    """Exact results exactly; floats to what their type can hold, or else to what rounding may do by a float64 replay."""
    if set(outs) != set(p.model.outputs):
        return Failure("wrong", "outputs", f"{sorted(outs)}, not {sorted(p.model.outputs)}")
    coarse = max((TOLERANCE.get(a.dtype.name, 0.0) for a in p.model.given.values()), default=0.0)
    coarse = max([coarse, *(TOLERANCE.get(a.dtype.name, 0.0) for a in p.model.outputs.values()), _narrowest(p.model)])
    for name, want in p.model.outputs.items():
        got = np.asarray(outs[name])
        if got.shape != want.shape or got.dtype != want.dtype:
            return Failure("wrong", "type", f"'{name}' is {got.dtype}{got.shape}, not {want.dtype}{want.shape}")
        a, b = got.astype(np.float64), want.astype(np.float64)
        if name in p.model.exact or not is_float(want):
            off = np.asarray(got != want)
            if off.any() and name not in p.model.exact and not p.model.text and got.dtype.kind in "iub":
                off &= ~_turned(p, name, got)
            if off.any():
                return Failure("wrong", "exact values", f"'{name}'{_first(got, want, off)}")
            continue
        limit = coarse * max(1.0, float(np.abs(b).max(initial=0.0)))
        with np.errstate(invalid="ignore"):
            off = ~((a == b) | (np.abs(a - b) <= limit) | (np.isnan(a) & np.isnan(b)))
        far = _far(p, name, a, limit) if off.any() else ""
        if far:
            return Failure("wrong", "values", f"'{name}'{_first(a, b, off)}; {far}")
    return None


def _turned(p: Prepared, name: str, got: Array) -> Array:
    """Cells of a result that is no float where noise in the last places leads to the very value that it has."""
    found = np.zeros(got.shape, bool)
    for k in range(TURNS):
        found |= np.asarray(replay(p.model.nodes, p.model.given, p.model.opset, noise=np.random.default_rng(k))[name] == got)
    if name not in p.turned and found.any():
        p.turned.append(name)
    return found


def _narrowest(model: Model) -> float:
    """Tolerance of the narrowest float type that a cast inside the model goes through."""
    kinds = [a.i for n in model.nodes if n.op_type == "Cast" for a in n.attribute if a.name == "to"]
    return max((TOLERANCE[t] for k, t in ((10, "float16"), (16, "bfloat16")) if k in kinds), default=0.0)


def _first(got: Array, want: Array, wrong: Array) -> str:
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{list(at)} is {got[at]}, not {want[at]} ({int(wrong.sum())} of {wrong.size} differ)"


def _far(p: Prepared, name: str, got: Array, limit: float) -> str:
    """Why a result is farther from the float64 replay than noise in the last places explains; "" when it is not."""
    if name not in p.referee:
        p.referee |= _referee(p.model)
    r, kinds = p.referee[name], _kinds(got)
    lost = (r.kinds >= 0) & (kinds != r.kinds)
    if lost.any():
        return f"{_first(got, r.value, lost)}: in every replay the same of finite, NaN, inf and -inf"
    p.free[next((n.op_type for n in p.model.nodes if name in n.output), "")] += int((r.kinds < 0).sum())
    finite = r.kinds == 0
    worst = float(np.abs(got[finite] - r.value[finite]).max(initial=0.0))
    allowed = limit + SPREAD * r.spread
    return "" if worst <= allowed else f"{worst:.3g} from the float64 replay, where rounding explains {allowed:.3g}"


def _kinds(a: Array) -> Array:
    """Of each cell whether it is finite (0), NaN (1), inf (2) or -inf (3)."""
    return np.select([np.isfinite(a), np.isnan(a), a > 0], [0, 1, 2], 3)


def _referee(model: Model) -> dict[str, Referee]:
    if model.text:
        return {name: Referee(x := a.astype(np.float64), 0.0, _kinds(x)) for name, a in model.outputs.items()}
    plain = replay(model.nodes, model.given, model.opset)
    try:
        wide = replay(model.nodes, model.given, model.opset, plain=plain)
    except Unfit:
        wide = plain
    noisy = [replay(model.nodes, model.given, model.opset, noise=np.random.default_rng(k)) for k in range(SHAKES)]
    out: dict[str, Referee] = {}
    for name in model.outputs:
        base, *others = (np.asarray(r[name]).astype(np.float64) for r in (plain, wide, *noisy))
        kinds = _kinds(base)
        same = np.all([_kinds(o) == kinds for o in others], axis=0)
        finite = same & (kinds == 0)
        gaps = [float(np.abs(o[finite] - base[finite]).max(initial=0.0)) for o in others]
        out[name] = Referee(others[0], max(gaps), np.where(same, kinds, -1))
    return out
