"""One file for each program format: emit, open as a Session; and what they share: compare, probe, prove."""
