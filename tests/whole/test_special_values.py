"""Infinities, NaN, zeros of both signs, denormal and huge numbers: one case of every operator here, all of them in the slow test."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest

from bench.correctness import special_values as sv

PARTS = 12


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@cache
def one_of_each() -> list[Any]:
    """For every operator the case with the most floating-point inputs, and among those the smallest."""
    best: dict[tuple[str, str], tuple[int, int, str, Any]] = {}
    for case in sv.cases(""):
        node = case.model.graph.node[0]
        arrays = [a for a in sv.fed(case).values() if sv.floating(a)]
        key = (-len(arrays), sum(a.size for a in arrays), case.name, case)
        if (arrays and (node.domain, node.op_type) not in best) or (arrays and key[:3] < best[node.domain, node.op_type][:3]):
            best[node.domain, node.op_type] = key
    return [case for *_, case in sorted(best.values(), key=lambda x: x[2])]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_gives_what_the_references_give(part):
    wrong, judged = list[str](), 0
    for case in one_of_each()[part::PARTS]:
        *_, (name, model, feeds) = sv.forms(case)
        subject = sv.subject(name, model, feeds, 0, ("2x2",))
        for value, inp, _, verdict in sv.sweep(subject, sv.VALUES, part, every=False):
            judged += verdict == "right"
            wrong += [f"{name} {value} in {inp}: {verdict}"] if verdict.startswith("wrong") else []
    assert wrong == []
    assert judged > 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_of_every_operator(part):
    wrong = [r for r in sv.rows(sv.cases("")[part::PARTS], sv.VALUES, 1, sv.ENGINES) if r["verdict"].startswith("wrong")]
    assert wrong == []
