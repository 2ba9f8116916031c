"""Commands that keep a build loaded."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import closing

from tapestry.cli.outcome import Outcome


def serve(args: argparse.Namespace) -> Outcome:
    """``tapestry serve``: load a build once, and answer on a local socket until a signal ends it."""
    from tapestry import flags

    flags.before_torch()
    import torch

    from tapestry.serving.local_socket import Server
    from tapestry.serving.sessions import Session

    if args.threads and not args.processes:
        torch.set_num_threads(args.threads)
    with Session(
        args.build, processes=args.processes, threads=args.threads, queue=args.queue, restart=args.restart,
        timeout=args.timeout, weights=args.weights,
    ) as session, closing(Server(session, args.socket)) as server:  # fmt: skip

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
