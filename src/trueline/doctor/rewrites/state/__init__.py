"""Rewrites of Python attributes and state that a model keeps."""
