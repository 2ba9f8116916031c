"""Build directories: written in one step, never over something else, and refused when anything in them has changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

import tapestry
from tapestry.build import store
from tapestry.build.atomic import new_file
from tapestry.errors import TapestryError
from tests.support.command_line import attention_build, run, snapshot
from tests.support.small_models import save


@pytest.fixture
def build() -> Path:
    return attention_build()


# --- writing


@pytest.mark.slow
def test_a_build_is_replaced_in_one_step(tmp_path):
    folder = tmp_path / "b"
    assert run("compile", save("mlp"), "-o", folder, "-q")[0] == 0
    first = snapshot(folder)
    assert run("compile", save("attention"), "-o", folder, "--devices", "2", "-q")[0] == 0
    second = snapshot(folder)
    assert first.keys() != second.keys() or first != second
    assert run("verify", folder, "-q")[0] == 0
    assert not {p.name for p in tmp_path.iterdir()} - {"b"}  # no leftovers
    run("compile", save("mlp"), "-o", folder, "--memory", "100", "-q")  # fails
    assert snapshot(folder) == second
    assert not {p.name for p in tmp_path.iterdir()} - {"b"}


def test_the_same_compile_writes_the_same_plan(tmp_path):
    for name in ("a", "b"):
        assert run("compile", save("conv_chain"), "-o", tmp_path / name, "--mesh", "2x2", "-q")[0] == 0
    a, b = snapshot(tmp_path / "a"), snapshot(tmp_path / "b")
    assert a.keys() == b.keys()
    assert {k for k in a if a[k] != b[k]} <= {"plan.json", "certificate.json"}  # the report holds the seconds it took
    plans = [json.loads(x["plan.json"]) for x in (a, b)]
    for p in plans:
        p.pop("report")
    assert plans[0] == plans[1]


@pytest.mark.parametrize("what", ["file", "folder with things in it", "link"])
def test_what_is_no_build_is_not_overwritten(tmp_path, what):
    place, precious = tmp_path / "mine", tmp_path / "mine" / "thesis.txt"
    if what == "file":
        place.write_text("precious")
    elif what == "link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir()
        precious.write_text("precious")
    status, _, err = run("compile", save("mlp"), "-o", place)
    if what == "link":
        assert status in (0, 2)
        return
    assert status == 2 and "was not written by this command" in err
    assert (place if what == "file" else precious).read_text() == "precious"


def test_an_empty_folder_may_be_used(tmp_path):
    (tmp_path / "empty").mkdir()
    assert run("compile", save("mlp"), "-o", tmp_path / "empty", "-q")[0] == 0
    assert run("verify", tmp_path / "empty", "-q")[0] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        status, _, err = run("compile", save("mlp"), "-o", tmp_path / "b")
    finally:
        tmp_path.chmod(0o700)
    assert status == 2 and "tapestry compile" in err


# --- tampering


def refuse(folder: Path) -> None:
    for command in ("verify", "run", "explain"):
        status, out, err = run(command, folder, "--json")
        assert status in (1, 2), command
        assert "error" in json.loads(out) and err.startswith(f"tapestry {command}: ")
    with pytest.raises(TapestryError):
        tapestry.load(folder)


def test_every_file_is_held_by_its_hash(build, tmp_path):
    names = list(snapshot(build))
    assert {"plan.json", "certificate.json", "constants.bin"} <= set(names)
    kernels = sorted(n for n in names if n.startswith("kernels"))
    for name in ["plan.json", "certificate.json", "constants.bin", kernels[0], kernels[-1]]:
        for how in ("missing", "longer", "empty", "link"):
            folder = tmp_path / f"{name.replace('/', '_')}.{how}"
            shutil.copytree(build, folder)
            path = folder / name
            data = path.read_bytes()
            if how == "missing":
                path.unlink()
            elif how == "longer":
                path.write_bytes(data + b"x")
            elif how == "empty" and data:
                path.write_bytes(b"")
            elif how == "link":
                path.rename(tmp_path / "elsewhere")
                path.symlink_to(tmp_path / "elsewhere")
            else:
                continue
            try:
                refuse(folder)
            except AssertionError as e:
                raise AssertionError(f"{name} {how}") from e


def test_an_extra_file_is_refused(build, tmp_path):
    for name in ("kernels/extra.py", "extra", ".hidden"):
        folder = tmp_path / name.replace("/", "_")
        shutil.copytree(build, folder)
        (folder / name).write_text("x")
        refuse(folder)


def test_no_bit_may_flip(build, tmp_path):
    rng = random.Random(0)
    folder = tmp_path / "b"
    shutil.copytree(build, folder)
    files = snapshot(build)
    names = [n for n, data in files.items() if data]
    for _ in range(200):
        name = rng.choice(names)
        data = bytearray(files[name])
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(bytes(data))
        status, out, _err = run("verify", folder, "--json")
        assert status in (1, 2), (name, at)
        assert "error" in json.loads(out)
        (folder / name).write_bytes(files[name])
    assert run("verify", folder, "-q")[0] == 0


def any_byte(build: Path, folder: Path, step: int) -> int:
    """Change every ``step``-th byte of every file to another one; each is refused."""
    shutil.copytree(build, folder)
    rng, tried = random.Random(step), 0
    for name, data in snapshot(build).items():
        for at in range(rng.randrange(step), len(data), step):
            changed = bytearray(data)
            changed[at] = (changed[at] + rng.randrange(1, 256)) % 256
            (folder / name).write_bytes(bytes(changed))
            with pytest.raises(TapestryError):
                store.read(folder)
            tried += 1
        (folder / name).write_bytes(data)
    store.read(folder)
    return tried


def test_no_byte_may_change(build, tmp_path):
    assert any_byte(build, tmp_path / "b", 53) > 200


@pytest.mark.slow
def test_no_byte_at_all_may_change(build, tmp_path):
    assert any_byte(build, tmp_path / "b", 1) == sum(map(len, snapshot(build).values()))


def test_a_space_in_the_certificate_is_a_change(build, tmp_path):
    shutil.copytree(build, tmp_path / "b")
    path = tmp_path / "b" / "certificate.json"
    for old, new in ((b": ", b":  "), (b"\n ", b"\n\t"), (b"}", b"}\n")):
        path.write_bytes((build / "certificate.json").read_bytes().replace(old, new))
        with pytest.raises(TapestryError, match="its own hash"):
            store.read(tmp_path / "b")


def test_what_is_no_build_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "none", tmp_path / "empty", save("mlp")):
        for command in ("run", "verify", "explain"):
            status, out, err = run(command, place)
            assert status == 2 and out == "" and "not a build directory" in err


def resign(folder: Path) -> None:
    """Make the hashes right again, as one who wants to deceive would."""
    import hashlib

    path = folder / "certificate.json"
    body = json.loads(path.read_text())
    body.pop("sha256")
    body["files"] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in body["files"]}
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(body, indent=1, sort_keys=True))


def test_a_resigned_plan_is_still_held_to_the_laws(build, tmp_path):
    """The hashes are right but the plan is not: `verify` replays the program."""

    def edit(change):
        folder = tmp_path / "b"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(build, folder)
        document = json.loads((folder / "plan.json").read_text())
        change(document)
        (folder / "plan.json").write_text(json.dumps(document))
        resign(folder)
        status, out, _err = run("verify", folder, "--json")
        found = json.loads(out)
        return status, found.get("kind")

    def steps(kind):
        return lambda d: [s for s in d["program"]["steps"] if s["step"] == kind]

    assert edit(lambda d: None) == (0, None)
    assert (
        edit(
            lambda d: d["program"]["steps"].pop(next(i for i, s in enumerate(d["program"]["steps"]) if s["step"] == "launch"))
        )[0]
        == 1
    )
    assert edit(lambda d: d["program"]["steps"].pop(0)) == (1, "LawError")
    assert edit(lambda d: d.update(peak_bytes=[1, 1])) == (1, "LawError")
    assert edit(lambda d: d.update(memory=10)) == (1, "LawError")
    assert edit(lambda d: steps("free")(d)[0].update(buffers=["nope"])) == (1, "LawError")
    assert edit(lambda d: d["program"]["lists"].__setitem__(0, [None, None]))[0] == 1
    for number in (-1, 10**6):
        assert edit(lambda d, k=number: d["program"]["buffers"][0].update(boxes=k)) == (2, "BuildError")
        assert edit(lambda d, k=number: d["program"]["lists"].__setitem__(0, [k, k])) == (2, "BuildError")
        assert edit(lambda d, k=number: steps("launch")(d)[0].update(blocks=k)) == (2, "BuildError")
    assert edit(lambda d: steps("launch")(d)[0].update(blocks=10**30)) == (2, "BuildError")
    assert edit(lambda d: d["program"]["boxes"].__setitem__(0, [[0, 10**30]] * len(d["program"]["boxes"][0])))[0] in (1, 2)
    assert edit(lambda d: d["program"]["buffers"][0].update(dtype="f99"))[0] in (1, 2)
    assert edit(lambda d: d.update(version=1)) == (2, "BuildError")
    assert edit(lambda d: d.update(extra=1)) == (2, "BuildError")
    assert edit(lambda d: d.pop("mesh")) == (2, "BuildError")
    assert edit(lambda d: d.update(mesh=[["d0", 3]])) == (2, "BuildError")
    assert edit(lambda d: d["program"].update(devices=-1))[0] in (1, 2)
    assert edit(lambda d: d["program"]["steps"].append({"step": "explode"})) == (2, "BuildError")
    assert edit(lambda d: d["program"]["steps"].__setitem__(0, {"step": "load", "buffer": 3})) == (2, "BuildError")
    assert edit(lambda d: d.update(graph=d["graph"][:-20]))[0] in (1, 2)
    assert edit(lambda d: d.update(graph="graph g\n"))[0] in (1, 2)
    assert edit(lambda d: d["strategies"][0].__setitem__(0, ["nope"]))[0] in (1, 2)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(60))
def test_resigned_nonsense_never_makes_a_traceback(build, tmp_path, seed):
    """One value of the plan replaced by another value of some type, hashes made right: refused or harmless."""
    rng = random.Random(seed)
    folder = tmp_path / "b"
    shutil.copytree(build, folder)
    plan = json.loads((folder / "plan.json").read_text())
    plan.pop("report")
    places: list = []

    def visit(x):
        for k in x if isinstance(x, dict) else range(len(x)):
            places.append((x, k))
            if isinstance(x[k], dict | list):
                visit(x[k])

    visit(plan)
    holder, key = rng.choice(places)
    holder[key] = rng.choice([0, 1, -1, 3, 10**6, "", "x", None, [], {}, [0, 1], True])
    plan["report"] = {}
    (folder / "plan.json").write_text(json.dumps(plan))
    resign(folder)
    status, out, _ = run("verify", folder, "--json")
    assert status in (0, 1, 2)
    assert ("error" in json.loads(out)) == (status != 0)


def test_the_model_may_not_change_under_a_build(tmp_path):
    m = tmp_path / "m.onnx"
    shutil.copy(save("mlp"), m)
    assert run("compile", m, "-o", tmp_path / "b", "-q")[0] == 0
    model = onnx.load(m)
    w = next(t for t in model.graph.initializer if t.name == "w1")
    w.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(w) + 1, "w1"))
    m.write_bytes(model.SerializeToString())
    status, _, err = run("run", tmp_path / "b")
    assert (status == 2 and "w1" in err) or "model" in err
    m.unlink()
    status, _, err = run("run", tmp_path / "b")
    assert status == 2 and str(m) in err


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.json"
    with pytest.raises(ValueError), new_file(target) as temporary:
        temporary.write_text("half")
        raise ValueError
    assert list(target.parent.iterdir()) == []
    target.write_text("old")
    with new_file(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new" and list(target.parent.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o644
