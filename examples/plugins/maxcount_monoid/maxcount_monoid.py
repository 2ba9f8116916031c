"""The monoid of (maximum, how often it was reached)."""

from tapestry.ir.expr import call
from tapestry.ir.monoid import Monoid, lowest, number


def combine(a, b):
    """The larger maximum, with the counts of those that reach it."""
    best = call("max", a[0], b[0])
    none = number(0, a[1].dtype)
    left, right = (call("where", call("eq", s[0], best), s[1], none) for s in (a, b))
    return best, call("add", left, right)


MAXCOUNT = Monoid(name="maxcount", fields=("m", "n"), zero=lambda d: (lowest(d[0]), number(0, d[1])), combine=combine)
