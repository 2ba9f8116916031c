"""Sizes as symbols: integers of a graph and of its program that follow from the sizes of a model's symbols."""
