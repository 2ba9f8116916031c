"""Runs on several processes, as the command line asks for them: started here, or by torchrun."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tapestry import api, arguments, flags
from tapestry.build import store
from tapestry.build.store import Build
from tapestry.errors import RunError, TapestryError, some
from tapestry.ir.types import numpy_dtype
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.plan.topology import PRESETS
from tapestry.runtime.feeds import made_up
from tapestry.runtime.outputs import places
from tapestry.runtime.processes import batches as batches_module
from tapestry.runtime.processes.batches import Batch
from tapestry.runtime.session import Result, hold, shapes_of
from tapestry.runtime.target_protocol import Measured
from tapestry.system import cores
from tapestry.viz import measured

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What ``tapestry run --processes`` and torchrun have in common."""

    folder: Path
    model: Path | None = None
    shapes: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: Sequence[str] = ()
    stream: Sequence[Path] = ()
    output: Path | None = None
    seed: int = 0
    timeout: float = 30.0
    trace: Path | None = None
    threads: int | None = None


def request(args: argparse.Namespace) -> Request:
    """The request of a command line."""
    if not 1.0 <= args.timeout <= 1e6:
        raise TapestryError(f"a timeout of {args.timeout:g} s", where="--timeout", hint="1 or more")
    if args.inputs and args.input:
        raise TapestryError("--input is one batch, --inputs are many", where="--inputs")
    return Request(
        folder=args.build,
        model=args.model,
        shapes=arguments.shapes(args.shapes),
        inputs=args.input,
        stream=args.inputs,
        output=args.output,
        seed=args.seed,
        timeout=args.timeout,
        trace=args.trace,
        threads=args.threads,
    )


def _single(r: Request, names: Sequence[str], output: Path | None, count: int = 1) -> list[Batch]:
    """Batches of single files and random inputs."""
    files: list[tuple[str, Path]] = []
    for item in r.inputs:
        name, eq, file = item.rpartition("=")
        if not eq or name not in names:
            raise TapestryError(f"'{item}' is not name=file.npy", where="--input", hint=f"the inputs are {', '.join(names)}")
        batches_module.load(Path(file))
        files.append((name, Path(file)))
    return [Batch(number=k, name=f"run {k}", output=output, inputs=tuple(files), seed=r.seed) for k in range(count)]


def _at_inputs(compiled: api.Compiled, r: Request) -> api.Compiled:
    """A build for several sizes at those that are asked for, or of the first inputs that are given; else as it was made.

    Raises:
        TapestryError: it is not for these sizes.
    """
    if r.shapes:
        return compiled.planned(compiled.sizes(r.shapes))
    if compiled.sized is None or not (r.inputs or r.stream):
        return compiled
    if r.stream:
        given = batches_module.stream(r.stream, None, "")[0].feeds(compiled.build.plan.graph)
    else:
        given = {name: batches_module.load(path) for name, path in _single(r, compiled.build.plan.graph.inputs, None)[0].inputs}
    return compiled.planned(compiled.sized.sizes_of(shapes_of(given)))


def job_of(r: Request, world: int, batches: Sequence[Batch], compiled: api.Compiled, here: int = 0) -> Any:
    """The job of a request, of which ``here`` ranks are on this host (0: all); torch is imported here and not before."""
    build, constants = compiled.build, b"".join(compiled.constants.values())
    flags.before_torch()
    import tapestry.codegen.torch_cpu.kernels  # noqa: F401  # pyright: ignore[reportUnusedImport] (forked ranks find it imported)
    from tapestry.codegen.torch_cpu import native
    from tapestry.runtime.processes.worker import Job
    from tapestry.runtime.step_messages import owners

    owners(build.program.devices, world)
    identity = store.identity(r.folder)
    return Job(
        build=build,
        constants=constants,
        identity=identity,
        batches=tuple(batches),
        timeout=r.timeout,
        trace=r.trace is not None,
        threads=cores.share(here or world, r.threads),
        kernels={} if build.target != "torch-cpu" else {"those compiled from C": "there" if native.library() else "not there"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How ranks are started on this host."""

    processes: int
    restarts: int = 0
    port: int = 0
    check: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None
    tell: Callable[[str], None] = lambda text: None


def run(r: Request, how: Launch) -> Document:
    """Start the ranks here, and see them to the end; the document of ``tapestry run --json``.

    Raises:
        RunError: a rank failed. TapestryError: the input is at fault.
    """
    compiled = _at_inputs(api.load(r.folder, r.model), r)
    with tempfile.TemporaryDirectory(prefix="tapestry-run-") as scratch:
        place, random = r.output or Path(scratch) / "outputs", Document()
        if r.stream:
            _comparable(compiled.build, how.check)
            batches = batches_module.stream(r.stream, place if how.check else r.output, store.identity(r.folder))
        else:
            batches = _single(r, compiled.build.plan.graph.inputs, place)
            random = made_up(compiled.build.plan.graph, dict(batches[0].inputs), r.seed, how.tell)
            hold(batches[0].feeds(compiled.build.plan.graph), compiled.build.plan.graph)  # here, before ranks fail by it
        report = _supervised(r, how, batches, compiled)
        if r.stream:
            document = {**{k: v for k, v in report.items() if k != "hosted"}, "passed": True}
            document |= _compared(compiled, batches) if how.check else {}
        else:
            document = _judged(compiled, batches[0], report, place, how.check) | random
    preset = compiled.build.report["topology"]["name"]
    text = f"warning: the plan is for the preset '{preset}', its forecast not of this machine; --topology auto measures that"
    return document | {"warnings": [text] if preset in PRESETS else []}


def _supervised(r: Request, how: Launch, batches: Sequence[Batch], compiled: api.Compiled) -> Document:
    """Run, and write the trace if one is asked for."""
    job = job_of(r, how.processes, batches, compiled)
    from tapestry.runtime.processes.supervisor import supervise

    done = {b.number for b in batches if b.done}

    def advance(batch: int) -> None:
        done.add(batch)
        how.progress(len(done), len(batches))

    report = supervise(
        job, how.processes, api.open_session, restarts=how.restarts, port=how.port, advance=advance, tell=how.tell
    )
    slices = report.pop("slices")
    if r.trace is not None:
        report["trace"] = {"file": str(r.trace), **measured.write_measured(r.trace, compiled.build, slices)}
    return report


def _comparable(build: Build, check: bool) -> None:
    """Results of a stream are compared as they were written, which loses what a sequence or a map was."""
    other = next((n for n in build.program.outputs if build.plan.graph.tensors[n].on_host), None) if check else None
    if other is not None:
        raise TapestryError(
            f"output '{other}' is no array of the plan, and results of a stream are compared as files",
            where="--check",
            hint="a run with --input for each batch",
        )


def _compared(compiled: api.Compiled, batches: Sequence[Batch]) -> Document:
    """Every batch of a stream, done before or now, against the reference."""
    graph, checked = compiled.build.plan.graph, Document()
    for b in batches:
        assert b.output is not None
        outputs = _results_in_folder(compiled, b.output, {})
        checked[b.name] = api.compared(compiled, {t: np.asarray(a) for t, a in b.feeds(graph).items()}, outputs, check=True)
    return {"checked": checked, "passed": all(c["passed"] for c in checked.values())}


def _judged(compiled: api.Compiled, batch: Batch, report: Document, place: Path, check: bool) -> Document:
    outputs = _results_in_folder(compiled, place, report.pop("hosted"))
    moved = {t["kind"]: (t["count"], t["bytes"]) for t in report["transfers"]}
    used = Measured(report["peak_bytes"], moved, report["packed_bytes"])
    feeds = {t: np.asarray(a) for t, a in batch.feeds(compiled.build.plan.graph).items()}
    document = api.judged(compiled, feeds, Result(outputs, used, report["seconds"]), check=check)
    return {**report, **document, "peak_bytes": report["peak_bytes"]}


def _results_in_folder(compiled: api.Compiled, place: Path, hosted: Mapping[str, Any]) -> dict[str, Any]:
    """The results in a folder, and those that came as values of the host."""
    names, tensors = list(compiled.build.program.outputs), compiled.build.plan.graph.tensors
    placed = places(place, {n: hosted.get(n, np.empty(0)) for n in names})
    outputs = {n: hosted[n] if n in hosted else np.load(placed[n][0], allow_pickle=False) for n in names}
    for n, a in outputs.items():
        outputs[n] = a.view(numpy_dtype(tensors[n].dtype)) if is_array(a) and a.dtype.kind == "V" else a
    return outputs


def analyze(folder: Path, processes: int | None, trace: Path | None, runs: int = 4) -> tuple[Build, Document]:
    """Run a build some times with random inputs and hold every step's time against the cost model's."""
    compiled = api.load(folder)
    devices = compiled.build.program.devices
    r = Request(folder=folder, trace=trace or Path(os.devnull))
    how = Launch(processes=processes or min(devices, os.cpu_count() or 1))
    job = job_of(r, how.processes, _single(r, (), None, runs), compiled)
    from tapestry.runtime.processes.supervisor import supervise

    report = supervise(job, how.processes, api.open_session)
    analysis = measured.analysis(compiled.build, report["slices"], report["batch_seconds"])
    if trace is not None:
        measured.write_measured(trace, compiled.build, report["slices"])
    return compiled.build, {"processes": how.processes, "threads": job.threads, **analysis}


# under torchrun


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m tapestry.runtime``: one rank of a run that torchrun (or whoever sets its variables) has started."""
    parser = argparse.ArgumentParser(prog="python -m tapestry.runtime", description=__doc__)
    arguments.run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on rank 0's standard output")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare with onnxruntime, on rank 0")
    args = parser.parse_args(argv)
    with arguments.one_document(args.json, for_good=argv is None) as out:
        try:
            document = _ranked(request(args), args.check)
        except TapestryError as e:
            print(f"tapestry.runtime: {e.text()}", file=sys.stderr)
            return e.status
        except KeyboardInterrupt:
            print("tapestry.runtime: interrupted", file=sys.stderr)
            return 130
        if document and args.json:
            arguments.print_json(document, out)
    if document and not args.json and not args.quiet:
        ranks, total = len(document["ranks"]), sum(t["bytes"] for t in document["transfers"])
        done = f"{some(document['batches'], 'batch')} on {some(ranks, 'process')}"
        print(f"{done}, {document['seconds']:.4f} s, {total:,} bytes between devices")
    if document and not document.get("passed", True):
        print(f"tapestry.runtime: {document.get('reason', 'results are not those of the reference')}", file=sys.stderr)
        return 1
    return 0


def _ranked(r: Request, check: bool) -> Document:
    """This process's share of the work; the document on rank 0, which alone writes and compares results."""
    place = flags.world()
    compiled = _at_inputs(api.load(r.folder, r.model), r)
    with tempfile.TemporaryDirectory(prefix="tapestry-run-") as scratch:
        results = r.output or (Path(scratch) / "outputs" if check else None)
        mine = results if place.rank == 0 else None
        if r.stream:
            _comparable(compiled.build, check)
            batches = batches_module.stream(r.stream, mine, store.identity(r.folder))
        else:
            batches = _single(r, compiled.build.plan.graph.inputs, mine)
            if place.rank == 0:
                made_up(compiled.build.plan.graph, dict(batches[0].inputs), r.seed, lambda x: print(x, file=sys.stderr))
        report = as_rank(place, job_of(r, place.world, batches, compiled, place.locals))
        slices, hosted = report.pop("slices", []), report.pop("hosted", {})
        if report and r.trace is not None:
            report["trace"] = {"file": str(r.trace), **measured.write_measured(r.trace, compiled.build, slices)}
        if report and check and r.stream:
            report |= _compared(compiled, batches)
        elif report and check:
            assert results is not None
            report = _judged(compiled, batches[0], {**report, "hosted": hosted}, results, check)
    return report


def as_rank(place: flags.World, job: Any) -> Document:
    """Meet the others, and work.

    Raises:
        RunError: this rank, or another one, has failed.
    """
    from tapestry.runtime.processes.heartbeat import Heartbeat, describe, end_soon, shared
    from tapestry.runtime.processes.rendezvous import join
    from tapestry.runtime.processes.worker import PARTING, Rank, cause, work

    slots = shared(place.world)
    heartbeat = Heartbeat(slots, place.rank)
    guard = end_soon(heartbeat, 2 * job.timeout)
    shared_store, secret = join(place, job.timeout)
    guard.cancel()
    me = Rank(rank=place.rank, world=place.world, store=shared_store, slots=slots, beats=True, local=place.local, secret=secret)
    try:
        return work(me, job, api.open_session)
    except Exception as e:
        end_soon(heartbeat, PARTING)
        kind, text = cause(e, slots[me.rank])
        if kind == "failed" and _first(shared_store, me.rank):
            raise RunError(f"rank {me.rank}: {text}") from None
        raise RunError(f"rank {me.rank} ends, {describe(slots[me.rank])}: {text}") from None


def _first(shared_store: Any, rank: int) -> bool:
    """Whether this rank is the one that tells."""
    try:
        return shared_store.compare_set("failure", "", str(rank)) == str(rank).encode()
    except RuntimeError:
        return True
