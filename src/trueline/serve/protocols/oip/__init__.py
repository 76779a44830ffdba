"""The Open Inference Protocol over REST and gRPC, with binary tensors and repository calls."""
