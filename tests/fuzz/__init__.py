"""Random models, plans and meshes against independent evaluators: generator, trial, shrinker, campaign."""
