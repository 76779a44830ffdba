"""The user's recipe: loaded, checked and turned into one value. Imports no torch."""
