"""Rules that cut an operation, in space or in time."""
