"""No command and no flag that others script against can vanish unseen: of the last release, and of the written contract."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from tapestry.cli.entry import command_parser
from tests.support.paths import SHARED

RELEASE = Path(__file__).parent / "release.json"
"""{command: its flags} of the last release; a flag is taken out in the commit that takes it out of the program, and says so."""
CONTRACT = SHARED / "design.md"
ABSENT = {
    "compile --compute": "never built; products have --precision and --accumulate",
    "fuzz": "python -m tests.fuzz has taken its place",
}  # fmt: skip


def parsers() -> dict[str, set[str]]:
    """Every command's flags, as its parser knows them; those of the program itself under ""."""
    top = command_parser()
    (commands,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    known = {name: {o for a in p._actions for o in a.option_strings} for name, p in commands.choices.items()}
    return known | {"": {o for a in top._actions for o in a.option_strings}}


def test_the_last_release_has_nothing_that_is_gone():
    known, released = parsers(), json.loads(RELEASE.read_text())
    assert {c: gone for c, flags in released.items() if (gone := sorted(set(flags) - known.get(c, set())))} == {}


def test_every_command_and_flag_is_in_the_list_of_the_release():
    known, released = parsers(), json.loads(RELEASE.read_text())
    assert {c: new for c, flags in known.items() if (new := sorted(flags - set(released.get(c, ()))))} == {}


@pytest.mark.skipif(not CONTRACT.is_file(), reason="the contract is not beside this checkout")
def test_the_contract_is_kept():
    text, known = CONTRACT.read_text(), parsers()
    taken_out = set(re.findall(r"[\w-]{4,}", re.search(r"Gone after .*", text)[0]))
    missing = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.split(r"\n(?! )", block):  # an indented line goes on with the one before
            for part in re.split(r"(?<![\w/.])tapestry ", "" if line.startswith("(later)") else line)[1:]:
                command = re.match(r"[a-z-]*", part)[0].rstrip("-") if not part.startswith("-") else ""
                flags = {f for f in re.findall(r"--[a-z][a-z-]+", part.partition("#")[0]) if f not in taken_out}
                if command not in known and command not in taken_out:
                    missing.append(command)
                missing += [f"{command} {f}" for f in sorted(flags - known.get(command, flags))]
    assert sorted(missing) == sorted(ABSENT)
