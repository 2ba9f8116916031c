"""A kernel in its own coordinates, and its form: what both targets print."""
