"""Names of a model are data in everything that is printed or written: see `tests.fuzz.names`."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from tapestry.errors import TextError
from tapestry.ir.syntax.parser import parse
from tapestry.system.quoting import docstring, printable
from tests.fuzz.names import EVIL, trial
from tests.support.small_models import MODELS

CASES = [(name, seed) for name in sorted(MODELS) for seed in range(2)]


@pytest.mark.parametrize(("name", "seed"), [pytest.param(*c, marks=() if c == ("mlp", 0) else pytest.mark.slow) for c in CASES])
def test_every_command_shows_names_and_obeys_none(name: str, seed: int):
    assert trial(name, seed) == []


@pytest.mark.parametrize("text", EVIL)
def test_quoting_keeps_a_text_in_its_place(text: str):
    assert printable(text).isprintable() and printable(printable(text)) == printable(text)
    assert len(ast.parse(f'"""{docstring(text)}"""\n# {printable(text)}').body) == 1


def test_ir_text_has_no_names_that_cannot_be_printed():
    with pytest.raises(TextError, match="cannot be printed"):
        parse('graph g\ninput "x\\u001b[2J": f32[2]\noutput "x\\u001b[2J"\n')


def test_two_names_that_would_be_shown_alike_are_refused(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["a\n"]), helper.make_node("Relu", ["x"], ["a\\n"])]
    values = SimpleNamespace(
        i=helper.make_tensor_value_info("x", T.FLOAT, [2]), o=helper.make_tensor_value_info("a\n", T.FLOAT, [2])
    )
    model = helper.make_model(
        helper.make_graph(nodes, "g", [values.i], [values.o]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    onnx.save(model, tmp_path / "m.onnx")
    from tests.support.command_line import run

    status, _, error = run("compile", tmp_path / "m.onnx", "-o", tmp_path / "b", "--topology", "cpu")
    assert status == 2 and "a\\n" in error
