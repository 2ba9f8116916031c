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
from tapestry.sharding.auto_shard import candidates, manual, measured_search, stage_annotations
from tapestry.sharding.auto_shard import dynamic_program as dynamic
from tapestry.sharding.auto_shard.node_graph import PICO, NodeGraph, node_graph
from tapestry.sharding.auto_shard.scheme_cost import Evaluation, Problem, Scheme, Workers, bits
from tapestry.sharding.auto_shard.traversal import initial, traverse

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


def check(options: Options) -> None:
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
    options: Options, report: Report = lambda stage: None, trials: measured_search.Trials | None = None,
    turns: measured_search.Turns | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Find stages, write the annotated model, and say what was found, as one document.

    Args:
        trials: compiles and runs candidates; what is measured decides then, by ``turns`` once more for the fastest.

    Raises:
        TapestryError: bad options, a model at fault, more devices than subgraphs, or memory that cannot suffice.
    """
    check(options)
    clock = _Clock(report)
    path = options.model.absolute()
    topo = topology(
        (MeshAxis("d0", options.devices),),
        options.topology,
        parse_bytes(options.memory) if options.memory else None,
        reserve="0",  # proportions leave some
    )
    model = load(path)
    target = stage_annotations.output_path(path, options.output)
    stage_annotations.check_output(model, path, target)
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
        stage_annotations.annotate_stages(model, document["node_stages"], options.devices)
        onnx_annotations.write(model, path, target)
    return {"model": str(path), "output": str(target), **document, "seconds": clock.total()}


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

    def total(self) -> dict[str, float]:
        """All of them, and their sum."""
        return {**self.seconds, "total": round(time.perf_counter() - self.start, 4)}


def _own(
    graph: NodeGraph, options: Options, memory: int, clock: _Clock, trials: measured_search.Trials | None
) -> dict[str, Any]:  # fmt: skip
    """The user's own stages as a document, beside the best with as many.

    Raises:
        TapestryError: a node is not there, or a stage would be empty or does not fit.
    """
    problem, scheme = manual.scheme_at(graph, options.cuts)
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
        "sharding_nodes": [manual.ends(problem, mask) for mask in scheme[:-1]],
        "node_stages": measured_search.stages_of(problem, scheme),
    }  # fmt: skip
    if trials is not None:
        with clock("measure"):
            search = measured_search.Search(problem, options.devices, [(proportion, int(proportion * memory))], trials, 1, 1)
            run = {"manual": search.exact(found, problem, proportion, 0.0), "chosen": "manual"}
            document["measured"] = {**run, "processes": options.ranks}
    return document


def _tried(
    attempt: Attempt, options: Options, memory: int, ways: tuple[measured_search.Trials, measured_search.Turns | None],
    clock: _Clock,
) -> dict[str, Any]:  # fmt: skip
    """What compiling and running says: PopRT's search with every candidate compiled, and the exact search's own stages."""
    trials, turns = ways
    capacities = [(p, int(p * memory)) for p in options.proportions]
    most = options.most or sys.maxsize
    search = measured_search.Search(attempt.merged, options.devices, capacities, trials, most, options.processes)
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
        units = candidates.subgraphs(graph, tops)
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


def plan(
    graph: NodeGraph, units: list[candidates.Unit], options: Options, memory: int, clock: _Clock | None = None, name: str = ""
) -> Attempt:
    """Run the heuristic on merged subgraphs, then the dynamic program on finer ones with what the heuristic saw."""
    clock = clock or _Clock(lambda stage: None)
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
    with Workers(merged, options.processes) as workers:
        seen = traverse(merged, start, capacities[0][1], workers, optimal=options.optimal)
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
    facts = {"complete": cuts.complete}
    for p, capacity in capacities:
        best = dynamic.solve(problem, devices, capacity, cuts, known)
        if best is not None:
            return Outcome(best=best, proportion=p, schemes=len(cuts.cuts), facts=facts), cuts
    return Outcome(best=None, proportion=None, schemes=len(cuts.cuts), facts=facts), cuts


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
    alone, need = _largest_node(graph)
    hint = f"--num-devices above {n}, a larger --memory"
    if need > capacity:
        why += f"; node '{graph.names[alone]}' alone needs {need:,}"
        hint = "a larger --memory: no number of devices helps a single node"
    if share < 1:
        hint += ", or --memory-proportion 1"
    return PlanError(
        f"the model does not fit in {some(n, 'stage')}: {cost.memory - capacity:,} bytes too many",
        where=f"node '{graph.names[node]}'", why=why, hint=hint,
    )  # fmt: skip


def _largest_node(graph: NodeGraph) -> tuple[int, int]:
    """The node whose own weights and data need the most bytes, and how many: a bound for any number of stages."""
    need = [0] * len(graph.names)
    for s in graph.steps:
        need[s.node] = max(need[s.node], sum(graph.sizes[t] for t in {*s.reads, *s.writes}))
    total = [sum(graph.weight_bytes[w] for w in row) + a for row, a in zip(graph.weights, need)]
    at = max(range(len(total)), key=lambda k: total[k])
    return at, total[at]


# the document


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
        "sharding_nodes": [manual.ends(problem, mask) for mask in chosen.scheme[:-1]],
        "node_stages": measured_search.stages_of(problem, chosen.scheme),
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
                "ends": manual.ends(problem, e.scheme[k]),
                "weight_bytes": s.weights, "activation_bytes": s.peak, "memory_bytes": s.memory, "share": s.memory / memory,
                "flops": s.flops, "compute_s": s.compute / PICO, "receive_s": s.receive / PICO,
            }
            for k, s in enumerate(e.stages)
        ],
    }  # fmt: skip
