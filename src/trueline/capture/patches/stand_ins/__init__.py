"""What the user's modules get in place of Python's builtins, `math`, `itertools` and `numpy` while they are traced."""
