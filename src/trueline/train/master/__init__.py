"""The master's shell: server, service, journal, progress, publisher, failover. No torch."""
