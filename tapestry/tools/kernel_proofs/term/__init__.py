"""Terms: what a kernel and an operation compute, and whether they are the same."""
