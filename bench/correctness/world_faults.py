"""Faults of a run's world: ranks that differ, launchers that are half understood, ports that are open, links that go down.

Each is refused before the first step, with what differs and on which rank, or survived. Those of two hosts need network
namespaces; where they are not permitted, the row says so.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.support.record import Row
from bench.support.sessions import HANG, Run
from tests.support import two_hosts

if TYPE_CHECKING:
    from bench.correctness.faults import Bench

Environment = Mapping[str, str]


def apart(
    b: Bench, kind: str, words: str, argv: Callable[[int], Sequence[object]], env: Callable[[int], Environment], *,
    status: int = 1, together: bool = True,
) -> Row:  # fmt: skip
    """Ranks as a launcher starts them, each with arguments and an environment of its own: all must end with this status, and
    one must say the words."""
    from tapestry import launch

    port, since = two_hosts.free_port(), time.monotonic()
    b.clear()
    runs: list[Run] = []
    for r in range(b.n):
        place = {"RANK": str(r), "WORLD_SIZE": str(b.n)} if together else {}
        given = [str(a) for a in (*argv(r), "--timeout", b.timeout * 4, "-q")]
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if together else {}
        runs.append(b.fork(lambda given=given: launch.main(given), env={**place, **meet, **env(r)}))
    rows = [b.judged(kind, run, since, f"{words}|rank|environment", HANG, status=status) for run in runs]
    told = next((r for r in rows if words in r["said"]), None)
    good = {k: all(r[k] for r in rows) for k in ("gone", "whole", "ok")}
    return {**(told or rows[0]), **good, "named": told is not None, "seconds": max(r["seconds"] for r in rows)}


def version(b: Bench) -> Row:
    """One rank holds another build."""
    guilty = b.rng.randrange(1, b.n)
    row = apart(
        b, "version", f"rank {guilty} has another build than rank 0",
        lambda r: [b.folder / ("other" if r == guilty else "build")], lambda r: {},
    )  # fmt: skip
    return {**row, "ok": row["ok"] and row["named"]}


def differing(b: Bench, kind: str, words: str, argv: Sequence[object], env: Environment | None = None) -> Row:
    """One rank has other arguments or another environment."""
    guilty = b.rng.randrange(1, b.n)
    common: list[object] = [b.folder / "build"] + ([] if "--threads" in argv else ["--threads", 1])
    both = {k: f"{v}, of the others" for k, v in (env or {}).items()} if kind == "other-token" else {}
    row = apart(
        b, kind, f"rank {guilty} has another {words}",
        lambda r: [*common, *(argv if r == guilty else ["--threads", 1] if "--threads" in argv else [])],
        lambda r: (env or {}) if r == guilty else both,
    )  # fmt: skip
    return {**row, "ok": row["ok"] and row["named"]}


def other_inputs(b: Bench) -> Row:
    """The same file name with other numbers in it."""
    guilty, place = b.rng.randrange(1, b.n), b.folder / "elsewhere"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    np.save(place / "x.npy", np.load(b.folder / "x.npy") + np.float32(1e-3))
    row = apart(
        b, "other-inputs", f"rank {guilty} has another input",
        lambda r: [
            b.folder / "build", "--threads", 1,
            "--input", f"x={(place if r == guilty else b.folder) / 'x.npy'}", "--output", b.out,
        ],
        lambda r: {},
    )  # fmt: skip
    return {**row, "ok": row["ok"] and row["named"] and not b.out.exists()}


def slurm(b: Bench) -> Row:
    """SLURM's variables are understood: the run is right."""
    port = str(two_hosts.free_port())
    argv = [b.folder / "build", "--threads", 1, "--input", b.given, "--output", b.out]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SLURM_NTASKS": str(b.n)}
    env = lambda r: {**meet, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}  # noqa: E731
    row = apart(b, "slurm", "", lambda r: argv, env, status=0, together=False)
    return {**row, "ok": row["ok"] and b.done(), "named": True}


def launchers(b: Bench, by: str, env: Environment, words: str) -> Row:
    """Variables of a launcher that say too little: refused, not a world of one."""
    row = apart(b, by, words, lambda r: [b.folder / "build"], lambda r: env, status=2, together=False)
    return {**row, "ok": row["ok"] and row["named"]}


def open_port(b: Bench) -> Row:
    """A run on one host listens on loopback and nowhere else; strangers that knock do not disturb it."""
    run, since = b.start(), time.monotonic()
    pids = b.running(run)
    found = two_hosts.listening([run.pid, *pids])
    row = b.judged("open-port", run, since, "", HANG, status=0)
    return {**row, "ok": row["ok"] and found == {"0100007F"}, "said": f"listens on {sorted(found)}"}


def on_hosts(kind: str, act: Callable[[Bench, two_hosts.Hosts], Row]) -> Callable[[Bench], Row]:
    """A fault in namespaces, or a row that says that there are none."""

    def fault(b: Bench) -> Row:
        b.clear()
        since = time.monotonic()
        try:
            with two_hosts.hosts() as h:
                row = act(b, h)
        except two_hosts.NotPermitted as e:
            row = {"ok": True, "skipped": str(e)}
        plain: Row = {"kind": kind, "seconds": time.monotonic() - since, "status": 0, "named": True, "gone": True, "said": ""}
        return plain | {"whole": b.whole()} | row

    return fault


def _until_they_compute(b: Bench, runs: Sequence[Any]) -> None:
    end = time.monotonic() + HANG
    while not b.mark.exists():
        if time.monotonic() > end or any(p.poll() is not None for p in runs):
            raise TimeoutError(f"the ranks did not start: {[p.communicate() for p in runs if p.poll() is not None]}")
        time.sleep(0.02)


def restart(victim: int) -> Callable[[Bench, two_hosts.Hosts], Row]:
    """A rank on a host is killed; torchrun starts all again, and the results are right."""

    def act(b: Bench, h: two_hosts.Hosts) -> Row:
        argv = (b.folder / "hosts", "--input", b.given, "--output", b.out, "--threads", 1)
        runs = [h.agent(k, 2, *argv, slow=b.mark) for k in range(2)]
        _until_they_compute(b, runs)
        os.kill(h.ranks(victim)[0], signal.SIGKILL)
        said = [p.communicate(timeout=2 * HANG)[1] for p in runs]
        again = len(b.mark.read_text().splitlines()) == 2
        return {
            "ok": b.done() and again and [p.returncode for p in runs] == [0, 0],
            "gone": h.gone(2.0),
            "said": " ".join(said)[-300:],
        }

    return act


def link_down(b: Bench, h: two_hosts.Hosts) -> Row:
    """The link goes down: no process is left the timeout and twelve seconds later, and a rank is named."""
    argv = (b.folder / "hosts", "--input", b.given, "--output", b.out, "--threads", 1)
    runs = [h.rank(k, *argv, "--timeout", b.timeout, slow=b.mark) for k in range(2)]
    _until_they_compute(b, runs)
    h.cut()
    since = time.monotonic()
    left = not h.gone(b.timeout + 12)
    seconds = time.monotonic() - since
    if left:
        return {"ok": False, "gone": False, "seconds": seconds}
    said = " ".join(p.communicate(timeout=5)[1] for p in runs)
    ended = runs[0].returncode == 1 and runs[1].returncode in (1, -signal.SIGKILL)  # both are called alike
    return {"ok": ended, "named": "rank 1" in said, "seconds": seconds, "said": said[:300]}


WORLDS: dict[str, Callable[[Bench], Row]] = {
    "other-inputs": other_inputs,
    "other-seed": lambda b: differing(b, "other-seed", "seed than rank 0", ["--seed", 7]),
    "other-threads": lambda b: differing(b, "other-threads", "threads than rank 0", ["--threads", 2]),
    "other-mode": lambda b: differing(b, "other-mode", "environment (MKL_CBWR)", [], {"MKL_CBWR": "COMPATIBLE"}),
    "other-token": lambda b: differing(b, "other-token", "token", [], {"TAPESTRY_TOKEN": "sixteen characters"}),
    "slurm": slurm,
    "slurm-alone": lambda b: launchers(b, "slurm-alone", {"SLURM_NTASKS": "3"}, "SLURM_PROCID is not set"),
    "openmpi-nowhere": lambda b: launchers(
        b, "openmpi-nowhere", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}, "MASTER_ADDR is not set"
    ),
    "no-token": lambda b: launchers(
        b, "no-token", {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "203.0.113.7", "MASTER_PORT": "9"}, "without a token"
    ),
    "open-port": open_port,
    "restart-host-0": on_hosts("restart-host-0", restart(0)),
    "restart-host-1": on_hosts("restart-host-1", restart(1)),
    "link-down": on_hosts("link-down", link_down),
}
