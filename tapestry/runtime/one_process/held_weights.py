"""Weights of one device by buffer, each read when it is first asked for: one that is there packed already need not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping

from tapestry.runtime.target_protocol import Array


class HeldWeights(MutableMapping[str, Array]):
    """A table whose values are read when they are first wanted."""

    def __init__(self) -> None:
        self._sources: dict[str, Callable[[], Array]] = {}
        self._there: dict[str, Array] = {}

    def promise(self, name: str, read: Callable[[], Array]) -> None:
        """A weight that is read by a function."""
        self._sources[name] = read

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> Array:
        if name not in self._there:
            self._there[name] = self._sources[name]()
        return self._there[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self._sources[name], self._there[name] = (lambda: value), value

    def __delitem__(self, name: str) -> None:
        del self._sources[name]
        self._there.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
