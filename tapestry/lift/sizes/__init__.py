"""What a model does with its sizes, at all sizes of a range at once."""
