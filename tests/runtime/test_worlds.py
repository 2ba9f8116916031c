"""Ranks of different worlds are refused before the first step, and nothing listens where nobody needs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore

from tapestry import api, flags
from tapestry.cli import main
from tapestry.errors import RunError, TapestryError
from tapestry.runtime.processes import rendezvous
from tapestry.runtime.processes.rank_report import RankReport
from tests.support.command_line import TRACE, attention_build
from tests.support.paths import ROOT
from tests.support.two_hosts import free_port, listening

ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def ranks(*each: tuple[list[object], dict[str, str]], names: tuple[str, str] = ("RANK", "WORLD_SIZE")) -> list[str]:
    """Standard error of every rank of a run that must fail; arguments and environment of each."""
    port, started = free_port(), []
    for r, (argv, env) in enumerate(each):
        place = {names[0]: str(r), names[1]: str(len(each)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "tapestry.runtime", str(attention_build()), "--timeout", "20", *map(str, argv)]
        more = ENV | place | env
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=more))
    said = [p.communicate(timeout=120) for p in started]
    assert [p.returncode for p in started] == [1] * len(each) and TRACE not in "".join(e for _, e in said), said
    return [err for _, err in said]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["--seed", 1, "--threads", 1], {}, "rank 1 has another seed than rank 0"),
        (["--threads", 2], {}, "rank 1 has another threads than rank 0"),
        (["--threads", 1], {"TAPESTRY_NATIVE": "0"}, "rank 1 has another"),
        (["--threads", 1], {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}, "another environment (ONEDNN_DEFAULT_FPMATH_MODE)"),
        (["--threads", 1], {"TAPESTRY_TOKEN": "not what the others have"}, "has another token"),
    ],
    ids=["seed", "threads", "kernels", "mode of products", "token"],
)
def test_what_one_rank_has_and_no_other(argv, env, words):
    said = ranks(
        (["--threads", 1], {"TAPESTRY_TOKEN": "what all the others have"} if "TAPESTRY_TOKEN" in env else {}), (argv, env)
    )
    assert any(words in err and "rank 1" in err for err in said), said


@pytest.mark.slow
def test_the_same_name_of_another_file(tmp_path):
    """The same names and shapes, other numbers: a wrong answer if nobody looks."""
    compiled, given = api.load(attention_build()), []
    name = compiled.build.plan.graph.inputs[0]
    for r in range(2):
        file = tmp_path / f"host{r}" / "x.npy"
        file.parent.mkdir()
        np.save(file, compiled.random_feeds(r)[name])
        given.append((["--threads", 1, "--input", f"{name}={file}", "--output", tmp_path / "out"], {}))
    said = ranks(*given)
    assert any(f"rank 1 has another input '{name}' than rank 0" in err for err in said), said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named():
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tapestry.runtime", str(attention_build()), "--timeout", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV | place, timeout=60)
    assert done.returncode == 1 and "rank 1 did not come within 2 s" in done.stderr, done.stderr


# --- launchers


@pytest.fixture
def environment(monkeypatch):
    for names in flags.LAUNCHERS.values():
        for n in (*names, "MASTER_ADDR", "MASTER_PORT", "PMIX_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(n, raising=False)
    return lambda **more: [monkeypatch.setenv(n, v) for n, v in more.items()]


def test_launchers_are_understood(environment):
    assert flags.world() == flags.World()
    environment(SLURM_PROCID="3", SLURM_NTASKS="4", SLURM_LOCALID="1", MASTER_ADDR="a", MASTER_PORT="5")
    assert flags.world() == flags.World("SLURM", 3, 4, 1, 0, "a", 5)
    environment(PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
    assert flags.world() == flags.World("PMI", 1, 2, 1, 2, "a", 5)
    environment(
        OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_SIZE="3", OMPI_COMM_WORLD_LOCAL_RANK="0", OMPI_COMM_WORLD_LOCAL_SIZE="1"
    )
    assert flags.world() == flags.World("OpenMPI", 2, 3, 0, 1, "a", 5)
    environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", TORCHELASTIC_USE_AGENT_STORE="True")
    assert flags.world() == flags.World("torchrun", 0, 2, 0, 1, "a", 5, served=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS is 2, but SLURM_PROCID is not set"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "MASTER_ADDR is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        ({"PMI_RANK": "0"}, "PMI_RANK is 0, but PMI_SIZE is not set"),
        ({"PMIX_RANK": "0"}, "nothing says of how many"),
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, of 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', not a number"),
    ],
)
def test_what_is_no_place_in_a_world_is_refused(environment, given, words):
    environment(**given)
    with pytest.raises(TapestryError, match=words):
        flags.world()


def test_a_shell_of_slurm_for_one_task_is_alone(environment):
    environment(SLURM_NTASKS="1")
    assert flags.world() == flags.World()


def test_a_launched_rank_does_not_run_everything_by_itself(environment, tmp_path, capsys):
    """Every one of them would, and each say that all is well."""
    environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="5")
    assert main(["run", str(tmp_path), "--threads", "1"]) == 2
    said = capsys.readouterr().err
    assert "rank 1 of the 2 that torchrun has started" in said and "python -m tapestry.runtime" in said


@pytest.mark.slow
def test_a_run_under_slurms_variables(tmp_path):
    port, out, started = free_port(), tmp_path / "out", []
    for r in range(2):
        env = ENV | {"SLURM_PROCID": str(r), "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        argv = [
            sys.executable,
            "-m",
            "tapestry.runtime",
            str(attention_build()),
            "--threads",
            "1",
            "--check",
            "--output",
            str(out),
        ]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    said = [p.communicate(timeout=120) for p in started]
    assert [p.returncode for p in started] == [0, 0] and "on 2 processes" in said[0][0], said
    assert np.load(out / "y.npy").size


# --- the rendezvous


def meetings(store, count: int, secrets: list[bytes] | None = None, seconds: float = 5) -> list[str]:
    out = [""] * count

    def come(r: int) -> None:
        try:
            out[r] = rendezvous.meet(store, r, count, (secrets or [b""] * count)[r], seconds)
        except RunError as e:
            out[r] = f"refused: {e}"

    threads = [threading.Thread(target=come, args=(r,)) for r in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def test_every_attempt_has_a_name_of_its_own():
    """One store, as a launcher keeps it: whoever came before, and how far, is not taken for whoever comes now."""
    store, seen = HashStore(), set()
    for _ in range(3):
        (name,) = set(meetings(store, 3))
        seen.add(name)
        with pytest.raises(RunError, match=r"rank 1, 2 did not come|rank 1 did not come|rank 2 did not come"):
            rendezvous.meet(store, 0, 3, b"", 0.2)  # an attempt of which rank 0 alone has come
        with pytest.raises(RunError, match="rank 0 did not come"):
            rendezvous.meet(store, 1, 3, b"", 0.2)
    assert len(seen) == 3 and not any(n.startswith("refused") for n in seen)


def test_another_secret_is_refused_and_named():
    found = meetings(HashStore(), 2, [b"a" * 16, b"b" * 16], 1.0)
    assert "rank 1 has another token" in found[0] and "rank 0 has another token" in found[1]
    sealed = rendezvous.seal(b"secret", {"a": 1})
    assert rendezvous.unseal(b"secret", sealed, 0) == {"a": 1}
    for bad in (b"", sealed[:-1], sealed[:36], bytes([sealed[0] ^ 1]) + sealed[1:]):
        with pytest.raises(RunError, match="rank 3 has another token"):
            rendezvous.unseal(b"secret", bad, 3)


def test_several_hosts_need_a_token(monkeypatch, tmp_path):
    place = flags.World("torchrun", 0, 2, 0, 1, "203.0.113.7", 1)
    monkeypatch.delenv("TAPESTRY_TOKEN", raising=False)
    monkeypatch.delenv("TAPESTRY_TOKEN_FILE", raising=False)
    with pytest.raises(TapestryError, match="several hosts without a token"):
        rendezvous.join(place, 1.0)
    monkeypatch.setenv("TAPESTRY_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(TapestryError, match="no token"):
        flags.token()
    (tmp_path / "none").write_text("0123456789abcdef\n")
    assert flags.token() == b"0123456789abcdef"
    monkeypatch.setenv("TAPESTRY_TOKEN", "short")
    with pytest.raises(TapestryError, match="a token of 5 bytes"):
        flags.token()


@pytest.mark.slow
def test_a_run_on_one_host_listens_on_loopback_alone(tmp_path):
    mark = tmp_path / "mark"
    command = [sys.executable, "-m", "tests.support.programs.slow_ranks", mark, 1, "tapestry", "run", attention_build()]
    p = subprocess.Popen([*map(str, command), "--processes", "2", "-q"], env=ENV, start_new_session=True)
    try:
        while not mark.exists():
            assert p.poll() is None
            time.sleep(0.01)
        children = Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split()
        assert listening([p.pid, *map(int, children)]) == {"0100007F"}
    finally:
        os.killpg(p.pid, signal.SIGKILL)
        p.wait()


def test_reports_are_data_of_one_form():
    import msgspec

    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"rank": 0, "more": 1}), type=RankReport)
    for file in (ROOT / "tapestry" / "runtime").rglob("*.py"):
        text = file.read_text()
        assert "gather_object" not in text and "import pickle" not in text and "broadcast_object" not in text, file
