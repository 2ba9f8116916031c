"""``compile --reduce-in native``: partial sums of 16-bit floats travel in 16 bits, in the plan, the runtimes and the exports."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import Block
from tapestry.ir.program import Reduce, transfer_bytes
from tapestry.ir.recognition.state import native
from tapestry.ir.syntax.parser import parse
from tapestry.verify import certificate
from tests.support.command_line import run
from tests.support.small_models import N, net

DEEP = 4096
KINDS = {"bf16": T.BFLOAT16, "f16": T.FLOAT16}


def model(tmp_path: Path, dtype: str, rows: int, columns: int) -> Path:
    """A product in 16 bits between float32 ends."""
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((DEEP, columns)) / DEEP**0.5).astype(np.float32)
    nodes = [
        N("Cast", ["x"], ["xh"], "down", to=KINDS[dtype]), N("Cast", ["w"], ["wh"], "narrow", to=KINDS[dtype]),
        N("MatMul", ["xh", "wh"], ["yh"], "mm"), N("Cast", ["yh"], ["y"], "up", to=T.FLOAT),
    ]  # fmt: skip
    onnx.save(net(nodes, {"x": (T.FLOAT, [rows, DEEP])}, {"y": T.FLOAT}, {"w": w}), tmp_path / f"{dtype}.onnx")
    return tmp_path / f"{dtype}.onnx"


def planned(path: Path, how: str, devices: int, **more) -> tapestry.api.Compiled:
    return tapestry.compile(path, devices=devices, topology="cpu", reduce_in=how, pins=f"mm:m={devices}@d0", **more)


def merges(c: tapestry.api.Compiled) -> list[Reduce]:
    return [s for s in c.build.program.steps if isinstance(s, Reduce)]


CASES = [("bf16", 2, 64, 128), ("bf16", 4, 64, 128), ("f16", 2, 64, 128), ("bf16", 3, 5, 7), ("bf16", 4, 1, 3)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype, devices, rows, columns", CASES)
def test_half_the_bytes_and_nearly_the_values(tmp_path: Path, dtype: str, devices: int, rows: int, columns: int) -> None:
    path = model(tmp_path, dtype, rows, columns)
    wide, narrow = (planned(path, how, devices) for how in ("f32", "native"))
    assert {s.sent_as for s in merges(wide)} == {""} and {s.sent_as for s in merges(narrow)} == {dtype}
    if {s.kind for s in merges(wide)} == {s.kind for s in merges(narrow)}:
        sent = [sum(transfer_bytes(s, c.build.program) for s in merges(c)) for c in (wide, narrow)]
        assert sent[0] == 2 * sent[1] > 0
    assert f"sent as {dtype}" in narrow.explain() and "sent as" not in wide.explain()
    assert narrow.check()["passed"] and narrow.verify()["agreement"] > 0
    x = np.random.default_rng(1).standard_normal((rows, DEEP)).astype(np.float32)
    kind = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[dtype]
    w = onnx.numpy_helper.to_array(onnx.load(path).graph.initializer[0]).astype(kind).astype(np.float64)
    xh, edges = x.astype(kind).astype(np.float64), [k * DEEP // devices for k in range(devices + 1)]
    parts = [xh[:, a:b] @ w[a:b] for a, b in pairwise(edges)]
    exact, bound = (
        sum(parts),
        (sum(abs(p) for p in parts) + 2 * abs(sum(parts))) * 2.0 ** (-8 if dtype == "bf16" else -11) * 1.01,
    )
    got = np.asarray(narrow.run({"x": x})["y"])
    assert np.all(abs(got - exact) <= bound + 1e-5)
    assert np.any(got != np.asarray(wide.run({"x": x})["y"])) or rows * columns < 50  # it was rounded


@pytest.mark.sampled(1)
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("rows, columns, kind", [(64, 128, "reduce_scatter"), (3, 7, "reduce_scatter"), (1, 1, "all_reduce")])
def test_ranks_round_as_one_process_does(tmp_path: Path, processes: int, rows: int, columns: int, kind: str) -> None:
    """By the backend's calls (a device each) and by messages (several in a process), with equal parts and without."""
    c = planned(model(tmp_path, "bf16", rows, columns), "native", 4)
    assert {s.kind for s in merges(c)} == {kind}
    c.save(tmp_path / "b")
    found = dict[int, np.ndarray]()
    for n, more in ((1, ()), (processes, ("--processes", processes))):
        status, _, err = run("run", tmp_path / "b", "--output", tmp_path / f"o{n}", "--check", *more)
        assert status == 0, err
        found[n] = np.load(next((tmp_path / f"o{n}").glob("*.npy")))
    here, there = found[1], found[processes]
    assert np.max(abs(here - there)) <= 2.0**-7 * np.max(abs(here))  # the backend's order of sums may be another


def test_what_is_rounded_is_what_the_plan_says(tmp_path: Path) -> None:
    """A program that rounds on its own, or does not where the plan says so, is refused."""
    path = model(tmp_path, "bf16", 64, 128)
    for how, other in (("f32", "bf16"), ("native", ""), ("native", "f16")):
        b = planned(path, how, 2).build
        steps = tuple(replace(s, sent_as=other) if isinstance(s, Reduce) else s for s in b.program.steps)
        with pytest.raises(LawError, match="travel in another dtype"):
            certificate.check(
                b.plan.annotated(), replace(b.program, steps=steps), mesh=b.plan.mesh, native_sums=b.plan.native_sums
            )


def test_infinity_and_nan_arrive(tmp_path: Path) -> None:
    c = planned(model(tmp_path, "f16", 4, 8), "native", 2)
    x = np.ones((4, DEEP), np.float32)
    x[1, 0], x[2, -1], x[3] = np.nan, np.inf, 6e4
    y = np.asarray(c.run({"x": x})["y"])
    assert np.isnan(y[1]).all() and not np.isfinite(y[2]).any() and np.isfinite(y[0]).all()


@pytest.mark.parametrize(
    "then, found",
    [
        ("cast(acc0, bf16)", "bf16"), ("cast(cast(acc0, bf16), f32)", "bf16"), ("cast(((acc0 / 3.0) + 1.0), f16)", "f16"),
        ("acc0", ""), ("cast(exp(acc0), bf16)", ""), ("cast((1.0 / acc0), bf16)", ""), ("cast((acc0 * acc0), bf16)", ""),
    ],
)  # fmt: skip
def test_only_sums_that_are_rounded_anyhow_are_rounded_before(then: str, found: str) -> None:
    """A mean square in float32 is not, although the norm made of it has 16 bits."""
    out = then.rsplit(", ", maxsplit=1)[-1].rstrip(")") if then.startswith("cast") else "f32"
    op = parse(f"""graph g input x: bf16[4, 8] y: {out}[4] = op [i: 4 | m: 8 sum] reads x[i, m]
        body cast(x, f32) then {then} output y""").ops[0]
    assert isinstance(op, Block) and native(op) == found


def test_the_choice_is_checked(tmp_path: Path) -> None:
    path = model(tmp_path, "bf16", 4, 8)
    with pytest.raises(TapestryError, match="f32 or native"):
        tapestry.compile(path, reduce_in="bf16")


def test_exports_move_what_the_plan_moves(tmp_path: Path) -> None:
    c = planned(model(tmp_path, "bf16", 64, 128), "native", 2)
    said = c.export(tmp_path / "ranks", "onnx-ranks")
    assert said["plan_bytes"] == sum(transfer_bytes(s, c.build.program) for s in merges(c)) and said["extra_bytes"] == 0
