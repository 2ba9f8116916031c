"""Builds for every size of a range: ``sizes.json`` beside ``plan.json``, and a build for each further region of sizes.

A region has a plan that was made at some sizes in it, a build like any other (the first one is the folder itself, others are in
``regions/``), and formulas in the places of those of its integers that follow from sizes. At other sizes the formulas are
evaluated, which is all there is to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from tapestry.build import store
from tapestry.build.store import Build
from tapestry.errors import BuildError, TapestryError, damaged
from tapestry.ir.many_sizes.size_formula import Formula, Region, Sizes, formula_of
from tapestry.ir.many_sizes.symbolic_plan import SymbolicPlan, flat, with_formulas
from tapestry.ir.program import peak_bytes

SIZES, REGIONS = store.SIZED
MOST = 1 << 40  # of a number in a formula
MAX_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class SizedRegion:
    """A plan and the sizes that it is for.

    Attributes:
        build: the plan as it was made, at ``made_at``.
        places: formulas, by place of an integer of the build (`symbolic_plan.flat`).
        about: what is known of it: largest peaks, laws, sizes that were looked at, objective and gap there.
        constants: data of derived constants, one after another.
        files: of its own build directory; those of the first region are the build's.
    """

    region: Region
    build: Build
    made_at: Sizes
    places: Mapping[int, Formula]
    plan: SymbolicPlan
    about: Mapping[str, Any]
    constants: bytes
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    @cached_property
    def derived(self) -> Mapping[str, bytes]:
        """The constants by name, in the order of their data."""
        places = sorted(self.build.constants.items(), key=lambda c: c[1])
        return {t: self.constants[at : at + n] for t, (at, n) in places}

    def widest(self, tensor: str) -> tuple[int, ...]:
        """The most cells that a tensor has along each axis, at any size of the region: at a corner, as formulas have it."""
        shape = self.plan.graph.tensors[tensor].shape
        formulas = [formula_of(n) for n in shape]
        return tuple(
            int(n) if f is None else max(f.at(sizes) for sizes in self.region.corners())
            for n, f in zip(shape, formulas, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class SizedBuild:
    """Plans that cover a range of sizes.

    Attributes:
        symbols: what has more than one size.
        asked: all sizes.
        inputs: for each axis of an input a symbol, a size, or what follows from symbols.
    """

    symbols: tuple[str, ...]
    asked: Region
    inputs: Mapping[str, tuple[str | int | Formula, ...]]
    regions: tuple[SizedRegion, ...]

    def sizes_of(self, shapes: Mapping[str, Sequence[int]]) -> Sizes:
        """The symbols' sizes, from shapes of inputs.

        Raises:
            TapestryError: two inputs contradict each other, an input has another rank, or a size is none that was asked for.
        """
        found: dict[str, tuple[int, str]] = {}
        unknown = next((n for n in shapes if n not in self.inputs), None)
        if unknown is not None:
            raise TapestryError(f"there is no input '{unknown}'", hint=f"the inputs are {', '.join(self.inputs)}")
        for name, dims in self.inputs.items():
            shape = shapes.get(name)
            if shape is None:
                continue
            if len(shape) != len(dims):
                raise TapestryError(f"input '{name}' has {len(shape)} axes", why=f"the model's are {list(dims)}")
            for n, d in zip(shape, dims, strict=True):
                if d not in self.symbols:
                    continue
                before, other = found.setdefault(str(d), (n, name))
                if before != n:
                    raise TapestryError(f"{d} is {n} in '{name}' and {before} in '{other}'", hint="inputs of one size")
        missing = next((s for s in self.symbols if s not in found), None)
        if missing is not None:
            where = [n for n, dims in self.inputs.items() if missing in dims]
            raise TapestryError(f"no given input has the axis '{missing}'", hint=f"give {' or '.join(where)}")
        return self.held(tuple(found[s][0] for s in self.symbols))

    def named(self, sizes: Mapping[str, Any]) -> Sizes:
        """The symbols' sizes in order, from sizes by name.

        Raises:
            TapestryError: a symbol is missing, or unknown, or its size no number.
        """
        unknown = next((s for s in (*sizes, *self.symbols) if s not in sizes or s not in self.symbols), None)
        if unknown is not None:
            raise TapestryError(f"'{unknown}' is not said, or is no symbol", hint=f"give {', '.join(self.symbols)}")
        if (wrong := next((n for n in sizes.values() if not str(n).isdecimal()), None)) is not None:
            raise TapestryError(f"'{wrong}' is not one size", where="--shape", hint=f"{self.symbols[0]}=8")
        return tuple(int(sizes[s]) for s in self.symbols)

    def held(self, sizes: Sizes) -> Sizes:
        """The same sizes, if they are among those that were asked for.

        Raises:
            TapestryError: they are not; with the symbol and its range.
        """
        for k, (symbol, n) in enumerate(zip(self.symbols, sizes, strict=True)):
            if n not in self.asked.along(k):
                some, listed = self.asked.along(k), k in self.asked.among
                there = ", ".join(map(str, some)) if listed else f"{some[0]}..{some[-1]}"
                more = ",".join(map(str, sorted([*some, n]))) if listed else f"{min(some[0], n)}..{max(some[-1], n)}"
                what = f"{symbol} {n} is outside the build's {'sizes' if listed else 'range'} {there}"
                raise TapestryError(what, hint=f"compile with --shape {symbol}={more}")
        return sizes

    def at(self, sizes: Sizes) -> tuple[int, Build]:
        """The number of the region, and its build at some sizes: formulas are evaluated, nothing else is done.

        Raises:
            TapestryError: the sizes are none that were asked for.
        """
        self.held(sizes)
        k = next((k for k, r in enumerate(self.regions) if sizes in r.region), None)
        if k is None:
            raise BuildError(f"no region of the build has the sizes {list(sizes)}", hint="tapestry verify")
        r = self.regions[k]
        graph, program = r.plan.at(sizes)
        said = {"symbols": dict(zip(self.symbols, sizes, strict=True)), "region": k}
        build = replace(
            r.build,
            plan=replace(r.build.plan, graph=graph),
            program=program,
            peak_bytes=tuple(peak_bytes(program)[0]),
            model=self.regions[0].build.model,
            report={**r.build.report, "at_sizes": said},
        )
        return k, build


# as data


class _Formula(msgspec.Struct, forbid_unknown_fields=True):
    coefs: tuple[int, ...]
    const: int
    div: int
    places: tuple[int, ...]
    times: int = 1
    plus: int = 0


class _Region(msgspec.Struct, forbid_unknown_fields=True):
    low: tuple[int, ...]
    high: tuple[int, ...]
    among: dict[int, tuple[int, ...]]
    made_at: tuple[int, ...]
    formulas: list[_Formula]
    about: dict[str, Any]


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    symbols: tuple[str, ...]
    inputs: dict[str, tuple[str | int | Formula, ...]]
    asked: tuple[tuple[int, ...], tuple[int, ...], dict[int, tuple[int, ...]]]
    regions: list[_Region]


VERSION = 1


def files_of(sized: SizedBuild) -> dict[str, bytes]:
    """What is in a build directory for its sizes, beside the first region's build."""
    regions: list[_Region] = []
    files: dict[str, bytes] = {}
    for k, r in enumerate(sized.regions):
        places: dict[Formula, list[int]] = {}
        for at, f in r.places.items():
            places.setdefault(f, []).append(at)
        rows = [_Formula(f.coefs, f.const, f.div, tuple(at), f.times, f.plus) for f, at in places.items()]
        of = r.region
        regions.append(_Region(of.low, of.high, dict(of.among), r.made_at, rows, dict(r.about)))
        files |= {f"{REGIONS}/{k}/{name}": data for name, data in r.files.items()}
    asked = (sized.asked.low, sized.asked.high, dict(sized.asked.among))
    document = _Document(VERSION, sized.symbols, dict(sized.inputs), asked, regions)
    return {SIZES: msgspec.json.encode(document), **files}


def read_sizes(folder: Path, build: Build) -> SizedBuild | None:
    """The sizes of a build that was read; ``None`` for a build of one size.

    Raises:
        BuildError: they do not read, or contradict their plans.
    """
    path = folder / SIZES
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise BuildError("not of a sane size", where=str(path))
    try:
        d = msgspec.json.decode(path.read_bytes(), type=_Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise damaged(f"no sizes of a build: {e}", path) from None
    if d.version != VERSION or not d.regions or not d.symbols:
        raise damaged("no sizes of a build of this version", path)
    _check_region(d.asked[0], d.asked[1], d.asked[2], len(d.symbols), path)
    regions = [_region(folder, path, k, r, build, len(d.symbols)) for k, r in enumerate(d.regions)]
    return SizedBuild(symbols=d.symbols, asked=Region(*d.asked), inputs=d.inputs, regions=tuple(regions))


def _check_region(low: Sizes, high: Sizes, among: Mapping[int, Sizes], symbols: int, path: Path) -> None:
    fits = len(low) == len(high) == symbols and all(0 < a <= b < MOST for a, b in zip(low, high, strict=True))
    fits = fits and all(0 <= k < symbols and any(low[k] <= n <= high[k] for n in some) for k, some in among.items())
    if not fits:
        raise damaged("a region is none", path)


def _region(folder: Path, path: Path, k: int, r: _Region, first: Build, symbols: int) -> SizedRegion:
    """One region, its formulas held to its plan."""
    _check_region(r.low, r.high, r.among, symbols, path)
    inner, files, build = folder / REGIONS / str(k), dict[str, bytes](), first
    if k:
        build = store.read(inner)[0]
        files = {str(p.relative_to(inner)): p.read_bytes() for p in sorted(inner.rglob("*")) if p.is_file()}
        if build.model_sha256 != first.model_sha256 or build.program.devices != first.program.devices:
            raise BuildError("a region is of another model, or for other devices", where=str(inner))
    constants = (folder if k == 0 else inner) / "constants.bin"
    places: dict[int, Formula] = {}
    graph = replace(build.plan.graph, weights={})
    integers = flat(graph, build.program).integers
    for f in r.formulas:
        sane = (
            len(f.coefs) == len(r.made_at) == symbols
            and 0 < f.div < MOST
            and max(map(abs, (*f.coefs, f.const, f.times, f.plus))) < MOST
        )
        formula = Formula(f.coefs, f.const, f.div, f.times, f.plus)
        if not sane or not all(0 <= at < len(integers) and integers[at] == formula.at(r.made_at) for at in f.places):
            raise damaged("a formula is not its plan's", path)
        places |= dict.fromkeys(f.places, formula)
    return SizedRegion(
        region=Region(r.low, r.high, r.among),
        build=build,
        made_at=r.made_at,
        places=places,
        plan=symbolic(build, places),
        about=r.about,
        constants=store.contents(constants),
        files=files,
    )


def symbolic(build: Build, places: Mapping[int, Formula]) -> SymbolicPlan:
    """A build's graph, with its weights, and its program, with formulas in the places of some integers."""
    graph = build.plan.graph
    found = with_formulas(replace(graph, weights={}), build.program, places)
    return SymbolicPlan(replace(found.graph, weights=graph.weights), found.program)
