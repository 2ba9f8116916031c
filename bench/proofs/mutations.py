"""Certificates that bite: single faults put into real plans, programs and build directories, each of which must be refused.

    .venv/bin/python -m bench mutations [--models bert_base …] [--each 3] [--valid 1000]

Plans of five exported models (of ../shared/models, or --folder), each plan for four devices: any strategies on one and two mesh
axes, streamed weights, pipeline stages. Every kind of fault is tried in `--each` places of each plan that has
some. A fault is refused if the verifier names a law and a witness (a step, a buffer, a device, a cell); faults of files are
refused by hashes, by the laws, by the kernels that the plan generates, or by a weight's hash. Then `--valid` plans without a
fault must all pass. Writes bench/results/mutations.json; exits 1 if a fault was not refused or a valid plan was.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.correctness.models import materialize
from bench.support import record
from bench.support.random_plan import random_plan, random_staged_plan
from tapestry.errors import LawError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Mesh, MeshAxis, Plan, Stage
from tapestry.ir.program import Program, peak_bytes
from tapestry.lift import lift
from tapestry.plan.pipelines.staged_plan import lower_plan
from tapestry.plan.topology import parse_mesh
from tapestry.rewrites.core.driver import simplify
from tapestry.verify import certificate
from tests.support.faults.file_faults import FILE_FAULTS, tried_on_files
from tests.support.faults.plan_faults import FAULTS
from tests.support.faults.plan_faults_more import MORE

MODELS: dict[str, dict[str, int]] = {
    "bert_base": {"s18": 2, "s41": 37, "s43": 37}, "resnet50": {"s31": 2}, "llama_tiny": {"s72": 2, "s53": 16, "s43": 16},
    "t5_small": {"s11": 2, "s53": 16, "s28": 16, "s43": 16}, "unet": {"s77": 2},
    "gpt2": {"s72": 2, "s70": 16, "s53": 16, "s43": 32}, "vit_base": {"s99": 2},
}  # fmt: skip
FIVE = ("bert_base", "resnet50", "llama_tiny", "t5_small", "unet")
ON_ALL_DEVICES = {  # these faults look at the first device's boxes, which a plan with stages need not have
    name for name in FAULTS if name not in {
        "transfer_dropped", "load_dropped", "launch_dropped", "message_dropped", "message_sent_twice", "stated_peak_wrong",
        "memory_exceeded", "transfer_before_its_producer", "reduce_dropped", "reduce_twice_into_one_buffer", "output_missing",
        "output_freed", "freed_twice", "operation_does_not_exist",
    }
}  # fmt: skip
ALSO = {"written_once", "read_after_write"}  # where the other kinds of plans here notice what small plans see later
MESHES = ("4", "2x2", "3", "2", "2x3", "5", "8", "2x2x2")


@dataclass(slots=True)
class Tried:
    """What happened to one kind of fault."""

    tried: int = 0
    refused: int = 0
    laws: Counter[str] = field(default_factory=Counter)
    models: set[str] = field(default_factory=set)
    example: str = ""
    accepted: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)

    def row(self, name: str) -> dict[str, Any]:
        """As JSON."""
        return {
            "fault": name, "tried": self.tried, "refused": self.refused, "laws": dict(self.laws.most_common()),
            "models": sorted(self.models), "example": self.example, "accepted": self.accepted, "odd": self.odd,
        }  # fmt: skip


def graph_of(name: str, folder: Path) -> Graph:
    """A model, simplified, without its weights' data."""
    return simplify(lift(folder / f"{name}.onnx", MODELS[name], weights=False).graph)


def plans(graph: Graph, seed: int) -> Iterator[tuple[str, Plan]]:
    """(kind, plan): one of each kind that a plan can be of."""
    yield "row", random_plan(graph, parse_mesh("4"), seed)
    yield "mesh", random_plan(graph, parse_mesh("2x2"), seed + 1)
    rng = random.Random(seed)
    streamed = frozenset(t for t in graph.weights if rng.random() < 0.5 and t not in graph.outputs)
    yield "streamed", replace(random_plan(graph, parse_mesh("4"), seed + 2), streamed=streamed)
    halves = [Stage(0, parse_mesh("2")), Stage(2, parse_mesh("2"))]
    yield "staged", random_staged_plan(graph, parse_mesh("4"), halves, seed + 3)


def checked(plan: Plan, program: Program, **options: Any) -> dict[str, int]:
    """The verifier on a plan; ``options`` replace what the plan itself says."""
    given = {"places": plan.places, "streamed": plan.streamed, **options}
    if "stated_peak" not in given:
        given["stated_peak"] = peak_bytes(program)[0]
    return certificate.check(plan.annotated(), program, **given)


def attempt(tried: Tried, model: str, wrong: Plan, program: Program, laws: set[str], options: dict[str, Any]) -> None:
    """One fault in one place."""
    tried.tried += 1
    tried.models.add(model)
    try:
        checked(wrong, program, **options)
    except LawError as e:
        tried.refused += 1
        tried.laws[e.law] += 1
        tried.example = tried.example or " ".join(str(e).split())[:240]
        if not (e.where or e.why or "device" in e.what):
            tried.odd.append(f"no witness: {e}"[:200])
        if e.law not in laws:
            tried.odd.append(f"law {e.law}: {e}"[:200])
    except Exception as e:
        tried.odd.append(f"{type(e).__name__}: {e}"[:200])
    else:
        tried.accepted.append(f"{model}: {options}"[:200])


def mutate(model: str, plan: Plan, each: int, table: dict[str, Tried], seed: str, only: str | None = None) -> None:
    """Every kind of fault, or one of them, in some places of one plan."""
    program = lower_plan(plan)
    checked(plan, program)
    for name, (laws, make) in (*FAULTS.items(), *MORE.items()):
        if only not in (None, name) or (plan.stages and name in ON_ALL_DEVICES):
            continue
        cases = make(plan, program)
        chosen = cases if len(cases) <= each else random.Random(f"{seed} {name}").sample(cases, each)
        for wrong, other, options in chosen:
            given = {"stated_peak": peak_bytes(program)[0], **options}
            if given["stated_peak"] is None:
                given["stated_peak"] = peak_bytes(other)[0]
            attempt(table.setdefault(name, Tried()), model, wrong, other, laws | ALSO, given)


def valid(graphs: dict[str, Graph], count: int, so_far: dict[str, Any], keep: Callable[[], None]) -> None:
    """Plans without a fault, any strategies on any mesh: how many pass, and what of the others; added to ``so_far``."""
    for k in range(so_far["plans"], count):
        name = list(graphs)[k % len(graphs)]
        plan = any_plan(graphs[name], random.Random(f"valid {k}"), k)
        try:
            so_far["checks"] += sum(checked(plan, lower_plan(plan)).values())
            so_far["passed"] += 1
        except Exception as e:
            so_far["alarms"].append(f"{name} {k}: {type(e).__name__}: {e}"[:400])
        so_far["plans"] = k + 1
        if k % 50 == 49:
            print(f"valid plans: {so_far['passed']} of {k + 1}", file=sys.stderr, flush=True)
            keep()


def any_plan(graph: Graph, rng: random.Random, seed: int) -> Plan:
    """A plan of any kind on any mesh, uneven shares, streamed weights and stages included."""
    mesh: Mesh = parse_mesh(rng.choice(MESHES))
    if rng.random() < 0.2:
        mesh = tuple(MeshAxis(a.name, a.size, tuple(rng.randint(1, 3) for _ in range(a.size))) for a in mesh)
    elif rng.random() < 0.25:
        first = rng.choice([1, 2, 2])
        stages = [Stage(0, parse_mesh(str(first))), Stage(first, parse_mesh(str(4 - first)))]
        return random_staged_plan(graph, parse_mesh("4"), stages, seed)
    share = rng.choice([0.0, 0.0, 0.5])
    streamed = frozenset(t for t in graph.weights if rng.random() < share and t not in graph.outputs)
    return replace(random_plan(graph, mesh, seed), streamed=streamed)


def faults_of(name: str, graph: Graph, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every kind of fault in the plans, the programs and the files of a model."""
    table: dict[str, Tried] = {}
    for kind, plan in plans(graph, args.seed):
        mutate(name, plan, args.each, table, f"{args.seed} {name} {kind}")
        print(name, kind, sum(t.tried for t in table.values()), file=sys.stderr, flush=True)
    for kind, law, ends in tried_on_files(args.folder / f"{name}.onnx", MODELS[name], args.seed):
        t = table.setdefault(kind, Tried())
        t.tried, t.refused, t.example = t.tried + 1, t.refused + bool(ends), t.example or ends
        t.models.add(name)
        t.laws[law] += 1
        t.accepted += [] if ends else [name]
    return [t.row(fault) for fault, t in table.items()]


def together(models: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of all models, one per kind of fault."""
    out: dict[str, dict[str, Any]] = {}
    for row in (r for rows in models.values() for r in rows):
        known = out.setdefault(
            row["fault"], {**row, "tried": 0, "refused": 0, "laws": {}, "models": [], "accepted": [], "odd": []}
        )
        for key in ("tried", "refused", "models", "accepted", "odd"):
            known[key] = known[key] + row[key]
        known["laws"] = dict((Counter(known["laws"]) + Counter(row["laws"])).most_common())
    return list(out.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(FIVE), choices=list(MODELS))
    parser.add_argument("--folder", type=Path, help="where MODEL.onnx are; else they are written with random weights")
    parser.add_argument("--each", type=int, default=3, help="places for each kind of fault in each plan")
    parser.add_argument("--valid", type=int, default=1000, help="plans without a fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, metavar="FILE", help="kept after each model and 50 plans; with it a run goes on")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if args.folder is None:
            args.folder = Path(place)
            if None in [materialize(name, args.folder) for name in args.models]:
                parser.error("the folder of exported models is not beside the checkout")
        return run(args)


def run(args: argparse.Namespace) -> int:
    """Faults in every model, then plans without any."""
    state: dict[str, Any] = {"models": {}, "valid": {"plans": 0, "passed": 0, "checks": 0, "alarms": []}}
    if args.state and args.state.exists():
        state = json.loads(args.state.read_text())

    def keep() -> None:
        if args.state:
            args.state.write_text(json.dumps(state))

    graphs = {name: graph_of(name, args.folder) for name in args.models}
    for name, graph in graphs.items():
        if name not in state["models"]:
            state["models"][name] = faults_of(name, graph, args)
            keep()
    valid(graphs, args.valid, state["valid"], keep)
    return report(together(state["models"]), state["valid"], args)


def report(rows: list[dict[str, Any]], healthy: dict[str, Any], args: argparse.Namespace) -> int:
    """Say what was refused, and record it if everything was asked."""
    missed = [r["fault"] for r in rows if r["tried"] != r["refused"] or r["odd"]]
    never = sorted({*FAULTS, *MORE, *FILE_FAULTS} - {r["fault"] for r in rows})
    print(f"{len(rows)} kinds, {sum(r['refused'] for r in rows)} of {sum(r['tried'] for r in rows)} faults refused")
    print(f"{healthy['passed']} of {healthy['plans']} valid plans pass; missed: {missed or 'none'}; never: {never or 'none'}")
    if set(args.models) >= set(FIVE) and healthy["plans"] >= 1000:
        record.write("mutations", rows, valid=healthy, never=never, seed=args.seed, models=args.models)
    if missed:
        print(json.dumps([r for r in rows if r["fault"] in missed], indent=1))
    return int(bool(missed or never or healthy["passed"] != healthy["plans"]))


if __name__ == "__main__":
    sys.exit(main())
