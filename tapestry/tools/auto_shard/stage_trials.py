"""Candidates of ``auto-shard --measure``: compiled in several processes, and run in turns, a batch of each after the other."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from tapestry import api
from tapestry.errors import TapestryError
from tapestry.interop import onnx_annotations
from tapestry.lift.file.structure import check_structure, load
from tapestry.plugins import tool
from tapestry.system.processes import end_with_parent
from tapestry.tools.auto_shard import stage_annotations
from tapestry.tools.auto_shard.auto_shard import Options
from tapestry.tools.auto_shard.measured_search import Trial
from tapestry.viz.tool_kinds import Sessions

RUNS = 5  # of each, after one that counts for nothing; their median does
TOGETHER = 4  # candidates that are loaded at a time
Job = tuple[Path, Path]  # a candidate's file, and where its build goes


@dataclass(slots=True)
class StageTrials:
    """Compiles and runs candidates of one model, with its external data in reach: their files lie beside it until the end.

    One process plays all devices, so that a batch passes the stages one after another, as it does on devices of their own, but
    with no wire between them; or, where the options say so, each device is a process of its own, and what goes from stage to
    stage is sent.
    """

    options: Options
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    _pool: ProcessPoolExecutor | None = None
    _builds: dict[tuple[int, ...], Path] = field(default_factory=dict[tuple[int, ...], Path])
    _files: list[Path] = field(default_factory=list[Path])

    def __call__(self, schemes: Sequence[Sequence[int]], capacity: int) -> list[Trial]:
        """Each compiled; run where no device needs more than so many bytes."""
        jobs = [self._job(scheme) for scheme in schemes]
        done = self._compiled(jobs)
        self._builds |= {tuple(s): build for s, (_, build) in zip(schemes, jobs, strict=True)}
        fit = [k for k, t in enumerate(done) if not t.refused and max(t.peaks) <= capacity]
        for at in range(0, len(fit), TOGETHER):
            some = fit[at : at + TOGETHER]
            for k, seconds in zip(some, self.in_turns([schemes[k] for k in some]), strict=True):
                done[k] = Trial(done[k].peaks, seconds)
        return done

    def _compiled(self, jobs: Sequence[Job]) -> list[Trial]:
        compiled = partial(_compile, self.options)
        if len(jobs) == 1 or self.options.processes == 1:
            return [*map(compiled, jobs)]
        if self._pool is None:
            # not fork: the parent may have threads of numpy's or torch's, which do not survive it
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.options.processes, context, end_with_parent)
        return [*self._pool.map(compiled, jobs)]

    def _job(self, scheme: Sequence[int]) -> Job:
        o, number = self.options, len(self._files)
        source = o.model.absolute()
        target = stage_annotations.output_path(source, o.output)
        file = target.with_name(f".{target.stem}.candidate{number}.onnx")
        model = load(source)
        self._files.append(file)
        check_structure(model, source.parent, weights=False)  # sorts nodes, as the scheme has them
        stage_annotations.annotate_stages(model, scheme, o.devices)
        onnx_annotations.write(model, source, file)
        return file, Path(self._folder.name) / str(number)

    def in_turns(self, schemes: Sequence[Sequence[int]]) -> list[float]:
        """Seconds of a batch of each, all compiled before: medians of runs that take turns, whoever begins a round."""
        builds = [self._builds[tuple(s)] for s in schemes]
        feeds = [api.load(b).random_feeds() for b in builds]
        seconds: list[list[float]] = [[] for _ in builds]
        with ExitStack() as loaded:
            processes, session = self.options.ranks, tool(Sessions)
            sessions = [loaded.enter_context(session(b, processes=processes if processes > 1 else None)) for b in builds]
            for n in range(RUNS + 1):
                for k in range(len(builds)):
                    at = (k + n) % len(builds)
                    start = time.perf_counter()
                    sessions[at].run(feeds[at])
                    seconds[at].append(time.perf_counter() - start)
        return [statistics.median(s[1:]) for s in seconds]

    def __enter__(self) -> StageTrials:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for file in self._files:
            file.unlink(missing_ok=True)
        self._folder.cleanup()


def _compile(options: Options, job: Job) -> Trial:
    """Compile one candidate without a limit of memory: its peaks say whether it fits."""
    o, (file, build) = options, job
    try:
        compiled = api.compile(file, devices=o.devices, topology=o.topology, shapes=o.shapes, micro_batches=1)
    except TapestryError as e:
        return Trial((), refused=str(e))
    compiled.save(build)
    return Trial(tuple(compiled.build.peak_bytes))
