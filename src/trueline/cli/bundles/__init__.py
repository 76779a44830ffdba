"""`trueline bundle ...`: inspect, verify, sign and export bundles."""
