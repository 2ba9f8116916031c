"""One block of an operation as nodes of plain ONNX."""
