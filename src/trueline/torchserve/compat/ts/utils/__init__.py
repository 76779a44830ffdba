"""Utilities that handlers import."""
