"""What coverage-guided fuzzing of the loaders once found (bench/correctness/fuzz_loaders.py): each case is read or refused, nothing else."""

from __future__ import annotations

import pytest

from bench.correctness.loader_mutators import MUTATORS
from bench.correctness.loader_targets import BASES, TARGETS, base, build_seeds
from tests.support.paths import ROOT

CORPUS = ROOT / "tests" / "corpus"
CASES = sorted(p for p in CORPUS.glob("*/*") if p.is_file())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", CASES, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_what_fuzzing_found_stays_mended(path, tmp_path):
    assert TARGETS[path.parent.name](path.read_bytes(), tmp_path)


def test_the_corpus_stays_small():
    assert len({p.parent.name for p in CASES}) == len(TARGETS)
    assert sum(p.stat().st_size for p in CASES) < 200_000


@pytest.mark.slow
def test_seeds_are_read(tmp_path):
    """A base with its own files is a good build: else the fuzzing would see nothing but refusals."""
    seeds = build_seeds()
    assert [TARGETS["build"](s, tmp_path) for s in seeds if s[1] in (0, 5)].count("read") >= len(BASES)
    assert all((base(k) / "plan.json").is_file() for k in range(len(BASES)))


@pytest.mark.slow
def test_mutations_are_often_read_by_the_parsers():
    import json
    import random

    from onnx import ModelProto

    rng = random.Random(1)
    plan = build_seeds()[0]
    made = [MUTATORS["build"](plan, rng) for _ in range(50)]
    assert all(m is None or isinstance(json.loads(m[2:]), dict) for m in made) and len(set(made)) > 30
    from tests.support.small_models import save

    model = save("mlp").read_bytes()
    changed = [MUTATORS["model"](model, rng) for _ in range(50)]
    assert all(ModelProto().ParseFromString(m) for m in changed if m) and len(set(changed)) > 30
