"""Batching of requests: policy, queue, latency model, and which rows may share a run."""
