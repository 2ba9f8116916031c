"""The documentation is what the program does: commands run, output is real, figures are measured, paths exist."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import onnx
import pytest

import tapestry
from examples import layer
from tapestry import flags
from tapestry.cli.entry import command_parser
from tapestry.runtime.calibration.automatic import place
from tests.docs.console import commands, normal, replay
from tests.docs.pages import NOT_RUN, Page, pages
from tests.docs.update import generated
from tests.support.command_line import document
from tests.support.paths import ROOT
from tests.support.small_models import save

PAGES = pages()
ELSEWHERE = ("README.md",)  # what `make test` runs on an invented machine (below)
RUN = [
    pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.slow or p.name in ELSEWHERE else [])
    for p in PAGES
    if any(b.runs for b in p.blocks)
]
ALONE = [pytest.param(p, id=p.name) for p in PAGES if any(b.alone for b in p.blocks)]
EVERY = [pytest.param(p, id=p.name) for p in PAGES]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page", RUN)
def test_commands_print_what_the_page_shows(page: Page, tmp_path: Path):
    for block, real in replay(page, tmp_path / "tapestry", lambda b: not b.alone):
        assert normal(real) == normal(block.text), f"{page.name}: python -m tests.docs.update {page.name}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ALONE)
def test_long_commands_print_what_the_page_shows(page: Page, tmp_path: Path):
    for block, real in replay(page, tmp_path / "tapestry"):
        assert normal(real) == normal(block.text), f"{page.name}: python -m tests.docs.update {page.name}"


@pytest.mark.parametrize("page", EVERY)
def test_figures_and_generated_parts_are_those_of_today(page: Page):
    assert generated(page.text) == page.text, "python -m tests.docs.update --generated"


@pytest.mark.parametrize("page", EVERY)
def test_commands_that_no_test_runs_say_why(page: Page):
    for block in page.blocks:
        if block.language in ("sh", "bash", "shell"):
            assert NOT_RUN.fullmatch(block.before.strip()), f"{page.name}: {block.text}"
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["tapestry"]:
                    command_parser().parse_args(words[1:])


LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)|<img[^>]* src=\"([^\"]+)\"|srcset=\"([^\"]+)\"")
PATH = re.compile(r"`((?:tapestry|tests|bench|docs|examples)/[\w./-]*)`")


@pytest.mark.parametrize("page", EVERY)
def test_links_and_paths_lead_somewhere(page: Page):
    links = [next(filter(None, m.groups())) for m in LINK.finditer(page.prose)]
    missing = [x for x in links if not (page.path.parent / x).exists()]
    missing += [m[1] for m in PATH.finditer(page.text) if not (ROOT / m[1]).exists()]
    assert missing == []


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", Page(path).prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", EVERY)
def test_links_to_headings_find_them(page: Page):
    links = [(m[1] or page.path.name, m[2]) for m in re.finditer(r"\]\((?!https?:)([^)#\s]*)#([^)]+)\)", page.prose)]
    assert [x for x in links if x[1] not in anchors(page.path.parent / x[0])] == []


@pytest.mark.parametrize("page", EVERY)
def test_every_page_can_be_reached_from_the_readme(page: Page):
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        at = todo.pop()
        if at not in seen and at.suffix == ".md" and at.exists():
            seen.add(at)
            todo += [(at.parent / m[1]).resolve() for m in LINK.finditer(at.read_text()) if m[1]]
    assert page.path in seen


def test_commands_and_their_output_are_told_apart():
    (first, second) = commands("$ a \\\n  b\nout\n\n$ c\n")
    assert (first.line, first.shown, second.line, second.shown) == ("a \\\n  b", "out\n\n", "c", "")


def test_only_what_is_volatile_may_differ():
    assert normal("took 3.1 s, error 4.2e-07, peak 12 B") == normal("took 4 s, error 1.9e-06, peak 12 B")
    assert normal("objective 27.31 ms") != normal("objective 27.32 ms")
    assert normal("error 4.2e-03") != normal("error 4.3e-03")


def test_every_command_is_shown_somewhere_besides_its_flags():
    text = "".join(p.text for p in PAGES if not p.name.endswith("flags.md"))
    flags = (ROOT / "docs" / "reference" / "flags.md").read_text()
    commands = re.findall(r"^## ([\w-]+)$", flags, re.MULTILINE)
    assert len(commands) > 10 and [c for c in commands if f"tapestry {c}" not in text] == []


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {t for p in PAGES for t in re.findall(r"`make ([\w-]+)`", p.text)}
    assert asked <= targets


def test_the_json_page_names_every_key_of_compile_and_run(tmp_path: Path):
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    for command, title in (
        (["compile", save("attention"), "-o", tmp_path / "b", "--devices", "2", "--topology", "cpu"], "compile"),
        (["run", tmp_path / "b", "--check"], "run"),
    ):
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        named = set(re.findall(r"\w+", " ".join(re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE))))
        assert set(document(*command)) <= named, title


def test_a_figure_that_is_not_the_measured_one_is_seen():
    assert generated("<!-- from: cpu.geomean -->0<!-- /from -->") != "<!-- from: cpu.geomean -->0<!-- /from -->"


def test_output_that_is_not_the_real_one_is_seen(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```python say.py\nprint('two')\n```\n\n```console\n$ python say.py\none\n```\n")
    ((block, real),) = replay(Page(page), tmp_path / "clone")
    assert (block.text, real) == ("$ python say.py\none\n", "$ python say.py\ntwo\n")


def test_a_command_that_fails_is_seen(tmp_path: Path):
    (tmp_path / "page.md").write_text("```console\n$ false\n```\n")
    with pytest.raises(AssertionError, match="status 1"):
        list(replay(Page(tmp_path / "page.md"), tmp_path / "clone"))


MACHINES: dict[str, dict[str, object]] = {
    "one core": {  # several devices only wait for each other
        "device": {"memory": "4GiB", "bandwidth": 5e9, "launch": 2e-4, "vector": 5e9, "flops": {"f32": 1e10}},
        "levels": [{"alpha": 2e-3, "beta": 1e-8}], "overlap": False, "margin": 0.25,
    },
    "workstation": {
        "device": {"memory": "32GiB", "bandwidth": 2.9e10, "launch": 4e-6, "vector": 7e10, "flops": {"f32": 2.5e11}},
        "levels": [{"alpha": 2e-4, "beta": 4e-10}], "overlap": False, "margin": 0.1,
    },
    "supercomputer": {  # messages cost nothing
        "device": {"memory": "1TiB", "bandwidth": 1e12, "launch": 1e-8, "vector": 1e11, "flops": {"f32": 1e12}},
        "levels": [{"alpha": 1e-9, "beta": 1e-14}],
    },
}  # fmt: skip
"""What was measured of invented machines."""

COMPILES = re.compile(r"tapestry compile\b[^|&;]*|tapestry\.compile\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
ABOUT_AUTO = {"docs/seeds/slides.md"}  # links of the model are those of `auto`; its command prints nothing else of it
PLANNED = [p for p in PAGES if any(b.runs and COMPILES.search(b.text) for b in p.blocks)]


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine as ``auto`` has measured it for any number of devices; what was compiled for this one stays."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for folder in (flags.cache_folder() / name for name in ("native", "machine-code")):
        folder.mkdir(parents=True, exist_ok=True)
        (cache / folder.name).symlink_to(folder)
    monkeypatch.setenv("TAPESTRY_CACHE", str(cache))
    for devices in range(1, 2 * (os.cpu_count() or 1) + 1):
        sure = {"when": 1e9, "rounds": 2, "agreement": 0.06, "others": 0.0}
        place(devices)[0].write_text(json.dumps({**MACHINES[request.param], "measured": sure}))
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, indirect=True)
@pytest.mark.parametrize("page", [pytest.param(p, id=p.name) for p in sorted(PLANNED, key=lambda p: p.name != "README.md")])
def test_a_page_shows_what_is_printed_on_any_machine(page: Page, machine: str, tmp_path: Path):
    for block, real in replay(page, tmp_path / "tapestry", lambda b: not b.alone):
        assert normal(real) == normal(block.text), f"{page.name}, {machine}"


@pytest.mark.parametrize("page", [pytest.param(p, id=p.name) for p in PLANNED if p.name not in ABOUT_AUTO])
def test_a_page_names_the_topology_of_what_it_compiles(page: Page):
    asked = [c.line for b in page.blocks if b.language == "console" for c in commands(b.text)]
    asked += [b.text for b in page.blocks if b.language == "python"]
    found = [m[0] for text in asked for m in COMPILES.finditer(text)]
    assert [c for c in found if "topology" not in c and "**how" not in c] == []


@pytest.mark.slow
def test_the_machines_differ_in_what_they_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise the tests above would show nothing: README's layer, without ``--topology``, is another plan on each."""
    onnx.save(layer.model(), tmp_path / "layer.onnx")
    plans = set[str]()
    for name, figures in MACHINES.items():
        (tmp_path / "m.json").write_text(json.dumps(figures))
        monkeypatch.setenv("TAPESTRY_TOPOLOGY", str(tmp_path / "m.json"))
        report = tapestry.compile(tmp_path / "layer.onnx", mesh="dp=2,tp=4").report
        plans.add(json.dumps([report["objective_s"], report["transfers"]]))
        assert "193 µs" not in f"{1e6 * report['objective_s']:.0f} µs", name
    assert len(plans) == len(MACHINES)


def package_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module of the package, name) of what a program imports from it, and asks of the modules that it imports."""
    modules = dict[str, str]()
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module and n.module.split(".")[0] == "tapestry":
            for a in n.names:
                yield n.module, a.name
                if find_spec(n.module) and is_module(f"{n.module}.{a.name}"):
                    modules[a.asname or a.name] = f"{n.module}.{a.name}"
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in modules:
            yield modules[n.value.id], n.attr


@cache
def is_module(name: str) -> bool:
    """Whether there is such a module."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what stands before the last dot is no package
        return False


@cache
def is_there(module: str, name: str) -> bool:
    """Whether a module has a name, or a package such a module."""
    return is_module(module) and (is_module(f"{module}.{name}") or hasattr(import_module(module), name))


@pytest.mark.slow
def test_programs_beside_the_package_ask_for_what_is_there():
    """Python of the pages and notebooks, examples, benchmarks and programs of tests: some of them run seldom, or elsewhere."""
    texts = {f"{p.name}:{b.start}": b.text for p in pages() for b in p.blocks if b.language == "python" and "…" not in b.text}
    for path in sorted(ROOT.glob("**/*.ipynb")):
        if ".venv" not in path.parts:
            cells = json.loads(path.read_text())["cells"]
            texts |= {f"{path}:{k}": "".join(c["source"]) for k, c in enumerate(cells) if c["cell_type"] == "code"}
    files = {str(p): p.read_text() for d in ("bench", "examples", "tests") for p in sorted((ROOT / d).rglob("*.py"))}
    for where, text in files.items():  # also the programs that they have as text
        strings = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        texts |= {f"{where}:{n.lineno}": dedent(n.value) for n in strings if "tapestry" in n.value and "import " in n.value}
    texts |= files
    asked = dict[tuple[str, str], str]()
    for where, text in texts.items():
        with suppress(SyntaxError):  # a piece of a program
            asked |= dict.fromkeys(package_names(ast.parse(text)), where)
    assert len(asked) > 300
    assert [f"{where}: {m}.{name}" for (m, name), where in asked.items() if not is_there(m, name)] == []
