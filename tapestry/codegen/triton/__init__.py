"""The Triton target: one generator for every block operation, from its index space alone."""
