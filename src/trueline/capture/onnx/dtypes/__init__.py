"""Numbers of other dtypes than single precision in ONNX."""
