"""Operators of windows that slide over an image."""
