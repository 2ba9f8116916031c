"""``python -m tests.fuzz.builds``: builds whose ``plan.json`` somebody has edited, and hashed anew, are loaded and run.

An edit is refused in words, or the run gives the values of the build as it was. What may be edited unseen is the graph itself
(its text, constants' hashes): which model a build is of, `tapestry verify` says, with the model beside it.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tapestry
from tapestry.build import store
from tests.support.small_models import MODELS, save

NAMES = ("attention", "conv_chain", "norms", "reductions", "gathers", "branches", "bfloats", "opaques", "recurrent", "views")
OTHER_VALUES = ("graph", "model_sha256")  # what `verify` holds to the model
LIMIT = 60  # seconds of a run, after which it counts as one that hangs


def seal(folder: Path) -> None:
    """Make a build's certificate that of its files as they are."""
    body = json.loads((folder / "certificate.json").read_text())
    body.pop("sha256")
    body["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in body["files"]}
    (folder / "certificate.json").write_bytes(store._certificate(body, store.body_hash(body)))


def places(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document: keys and indices."""
    inner = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def edited(document: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], str]:
    """A copy with one edit, and what that was."""
    out = copy.deepcopy(document)
    part = rng.choice(["program"] * 6 + [k for k in out if k not in OTHER_VALUES])
    found = list(places(out[part])) or [()]
    *path, last = (part, *rng.choice(found))
    holder = out
    for key in path:
        holder = holder[key]
    value = holder[last]
    if isinstance(value, bool) or value is None:
        new: Any = rng.choice([not value, None, 0, 3])
    elif isinstance(value, int):
        new = rng.choice([value + 1, value - 1, value + 1000, -1, 0, 1 << 40, value * 2, None])
    elif isinstance(value, float):
        new = rng.choice([0.0, -value, value * 2, 1e300, None])
    elif isinstance(value, str):
        strings = [v for v in (_at(out, p) for p in places(out["program"])) if isinstance(v, str)]
        new = rng.choice([*rng.sample(strings, min(3, len(strings))), "", value + "x", "\x1b[31m", 7])
    elif isinstance(value, list) and value:
        k, j = rng.randrange(len(value)), rng.randrange(len(value))
        swapped = [*value]
        swapped[k], swapped[j] = swapped[j], swapped[k]
        new = rng.choice([value[:k] + value[k + 1 :], [*value, value[k]], swapped, [], value[k]])
    else:
        new = rng.choice([{}, [], None, 1])
    if rng.random() < 0.1 and isinstance(holder, dict):
        del holder[last]
        return out, f"{[*path, last]} left out"
    holder[last] = new
    return out, f"{[*path, last]}: {str(value)[:60]} is {str(new)[:60]}"


def _at(document: dict[str, Any], path: tuple[Any, ...]) -> Any:
    x: Any = document["program"]
    for key in path:
        x = x[key]
    return x


def outcome(folder: Path, expected: Path | None) -> str:
    """What running a build comes to, in a process of its own: "same", "refused", or what should not be."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(LIMIT)
        os.write(writer, _outcome(folder, expected).encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as f:
        said = f.read().decode()
    _, status = os.waitpid(child, 0)
    return said if status == 0 else f"signal {os.waitstatus_to_exitcode(status)}"


def _outcome(folder: Path, expected: Path | None) -> str:
    try:
        build = tapestry.load(folder)
        outs = build.run(build.random_feeds(3))
        repr(build), build.explain()
        if expected is None:
            np.savez(folder.parent / "expected", **{n: np.asarray(a, np.float64) for n, a in outs.items()})
            return "same"
        with np.load(expected) as before:
            same = set(before) == set(outs) and all(
                np.allclose(before[n], np.asarray(a, np.float64), 1e-4, 1e-5, equal_nan=True) for n, a in outs.items()
            )
        return "same" if same else "other values"
    except (tapestry.TapestryError, MemoryError):
        return "refused"
    except BaseException:
        return traceback.format_exc()


def series(seed: int, count: int, names: tuple[str, ...] = NAMES) -> Iterator[tuple[str, str, str]]:
    """(model, edit, outcome) of each of some edits."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        for k, name in enumerate(names):
            folder = Path(scratch) / name / "build"
            tapestry.compile(str(save(name)), devices=(2, 4, 3)[k % 3], topology="cpu").save(folder)
            expected = folder.parent / "expected.npz"
            assert outcome(folder, None) == "same", name
            text = (folder / "plan.json").read_text()
            for _ in range(count // len(names)):
                document, edit = edited(json.loads(text), rng)
                (folder / "plan.json").write_text(json.dumps(document))
                seal(folder)
                yield name, edit, outcome(folder, expected)


def main() -> int:
    """Print what should not be; the exit status is 1 where there is such a thing."""
    p = argparse.ArgumentParser(prog="python -m tests.fuzz.builds", description=__doc__)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--count", type=int, default=1000)
    p.add_argument("--models", nargs="+", default=NAMES, choices=tuple(MODELS))
    args = p.parse_args()
    tally = Counter[str]()
    for name, edit, came in series(args.seed, args.count, tuple(args.models)):
        tally[came if came in ("same", "refused", "other values") else came.splitlines()[-1][:100]] += 1
        if came not in ("same", "refused"):
            print(f"{name}: {edit}\n{came}", flush=True)
    print(dict(tally))
    return 0 if set(tally) <= {"same", "refused"} else 1


if __name__ == "__main__":
    sys.exit(main())
