"""One optimizer step: reading, forward, contribution, ledger, commit, checkpoint."""
