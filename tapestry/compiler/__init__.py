"""From a model to a build: the passes in order, what they hand on, and what holds a build to its model."""
