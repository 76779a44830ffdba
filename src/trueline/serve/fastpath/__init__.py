"""Caches that answer requests of a known form without parsing them again; see `fast_path`."""
