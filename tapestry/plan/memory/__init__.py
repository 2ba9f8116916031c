"""Plans where memory is short."""
