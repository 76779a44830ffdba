"""Functions of statistics in ONNX: of gamma, of the normal distribution's quantiles, of Bessel."""
