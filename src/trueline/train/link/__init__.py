"""The line between a worker and its master."""
