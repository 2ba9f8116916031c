"""Builds without a fault, each of which `tapestry verify` must accept: its laws, its model, its rewrites, its report.

    .venv/bin/python -m bench good_builds --seed S [--count 1000] [--minutes M] [--again] [--folder DIR]

Case n of a seed is a model and a way to plan it. Models: those of the fuzzer, small parallel networks (`tests/support`),
and exported ones (DIR/*.onnx, one case in thirty). Ways: ``compiled`` by the whole pipeline, on any mesh, with layouts, pins,
stages or a part of the memory that a first plan took; or ``drawn`` by a recipe of the fuzzer: random moves of
every rule, random strategies, layouts, streamed weights and pipeline stages, with the log of its rewrites. Each build is saved,
and verified from its files alone, as the command does it. Where no plan can be made (too little memory, an impossible pin)
there is no build: "not made". bench/results/good_builds.json has a row per seed; a later call goes on where it ends,
``--again`` repeats the cases that were refused. Exits 1 if a build was refused.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

import tapestry
from bench.proofs.mutations import MODELS
from bench.support import record
from bench.support.record import Row
from tapestry.build import store
from tapestry.codegen import kernel_sources
from tapestry.compiler import build_report
from tapestry.compiler.passes import model_hash
from tapestry.compiler.saved_build import replay_rewrites, verify_build
from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import changes
from tapestry.ir.plan import Mesh, Plan, device_count
from tapestry.ir.program import peak_bytes
from tapestry.lift import Lifted, lift
from tapestry.plan.pipelines.staged_plan import lower_plan
from tapestry.plan.simulate import simulate
from tapestry.plan.strategy import strategies
from tapestry.plan.topology import parse_mesh, to_data, topology
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import parse_move
from tapestry.verify.rewriting import rewrite_log
from tests.fuzz.generate.random_model import random_model
from tests.fuzz.recipe import planned, random_mesh, random_recipe, rewritten
from tests.support.parallel_nets import Sizes, Style, write

NETS = ("mlp", "encoder", "decoder", "convolutions", "experts")


class NotMade(Exception):
    """There is no build to judge: why."""


def model_of(rng: random.Random, seed: str, place: Path, folder: Path | None) -> tuple[str, Path, dict[str, int]]:
    """What kind of model a case has, its file, and the sizes of its symbols."""
    exported = sorted(p for p in folder.glob("*.onnx") if p.stem in MODELS or not _symbols(p)) if folder else []
    kind = rng.random()
    if exported and kind < 1 / 30:
        path = rng.choice(exported)
        return path.stem, path, MODELS.get(path.stem, {})
    if kind < 0.1:
        net = rng.choice(NETS)
        return net, write(net, Style(), place / "net", Sizes(layers=rng.choice((1, 2))), seed=rng.randrange(99))[0], {}
    model = next(m for m in (random_model(f"{seed} {k}") for k in range(99)) if not m.text)
    return "fuzz", model.save(place / "model.onnx"), model.sizes


def _symbols(path: Path) -> bool:
    graph = onnx.load(path, load_external_data=False).graph
    return any(d.dim_param for i in graph.input for d in i.type.tensor_type.shape.dim)


def compiled(rng: random.Random, path: Path, sizes: dict[str, int], out: Path) -> str:
    """A build by the pipeline; returns what was asked of it."""
    mesh, asked = random_mesh(rng), dict[str, Any]()
    way = rng.choice(("plain", "plain", "memory", "memory", "pins", "layouts", "stages"))
    if way == "pins":
        asked = {"pins": _pins(rng, simplify(lift(path, sizes).graph), mesh)}
    elif way == "layouts":
        asked = {"layouts": _layouts(rng, lift(path, sizes), mesh)}
    elif way == "stages":
        mesh, asked = _even((rng.choice((2, 4)),)), {"stages": 2}
    given = {"mesh": mesh, "shapes": sizes, "topology": "cpu", "sharding": False, "time_limit": 5.0}
    plan = tapestry.compile(path, **given, **asked)
    if way == "memory":
        plan = tapestry.compile(path, **given, memory=max(64, int(max(plan.build.peak_bytes) * rng.uniform(0.4, 1.0))))
    plan.save(out)
    return f"compiled, {way}" + (", split in time" if "fit" in plan.report else "")


def _even(sizes: tuple[int, ...]) -> Mesh:
    return parse_mesh("x".join(map(str, sizes)))


def _pins(rng: random.Random, graph: Any, mesh: Mesh) -> list[str]:
    """How some operations are cut, each as one of the strategies that it has."""
    out: list[str] = []
    for op in rng.sample(graph.ops, min(len(graph.ops), rng.choice((1, 1, 2)))):
        chosen = rng.choice(strategies(op, mesh))
        out += [f"{op.outs[0]}:{d}={a.size}@{a.name}" for d, a in zip(chosen.dims, mesh, strict=True) if d is not None]
    return out


def _layouts(rng: random.Random, lifted: Lifted, mesh: Mesh) -> list[str]:
    """Where some inputs begin and some outputs end."""
    names = [*lifted.graph.inputs, *lifted.graph.outputs]
    out: list[str] = []
    for t in rng.sample(names, min(len(names), rng.choice((1, 2)))):
        axes = [k for k, n in enumerate(lifted.graph.tensors[t].shape) if n >= mesh[0].size]
        out.append(
            f"{t}:{rng.choice(axes)}={mesh[0].size}@{mesh[0].name}" if axes and rng.random() < 0.7 else f"{t}:replicated"
        )
    return out


def drawn(rng: random.Random, path: Path, sizes: dict[str, int], out: Path) -> str:
    """A build by a recipe of the fuzzer, written as the pipeline writes its own."""
    lifted = lift(path, sizes)
    recipe = random_recipe(lifted.graph, rng)[0]
    while recipe.via not in ("strategies", "stages") or any(len(sizes) > 1 for _, sizes in recipe.stages):  # (of one axis)
        recipe = random_recipe(lifted.graph, rng)[0]
    graph = rewritten(lifted.graph, recipe)
    plan = planned(graph, recipe)
    steps = changes(graph)
    log, _ = rewrite_log.proved(steps[0].before if steps else graph, steps)
    build, held = _build(lifted, plan, recipe.moves)
    kernels = kernel_sources.triton_sources(graph, build.program, build.target, build.precision, build.knobs)
    store.write(out, build, held, kernels, {"ssa": 1}, log)
    return "drawn, " + recipe.via + (", moves" if recipe.moves else "")


def _build(lifted: Lifted, plan: Plan, moves: tuple[str, ...]) -> tuple[store.Build, dict[str, bytes]]:
    """The build of a plan that no search made, with the facts of its report; its derived constants."""
    program = lower_plan(plan)
    on = topology(plan.mesh, "cpu")
    held = {t: lifted.constants[t].tobytes() for t, w in plan.graph.weights.items() if not w.file}
    places, offset = dict[str, tuple[int, int]](), 0
    for t, data in held.items():
        places[t] = (offset, len(data))
        offset += len(data)
    build = store.Build(
        model=str(lifted.model), model_sha256=model_hash(lifted), plan=plan,
        program=program, target="torch-cpu", memory=on.device.memory, report={}, moves=moves,
        peak_bytes=tuple(peak_bytes(program)[0]), constants=places, topology=to_data(on),
    )  # fmt: skip
    timed = simulate(plan, program, on).total
    facts = {"simulated_s": timed, "objective_s": timed, "lower_bound_s": 0.0, "gap": 1.0 if timed else 0.0}
    parts = [m.number("parts") for m in map(parse_move, moves) if m.rule == "micro_batch"]
    staged = {"stages": build_report.stages_of(build), "micro_batches": parts[-1] if len(plan.stages) > 1 and parts else 1}
    report = {**build_report.facts_of(build), **facts, **staged, "requests": {"sharding": {"notes": []}}}
    return replace(build, report={**report, "plan_sha256": build_report.plan_hash(build)}), held


def case(seed: str, folder: Path | None) -> Row:
    """One build: made and verified."""
    rng = random.Random(f"good {seed}")
    row: Row = {"case": seed, "verdict": "not made", "way": "", "detail": ""}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        row["model"], path, sizes = model_of(rng, seed, place, folder)
        make = compiled if rng.random() < 0.5 else drawn
        row["way"] = make.__name__
        try:
            row["way"] = make(rng, path, sizes, place / "build")
        except TapestryError as e:
            law = next((x for x in (e, e.__cause__) if isinstance(x, LawError)), None)
            row |= {"verdict": "refused" if law else "not made", "detail": _line(e)}
            return row
        try:
            build, laws, evidence = verify_build(place / "build")
            replayed = replay_rewrites(place / "build", build.plan.graph)
        except Exception as e:  # a traceback for a build without a fault is no better than a refusal
            return row | {"verdict": "refused", "detail": _line(e)}
        return row | {
            "verdict": "accepted", "evidence": [x["kind"] for x in evidence], "devices": device_count(build.plan.mesh),
            "rewrites": replayed.steps if replayed else 0, "shown": dict(replayed.shown) if replayed else {},
            "checks": sum(laws.values()),
        }  # fmt: skip


def _line(e: Exception) -> str:
    kind = "" if isinstance(e, TapestryError) else f"{type(e).__name__}: "
    return kind + " ".join(str(e).split())[:600]


def add(total: Row, row: Row) -> None:
    """Count one case in its seed's row."""
    total["cases"] += 1
    for key, what in (("verdicts", row["verdict"]), ("models", row["model"]), ("ways", f"{row['way']}: {row['verdict']}")):
        total[key][what] = total[key].get(what, 0) + 1
    if row["verdict"] == "accepted":
        total["checks"] += row["checks"]
        total["rewrites"] += row["rewrites"]
        for key, found in (("evidence", Counter(row["evidence"])), ("shown", row["shown"]), ("devices", {row["devices"]: 1})):
            for what, n in found.items():
                total[key][str(what)] = total[key].get(str(what), 0) + n
    elif row["verdict"] == "refused":
        total["refused"].append(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--again", action="store_true", help="only the cases that were refused")
    parser.add_argument("--folder", type=Path, help="where exported models are")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows = record.read("good_builds")
    total = next((r for r in rows if r["seed"] == args.seed), None)
    if total is None:
        counts = ("verdicts", "models", "ways", "devices", "evidence", "shown")
        total = {
            "seed": args.seed,
            "cases": 0,
            "checks": 0,
            "rewrites": 0,
            **{k: {} for k in counts},
            "refused": [],
            "mended": [],
        }
        rows.append(total)
    end = time.monotonic() + 60 * args.minutes
    if args.again:
        repeat(total, args.folder)
    while not args.again and total["cases"] < args.count and time.monotonic() < end:
        row = case(f"{args.seed} {total['cases']}", args.folder)
        add(total, row)
        if row["verdict"] == "refused":
            print(row, flush=True)
        if total["cases"] % 10 == 0:
            record.write("good_builds", rows)
    record.write("good_builds", rows)
    print({k: v for k, v in total.items() if k not in ("refused", "mended")})
    return int(bool(total["refused"]))


def repeat(total: Row, folder: Path | None) -> None:
    """The refused cases once more; those that are not refused now are kept as mended."""
    for old in list(total["refused"]):
        now = case(old["case"], folder)
        print(now, flush=True)
        if now["verdict"] != "refused":
            total["refused"].remove(old)
            total["mended"].append(old)
            total["verdicts"]["refused"] -= 1
            total["verdicts"][now["verdict"]] = total["verdicts"].get(now["verdict"], 0) + 1


if __name__ == "__main__":
    sys.exit(main())
