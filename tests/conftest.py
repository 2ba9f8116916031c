"""Settings of all tests: property tests have no deadline, since a first call pays for imports."""

from hypothesis import settings

settings.register_profile("tapestry", deadline=None)
settings.load_profile("tapestry")
