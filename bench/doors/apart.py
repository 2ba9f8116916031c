"""Cases that each run in a process of their own, with a time and a memory limit, so that none takes the others down."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.support.record import ROOT, Row

MEMORY = 16 << 30  # bytes of address space of a case


def measured(bench: str, case: Row, limit: float) -> Row:
    """What ``python -m bench BENCH --worker CASE`` prints last, as JSON; or why it prints nothing."""
    command = [sys.executable, "-m", "bench", bench, "--worker", json.dumps(case)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = run.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        return {"failed": "time", "error": f"not done after {limit:g} s"}
    lines = out.strip().splitlines()
    if run.returncode or not lines:
        last = (err.strip().splitlines() or ["nothing said"])[-1]
        return {"failed": "crash", "error": f"exit status {run.returncode}: {last[-300:]}"}
    return json.loads(lines[-1])


def answer(work: Callable[[Row], Row], case: str) -> int:
    """Do a case in this process, and print what it gives, or how it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    row: Row = {}
    try:
        row = work(json.loads(case))
    except Exception as e:
        row = failure(e)
    print("\n" + json.dumps(row))
    return 0


def failure(e: Exception) -> Row:
    """How a case ended: ``refused`` with a message of ours, or a ``traceback``; and the last frame of the package in it."""
    from tapestry import TapestryError

    frames = [f for f in traceback.extract_tb(e.__traceback__) if str(ROOT / "tapestry") in f.filename]
    at = f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
    refused = isinstance(e, TapestryError)
    text = str(e).strip() or type(e).__name__
    more: dict[str, Any] = (
        {"message": text[:1500]} if refused else {"traceback": "".join(traceback.format_exception(e))[-2500:]}
    )
    kind = "refused" if refused else "traceback" if frames else "made by others"
    return {"failed": kind, "error": " ".join(text.splitlines()[0].split())[:300], "type": type(e).__name__, "at": at, **more}
