"""Modules that an exported package of kernels is given as they are: they import torch and triton, and nothing of Tapestry."""
