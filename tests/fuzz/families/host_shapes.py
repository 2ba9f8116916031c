"""Results whose shape depends on the data, which stay on the host, and what is computed of them there."""

from __future__ import annotations

from tests.fuzz.generate.draw import Draw, Value


def found(d: Draw) -> None:
    """NonZero, Unique and Compress of exact values, and what may follow on the host: a size, a selection, a cast."""
    x = d.pick(rank=range(1, 4), exact=True, dtypes=("float32", "int64", "float32"))
    kind = d.rng.randrange(3)
    if kind == 0:
        (y,) = d.add("NonZero", [x], exact=True)
    elif kind == 1:
        y = d.add("Unique", [x], d.rng.choice([1, 4]), exact=True, sorted=1)[0]
    else:
        at = d.rng.randrange(x.rank)
        keep = d.input(d.data((x.shape[at],), "bool"))
        (y,) = d.add("Compress", [x, keep], exact=True, axis=at)
    _after(d, y)


def _after(d: Draw, y: Value) -> None:
    """Something of a known shape behind a value of the host, or nothing."""
    kind = d.rng.randrange(4)
    if kind == 0:
        d.add("Shape", [y], exact=True)
    elif kind == 1:
        d.add("Size", [y], exact=True)
    elif kind == 2 and y.dtype in ("int64", "float32") and y.array.size:
        d.add("ReduceMax", [y], exact=True, keepdims=0)


FAMILIES = {"found": found}
