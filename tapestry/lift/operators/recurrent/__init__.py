"""Operators with a state that runs over steps."""
