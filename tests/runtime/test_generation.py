"""Caches that stay on the devices, and tokens one after another, against onnxruntime's loop over the same export."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import closing
from functools import cache

import numpy as np
import pytest

import tapestry
from tapestry import saved_build
from tapestry.cli import main
from tapestry.errors import RunError, TapestryError
from tapestry.onnx_eval.ort_session import ort_session
from tapestry.tools.serving.generation import Seeded, sampler_of
from tapestry.tools.serving.local_socket import Server
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


def looped(prompts, count: int, sampler="greedy"):
    """onnxruntime's own loop, each prompt alone, over whole sequences."""
    out = []
    for number, p in enumerate(prompts):
        row, draw = list(p), sampler_of(sampler)(number)
        for _ in range(count):
            feeds = {"input_ids": [row], "attention_mask": [[1] * len(row)], "position_ids": [range(len(row))]}
            row.append(draw(theirs().run(None, {n: np.array(a, np.int64) for n, a in feeds.items()})[0][0, -1]))
        out.append(row[len(p) :])
    return np.array(out)


# --- state


def test_a_build_says_what_it_keeps_and_verify_asks_the_model_again(tmp_path):
    plan = build(1)
    state = plan.report["state"]
    assert [c["past"] for c in state["caches"]] == [f"past_key_values.{n}.{k}" for n in (0, 1) for k in ("key", "value")]
    assert {(c["axis"], c["capacity"], c["new"]) for c in state["caches"]} == {(2, CAPACITY, 1)}
    assert all(v < 1e-6 for v in state["measured"].values()) and set(state["measured"]) == {"1", str(CAPACITY - 1), "rows"}
    plan.save(tmp_path / "plan")
    _, laws, _ = saved_build.verify_build(tmp_path / "plan")
    assert laws["state"] == 4


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


@pytest.mark.slow
def test_a_decoder_without_caches_computes_everything_again():
    with tapestry.Session([whole(12), whole(20)]) as s:
        assert np.array_equal(s.generate(PROMPTS, 10), looped(PROMPTS, 10))
        with pytest.raises(TapestryError, match="long enough"):
            s.generate(PROMPTS, 14)


def test_what_looks_ahead_is_refused(monkeypatch):
    with tapestry.Session(whole(12)) as s:
        step = s._step
        monkeypatch.setattr(
            s, "_step", lambda k, f, *g: {n: a + f["input_ids"][:, -1:, None] for n, a in step(k, f, *g).items()}
        )
        with pytest.raises(TapestryError, match="no causal decoder"):
            s.generate(PROMPTS, 2)


def test_drawn_tokens_are_the_same_for_the_same_seed_and_end_where_asked():
    with tapestry.Session(build(1)) as s:
        first, again, other = (s.generate(PROMPTS, 12, sampler=Seeded(k, 3.0)) for k in (1, 1, 2))
        assert np.array_equal(first, again) and not np.array_equal(first, other)
        assert np.array_equal(first, looped(PROMPTS, 12, Seeded(1, 3.0)))
        assert np.array_equal(s.generate(PROMPTS, 6, sampler=Seeded(3, 1.0, top_k=1)), looped(PROMPTS, 6))
        stop = int(first[0, 3])
        ended = s.generate(PROMPTS[:1], 12, sampler=Seeded(1, 3.0), stop=stop)[0]
        at = list(ended).index(stop)
        assert (ended[at:] == stop).all()


@pytest.mark.parametrize(
    ("prompts", "count", "said"),
    [
        ([], 1, "0 prompts"),
        ([[1], []], 1, "2 prompts, one without tokens"),
        ([[1]], 0, "0 new"),
        ([[2], [1] * 20], 6, "need 25 cells; the caches have 24"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(prompts, count, said):
    with tapestry.Session(build(1)) as s:
        with pytest.raises(TapestryError, match=said):
            s.generate(prompts, count)
        with pytest.raises(TapestryError, match="outside"):
            s.generate([[VOCABULARY]], 1)
        assert s.generate([[1] * 20], 5).shape == (1, 5), "the last token is not fed"
    assert PLACES > CAPACITY


# --- more prompts than rows

MANY = [[5, 9, 2, 30, 7, 1, 1, 22], [3], [14, 36, 0, 8, 8], [7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [20], [21, 4, 4]]


@cache
def alone(count: int, sampler: str | Seeded = "greedy"):
    return looped(MANY, count, sampler)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("devices", "parts"), [(1, (1, 4)), (2, (1, 4)), pytest.param(3, (1,), marks=pytest.mark.slow), (1, (3,))]
)
def test_a_finished_row_is_taken_by_the_next_prompt(devices, parts):
    """Each prompt gives what it gives alone; no step has a row that nobody uses while somebody waits."""
    tokens = alone(12)
    stop = int(np.bincount(tokens[:, 1:].ravel()).argmax())  # ends some early
    wanted = tokens.copy()
    for row in wanted:
        ends = np.flatnonzero(row == stop)
        row[ends[0] if len(ends) else len(row) :] = stop
    lengths = [int((row != stop).sum()) + 1 for row in wanted]
    assert len(set(lengths)) > 2
    with tapestry.Session([build(n, devices) for n in parts]) as s:
        step, used = s._step, []

        def counted(k, feeds, outs, at, fresh):
            used.append([n for _, n in at])
            return step(k, feeds, outs, at, fresh)

        s._step = counted  # type: ignore[method-assign]
        assert np.array_equal(s.generate(MANY, 12, stop=stop), wanted)
        busy = [sum(n > 0 for n in row) for row in used]
        assert busy[0] == 3 and busy == sorted(busy, reverse=True), "a row is free only where nobody waits"
        assert np.array_equal(s.generate(MANY[::-1], 12), tokens[::-1])
        assert s.fill == 0 and np.array_equal(s.generate(MANY[:1], 12), tokens[:1]), "whoever was there before leaves nothing"


def test_a_seed_is_the_prompts_not_the_rows():
    with tapestry.Session(build(1)) as s:
        together = s.generate(MANY, 6, sampler=Seeded(5, 2.0))
        assert np.array_equal(together, alone(6, Seeded(5, 2.0)))
        for k in (0, 4, 6):
            assert np.array_equal(s.generate([MANY[k]], 6, sampler=Seeded(5, 2.0, first=k))[0], together[k])


def test_without_caches_rows_are_taken_as_well():
    with tapestry.Session([whole(12), whole(20)]) as s:
        assert np.array_equal(s.generate(MANY, 6), alone(6))


def joined(s, callers: int) -> None:
    """Wait until so many take part in what runs."""
    end = time.monotonic() + 20
    while s._shared._batch.callers < callers and time.monotonic() < end:
        time.sleep(0.001)


def test_callers_at_once_share_the_rows_of_a_batch():
    tokens = alone(12)
    with tapestry.Session([build(n) for n in (1, 4)]) as s:
        step, together, ready, found = s._step, [], threading.Event(), {}

        def counted(k, feeds, outs, at, fresh):
            together.append(sum(n > 0 for _, n in at))
            if len(together) == 2:
                ready.set()
                joined(s, 4)
            return step(k, feeds, outs, at, fresh)

        def ask(n):
            ready.wait(10)
            found[n] = s.generate([MANY[n], MANY[n + 1]], 12)

        s._step = counted  # type: ignore[method-assign]
        others = [threading.Thread(target=ask, args=(n,)) for n in (1, 3, 5)]
        for t in others:
            t.start()
        first = s.generate(MANY[:1], 12)
        for t in others:
            t.join()
        assert np.array_equal(first, tokens[:1])
        assert all(np.array_equal(found[n], tokens[n : n + 2]) for n in (1, 3, 5))
        assert max(together) == 3 and sum(together) < 3 * len(together)
        assert np.array_equal(s.generate(MANY, 12), tokens)


def test_connections_to_a_server_share_the_rows(tmp_path):
    tokens, found = alone(12), {}
    with tapestry.Session([build(n) for n in (1, 4)]) as s, closing(Server(s, tmp_path / "s")) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        step, together, ready = s._step, [], threading.Event()

        def counted(k, feeds, outs, at, fresh):
            together.append(sum(n > 0 for _, n in at))
            if len(together) == 1:
                ready.set()
                joined(s, 3)
            return step(k, feeds, outs, at, fresh)

        def ask(n):
            assert n == 0 or ready.wait(20)
            with tapestry.connect(server.path) as c:
                found[n] = c.generate(MANY[n : n + 2], 12)

        s._step = counted  # type: ignore[method-assign]
        callers = [threading.Thread(target=ask, args=(n,)) for n in (0, 2, 4)]
        for t in callers:
            t.start()
        for t in callers:
            t.join()
        assert all(np.array_equal(found[n], tokens[n : n + 2]) for n in (0, 2, 4)) and together[1] == 3
        with tapestry.connect(server.path) as c:
            assert np.array_equal(c.generate(MANY[:2], 6, sampler=Seeded(5, 2.0)), alone(6, Seeded(5, 2.0))[:2])
            for asked, sampler, said in [
                ([[VOCABULARY]], "greedy", "outside"), ([[1]] * 9000, "greedy", "9000 prompts"), ([[1]], "beam", "no sampler"),
                ([[]], "greedy", "1 prompt, one without tokens"), ([[1]], Seeded(0, -1.0), "temperature"),
            ]:  # fmt: skip
                with pytest.raises(TapestryError, match=said):
                    c.generate(asked, 12, sampler=sampler)
            with pytest.raises(TapestryError, match="the server has closed"):
                c.generate([[-1]], 2)
        server.close()
        thread.join(20)
        assert not thread.is_alive()


def test_a_fault_in_a_shared_step_is_said_to_all_and_ends_nothing_else():
    with tapestry.Session(build(1)) as s:
        step, ready, said = s._step, threading.Event(), []

        def broken(k, feeds, outs, at, fresh):
            ready.set()
            joined(s, 2)
            if sum(n > 0 for _, n in at) > 1:
                raise TapestryError("a fault")
            return step(k, feeds, outs, at, fresh)

        def ask():
            ready.wait(10)
            with pytest.raises(TapestryError, match="a fault"):
                s.generate([[3]], 12)
            said.append(1)

        s._step = broken  # type: ignore[method-assign]
        other = threading.Thread(target=ask)
        other.start()
        with pytest.raises(TapestryError, match="a fault"):
            s.generate([[5, 9]], 20)
        other.join()
        s._step = step  # type: ignore[method-assign]
        assert said and np.array_equal(s.generate(MANY, 6), alone(6))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers_end_their_row_alone(value):
    with tapestry.Session(build(1)) as s:
        step = s._step

        def broken(k, feeds, outs, at, fresh):
            found = step(k, feeds, outs, at, fresh)
            return found | {
                "logits": np.where(np.asarray(feeds["input_ids"])[..., None] == 35, np.float32(value), found["logits"])
            }

        s._step = broken  # type: ignore[method-assign]
        for sampler in ("greedy", "seeded"):
            with pytest.raises(TapestryError, match=f"of token 1: the best is {value}"):
                s.generate([[35]], 4, sampler=sampler)
        assert 35 not in alone(2)[0] and np.array_equal(s.generate(MANY[:1], 2), alone(2)[:1])


def test_rows_that_change_each_other_are_refused():
    """A model in which a row's numbers depend on the largest of all rows: alone it generates, in a batch it does not."""
    path = saved("coupled", coupled=True)
    for batch in (1, 3):
        plan = tapestry.compile(path, devices=1, shapes=sizes(batch, 1, CAPACITY), state="auto")
        with tapestry.Session(plan) as s:
            if batch == 1:
                assert s.generate([[1], [2]], 2).shape == (2, 2)
                continue
            assert plan.report["state"]["measured"]["rows"] > 1e-4
            with pytest.raises(TapestryError, match="rows cannot go on by themselves"):
                s.generate([[1]], 2)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_ranks_give_a_row_to_the_next_prompt(devices, processes):
    with tapestry.Session([build(n, devices) for n in (4, 1)], processes=processes, threads=1, restart=True) as s:
        assert np.array_equal(s.generate(MANY, 12), alone(12))
        step, done = s._step, []

        def killed(*given):
            done.append(1)
            if len(done) == 9:
                os.kill(s._engine.pids[-1], signal.SIGKILL)  # type: ignore[union-attr]
            return step(*given)

        s._step = killed  # type: ignore[method-assign]
        assert np.array_equal(s.generate(MANY, 12, sampler=Seeded(1, 2.0)), alone(12, Seeded(1, 2.0))) and s.restarts == 1


# --- the command


def test_the_command_generates_and_refuses_what_is_no_prompt(tmp_path, capsys):
    for n in (1, 4):
        build(n).save(tmp_path / f"plan{n}")
    ids, mask = np.full((7, 11), 11), np.zeros((7, 11), np.int64)
    for r, p in enumerate(MANY):
        ids[r, : len(p)], mask[r, : len(p)] = p, 1
    np.save(tmp_path / "ids.npy", ids)
    np.save(tmp_path / "mask.npy", mask)
    np.save(tmp_path / "bad.npy", ids.astype(np.float32))
    command = ["generate", str(tmp_path / "plan1"), "--also", str(tmp_path / "plan4"), "--max-new", "6", "--json"]
    given = ["--tokens", str(tmp_path / "ids.npy"), "--mask", str(tmp_path / "mask.npy"), "--output", str(tmp_path / "new.npy")]
    assert main([*command, *given]) == 0
    expected = alone(6)
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
