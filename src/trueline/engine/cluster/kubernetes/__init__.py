"""Kubernetes: each submission is a bare pod, which no controller starts again."""
