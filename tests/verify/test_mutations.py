"""A sample of bench/proofs/mutations.py: single faults in plans with streamed weights and stages, and in files, are refused."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys

import pytest

from bench.proofs.mutations import (
    Tried,
    any_plan,
    checked,
    lower_plan,
    mutate,
    plans,
)
from tests.support.command_line import attention_build
from tests.support.faults.file_faults import FILE_FAULTS, refused
from tests.support.faults.plan_faults_more import MORE
from tests.support.small_models import case

KINDS = ("row", "mesh", "streamed", "staged")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_every_kind_of_plan_are_refused(kind):
    table: dict[str, Tried] = {}
    for name in ("norms", "attention"):
        plan = next(p for k, p in plans(case(name).graph, 3) if k == kind)
        mutate(name, plan, 1, table, f"fast {kind}")
    assert len(table) >= (12 if kind == "staged" else 30)
    assert not [t.row(n) for n, t in table.items() if t.tried != t.refused or t.odd]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [n for n in MORE if n != "streamed_weight_kept"])  # (that needs larger weights)
def test_these_faults_are_tried_somewhere_and_refused(name):
    table = {name: Tried()}
    for model in ("norms", "conv_chain", "attention"):
        for _kind, plan in plans(case(model).graph, 5):
            mutate(model, plan, 3, table, model, name)
    (tried,) = table.values()
    assert tried.tried and tried.tried == tried.refused and not tried.odd, tried.row(name)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FILE_FAULTS)
def test_faults_of_files_are_refused(name, tmp_path):
    by, change = FILE_FAULTS[name]
    shutil.copytree(attention_build(), tmp_path / "b")
    change(tmp_path / "b", random.Random(name))
    law, message = refused(tmp_path / "b", by)
    assert message, (name, law)
    assert by in ("law", "plan") or law not in ("nothing", "LawError")


def test_valid_plans_make_no_alarm():
    for k in range(20):
        graph = case(("mlp", "attention", "conv_chain", "norms")[k % 4]).graph
        plan = any_plan(graph, random.Random(k), k)
        assert checked(plan, lower_plan(plan))["written_once"]


@pytest.mark.slow
def test_five_real_models():
    argv = [sys.executable, "-m", "bench", "mutations", "--each", "1", "--valid", "50"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
