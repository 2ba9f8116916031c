"""Values of two graphs over the same inputs, compared at cells of their output for drawn inputs.

What must agree, and how nearly:

- finite inputs, all floats in float64: to `WIDE` of the greatest magnitude, everything else exactly; NaN where NaN was. Casts
  to half types round where the same bits are claimed, or the output is no float; else the next but one sees these roundings;
- inputs of great range: finite where it was finite, in float64 and in the graph's own types;
- the graph's own types: to a few roundings of the output's type, so that a rounding in between that went is seen;
- inputs of one sign, where a maximum or minimum picks: what is filled in at a border must not be picked by accident only;
- a NaN in single cells of each input: the same cells are NaN, the others as above;
- infinities in single cells: the same for a rule that claims to be exact, else only noted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.expr import Call, distinct
from tapestry.ir.graph import Block, Graph
from tapestry.ir.monoid import primitive_of
from tapestry.ir.recognition.selection_sum import place_read, routed, selection
from tapestry.ir.types import FLOATS, Array
from tapestry.verify.rewriting.cells import Cells, Place, TooMuch
from tapestry.verify.rewriting.draws import Draw
from tapestry.verify.rewriting.footprints import Difference
from tapestry.verify.rewriting.sampled_cells import chosen, expressions, numbers

Asked = Mapping[str, list[Array]]
FEW = 2
MOST, MOST_FOR_FEW = 400_000, 6_000_000  # points that one side may compute for one draw
WIDE, RANGE = 1e-9, 1e-6  # of float64: rules may reassociate, not approximate; great values cancel more
NATIVE = {"f64": 1e-9, "f32": 3e-5, "f16": 2e-2, "bf16": 1e-1}  # a few hundred, or a dozen, roundings
DOMAINS = frozenset({"log", "sqrt", "pow", "div", "log1p", "acosh", "fmod", "mod"})
EPS = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
MOVED = frozenset({"cast", "where", "max", "min", "neg", "abs", "sign"})
PICKED = ("max", "min", "argmax", "argmin")
PICKS = frozenset({"max", "min"})
STEP = "same_values"


@dataclass
class Trial:
    """Two graphs that are compared.

    Attributes:
        exact: whether the second claims the same bits.
        points: row-major positions of the cells that are compared.
        notes: what differs and may.
        placed: the cells that `places` are of, which is where both graphs read for them.
    """

    before: Graph
    after: Graph
    exact: bool
    points: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    notes: list[str] = field(default_factory=list[str])
    placed: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    places: tuple[list[Place], list[Place]] = field(default_factory=lambda: ([], []))
    routes: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def __post_init__(self) -> None:
        inputs = dict.fromkeys((*self.before.inputs, *self.after.inputs))
        self.order = {t: k for k, t in enumerate(inputs)}
        self.types = {t: (self.before if t in self.before.inputs else self.after).tensors[t] for t in inputs}
        self.out = self.before.tensors[self.before.outputs[0]]
        ops = (*self.before.ops, *self.after.ops)
        self.most = max([8, *(d.size for op in ops for d in op.space)])
        self.real = not self.exact and self.out.dtype in FLOATS
        self.routes = {t: p for op in self.after.ops if isinstance(op, Block) for t, p in _routes(op)}
        self.half = any(t.dtype == "f16" for g in (self.before, self.after) for t in g.tensors.values())

    @property
    def complete(self) -> bool:
        """Whether all cells of the output are compared."""
        return len(self.points) == self.out.size

    def run(self) -> None:
        """Compare.

        Raises:
            LawError: with the cell and both values; TooMuch: a single cell depends on too much.
        """
        self._widths()
        self.points = chosen(self.out, (*self.before.ops, *self.after.ops))
        asked = self._fewer()
        floats = any(t.dtype in FLOATS for t in self.types.values())
        kinds = {t.dtype for t in self.types.values()}
        if "bool" in kinds:
            self._same(Draw("off", most=self.most))
            self._same(Draw("on", most=self.most))
        self._range()
        called = {x.fn for op in self.before.ops for x in distinct(expressions(op)) if isinstance(x, Call)}
        picks = bool(called & PICKS) or any(
            isinstance(op, Block) and primitive_of(op.monoid) in PICKS for op in self.before.ops
        )
        if (floats and called & DOMAINS) or picks:
            self._same(Draw("positive", most=self.most))
        if picks and not called & DOMAINS:
            self._same(Draw("negative", most=self.most))
        if not floats:
            return
        self._native()
        for t, cells in asked.items():
            if self.types[t].dtype in FLOATS and len(cells):
                self._poked(t, cells, "bool" in kinds)

    def _widths(self) -> None:
        """Nothing is computed in a narrower float than everything was before."""
        for was, now in zip(_computed(self.before), _computed(self.after), strict=True):
            worst = max(now, key=lambda d: EPS[d], default="f64")
            if was and EPS[worst] > max(EPS[d] for d in was):
                why = f"at all cells: what was computed in {', '.join(sorted(was))} became {', '.join(sorted(now))}"
                raise LawError(STEP, f"'{self.out.name}' is rounded more", why=why)

    def _fewer(self) -> Mapping[str, Array]:
        """Compare plain values, at fewer cells where that is too much; returns the cells of each input that were read."""
        while True:
            try:
                asked = self._same(Draw("exact", most=self.most))
            except TooMuch:
                if len(self.points) <= FEW:
                    raise
                self.points = self.points[: max(FEW, len(self.points) // 4)]
            else:
                # (with counts numpy sorts: to hash so many that differ takes ten times as long)
                return {t: np.unique(np.concatenate(parts), return_counts=True)[0] for t, parts in asked.items()}

    def _values(self, draw: Draw, wide: bool = True, points: Array | None = None) -> tuple[Array, Array, Asked]:
        at = self.points if points is None else points
        draw = replace(draw, places=self.routes)
        found, asked = list[Array](), dict[str, list[Array]]()
        if not np.array_equal(at, self.placed):
            self.placed, self.places = at, ([], [])
        for graph, places in zip((self.before, self.after), self.places, strict=True):
            cells = Cells(graph, self.order, draw, wide, MOST if len(at) > FEW else MOST_FOR_FEW, places, self.real)
            found.append(cells.cells(graph.outputs[0], at))
            for t, parts in cells.asked.items():
                asked.setdefault(t, []).extend(parts)
        return found[0], found[1], asked

    def _same(self, draw: Draw) -> Asked:
        want, got, asked = self._values(draw)
        self._refuse(wrong(want, got, WIDE), want, got, "")
        return asked

    def _range(self) -> None:
        draw = Draw("range", numbers((*self.before.ops, *self.after.ops)), self.most, scale=8 if self.half else 64)
        want, got, _ = self._values(draw)
        if not np.issubdtype(want.dtype, np.floating):
            self._refuse(wrong(want, got, WIDE), want, got, "")
            return
        self._refuse(np.isfinite(want) & wrong(want, got, RANGE), want, got, "")
        want, got, _ = self._values(draw, wide=False)
        self._refuse(np.isfinite(want) & ~np.isfinite(got), want, got, " (in its own type, of great values)")

    def _native(self) -> None:
        if self.out.dtype not in FLOATS:
            return
        want, got, _ = self._values(Draw("dense", most=self.most), wide=False)
        if self.exact:
            self._refuse(~((want == got) | (np.isnan(want) & np.isnan(got))), want, got, " (in its own type)")
            want, got, _ = self._values(Draw("awkward", most=self.most), wide=False)
            self._refuse(~((want == got) | (np.isnan(want) & np.isnan(got))), want, got, " (of infinities and NaN)")
        else:
            wide = np.asarray(want, np.float64), np.asarray(got, np.float64)
            self._refuse(wrong(*wide, NATIVE[self.out.dtype]), want, got, " (rounded as its types say)")

    def _poked(self, tensor: str, cells: Array, bools: bool) -> None:
        """NaN in two cells of an input, and in more of them, under masks of all kinds; then both infinities."""
        some = cells[[len(cells) // 3, -1]]
        many = cells[np.linspace(0, len(cells) - 1, max(1, min(len(cells), len(self.points)) // 3)).astype(int)]
        for kind, poked in (("exact", some), ("exact", many), ("off", some), ("on", some)):
            if kind == "exact" or bools:
                want, got, _ = self._values(self._with(kind, tensor, poked, np.full(len(poked), np.nan)))
                self._refuse(wrong(want, got, WIDE), want, got, f" (with nan in '{tensor}', at {self._place(tensor, poked)})")
        want, got, _ = self._values(self._with("exact", tensor, some, np.array([np.inf, -np.inf])))
        bad = wrong(want, got, WIDE)
        if bad.any() and self.exact:
            self._refuse(bad, want, got, f" (with -inf in '{tensor}', at {self._place(tensor, some)})")
        if bad.any():
            self.notes.append(f"other results of infinities in '{tensor}'")

    def _with(self, kind: str, tensor: str, cells: Array, values: Array) -> Draw:
        return Draw(kind, most=self.most, poke={tensor: (cells, values)})

    def _place(self, tensor: str, cells: Array) -> str:
        shape = self.types[tensor].shape
        place = tuple(map(int, np.unravel_index(int(cells[-1]), shape))) if shape else ()
        return f"{place} among others" if len(cells) > 1 else str(place)

    def _refuse(self, bad: Array, want: Array, got: Array, how: str) -> None:
        if not bad.any():
            return
        k = int(np.flatnonzero(bad)[0])
        cell = tuple(map(int, np.unravel_index(int(self.points[k]), self.out.shape))) if self.out.shape else ()
        raise LawError(STEP, f"'{self.out.name}' differs", why=f"at {cell}: {want[k]} became {got[k]}{how}")

    def explain(self, d: Difference) -> None:
        """Whether a dependence that isl found on one side alone is one of values.

        Raises:
            LawError: it is, with both cells and both values.
        """
        t = self.types[d.source]
        read = np.array([np.ravel_multi_index(d.read, t.shape) if t.shape else 0])
        at = np.array([np.ravel_multi_index(d.cell, self.out.shape) if self.out.shape else 0])
        for value, kind in itertools.product((np.nan,) if t.dtype in FLOATS else (0, 1, 3), ("exact", "on", "off", "positive")):
            draw = self._with(kind, d.source, read, np.array([value]))
            want, got, _ = self._values(draw, points=at)
            if wrong(want, got, WIDE).any():
                why = f"cell {d.cell} reads cell {d.read}: with {value} there {want[0]} became {got[0]}"
                raise LawError("access_unchanged", f"a dependence of '{self.out.name}' on '{d.source}' was {d.verb}", why=why)
        self.notes.append(f"a read of '{d.source}' that no value depends on was {d.verb}")


def wrong(want: Array, got: Array, tolerance: float) -> Array:
    """Where two arrays differ: floats by more than the tolerance times the greatest, or in what is not finite."""
    if not np.issubdtype(want.dtype, np.floating):
        return np.asarray(want != got)
    scale = max(1.0, float(np.max(np.abs(want), where=np.isfinite(want), initial=0.0)))
    with np.errstate(invalid="ignore"):
        close = np.abs(want - got) <= tolerance * scale
    return np.asarray(~(close | (want == got) | (np.isnan(want) & np.isnan(got))))


def _computed(graph: Graph) -> tuple[set[str], set[str]]:
    """Floats that are computed in, and those that are summed in; what only moves, picks or converts does not count."""
    calls = {x.dtype for op in graph.ops for x in distinct(expressions(op)) if isinstance(x, Call) and x.fn not in MOVED}
    blocks = [op for op in graph.ops if isinstance(op, Block) and op.monoid not in (None, *PICKED) and not selection(op)]
    return calls & FLOATS, {e.dtype for op in blocks for e in op.body} & FLOATS


def _routes(op: Block) -> Iterator[tuple[str, tuple[int, int]]]:
    """Tensors whose values name a routed product's matrices, and the values that do: nothing is said of a product by no matrix,
    as a place outside is an error in ONNX."""
    found = routed(op)
    place = place_read(found.wanted, found.places) if found else None
    if found and place:
        yield op.reads[place[0]].tensor, (-found.places if place[1] else 0, found.places)
