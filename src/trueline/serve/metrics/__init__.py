"""Metrics of the server: Prometheus, GPUs, the dashboard."""
