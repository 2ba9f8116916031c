"""Operations of a plan as ONNX nodes."""
