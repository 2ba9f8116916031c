"""Operators by their definitions: a function of standard operators for each node, with its own attributes and inputs."""


def swish(b):
    """x * sigmoid(beta * x)."""
    x = b.ins[0]
    return [b("Mul", x, b("Sigmoid", b("Mul", x, b.scalar(b.get("beta", 1.0), x))))]


def rms_norm(b):
    """x / sqrt(mean of x² over the last axis + epsilon) * scale."""
    x, scale = b.ins
    root = b("Sqrt", b("Add", b.mean(b("Mul", x, x), -1), b.scalar(b.get("epsilon", 1e-5), x)))
    return [b("Mul", b("Div", x, root), scale)]
