"""Seeded faults of plans whose sizes are symbols: each is refused with a size, and with a cell where it is about cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapestry.api import Compiled
from tapestry.build import sized_builds
from tapestry.build.sized_builds import SizedRegion, symbolic
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import BuildError, LawError
from tapestry.ir import space
from tapestry.ir.many_sizes.size_formula import Formula, Region, Size
from tapestry.ir.many_sizes.symbolic_plan import SymbolicPlan
from tapestry.ir.program import Buffer, Free, Launch, Load, Program, Transfer
from tapestry.verify.many_sizes import sized_laws
from tapestry.verify.many_sizes.size_proofs import SizedLawError
from tapestry.verify.many_sizes.sized_memory import largest_peaks, peaks_at
from tests.support.programs.sized_models import PINS, compiled

WAVES = ("waves", 2, PINS["waves"], "length=6..90")


def build_of_waves() -> tuple[Compiled, SizedRegion]:
    c = compiled(*WAVES)
    assert c.sized is not None and len(c.sized.regions) == 1
    return c, c.sized.regions[0]


def refused(plan: SymbolicPlan, region: Region) -> SizedLawError:
    with pytest.raises(SizedLawError) as e:
        sized_laws.check_sizes(plan, region, ["length"])
    assert e.value.sizes is not None and e.value.sizes in region
    return e.value


def odd_later(n: int) -> Size:
    """The same at even sizes, and one more at odd ones (of an end that is a half)."""
    assert isinstance(n, Size) and n.formula.div == 2
    return Size(replace(n.formula, const=n.formula.const + 1), int(n))


def edited(program: Program, name: str, device: int, edit) -> Program:
    """A program with the last axis of one buffer's box on one device edited, in the buffer alone."""
    b = program.buffers[name]
    box = b.boxes[device]
    boxes = tuple((*box[:-1], edit(*box[-1])) if d == device else other for d, other in enumerate(b.boxes))
    return replace(program, buffers={**program.buffers, name: replace(b, boxes=boxes)})


def test_an_off_by_one_in_one_devices_block_is_refused():
    _, r = build_of_waves()
    at, launch = next((k, s) for k, s in enumerate(r.plan.program.steps) if isinstance(s, Launch))
    k = next(k for k, (_, hi) in enumerate(launch.blocks[0]) if isinstance(hi, Size) and hi.formula.div == 2)
    block = tuple((lo, odd_later(hi)) if j == k else (lo, hi) for j, (lo, hi) in enumerate(launch.blocks[0]))
    steps = list(r.plan.program.steps)
    steps[at] = replace(launch, blocks=(block, *launch.blocks[1:]))
    e = refused(replace(r.plan, program=replace(r.plan.program, steps=tuple(steps))), r.region)
    assert e.sizes[0] % 2 == 1 and "at length = " in e.why


def test_a_halo_short_by_one_at_odd_sizes_is_refused():
    """Device 0's input ends one cell early where the length is odd: the convolution reads a cell that is not there."""
    _, r = build_of_waves()
    load = r.plan.program.steps[next(k for k, s in enumerate(r.plan.program.steps) if isinstance(s, Launch))]
    name = next(b for b in load.ins if b.startswith("x"))

    def short(lo: int, hi: int) -> tuple[int, int]:
        assert isinstance(hi, Size) and hi.formula == Formula((1,), 2, 2)  # n / 2 + 1
        later = Formula((1,), 1, 2)
        return lo, Size(later, later.at(r.made_at))

    made_at_even = r.made_at[0] % 2 == 0
    e = refused(replace(r.plan, program=edited(r.plan.program, name, 0, short)), r.region)
    assert made_at_even and e.law == "access_preserved" and "cell" in e.why


def test_a_transfer_that_lacks_a_cell_at_odd_sizes_is_refused():
    _, r = build_of_waves()
    found = [(k, s) for k, s in enumerate(r.plan.program.steps) if isinstance(s, Transfer)]
    assert found, "the second convolution fetches its rims"
    at, step = found[0]
    steps = list(r.plan.program.steps)
    m = step.messages[0]
    lo, hi = m.box[-1]
    box = (*m.box[:-1], (odd_later(lo), hi) if isinstance(lo, Size) else (lo, hi))
    steps[at] = replace(step, messages=(replace(m, box=box), *step.messages[1:]))
    e = refused(replace(r.plan, program=replace(r.plan.program, steps=tuple(steps))), r.region)
    assert e.sizes[0] % 2 == 1


def test_a_region_that_is_too_wide_or_leaves_sizes_out_is_refused():
    c, r = build_of_waves()
    assert refused(r.plan, replace(r.region, low=(1,))).sizes[0] < 6
    with pytest.raises(SizedLawError, match="a size is in no region") as e:
        sized_laws.cover([replace(r.region, high=(80,))], c.sized.asked, c.sized.symbols)
    assert 80 < e.value.sizes[0] <= 90
    with pytest.raises(SizedLawError, match="needs") as e:
        sized_laws.check_sizes(r.plan, r.region, ["length"], [max(r.about["largest_peak_bytes"]) - 1] * 2)
    assert e.value.sizes[0] >= 89


def test_the_largest_peak_is_found_where_a_buffer_shrinks_as_a_size_grows():
    """Rows behind the middle of those of both symbols, of which there are fewer the more the second one has."""

    def end(formula: Formula) -> Size:
        return Size(formula, formula.at((30, 8)))

    held = ((end(Formula((1, 1), 0, 2)), end(Formula((1, 0), 0))), (0, 3))
    more = ((0, end(Formula((0, 1), 0, 4, 4, 0))),)
    buffers = {
        "held": Buffer(name="held", tensor="x", dtype="f32", boxes=(held,)),
        "more": Buffer(name="more", tensor="y", dtype="f32", boxes=(more,)),
    }
    steps = (Load(buffer="held"), Free(buffers=("held",)), Load(buffer="more"))
    plan = SymbolicPlan(build_of_waves()[1].plan.graph, Program(devices=1, buffers=buffers, steps=steps, outputs={}))
    peaks, at = largest_peaks(plan, Region((20, 2), (40, 15), {}))
    most = {(m, n): max(12 * (m - (m + n) // 2), 16 * (n // 4)) for m in range(20, 41) for n in range(2, 16)}
    assert peaks == [max(most.values())] and most[at[0]] == peaks[0]
    assert all(peaks_at(plan, sizes) == [peak] for sizes, peak in list(most.items())[::17])


def test_a_multiple_of_a_quotient_is_one_formula_however_it_is_made():
    f = Formula((1, 2), 3, 4)
    for times, plus in ((1, 0), (1, 5), (4, -7), (-2, 3)):
        g = f.scaled(times, plus)
        assert all(g.at((n, m)) == times * f.at((n, m)) + plus for n in range(1, 9) for m in range(1, 9))
        assert g == f.scaled(1, 1).scaled(times, plus - times)
        found = space.solution({"n0": 0, "n1": 0, "x": 0}, f"n0 = 6 and n1 = 3 and x = {g.text(['n0', 'n1'])}")
        assert found is not None and found["x"] == g.at((6, 3))


def test_an_edited_build_is_refused(tmp_path):
    c, r = build_of_waves()
    half = next(k for k, f in r.places.items() if f == Formula((1,), 0, 2))
    places = {**r.places, half: Formula((1,), 1, 2)}
    one = replace(r, places=places, plan=symbolic(r.build, places))
    replace(c, sized=replace(c.sized, regions=(one,))).save(tmp_path / "b")
    with pytest.raises(LawError, match="at length = "):
        verify_build(tmp_path / "b")
    wide = replace(r, region=replace(r.region, high=(80,)))
    replace(c, sized=replace(c.sized, regions=(wide,))).save(tmp_path / "b")
    with pytest.raises(LawError, match="a size is in no region"):
        verify_build(tmp_path / "b")
    wrong = replace(r, places={**r.places, half: Formula((1,), 4, 2)})
    replace(c, sized=replace(c.sized, regions=(wrong,))).save(tmp_path / "b")
    with pytest.raises(BuildError, match="a formula is not its plan's"):
        verify_build(tmp_path / "b")


def test_sizes_that_do_not_read_are_refused(tmp_path):
    c, _ = build_of_waves()
    data = sized_builds.files_of(c.sized)[sized_builds.SIZES]
    for old, new in ((b'"div":2', b'"div":0'), (b'"version":1', b'"version":9'), (b'"low":[6]', b'"low":[0]'), (b"[", b"{")):
        assert old in data
        (tmp_path / sized_builds.SIZES).write_bytes(data.replace(old, new))
        with pytest.raises(BuildError):
            sized_builds.read_sizes(tmp_path, c.build)
