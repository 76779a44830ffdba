"""Jobs in a store: submitted to a scheduler's hosts, halted and resumed from any machine that sees the store."""
