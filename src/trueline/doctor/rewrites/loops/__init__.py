"""Rewrites of for loops into scans, recurrences and vectorized code."""
