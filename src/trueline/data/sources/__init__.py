"""Where records come from when it is no file: databases, map-style datasets, mixtures."""
