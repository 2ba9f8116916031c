"""Benchmarks. Plans are for the preset ``cpu`` unless a benchmark says otherwise, so that figures do not hang on a cache."""

import os

os.environ.setdefault("TAPESTRY_TOPOLOGY", "cpu")
