"""Caches that stay on the devices, and tokens one after another, against onnxruntime's loop over the same export."""

from __future__ import annotations

import json
import os
import signal
from functools import cache

import numpy as np
import pytest

import tapestry
from tapestry import saved_build
from tapestry.cli import main
from tapestry.errors import RunError, TapestryError
from tapestry.onnx_eval.ort_session import ort_session
from tapestry.serving.generation import Seeded, greedy
from tests.support.attention.cached_decoder import PLACES, VOCABULARY, decoder, sizes
from tests.support.small_models import FOLDER

pytestmark = pytest.mark.usefixtures("one_thread")
CAPACITY = 24
PROMPTS = [[5, 9, 2, 30, 7, 1, 1, 22], [3], [14, 36, 0, 8, 8]]


def saved(name: str, **how):
    path = FOLDER / f"decoder-{name}.onnx"
    path.write_bytes(decoder(**how).SerializeToString())
    return path


@cache
def build(new: int, devices: int = 1, batch: int = 3):
    return tapestry.compile(saved("cached"), devices=devices, shapes=sizes(batch, new, CAPACITY), state="auto")


@cache
def whole(tokens: int):
    return tapestry.compile(saved("whole", cached=False), devices=2, shapes={"batch": 3, "sequence": tokens})


@cache
def theirs():
    """onnxruntime's session of the decoder without caches."""
    return ort_session(str(saved("whole", cached=False)))


def looped(prompts, count: int, sampler=greedy):
    """onnxruntime's own loop, each row alone, over whole sequences."""
    rows = [list(p) for p in prompts]
    for _ in range(count):
        scores = []
        for row in rows:
            feeds = {"input_ids": [row], "attention_mask": [[1] * len(row)], "position_ids": [range(len(row))]}
            scores.append(theirs().run(None, {n: np.array(a, np.int64) for n, a in feeds.items()})[0][0, -1])
        for row, token in zip(rows, sampler(np.stack(scores)), strict=True):
            row.append(int(token))
    return np.array([row[len(p) :] for row, p in zip(rows, prompts, strict=True)])


# --- state


def test_a_build_says_what_it_keeps_and_verify_asks_the_model_again(tmp_path):
    plan = build(1)
    state = plan.report["state"]
    assert [c["past"] for c in state["caches"]] == [f"past_key_values.{n}.{k}" for n in (0, 1) for k in ("key", "value")]
    assert {(c["axis"], c["capacity"], c["new"]) for c in state["caches"]} == {(2, CAPACITY, 1)}
    assert all(v < 1e-6 for v in state["measured"].values()) and set(state["measured"]) == {"1", str(CAPACITY - 1)}
    plan.save(tmp_path / "plan")
    _, laws, _ = saved_build.verify_build(tmp_path / "plan")
    assert laws["state"] == 4


@pytest.mark.parametrize(
    ("how", "asked", "said"),
    [
        ({"positions": False}, "auto", "empty places in the caches change"),
        ({"masked": False}, "auto", "empty places in the caches change"),
        ({"order": "new first"}, "auto", "with new cells behind it"),
        ({}, "past_key_values.0.key=logits", "with new cells behind it"),
        ({}, "past_key_values.0.key=present.0.value", "with new cells behind it"),
        ({}, "nothing=present.0.key", "is not input=output"),
    ],
)
def test_what_is_no_cache_is_refused(how, asked, said):
    path = saved("-".join(f"{k}{v}".replace(" ", "") for k, v in how.items()) or "cached", **how)
    with pytest.raises(TapestryError, match=said):
        tapestry.compile(path, devices=1, shapes=sizes(2, 1, 6), state=asked)


def test_a_model_without_caches_keeps_none():
    with pytest.raises(TapestryError, match="no input and output pair"):
        tapestry.compile(saved("whole", cached=False), devices=1, shapes={"batch": 1, "sequence": 4}, state="auto")


@pytest.mark.parametrize("devices", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_caches_grow_in_place_and_are_not_sent(devices):
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (3, 12))
    expected = theirs().run(
        None, {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(12)[None] + 0 * ids}
    )[0]
    with tapestry.Session([build(n, devices) for n in (4, 1)]) as s:
        state = s._engine.state  # type: ignore[union-attr]
        places = {p: a.data_ptr() for p, a in state.arrays.items()}
        cell = sum(a.nbytes // CAPACITY for (_, _, box), a in state.arrays.items() if box[2] == (0, CAPACITY))
        assert set(s.inputs) == {"input_ids", "attention_mask", "position_ids"} and set(s.outputs) == {"logits"}
        for _ in range(2):
            lo, found = 0, []
            for n in (4, 1, 1, 4, 1, 1):
                mask = np.zeros((3, CAPACITY + n), np.int64)
                mask[:, :lo] = mask[:, CAPACITY:] = 1
                before, positions = state.written, np.tile(np.arange(lo, lo + n), (3, 1))
                feeds = {"input_ids": ids[:, lo : lo + n], "attention_mask": mask, "position_ids": positions}
                found.append(s.run(feeds)["logits"])
                lo += n
                assert s.fill == lo
                if cell == sum(a.nbytes // CAPACITY for a in state.arrays.values()):
                    assert state.written - before == n * cell, "what is new is written, and nothing else"
            np.testing.assert_allclose(np.concatenate(found, 1), expected, rtol=1e-4, atol=1e-5)
            assert {p: a.data_ptr() for p, a in state.arrays.items()} == places
            s.reset()
        with pytest.raises(TapestryError, match="no place for this step"):
            s.run(feeds, at=CAPACITY - n + 1)


# --- tokens


@pytest.mark.parametrize(
    ("devices", "parts"),
    [(1, (1,)), (1, (1, 4)), (2, (1, 4)), (1, (3,)), pytest.param(3, (1, 4), marks=pytest.mark.slow)],
)
def test_greedy_tokens_are_those_of_onnxruntime(devices, parts):
    expected = looped(PROMPTS, 14)
    with tapestry.Session([build(n, devices) for n in parts]) as s:
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
            assert np.array_equal(s.generate(prompts, 14), expected[: len(prompts)])


def test_padding_may_be_on_either_side():
    expected = looped(PROMPTS, 5)
    ids, mask = np.full((2, 3, 8), 11), np.zeros((2, 3, 8), np.int64)
    for r, p in enumerate(PROMPTS):
        ids[0, r, : len(p)], mask[0, r, : len(p)] = p, 1
        ids[1, r, 8 - len(p) :], mask[1, r, 8 - len(p) :] = p, 1
    with tapestry.Session(build(1)) as s:
        for i, m in zip(ids, mask, strict=True):
            assert np.array_equal(s.generate(i, 5, mask=m), expected)


def test_a_decoder_without_caches_computes_everything_again():
    with tapestry.Session([whole(12), whole(20)]) as s:
        assert np.array_equal(s.generate(PROMPTS, 10), looped(PROMPTS, 10))
        with pytest.raises(TapestryError, match="long enough"):
            s.generate(PROMPTS, 14)


def test_what_looks_ahead_is_refused(monkeypatch):
    with tapestry.Session(whole(12)) as s:
        step = s._step
        monkeypatch.setattr(
            s, "_step", lambda k, f, w, at: {n: a + f["input_ids"][:, -1:, None] for n, a in step(k, f, w, at).items()}
        )
        with pytest.raises(TapestryError, match="no causal decoder"):
            s.generate(PROMPTS, 2)


def test_drawn_tokens_are_the_same_for_the_same_seed_and_end_where_asked():
    with tapestry.Session(build(1)) as s:
        first, again, other = (s.generate(PROMPTS, 12, sampler=Seeded(k, 3.0)) for k in (1, 1, 2))
        assert np.array_equal(first, again) and not np.array_equal(first, other)
        assert np.array_equal(first, looped(PROMPTS, 12, Seeded(1, 3.0).sampler()))
        assert np.array_equal(s.generate(PROMPTS, 6, sampler=Seeded(3, 1.0, top_k=1)), looped(PROMPTS, 6))
        stop = int(first[0, 3])
        ended = s.generate(PROMPTS[:1], 12, sampler=Seeded(1, 3.0), stop=stop)[0]
        at = list(ended).index(stop)
        assert (ended[at:] == stop).all()


@pytest.mark.parametrize(
    ("prompts", "count", "said"),
    [([[1]] * 4, 1, "1 to 3 prompts"), ([[]], 1, "1 to 3"), ([[1]], 0, "1 to 3"), ([[1] * 20], 6, "no place for so many")],
)
def test_tokens_that_do_not_fit_are_refused(prompts, count, said):
    with tapestry.Session(build(1)) as s:
        with pytest.raises(TapestryError, match=said):
            s.generate(prompts, count)
        with pytest.raises(TapestryError, match="outside"):
            s.generate([[VOCABULARY]], 1)
        assert s.generate([[1] * 20], 5).shape == (1, 5), "the last token is not fed"
    assert PLACES > CAPACITY


def test_the_command_generates_and_refuses_what_is_no_prompt(tmp_path, capsys):
    for n in (1, 4):
        build(n).save(tmp_path / f"plan{n}")
    ids, mask = np.full((3, 8), 11), np.zeros((3, 8), np.int64)
    for r, p in enumerate(PROMPTS):
        ids[r, : len(p)], mask[r, : len(p)] = p, 1
    np.save(tmp_path / "ids.npy", ids)
    np.save(tmp_path / "mask.npy", mask)
    np.save(tmp_path / "bad.npy", ids.astype(np.float32))
    command = ["generate", str(tmp_path / "plan1"), "--also", str(tmp_path / "plan4"), "--max-new", "6", "--json"]
    given = ["--tokens", str(tmp_path / "ids.npy"), "--mask", str(tmp_path / "mask.npy"), "--output", str(tmp_path / "new.npy")]
    assert main([*command, *given]) == 0
    expected = looped(PROMPTS, 6)
    assert json.loads(capsys.readouterr().out)["tokens"] == expected.tolist()
    assert np.array_equal(np.load(tmp_path / "new.npy"), expected)
    assert main([*command, "--tokens", str(tmp_path / "bad.npy")]) == 2
    assert "not integers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_generate_the_same_and_go_on_after_a_kill(processes):
    expected = looped(PROMPTS, 14)
    with tapestry.Session([build(n, 2) for n in (4, 1)], processes=processes, threads=1, restart=True) as s:
        assert np.array_equal(s.generate(PROMPTS, 14), expected)
        step, done = s._step, []

        def killed(*given):
            done.append(1)
            if len(done) == 6:
                os.kill(s._engine.pids[-1], signal.SIGKILL)  # type: ignore[union-attr]
            return step(*given)

        s._step = killed
        assert np.array_equal(s.generate(PROMPTS, 14), expected) and s.restarts == 1
        s._restart, done[:] = False, []
        with pytest.raises(RunError, match="killed by SIGKILL"):
            s.generate(PROMPTS, 14)
