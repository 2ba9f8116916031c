"""Tasks as C: loops over the map dimensions, the monoid's own expressions in the innermost.

Sums are in double precision; all else is in the order and the dtypes of the operation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tapestry.codegen.blocks.lowered import Task, points
from tapestry.codegen.torch_cpu.c.print_c import TYPES, Writer, literal
from tapestry.ir.expr import Arg, Const, Expr, Let, arg_positions
from tapestry.ir.graph import Block, Dim
from tapestry.ir.index import Aff, dims_of
from tapestry.ir.monoid import MONOIDS, Moments, parts_of
from tapestry.ir.recognition.contraction import dims_read, only_sums
from tapestry.ir.recognition.selection_sum import selection

LANES = 64  # neighbours that are summed side by side
NEAR = 4  # cells from one such neighbour to the next in what is read
MANY = 8  # points of a loop that are worth sharing out as it is, before a longer one within


@dataclass(slots=True)
class Nest(Writer):
    """Writes tasks as loops over their whole spaces.

    Attributes:
        units: how many parts the function may be called for: the extent of the loop that is cut.
    """

    units: int = 1

    def function(self, tasks: Sequence[Task]) -> str:
        """The body of ``void f(const int64_t *sizes, void *const *p)``: the buffers read, in order, then the outputs.

        Args:
            tasks: over the same dimensions and buffers, each for a box of the results.
        """
        reads = {k: a.dtype for t in tasks for k, a in t.reads.items()}
        self.slots = {k: i for i, k in enumerate(sorted(reads))}
        lines = [f"const {TYPES[reads[k]]} *restrict p{i} = p[{i}];" for k, i in self.slots.items()]
        lines += [f"{TYPES[a.dtype]} *restrict y{j} = p[{len(reads) + j}];" for j, a in enumerate(tasks[0].outs)]
        loops = [line for t in tasks for line in self._loops(t)]
        given = [f"const int64_t s{i} = sizes[{i}];" for i in range(len(self.arguments))]
        return "\n".join([*lines, *given, *loops])

    def _loops(self, task: Task) -> list[str]:
        self.ranges, self.reads = task.ranges, task.reads
        self.names = tuple(self.ranges)
        if side_by_side(task):
            return ["{", *self._lanes(task), "}"]
        outer = varied(task)
        lines = ["{", self._cut([d for d in task.dims if d.name in outer], len(task.dims))]
        lines += self._loop([d for d in task.dims if d.name in outer], shared=True)
        acc = self._states(task, lines) if task.monoid else self._let(task, lines, self._place_of(task, 0))
        lines += self._loop([d for d in task.dims if d.name not in outer])
        return [*lines, *self._stored(task, acc), "}" * (len(task.dims) + 1)]

    def _place_of(self, task: Task, result: int) -> str:
        return f"y{result}[{self.place(task.outs[result].offset)}]"

    def _stored(self, task: Task, acc: Sequence[str]) -> list[str]:
        results = task.then if task.monoid else task.body
        return [f"{self._place_of(task, j)} = {self.expr(e, acc)};" for j, e in enumerate(results)]

    def _cut(self, able: Sequence[Dim], rank: int) -> str:
        """Says which loop is done in parts: the first with many points, of those whose results are nothing to each other."""
        extents = {self.names.index(d.name): d.size for d in able}
        many = next((i for i, n in extents.items() if n >= MANY and i + 1 < rank), None)
        cut = max(extents, key=lambda i: extents[i], default=-1) if many is None else many
        self.units = max(self.units, extents.get(cut, 1))
        return f"const int64_t cut = {cut if self.given is None else self.number(cut)};"

    def _loop(self, dims: Sequence[Dim], *, shared: bool = False) -> list[str]:
        heads: list[str] = []
        for d in dims:
            i, n = self.names.index(d.name), self.number(d.size)
            low, high = (f"FROM({i}, 0, {n})", f"TO({i}, 0, {n})") if shared else ("0", n)
            heads.append(f"for (int64_t d{i} = {low}; d{i} < {high}; d{i}++) {{")
        return heads

    def _states(self, task: Task, lines: list[str]) -> list[str]:
        """The fields of the state at a point, after loops that reduce."""
        assert task.monoid
        if (picked := selection(task)) and picked.wanted.dtype != "f32":  # which may be no place
            i, kind = self.names.index(picked.over.name), TYPES[picked.picked.dtype]
            lines.append(f"const int64_t d{i} = (int64_t)({self.expr(picked.wanted)}) - {picked.shift};")
            there = f"d{i} >= 0 && d{i} < {self.number(picked.over.size)}"
            lines.append(f"const {kind} picked = {there} ? {self.expr(picked.picked)} : 0;")
            return ["picked"]
        if plain_moments(task):
            return self._moments(task.body[1], task.reduce, lines)
        lines += self._fold("a", task.monoid, task.body, task.reduce, task)
        return [_field("a", task.monoid, k, e.dtype) for k, e in enumerate(task.body)]

    def _let(self, task: Task, lines: list[str], place: str = "") -> list[str]:
        """The values of inner reductions, in loops of their own; what is at the result's place may be read."""
        for k, s in enumerate(task.inner):
            lines += self._fold(f"l{k}_", s.monoid, (s.body,), s.dims)
            self.once[Let(k, s.body.dtype)] = _field(f"l{k}_", s.monoid, 0, s.body.dtype)
        return [place]

    def _fold(self, name: str, monoid: str, body: Sequence[Expr], dims: Sequence[Dim], task: Task | None = None) -> list[str]:
        """Loops that merge what is lifted at each point, in order, into variables of a name."""
        dtypes, count = tuple(e.dtype for e in body), len(body)
        wide = [_double(monoid, d) for d in dtypes]
        types = ["double" if w else TYPES[d] for w, d in zip(wide, dtypes, strict=True)]
        lines = [f"{t} {name}{k} = {literal(z)};" for k, (t, z) in enumerate(zip(types, _zero(monoid, dtypes), strict=True))]
        loops, plain, ends = self._loop(dims), not (task and task.inner), extremes(monoid, dtypes)
        if all(wide) and loops and plain:
            loops[-1] = f"#pragma omp simd reduction(+:{','.join(f'{name}{k}' for k in range(count))})\n{loops[-1]}"
        if ends and loops and plain:
            found = " ".join(f"reduction({m}:{name}{k}) reduction(|:{name}odd{k})" for k, m in enumerate(ends))
            lines.append(f"int {', '.join(f'{name}odd{k} = 0' for k in range(count))};")
            loops[-1] = f"#pragma omp simd {found}\n{loops[-1]}"
        lines += loops
        if task:
            self._let(task, lines)
        lines += [f"const {TYPES[e.dtype]} {name}b{k} = {self.expr(e)};" for k, e in enumerate(body)]
        if all(wide):
            lines += [f"{name}{k} += {name}b{k};" for k in range(count)]
        elif ends and loops and plain:
            sides = ["<" if m == "min" else ">" for m in ends]
            lines += [f"{n}odd{k} |= {n}b{k} != {n}b{k};" for n in (name,) for k in range(count)]
            lines += [f"{n}{k} = {n}b{k} {s} {n}{k} ? {n}b{k} : {n}{k};" for n in (name,) for k, s in enumerate(sides)]
            return [*lines, "}" * len(dims), *(f'if ({name}odd{k}) {name}{k} = __builtin_nanf("");' for k in range(count))]
        else:
            lines += self._merged(name, monoid, dtypes)
        return [*lines, "}" * len(dims)]

    def _merged(self, name: str, monoid: str, dtypes: tuple[str, ...], lane: str = "") -> list[str]:
        """``combine`` of the state (of a lane) and what was lifted."""
        before, count = self.once, len(dtypes)
        states = {Arg(k, d): f"{name}{k}{lane}" for k, d in enumerate(dtypes)}
        self.once = {**states, **{Arg(count + k, d): f"{name}b{k}" for k, d in enumerate(dtypes)}}
        texts = [self.expr(e) for e in MONOIDS[monoid].combiner(dtypes)]
        self.once = before
        lines = [f"const {TYPES[d]} {name}c{k} = {t};" for k, (t, d) in enumerate(zip(texts, dtypes, strict=True))]
        return [*lines, *(f"{name}{k}{lane} = {name}c{k};" for k in range(count))]

    def _moments(self, x: Expr, dims: Sequence[Dim], lines: list[str]) -> list[str]:
        """(n, mean, M2) of a row: the mean first, then the deviations from it."""
        cells = self.number(points(tuple(dims)))
        loops, value = self._loop(dims), self.expr(x)
        for total, term in (("mean", value), ("spread", f"({value} - mean) * ({value} - mean)")):
            pragma = f"#pragma omp simd reduction(+:{total})\n{loops[-1]}"
            lines += [f"double {total} = 0;", *loops[:-1], pragma, f"{total} += {term};", "}" * len(dims)]
            lines += [f"mean /= {cells};"] * (total == "mean")
        return [f"((float){cells})", "((float)mean)", "((float)spread)"]

    def _lanes(self, task: Task) -> list[str]:
        """States of neighbours along the last dimension side by side; what follows in loops over where they do not vary."""
        outer, last = varied(task), _last(task)
        i, n = self.names.index(last.name), self.number(last.size)
        each = f"#pragma omp simd\nfor (int64_t i = 0; i < many; i++) {{ const int64_t d{i} = first + i;"
        others = [d for d in task.dims if d != last]
        able = [d for d in others if d.name in outer and d.size > 1]
        cut = self._cut(able or [last], len(task.dims))
        self.units = self.units if able else -(-self.units // LANES)
        zeros, steps, acc = self._side_steps(task, f"d{i}", each)
        return [
            cut,
            *self._loop([d for d in others if d.name in outer], shared=True),
            f"const int64_t lanes{i} = ({n} + {LANES - 1}) / {LANES};",
            f"for (int64_t block = FROM({i}, 0, lanes{i}); block < TO({i}, 0, lanes{i}); block++) {{",
            f"const int64_t first = block * {LANES};",
            f"const int64_t many = {n} - first < {LANES} ? {n} - first : {LANES};",
            *zeros,
            *steps,
            *self._loop([d for d in others if d.name not in outer]),
            each,
            *self._stored(task, acc),
            "}" * (len(task.dims) + 1),
        ]

    def _side_steps(self, task: Task, lane: str, each: str) -> tuple[list[str], list[str], list[str]]:
        """(the states of lanes before anything, loops that merge into them, their fields in a lane)."""
        assert task.monoid
        dtypes, loops = tuple(e.dtype for e in task.body), self._loop(task.reduce)
        close = "}" * (len(loops) + 1)
        if plain_moments(task):
            value, cells = self.expr(task.body[1]), self.number(points(task.reduce))
            zeros = [f"double mean[{LANES}] = {{0}}, spread[{LANES}] = {{0}};"]
            steps = [*loops, each, f"mean[i] += {value};", close, each, f"mean[i] /= {cells};", "}"]
            steps += [*loops, each, f"const double off = {value} - mean[i];", "spread[i] += off * off;", close]
            return zeros, steps, [f"((float){cells})", "((float)mean[i])", "((float)spread[i])"]
        zero, sums = _zero(task.monoid, dtypes), only_sums(task.monoid)
        zeros = [f"{'double' if sums else 'float'} a{k}[{LANES}];" for k in range(len(dtypes))]
        zeros += [each, *(f"a{k}[i] = {literal(z)};" for k, z in enumerate(zero)), "}"]
        before = self.once
        if isinstance(e := task.body[0], Arg) and len(dtypes) == 1:  # padding of no effect is left out, for all lanes at once
            tests, value, other = self.guarded(e.pos)
            if tests and other == zero[0] and not any(re.search(rf"\b{lane}\b", t) for t in tests):
                loops, self.once = [*loops, f"if (!({' && '.join(tests)})) continue;"], {**self.once, e: value}
        lifted = [f"const float ab{k} = {self.expr(e)};" for k, e in enumerate(task.body)]
        self.once = before
        merged = [f"a{k}[i] += ab{k};" for k in range(len(dtypes))] if sums else self._merged("a", task.monoid, dtypes, "[i]")
        return zeros, [*loops, each, *lifted, *merged, close], [f"((float)a{k}[i])" for k in range(len(dtypes))]


def varied(task: Task) -> frozenset[str]:
    """Map dimensions that a reduced state varies along; without a reduction all of them."""
    whole = frozenset(d.name for d in task.dims)
    return whole if task.monoid is None else whole & frozenset[str]().union(*(dims_read(task, e) for e in task.body))


def side_by_side(task: Task) -> bool:
    """Whether floats are merged for each of many neighbours that lie side by side in what is read, as in pooling by pixels."""
    if not task.monoid or task.inner or not task.dims or any(e.dtype != "f32" for e in task.body) or selection(task):
        return False
    last = _last(task)
    if last.size < LANES // 4 or last.name not in varied(task):
        return False
    own = [a.offset for k in arg_positions(task.body) if last.name in dims_of((a := task.reads[k]).offset)]
    return bool(own) and all(0 < e.coef(last.name) <= NEAR and not _floors(e, last.name) for e in own)


def in_rows(task: Task) -> bool:
    """Whether cells that follow each other in a row of the results are one cell of each buffer read, or neighbours there."""
    last = _last(task).name if task.dims else ""
    return all(a.offset.coef(last) in (0, 1) and not _floors(a.offset, last) for a in task.reads.values())


def of_rows(task: Task) -> bool:
    """Whether whole rows that lie one after another are reduced and read again: of one text at any size."""
    if len(task.dims) != 2 or len(task.reduce) != 1:
        return False
    (first, last), (row,), accesses = task.dims, task.reduce, (*task.reads.values(), *task.outs)
    steps = {(a.offset.coef(first.name), a.offset.coef(last.name) + a.offset.coef(row.name)) for a in accesses}
    plain = all(not a.checks and a.offset.const == 0 and dims_of(a.offset) <= set(task.ranges) for a in accesses)
    return plain and last.size == row.size and steps <= {(row.size, 1), (0, 1)}


def _floors(e: Aff, name: str) -> bool:
    return any(name in dims_of(a.arg) for a, _ in e.terms if not isinstance(a, str))


def _last(task: Task) -> Dim:
    """The last dimension of several points, of the result."""
    return next((d for d in reversed(task.dims) if d.size > 1), task.dims[-1])


def plain_moments(task: Task | Block) -> bool:
    """Whether each value is lifted as (1, x, 0), of which are count, mean and deviations."""
    if not task.monoid or not isinstance(MONOIDS[task.monoid].structure, Moments) or task.inner:
        return False
    n, x, spread = task.body
    return x.dtype == "f32" and n == Const(1.0, "f32") and spread == Const(0.0, "f32")


def extremes(monoid: str, dtypes: Sequence[str]) -> list[str]:
    """What each field of f32 is the extreme of, ``min`` or ``max``; [] for other monoids."""
    found = [m for m, _, _ in parts_of(monoid)]
    return found if {*found} <= {"min", "max"} and {*dtypes} == {"f32"} else []


def _zero(monoid: str, dtypes: tuple[str, ...]) -> Sequence[Const]:
    return MONOIDS[monoid].zero(dtypes)


def _double(monoid: str, dtype: str) -> bool:
    return only_sums(monoid) and dtype == "f32"


def _field(name: str, monoid: str, k: int, dtype: str) -> str:
    return f"((float){name}{k})" if _double(monoid, dtype) else f"{name}{k}"
