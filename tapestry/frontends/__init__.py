"""Ways in: what a model may be given as, each made an ONNX file (or IR text) that the compiler reads."""
