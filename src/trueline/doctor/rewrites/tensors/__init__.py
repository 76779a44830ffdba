"""Rewrites of indexing, masks, chunks and sizes into tensor operations."""
