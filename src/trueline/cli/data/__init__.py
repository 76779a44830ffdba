"""`trueline data ...`: inspect, verify and convert records."""
