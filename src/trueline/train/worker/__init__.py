"""The worker process and its line to the master."""
