"""Faults injected into runs on several processes: every one must end the run with the guilty rank named, and leave nothing
behind.

    .venv/bin/python -m bench faults [--count 200] [--jobs 2] [--processes 3] [--stop-timeout 6] [--seed 0] [--only KIND …]

Kinds (see `FAULTS`): a random rank is killed, stopped, starved of memory, made slow, made to send something else, unable to
write its results, or of another build; the port is taken; the launcher is interrupted or killed; a rank is stopped for less
than the timeout, which the run must survive. At the end each fault of a run's world (`world_faults`) is tried once: other
inputs, seed, threads or token on one rank, half a launcher's variables, open ports, a kill and a link down between two hosts.
The moment is random, within the run, whose steps are made to take some time (`slow_ranks`). A fault is handled if the run ended
in time (a kill: 2 s; all others: the timeout and 2 s) with exit status 1, one message that names the rank (or the launcher, the
port) and where it was, no process of its session is left, and no result is half-written. ``--only`` tries the share of the
count that some kinds have; rows of the others stay. Launchers are forks of a process that has imported torch, so that a fault
costs no two seconds of imports. Writes bench/results/faults.json; exits 1 if a fault is not handled.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bench.correctness.world_faults import WORLDS, version
from bench.support import record
from bench.support.record import ROOT, WORK, Row
from bench.support.sessions import HANG, Run, children, gone
from tapestry import flags
from tests.support.programs.slow_ranks import slow_down

STEP = 0.1  # seconds that a step takes at least
FOLDER = WORK / "faults"
Patch = Callable[[], None]


def model(path: Path) -> None:
    """Layers enough that a run of slow steps takes some seconds and every step talks."""
    rng, n, layers = np.random.default_rng(0), 768, 12
    nodes, weights = [], []
    last = "x"
    for k in range(layers):
        w = (rng.standard_normal((n, n)) / n**0.5).astype(np.float32)
        weights.append(numpy_helper.from_array(w, f"w{k}"))
        nodes += [
            helper.make_node("MatMul", [last, f"w{k}"], [f"m{k}"]),
            helper.make_node("Softmax", [f"m{k}"], [f"s{k}"], axis=0),
        ]
        last = f"s{k}"
    info = [helper.make_tensor_value_info(last if k else "x", TensorProto.FLOAT, [96, n]) for k in range(2)]
    graph = helper.make_graph(nodes, "faults", info[:1], info[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


def prepare(folder: Path, processes: int) -> None:
    """Builds, an input and what is expected of it; in a process of its own, because it computes."""
    import torch

    from tapestry import api, cli

    torch.set_num_threads(1)  # as the ranks have: kernels round by the number of threads
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model(folder / "model.onnx")
    for name, extra in (("build", []), ("other", ["--pin", f"m0:i={processes}@d0"]), ("hosts", ["--devices", 2])):
        made = ["compile", folder / "model.onnx", "-o", folder / name, "--devices", processes, *extra, "-q"]
        assert cli.main(list(map(str, made))) == 0
    compiled = api.load(folder / "build")
    feeds = compiled.random_feeds(0)
    np.save(folder / "x.npy", feeds["x"])
    np.savez(folder / "expected.npz", **compiled.run(feeds))


class Bench:
    """One folder of builds, and how to run and judge in it."""

    def __init__(self, folder: Path, processes: int, timeout: float, rng: random.Random) -> None:
        self.folder, self.n, self.timeout, self.rng = folder, processes, timeout, rng
        self.given, self.out, self.mark = f"x={folder / 'x.npy'}", folder / "out", folder / "mark"
        with np.load(folder / "expected.npz") as found:
            self.expected: dict[str, Any] = dict(found)

    def fork(self, main: Callable[[], int], patch: Patch | None = None, env: dict[str, str] | None = None) -> Run:
        """A fork that leads a session of its own."""
        said = Path(tempfile.mkstemp(prefix="said-", dir=self.folder)[1])
        pid = os.fork()
        if pid:
            return Run(pid, said)
        code = 70
        try:
            os.setsid()
            file = os.open(said, os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ.update(env or {})
            if patch:
                patch()
            code = main()
        except SystemExit as e:
            code = int(e.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def start(self, *more: object, patch: Patch | None = None, env: dict[str, str] | None = None) -> Run:
        """A run with slow steps."""
        from tapestry import cli

        self.clear()
        argv = [
            "run", self.folder / "build", "--processes", self.n, "--input", self.given, "--output", self.out,
            "--timeout", self.timeout, "--threads", 1, "-q", *more,
        ]  # fmt: skip

        def patched() -> None:
            if patch:
                patch()
            slow_down(self.mark, STEP)

        return self.fork(lambda: cli.main(list(map(str, argv))), patched, env)

    def clear(self) -> None:
        """Nothing is left of an earlier run."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.mark.unlink(missing_ok=True)

    def running(self, run: Run) -> list[int]:
        """Process ids by rank, at a random moment once they compute."""
        end = time.monotonic() + HANG
        while time.monotonic() < end and run.poll() is None:
            found = children(run.pid)
            if len(found) == self.n and self.mark.exists():
                time.sleep(self.rng.random() * 0.3)
                return found
            time.sleep(0.005)
        raise TimeoutError(f"the ranks did not start: {run.said.read_text()}")

    def whole(self) -> bool:
        """Whether every result that is there is complete and right: as in one process, but for the order in which floats of
        more than two devices are added."""
        pairs = ((np.load(p), self.expected[p.stem]) for p in self.out.glob("[!.]*.npy"))
        return all(x.dtype == a.dtype and x.shape == a.shape and np.allclose(x, a, rtol=1e-4, atol=1e-5) for x, a in pairs)

    def done(self) -> bool:
        """Whether all results are there, and right."""
        return {p.stem for p in self.out.glob("[!.]*.npy")} == set(self.expected) and self.whole()

    def judged(self, kind: str, run: Run, since: float, words: str, within: float, status: int = 1) -> Row:
        """What came of a fault: how the run ended, whether the words (a regular expression) were said, and what was left."""
        seconds, code, said = run.finish(since)
        named = bool(re.search(words, said)) and "Traceback" not in said
        once = status != 1 or said.count("tapestry run:") == 1 or said.count("tapestry.runtime: ") == 1
        row: Row = {"kind": kind, "seconds": round(seconds, 3), "status": code, "named": named, "gone": gone(run.pid)}
        row |= {
            "whole": self.whole(),
            "ok": code == status and named and once and seconds <= within,
            "said": said.strip()[:300],
        }
        run.said.unlink(missing_ok=True)
        return row


WHERE = r"(at step|between|waiting|done|computing|starting|reading)"


def signalled(b: Bench, kind: str, number: signal.Signals, within: float) -> Row:
    """A signal to a rank."""
    run = b.start()
    pids, guilty = b.running(run), b.rng.randrange(b.n)
    since = time.monotonic()
    os.kill(pids[guilty], number)
    return b.judged(kind, run, since, rf"rank {guilty} (was killed|is stopped).*{WHERE}", within)


def kill(b: Bench) -> Row:
    return signalled(b, "kill", signal.SIGKILL, 2.0)


def abort(b: Bench) -> Row:
    """What a crash in a library looks like."""
    return signalled(b, "abort", b.rng.choice([signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS]), 2.0)


def stop(b: Bench) -> Row:
    return signalled(b, "stop", signal.SIGSTOP, b.timeout + 2)


def pause(b: Bench) -> Row:
    """Stopped for less than the timeout: late, but no failure."""
    run = b.start()
    victim, since = b.rng.choice(b.running(run)), time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    time.sleep(b.timeout * 0.3)
    os.kill(victim, signal.SIGCONT)
    row = b.judged("pause", run, since, "", HANG, status=0)
    return row | {"ok": row["ok"] and b.done()}


def memory(b: Bench) -> Row:
    """One rank may have no more address space than half of what it has: it says so, or asks for no more to the end."""
    run = b.start()
    pids, guilty = b.running(run), b.rng.randrange(b.n)
    since = time.monotonic()
    used = int(Path(f"/proc/{pids[guilty]}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pids[guilty], resource.RLIMIT_AS, (used // 2, used // 2))
    row = b.judged("memory", run, since, rf"rank {guilty}.*memory", b.timeout + 2)
    return row | {"ok": row["ok"] or (row["status"] == 0 and b.done())}


def in_rank(guilty: int, step: int, act: Callable[[Any], None]) -> Patch:
    """For the launcher, whose ranks are forks of it: the guilty one acts when it comes to a step."""

    def patch() -> None:
        from tapestry.runtime.processes.distributed import RankExecutor

        before = RankExecutor.step

        def do(self: Any, at: int) -> None:
            if self.wire.rank == guilty and at >= step:
                act(self)
            before(self, at)

        RankExecutor.step = do  # type: ignore[method-assign]

    return patch


def slow(b: Bench) -> Row:
    """A rank that computes and computes: it is not stopped, but it makes no progress."""
    guilty, step = b.rng.randrange(b.n), b.rng.randrange(30)
    run = b.start(patch=in_rank(guilty, step, lambda machine: time.sleep(HANG)))
    b.running(run)
    return b.judged("slow", run, time.monotonic(), rf"rank {guilty} is slow.*{WHERE}", b.timeout + 4)


def error(b: Bench) -> Row:
    """A rank whose kernel raises."""

    def act(machine: Any) -> None:
        raise ValueError("injected")

    guilty, step = b.rng.randrange(b.n), b.rng.randrange(30)
    run = b.start(patch=in_rank(guilty, step, act))
    return b.judged("error", run, time.monotonic(), rf"rank {guilty}: .*injected", HANG)


def message(b: Bench) -> Row:
    """A rank that sends messages of another batch, where messages are checked."""

    def act(machine: Any) -> None:
        machine.wire.batch += 1000

    guilty, step = b.rng.randrange(b.n), b.rng.randrange(30)
    run = b.start(patch=in_rank(guilty, step, act), env={"TAPESTRY_CHECK_MESSAGES": "1"})
    return b.judged(
        "message", run, time.monotonic(), rf"rank {guilty} sent a message that the plan has not|rank {guilty}", HANG
    )


def disk(b: Bench) -> Row:
    """Rank 0 may write no file of more than some bytes: its results do not get in."""
    run = b.start()
    pids, since = b.running(run), time.monotonic()
    resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (1000, 1000))
    return b.judged("disk", run, since, r"rank 0: .*(File too large|cannot write|writt?e)|rank 0 was killed by SIGXFSZ", HANG)


def inputs(b: Bench) -> Row:
    """An input that does not read: no rank is started."""
    path = b.folder / "x.npy"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3])
    since = time.monotonic()
    try:
        return b.judged("inputs", b.start(), since, rf"{path.name}: not an array", HANG, status=2)
    finally:
        path.write_bytes(data)


def port(b: Bench) -> Row:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken, since = int(s.getsockname()[1]), time.monotonic()
        return b.judged("port", b.start("--port", taken), since, f"port {taken} is taken", HANG)


def interrupt(b: Bench) -> Row:
    run = b.start()
    b.running(run)
    since = time.monotonic()
    os.kill(run.pid, b.rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
    return b.judged("interrupt", run, since, "interrupted by SIG", 2.0, status=130)


def launcher(b: Bench) -> Row:
    """The launcher itself is killed: nobody is left to tell, but no rank may stay."""
    run = b.start()
    b.running(run)
    since = time.monotonic()
    os.kill(run.pid, signal.SIGKILL)
    row = b.judged("launcher", run, since, "", 2.0, status=-signal.SIGKILL)
    return row | {"ok": row["gone"]}


FAULTS: dict[str, tuple[Callable[[Bench], Row], float]] = {
    "kill": (kill, 0.28), "abort": (abort, 0.08), "stop": (stop, 0.12), "memory": (memory, 0.06), "slow": (slow, 0.08),
    "error": (error, 0.04), "message": (message, 0.05), "disk": (disk, 0.03),
    "inputs": (inputs, 0.02), "version": (version, 0.03), "port": (port, 0.03), "interrupt": (interrupt, 0.06),
    "launcher": (launcher, 0.03), "pause": (pause, 0.03),
}  # fmt: skip

ONCE: dict[str, Callable[[Bench], Row]] = WORLDS


def job(number: int, kinds: list[str], args: argparse.Namespace, pipe: Any) -> None:
    """One worker: its own folder, one fault after another."""
    folder = FOLDER / f"job{number}"
    command = [sys.executable, "-m", "bench", "faults", "--prepare", str(folder), "--processes", str(args.processes)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    b = Bench(folder, args.processes, args.stop_timeout, random.Random(f"{args.seed} {number}"))
    for kind in kinds:
        try:
            row = (ONCE[kind] if kind in ONCE else FAULTS[kind][0])(b)
        except TimeoutError as e:
            row = {"kind": kind, "seconds": HANG, "status": 999, "named": False, "gone": True, "whole": True, "ok": False}
            row["said"] = str(e)[:300]
        pipe.send(row)
    pipe.close()


def good(row: Row) -> bool:
    return bool(row["ok"] and row["gone"] and row["whole"])


def table(rows: list[Row]) -> None:
    """By kind, and in all."""
    for kind in dict.fromkeys(r["kind"] for r in rows):
        mine = [r for r in rows if r["kind"] == kind]
        times = sorted(r["seconds"] for r in mine)
        counts = f"{len(mine):4} faults, {sum(map(good, mine)):4} handled"
        print(f"{kind:10} {counts}, median {times[len(times) // 2]:.2f} s, most {times[-1]:.2f} s")
    hangs, orphans = sum(r["status"] == 999 for r in rows), sum(not r["gone"] for r in rows)
    unnamed, bad = sum(not r["named"] for r in rows), sum(not good(r) for r in rows)
    print(f"{len(rows)} in all: {hangs} hangs, {orphans} with orphans, {unnamed} without the guilty named, {bad} not handled")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--stop-timeout", type=float, default=6.0, help="the --timeout of the runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=[*FAULTS, *ONCE], default=[*FAULTS, *ONCE])
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare:
        prepare(args.prepare, args.processes)
        return 0
    flags.before_torch()
    import tapestry.codegen.torch_cpu.kernels
    import tapestry.runtime.processes.supervisor  # noqa: F401  (forks find everything imported)

    often = [k for k in args.only if k in FAULTS]
    total = sum(share for _, share in FAULTS.values())
    kinds = [k for k in often for _ in range(max(1, round(args.count * FAULTS[k][1] / total)))]
    random.Random(args.seed).shuffle(kinds)
    kinds += [k for k in args.only if k in ONCE]
    context, pipes = multiprocessing.get_context("fork"), []
    for n in range(args.jobs):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=job, args=(n, kinds[n :: args.jobs], args, theirs)).start()
        theirs.close()
        pipes.append(ours)
    rows: list[Row] = []
    while pipes:
        for pipe in multiprocessing.connection.wait(pipes):
            try:
                rows.append(pipe.recv())  # type: ignore[union-attr]
            except EOFError:
                pipes.remove(pipe)  # type: ignore[arg-type]
                continue
            if not good(rows[-1]):
                print(f"NOT HANDLED: {rows[-1]}", file=sys.stderr, flush=True)
    table(rows)
    more = {"processes": args.processes, "timeout": args.stop_timeout, "jobs": args.jobs, "load": os.getloadavg()[0]}
    record.write("faults", [*(r for r in record.read("faults") if r["kind"] not in args.only), *rows], **more)
    return 0 if all(map(good, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
