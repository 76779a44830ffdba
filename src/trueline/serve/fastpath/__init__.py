"""Caches that answer requests of a known form without parsing them again."""
