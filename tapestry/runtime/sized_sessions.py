"""Sessions of a build for several sizes: one for each size that was wanted lately, all on one copy of the weights.

A size that was never seen costs the formulas of its region and the binding of kernels that are there: nothing is searched,
verified or compiled. What is compiled for a region is compiled when the first of its sizes is wanted, at the sizes at which
its plan was made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock

from tapestry.build.sized_builds import SizedBuild
from tapestry.build.store import Build
from tapestry.ir.many_sizes.equal_launches import equal_launches
from tapestry.ir.many_sizes.size_formula import Sizes
from tapestry.runtime.session import Session

KEPT = 32  # sizes whose kernels stay bound
Equal = Mapping[tuple[int, int], int]
"""A number for a launch, by step and device: equal where kernels are one function."""
Open = Callable[[Build, bytes, bool, Equal], Session]
"""(build, derived constants, whether kernels may be compiled, launches that are one function) to a session."""


class SizedSessions:
    """Gives sessions by size.

    Attributes:
        bound: how many sizes were bound.
    """

    def __init__(self, sized: SizedBuild, open_one: Open) -> None:
        self.sized, self._open, self.bound = sized, open_one, 0
        self._there: OrderedDict[Sizes, Session] = OrderedDict()
        self._equal: dict[int, Equal] = {}
        self._busy = Lock()

    def at(self, sizes: Sizes) -> Session:
        """The session for some sizes.

        Raises:
            TapestryError: the build is not for them.
        """
        with self._busy:
            found = self._there.get(sizes)
            if found is None:
                found = self._there[sizes] = self._bind(sizes)
                if len(self._there) > KEPT:
                    self._there.popitem(last=False)
            self._there.move_to_end(sizes)
            return found

    def prepare(self) -> None:
        """Compile what the kernels of every region need."""
        with self._busy:
            for k in range(len(self.sized.regions)):
                self._prepare(k)

    def _prepare(self, k: int) -> Equal:
        if k not in self._equal:
            r = self.sized.regions[k]
            found = equal_launches(r.plan)
            self._open(self.sized.at(r.made_at)[1], r.constants, True, found)
            self._equal[k] = found
        return self._equal[k]

    def _bind(self, sizes: Sizes) -> Session:
        k, build = self.sized.at(sizes)
        equal = self._prepare(k)
        self.bound += 1
        return self._open(build, self.sized.regions[k].constants, False, equal)
