"""The builds of one session: one model at one or more sizes, of which the inputs' sizes choose one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tapestry import api
from tapestry.build.cache import Cache
from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.sizes.size_formula import Sizes
from tapestry.ir.types import Tensor
from tapestry.runtime import kept_state
from tapestry.runtime.feeds import check_indices, index_bounds
from tapestry.runtime.kept_state import State
from tapestry.runtime.session import as_numpy, check_feeds, shapes_of
from tapestry.runtime.sized_sessions import KEPT

Given = str | Path | api.Compiled
"""A build directory, or what was compiled."""


@dataclass(frozen=True)
class Member:
    """One build."""

    compiled: api.Compiled

    @property
    def graph(self) -> Graph:
        """What it computes."""
        return self.compiled.build.plan.graph

    @cached_property
    def state(self) -> State | None:
        """What stays on the devices between steps."""
        return kept_state.read(self.compiled.build.report, self.graph)

    @cached_property
    def caches(self) -> Sequence[Cache]:
        """The same, one by one."""
        return self.state.caches if self.state else ()

    @cached_property
    def rows(self) -> int:
        """Of a step of what keeps caches, or of their first axis, if those are more; 0 where nothing is kept."""
        names = [c.past for c in self.caches] + ([self.state.mask] if self.state else [])
        return max((self.graph.tensors[n].shape[0] for n in names), default=0)

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """What a caller gives."""
        stay = {c.past for c in self.caches}
        return {t: self.graph.tensors[t] for t in self.graph.inputs if t not in stay}

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        """What a caller may ask for."""
        stay = {c.present for c in self.caches}
        return {t: self.graph.tensors[t] for t in self.compiled.build.program.outputs if t not in stay}

    @cached_property
    def widest(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs and outputs with as many cells along each axis as at any size."""
        if (sized := self.compiled.sized) is None:
            return self.inputs, self.outputs

        def most(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            shapes = {n: zip(*(r.widest(n) for r in sized.regions), strict=True) for n in tensors}
            return {n: replace(t, shape=tuple(max(some) for some in shapes[n])) for n, t in tensors.items()}

        return most(self.inputs), most(self.outputs)

    @cached_property
    def bounds(self) -> Any:
        """What its indices may be."""
        return [b for b in index_bounds(self.graph) if b[0] in self.inputs]

    def checked(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, over the caller's memory where that can be. Of a build for several sizes as they are: they say which.

        Raises:
            TapestryError: one is missing, unknown, or of another shape or dtype, or has an index outside its table.
        """
        if self.compiled.sized is not None:
            return dict(feeds)
        checked = check_feeds(feeds, list(self.inputs.values()))
        check_indices(checked, self.bounds)
        return checked

    def wanted(self, names: Sequence[str] | None) -> tuple[str, ...]:
        """The outputs of those names, by default all.

        Raises:
            TapestryError: there is no such output.
        """
        unknown = next((n for n in names or () if n not in self.outputs), None)
        if unknown is not None:
            raise TapestryError(f"there is no output '{unknown}'", hint=f"the outputs are {', '.join(self.outputs)}")
        return tuple(self.outputs) if names is None else tuple(names)


class KnownSizes:
    """A build for several sizes at those that were wanted lately; nothing of it is loaded."""

    def __init__(self) -> None:
        self._there: OrderedDict[tuple[int, Sizes], Member] = OrderedDict()

    def of(self, member: Member, feeds: Mapping[str, Any]) -> tuple[Member, Sizes]:
        """The member at the sizes of some inputs, and the sizes; one of one size as it is.

        Raises:
            TapestryError: it is not for these sizes.
        """
        sized = member.compiled.sized
        if sized is None:
            return member, ()
        sizes = sized.sizes_of(shapes_of(feeds))
        key = (id(member), sizes)
        if key not in self._there:
            self._there[key] = Member(member.compiled.planned(sizes))
            if len(self._there) > KEPT:
                self._there.popitem(last=False)
        self._there.move_to_end(key)
        return self._there[key], sizes


def members(builds: Sequence[Given]) -> list[Member]:
    """The builds of a session.

    Raises:
        TapestryError: they are not of one model.
    """
    out = [Member(b if isinstance(b, api.Compiled) else api.load(b)) for b in builds]
    if not out:
        raise TapestryError("a session of no build")
    first = out[0].compiled.build
    for m in out[1:]:
        build = m.compiled.build
        if build.model_sha256 != first.model_sha256 or build.program.devices != first.program.devices:
            what = "the builds of a session are of one model, on as many devices"
            raise TapestryError(what, where=build.model, why=f"another one is of {first.model}")
        if (m.state and m.state.capacity) != (out[0].state and out[0].state.capacity):
            what = "the builds of a session keep caches of one capacity"
            raise TapestryError(what, why=f"{m.state and m.state.capacity} and {out[0].state and out[0].state.capacity}")
    return out


def chosen(of: Sequence[Member], feeds: Mapping[str, Any]) -> int:
    """The member whose inputs have these sizes; of one alone, that one.

    Raises:
        TapestryError: none has; the sizes that there are, are said.
    """
    if len(of) == 1:
        return 0
    try:
        given = {n: tuple(as_numpy(v).shape) for n, v in feeds.items()}
    except (ValueError, TypeError, RuntimeError, BufferError) as e:
        raise TapestryError(f"an input is no array: {e}") from None
    for k, m in enumerate(of):
        if all(given.get(n) == t.shape for n, t in m.inputs.items() if not t.on_host):
            return k
    sizes = "; ".join(", ".join(f"{n} {list(t.shape)}" for n, t in m.inputs.items()) for m in of)
    said = ", ".join(f"{n} {list(s)}" for n, s in given.items())
    raise TapestryError(f"no build of this session takes {said}", hint=f"the sizes are: {sizes}")
