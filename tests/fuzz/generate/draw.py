"""A model under construction: nodes are evaluated as they are added, so that every value, shape and dtype is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from tests.fuzz.generate.evaluate import Array, Unfit, is_float, node_values, reads
from tests.fuzz.generate.opset_forms import earlier

LARGEST = 1500  # elements of a value: many small models find more than few large ones
LOUDEST = 1e3  # magnitude of a value; beyond it tolerances relative to the greatest magnitude hide too much
FLOAT_TYPES = ("float32",) * 12 + ("float64", "float16")


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the model.

    Attributes:
        exact: no rounding is behind it, so that comparing, rounding or sorting it gives one right answer.
        constant: it is a weight.
    """

    name: str
    array: Array
    exact: bool
    constant: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.array.shape

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.array.ndim

    @property
    def dtype(self) -> str:
        """Name of its numpy type."""
        return self.array.dtype.name

    @property
    def floating(self) -> bool:
        """Whether it is of a floating-point type."""
        return is_float(self.array)


@dataclass(slots=True)
class Draw:
    """Nodes, inputs and weights so far; ``rng`` decides everything."""

    rng: random.Random
    opset: int
    zeros: bool = False
    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    inputs: dict[str, Array] = field(default_factory=dict[str, Array])
    weights: dict[str, Array] = field(default_factory=dict[str, Array])
    count: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # shared with the bodies inside
    depth: int = 0  # of the control flow around it

    # choices
    def chance(self, p: float) -> bool:
        """True with a probability."""
        return self.rng.random() < p

    def size(self, most: int = 7) -> int:
        """An extent: mostly small and awkward, sometimes 1, and 0 in models that have it."""
        if self.zeros and self.chance(0.12):
            return 0
        return self.rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13][: max(1, most + 1)])

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        """A shape of at most `LARGEST` elements."""
        rank = self.rng.choice([0, 1, 2, 2, 3, 3, 4]) if rank is None else rank
        while True:
            out = tuple(self.size(9 if rank < 4 else 5) for _ in range(rank))
            if np.prod(out, dtype=np.int64) <= LARGEST // 2:
                return out

    def axis(self, v: Value) -> int:
        """An axis of a value, counted from either end.

        Raises:
            Unfit: it is a scalar.
        """
        if not v.rank:
            raise Unfit("a scalar has no axis")
        return self.rng.randrange(-v.rank, v.rank)

    def data(self, shape: Sequence[int], dtype: str = "float32", lo: int = -9, hi: int = 9) -> Array:
        """Random data: floats are normal, or eighths (which add up exactly); integers lie in [lo, hi]."""
        rng = np.random.default_rng(self.rng.getrandbits(32))
        kind = np.dtype(dtype).kind if dtype != "bfloat16" else "f"
        if kind == "f":
            eighths = rng.integers(-16, 17, shape) / 8
            return np.asarray(eighths if self.chance(0.5) else rng.standard_normal(shape)).astype(dtype)
        if kind == "b":
            return np.asarray(rng.integers(0, 2, shape)).astype(bool)
        return np.asarray(rng.integers(0 if kind == "u" else lo, hi + 1, shape)).astype(dtype)

    # values
    def weight(self, array: Any) -> Value:
        """A constant."""
        a = np.asarray(array)
        v = Value(self.name("w"), a, exact=True, constant=True)
        self.weights[v.name], self.values[v.name] = a, v
        return v

    def ints(self, *values: int) -> Value:
        """A constant vector of 64-bit integers."""
        return self.weight(np.array(values, np.int64))

    def input(self, array: Array) -> Value:
        """A graph input, with the value that it will be fed."""
        v = Value(self.name("x"), array, exact=True)
        self.inputs[v.name], self.values[v.name] = array, v
        return v

    def fresh(self, shape: Sequence[int], dtype: str = "float32", **limits: int) -> Value:
        """Random data as a weight or as an input."""
        a = self.data(shape, dtype, **limits)
        return self.weight(a) if self.chance(0.5) else self.input(a)

    def pick(
        self, *, rank: int | range | None = None, floating: bool = True, exact: bool = False, dtypes: Sequence[str] = ()
    ) -> Value:
        """A value that is there, the later ones more likely, or a new input when none fits (or by chance)."""
        ranks = range(rank, rank + 1) if isinstance(rank, int) else rank or range(9)
        fit = [
            v for v in self.values.values()
            if v.rank in ranks and (v.dtype in dtypes if dtypes else not floating or v.floating)
            and (v.exact or not exact) and not v.constant and (self.zeros or v.array.size)
        ]  # fmt: skip
        if fit and self.chance(0.9):
            return fit[max(self.rng.randrange(len(fit)), self.rng.randrange(len(fit)))]
        dtype = self.rng.choice(dtypes or FLOAT_TYPES)
        return self.input(self.data(self.shape(self.rng.choice([r for r in ranks if r < 6])), dtype))

    def mate(self, v: Value, shape: Sequence[int] | None = None) -> Value:
        """A second operand of the same dtype: a value of the shape (or, when none is asked, one that broadcasts)."""
        wanted = v.shape if shape is None else tuple(shape)
        fit = [u for u in self.values.values() if u.dtype == v.dtype and u.shape == wanted and not u.constant]
        if fit and self.chance(0.6):
            return self.rng.choice(fit)
        if shape is None and self.chance(0.6):
            cut = self.rng.randrange(v.rank + 1)
            wanted = tuple(1 if self.chance(0.3) else s for s in v.shape[cut:])
            if self.chance(0.2):
                wanted = (self.rng.choice([1, 2, 3]), *((1,) * (v.rank - len(wanted))), *wanted)
        return self.fresh(wanted, v.dtype)

    # nodes
    def add(
        self,
        op: str,
        ins: Sequence[Value | None],
        outs: int | Sequence[bool] = 1,
        *,
        exact: bool | Sequence[bool] = False,
        loud: bool = False,
        **attrs: Any,
    ) -> list[Value]:
        """A node, evaluated.

        Args:
            outs: how many outputs, or which of them (others have no name).
            exact: the results are as exact as the inputs (moving data, selecting, integers); or which results are exact.
            loud: a result may be of any magnitude, or infinite.

        Raises:
            Unfit: no evaluator runs it, or a result is not finite, too large, or of a type that is not lifted.
        """
        wanted = [True] * outs if isinstance(outs, int) else outs
        names = [self.name("t") if w else "" for w in wanted[: len(wanted) - [*reversed(wanted)].index(True)]]
        given = {k: a for k, a in attrs.items() if a is not None}
        node = earlier(
            helper.make_node(op, [v.name if v else "" for v in ins], names, self.name(op), **given), self.opset, self.weights
        )
        given_values = {n: self.values[n].array for n in reads(node) if n in self.values} | {v.name: v.array for v in ins if v}
        found = node_values(node, given_values, self.opset)
        sure = [all(v.exact for v in ins if v) and exact] * len(names) if isinstance(exact, bool) else exact
        made: list[Value] = []
        for name, certain in [(n, c) for n, c in zip(names, sure, strict=True) if n]:
            a = found[name]
            if a.size > LARGEST or (not self.zeros and not a.size):
                raise Unfit(f"{op}: {a.shape}")
            if is_float(a) and not loud and not np.all(np.abs(a.astype(np.float64)) <= LOUDEST):  # NaN fails as well
                raise Unfit(f"{op}: values of no use")
            made.append(Value(name, a, certain))
        self.nodes.append(node)
        self.values.update({v.name: v for v in made})
        return made

    def attempt(self, family: Callable[[Draw], None]) -> bool:
        """Let a family add its nodes; what it began and could not finish is taken back."""
        nodes, values, inputs, weights = len(self.nodes), dict(self.values), dict(self.inputs), dict(self.weights)
        try:
            family(self)
        except (Unfit, ValueError, IndexError):
            del self.nodes[nodes:]
            self.values, self.inputs, self.weights = values, inputs, weights
            return False
        return True

    def forget(self, v: Value) -> None:
        """Let nothing else read a value, and make it no output."""
        del self.values[v.name]

    def name(self, prefix: str) -> str:
        """A name that nothing has."""
        return f"{prefix}{next(self.count)}"
