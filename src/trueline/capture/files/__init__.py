"""Capture of models that come as files: exported programs, TorchScript, ONNX, model folders."""
