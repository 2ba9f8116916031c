"""Running states of every monoid, in IR text."""

from __future__ import annotations

FIELDS = {
    "sum": (("f32", "0.0"),), "prod": (("f32", "1.0"),), "max": (("f32", "-inf"),), "min": (("i64", "9223372036854775807"),),
    "affine": (("f64", "1.0"), ("f64", "0.0")), "logsumexp": (("f32", "-inf"), ("f32", "0.0")),
    "argmax": (("f32", "-inf"), ("i64", "9223372036854775807")),
}  # fmt: skip
GUARDS = {"up to": "i - j", "before": "i - j - 1", "from": "j - i", "after": "j - i - 1"}


def running(monoid: str, guard: str, *, size: int = 11, first: bool = False) -> str:
    """A scan of every field of a monoid along the first or second of three axes."""
    shape, place, dims = (
        (f"{size}, 5, 3", "j, a, c", "i: {0}, a: 5, c: 3") if first else (f"5, {size}, 3", "a, j, c", "a: 5, i: {0}, c: 3")
    )
    names = [f"x{k}" for k in range(len(FIELDS[monoid]))]
    types = [d for d, _ in FIELDS[monoid]]
    lines = ["graph g", *(f"input {n}: {d}[{shape}]" for n, d in zip(names, types, strict=True))]
    outs = ", ".join(f"y{k}: {d}[{shape}]" for k, d in enumerate(types))
    lines.append(f"{outs} = op [{dims.format(size)} | j: {size} {monoid}]")
    reads = (f"{n}[{place}] when {guard} >= 0 else {z}" for n, (_, z) in zip(names, FIELDS[monoid], strict=True))
    lines += [
        f"  reads {', '.join(reads)}",
        f"  body {', '.join(names)}",
        "output " + ", ".join(f"y{k}" for k in range(len(names))),
    ]
    return "\n".join(lines) + "\n"
