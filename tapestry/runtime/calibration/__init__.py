"""``tapestry calibrate``: what kernels, calls and messages take on this machine, measured, fitted and judged."""
