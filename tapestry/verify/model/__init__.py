"""The graph of a plan against the model file: the file is run by a reference, and every operation held to its values."""
