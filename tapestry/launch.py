"""Runs on several processes, as the command line asks for them: started here, or by torchrun."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from tapestry.runtime.feeds import given_feeds, made_up, read_array
from tapestry.runtime.outputs import places
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
    output: Path | None = None
    seed: int = 0
    timeout: float = 30.0
    trace: Path | None = None
    threads: int | None = None


def request(args: argparse.Namespace) -> Request:
    """The request of a command line."""
    if not 1.0 <= args.timeout <= 1e6:
        raise TapestryError(f"a timeout of {args.timeout:g} s", where="--timeout", hint="1 or more")
    return Request(
        folder=args.build,
        model=args.model,
        shapes=arguments.shapes(args.shapes),
        inputs=args.input,
        output=args.output,
        seed=args.seed,
        timeout=args.timeout,
        trace=args.trace,
        threads=args.threads,
    )


def _files(r: Request, names: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """The files of inputs, by input."""
    files: list[tuple[str, Path]] = []
    for item in r.inputs:
        name, eq, file = item.rpartition("=")
        if not eq or name not in names:
            raise TapestryError(f"'{item}' is not name=file.npy", where="--input", hint=f"the inputs are {', '.join(names)}")
        read_array(Path(file))
        files.append((name, Path(file)))
    return tuple(files)


def _at_inputs(compiled: api.Compiled, r: Request) -> api.Compiled:
    """A build for several sizes at those that are asked for, or of the inputs that are given; else as it was made.

    Raises:
        TapestryError: it is not for these sizes.
    """
    if r.shapes:
        return compiled.planned(compiled.sizes(r.shapes))
    if compiled.sized is None or not r.inputs:
        return compiled
    given = {name: read_array(path) for name, path in _files(r, compiled.build.plan.graph.inputs)}
    return compiled.planned(compiled.sized.sizes_of(shapes_of(given)))


def job_of(r: Request, world: int, compiled: api.Compiled, here: int = 0) -> Any:
    """The job of a request, of which ``here`` ranks are on this host (0: all); torch is imported here and not before."""
    build, constants = compiled.build, b"".join(compiled.constants.values())
    flags.before_torch()
    import tapestry.codegen.torch_cpu.kernels  # noqa: F401  # pyright: ignore[reportUnusedImport] (forked ranks find it imported)
    from tapestry.codegen.torch_cpu import native
    from tapestry.runtime.processes.worker import Job
    from tapestry.runtime.step_messages import owners

    owners(build.program.devices, world)
    return Job(
        build=build,
        constants=constants,
        identity=store.identity(r.folder),
        inputs=_files(r, build.plan.graph.inputs),
        seed=r.seed,
        output=r.output,
        timeout=r.timeout,
        trace=r.trace is not None,
        threads=cores.share(here or world, r.threads),
        kernels={} if build.target != "torch-cpu" else {"those compiled from C": "there" if native.library() else "not there"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How ranks are started on this host."""

    processes: int
    port: int = 0
    check: bool = False
    tell: Callable[[str], None] = lambda text: None


def run(r: Request, how: Launch) -> Document:
    """Start the ranks here, and see them to the end; the document of ``tapestry run --json``.

    Raises:
        RunError: a rank failed. TapestryError: the input is at fault.
    """
    compiled = _at_inputs(api.load(r.folder, r.model), r)
    graph = compiled.build.plan.graph
    with tempfile.TemporaryDirectory(prefix="tapestry-run-") as scratch:
        job = job_of(replace(r, output=r.output or Path(scratch) / "outputs"), how.processes, compiled)
        random = made_up(graph, dict(job.inputs), r.seed, how.tell)
        hold(given_feeds(graph, job.inputs, r.seed), graph)  # here, before ranks fail by it
        from tapestry.runtime.processes.supervisor import supervise

        report = supervise(job, how.processes, api.open_session, port=how.port)
        document = _judged(compiled, job, _reported(r, compiled, report), how.check) | random
    preset = compiled.build.report["topology"]["name"]
    text = f"warning: the plan is for the preset '{preset}', its forecast not of this machine; --topology auto measures that"
    return document | {"warnings": [text] if preset in PRESETS else []}


def _reported(r: Request, compiled: api.Compiled, report: Document) -> Document:
    """A report without its slices, which are written as a trace if one is asked for."""
    slices, _ = report.pop("slices"), report.pop("run_seconds")
    if r.trace is not None:
        report["trace"] = {"file": str(r.trace), **measured.write_measured(r.trace, compiled.build, slices)}
    return report


def _judged(compiled: api.Compiled, job: Any, report: Document, check: bool) -> Document:
    outputs = _results_in_folder(compiled, job.output, report.pop("hosted"))
    moved = {t["kind"]: (t["count"], t["bytes"]) for t in report["transfers"]}
    used = Measured(report["peak_bytes"], moved, report["packed_bytes"])
    feeds = {t: np.asarray(a) for t, a in given_feeds(compiled.build.plan.graph, job.inputs, job.seed).items()}
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


def analyze(folder: Path, processes: int | None, runs: int = 4) -> tuple[Build, Document]:
    """Run a build some times with random inputs and hold every step's time against the cost model's."""
    compiled = api.load(folder)
    processes = processes or min(compiled.build.program.devices, os.cpu_count() or 1)
    job = replace(job_of(Request(folder=folder), processes, compiled), trace=True, runs=runs)
    from tapestry.runtime.processes.supervisor import supervise

    report = supervise(job, processes, api.open_session)
    analysis = measured.analysis(compiled.build, report["slices"], report["run_seconds"])
    return compiled.build, {"processes": processes, "threads": job.threads, **analysis}


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
        print(f"on {some(ranks, 'process')}, {document['seconds']:.4f} s, {total:,} bytes between devices")
    if document and not document.get("passed", True):
        print(f"tapestry.runtime: {document.get('reason', 'results are not those of the reference')}", file=sys.stderr)
        return 1
    return 0


def _ranked(r: Request, check: bool) -> Document:
    """This process's share of the work; the document on rank 0, which alone writes and compares results."""
    place = flags.world()
    compiled = _at_inputs(api.load(r.folder, r.model), r)
    with tempfile.TemporaryDirectory(prefix="tapestry-run-") as scratch:
        r = replace(r, output=r.output or (Path(scratch) / "outputs" if check else None))
        job = job_of(r, place.world, compiled, place.locals)
        if place.rank == 0:
            made_up(compiled.build.plan.graph, dict(job.inputs), r.seed, lambda x: print(x, file=sys.stderr))
        report = as_rank(place, job)
        if not report:
            return {}
        report = _reported(r, compiled, report)
        if check:
            return _judged(compiled, job, report, check)
    return {k: v for k, v in report.items() if k != "hosted"}


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
