"""Inspecting, verifying and writing record files."""
