"""What a handler counts ends on the server's /metrics page."""
