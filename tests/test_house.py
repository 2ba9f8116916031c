"""The house rules that no linter checks (`make lint` runs those): imports, sizes of rooms, names.

Each check of our own is also shown to fail on a small tree that breaks it. The pages are tested in tests/docs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry import plugins
from tapestry.cli.building import KernelEvidence, OtherOrder
from tapestry.cli.outcome import Command
from tapestry.tools import OFFERED
from tapestry.viz.tool_kinds import ExportFormat, Pages, Pictures, Sessions
from tests.support.paths import ROOT, SHARED
from tests.support.sampling import sample

OURS = sorted(p for d in ("tapestry", "tests", "bench", "examples", "docs") for p in (ROOT / d).rglob("*.py"))
PACKAGE = [p for p in OURS if p.is_relative_to(ROOT / "tapestry")]

MAX_ROOM = 16
FORBIDDEN_NAMES = ("utils.py", "util.py", "helper.py", "helpers.py", "common.py", "misc.py", "manager.py")


IMPORT = (ast.Import, ast.ImportFrom)
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}


@dataclass(frozen=True)
class Source:
    """What the rules ask of a source; its syntax tree is not kept.

    Attributes:
        imports: at its top, inside of functions and for types.
        environment: what it reads and sets the environment with, written ``a.b``.
    """

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    environment: frozenset[str]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What a node consists of but for expressions, which are most of a tree."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, ())
        for n in inner if isinstance(inner, list) else ():
            yield n
            yield from statements(n)


@cache
def source(text: str) -> Source:
    """What a source says, which several checks ask."""
    tree = ast.parse(text)
    nodes = list(statements(tree))
    imports = tuple(n for n in nodes if isinstance(n, IMPORT))
    dotted = (
        {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        if re.search(r"environ|tenv", text)
        else set[str]()
    )
    return Source(
        imports=imports,
        environment=frozenset(ENVIRONMENT & (dotted | {m for n in imports for m in imported(n)})),
    )


def read(file: Path) -> Source:
    """What a file says."""
    return source(file.read_text())


# sizes


def full_rooms(files: Iterable[Path], most: int = MAX_ROOM) -> dict[str, int]:
    """Folders of more modules than that; ``__init__.py`` is the folder itself."""
    rooms = Counter(str(p.parent) for p in files if p.name != "__init__.py")
    return {room: n for room, n in rooms.items() if n > most}


def test_rooms_stay_small():
    native = (ROOT / "tapestry").rglob("*.[ch]")
    assert full_rooms([*OURS, *native]) == {}


def test_a_full_room_is_seen(tmp_path):
    for k in range(17):
        (tmp_path / f"m{k}.py").write_text("x = 1\n")
    assert full_rooms(tmp_path.glob("*.py")) == {str(tmp_path): 17}


WEIGH = SHARED / "tools" / "house" / "measure.py"
BUDGET = {
    "tokens": 925_000, "core_tokens": 738_400, "tools_tokens": 186_700, "circles": 0, "tool_strings": 0, "api_modules": 80, "loose_files": 12, "docs_words": 45_000,
    "results_lines": 15_000, "joined_subjects": 15,
}  # fmt: skip
"""What was reached; a file of budgets beside `WEIGH` takes its place as soon as one is."""


@pytest.mark.skipif(not WEIGH.is_file(), reason="what weighs a checkout is not beside this one")
def test_the_package_keeps_to_its_budget(tmp_path):
    (tmp_path / "budget.json").write_text(json.dumps(BUDGET))
    done = subprocess.run([sys.executable, WEIGH, ROOT, "--check", tmp_path / "budget.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_room_is_on_its_page():
    rooms = {p.parent.name for p in (ROOT / "tapestry").glob("*/__init__.py")} - {"tools", "codegen"}
    tools = {f"tools/{p.stem}" for p in (ROOT / "tapestry" / "tools").iterdir() if not p.name.startswith("__")}
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert sorted(r for r in rooms | tools if f"| `{r}` |" not in page) == []


def test_the_lines_that_decide_are_where_the_page_says():
    rows = re.findall(r"^\| [^|]+ \| `(tapestry/[^`]+)` \| `(\w+)` \|$", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert len(rows) == 20
    for file, name in rows:
        assert re.search(rf"^ *(def {name}\(|class {name}\b|{name}\b.* = )", (ROOT / file).read_text(), re.M), (file, name)


# imports


def module_name(file: Path, root: Path) -> str:
    """``a.b`` for ``a/b.py``, ``a`` for ``a/__init__.py``."""
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def import_graph(files: Iterable[Path], root: Path) -> dict[str, set[str]]:
    """Which modules among the files each of them imports, at its top or inside of a function, or for types alone."""
    modules = {module_name(p, root): p for p in files}
    graph: dict[str, set[str]] = {}
    for name, p in modules.items():
        graph[name] = {x for n in read(p).imports for x in targets(n, modules)} - {name}
    return graph


def targets(node: ast.AST, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules among these that an import statement needs: of ``from a import b`` ``a.b`` if that is one, else ``a``."""
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        within = [f"{node.module}.{a.name}" for a in node.names]
        yield from (m for m in (x if x in modules else node.module for x in within) if m in modules)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo.extend(new)
        reach[start] = seen
    found = {tuple(sorted({a, *(b for b in reach[a] if a in reach[b])})) for a in graph if a in reach[a]}
    return sorted(map(list, found))


def imported(node: ast.AST) -> Iterator[str]:
    """The modules that an import statement names; of ``from a import b`` both ``a`` and ``a.b``, as ``b`` may be a module."""
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        within = [f"{node.module}.{a.name}" for a in node.names]
        yield from (node.module, *within)


def test_no_circle_of_imports():
    assert circles(import_graph(PACKAGE, ROOT)) == []


@pytest.mark.parametrize(
    "text",
    ["from p.a import f\n", "import p.a\n", "def g():\n    from p import a\n", "if TYPE_CHECKING:\n    from p import a\n"],
)
def test_a_circle_is_seen(tmp_path, text):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.py").write_text("from p import b\n")
    (tmp_path / "p" / "b.py").write_text(text)
    (tmp_path / "p" / "c.py").write_text("from p import a, b\n")
    assert circles(import_graph(tmp_path.rglob("*.py"), tmp_path)) == [["p.a", "p.b"]]


def imports_of(file: Path) -> set[str]:
    """Every module that a file names in an import."""
    return {m for n in read(file).imports for m in imported(n)}


def test_no_test_imports_a_test():
    tests = {module_name(p, ROOT): p for p in OURS if p.name.startswith("test_")}
    assert {str(p): sorted(imports_of(p) & set(tests)) for p in tests.values() if imports_of(p) & set(tests)} == {}


def test_only_space_imports_islpy():
    found = [str(p.relative_to(ROOT)) for p in PACKAGE if any(m.split(".")[0] == "islpy" for m in imports_of(p))]
    assert found == ["tapestry/ir/space.py"]


@pytest.mark.parametrize("text", ["import os\nos.environ['A']", "from os import getenv", "import os\nx = os.getenv('A')"])
def test_reading_the_environment_is_seen(text):
    assert source(text).environment


def test_only_flags_reads_the_environment():
    found = [str(p.relative_to(ROOT)) for p in PACKAGE if read(p).environment]
    assert found == ["tapestry/flags.py"]


# names


def test_file_names_say_what_is_inside():
    assert [str(p) for p in OURS if p.name in FORBIDDEN_NAMES] == []


def test_function_names_have_few_meanings():
    """grep for a name leads to four places at most."""
    names = Counter(name for p in PACKAGE for name in re.findall(r"^def (\w+)\(", p.read_text(), re.M))
    assert {name: count for name, count in names.items() if count > 4} == {}


def test_file_names_have_one_meaning():
    names = Counter(p.name for p in PACKAGE if not p.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


@given(st.sets(st.text(), min_size=1), st.text(), st.integers(0, 9))
def test_one_case_more_exchanges_at_most_one_of_a_sample(cases, more, count):
    chosen = sample(sorted(cases), count)
    assert chosen <= cases and len(chosen) == min(count, len(cases))
    assert chosen == sample(sorted(cases, reverse=True), count)
    assert len(chosen - sample([*cases - {more}, more], count)) <= 1


def test_every_pin_meets_what_the_package_asks_for():
    """constraints.txt has exact versions without local suffixes, for torch above all."""
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", x) for x in lines)
    assert any(x.startswith("torch==") for x in lines)


def test_what_programs_offer_is_of_its_kind():
    """The table of `tapestry.tools` has names in strings, which no type checker sees through."""
    kinds = {k.__name__: k for k in (Command, ExportFormat, KernelEvidence, OtherOrder, Pages, Pictures, Sessions)}
    assert kinds.keys() == OFFERED.keys()
    for kind, names in ((kinds[k], names) for k, names in OFFERED.items()):
        wanted = ["__call__"] if "__call__" in vars(kind) else [n for n in vars(kind) if not n.startswith("_")]
        for name in names:
            found = plugins.tool(kind, name)
            assert isinstance(found, kind) if is_dataclass(kind) else all(callable(getattr(found, n)) for n in wanted), (
                kind,
                name,
            )


def names_of_programs(text: str) -> list[str]:
    """Strings of a source that are a path of a module of `tapestry.tools`."""
    strings = (n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    modules = {module for names in OFFERED.values() for module, _ in names.values()}
    short = {m.removeprefix("tapestry.tools.") for m in modules}
    return [s for s in strings if s in modules | {m for m in short if "." in m}]


def test_only_the_table_names_programs_in_strings():
    assert names_of_programs('tool("exports.formats")') and names_of_programs('x = "tapestry.tools.viewer"')
    others = [p for p in PACKAGE if not p.is_relative_to(ROOT / "tapestry" / "tools" / "viewer")]  # it names its own folder
    found = [str(p.relative_to(ROOT)) for p in others if names_of_programs(p.read_text())]
    assert found == ["tapestry/tools/__init__.py"]
