"""Who is in the job, decided by pure functions of (state, event, now)."""
