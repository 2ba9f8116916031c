"""Commands that keep a build loaded."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from tapestry.cli.outcome import Outcome
from tapestry.errors import TapestryError


def _session(args: argparse.Namespace, queue: int = 0) -> Any:
    """The session that a command line asks for."""
    from tapestry import flags

    flags.before_torch()
    import torch

    from tapestry.tools.serving.sessions import Session

    if args.threads and not args.processes:
        torch.set_num_threads(args.threads)
    return Session(
        [args.build, *args.also], processes=args.processes, threads=args.threads, queue=queue, restart=args.restart,
        timeout=args.timeout,
    )  # fmt: skip


def serve(args: argparse.Namespace) -> Outcome:
    """``tapestry serve``: load a build once, and answer on a local socket until a signal ends it."""
    from tapestry.tools.serving.local_socket import Server

    with _session(args, args.queue) as session, closing(Server(session, args.socket)) as server:

        def end(number: int, frame: object) -> None:
            del number, frame
            server.close()

        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, end)
        if not args.quiet:
            print(f"serving {args.build} at {args.socket}", file=sys.stderr, flush=True)
        server.serve()
        done = {"answered": server.answered, "restarts": session.restarts}
    document = {"build": str(args.build), "socket": str(args.socket), **done}
    return Outcome(document, lambda: print(f"{document['answered']} requests answered"))


def generate(args: argparse.Namespace) -> Outcome:
    """``tapestry generate``: tokens behind prompts."""
    import numpy as np

    from tapestry.build import store
    from tapestry.build.store import new_file
    from tapestry.tools.serving.generation import Seeded

    store.check_beside(args.build, args.output)
    ids, mask = _integers(args.tokens), None if args.mask is None else _integers(args.mask)
    if mask is not None and mask.shape != ids.shape:
        raise TapestryError(f"{list(mask.shape)} where the tokens are {list(ids.shape)}", where=str(args.mask))
    sampler = "greedy" if args.sampler == "greedy" else Seeded(args.seed, args.temperature, args.top_k)
    with _session(args) as session:
        began = time.perf_counter()
        new = session.generate(ids, args.max_new, sampler=sampler, mask=mask, stop=args.stop)
        document = {"tokens": new.tolist(), "seconds": time.perf_counter() - began, "restarts": session.restarts}
    if args.output is not None:
        place = args.output if args.output.suffix == ".npy" else args.output.with_name(f"{args.output.name}.npy")
        with new_file(place) as temporary:
            np.save(temporary, new, allow_pickle=False)
    text = "\n".join(" ".join(map(str, row)) for row in new.tolist())
    return Outcome(document, lambda: print(text))


def _integers(path: Path) -> Any:
    """An array of integers [rows, tokens] from a file.

    Raises:
        TapestryError: it is none.
    """
    from tapestry.runtime.processes.weight_shards import load

    array = load(path)
    if array.ndim != 2 or array.dtype.kind not in "iub":
        raise TapestryError(f"{array.dtype}{list(array.shape)}, not integers [rows, tokens]", where=str(path))
    return array
