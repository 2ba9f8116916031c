"""``tapestry auto-shard``: a model over N devices as pipeline stages, PopRT's way and by dynamic programming."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapestry.errors import PlanError, TapestryError, some
from tapestry.interop import onnx_annotations
from tapestry.ir.plan import MeshAxis
from tapestry.lift import lift
from tapestry.lift.file.structure import check_structure, load
from tapestry.plan.topology import MAX_DEVICES, parse_bytes, topology
from tapestry.tools.auto_shard import dynamic_program
from tapestry.tools.auto_shard import scheme_cost as candidates
from tapestry.tools.auto_shard.manual import ends, scheme_at
from tapestry.tools.auto_shard.measured_search import Search, Trials, Turns, stages_of
from tapestry.tools.auto_shard.node_graph import PICO, NodeGraph, node_graph
from tapestry.tools.auto_shard.scheme_cost import Evaluation, Problem, Scheme, bits
from tapestry.tools.auto_shard.stage_annotations import annotate_stages, check_output, output_path
from tapestry.tools.auto_shard.traversal import initial, traverse

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
    cuts: dynamic_program.Family
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
            f"{bad[0] if bad else 'nothing'} is not a share of a device's memory",
            where="--memory-proportion",
            hint="numbers above 0 and at most 1, tried in order",
        )


def auto_shard(
    options: Options,
    report: Report = lambda stage: None,
    trials: Trials | None = None,
    turns: Turns | None = None,
) -> dict[str, Any]:
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
        onnx_annotations.write(model, path, target)
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
        "manual": _outcome(own, problem, memory),
        "chosen": "manual",
        "proportion": proportion,
        "sharding_nodes": [ends(problem, mask) for mask in scheme[:-1]],
        "node_stages": stages_of(problem, scheme),
    }
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
        f"{options.devices} devices are more than the model has subgraphs",
        where="--num-devices",
        why=f"{len(graph.names)} nodes make {some(most, 'subgraph')}, and every stage needs one",
        hint=f"at most {most}",
    )


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
        candidates=name,
        counts=counts,
        problem=problem,
        merged=merged,
        cuts=cuts,
        heuristic=heuristic,
        dynamic=program,
        least=min(map(problem.evaluate, seen), key=lambda e: e.memory),
    )


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
) -> tuple[Outcome, dynamic_program.Family]:
    """The dynamic program at the first proportion at which anything fits."""
    cuts = dynamic_program.family(problem, known, merged)
    tries = ((p, dynamic_program.solve(problem, devices, capacity, cuts, known)) for p, capacity in capacities)
    proportion, best = next(((p, best) for p, best in tries if best is not None), (None, None))
    return Outcome(best=best, proportion=proportion, schemes=len(cuts.cuts), facts={"complete": cuts.complete}), cuts


def _too_large(attempt: Attempt, graph: NodeGraph, options: Options, memory: int) -> PlanError:
    """By how much it does not fit, in which stage, at which node, because of which tensors."""
    problem, n = attempt.problem, options.devices
    share = max(options.proportions)
    capacity = int(share * memory)
    best = dynamic_program.least_memory(problem, n, attempt.cuts, [attempt.least.scheme]) or attempt.least
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
        where=f"node '{graph.names[node]}'",
        why=why,
        hint=hint,
    )


def _document(attempt: Attempt, options: Options, graph: NodeGraph, memory: int) -> dict[str, Any]:
    heuristic, program = attempt.heuristic, attempt.dynamic
    same = (
        heuristic.best is not None
        and program.best is not None
        and heuristic.proportion == program.proportion
        and heuristic.best.rank == program.best.rank
    )
    chosen = (heuristic.best if same else program.best) or attempt.least
    problem = attempt.problem
    return {
        "nodes": len(graph.names),
        "devices": options.devices,
        "topology": options.topology,
        "memory_bytes": memory,
        "proportions": list(options.proportions),
        "candidates": attempt.candidates,
        "subgraphs": dict(attempt.counts),
        "heuristic": _outcome(heuristic, problem, memory),
        "dynamic": _outcome(program, problem, memory),
        "chosen": "heuristic" if same else "dynamic",
        "proportion": program.proportion,
        "sharding_nodes": [ends(problem, mask) for mask in chosen.scheme[:-1]],
        "node_stages": stages_of(problem, chosen.scheme),
    }


def _outcome(outcome: Outcome, problem: Problem, memory: int) -> dict[str, Any]:
    e = outcome.best
    base = {"fits": e is not None, "proportion": outcome.proportion, "schemes": outcome.schemes, **outcome.facts}
    if e is None:
        return {**base, "stages": []}
    flops = [s.flops for s in e.stages]
    mean = sum(s.time for s in e.stages) / len(e.stages)
    return {
        **base,
        "interval_s": e.interval / PICO,
        "latency_s": e.latency / PICO,
        "throughput_per_s": PICO / e.interval if e.interval else None,
        "peak_bytes": e.memory,
        "balance": mean / e.interval if e.interval else 1.0,  # 1: all stages take equally long
        "flops_balance": sum(flops) / len(flops) / max(flops) if max(flops) else 1.0,
        "stages": [
            {
                "stage": k,
                "nodes": sum(len(problem.units[u]) for u in bits(e.scheme[k])),
                "ends": ends(problem, e.scheme[k]),
                "weight_bytes": s.weights,
                "activation_bytes": s.peak,
                "memory_bytes": s.memory,
                "share": s.memory / memory,
                "flops": s.flops,
                "compute_s": s.compute / PICO,
                "receive_s": s.receive / PICO,
            }
            for k, s in enumerate(e.stages)
        ],
    }
