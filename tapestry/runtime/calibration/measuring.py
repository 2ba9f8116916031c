"""Measuring this machine, and the topology document that is made of it."""

from __future__ import annotations
