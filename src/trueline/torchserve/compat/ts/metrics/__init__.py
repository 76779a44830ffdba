"""Metrics of handlers."""
