"""Figures of one commit: what results say of their sources, what the pages say of results, and the command that measures them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench_main
from bench.support import headline, record
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
HASHES = record.tree()
CURRENT = {name: record.code(name, HASHES) for name in record.ROOMS}
Row = dict[str, Any]

FAKE = """
import os, signal, sys
from pathlib import Path
from bench.support import record
with Path(sys.argv[0]).with_suffix(".log").open("a") as f:
    print(*sys.argv[1:], file=f)
how = Path(sys.argv[0]).with_suffix(".how").read_text()
if how == "silent":
    sys.exit(0)
record.write(sys.argv[1], [{"n": 1}])
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
record.write(sys.argv[1], [{"n": 1}, {"n": 2}])
sys.exit(int(how))
"""


def unsaid(text: str, results: dict[str, Row]) -> list[str]:
    """Results that are of other sources or of another commit than the page's, and a line of the page does not say so."""
    of = re.search(r"results are of commit `([^`]+)`", text)
    out: list[str] = []
    for name, d in results.items():
        line = next((x for x in text.splitlines() if f"`bench/results/{name}.json`" in x), "")
        marks = [r.get("measured", d) for r in d["rows"]]
        if of is None or any((m["commit"], m.get("code")) != (of[1], CURRENT[name]) for m in marks):
            out += [name] * any(f"measured at {m['commit'] or 'no commit'}, {m['date']}" not in line for m in marks)
    return out


def results() -> dict[str, Row]:
    """The headline's results."""
    return {name: json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text()) for name in record.ROOMS}


def page(of: str, lines: dict[str, str]) -> str:
    """A page with a line for each result."""
    return f"1 of the results are of commit `{of}`.\n" + "\n".join(f"{x}; `bench/results/{n}.json`" for n, x in lines.items())


def test_the_page_says_what_is_not_of_one_commit_or_of_these_sources():
    assert unsaid(PAGE.read_text(), results()) == []


def test_what_is_unsaid_is_seen():
    new = {n: {"commit": "aaaa", "date": "2026-01-02", "code": c, "rows": [{}]} for n, c in CURRENT.items()}
    silent = dict.fromkeys(new, "2026-01-02")
    assert unsaid(page("aaaa", silent), new) == []
    assert unsaid(PAGE.read_text().replace("measured at", "of"), results()) != []
    for change in (
        {"code": "0"},
        {"commit": "bbbb"},
        {"rows": [{}, {"measured": {"commit": "cccc", "date": "2025-01-01", "code": "1"}}]},
    ):
        old = {**new, "clock": {**new["clock"], **change}}
        assert unsaid(page("aaaa", silent), old) == ["clock"]
        said = "; ".join(
            f"measured at {r.get('measured', old['clock'])['commit']}, {r.get('measured', old['clock'])['date']}"
            for r in old["clock"]["rows"]
        )
        assert unsaid(page("aaaa", {**silent, "clock": said}), old) == []


def test_generated_words_say_it(monkeypatch: pytest.MonkeyPatch):
    from tests.docs import generated

    found = {n: {"commit": "aaaa", "date": "2026-01-02", "code": c, "rows": [{}]} for n, c in CURRENT.items()}
    found["clock"] |= {"code": "0", "commit": "bbbb"}
    found["cpu"]["rows"] = [{}, {"measured": {"commit": "cccc", "date": "2025-01-01", "code": "1"}}]
    monkeypatch.setattr(generated, "result", lambda name: {"versions": {"python": "3", "torch": "2"}, **found[name]})
    generated.headline.cache_clear()
    try:
        text = generated.generate("headline.commit") + "\n" + "\n".join(generated.generate(f"{n}.when") for n in found)
    finally:
        generated.headline.cache_clear()
    assert unsaid(text, found) == [] and "6 of the 8 results are of commit `aaaa`" in text
    assert "1 of 2 rows measured at cccc, 2025-01-01" in text and "measured at bbbb, 2026-01-02" in text


def test_what_the_readme_cites_is_of_the_headline_or_says_when_it_was_measured():
    text = (ROOT / "README.md").read_text()
    cited = set(re.findall(r"<!-- from: (\w+)\.", text)) - {"headline"}
    assert {
        n for n in cited - set(record.ROOMS) if f"from: cpu_{n}.measured" not in text and f"from: {n}.measured" not in text
    } == set()


def test_a_result_depends_on_its_rooms_its_benchmark_and_what_that_imports():
    assert list(headline.PIECES) and set(headline.PIECES) == set(record.ROOMS)
    for rooms in record.ROOMS.values():
        assert [r for r in rooms if not list((ROOT / "tapestry").glob(r))] == []
    assert {f for f in ("tapestry/api.py", "tapestry/plan/lower.py", "bench/speed/clock.py", "tests/support/two_hosts.py") if
            record.code("clock", {**HASHES, f: "0"}) == CURRENT["clock"]} == set()  # fmt: skip
    for other in (
        "tapestry/viz/report.py",
        "bench/speed/cpu.py",
        "bench/support/record.py",
        "tapestry/tools/prove/__init__.py",
    ):
        assert record.code("clock", {**HASHES, other: "0"}) == CURRENT["clock"]
    assert record.code("memory", {**HASHES, "tapestry/tools/prove/__init__.py": "0"}) != record.code("memory", HASHES)


def test_a_commit_says_what_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True, capture_output=True
        )

    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "_AT_START", {})
    commit = record.commit.__wrapped__
    assert commit("clock") == ""
    for name in ("plan/a.py", "viz/b.py"):
        (tmp_path / "tapestry" / name).parent.mkdir(parents=True)
        (tmp_path / "tapestry" / name).write_text("1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    assert re.fullmatch("[0-9a-f]{8,}", commit("clock"))
    (tmp_path / "tapestry/viz/b.py").write_text("2\n")
    assert not commit("clock").endswith("+changes") and commit("memory").endswith("+changes")
    (tmp_path / "tapestry/plan/new.py").write_text("2\n")
    assert commit("clock").endswith("+changes")


def test_no_hash_where_sources_changed_meanwhile(monkeypatch: pytest.MonkeyPatch):
    assert record.stamp("clock")["code"] == CURRENT["clock"]
    monkeypatch.setattr(record, "_AT_START", {**HASHES, "tapestry/plan/lower.py": "0"})
    assert record.stamp("clock")["code"] == "" and record.stamp("cpu")["code"] == ""


def test_rows_that_are_kept_say_at_which_commit_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    old = {"commit": "aaaa", "date": "2025-01-01"}
    (tmp_path / "clock.json").write_text(json.dumps({**old, "rows": [{"n": 1}, {"n": 2}]}))
    record.write("clock", record.merged("clock", [{"n": 2}, {"n": 3}], ["n"]))
    assert record.read_more("clock", "rows", []) == [{"measured": {**old, "code": ""}, "n": 1}, {"n": 2}, {"n": 3}]
    record.write("clock", record.read("clock"))  # of this code, but for the first
    assert [r.get("measured") for r in record.read_more("clock", "rows", [])] == [{**old, "code": ""}, None, None]
    assert not headline.is_current("clock")
    record.write("clock", [{"n": 1}])
    assert headline.is_current("clock") and record.read_more("clock", "code", "") == CURRENT["clock"]


class Fake:
    """`bench headline` of two benchmarks that do nothing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        (folder / "fake.py").write_text(FAKE)
        self.how("0")
        monkeypatch.setattr(headline, "COMMAND", (sys.executable, str(folder / "fake.py")))
        monkeypatch.setattr(headline, "PIECES", {"cpu": ((),), "clock": ((), ("--again",))})
        monkeypatch.setattr(headline, "FOLDER", folder / "work")
        monkeypatch.setattr(record, "RESULTS", folder)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def how(self, text: str) -> None:
        """How the benchmarks end."""
        (self.folder / "fake.how").write_text(text)

    def __call__(self, *words: str) -> tuple[int, list[str]]:
        """The exit status, and the commands that ran."""
        log = self.folder / "fake.log"
        log.write_text("")
        self.patch.setattr(sys, "argv", ["bench headline", *words])
        return headline.main(), log.read_text().splitlines()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path, monkeypatch)


def test_headline_runs_what_is_not_current_and_no_more(fake: Fake, capsys: pytest.CaptureFixture[str]):
    assert fake("--only", "cpu") == (0, ["cpu"])
    assert fake() == (0, ["clock", "clock --again"])
    assert fake() == (0, []) and capsys.readouterr().out.count(record.commit("cpu")) >= 4
    (fake.folder / "cpu.json").write_text(json.dumps({"code": "other", "rows": [{}]}))
    assert fake("--minutes", "0") == (1, []) and "no time left" in capsys.readouterr().out
    assert fake() == (0, ["cpu"])


@pytest.mark.parametrize(
    ("how", "said"), [("killed", f"exit status {-signal.SIGKILL}"), ("3", "exit status 3"), ("silent", "no result")]
)
def test_what_breaks_off_leaves_the_result_there_was(fake: Fake, capsys: pytest.CaptureFixture[str], how: str, said: str):
    old = json.dumps({"code": "other", "rows": [{}]})
    (fake.folder / "cpu.json").write_text(old)
    fake.how(how)
    assert fake("--only", "cpu") == (1, ["cpu"])
    assert said in capsys.readouterr().out
    assert (fake.folder / "cpu.json").read_text() == old


def test_an_interruption_says_what_was_not_run(fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def stopped(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(headline, "measured", stopped)
    assert fake() == (1, [])
    assert re.search(r"cpu .* broken off.*\n.*clock .* not run", capsys.readouterr().out)


def test_a_result_that_is_not_as_it_should_be_is_taken_and_told(fake: Fake, capsys: pytest.CaptureFixture[str]):
    fake.how("1")
    assert fake("--only", "cpu") == (1, ["cpu"]) and "not all as it should be" in capsys.readouterr().out
    assert len(record.read("cpu")) == 2 and headline.is_current("cpu")


@pytest.mark.parametrize(("body", "status"), [("1 / 0", 3), ("raise SystemExit('why')", 3), ("raise SystemExit(1)", 1)])
def test_a_benchmark_that_breaks_off_has_a_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: int
):
    (tmp_path / "breaks_off.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench_main, "benchmarks", lambda: {"breaks_off": "breaks_off"})
    monkeypatch.setattr(sys, "argv", ["bench", "breaks_off"])
    with pytest.raises(SystemExit) as e:
        bench_main.main()
    assert e.value.code == status
