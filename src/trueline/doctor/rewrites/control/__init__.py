"""Rewrites of branches, exceptions, side effects and while loops."""
