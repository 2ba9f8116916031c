"""Where source is written: loads, masks, stores and expressions at one place of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from tapestry.codegen.blocks.lowered import Access, Check, Task, points
from tapestry.codegen.blocks.operands import HALVES, compute
from tapestry.codegen.triton.task.descriptors import Descriptor
from tapestry.codegen.triton.task.primitives import TRITON_TYPES, literal, typed
from tapestry.codegen.triton.text.axes import Axis, Namer, View
from tapestry.codegen.triton.text.expressions import Printer
from tapestry.ir.expr import Acc, Arg, Call, Expr, Index, Let, arg_positions, walk
from tapestry.ir.index import Aff, Ranges, span
from tapestry.ir.recognition.route_groups import guarded
from tapestry.ir.types import FLOAT8


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
        loose: whether rows of other groups may be left as they are (`ir.recognition.route_groups`).
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
    loose: bool = False
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
        self.own, self._along = "", list[Axis]()  # a mask of the rows that are of the group, and the axes it varies along
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
        masks += [self.own] if self.own and all(a in along for a in self._along) else []
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
        return self.values(tuple(_unrounded(e) for e in values))

    def values(self, exprs: tuple[Expr, ...]) -> list[str]:
        """Texts of values; what only rows of a group need is loaded for those alone."""
        found = guarded(exprs[0]) if len(exprs) == 1 else None
        if found is None or not isinstance(e := exprs[0], Call):
            return self.printer.all(exprs)
        (test,) = self.printer.all(e.args[:1])
        used = {id(a) for p in arg_positions((found.wanted,)) for a in self.view.axes_of(self.frame.task.reads[p].offset)}
        own = self.frame.namer.take("own")
        self.lines.append(f"{own} = {test}")
        self.own, self._along = own, [a for a in self.view.axes if id(a) in used]
        (value,) = self.printer.all((found.value,))
        return [f"tl.where({own}, {value}, 0)"]

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
        masks += [self.own] if self.own and self.frame.loose else []
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
