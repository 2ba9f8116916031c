"""How much the fast tests see: small faults put into `verify/`, `ir/` and `lift/` one at a time, and the share a test finds.

    .venv/bin/python -m bench code_mutants [--seed S] [--count 100] [--rooms verify ir lift] [--minutes M] [--tests PATH …]

First every fast test of `--tests` runs once, and the lines of those rooms that it runs are kept (build/bench). Then `--count`
faults of each room are drawn (`bench.support.mutants`). For each, a fork of the process with all tests loaded puts it in and
runs the tests that reach its line, the quickest first, until one fails. A fault on which time runs out counts as found, one
that no test reaches as not found. What is known stays in build/bench, so that a run that was ended goes on. Writes
bench/results/code_mutants.json: the share found with its 95 % interval (Wilson 1927), and each fault that lived, with the
reason where `REASONS` has one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bench.support import record
from bench.support.mutants import Mutant, functions, install, mutants, sample
from bench.support.record import ROOT

ROOMS = ("verify", "ir", "lift")
TESTS = (
    "tests/verify",
    "tests/ir",
    "tests/lift",
    "tests/sizes/test_sized_laws.py",
    "tests/whole/test_special_values.py",
    "tests/rewrites/attention/test_attention.py",
)
MOST = 6.0  # seconds of tests, as they took without a fault, that are run against one
REASONS: dict[str, str] = {}
"""Why a fault that lived may: what it changes cannot be seen. By path and text of the fault."""

Lines = dict[str, set[int]]


@dataclass(slots=True)
class Runner:
    """A pytest plugin that takes the place of the loop over tests."""

    args: argparse.Namespace
    state: Path
    covered: dict[str, Any] = field(default_factory=dict[str, Any])
    verdicts: dict[str, Any] = field(default_factory=dict[str, Any])
    failed: bool = False
    items: dict[str, pytest.Item] = field(default_factory=dict[str, pytest.Item])

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Coverage first, then the faults, as far as time goes."""
        self.items = {i.nodeid: i for i in session.items}
        known = json.loads(self.state.read_text()) if self.state.exists() else {"covered": {}, "verdicts": {}}
        self.covered, self.verdicts = known["covered"], known["verdicts"]
        end = time.monotonic() + 60 * self.args.minutes
        files: dict[str, list[pytest.Item]] = {}
        for i in session.items:
            files.setdefault(str(i.path.relative_to(ROOT)), []).append(i)
        for name, of_file in files.items():
            if name not in self.covered and time.monotonic() < end:
                self.covered[name] = self.forked(lambda of_file=of_file: traced(self, of_file), 500.0) or {}
                print(f"{name}: {len(self.covered[name])} tests", file=sys.stderr, flush=True)
                self.keep()
        if all(name in self.covered for name in files):
            self.faults(end)
        return True

    def faults(self, end: float) -> None:
        """Judge every fault that was drawn and is not judged yet."""
        tests = {t: row for rows in self.covered.values() for t, row in rows.items() if row["passed"]}
        reach: dict[tuple[str, int], list[str]] = {}
        for t, row in sorted(tests.items(), key=lambda x: x[1]["seconds"]):
            for path, lines in row["lines"].items():
                for line in lines:
                    reach.setdefault((path, line), []).append(t)
        held = functions()
        for m in drawn(self.args):
            if m.key not in self.verdicts:
                if time.monotonic() > end:
                    return
                self.verdicts[m.key] = self.judged(m, reach.get((m.path, m.line), []), tests, held)
                self.keep()
                if not self.verdicts[m.key]["found"]:
                    print(m.key, self.verdicts[m.key], file=sys.stderr, flush=True)

    def judged(self, m: Mutant, reaching: Sequence[str], tests: dict[str, Any], held: Any) -> dict[str, Any]:
        """Which test finds a fault, if one does."""
        chosen: list[str] = []
        total = 0.0
        for t in reaching:
            total += tests[t]["seconds"]
            if total > MOST and chosen:
                break
            chosen.append(t)
        if not chosen:
            return {"found": False, "by": "", "tried": 0, "why": "no test reaches the line"}

        def run() -> Any:
            if not install(m, ROOT, held):
                return {"by": None, "why": "changes no function"}
            for t in chosen:
                self.failed = False
                self.items[t].config.hook.pytest_runtest_protocol(item=self.items[t], nextitem=None)
                if self.failed:
                    return {"by": t}
            return {"by": ""}

        found = self.forked(run, 20 + 5 * total)
        if found is None:
            return {"found": True, "by": "time or a crash", "tried": len(chosen)}
        return {"found": bool(found["by"]), "tried": len(chosen), "of": len(reaching), **found}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure in any phase of a test."""
        self.failed |= report.failed

    def forked(self, work: Any, limit: float) -> Any:
        """What work gives, done in a process of its own; None where it ends otherwise or takes too long."""
        reading, writing = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(reading)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            with os.fdopen(writing, "w") as out:
                json.dump(work(), out)
            os._exit(0)
        os.close(writing)
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
        signal.alarm(int(limit) + 1)
        with os.fdopen(reading) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        signal.alarm(0)
        return json.loads(text) if text else None

    def keep(self) -> None:
        """Write down what is known."""
        self.state.write_text(json.dumps({"covered": self.covered, "verdicts": self.verdicts}))


def traced(r: Runner, items: Sequence[pytest.Item]) -> dict[str, Any]:
    """For each test: whether it passes, its seconds, and the lines of the rooms that it runs."""
    rooms = tuple(str(ROOT / "tapestry" / room) + "/" for room in ROOMS)
    out: dict[str, Any] = {}
    for item, following in zip(items, [*items[1:], None], strict=True):
        seen: Lines = {}

        def local(frame: FrameType, event: str, arg: object, seen: Lines = seen) -> Any:
            seen[frame.f_code.co_filename].add(frame.f_lineno)
            return local

        def call(frame: FrameType, event: str, arg: object, seen: Lines = seen, local: Any = local) -> Any:
            name = frame.f_code.co_filename
            if name.startswith(rooms):
                seen.setdefault(name, set()).add(frame.f_lineno)
                return local
            return None

        r.failed, began = False, time.monotonic()
        sys.settrace(call)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        sys.settrace(None)
        lines = {str(Path(k).relative_to(ROOT)): sorted(v) for k, v in seen.items()}
        out[item.nodeid] = {"passed": not r.failed, "seconds": time.monotonic() - began, "lines": lines}
    return out


def drawn(args: argparse.Namespace) -> list[Mutant]:
    """The faults of a run, room by room in turn."""
    rooms = [
        sample(
            [m for p in sorted((ROOT / "tapestry" / room).rglob("*.py")) for m in mutants(p, ROOT)],
            args.count,
            random.Random(f"{args.seed} {room}"),
        )
        for room in args.rooms
    ]
    return [of[k] for k in range(args.count) for of in rooms if k < len(of)]


def interval(found: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not of:
        return 0.0, 1.0
    z, p = 1.96, found / of
    middle, half = p + z * z / (2 * of), z * (p * (1 - p) / of + z * z / (4 * of * of)) ** 0.5
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def report(args: argparse.Namespace, verdicts: dict[str, Any]) -> int:
    """Print the shares, and record them."""
    rows: list[dict[str, Any]] = []
    for room in args.rooms:
        mine = {m.key: verdicts[m.key] for m in drawn(args) if m.path.startswith(f"tapestry/{room}/") and m.key in verdicts}
        judged = {k: v for k, v in mine.items() if v["by"] is not None}
        lived = [{"fault": k, "why": v.get("why", ""), "reason": reason(k)} for k, v in judged.items() if not v["found"]]
        same = [x for x in lived if x["reason"]]
        count, of = len(judged) - len(lived), len(judged) - len(same)
        low, high = interval(count, of)
        row = {
            "room": room,
            "faults": len(judged),
            "found": count,
            "cannot_be_seen": len(same),
            "share": round(count / max(of, 1), 4),
        }
        rows.append({**row, "interval": [round(low, 4), round(high, 4)], "lived": lived})
        print({k: v for k, v in rows[-1].items() if k != "lived"})
    record.write("code_mutants", rows, seed=args.seed, count=args.count, tests=args.tests)
    return 0


def reason(key: str) -> str:
    """Why a fault cannot be seen; "" where it can."""
    path, _, _, text = key.split(":", 3)
    return REASONS.get(f"{path}:{text}", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="faults of each room")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--tests", nargs="+", default=list(TESTS), metavar="PATH")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many; the next run goes on")
    parser.add_argument("--state", type=Path, default=record.WORK / "mutation.state.json")
    args = parser.parse_args()
    args.state.parent.mkdir(parents=True, exist_ok=True)
    runner = Runner(args, args.state)
    pytest.main(["-p", "no:cacheprovider", "-q", "-s", "--no-header", *args.tests], plugins=[runner])
    return report(args, runner.verdicts)


if __name__ == "__main__":
    sys.exit(main())
