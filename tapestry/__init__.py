"""Tapestry: from an ONNX model to a verified, sharded execution plan and the kernels that run it."""
