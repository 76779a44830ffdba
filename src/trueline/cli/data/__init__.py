"""`trueline data ...`: check, split, inspect, verify and convert records."""
