"""Default handlers, and the classes that handlers of archives derive from."""
