"""Where source is written: loads, masks, stores and expressions at one place of a kernel."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from tapestry.codegen.triton.task.descriptors import Descriptor
from tapestry.codegen.triton.task.lowered import Access, Check, Task, place_of, points
from tapestry.codegen.triton.task.primitives import HALVES, TRITON_TYPES, cast_text, compute, literal, row, typed
from tapestry.codegen.triton.text.device_functions import HELPERS
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, walk
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, Atom, Floor, Ranges, dims_of, span
from tapestry.ir.recognise import Attention
from tapestry.ir.syntax.printer import bare
from tapestry.ir.types import FLOAT8

# Tile axes: groups of dimensions flattened into one index vector each, and index expressions printed over them.
#
# Dimensions come out of the flat index by ``//`` and ``%`` with constants, and only where they must: a run of neighbouring
# dimensions whose coefficients are those of row-major order stays one variable, so contiguous memory is visibly contiguous.


_OWN = {
    "tl", "triton", "combine", "pid", "pid_m", "pid_n", "pid_row", "tile", "first", "high", "step", "first_tile", "tile_index",
    "DEPTH", "WIDTH", "BLOCK", "ROWS", "COLS", "BM", "BN", "BK",
}  # fmt: skip
_RESERVED = frozenset(_OWN) | set(keyword.kwlist) | set(dir(builtins)) | set(HELPERS)


class Namer:
    """Distinct Python names: each is asked for by the name it would like to have."""

    def __init__(self) -> None:
        self.taken: set[str] = set(_RESERVED)

    def take(self, wish: str) -> str:
        """A free identifier close to the wish (the last part of an ONNX path such as ``/layer1/conv/Conv_output_0``)."""
        base = identifier(wish)
        name, n = base, 1
        while name in self.taken:
            name, n = f"{base}_{n}", n + 1
        self.taken.add(name)
        return name


def identifier(text: str) -> str:
    """The last part of a path as a Python identifier of reasonable length."""
    parts = [p for p in re.split(r"[/:]+", text) if p]
    plain = re.sub(r"\W+", "_", parts[-1] if parts else "x", flags=re.ASCII).strip("_")[:40] or "x"
    return f"t_{plain}" if plain[0].isdigit() else plain


class Axis:
    """Some dimensions, flattened in order into the index variable ``name``; ``lines`` define what is derived from it.

    Attributes:
        block: elements per tile; 0 for an axis whose index is a scalar (a batch axis of the grid).
        tile: the constant's name in the source.
    """

    def __init__(self, dims: Sequence[Dim], block: int, tile: str, namer: Namer, wish: str) -> None:
        self.dims = [d for d in dims if d.size != 1]
        self.block, self.tile = block, tile
        self.namer = namer
        self.name = namer.take("_".join(d.name for d in self.dims) if 0 < len(self.dims) <= 4 else wish)
        self.lines: list[str] = []
        self.size = prod(d.size for d in dims)
        self._named: dict[str, str] = {}

    @property
    def ragged(self) -> bool:
        """Whether the last tile reaches past the end, so that lanes must be masked."""
        return self.block > 0 and self.size % self.block != 0

    @property
    def tiles(self) -> int:
        """Number of tiles (for a scalar axis, of elements)."""
        return -(-self.size // self.block) if self.block else self.size

    def define(self, text: str, wish: str) -> str:
        """A variable for an expression over this axis (the same one when it was defined before)."""
        if text.isidentifier() or text.isdigit():
            return text
        if text not in self._named:
            self._named[text] = self.namer.take(wish)
            self.lines.append(f"{self._named[text]} = {text}")
        return self._named[text]

    def inside(self) -> str:
        """The mask of lanes that exist."""
        return self.define(f"{self.name} < {self.size}", f"{self.name}_in")

    def plain(self, coefs: dict[str, int]) -> list[tuple[str, int]]:
        """``sum(coef * dimension)`` as (variable, coefficient) pairs, one per run of row-major neighbours."""
        out: list[tuple[str, int]] = []
        at = 0
        while at < len(self.dims):
            first = at
            while at + 1 < len(self.dims) and self._merges(coefs, at):
                at += 1
            if coefs.get(self.dims[at].name, 0):
                out.append((self._run(first, at), coefs[self.dims[at].name]))
            at += 1
        return out

    def _merges(self, coefs: dict[str, int], at: int) -> bool:
        upper, lower = self.dims[at], self.dims[at + 1]
        c = coefs.get(lower.name, 0)
        return c != 0 and coefs.get(upper.name, 0) == c * lower.size

    def _run(self, first: int, last: int) -> str:
        below, count = (prod(d.size for d in dims) for dims in (self.dims[last + 1 :], self.dims[first : last + 1]))
        text = self.name if below == 1 else f"{self.name} // {below}"
        if first > 0:
            text = f"{text} % {count}" if below == 1 else f"({text}) % {count}"
        return self.define(text, "_".join(d.name for d in self.dims[first : last + 1]))


class View:
    """How the axes of one place in the kernel lie in its tiles: a suffix such as ``[:, None]`` for each."""

    def __init__(self, axes: Sequence[tuple[Axis, str]], ranges: dict[str, int]) -> None:
        self.suffix = {id(a): s for a, s in axes}
        self.axes = [a for a, _ in axes]
        self.ranges = ranges
        self.owner = {d.name: a for a in self.axes for d in a.dims}

    @property
    def tiled(self) -> list[Axis]:
        """The axes along which there is a vector, in tile order."""
        return [a for a in self.axes if a.block]

    @property
    def shape(self) -> str:
        """The tile's shape as source text."""
        return "(" + ", ".join(a.tile for a in self.tiled) + (",)" if len(self.tiled) == 1 else ")")

    def axes_of(self, e: Aff) -> list[Axis]:
        """The axes that an index expression varies along, in tile order."""
        used = {id(self.owner[d]) for d in dims_of(e) if d in self.owner}
        return [a for a in self.axes if id(a) in used]

    def laid(self, axis: Axis, name: str) -> str:
        """A one-axis variable or number in the shape of this view."""
        return name if name.isdigit() else name + self.suffix[id(axis)]

    def text(self, e: Aff, wish: str = "") -> str:
        """An index expression over the tile; parts along one axis are hoisted to that axis under a name like ``wish``."""
        parts: list[tuple[str, int]] = []
        for axis in self.axes:
            if own := [(t, c) for t, c in e.terms if self._axes(t) == [axis]]:
                name = axis.define(self._along(axis, own), f"{wish or 'at'}_{axis.name}")
                parts.append((self.laid(axis, name), 1))
        parts += [(self._atom(t), c) for t, c in e.terms if len(self._axes(t)) > 1]
        return _linear_text(parts, e.const)

    def _axes(self, atom: Atom) -> list[Axis]:
        return self.axes_of(Aff(((atom, 1),)))

    def _along(self, axis: Axis, terms: list[tuple[Atom, int]]) -> str:
        """Terms along one axis, as an expression over its one-dimensional variables."""
        inner = View([(axis, "")], self.ranges)
        parts = axis.plain({t: c for t, c in terms if isinstance(t, str)})
        parts += [(inner._atom(t), c) for t, c in terms if not isinstance(t, str)]
        return _linear_text(parts, 0)

    def _atom(self, atom: Atom) -> str:
        """A floor or mod. Triton's ``//`` and ``%`` truncate, so an argument that may be negative is shifted first."""
        if isinstance(atom, str):
            axis = self.owner[atom]
            [(name, _)] = axis.plain({atom: 1})
            return self.laid(axis, name)
        lo, _ = span(atom.arg, self.ranges)
        periods = max(0, -(lo // atom.div))
        arg = self._flat(atom.arg + periods * atom.div)
        if isinstance(atom, Floor):
            return f"({arg} // {atom.div} - {periods})" if periods else f"({arg} // {atom.div})"
        return f"({arg} % {atom.div})"

    def _flat(self, e: Aff) -> str:
        """The argument of a floor or mod: runs along each axis, laid out in this view, never hoisted."""
        parts: list[tuple[str, int]] = []
        for axis in self.axes:
            own = {t: c for t, c in e.terms if isinstance(t, str) and self.owner.get(t) is axis}
            parts += [(self.laid(axis, n), c) for n, c in axis.plain(own)]
        parts += [(self._atom(t), c) for t, c in e.terms if not isinstance(t, str) and self._axes(t)]
        text = _linear_text(parts, e.const)
        return text if re.fullmatch(r"\w+(\[[^][]*\])?", text) else f"({text})"


def _linear_text(parts: list[tuple[str, int]], offset: int) -> str:
    """``c0*t0 + c1*t1 - 3`` as source text."""
    out = ""
    for text, coef in parts:
        term = text if abs(coef) == 1 else f"{text} * {abs(coef)}"
        out += (f" {'-' if coef < 0 else '+'} " if out else "-" if coef < 0 else "") + term
    if not out:
        return str(offset)
    return out if not offset else f"{out} {'-' if offset < 0 else '+'} {abs(offset)}"


# Expressions as Triton source: shared sub-expressions once, in a line of their own, and no line too long to read.


_LONG = 88
# operators and these functions give a bare literal the dtype of the other operands
_LITERALS_IN = frozenset({"min", "max", "where"})
_NATURAL = frozenset({"f32", "f16", "bf16", "i32", "i64"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


class Printer:
    """Prints expressions into ``lines``, with ``leaf`` giving the text of Arg, Acc and Index.

    Attributes:
        helpers: names of the helper functions used (`device_functions.HELPERS`).
        native: floats of 8 bits that the chip converts.
    """

    def __init__(
        self, leaf: Callable[[Expr], str], lines: list[str], namer: Namer, helpers: set[str],
        native: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.leaf, self.lines, self.namer, self.helpers, self.native = leaf, lines, namer, helpers, native
        self._same: dict[tuple[object, ...], int] = {}  # structure -> number of the distinct expression
        self._number: dict[int, int] = {}  # id of an Expr object -> the same (objects are kept alive by _kept)
        self._kept: list[Expr] = []
        self._uses: dict[int, int] = {}
        self._text: dict[int, str] = {}

    def all(self, exprs: tuple[Expr, ...]) -> list[str]:
        """Text of several expressions, which may share parts; literals come out typed."""
        for e in exprs:
            number = self._resolve(e)
            self._uses[number] = self._uses.get(number, 0) + 1
        return [typed(e.value, e.dtype) if isinstance(e, Const) else bare(self._print(e)) for e in exprs]

    def _resolve(self, e: Expr) -> int:
        """Number of the distinct expression that e is, by structure; a new one counts one use of each of its parts."""
        if id(e) in self._number:
            return self._number[id(e)]
        parts: list[int] = []
        if isinstance(e, Call):
            parts = [self._resolve(a) for a in e.args]
            key: tuple[object, ...] = (e.fn, e.dtype, *parts)
        else:  # repr tells 0.0 from -0.0 and finds nan equal to itself
            key = (type(e).__name__, repr(e))
        if key not in self._same:
            self._same[key] = len(self._same)
            for p in parts:
                self._uses[p] = self._uses.get(p, 0) + 1
        self._number[id(e)] = self._same[key]
        self._kept.append(e)
        return self._same[key]

    def _print(self, e: Expr) -> str:
        number = self._number[id(e)]
        if number not in self._text:
            text = self._call(e) if isinstance(e, Call) else self.leaf(e)
            if isinstance(e, Call) and (self._uses[number] > 1 or len(text) > _LONG):
                name = self.namer.take("v")
                self.lines.append(f"{name} = {bare(text)}")
                text = name
            self._text[number] = text
        return self._text[number]

    def _call(self, e: Call) -> str:
        if e.fn == "cast":
            return self.helped(cast_text(self._argument(e.args[0]), e.args[0].dtype, e.dtype, self.native))
        if e.fn == "pow" and (power := _small_power(e.args[1])):
            return "(" + " * ".join([self._argument(e.args[0], named=True)] * power) + ")"
        operands = list(e.args[1:] if e.fn == "where" else e.args)
        text = row(e.fn, operands[0].dtype)
        operator = text.startswith("(") and len(operands) > 1
        takes = operator or (e.fn in _LITERALS_IN and operands[0].dtype in _NATURAL)
        bare = takes and any(not isinstance(a, Const) for a in operands)
        heads = [self._argument(a) for a in e.args[: len(e.args) - len(operands)]]
        tails = [self._argument(a, bare=bare, named=text.count("{0}") > 1) for a in operands]
        if e.fn in _COMPARISONS and all(map(_is_index, operands)):  # in as many bits as indices have: half the registers of i64
            tails = [t.removesuffix(f".to({TRITON_TYPES['i64']})") for t in tails]
        return self.helped(text.format(*heads, *tails))

    def helped(self, text: str) -> str:
        """A text with the helper that it begins with noted."""
        if not text.startswith("@"):
            return text
        self.helpers.add(text[1 : text.index("(")])
        return text[1:]

    def _argument(self, e: Expr, *, bare: bool = False, named: bool = False) -> str:
        """Text of an argument: a bare literal where the operator gives it its dtype, a variable where it stands twice."""
        if isinstance(e, Const):
            return literal(e.value, e.dtype) if bare else typed(e.value, e.dtype)
        if named:
            self._uses[self._number[id(e)]] += 1
        return self._print(e)


def _is_index(e: Expr) -> bool:
    """Whether an expression is an index, or a number that indices may be compared with."""
    return isinstance(e, Index) or (isinstance(e, Const) and e.dtype == "i64" and abs(int(e.value)) < 1 << 31)


def _small_power(e: Expr) -> int:
    """2 or 3 where the exponent is that literal: a product, far cheaper than pow; else 0."""
    return int(e.value) if isinstance(e, Const) and e.value in (2, 3) else 0


def combine_source(state: tuple[Expr, ...], dtypes: tuple[str, ...], helpers: set[str]) -> str:
    """A monoid's merge of two states as a function ``combine(a0, .., b0, ..)``."""
    namer, lines = Namer(), list[str]()
    k = len(dtypes)
    names = [namer.take(f"{side}{i}") for side in "ab" for i in range(k)]

    def leaf(e: Expr) -> str:
        assert isinstance(e, Arg), e
        return names[e.pos]

    printer = Printer(leaf, lines, namer, helpers)
    out = ", ".join(printer.all(state))
    body = "".join(f"    {line}\n" for line in lines)
    return f"@triton.jit\ndef combine({', '.join(names)}):\n{body}    return {out}"


@dataclass(slots=True, kw_only=True)
class Frame:
    """What one kernel shares: its task, names and the helpers it needs.

    Attributes:
        reads, states, outs: variable names; the pointer arguments are these with ``_ptr`` behind.
        wide: whether indices need 64 bits.
        helpers, functions: names of library functions used, and source of the kernel's own.
        assigned: variables that have a value already.
        pointers: names of the buffers that are accessed by pointer.
        descriptors: parameter to the name of its buffer and its descriptor.
        native: floats of 8 bits that the chip converts and multiplies; ``operands``, names of the buffers whose pointers are
            to such floats, because a matrix unit takes them as they are. Other buffers of them are bits.
    """

    task: Task
    namer: Namer
    reads: dict[int, str]
    states: list[str]
    outs: list[str]
    wide: bool
    helpers: set[str] = field(default_factory=set[str])
    functions: list[str] = field(default_factory=list[str])
    assigned: set[str] = field(default_factory=set[str])
    pointers: set[str] = field(default_factory=set[str])
    descriptors: dict[str, tuple[str, Descriptor]] = field(default_factory=dict[str, tuple[str, Descriptor]])
    native: frozenset[str] = frozenset()
    operands: set[str] = field(default_factory=set[str])

    def descriptor(self, name: str, d: Descriptor) -> str:
        """The parameter that is a descriptor of a buffer; the same one for equal descriptors."""
        for param, held in self.descriptors.items():
            if held == (name, d):
                return param
        param = self.namer.take(f"{name}_desc")
        self.descriptors[param] = (name, d)
        return param

    def accumulators(self) -> tuple[str, ...]:
        """Names of the state's fields."""
        count = len(self.task.body)
        return tuple(self.namer.take("acc" if count == 1 else f"acc{k}") for k in range(count))

    def program(self) -> str:
        """The program's number along the grid."""
        return "pid = tl.program_id(0)" + (".to(tl.int64)" if self.wide else "")


@dataclass(frozen=True, slots=True)
class Written:
    """A finished kernel body: constants, lines, and how many programs run it."""

    constants: tuple[tuple[str, int], ...]
    lines: tuple[str, ...]
    programs: int


def frame(task: Task, name: str, native: frozenset[str] = frozenset()) -> tuple[Frame, str]:
    """Names for a task's kernel: the function's, then its dimensions' and tensors'."""
    function = Namer().take(name)  # a global: the variables inside may have the same name
    namer = Namer()
    held = [namer.take(d.name) for d in task.dims + task.reduce + task.inner_dims]
    reads = {p: namer.take(a.tensor) for p, a in task.reads.items()}
    states = [namer.take(a.tensor) for a in task.states]
    outs = [namer.take(a.tensor) for a in task.outs]
    namer.taken |= {f"{n}_ptr" for n in (*reads.values(), *states, *outs)}
    namer.taken -= set(held)  # the axes take these back
    wide = needs_64_bits(task)
    return Frame(task=task, namer=namer, reads=reads, states=states, outs=outs, wide=wide, native=native), function


def needs_64_bits(task: Task) -> bool:
    """Whether some index may leave int32; a factor of two is kept for lanes past the end and partial sums."""
    ranges = task.ranges
    affs = [a.offset for a in (*task.reads.values(), *task.states, *task.outs)]
    affs += [c.aff for a in task.reads.values() for c in a.checks]
    affs += [x.aff for e in task.exprs for x in walk(e) if isinstance(x, Index)]
    sizes = [points(task.dims), points(task.reduce)]
    return max([_reach(e, ranges) for e in affs] + sizes) >= 1 << 30


def _reach(e: Aff, ranges: Ranges) -> int:
    """A bound on the absolute value of every partial sum of an index expression."""
    total = abs(e.const)
    for atom, c in e.terms:
        lo, hi = span(Aff(((atom, 1),)), ranges)
        total += abs(c) * max(abs(lo), abs(hi))
    return total


class Scope:
    """One place in the kernel: a view of the axes, the lines written there, and the reduced state if there is one."""

    def __init__(self, frame: Frame, view: View, accs: tuple[str, ...] = (), *, narrow: bool = False) -> None:
        self.frame, self.view, self.accs = frame, view, accs  # accs: the inner values, in a body
        self.narrow = narrow  # what varies along one tile axis is loaded as a vector: a tile of it would decide how others lie
        self.lines: list[str] = []
        self.printer = Printer(self.leaf, self.lines, frame.namer, frame.helpers, frame.native)
        self._loaded: dict[int, str] = {}
        self._shared: dict[str, str] = {}

    def known(self, p: int, text: str) -> None:
        """A read that is loaded already."""
        self._loaded[p] = text

    def leaf(self, e: Expr) -> str:
        """Text of a read, a reduced state or an index; loads come at their first use."""
        if isinstance(e, Arg):
            if e.pos not in self._loaded:
                self._loaded[e.pos] = self.load(self.frame.task.reads[e.pos], self.frame.reads[e.pos])
            return self._loaded[e.pos]
        if isinstance(e, Acc | Let):
            return self.accs[e.field if isinstance(e, Acc) else e.pos]
        assert isinstance(e, Index), e
        text = self.view.text(e.aff, "index")
        if text.lstrip("-").isdigit():
            return typed(int(text), e.dtype)
        if not any(self.view.suffix[id(a)] for a in self.view.axes_of(e.aff)):  # a loop's variable may be a plain number
            return f"tl.cast({text}, {TRITON_TYPES[e.dtype]})"
        return f"({text}).to({TRITON_TYPES[e.dtype]})"

    def load(self, access: Access, name: str, *, raw: bool = False, empty: str = "") -> str:
        """A variable with the elements of an access.

        Args:
            raw: leave f16 and bf16 as they are, for a dot; else they become f32. Floats of 8 bits are as they are, else bits.
            empty: value of lanes past the end, where it matters.
        """
        view = self.view
        if self.narrow and (vector := self._vector(access, name)):
            return vector
        offset = view.text(access.offset, name)
        along = view.axes_of(access.offset)
        masks, masked = self._checks(access.checks, name)
        tails = [a for a in view.axes if a.ragged and (a in along or a in masked)]
        masks += [view.laid(a, a.inside()) for a in tails]
        if any((a.block or view.suffix[id(a)]) and a not in along for a in masked):
            offset += f" + tl.zeros({view.shape}, tl.int32)"
        if native := raw and access.dtype in FLOAT8:
            self.frame.operands.add(name)
        text = self._pointer(name, offset)
        if masks:
            text += f", mask={' & '.join(masks)}"
            if access.checks and access.other is not None:
                text += f", other={literal(access.other, 'f32' if native else access.dtype)}"
            elif empty:
                text += f", other={empty}"
        wide = ".to(tl.float32)" if access.dtype in HALVES and not raw else ""
        out = self.frame.namer.take(name) if name in self.frame.assigned else name
        self.frame.assigned.add(out)
        self.lines.append(f"{out} = tl.load({text}){wide}")
        return out

    def _vector(self, access: Access, name: str) -> str:
        """An access along one tile axis, loaded as a vector and laid in the tile; "" where it runs along none or both."""
        affs = (access.offset, *(c.aff for c in access.checks))
        axes = {id(a): a for e in affs for a in self.view.axes_of(e) if a.block}
        if len(axes) != 1 or len(self.view.tiled) < 2:
            return ""
        (axis,) = axes.values()
        flat = Scope(self.frame, View([(a, "") for a in self.view.axes if not a.block or a is axis], self.view.ranges))
        out = flat.load(access, name)
        self.lines += flat.lines
        return self.view.laid(axis, out)

    def results(self, values: tuple[Expr, ...]) -> list[str]:
        """Texts of values to be stored; a store rounds to the dtype of its buffer, so a last cast from f32 is left to it."""
        return self.printer.all(tuple(_unrounded(e) for e in values))

    def store_results(self, states: tuple[str, ...] = ()) -> list[str]:
        """Store what ``then`` makes of the states that the scope has (``full``), or the states themselves (``partial``); the
        lines of the scope."""
        task = self.frame.task
        values = list(states) if task.mode == "partial" else self.results(task.then if task.monoid else task.body)
        for access, name, value in zip(task.outs, self.frame.outs, values, strict=True):
            self.store(access, name, value)
        return self.lines

    def store(self, access: Access, name: str, value: str) -> None:
        """Write a value over the whole tile, less the lanes past the end and those that fail a check."""
        view = self.view
        offset = view.text(access.offset, name)
        along = view.axes_of(access.offset)
        absent = [a for a in view.tiled if a not in along]
        # of extent one: lane 0 is the element; of more: the value is the same along it, and kept once
        missing = [view.laid(a, a.name) + (" * 0" if a.size > 1 else "") for a in absent]
        offset = " + ".join(([offset] if offset != "0" or not missing else []) + missing)
        text = self._pointer(name, offset)
        masks = self._checks(access.checks, name)[0]
        masks += [view.laid(a, a.inside()) for a in view.axes if a.ragged and not (a in absent and a.size > 1)]
        masks += [view.laid(a, a.define(f"{a.name} == 0", f"{a.name}_first")) for a in absent if a.size > 1]
        self.lines.append(f"tl.store({text}, {value}" + (f", mask={' & '.join(masks)})" if masks else ")"))

    def _pointer(self, name: str, offset: str) -> str:
        self.frame.pointers.add(name)
        return f"{name}_ptr" if offset == "0" else f"{name}_ptr + {offset}"

    def _checks(self, checks: tuple[Check, ...], name: str) -> tuple[list[str], list[Axis]]:
        """Masks of an access, those along one axis as one variable of that axis; and the axes they vary along."""
        single: dict[int, list[str]] = {}
        masks: list[str] = []
        axes = [a for a in self.view.axes if any(a in self.view.axes_of(c.aff) for c in checks)]
        for c in checks:
            along = self.view.axes_of(c.aff)
            if len(along) == 1:
                inner = View([(along[0], "")], self.view.ranges)
                text = inner.text(c.aff, f"{name}_edge")
                single.setdefault(id(along[0]), []).append(f"({text} {c.op} {c.bound})")
            elif along:
                text = self.view.text(c.aff, f"{name}_edge")
                if text not in self._shared:
                    self._shared[text] = self.frame.namer.take(f"{name}_edge")
                    self.lines.append(f"{self._shared[text]} = {text}")
                masks.append(f"({self._shared[text]} {c.op} {c.bound})")
            else:
                masks.append(str(_holds(c)))
        for axis in axes:
            if id(axis) in single:
                masks.append(self.view.laid(axis, axis.define(" & ".join(single[id(axis)]), f"{name}_ok")))
        return masks, axes


def _unrounded(e: Expr) -> Expr:
    if isinstance(e, Call) and e.fn == "cast" and e.dtype in HALVES and compute(e.args[0].dtype) == "f32":
        return e.args[0]
    return e


def _holds(c: Check) -> bool:
    value = c.aff.const
    return value >= c.bound if c.op == ">=" else value < c.bound if c.op == "<" else value == c.bound


# Which tiles of a reduced axis a tile of rows visits, and which of them need a mask.
#
# Taken from guards ``where(c, score, hidden)`` in which c is an inequality of a row dimension, the key and scalars: causal
# masks and sliding windows. Where such a mask leaves nothing, no tile is loaded; where it leaves everything, it is not
# computed.


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRange:
    """The keys that a tile of rows visits.

    Attributes:
        lines: what the bounds need, to be written before the loops.
        first, end: bounds of the keys that any row may see; ``first`` is a multiple of the tile.
        clear: the end of the tiles in which every row sees every key (from ``first`` on); ``""`` where there are none.
        grows: whether later rows see more keys.
        masked: the most tiles between ``clear`` and ``end``.
    """

    lines: tuple[str, ...]
    first: str
    end: str
    clear: str
    grows: bool
    masked: int


def key_range(frame: Frame, attention: Attention, batch: Axis, rows: Axis, key: Axis, tile: str) -> KeyRange:
    """Bounds of the loops over keys, for rows ``[pid_row * tile, (pid_row + 1) * tile)`` at one batch point."""
    ragged = key.size % key.block
    lines: list[str] = []
    highs, lows, clears = list[str](), list[str](), list[str]()
    guards, whole = _guards(attention.score, attention.weights.hidden(attention.score.dtype))
    scalars, masked = View([(batch, "")], frame.task.ranges), 1
    for e in guards:  # e >= 0 wherever the score is not hidden
        found = _solved(e, rows, key, scalars, tile)
        if found is None:
            whole = False
            continue
        highest, lowest_, b = found
        masked = max(masked, _partly_seen(e, rows, key))
        # // truncates: for a negative reach that is one key more than needed, never one less
        if b < 0:
            highs.append(f"{_over(highest, -b)} + 1")  # key <= reach / -b
            clears.append(f"{_over(f'tl.maximum({lowest_}, {b})', -b)} + 1")
        else:
            lows.append(f"-{_over(highest, b)}")  # key >= -reach / b
            whole = False
    first, end, clear = "0", str(key.size), ""
    if lows:
        first = frame.namer.take(f"{key.name}_first")
        lines.append(f"{first} = tl.maximum({lows[0]}, 0)")
        lines += [f"{first} = tl.maximum({first}, {v})" for v in lows[1:]]
        lines.append(f"{first} = {first} // {key.tile} * {key.tile}")
    if highs:
        end = frame.namer.take(f"{key.name}_end")
        lines.append(f"{end} = tl.minimum({highs[0]}, {key.size})")
        lines += [f"{end} = tl.minimum({end}, {v})" for v in highs[1:]]
    if whole and (clears or ragged) and key.size >= 2 * key.block:
        clear = frame.namer.take(f"{key.name}_clear")
        lines.append(f"{clear} = {key.size // key.block * key.block}")
        lines += [f"{clear} = tl.minimum({clear}, ({v}) // {key.tile} * {key.tile})" for v in clears]
    grows = any("pid_row" in h for h in highs)
    return KeyRange(lines=tuple(lines), first=first, end=end, clear=clear, grows=grows, masked=masked)


def _partly_seen(e: Aff, rows: Axis, key: Axis) -> int:
    """The most tiles of keys that some row of a tile sees and another one does not, by ``e >= 0``."""
    b = abs(e.coef(key.dims[0].name))
    steps = [(abs(e.coef(d.name)), d.size) for d in rows.dims]
    reach = steps[0][0] * (rows.block - 1) if len(steps) == 1 else sum(a * (n - 1) for a, n in steps)
    if len(steps) == 1 and steps[0][0] == b == 1 and len(e.terms) == 2 and rows.block % key.block == 0:
        return -(-(rows.block + e.const - (e.const + 1) // key.block * key.block) // key.block)  # tiles begin alike
    return 1 + -(-(reach // b + 1) // key.block)


def _solved(e: Aff, rows: Axis, key: Axis, scalars: View, tile: str) -> tuple[str, str, int] | None:
    """Greatest and least value of ``e - b * key`` over the tile of rows, as source text, and b; ``None`` if not that simple."""
    b = e.coef(key.dims[0].name) if len(key.dims) == 1 else 0
    names = [d.name for d in rows.dims]
    own = {d.name for d in scalars.axes[0].dims}
    if b == 0 or not e.is_affine or dims_of(e) - {*names, key.dims[0].name} - own:
        return None
    rest = Aff(tuple((a, c) for a, c in e.terms if a in own), 0)
    high, low = "", ""
    for d in rows.dims:
        a = e.coef(d.name)
        if a == 0:
            continue
        if len(names) == 1:
            ends = f"tl.minimum(pid_row * {tile} + {tile} - 1, {rows.size - 1})", f"pid_row * {tile}"
        else:  # a tile may hold any of them
            ends = str(d.size - 1), "0"
        top, bottom = ends if a > 0 else ends[::-1]
        high, low = _plus(high, _times_text(top, a)), _plus(low, _times_text(bottom, a))
    if rest.terms:
        text = scalars.text(rest)
        high, low = _plus(high, text), _plus(low, text)
    return _plus(high, str(e.const)) or "0", _plus(low, str(e.const)) or "0", b


def _times_text(text: str, factor: int) -> str:
    return text if factor == 1 else f"{text} * {factor}"


def _plus(text: str, more: str) -> str:
    if not text or more == "0":
        return text or more
    return f"{text} - {more[1:]}" if more.startswith("-") and more[1:].isdigit() else f"{text} + {more}"


def _over(text: str, divisor: int) -> str:
    return f"({text})" if divisor == 1 else f"(({text}) // {divisor})"


def _guards(e: Expr, hidden: Const) -> tuple[list[Aff], bool]:
    """Affine expressions that are not negative wherever a score is not hidden; whether that is all."""
    found: list[Aff] = []
    whole = True
    while isinstance(e, Call) and e.fn == "where" and e.args[2] == hidden:
        for aff in _conditions(e.args[0]):
            if aff is None:
                whole = False
            else:
                found.append(aff)
        e = e.args[1]
    return found, whole


def unguarded(e: Expr, hidden: Const) -> Expr:
    """A score without its masks, for tiles in which every row sees every key."""
    while isinstance(e, Call) and e.fn == "where" and e.args[2] == hidden:
        e = e.args[1]
    return e


def _conditions(test: Expr) -> Iterator[Aff | None]:
    """The conjuncts of a test as ``aff >= 0``; ``None`` for one that is none."""
    if isinstance(test, Call) and test.fn == "and":
        for a in test.args:
            yield from _conditions(a)
        return
    if not isinstance(test, Call) or test.fn not in ("ge", "le", "gt", "lt"):
        yield None
        return
    a, b = place_of(test.args[0]), place_of(test.args[1])
    if a is None or b is None:
        yield None
        return
    yield {"ge": a - b, "le": b - a, "gt": a - b - 1, "lt": b - a - 1}[test.fn]
