"""Settings of all tests (property tests have no deadline, since a first call pays for imports), and torch's threads."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("tapestry", deadline=None)
settings.load_profile("tapestry")


def _set(n: int) -> Iterator[None]:
    import torch  # not before tapestry says how (`flags.before_torch`)

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What our own kernels want."""
    yield from _set(1)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread: our own kernels, where a compiler is; two: torch's."""
    yield from _set(request.param)
