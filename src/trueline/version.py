"""Trueline's version, in a module of its own: `import trueline.version` imports nothing else."""

__version__ = "0.1.0"
