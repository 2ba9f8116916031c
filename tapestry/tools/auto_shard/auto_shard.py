"""``tapestry auto-shard``: a model over N devices as pipeline stages, PopRT's way and by dynamic programming."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

from tapestry.errors import PlanError, TapestryError, some
from tapestry.interop import annotation_rules
from tapestry.interop.annotation_rules import external
from tapestry.interop.sharding_specs import IR_VERSIONS
from tapestry.ir.plan import MeshAxis
from tapestry.lift import lift
from tapestry.lift.file.protos import nested
from tapestry.lift.file.structure import check_structure, load
from tapestry.plan.pipelines.segments import needed
from tapestry.plan.topology import MAX_DEVICES, parse_bytes, topology
from tapestry.tools.auto_shard import scheme_cost as candidates
from tapestry.tools.auto_shard import traversal as dynamic
from tapestry.tools.auto_shard.scheme_cost import PICO, Evaluation, NodeGraph, Problem, Scheme, bits, node_graph
from tapestry.tools.auto_shard.traversal import Traversal, initial, traverse

# The user's own stages: nodes at which they end (PopRT's manual sharding).


def scheme_at(graph: NodeGraph, cuts: Sequence[str]) -> tuple[Problem, Scheme]:
    """Every node as a subgraph, and the stages that end with the given nodes (with commas: at several together): each has what
    its nodes need and no earlier stage has; the last one has the rest.

    Raises:
        TapestryError: there is no such node, or a stage would compute nothing.
    """
    problem = Problem(graph, [(k,) for k in range(len(graph.names))])
    busy = sum(1 << k for k in {s.node for s in graph.steps})
    names = [[text] if text in graph.names else text.split(",") for text in cuts]
    last = [[k for name in mine for k in _nodes(name, text, graph)] for mine, text in zip(names, cuts, strict=True)]
    stages = [sum(1 << k for k in mine) for mine in needed(last, graph.parents.__getitem__)]
    stages.append(problem.all & ~sum(stages))
    empty = next((k for k, mask in enumerate(stages) if not mask & busy), None)
    if empty is not None:
        where = f"--cut {cuts[min(empty, len(cuts) - 1)]}"
        raise TapestryError(f"stage {empty} would compute nothing", where=where, hint="another node, or another order")
    return problem, tuple(stages)


def ends(problem: Problem, mask: int) -> list[str]:
    """The nodes at which a stage ends: those that compute something and that nothing else that does so in the stage needs.

    `scheme_at` makes the same stages of them, but for nodes that cost nothing.
    """
    graph = problem.graph
    inside = {k for u in bits(mask) for k in problem.units[u]}
    busy, needed = {s.node for s in graph.steps}, set[int]()
    found: list[str] = []
    for k in sorted(inside, reverse=True):
        if k in busy and k not in needed:
            found.append(graph.names[k])
        if k in busy or k in needed:
            needed |= inside.intersection(graph.parents[k])
    return found[::-1]


def _nodes(name: str, text: str, graph: NodeGraph) -> list[int]:
    found = [k for k, n in enumerate(graph.names) if n == name]
    if not found:
        hint = f"for example {', '.join(get_close_matches(name, graph.names, 4) or graph.names[:6])}"
        raise TapestryError(f"there is no node '{name}'", where=f"--cut {text}", hint=hint)
    return found


# PopRT's search as it is: every candidate is compiled, the ones that fit are run, and the clock decides: at the end, between
# the fastest of them and the stages of the exact search, which are run once more in turns.
#
# A candidate does not fit when a device of the compiled plan needs more than its share of memory. Where none fits, the one that
# is least over is tried with the next shares. PopRT says which share of memory it holds back for operators' temporaries
# (``available_memory_proportion``), here the proportion is the rest.

FINALISTS = 3  # candidates of the traversal that are run once more, in turns
UNKNOWN = 1 << 62  # bytes of a candidate that could not be compiled


@dataclass(frozen=True, slots=True)
class Trial:
    """A compiled candidate.

    Attributes:
        peaks: bytes of each device; none: it could not be compiled.
        seconds: of a run of one batch through all stages; ``None``: it does not fit, and was not run.
        refused: why it could not be compiled.
    """

    peaks: tuple[int, ...]
    seconds: float | None = None
    refused: str = ""


Trials = Callable[[Sequence[Sequence[int]], int], list[Trial]]
"""Compiles candidates, each the stage of every node, and runs those whose devices need no more than some bytes."""

Turns = Callable[[Sequence[Sequence[int]]], list[float]]
"""Seconds of candidates that were compiled, run in turns."""


@dataclass(frozen=True, slots=True)
class Measured(Evaluation):
    """A scheme with the peaks and the seconds of its compiled plan."""

    trial: Trial

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is better: measured seconds; of what was not run, estimated ones, behind all others."""
        run = self.trial.seconds
        return (0, round(run * PICO)) if run is not None else (1, self.latency)


@dataclass(slots=True)
class Search:
    """The candidates of one model.

    Attributes:
        capacities: (proportion, bytes), tried in order.
        fitting: candidates that fit and were run; ``optimal``: whether the fastest is looked for.
        limit: candidates that are compiled at most; ``batch`` at a time.
    """

    problem: Problem
    devices: int
    capacities: Sequence[tuple[float, int]]
    trials: Trials
    limit: int
    batch: int
    refused: int = 0
    last: str = ""
    optimal: bool = False
    fitting: list[Measured] = field(default_factory=list[Measured])

    def traversal(self, *, optimal: bool) -> dict[str, Any]:
        """The first candidate that fits, or with ``optimal`` the fastest of all that were compiled.

        Raises:
            PlanError: none fits, whatever the proportion.
        """
        start = time.perf_counter()
        self.optimal = optimal
        proportion, capacity = self.capacities[0]
        seen = traverse(
            self.problem, initial(self.problem, self.devices), capacity, partial(self.evaluate, capacity=capacity),
            optimal=optimal, limit=self.limit, batch=None if optimal else self.batch,
        )  # fmt: skip
        best, least = seen.best, seen.least
        larger = [(p, c) for p, c in self.capacities if least is not None and least.memory <= c]
        if best is None and least is not None and larger:
            proportion, capacity = larger[0]
            best = self.evaluate([least.scheme], capacity)[0]
        if best is None:
            raise self.too_large(seen)
        return {**self.row(best, proportion), "candidates": seen.schemes, "refused": self.refused,
                "search_s": round(time.perf_counter() - start, 4)}  # fmt: skip

    def exact(self, best: Evaluation, problem: Problem, proportion: float, searched: float) -> dict[str, Any]:
        """The scheme of the exact search, compiled and run as well; ``searched`` are the seconds that finding it took."""
        start = time.perf_counter()
        capacity = dict(self.capacities)[proportion]
        trial = self.trials([stages_of(problem, best.scheme)], capacity)[0]
        took = {"search_s": round(searched, 4), "compile_s": round(time.perf_counter() - start, 4)}
        return {**self.row(_measured(best, trial), proportion, problem), "refused": trial.refused, **took}

    def evaluate(self, schemes: Sequence[Scheme], capacity: int) -> list[Evaluation]:
        """The schemes compiled and, where they fit, run."""
        done = self.trials([stages_of(self.problem, s) for s in schemes], capacity)
        for t in done:
            self.refused += bool(t.refused)
            self.last = t.refused or self.last
        found = [_measured(self.problem.evaluate(s), t) for s, t in zip(schemes, done, strict=True)]
        self.fitting += [m for m in found if m.trial.seconds is not None]
        return [*found]

    def final(self, found: dict[str, dict[str, Any]], turns: Turns) -> dict[str, dict[str, Any]]:
        """What was found, with times of runs in turns: the traversal's is the fastest of its fastest candidates then."""
        mine, others = found["traversal"], {k: f for k, f in found.items() if k != "traversal" and f["fits"]}
        first = sorted(self.fitting, key=lambda m: m.rank)[:FINALISTS]
        rows = [r for r in (self.row(m, mine["proportion"]) for m in first) if r["node_stages"] != mine["node_stages"]]
        rows = [mine, *(rows if self.optimal else [])]
        seconds = turns([r["node_stages"] for r in (*rows, *others.values())])
        pairs = zip((*rows, *others.values()), seconds, strict=True)
        timed = [{**r, "latency_s": s, "throughput_per_s": 1 / s} for r, s in pairs]
        best = min(timed[: len(rows)], key=lambda r: r["latency_s"])
        ran = [r["latency_s"] for r in timed[: len(rows)]]
        again = dict(zip(others, timed[len(rows) :], strict=True))
        return {**found, "traversal": {**mine, **best, "finalists_s": ran}, **again}

    def row(self, found: Evaluation, proportion: float, problem: Problem | None = None) -> dict[str, Any]:
        """One scheme as data."""
        assert isinstance(found, Measured)
        of, run = problem or self.problem, found.trial.seconds
        return {
            "proportion": proportion, "available_memory_proportion": round(1 - proportion, 6), "fits": run is not None,
            "sharding_nodes": [ends(of, mask) for mask in found.scheme[:-1]],
            "node_stages": stages_of(of, found.scheme), "peak_bytes": list(found.trial.peaks), "latency_s": run,
            "throughput_per_s": 1 / run if run else None,
        }  # fmt: skip

    def too_large(self, seen: Traversal) -> PlanError:
        """Why nothing fits."""
        least = seen.least.memory if seen.least else UNKNOWN
        if least >= UNKNOWN:
            return PlanError("no candidate could be compiled", where="--measure", why=self.last)
        share, capacity = max(self.capacities)
        return PlanError(
            f"none of {seen.schemes} compiled candidates fits: {least - capacity:,} bytes too many", where="--measure",
            why=f"the fullest device of the smallest needs {least:,}; {share:g} of its memory are {capacity:,}",
            hint="more devices, a larger --memory, or more --max-candidates",
        )  # fmt: skip


def stages_of(problem: Problem, scheme: Scheme) -> list[int]:
    """The stage of every node."""
    out = [0] * len(problem.graph.names)
    for stage, mask in enumerate(scheme):
        for k in (k for u in bits(mask) for k in problem.units[u]):
            out[k] = stage
    return out


def _measured(e: Evaluation, trial: Trial) -> Measured:
    peaks = trial.peaks or (UNKNOWN,) * len(e.stages)
    stages = tuple(replace(s, weights=0, peak=p) for s, p in zip(e.stages, peaks, strict=True))
    return Measured(e.scheme, stages, trial)


# Stages written onto a model's nodes as ONNX's multi-device protos say it (IR version 11 and later): ``pipeline_stage``.

CONFIGURATION = "tapestry.auto_shard"


def annotate_stages(model: ModelProto, stages: Sequence[int], devices: int) -> None:
    """Put each node's stage on it (and on the nodes of its subgraphs); other configurations of the model stay.

    By position, not by name: names of nodes need not be unique.
    """
    first, last = IR_VERSIONS
    model.ir_version = min(max(model.ir_version, first), last)
    others = [c for c in model.configuration if c.name != CONFIGURATION]
    del model.configuration[:]
    model.configuration.extend(others)
    model.configuration.add(name=CONFIGURATION, num_devices=devices)
    marked = ((n, stage) for node, stage in zip(model.graph.node, stages, strict=True) for n in nested([node]))
    for node, stage in marked:
        of_others = [c for c in node.device_configurations if c.configuration_id != CONFIGURATION]
        del node.device_configurations[:]
        node.device_configurations.extend(of_others)
        node.device_configurations.add(configuration_id=CONFIGURATION, pipeline_stage=stage)


def output_path(model: Path, output: Path | None) -> Path:
    """Where the annotated model goes: ``MODEL.auto_sharded.onnx`` beside the model unless told."""
    return output or model.with_name(f"{model.name.removesuffix('.onnx')}.auto_sharded.onnx")


def check_output(model: ModelProto, source: Path, target: Path) -> None:
    """Refuse an output that could not be written, before any work is done.

    Raises:
        TapestryError: it is the input, a folder, or in another folder than the external data.
    """
    if target.is_dir() or target.resolve() == source.resolve():
        why = "it is a folder" if target.is_dir() else "it is the input model"
        raise TapestryError("cannot write there", where=str(target), why=why, hint="another --output-model")
    if not target.absolute().parent.is_dir():
        raise TapestryError("cannot write there", where=str(target), why="its folder does not exist")
    outside = next(external(model), None)
    if outside is not None and target.resolve().parent != source.resolve().parent:
        raise TapestryError(
            "the external data would be out of reach", where=f"initializer '{outside.name}'",
            why="ONNX locations may not leave the model's folder", hint=f"an --output-model in {source.resolve().parent}",
        )  # fmt: skip


# PopRT withholds a share of memory for operators' temporaries, by default 0.6, and falls back to 0.3 and 0.1. Here the
# proportion is what weights and activations may take: the rest of it.
PROPORTIONS = (0.4, 0.7, 0.9)
FINE = 160  # subgraphs that the dynamic program cuts between
COARSE = 8  # subgraphs per device that the heuristic moves about
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``tapestry auto-shard`` takes.

    Attributes:
        cuts: the user's own stages.
        most: candidates that are compiled.
        apart: those that are measured run with a process for each device.
    """

    model: Path
    devices: int
    output: Path | None = None
    optimal: bool = False
    processes: int = 2
    proportions: Sequence[float] = PROPORTIONS
    shapes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    topology: str = "cpu"
    memory: str | None = None
    cuts: Sequence[str] = ()
    most: int = 24
    apart: bool = False

    @property
    def ranks(self) -> int:
        """Processes that a candidate runs in."""
        return self.devices if self.apart else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A scheme and how it was found; ``best`` is over the subgraphs of ``problem``."""

    best: Evaluation | None
    proportion: float | None
    schemes: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Both searches over one choice of candidates (``merged``: those that the heuristic moves about); ``least`` is the scheme
    that is least over its memory."""

    candidates: str
    counts: Mapping[str, int]
    problem: Problem
    merged: Problem
    cuts: dynamic.Family
    heuristic: Outcome
    dynamic: Outcome
    least: Evaluation


def check_options(options: Options) -> None:
    """Refuse options that make no sense.

    Raises:
        TapestryError: which, and what would do.
    """
    if not 1 <= options.devices <= MAX_DEVICES:
        raise TapestryError(f"{options.devices} devices", where="--num-devices", hint=f"1 to {MAX_DEVICES:,}")
    if options.cuts and options.devices != len(options.cuts) + 1:
        what = f"{some(len(options.cuts), 'cut')} would make {len(options.cuts) + 1} stages, not {options.devices}"
        raise TapestryError(what, where="--cut", hint="leave --num-devices out; A,B are several nodes of one stage")
    if not 1 <= options.processes <= 256:
        raise TapestryError(f"{options.processes} processes", where="--num-processes", hint="1 to 256")
    if options.apart and options.devices > 64:
        raise TapestryError(f"{options.devices} processes at a time", where="--apart", hint="at most 64 devices")
    bad = [p for p in options.proportions if not 0 < p <= 1]
    if bad or not options.proportions:
        raise TapestryError(
            f"{bad[0] if bad else 'nothing'} is not a share of a device's memory", where="--memory-proportion",
            hint="numbers above 0 and at most 1, tried in order",
        )  # fmt: skip


def auto_shard(
    options: Options, report: Report = lambda stage: None, trials: Trials | None = None,
    turns: Turns | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Find stages, write the annotated model, and say what was found, as one document.

    Args:
        trials: compiles and runs candidates; what is measured decides then, by ``turns`` once more for the fastest.

    Raises:
        TapestryError: bad options, a model at fault, more devices than subgraphs, or memory that cannot suffice.
    """
    check_options(options)
    clock = _Clock(report)
    path = options.model.absolute()
    mesh, memory = (MeshAxis("d0", options.devices),), parse_bytes(options.memory) if options.memory else None
    topo = topology(mesh, options.topology, memory, reserve="0")  # proportions leave some
    model = load(path)
    target = output_path(path, options.output)
    check_output(model, path, target)
    with clock("lift"):
        lifted = lift(path, options.shapes, weights=False)
        check_structure(model, path.parent, weights=False)  # sorts nodes as lifting does
    with clock("graph"):
        graph = node_graph(model, lifted.graph, topo)
    if options.cuts:
        document = _own(graph, options, topo.device.memory, clock, trials)
    else:
        attempt = _search(graph, options, topo.device.memory, clock, insist=trials is None)
        document = _document(attempt, options, graph, topo.device.memory)
        if trials is not None:
            with clock("measure"):
                document |= _tried(attempt, options, topo.device.memory, (trials, turns), clock)
    with clock("write"):
        annotate_stages(model, document["node_stages"], options.devices)
        annotation_rules.write(model, path, target)
    seconds = {**clock.seconds, "total": round(time.perf_counter() - clock.start, 4)}
    return {"model": str(path), "output": str(target), **document, "seconds": seconds}


class _Clock:
    """Seconds per stage of the work, shown as they pass."""

    def __init__(self, report: Report) -> None:
        self.seconds: dict[str, float] = {}
        self.report, self.start = report, time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Generator[None]:
        start = time.perf_counter()
        self.report(stage)
        yield
        self.seconds[stage] = round(time.perf_counter() - start, 4)


def _own(graph: NodeGraph, options: Options, memory: int, clock: _Clock, trials: Trials | None) -> dict[str, Any]:
    """The user's own stages as a document, beside the best with as many; an error where one would be empty or does not fit."""
    problem, scheme = scheme_at(graph, options.cuts)
    found = problem.evaluate(scheme)
    proportion = next((p for p in options.proportions if found.memory <= int(p * memory)), None)
    if proportion is None:
        at = max(range(options.devices), key=lambda k: found.stages[k].memory)
        capacity = int(max(options.proportions) * memory)
        why = f"stage {at} needs {found.stages[at].memory:,} of {capacity:,}"
        what = f"the stages do not fit: {found.memory - capacity:,} bytes too many"
        raise PlanError(what, where="--cut", why=why, hint="other nodes, or a larger --memory")
    attempt = _search(graph, options, memory, clock, insist=False)
    own = Outcome(best=found, proportion=proportion, schemes=1, facts={})
    document = _document(attempt, options, graph, memory) | {
        "manual": _outcome(own, problem, memory), "chosen": "manual", "proportion": proportion,
        "sharding_nodes": [ends(problem, mask) for mask in scheme[:-1]],
        "node_stages": stages_of(problem, scheme),
    }  # fmt: skip
    if trials is not None:
        with clock("measure"):
            search = Search(problem, options.devices, [(proportion, int(proportion * memory))], trials, 1, 1)
            run = {"manual": search.exact(found, problem, proportion, 0.0), "chosen": "manual"}
            document["measured"] = {**run, "processes": options.ranks}
    return document


def _tried(attempt: Attempt, options: Options, memory: int, ways: tuple[Trials, Turns | None], clock: _Clock) -> dict[str, Any]:
    """What compiling and running says: PopRT's search with every candidate compiled, and the exact search's own stages."""
    trials, turns = ways
    capacities = [(p, int(p * memory)) for p in options.proportions]
    most = options.most or sys.maxsize
    search = Search(attempt.merged, options.devices, capacities, trials, most, options.processes)
    found = {"traversal": search.traversal(optimal=options.optimal)}
    program = attempt.dynamic
    if program.best is not None and program.proportion is not None:
        found["exact"] = search.exact(program.best, attempt.problem, program.proportion, clock.seconds["dynamic"])
    found = found if turns is None else search.final(found, turns)
    fitting = {k: f for k, f in found.items() if f["fits"]}
    chosen = min(fitting, key=lambda k: (fitting[k]["proportion"], fitting[k]["latency_s"]))
    taken = ("sharding_nodes", "node_stages", "proportion")
    measures: dict[str, Any] = {**found, "optimal": options.optimal, "chosen": chosen, "processes": options.ranks}
    return {"measured": measures, **{k: found[chosen][k] for k in taken}}


def _search(graph: NodeGraph, options: Options, memory: int, clock: _Clock, *, insist: bool) -> Attempt:
    """Joins as candidates, as PopRT has it; every node where those make fewer subgraphs than there are devices."""
    most = 0
    for name, tops in (("joins", candidates.joins(graph)), ("every node", candidates.everywhere(graph))):
        units = candidates.candidate_subgraphs(graph, tops)
        most = max(most, len(units))
        if len(units) >= options.devices:
            attempt = plan(graph, units, options, memory, clock, name)
            if attempt.dynamic.best is None and insist:
                raise _too_large(attempt, graph, options, memory)
            return attempt
    raise TapestryError(
        f"{options.devices} devices are more than the model has subgraphs", where="--num-devices",
        why=f"{len(graph.names)} nodes make {some(most, 'subgraph')}, and every stage needs one", hint=f"at most {most}",
    )  # fmt: skip


def plan(graph: NodeGraph, units: list[candidates.Unit], options: Options, memory: int, clock: _Clock, name: str) -> Attempt:
    """Run the heuristic on merged subgraphs, then the dynamic program on finer ones with what the heuristic saw."""
    n = options.devices
    coarse = candidates.merge(graph, units, COARSE * n, n)
    fine = candidates.refine(graph, coarse, max(FINE, 3 * n))
    problem, merged = Problem(graph, fine), Problem(graph, coarse)
    capacities = [(p, int(p * memory)) for p in options.proportions]
    with clock("heuristic"):
        heuristic, seen = _heuristic(problem, merged, options, capacities)
    with clock("dynamic"):
        program, cuts = _dynamic(problem, merged, n, capacities, seen)
    counts = {"all": len(units), "heuristic": len(coarse), "dynamic": len(fine)}
    return Attempt(
        candidates=name, counts=counts, problem=problem, merged=merged, cuts=cuts, heuristic=heuristic, dynamic=program,
        least=min(map(problem.evaluate, seen), key=lambda e: e.memory),
    )  # fmt: skip


def _heuristic(
    problem: Problem, merged: Problem, options: Options, capacities: list[tuple[float, int]]
) -> tuple[Outcome, list[Scheme]]:
    """PopRT's search: traversal at the first proportion, then the scheme that is least over at the others."""
    start = initial(merged, options.devices)
    seen = traverse(merged, start, capacities[0][1], lambda some: [*map(merged.evaluate, some)], optimal=options.optimal)
    assert seen.least is not None
    best, proportion = seen.best, capacities[0][0]
    if best is None:
        proportion = next((p for p, c in capacities if seen.least.memory <= c), None)
        best = None if proportion is None else seen.least
    schemes = dict.fromkeys(e.scheme for e in (best, seen.least) if e is not None)
    known = [merged.translate(s, problem) for s in (*schemes, start)]
    found = problem.evaluate(known[0]) if best is not None else None
    return Outcome(best=found, proportion=proportion, schemes=seen.schemes, facts={"moves": seen.moves}), known


def _dynamic(
    problem: Problem, merged: Problem, devices: int, capacities: list[tuple[float, int]], known: list[Scheme]
) -> tuple[Outcome, dynamic.Family]:
    """The dynamic program at the first proportion at which anything fits."""
    cuts = dynamic.family(problem, known, merged)
    tries = ((p, dynamic.solve(problem, devices, capacity, cuts, known)) for p, capacity in capacities)
    proportion, best = next(((p, best) for p, best in tries if best is not None), (None, None))
    return Outcome(best=best, proportion=proportion, schemes=len(cuts.cuts), facts={"complete": cuts.complete}), cuts


def _too_large(attempt: Attempt, graph: NodeGraph, options: Options, memory: int) -> PlanError:
    """By how much it does not fit, in which stage, at which node, because of which tensors."""
    problem, n = attempt.problem, options.devices
    share = max(options.proportions)
    capacity = int(share * memory)
    best = dynamic.least_memory(problem, n, attempt.cuts, [attempt.least.scheme]) or attempt.least
    at = max(range(n), key=lambda k: best.stages[k].memory)
    cost, node = best.stages[at], best.stages[at].node
    weights = {w for u in bits(best.scheme[at]) for w in problem.weights[u]}
    largest = sorted(weights, key=lambda w: -graph.weight_bytes[w])[:3]
    why = (
        f"of all splits found the best still needs {cost.memory:,} bytes in stage {at}: {cost.weights:,} of weights and "
        f"{cost.peak:,} of activations at node '{graph.names[node]}'; {share:g} of {memory:,} bytes are {capacity:,}"
    )
    if weights:
        why += f"; its largest weights: {', '.join(f'{graph.weight_names[w]} {graph.weight_bytes[w]:,}' for w in largest)}"
    single = Problem(graph, [(k,) for k in range(len(graph.names))])
    alone = max(range(len(graph.names)), key=lambda k: single.cost(1 << k).memory)
    hint = f"--num-devices above {n}, a larger --memory"
    if (need := single.cost(1 << alone).memory) > capacity:
        why += f"; node '{graph.names[alone]}' alone needs {need:,}"
        hint = "a larger --memory: no number of devices helps a single node"
    if share < 1:
        hint += ", or --memory-proportion 1"
    return PlanError(
        f"the model does not fit in {some(n, 'stage')}: {cost.memory - capacity:,} bytes too many",
        where=f"node '{graph.names[node]}'", why=why, hint=hint,
    )  # fmt: skip


def _document(attempt: Attempt, options: Options, graph: NodeGraph, memory: int) -> dict[str, Any]:
    heuristic, program = attempt.heuristic, attempt.dynamic
    same = (
        heuristic.best is not None and program.best is not None and heuristic.proportion == program.proportion
        and heuristic.best.rank == program.best.rank
    )  # fmt: skip
    chosen = (heuristic.best if same else program.best) or attempt.least
    problem = attempt.problem
    return {
        "nodes": len(graph.names), "devices": options.devices, "topology": options.topology, "memory_bytes": memory,
        "proportions": list(options.proportions), "candidates": attempt.candidates,
        "subgraphs": dict(attempt.counts),
        "heuristic": _outcome(heuristic, problem, memory), "dynamic": _outcome(program, problem, memory),
        "chosen": "heuristic" if same else "dynamic", "proportion": program.proportion,
        "sharding_nodes": [ends(problem, mask) for mask in chosen.scheme[:-1]],
        "node_stages": stages_of(problem, chosen.scheme),
    }  # fmt: skip


def _outcome(outcome: Outcome, problem: Problem, memory: int) -> dict[str, Any]:
    e = outcome.best
    base = {"fits": e is not None, "proportion": outcome.proportion, "schemes": outcome.schemes, **outcome.facts}
    if e is None:
        return {**base, "stages": []}
    flops = [s.flops for s in e.stages]
    mean = sum(s.time for s in e.stages) / len(e.stages)
    return {
        **base, "interval_s": e.interval / PICO, "latency_s": e.latency / PICO,
        "throughput_per_s": PICO / e.interval if e.interval else None, "peak_bytes": e.memory,
        "balance": mean / e.interval if e.interval else 1.0,  # 1: all stages take equally long
        "flops_balance": sum(flops) / len(flops) / max(flops) if max(flops) else 1.0,
        "stages": [
            {
                "stage": k, "nodes": sum(len(problem.units[u]) for u in bits(e.scheme[k])),
                "ends": ends(problem, e.scheme[k]),
                "weight_bytes": s.weights, "activation_bytes": s.peak, "memory_bytes": s.memory, "share": s.memory / memory,
                "flops": s.flops, "compute_s": s.compute / PICO, "receive_s": s.receive / PICO,
            }
            for k, s in enumerate(e.stages)
        ],
    }  # fmt: skip
