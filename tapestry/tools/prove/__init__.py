"""Whether somebody else's parallel program computes a model: both are written as values of one table, and compared there."""
