"""Tensors in the bodies of requests and answers: JSON and binary."""
