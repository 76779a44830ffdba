"""The steps of the line, from recipe to server, one command each."""
