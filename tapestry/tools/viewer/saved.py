"""Pages of builds on disk, and of traces of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tapestry.build import store
from tapestry.errors import BuildError, TapestryError
from tapestry.tools.viewer import build_data
from tapestry.tools.viewer.build_data import Source
from tapestry.tools.viewer.html_page import assemble
from tapestry.viz import build_diff

MAX_TRACE_BYTES = 1 << 30


class _Step(msgspec.Struct):
    """What the page takes of a trace's step; the file has more."""

    step: int
    what: str
    estimated_s: float
    measured_s: float
    waited_s: float


class _Steps(msgspec.Struct):
    steps: list[_Step]


class _Trace(msgspec.Struct):
    other: _Steps = msgspec.field(name="otherData")


def page(folders: Sequence[Path], trace: Path | None = None, say: build_data.Say = lambda what: None) -> str:
    """The page of one build or of two.

    Args:
        trace: of a real run of the first one.

    Raises:
        BuildError: a folder is no build; TapestryError: the trace is none of its.
    """
    sources: list[Source] = []
    names = [f.resolve().name for f in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    for folder, name in zip(folders, names, strict=True):
        build, laws = store.read(folder)
        rewrites = store.contents(folder / store.REWRITES)
        evidence = build.report.get("certificate", {}).get("evidence", ())
        real = measured(trace, build) if trace is not None and not sources else None
        sources.append(Source(build=build, name=name, laws=laws, evidence=evidence, rewrites=rewrites, measured=real))
    return of_sources(sources, say)


def of_sources(sources: Sequence[Source], say: build_data.Say = lambda what: None) -> str:
    """The page of builds in memory."""
    documents = [build_data.document(s, say) for s in sources]
    diff = None
    if len(sources) > 1:
        first, second = sources[0].build, sources[1].build
        diff = build_diff.compare(first, second, documents[0]["explain"], documents[1]["explain"])
    title = " and ".join(Path(s.build.model).name for s in sources)
    return assemble({"builds": documents, "diff": diff}, f"{title} · Tapestry")


def measured(file: Path, build: store.Build) -> dict[str, Any]:
    """What the trace of a real run says of each step, and in all.

    Raises:
        TapestryError: the file is no trace of ``run --trace``, or of another plan.
    """
    try:
        if file.stat().st_size > MAX_TRACE_BYTES:
            raise TapestryError("the trace is too large", where=str(file))
        steps = msgspec.json.decode(file.read_bytes(), type=_Trace).other.steps
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        hint = "tapestry run --trace FILE"
        raise TapestryError("not the trace of a real run", where=str(file), why=str(e)[:200], hint=hint) from None
    if any(not 0 <= r.step < len(build.program.steps) for r in steps):
        raise BuildError("the trace is of another plan", where=str(file))
    real, estimated = sum(r.measured_s for r in steps), sum(r.estimated_s for r in steps)
    rows = [msgspec.structs.asdict(r) for r in steps]
    return {"steps": rows, "measured_s": real, "error": real / estimated - 1 if estimated else 0.0}
