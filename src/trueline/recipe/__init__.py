"""The recipe: what a researcher writes, found, checked and turned into one value. Imports no torch."""
