"""Sessions: tokens beside onnxruntime's own loop, what a step costs beside its, and whether anything grows in 10,000 steps.

    .venv/bin/python -m bench session [--only tokens|continuous|cost|steady|pictures] [--models NAME …] [--processes N …]

The models are exports of the shared folder, given caches (`bench/exporters/cached_exports`). Tokens are compared with
onnxruntime's greedy loop over the same cached export, its caches bound as its own values (IO binding); both take prompts of 16
random tokens. Cost is processor time for each token, one thread, both in this process and in turns, while the last of a cache
of so many cells fills. Steady runs two ranks.
Continuous: prompts of 1 to 40 tokens, three times as many as there are rows, each compared with its own loop, and how many
steps that takes beside as many rows that begin and end together.
Writes bench/results/session.json, a row per case, and pictures of cost by length (session_cost.svg) and of memory by steps
(session_memory.svg); exits 1 where tokens differ.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.correctness.models import materialize
from bench.exporters import cached_exports
from bench.support import record
from bench.support.curves import svg
from bench.support.record import ROOT, WORK, Row

MODELS = ("llama_tiny", "qwen3_tiny", "gpt2")
PROMPT, CHUNK = 16, 16
NEW = 64  # tokens that are measured
VOCABULARY = 1000  # of prompts: every model has so many tokens
LONGEST = {"gpt2": 1024}  # places that a model has
TOKENS = {"llama_tiny": 512, "qwen3_tiny": 512, "gpt2": 64}


def export(name: str) -> Path:
    """The export with caches."""
    folder = WORK / "session"
    path = folder / f"{name}_cached.onnx"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        source = materialize(name, folder)
        assert source is not None, "the shared folder of exports is not there"
        cached_exports.write(source, path)
    return path


def builds(name: str, devices: int, batch: int, capacity: int, parts: Sequence[int] = (CHUNK, 1)) -> list[Path]:
    """Builds for parts of a prompt and for one token, compiled once; written beside the export."""
    import tapestry

    out: list[Path] = []
    for new in parts:
        folder = WORK / "session" / f"{name}-d{devices}-b{batch}-c{capacity}-s{new}"
        if not folder.is_dir():
            sizes = {"batch": batch, "sequence": new, "past_sequence": capacity, "total_sequence": capacity + new}
            tapestry.compile(export(name), devices=devices, topology="cpu", shapes=sizes, state="auto").save(folder)
        out.append(folder)
    return out


class Theirs:
    """onnxruntime's loop; what a step gives is bound as what the next one takes."""

    def __init__(self, path: Path, batch: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.ort, self.batch = ort, batch
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.names = [o.name for o in self.session.get_outputs()]
        self.empty = {
            i.name: (batch, i.shape[1], 0, i.shape[3]) for i in self.session.get_inputs() if i.name.startswith("past")
        }

    def generate(self, ids: Any, count: int) -> Any:
        """Greedy tokens [batch, count]."""
        import numpy as np

        past = {n: self.ort.OrtValue.ortvalue_from_numpy(np.zeros(s, np.float32)) for n, s in self.empty.items()}
        out, at, new = np.zeros((self.batch, count), np.int64), 0, ids
        self.stamps: list[float] = []
        for k in range(count):
            binding, size = self.session.io_binding(), new.shape[1]
            binding.bind_cpu_input("input_ids", new)
            binding.bind_cpu_input("attention_mask", np.ones((self.batch, at + size), np.int64))
            binding.bind_cpu_input("position_ids", np.tile(np.arange(at, at + size), (self.batch, 1)))
            for n, value in past.items():
                binding.bind_ortvalue_input(n, value)
            for n in self.names:
                binding.bind_output(n, "cpu")
            self.session.run_with_iobinding(binding)
            found = dict(zip(self.names, binding.get_outputs(), strict=True))
            past = {n: found[n.replace("past_key_values", "present")] for n in past}
            scores = found[self.names[0]].numpy()
            self.stamps.append(time.process_time())
            out[:, k] = scores[:, -1].argmax(axis=1)
            at, new = at + size, np.ascontiguousarray(out[:, k : k + 1])
        return out


def prompts(batch: int, length: int = PROMPT) -> Any:
    """Random tokens."""
    import numpy as np

    return np.random.default_rng(7).integers(0, VOCABULARY, (batch, length))


def tokens(name: str, processes: int) -> Row:
    """Whether greedy tokens are onnxruntime's."""
    import numpy as np

    import tapestry

    count = TOKENS[name]
    given = builds(name, processes, 1, PROMPT + count)
    expected = Theirs(export(name), 1).generate(prompts(1), count)
    with tapestry.Session(given, processes=processes, threads=1) as s:
        began = time.perf_counter()
        found = s.generate(prompts(1), count)
        seconds = time.perf_counter() - began
    same = found == expected
    first = None if same.all() else int(np.argmin(same.all(axis=0)))
    return {
        "case": "tokens", "model": name, "processes": processes, "tokens": count, "equal": first is None, "first_other": first,
        "distinct": len(set(found[0].tolist())), "seconds": seconds,
    }  # fmt: skip


def continuous(name: str, processes: int, batch: int = 4, count: int = 24) -> Row:
    """Greedy tokens of more prompts than there are rows, of which a third wants as many as there may be and the others few."""
    import numpy as np

    import tapestry

    rng = np.random.default_rng(8)
    given = [rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 41, 3 * batch)]
    loop = Theirs(export(name), 1)
    expected = np.concatenate([loop.generate(np.array([p]), count) for p in given])
    stop = int(np.bincount(expected[:, count // 4 :].ravel()).argmax())
    for row in expected:
        ends = np.flatnonzero(row == stop)
        row[ends[0] if len(ends) else count :] = stop
    steps: list[int] = []
    with tapestry.Session(builds(name, processes, batch, 64), processes=processes, threads=1) as s:
        step = s._step

        def counted(*args: Any) -> Any:
            steps.append(1)
            return step(*args)

        s._step = counted  # type: ignore[method-assign]
        found = s.generate(given, count, stop=stop)
        taken = len(steps)
        for k in range(0, len(given), batch):
            s.generate(given[k : k + batch], count, stop=stop)
    return {
        "case": "continuous", "model": name, "processes": processes, "batch": batch, "prompts": len(given), "tokens": count,
        "equal": bool((found == expected).all()), "steps": taken, "steps_together": len(steps) - taken,
    }  # fmt: skip


def cost(name: str, batch: int, capacity: int) -> Row:
    """Processor time for a token, ours and theirs in turns: the median of the last ones that the cache has a place for."""
    import numpy as np
    import torch

    import tapestry
    from tapestry.tools.serving.generation import Seeded, greedy

    torch.set_num_threads(1)
    theirs, ids = Theirs(export(name), batch), prompts(batch, capacity - NEW)
    stamps: list[float] = []

    class Noted(Seeded):
        """Greedy, and the processor's clock at each token."""

        def sampler(self, number: int) -> Callable[[Any], int]:
            if number:
                return greedy
            stamps.clear()
            return lambda scores: (stamps.append(time.process_time()), greedy(scores))[1]

    pairs: list[tuple[float, float]] = []
    with tapestry.Session(builds(name, 1, batch, capacity, (1,))) as s:
        for _ in range(3):
            found, expected = s.generate(ids, NEW, sampler=Noted()), theirs.generate(ids, NEW)
            pairs.append((float(np.median(np.diff(stamps))), float(np.median(np.diff(theirs.stamps)))))
    ours, other = (sorted(p[k] for p in pairs)[len(pairs) // 2] for k in (0, 1))
    ratios = sorted(a / b for a, b in pairs)
    return {"case": "cost", "model": name, "batch": batch, "capacity": capacity, "tokens": NEW, "ours_cpu_s": ours,
            "onnxruntime_cpu_s": other, "ratio": ours / other, "ratio_spread": [ratios[0], ratios[-1]],
            "equal": bool((found == expected).all())}  # fmt: skip


def steady(steps: int = 10_000) -> Row:
    """Memory and descriptors of two ranks and of this process, at eleven points of many steps of a small decoder."""
    import numpy as np

    import tapestry
    from tests.support.attention import cached_decoder

    capacity, path = 48, WORK / "session" / "small.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cached_decoder.decoder().SerializeToString())
    plan = tapestry.compile(path, devices=2, topology="cpu", shapes=cached_decoder.sizes(1, 1, capacity), state="auto")
    with tapestry.Session(plan, processes=2, threads=1) as s:
        pids = {"caller": os.getpid(), **{f"rank {r}": p for r, p in enumerate(s._engine.pids)}}  # type: ignore[union-attr]
        points: dict[str, list[list[int]]] = {who: [] for who in pids}
        began = time.perf_counter()
        for step in range(steps + 1):
            at = step % capacity
            mask = np.ones((1, capacity + 1), np.int64)
            s.run(
                {
                    "input_ids": np.array([[step % cached_decoder.VOCABULARY]]),
                    "attention_mask": mask,
                    "position_ids": np.array([[at]]),
                },
                [],
                at=at,
            )
            if step % (steps // 10) == 0:
                for who, pid in pids.items():
                    points[who].append([_anonymous(pid), len(os.listdir(f"/proc/{pid}/fd"))])
        seconds = time.perf_counter() - began
    return {
        "case": "steady",
        "model": "small decoder",
        "steps": steps,
        "seconds": seconds,
        "anonymous_bytes_and_descriptors": points,
    }


def pictures() -> None:
    """What the rows say, drawn."""
    rows, cost = record.read("session"), dict[str, list[tuple[float, float]]]()
    for r in sorted((r for r in rows if r["case"] == "cost" and r["batch"] == 1), key=lambda r: r["capacity"]):
        for who, key in ((r["model"], "ours_cpu_s"), (f"{r['model']}, onnxruntime", "onnxruntime_cpu_s")):
            cost.setdefault(who, []).append((r["capacity"], 1e3 * r[key]))
    cost = {who: points for who, points in cost.items() if len(points) > 1}
    steady = next((r for r in rows if r["case"] == "steady"), None)
    drawn = {"cost": ("Processor time of a token, batch 1", "cells of the caches, the last 64 of which fill", "ms", cost)}
    if steady is not None:
        each = steady["steps"] // 10
        memory = {
            who: [(k * each, b / 2**20) for k, (b, _) in enumerate(points)]
            for who, points in steady["anonymous_bytes_and_descriptors"].items()
        }
        drawn["memory"] = ("Memory of two ranks and their caller", "steps", "MiB that no file backs", memory)
    for name, (title, across, up, curves) in drawn.items():
        if curves:
            (record.RESULTS / f"session_{name}.svg").write_text(svg(title, across, up, curves))


def _anonymous(pid: int) -> int:
    """Bytes of memory that no file backs (proc(5): RssAnon)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def cases(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """What is to be done: a name and its arguments."""
    out: list[tuple[str, ...]] = []
    for m in args.models:
        out += [(c, m, str(p)) for c in ("tokens", "continuous") for p in args.processes]
        fits = [c for c in args.capacity if c <= LONGEST.get(m, c)]
        out += [("cost", m, str(b), str(c)) for b in args.batch for c in fits]
    out += [("steady",)]
    return [c for c in out if args.only in (None, c[0])]


def one(case: Sequence[str]) -> Row:
    """A case, in this process."""
    name, *rest = case
    if name in ("tokens", "continuous"):
        return (tokens if name == "tokens" else continuous)(rest[0], int(rest[1]))
    return cost(rest[0], int(rest[1]), int(rest[2])) if name == "cost" else steady()


def main() -> None:
    """Run the cases, each in a process of its own, and keep the rows of others that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("tokens", "continuous", "cost", "steady", "pictures"))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--capacity", nargs="+", type=int, default=[80, 512, 1024, 2048])
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        _keep(one(args.case))
        return
    for case in () if args.only == "pictures" else cases(args):
        print(*case, flush=True)
        subprocess.run([sys.executable, "-m", "bench", "session", "--case", *case], check=True, cwd=ROOT)
    pictures()
    sys.exit(0 if all(r["equal"] for r in record.read("session") if r["case"] in ("tokens", "continuous")) else 1)


def _keep(row: Row) -> None:
    """Write a row in place of one of the same case."""
    key = ("case", "model", "processes", "batch", "capacity")
    others = [r for r in record.read("session") if [r.get(k) for k in key] != [row.get(k) for k in key]]
    record.write("session", sorted([*others, row], key=lambda r: [str(r.get(k)) for k in key]))
    print({k: v for k, v in row.items() if k != "anonymous_bytes_and_descriptors"}, flush=True)


if __name__ == "__main__":
    main()
