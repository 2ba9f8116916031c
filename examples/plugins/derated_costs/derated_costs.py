"""Seconds of a kernel: a roofline whose products reach half of the rate at a million FLOPs, and all of it far beyond."""

HALF = 1e6  # FLOPs


def seconds(kind, dtype, contraction, other, nbytes, device):
    """Of one kernel on one device: its class, the dtype that it multiplies, its FLOPs and bytes."""
    rate = device.rate(dtype) * contraction / (contraction + HALF)
    computing = contraction / rate if contraction else 0.0
    return device.launch + max(computing, nbytes / device.bandwidth) + other / device.vector
