"""Faults injected into runs on several processes: every one must end the run with the guilty rank named, and leave nothing
behind.

    .venv/bin/python bench/faults.py [--faults 200] [--processes 3] [--stop-timeout 4] [--seed 0] [--only KIND …]

Kinds: kill (SIGKILL) and stop (SIGSTOP) of a random rank at a random moment; memory (an address-space limit on one rank),
weights (a shard that only one rank reads is damaged), version (one rank holds another build), port (taken), interrupt
(SIGINT or SIGTERM to the launcher), launcher (SIGKILL to the launcher), pause (a rank stopped for less than the timeout:
the run must succeed), and torchrun kills. At the end a stream of 50 batches with 5 kills and --max-restarts must lose and
repeat nothing. Writes bench/results/faults.json; exits 1 if a fault is not handled.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import record
from onnx import TensorProto, helper, numpy_helper
from record import ROOT, WORK, Row

from tapestry import api

HANG = 60.0
FOLDER = WORK / "faults"


def model() -> Path:
    """Layers enough that a batch takes some tens of milliseconds and every step talks."""
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
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


class Bench:
    """A build, its shards, 50 batches, and what is expected of them."""

    def __init__(self, processes: int, timeout: float, seed: int) -> None:
        self.n, self.timeout, self.rng = processes, timeout, random.Random(seed)
        shutil.rmtree(FOLDER, ignore_errors=True)
        path = model()
        for name, extra in (("build", []), ("other", ["--pin", "m0:i=" + f"{processes}@d0"])):
            self.tapestry("compile", path, "-o", FOLDER / name, "--devices", processes, *extra, "-q").check_returncode()
        self.tapestry("shard-weights", FOLDER / "build", "-o", FOLDER / "shards", "-q").check_returncode()
        compiled = api.load(FOLDER / "build")
        (FOLDER / "in").mkdir()
        self.expected: dict[str, dict[str, Any]] = {}
        for k in range(50):
            feeds = compiled.random_feeds(k)
            np.savez(FOLDER / "in" / f"b{k:02}.npz", **feeds)
            self.expected[f"b{k:02}"] = compiled.run(feeds)

    def tapestry(self, *argv: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tapestry.cli", *map(str, argv)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    def start(self, *more: object, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        """A run over the 50 batches."""
        shutil.rmtree(FOLDER / "out", ignore_errors=True)
        command = [
            sys.executable, "-m", "tapestry.cli", "run", FOLDER / "build", "--processes", self.n, "--inputs", FOLDER / "in",
            "--output", FOLDER / "out", "--timeout", self.timeout, "--threads", 1, "-q", *more,
        ]  # fmt: skip
        return self.popen(command, limit=limit)

    def popen(self, command: list[object], **more: Any) -> subprocess.Popen[str]:
        limit = more.pop("limit", None)
        return subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
            **more,
        )

    def ranks(self, launcher: int) -> list[int]:
        """Process ids by rank, once all are there and the first batch is done."""
        end = time.monotonic() + HANG
        while time.monotonic() < end:
            found = children(launcher)
            if len(found) == self.n and any((FOLDER / "out").glob("b*")):
                return found
            time.sleep(0.01)
        raise TimeoutError("the ranks did not start")

    def whole(self) -> bool:
        """Whether every batch folder that is there is complete and right, and nothing else is there."""
        found = [p for p in (FOLDER / "out").iterdir() if p.name != "run.json"] if (FOLDER / "out").is_dir() else []
        return all(p.name.startswith(".") or self.right(p) for p in found)

    def right(self, folder: Path) -> bool:
        return all(np.array_equal(np.load(folder / f"{t}.npy"), a) for t, a in self.expected[folder.name].items())

    def batches(self) -> int:
        return len(list((FOLDER / "out").glob("b*"))) if (FOLDER / "out").is_dir() else 0


def children(pid: int) -> list[int]:
    """Living children, oldest first: forked ranks come in order."""
    try:
        return sorted(int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:
        return []


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        if not any(Path(f"/proc/{p}").exists() and "\nState:\tZ" not in Path(f"/proc/{p}/status").read_text() for p in pids):
            return True
        time.sleep(0.02)
    return False


def finish(run: subprocess.Popen[str], since: float) -> tuple[float, int, str]:
    """(seconds, exit status, standard error); a hang is killed, and told by the status 999."""
    try:
        _, err = run.communicate(timeout=HANG)
    except subprocess.TimeoutExpired:
        pids = children(run.pid)
        for p in [run.pid, *pids]:
            os.kill(p, signal.SIGKILL)
        run.communicate()
        return HANG, 999, "hang"
    return time.monotonic() - since, run.returncode, err


def row(kind: str, b: Bench, pids: list[int], ending: tuple[float, int, str], named: bool, ok: bool) -> Row:
    """What came of one fault: how the launcher ended (seconds, exit status, what it said), and what it left behind."""
    seconds, status, err = ending
    return {
        "kind": kind, "seconds": seconds, "status": status, "named": named, "gone": gone(pids), "whole": b.whole(), "ok": ok,
        "said": err.strip()[:300],
    }  # fmt: skip


def signalled(b: Bench, kind: str, number: signal.Signals, within: float) -> Row:
    """A signal to a rank."""
    run = b.start()
    pids = b.ranks(run.pid)
    guilty = b.rng.randrange(b.n)
    time.sleep(b.rng.random() * 0.4)
    since = time.monotonic()
    os.kill(pids[guilty], number)
    seconds, status, err = finish(run, since)
    named = f"rank {guilty} " in err and bool(re.search(r"at step|between|waiting|done", err)) and "Traceback" not in err
    ok = status == 1 and named and seconds <= within and err.count("tapestry run:") == 1
    return row(kind, b, pids, (seconds, status, err), named, ok)


def kill(b: Bench) -> Row:
    return signalled(b, "kill", signal.SIGKILL, 2.0)


def stop(b: Bench) -> Row:
    return signalled(b, "stop", signal.SIGSTOP, b.timeout)


def pause(b: Bench) -> Row:
    """Stopped for less than the timeout: slow, but no failure."""
    run = b.start()
    pids = b.ranks(run.pid)
    victim, since = b.rng.choice(pids), time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    time.sleep(b.timeout * 0.4)
    os.kill(victim, signal.SIGCONT)
    seconds, status, err = finish(run, since)
    ok = status == 0 and b.batches() == 50
    return row("pause", b, pids, (seconds, status, err), True, ok)


def memory(b: Bench) -> Row:
    """One rank may have no more address space than it has."""
    run = b.start()
    pids = b.ranks(run.pid)
    guilty, since = b.rng.randrange(b.n), time.monotonic()
    used = int(Path(f"/proc/{pids[guilty]}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pids[guilty], resource.RLIMIT_AS, (used // 2, used // 2))
    seconds, status, err = finish(run, since)
    named = f"rank {guilty}" in err and "memory" in err
    return row("memory", b, pids, (seconds, status, err), named, status == 1 and named)


def weights(b: Bench) -> Row:
    """A file of slices that is cut short: the ranks that read it are to blame."""
    guilty = b.rng.randrange(b.n)
    path = FOLDER / "shards" / f"device-{guilty}.safetensors"
    if not path.is_file():
        return weights(b)
    data = path.read_bytes()
    path.write_bytes(data[: b.rng.randrange(len(data) // 2)])
    try:
        since = time.monotonic()
        seconds, status, err = finish(b.start("--weights", FOLDER / "shards"), since)
    finally:
        path.write_bytes(data)
    named = bool(re.search(r"rank \d", err)) and path.name in err
    return {
        "kind": "weights",
        "seconds": seconds,
        "status": status,
        "named": named,
        "gone": True,
        "whole": b.batches() == 0,
        "ok": status == 1 and named,
        "said": err[:300],
    }


def by_hand(b: Bench, builds: list[Path], port: int) -> list[subprocess.Popen[str]]:
    """Ranks as torchrun starts them."""
    out = []
    for r, folder in enumerate(builds):
        env = os.environ | {
            "RANK": str(r),
            "WORLD_SIZE": str(len(builds)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-m", "tapestry.runtime", folder, "--timeout", b.timeout * 4, "-q"]
        out.append(b.popen(command, env=env))
    return out


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def version(b: Bench) -> Row:
    """One rank holds another build."""
    guilty = b.rng.randrange(1, b.n)
    builds = [FOLDER / ("other" if r == guilty else "build") for r in range(b.n)]
    since = time.monotonic()
    runs = by_hand(b, builds, free_port())
    ended = [finish(r, since) for r in runs]
    err = "\n".join(e for _, _, e in ended)
    named = f"rank {guilty} has another build than rank 0" in err
    status = max(s for _, s, _ in ended)
    ok = named and all(s == 1 for _, s, _ in ended)
    return {
        "kind": "version",
        "seconds": max(t for t, _, _ in ended),
        "status": status,
        "named": named,
        "gone": True,
        "whole": True,
        "ok": ok,
        "said": err[:300],
    }


def port(b: Bench) -> Row:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken, since = int(s.getsockname()[1]), time.monotonic()
        seconds, status, err = finish(b.start("--port", taken), since)
    named = f"port {taken} is taken" in err
    return {
        "kind": "port",
        "seconds": seconds,
        "status": status,
        "named": named,
        "gone": True,
        "whole": b.batches() == 0,
        "ok": status == 1 and named,
        "said": err[:300],
    }


def interrupt(b: Bench) -> Row:
    run = b.start()
    pids = b.ranks(run.pid)
    time.sleep(b.rng.random() * 0.4)
    since = time.monotonic()
    run.send_signal(b.rng.choice([signal.SIGINT, signal.SIGTERM]))
    seconds, status, err = finish(run, since)
    named = "interrupted by SIG" in err
    return row("interrupt", b, pids, (seconds, status, err), named, status == 1 and named)


def launcher(b: Bench) -> Row:
    """The launcher itself is killed: nobody is left to tell, but no rank may stay."""
    run = b.start()
    pids = b.ranks(run.pid)
    since = time.monotonic()
    run.kill()
    run.communicate()
    left = gone(pids)
    return {
        "kind": "launcher",
        "seconds": time.monotonic() - since,
        "status": run.returncode,
        "named": True,
        "gone": left,
        "whole": b.whole(),
        "ok": left,
        "said": "",
    }


def stream(b: Bench, kills: int = 5) -> Row:
    """50 batches, 5 kills: every batch is there once, with the right result."""
    run = b.start("--max-restarts", kills)
    since, times = time.monotonic(), []
    for k in range(kills):
        while b.batches() < (k + 1) * 50 // (kills + 2) and run.poll() is None:
            time.sleep(0.005)
        pids = children(run.pid)
        if run.poll() is None and pids:
            os.kill(b.rng.choice(pids), signal.SIGKILL)
        times.append({p.name: p.stat().st_mtime_ns for p in (FOLDER / "out").glob("b*")})
        while set(children(run.pid)) & set(pids) and run.poll() is None:
            time.sleep(0.005)
    seconds, status, err = finish(run, since)
    last = {p.name: p.stat().st_mtime_ns for p in (FOLDER / "out").glob("b*")}
    repeated = sum(last.get(n) != t for seen in times for n, t in seen.items())
    ok = status == 0 and b.batches() == 50 and b.whole() and repeated == 0 and err.count("starting again") == kills
    return {
        "kind": "stream",
        "seconds": seconds,
        "status": status,
        "named": err.count("rank ") >= kills,
        "gone": True,
        "whole": b.whole(),
        "ok": ok,
        "said": err[:900],
    }


KINDS = {f.__name__: f for f in (kill, stop, memory, weights, version, port, interrupt, launcher, pause)}
SHARE = {
    "kill": 0.45,
    "stop": 0.15,
    "memory": 0.08,
    "weights": 0.08,
    "version": 0.04,
    "port": 0.04,
    "interrupt": 0.08,
    "launcher": 0.04,
    "pause": 0.04,
}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--stop-timeout", type=float, default=4.0, help="the --timeout of the runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no fault after so long")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    b = Bench(args.processes, args.stop_timeout, args.seed)
    kinds = [k for k in args.only for _ in range(max(1, round(args.faults * SHARE[k])))]
    b.rng.shuffle(kinds)
    rows, end = [], time.monotonic() + args.seconds
    for kind in kinds:
        if time.monotonic() > end:
            break
        rows.append(KINDS[kind](b))
        if not (rows[-1]["ok"] and rows[-1]["gone"] and rows[-1]["whole"]):
            print(f"NOT HANDLED: {rows[-1]}", file=sys.stderr, flush=True)
    rows.append(stream(b))
    for kind in dict.fromkeys(r["kind"] for r in rows):
        mine = [r for r in rows if r["kind"] == kind]
        times = sorted(r["seconds"] for r in mine)
        good = sum(bool(r["ok"] and r["gone"] and r["whole"]) for r in mine)
        print(
            f"{kind:10} {len(mine):4} faults, {good:4} handled, median {times[len(times) // 2]:.2f} s, most {times[-1]:.2f} s"
        )
    bad = [r for r in rows if not (r["ok"] and r["gone"] and r["whole"])]
    hangs = sum(r["status"] == 999 for r in rows)
    print(f"{len(rows)} in all, {hangs} hangs, {sum(not r['gone'] for r in rows)} with orphans, {len(bad)} not handled")
    record.write("faults", rows, processes=args.processes, timeout=args.stop_timeout)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
