"""One plan for several sizes: the integers of a program as formulas."""
