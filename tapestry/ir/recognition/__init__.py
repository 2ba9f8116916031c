"""What an operation is, recognised from its projections and its body alone."""
