"""HTTP connections: messages, parser, limits, authentication, TLS, tracing. Knows no models."""
