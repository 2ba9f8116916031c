"""Whether a plan gets pipeline stages: what the user asks for, when it can pay, and which of two plans is better."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tapestry.errors import PlanError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import device_count
from tapestry.plan.cost.floor import least_seconds
from tapestry.plan.pipelines.pipeline_search import MICRO_BATCHES, Staged, search_stages
from tapestry.plan.pipelines.segments import NOTHING
from tapestry.plan.pipelines.sequence import sequence
from tapestry.plan.pipelines.stage_constraints import Asked
from tapestry.plan.search.priced_plan import PricedPlan, summed
from tapestry.plan.simulate import TRANSFER, simulate
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.rule import Move

AUTO_SHARE = 0.5  # of what the plan without stages took: work for stages that nobody asked for, and that may pay
LEAST, MOST = 2.0 * SECOND, 5.0 * SECOND  # and the limits of that; where it would be more, they are not looked for
FEW = 32  # devices, for which chains of stages are soon found
SLOW = 2.0  # a mesh axis is slow if a byte takes so many times longer than on the fastest
WAITING, MOSTLY = 0.05, 0.5  # of the spatial plan's time on transfers: stages may pay, and are worth a search


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of stages.

    Attributes:
        stages: how many (``None``: as is best; 1: no stages).
        micro: micro-batches (``None``: as is best).
        asked: what stages keep to.
    """

    stages: int | None = None
    micro: int | None = None
    asked: Asked = NOTHING

    @property
    def explicit(self) -> bool:
        """Whether the user insists on stages."""
        return (self.stages or 1) > 1 or (self.micro or 1) > 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan taken, the rewrites that it needs, and what the JSON document says of plans with stages and without."""

    found: PricedPlan
    staged: bool
    moves: tuple[Move, ...]
    report: dict[str, Any]


def parse_request(stages: str, micro: str, topo: Topology) -> Request:
    """``auto`` or a number each.

    Raises:
        TapestryError: not a number, or more stages than devices.
    """
    wanted = Request(_number(stages, "--stages"), _number(micro, "--micro-batches"))
    devices = device_count(topo.mesh)
    if (wanted.stages or 1) > devices:
        raise TapestryError(f"{wanted.stages} stages on {devices} devices", where="--stages", hint="at least one device each")
    if wanted.stages == 1 and (wanted.micro or 1) > 1:
        raise TapestryError("micro-batches without stages", where="--micro-batches", hint="--stages auto, or a number above 1")
    if devices == 1 and wanted.explicit:
        raise TapestryError("pipeline stages need more than one device", where="--stages", hint="--devices or --mesh")
    return wanted


def _number(text: str, where: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise TapestryError(f"'{text}' is neither 'auto' nor a number from 1 to 4096", where=where)
    return int(text)


def choose(
    graph: Graph,
    topo: Topology,
    spatial: PricedPlan | PlanError,
    request: Request,
    budget: Budget,
    *,
    tight: bool = False,
    spent: float = 0.0,
) -> Choice:
    """The better of the spatial plan and the best one with stages; the latter if it is asked for.

    Without being asked, a plan with stages must take less time on the simulated clock.

    Args:
        spatial: the plan without stages, or why there is none.
        tight: whether the plan without stages fits only by splits in time or streamed weights.
        spent: units of work that it took.

    Raises:
        PlanError: nothing fits, or there is no plan as asked for.
    """
    unfit = isinstance(spatial, PlanError)
    staged: Staged | None = None
    share = 0.0 if request.stages == 1 else _share(spatial, topo, tight)
    if request.explicit or share == 1 or 0 < share * spent <= MOST:
        upper = float("inf") if unfit or request.explicit else summed(spatial)
        part = budget if request.explicit or unfit or tight else budget.part(max(LEAST, share * spent))
        insist = request.explicit or (share == 1 and not tight)
        micro = MICRO_BATCHES if request.micro is None else (request.micro,)
        staged = search_stages(
            graph,
            topo,
            stages=request.stages,
            micro=micro,
            upper=upper,
            budget=part,
            insist=insist,
            asked=request.asked,
            streams=request.explicit,
        )
        if staged is None and request.explicit:
            raise _impossible(graph, topo, request)
    if staged is None:
        if unfit:
            raise spatial
        return Choice(spatial, False, (), {"stages": [], "micro_batches": 1})
    bound = least_seconds(graph, topo, everywhere=False)
    total = simulate(staged.found.plan, staged.found.program, topo).total
    taken = unfit or request.explicit or total < spatial.objective
    other = request.asked.bound or request.asked.cuts  # then both plans are not of one problem
    report = {
        "objective_s": total, "lower_bound_s": min(bound, total), "exact": staged.exact, "simulated_s": total,
        "stages": len(staged.seconds), "micro_batches": staged.sequence.micro,
        "spatial_objective_s": None if unfit or other else spatial.objective, "chosen": taken,
    }  # fmt: skip
    if not unfit and not taken:
        return Choice(spatial, False, (), {"stages": [], "micro_batches": 1, "pipeline": report})
    if not request.explicit and isinstance(spatial, PricedPlan):  # a bound of all plans, with stages or without
        bound = min(bound, spatial.bound)
    found = replace(staged.found, objective=total, bound=min(bound, total))
    data = {"stages": list(staged.seconds), "micro_batches": staged.sequence.micro, "pipeline": report}
    return Choice(found, True, staged.sequence.moves, data)


def _share(spatial: PricedPlan | PlanError, topo: Topology, tight: bool) -> float:
    """How much work stages are worth that nobody asked for, as a share of that for the plan without: as much where nothing fits
    without, or where few devices wait for links most of the time; some where it waits, and links or devices differ.

    Without communication a spatial plan uses all devices all the time, and stages only add bubbles.
    """
    links = [link.beta for a, link in zip(topo.mesh, topo.links, strict=True) if a.size > 1]
    if not links:
        return 0.0
    if tight or isinstance(spatial, PlanError):
        return 1.0
    timed = simulate(spatial.plan, spatial.program, topo)
    waits = timed.busy(TRANSFER).max()
    if waits > MOSTLY * timed.total and device_count(topo.mesh) <= FEW:
        return 1.0
    differ = topo.kinds or max(links) >= SLOW * min(links)
    return AUTO_SHARE if differ and waits > WAITING * timed.total else 0.0


def _impossible(graph: Graph, topo: Topology, request: Request) -> PlanError:
    n = request.stages or 2
    if len(graph.ops) < n:
        return PlanError(f"{len(graph.ops)} operations cannot make {n} stages", where="--stages", hint="fewer stages")
    if request.micro and sequence(graph, request.micro) is None:
        what = f"the batch cannot be cut into {request.micro} equal micro-batches"
        return PlanError(what, where="--micro-batches", hint="a number that divides the batch, or auto")
    each = "the smallest device has" if topo.kinds else "each device has"
    where = "the given stages" if request.asked.cuts else "--stages"
    why, hint = f"{each} {min(topo.memories()):,} bytes", "more memory (--memory), or other stages"
    if request.asked.bound:
        why += "; or no stage has, as a whole, the mesh axes that the pins, layouts or annotations cut along"
        hint += "; or a --mesh with an axis for stages and one to cut along, as 2x2"
    return PlanError(f"no plan of {request.stages or 'several'} stages fits", where=where, why=why, hint=hint)
