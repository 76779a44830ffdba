"""From an exported program to ONNX: emission, translations of operators, workarounds of the exporter."""
