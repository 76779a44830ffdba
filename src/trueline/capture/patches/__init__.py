"""Patches that are active only while torch traces a model."""
