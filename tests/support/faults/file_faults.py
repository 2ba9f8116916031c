"""Faults of a build directory: each makes a good one bad, and says with what it must be refused."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import tapestry
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import LawError, TapestryError

Change = Callable[[Path, random.Random], None]
FILE_FAULTS: dict[str, tuple[str, Change]] = {}


def file_fault(by: str) -> Callable[[Change], Change]:
    """Register a fault; ``by`` says what refuses it: "hash", "law", "plan", "kernel", "weight" or "model"."""

    def put(f: Change) -> Change:
        FILE_FAULTS[f.__name__] = (by, f)
        return f

    return put


def sign(folder: Path) -> None:
    """Make the hashes right again, as one who wants to deceive would."""
    body = json.loads((folder / "certificate.json").read_text())
    body.pop("sha256")
    body["files"] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in body["files"]}
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "certificate.json").write_text(json.dumps(body, indent=1, sort_keys=True))


def edited(folder: Path, change: Callable[[dict], object]) -> None:
    """The plan changed, and every hash made right again."""
    plan = json.loads((folder / "plan.json").read_text())
    change(plan)
    (folder / "plan.json").write_text(json.dumps(plan))
    sign(folder)


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


@file_fault("hash")
def bit_of_the_plan_flipped(folder, rng):
    flip(folder / "plan.json", rng)


@file_fault("hash")
def bit_of_the_certificate_flipped(folder, rng):
    flip(folder / "certificate.json", rng)


@file_fault("hash")
def bit_of_a_kernel_flipped(folder, rng):
    flip(rng.choice(sorted((folder / "kernels").iterdir())), rng)


@file_fault("hash")
def plan_edited(folder, rng):
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"mode":"full"', '"mode":"partial"', 1))


@file_fault("hash")
def kernel_missing(folder, rng):
    rng.choice(sorted((folder / "kernels").iterdir())).unlink()


@file_fault("hash")
def kernels_hash_changed(folder, rng):
    body = json.loads((folder / "certificate.json").read_text())
    name = rng.choice(sorted(n for n in body["files"] if n.startswith("kernels/")))
    body["files"][name] = body["files"][name][::-1]
    (folder / "certificate.json").write_text(json.dumps(body, indent=1, sort_keys=True))


@file_fault("kernel")
def kernel_edited_and_signed(folder, rng):
    path = rng.choice(sorted((folder / "kernels").iterdir()))
    path.write_text(path.read_text().replace("+", "-", 1) + "\n# a comment\n")
    sign(folder)


@file_fault("kernel")
def kernels_exchanged_and_signed(folder, rng):
    a, b = rng.sample(sorted((folder / "kernels").iterdir()), 2)
    one, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)
    sign(folder)


@file_fault("kernel")
def body_of_the_graph_edited_and_signed(folder, rng):
    """An operator of the graph's text changed: the kernels are then not those that the plan generates."""

    def change(plan):
        bodies = list(re.finditer(r"body [^\n]*? (\*|\+) ", plan["graph"]))
        at = rng.choice(bodies)
        plan["graph"] = plan["graph"][: at.start(1)] + ("+" if at.group(1) == "*" else "*") + plan["graph"][at.end(1) :]

    edited(folder, change)


@file_fault("law")
def step_removed_and_signed(folder, rng):
    def change(plan):
        steps = plan["program"]["steps"]
        steps.pop(rng.choice([i for i, s in enumerate(steps) if s["step"] in ("launch", "transfer", "load")]))

    edited(folder, change)


@file_fault("law")
def peak_edited_and_signed(folder, rng):
    edited(folder, lambda plan: plan["peak_bytes"].__setitem__(0, plan["peak_bytes"][0] - 1))


@file_fault("law")
def memory_edited_and_signed(folder, rng):
    edited(folder, lambda plan: plan.update(memory=max(plan["peak_bytes"]) - 1))


@file_fault("law")
def block_edited_and_signed(folder, rng):
    """A box of some launch's blocks ends a cell early."""

    def change(plan):
        p = plan["program"]
        lists = [s["blocks"] for s in p["steps"] if s["step"] == "launch"]
        boxes = [k for n in lists for k in p["lists"][n] if k is not None and p["boxes"][k]]
        box = p["boxes"][rng.choice(boxes)]
        wide = [axis for axis, (lo, hi) in enumerate(box) if hi > lo]
        box[rng.choice(wide)][1] -= 1

    edited(folder, change)


@file_fault("law")
def message_edited_and_signed(folder, rng):
    """A message goes to another device (where none is sent, a buffer's dtype changes)."""

    def change(plan):
        p = plan["program"]
        sent = [m for messages in p["messages"] for m in messages]
        if sent:
            m = rng.choice(sent)
            m[1] = next(d for d in range(p["devices"]) if d not in m[:2])
        else:
            p["buffers"][0]["dtype"] = "f64"

    edited(folder, change)


@file_fault("plan")
def mesh_edited_and_signed(folder, rng):
    edited(folder, lambda plan: plan["mesh"][0].__setitem__(1, plan["mesh"][0][1] + 1))


@file_fault("weight")
def weight_reference_moved_and_signed(folder, rng):
    """A weight's reference points at other bytes, or at another weight's, of the model's files."""

    def change(plan):
        found = list(re.finditer(r'(weight [^\n]*? at "[^"\n]+" )(\d+)( \d+ )("[^"\n]*")', plan["graph"]))
        at = rng.choice([m for m in found if m])
        moved = f"{at.group(1)}{int(at.group(2)) + 4}{at.group(3)}" + (at.group(4) if at.group(4) == '""' else '"other"')
        plan["graph"] = plan["graph"][: at.start()] + moved + plan["graph"][at.end() :]

    edited(folder, change)


@file_fault("weight")
def weights_hash_edited_and_signed(folder, rng):
    def change(plan):
        hashes = sorted(set(re.findall(r'"([0-9a-f]{64})"', plan["graph"])))
        old = rng.choice(hashes)
        plan["graph"] = plan["graph"].replace(old, old[::-1])

    edited(folder, change)


@file_fault("model")
def weights_exchanged_and_signed(folder, rng):
    """A weight is read where another one of the same shape is, hash and all; where shapes differ, under another one's name."""

    def change(plan):
        found = re.findall(r'^weight (\S+): (\S+\[.*?\]) (at "[^"]+" .*)$', plan["graph"], flags=re.M)
        pairs = [(a, b) for a in found for b in found if a[1] == b[1] and a[2] != b[2]]
        if pairs:
            (_, _, one), (_, _, two) = rng.choice(pairs)
            plan["graph"] = plan["graph"].replace(one, "@").replace(two, one).replace("@", two)
        else:
            name, _, ref = rng.choice([f for f in found if '""' not in f[2]])
            bare = name.strip('"')
            plan["graph"] = plan["graph"].replace(ref, ref.replace(f'"{bare}"', f'"{bare}2"'))

    edited(folder, change)


def tried_on_files(model: Path, shapes: Mapping[str, int], seed: int) -> Iterator[tuple[str, str, str]]:
    """(fault, what refused it, the message) for a build of a model on four devices; an empty message: nothing did."""
    with tempfile.TemporaryDirectory() as name:
        good = Path(name) / "good"
        tapestry.compile(model, devices=4, shapes=shapes, time_limit=2.0).save(good)
        verify_build(good)
        for fault, (by, change) in FILE_FAULTS.items():
            place = Path(name) / fault
            shutil.copytree(good, place)
            change(place, random.Random(f"{seed} {model.stem} {fault}"))
            yield fault, *refused(place, by)


def refused(place: Path, by: str) -> tuple[str, str]:
    """(what refused a build directory, the message)."""
    try:
        verify_build(place)
        if by == "weight":
            tapestry.load(place).run(tapestry.load(place).random_feeds())
    except LawError as e:
        return e.law, " ".join(str(e).split())[:240]
    except TapestryError as e:
        return type(e).__name__, " ".join(str(e).split())[:240]
    return "nothing", ""
