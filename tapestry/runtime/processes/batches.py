"""Streams of requests: where each batch's inputs are, and which batches are done.

A batch is a ``.npz`` file, or a folder of one ``.npy`` file per input. Its results appear in ``OUTPUT/NAME/`` all at once,
when they are complete, so a folder that is there is a batch that is done, and a rerun goes on after it. ``OUTPUT/run.json``
says of which build.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from tapestry.build.atomic import new_folder
from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.types import Array
from tapestry.runtime.feeds import random_feeds
from tapestry.runtime.outputs import file_name, write_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One request: ``source`` is a .npz file or a folder, ``inputs`` single files by input; the rest is random by ``seed``.

    ``output`` is the folder for its results (``None``: nowhere); ``number`` counts from 0 over all batches, done or not.
    """

    number: int
    name: str
    output: Path | None
    source: Path | None = None
    inputs: tuple[tuple[str, Path], ...] = ()
    seed: int = 0

    @property
    def done(self) -> bool:
        """Whether its results are there."""
        return self.source is not None and self.output is not None and self.output.is_dir()

    def feeds(self, graph: Graph) -> dict[str, Array]:
        """The inputs, read from files (mapped where that can be).

        Raises:
            TapestryError: a file does not read.
        """
        if self.source is None:
            return random_feeds(graph, self.seed) | {name: load(path) for name, path in self.inputs}
        if self.source.is_dir():
            names = {file_name(t): t for t in graph.inputs}
            return {names.get(p.stem, p.stem): load(p) for p in sorted(self.source.glob("*.npy"))}
        try:
            with np.load(self.source, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, AttributeError, TypeError, BadZipFile, zlib.error) as e:
            raise TapestryError(f"no arrays: {e}", where=str(self.source), hint="a .npz file of numpy.savez") from None

    def keep(self, outputs: Mapping[str, Array]) -> None:
        """Write the results: a stream's batch appears whole; a single run writes each file whole."""
        if self.output is None:
            return
        if self.source is None:
            write_outputs(self.output, outputs)
            return
        with new_folder(self.output, "") as temporary:
            write_outputs(temporary, outputs)


def load(path: Path) -> Array:
    """A .npy file, mapped.

    Raises:
        TapestryError: it is none.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise TapestryError(f"not an array: {e}", where=str(path), hint="a .npy file written by numpy.save") from None


def stream(sources: Sequence[Path], output: Path | None, identity: str) -> list[Batch]:
    """The batches of ``--inputs``, in the order given and sorted within folders.

    Raises:
        TapestryError: a source is missing, two batches have one name, or the output belongs to another build.
    """
    given: list[Path] = []
    for p in sources:
        inside = (
            sorted(q for q in p.iterdir() if q.suffix == ".npz" or (q.is_dir() and any(q.glob("*.npy")))) if p.is_dir() else []
        )
        if not p.exists() or (p.is_dir() and not inside and not any(p.glob("*.npy"))):
            raise TapestryError("no batches", where=str(p), hint=".npz files, or folders of .npy files")
        given += inside or [p]
    names = [p.stem if p.is_file() else p.name for p in given]
    twice = next((n for n, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise TapestryError(f"two batches are called '{twice}'", where="--inputs")
    if output is not None:
        _claim(output, identity)
    places = [None if output is None else output / file_name(n) for n in names]
    rows = zip(names, places, given, strict=True)
    return [Batch(number=k, name=n, output=o, source=p) for k, (n, o, p) in enumerate(rows)]


def _claim(output: Path, identity: str) -> None:
    """Mark a folder as this build's; what a run that was killed left half-written goes."""
    mark = output / "run.json"
    if mark.is_file():
        try:
            build = json.loads(mark.read_text()).get("build")
        except (ValueError, AttributeError):
            build = None
        if build != identity:
            raise TapestryError("the outputs there are of another build", where=str(output), hint="another --output")
        for p in output.glob(".*"):
            if p.is_dir():
                shutil.rmtree(p, ignore_errors=True)
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise TapestryError("the folder has other things in it", where=str(output), hint="another --output")
    output.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps({"build": identity}) + "\n")
